package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder"
)

// consume empties a queue with a consumer whose handler does nothing, and with a bare loop that acknowledges each
// message. Each round counts from its first message to its last.
func consume(ctx context.Context, l *lab) (_ *section, err error) {
	const (
		queue, most      = "bench.consume", 100
		bare, consumer   = "bare loop", "Consumer, 16 handlers"
		consumerOfOne    = "Consumer, 1 handler"
		several, withOne = 16, 1
	)
	messages := pick(l, 2_000, 20_000)
	ours, err := ladder.New(ladder.Config{Name: "consume", Levels: 4})
	if err != nil {
		return nil, err
	}
	publisher, err := ladder.NewPublisher(ctx, ours, ladder.PublisherConfig{URLs: []string{l.url}})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, publisher.Close(context.WithoutCancel(ctx))) }()
	if err := with(l.url, func(ch *amqp.Channel) error {
		arguments := amqp.Table{argQueueType: "quorum", "x-delivery-limit": int64(math.MaxInt32)} // as a Consumer declares it
		if _, err := ch.QueueDeclare(queue, true, false, false, false, arguments); err != nil {
			return err
		}
		return ours.Bind(ctx, ch, queue, queue)
	}); err != nil {
		return nil, err
	}
	batch := make([]ladder.Message, messages)
	for i := range batch {
		batch[i] = ladder.Message{Destination: queue, Publishing: stamped(time.Time{}, 0)}
	}
	withConsumer := func(concurrency int) func() (time.Duration, error) {
		return func() (time.Duration, error) {
			return drain(ctx, ours, ladder.ConsumerConfig{
				URLs: []string{l.url}, Queue: queue, Prefetch: most, Concurrency: concurrency,
			}, int64(messages))
		}
	}
	type variant struct {
		name string
		run  func() (time.Duration, error)
	}
	variants := []variant{
		{bare, func() (time.Duration, error) { return drainBare(ctx, l.url, queue, most, messages) }},
		{consumer, withConsumer(several)},
		{consumerOfOne, withConsumer(withOne)},
	}
	var measured runs
	if err := interleaved(pick(l, 1, 3), variants, func(v variant) error {
		if err := publisher.PublishBatch(ctx, batch); err != nil {
			return err
		}
		took, err := v.run()
		if err != nil {
			return fmt.Errorf("%s: %w", v.name, err)
		}
		measured.add(v.name, float64(messages)/took.Seconds())
		l.say("%-34s %6.0f/s", v.name, float64(messages)/took.Seconds())
		return nil
	}); err != nil {
		return nil, err
	}
	t := table{columns: []string{"", "messages per second, median", "lowest", "highest", "to the bare loop"}}
	for _, v := range variants {
		low, high := measured.spread(v.name)
		t.rows = append(t.rows, []string{v.name, number(measured.median(v.name)), number(low), number(high), number(measured.ratio(v.name, bare))})
	}
	return &section{
		title:  "Consuming",
		text:   fmt.Sprintf("A quorum queue with %d messages is emptied with a prefetch of %d; each message is acknowledged on its own.", messages, most),
		tables: []table{t},
	}, nil
}

// drainBare receives and acknowledges messages in a loop.
func drainBare(ctx context.Context, url, queue string, most, messages int) (took time.Duration, err error) {
	err = with(url, func(ch *amqp.Channel) error {
		if err := ch.Qos(most, 0, false); err != nil {
			return err
		}
		deliveries, err := ch.ConsumeWithContext(ctx, queue, "", false, false, false, false, nil)
		if err != nil {
			return err
		}
		var start time.Time
		for n := range messages {
			d, ok := <-deliveries
			if !ok {
				return errors.New("the consumer's channel was closed")
			}
			if n == 0 {
				start = time.Now()
			}
			if err := d.Ack(false); err != nil {
				return err
			}
		}
		took = time.Since(start)
		// The broker forgets acknowledgements that it is still holding back when the channel closes: the next round would
		// have these messages as well.
		time.Sleep(time.Second)
		return nil
	})
	return took, err
}

// drain runs a consumer until it has had all messages.
func drain(ctx context.Context, l *ladder.Ladder, config ladder.ConsumerConfig, messages int64) (time.Duration, error) {
	c, err := ladder.NewConsumer(l, config)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var n, start, end atomic.Int64
	err = c.Run(ctx, func(context.Context, *ladder.Delivery) error {
		switch n.Add(1) {
		case 1:
			start.Store(time.Now().UnixNano())
		case messages:
			end.Store(time.Now().UnixNano())
			cancel()
		}
		return nil
	})
	return time.Duration(end.Load() - start.Load()), err
}
