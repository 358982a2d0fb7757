package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder"
)

// publish measures how fast messages are confirmed: by the publisher in several ways, and by amqp091-go alone with as
// many confirms outstanding. All go to the same queues, with the same keys.
func publish(ctx context.Context, l *lab) (_ *section, err error) {
	ours, err := ladder.New(ladder.Config{Name: "publish", Levels: 12})
	if err != nil {
		return nil, err
	}
	publisher, err := ladder.NewPublisher(ctx, ours, ladder.PublisherConfig{URLs: []string{l.url}})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, publisher.Close(context.WithoutCancel(ctx))) }()
	conn, ch, err := dial(l.url)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()

	messages := pick(l, 2_000, 20_000)
	delay := func(i int) time.Duration { return time.Duration(1024+i%1024) * time.Second }
	bare := func(most int) func(n int) error {
		return func(n int) error {
			i := 0
			return stream(ctx, ch, most, func() (letter, bool, error) {
				if i == n {
					return letter{}, false, nil
				}
				i++
				r, err := ours.Route(delay(i), destination)
				due := time.Now().Add(delay(i))
				m := letter{r.Exchange, r.Key, stamped(due, 0)}
				m.publishing.MessageId = fmt.Sprintf("%032d", i)
				m.publishing.Timestamp = due
				m.publishing.Headers = amqp.Table{ladder.HeaderNotBefore: due.UnixMilli()}
				return m, true, err
			})
		}
	}
	goroutines := func(most int) func(n int) error {
		return func(n int) error {
			work, failed := make(chan int), make(chan error, most)
			var working sync.WaitGroup
			for range most {
				working.Go(func() {
					for i := range work {
						if err := publisher.PublishDelayed(ctx, destination, delay(i), stamped(time.Time{}, 0)); err != nil {
							select {
							case failed <- err:
							default:
							}
						}
					}
				})
			}
			for i := range n {
				work <- i
			}
			close(work)
			working.Wait()
			close(failed)
			return <-failed
		}
	}
	batch := func(n int) error {
		all := make([]ladder.Message, n)
		for i := range all {
			all[i] = ladder.Message{Destination: destination, Delay: delay(i), Publishing: stamped(time.Time{}, 0)}
		}
		return publisher.PublishBatch(ctx, all)
	}
	type variant struct {
		name string
		part int // of the messages: the slow ones get fewer
		send func(n int) error
	}
	const (
		bareOne, bareMany         = "amqp091-go, one by one", "amqp091-go, window of 1,000"
		bare64                    = "amqp091-go, window of 64"
		one, eight, goroutines64  = "PublishDelayed, 1 goroutine", "PublishDelayed, 8 goroutines", "PublishDelayed, 64 goroutines"
		goroutines256, batchOfAll = "PublishDelayed, 256 goroutines", "PublishBatch"
		goroutines1000            = "PublishDelayed, 1,000 goroutines"
	)
	variants := []variant{
		{bareOne, 10, bare(1)},
		{bare64, 1, bare(64)},
		{bareMany, 1, bare(window)},
		{one, 10, goroutines(1)},
		{eight, 4, goroutines(8)},
		{goroutines64, 1, goroutines(64)},
		{goroutines256, 1, goroutines(256)},
		{goroutines1000, 1, goroutines(1000)},
		{batchOfAll, 1, batch},
	}
	var measured runs
	if err := interleaved(pick(l, 1, 5), variants, func(v variant) error {
		if err := purge(ch, ours); err != nil {
			return err
		}
		n := messages / v.part
		start := time.Now()
		if err := v.send(n); err != nil {
			return fmt.Errorf("%s: %w", v.name, err)
		}
		measured.add(v.name, float64(n)/time.Since(start).Seconds())
		l.say("%-34s %6.0f/s", v.name, float64(n)/time.Since(start).Seconds())
		return nil
	}); err != nil {
		return nil, err
	}
	if err := purge(ch, ours); err != nil {
		return nil, err
	}

	t := table{columns: []string{"", "messages per second, median", "lowest", "highest", "to the bare window of 1,000"}}
	f := figure{name: "publish", title: "Confirmed publishes per second", x: "messages per second"}
	for _, v := range variants {
		low, high := measured.spread(v.name)
		t.rows = append(t.rows, []string{v.name, number(measured.median(v.name)), number(low), number(high), number(measured.ratio(v.name, bareMany))})
		f.bars = append(f.bars, bar{name: v.name, value: measured.median(v.name), ours: v.name[0] == 'P'})
	}
	return &section{
		title: "Publishing",
		text: fmt.Sprintf("Persistent messages of %d bytes into quorum queues, each confirmed. amqp091-go alone sends the same "+
			"exchanges, keys, properties and headers from one goroutine.", bodySize),
		tables: []table{t}, figures: []figure{f},
		targets: []target{
			{what: "64 goroutines to a bare window of 64", got: measured.ratio(goroutines64, bare64), want: 0.95},
			{what: "64 goroutines to one by one", got: measured.ratio(goroutines64, bareOne), want: 4},
			{what: "PublishBatch to a bare window of 1,000", got: measured.ratio(batchOfAll, bareMany), want: 0.95},
			{what: "PublishBatch to one by one", got: measured.ratio(batchOfAll, bareOne), want: 4},
		},
	}, nil
}

// purge empties the level queues.
func purge(ch *amqp.Channel, l *ladder.Ladder) error {
	for k := range l.Config().Levels {
		if _, err := ch.QueuePurge(l.Level(k), false); err != nil {
			return fmt.Errorf("purging %s: %w", l.Level(k), err)
		}
	}
	return nil
}
