package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder"
)

// growth sends messages that all have another delay: with a queue for each delay, declared before each publish as
// machinery does, and with the ladder.
func growth(ctx context.Context, l *lab) (*section, error) {
	delays := pick(l, 300, 10_000)
	t := table{columns: []string{"", "queues", "broker memory, MiB", "seconds"}}
	s := &section{
		title: "Growth of the topology",
		text: fmt.Sprintf("%d messages, each with another delay. A queue per delay is declared before each publish, classic and with an expiry, as machinery does. "+
			"The ladder has 20 levels of quorum queues, and its publisher one goroutine. Memory is what the broker had more than before, with a broker of its own for each.", delays),
	}
	delay := func(i int) time.Duration { return time.Duration(3600+i) * time.Second }
	f := figure{name: "growth", title: fmt.Sprintf("Queues for %d different delays", delays), x: "queues"}
	for _, of := range []struct {
		name string
		send func(url string) (queues int, err error)
	}{
		{"a queue per delay", func(url string) (int, error) {
			return delays, with(url, func(ch *amqp.Channel) error { return queuePerDelay(ctx, ch, delays, delay) })
		}},
		{"ladder", func(url string) (int, error) {
			one, err := ladder.New(ladder.Config{})
			if err != nil {
				return 0, err
			}
			publisher, err := ladder.NewPublisher(ctx, one, ladder.PublisherConfig{URLs: []string{url}})
			if err != nil {
				return 0, err
			}
			for i := range delays {
				if err = publisher.PublishDelayed(ctx, destination, delay(i), stamped(time.Time{}, 0)); err != nil {
					break
				}
			}
			return len(one.Topology().Queues), errors.Join(err, publisher.Close(context.WithoutCancel(ctx)))
		}},
	} {
		queues, took, memory, err := onNewBroker(ctx, of.send)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", of.name, err)
		}
		l.say("%-20s %6d queues, %.0f s", of.name, queues, took.Seconds())
		t.rows = append(t.rows, []string{of.name, strconv.Itoa(queues), number(float64(memory) / (1 << 20)), number(took.Seconds())})
		f.bars = append(f.bars, bar{name: of.name, value: float64(queues), ours: of.name == "ladder"})
	}
	s.tables, s.figures = []table{t}, []figure{f}
	return s, nil
}

// onNewBroker starts a broker, calls send, and says how long that took and what memory it cost.
func onNewBroker(ctx context.Context, send func(url string) (int, error)) (queues int, took time.Duration, memory int64, err error) {
	broker, url, err := private(ctx)
	if err != nil {
		return 0, 0, 0, err
	}
	defer func() { err = errors.Join(err, broker.Close()) }() //nolint:contextcheck // it ends when ctx has ended, too
	before, err := measure(ctx, broker)
	if err != nil {
		return 0, 0, 0, err
	}
	start := time.Now()
	if queues, err = send(url); err != nil {
		return 0, 0, 0, err
	}
	took = time.Since(start)
	after, err := measure(ctx, broker)
	return queues, took, after.memory - before.memory, err
}

func queuePerDelay(ctx context.Context, ch *amqp.Channel, delays int, delay func(int) time.Duration) error {
	if err := ch.Confirm(false); err != nil {
		return err
	}
	for i := range delays {
		ttl := delay(i).Milliseconds()
		name := fmt.Sprintf("delay.%d.%s", ttl, destination)
		_, err := ch.QueueDeclare(name, true, false, false, false, amqp.Table{
			"x-dead-letter-exchange": "", "x-dead-letter-routing-key": sinkName, "x-message-ttl": ttl, "x-expires": 2 * ttl,
		})
		if err != nil {
			return err
		}
		confirm, err := ch.PublishWithDeferredConfirmWithContext(ctx, "", name, false, false, stamped(time.Time{}, 0))
		if err != nil {
			return err
		}
		if acked, err := confirm.WaitContext(ctx); err != nil || !acked {
			return cmp.Or(err, errNacked)
		}
	}
	return nil
}
