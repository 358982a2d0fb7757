package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

// pending fills a ladder, and looks at what that costs the broker, whether publishing becomes slower, and how long the
// broker takes to restart.
func pending(ctx context.Context, l *lab) (_ *section, err error) {
	steps := pick(l, []int{5_000}, []int{100_000, 1_000_000})
	broker, url, err := private(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, broker.Close()) }() //nolint:contextcheck // it ends when ctx has ended, too
	one, err := ladder.New(ladder.Config{})
	if err != nil {
		return nil, err
	}
	publisher, err := ladder.NewPublisher(ctx, one, ladder.PublisherConfig{URLs: []string{url}})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, publisher.Close(context.WithoutCancel(ctx))) }()

	// The first messages find a broker that is not warm, and do not count.
	chunk := steps[0] / 10
	if _, err := fill(ctx, publisher, one, chunk); err != nil {
		return nil, err
	}
	empty, err := measure(ctx, broker)
	if err != nil {
		return nil, err
	}
	waiting, atFirst := 0, []float64{}
	t := table{columns: []string{"messages waiting", "publishes per second", "broker memory, bytes per message", "disk, bytes per message", "restart, s", "objects"}}
	f := figure{name: "pending", title: "Publishing while messages wait", x: "thousands of messages waiting", y: "publishes per second"}
	line := curve{name: "PublishBatch"}
	var atLast []float64
	for _, step := range steps {
		var rates []float64
		for waiting < step {
			rate, err := fill(ctx, publisher, one, chunk)
			if err != nil {
				return nil, err
			}
			waiting += chunk
			rates = append(rates, rate)
			line.points = append(line.points, struct{ X, Y float64 }{float64(waiting) / 1000, rate})
		}
		if len(atFirst) == 0 {
			atFirst = rates
		}
		atLast = rates[len(rates)-len(atFirst):]
		now, err := measure(ctx, broker)
		if err != nil {
			return nil, err
		}
		restart, err := restarted(ctx, broker, url, one, waiting+chunk)
		if err != nil {
			return nil, err
		}
		l.say("%9d waiting: %.0f/s, restart %.0f s", waiting, median(atLast), restart.Seconds())
		topology := one.Topology()
		t.rows = append(t.rows, []string{
			strconv.Itoa(waiting), number(median(atLast)),
			number(float64(now.memory-empty.memory) / float64(waiting)), number(float64(now.disk-empty.disk) / float64(waiting)),
			number(restart.Seconds()), strconv.Itoa(len(topology.Queues) + len(topology.Exchanges)),
		})
	}
	f.curves = []curve{line}
	return &section{
		title: "Messages waiting",
		text: fmt.Sprintf("Messages of %d bytes with delays that are uniform over 1 to 12 days, published in batches of %d on a broker of its own. "+
			"Restart is the time from the start of the broker until all messages are counted again.", bodySize, chunk),
		tables: []table{t}, figures: []figure{f},
		targets: []target{{
			what: fmt.Sprintf("rate with %d waiting to the rate of the first %d", waiting, steps[0]),
			got:  median(atLast) / median(atFirst), want: 0.9,
		}},
	}, nil
}

// fill publishes messages with long delays and returns how many a second.
func fill(ctx context.Context, publisher *ladder.Publisher, l *ladder.Ladder, messages int) (perSecond float64, err error) {
	batch := make([]ladder.Message, messages)
	for i := range batch {
		delay := 24*time.Hour + rand.N(l.Horizon()-24*time.Hour)
		batch[i] = ladder.Message{Destination: destination, Delay: delay, Publishing: stamped(time.Time{}, 0)}
	}
	start := time.Now()
	err = publisher.PublishBatch(ctx, batch)
	return float64(messages) / time.Since(start).Seconds(), err
}

// restarted stops and starts the broker, and returns how long it took until it had all messages again.
func restarted(ctx context.Context, broker *brokertest.Broker, url string, l *ladder.Ladder, messages int) (time.Duration, error) {
	if err := broker.Stop(ctx); err != nil {
		return 0, err
	}
	var queues []string
	for k := range l.Config().Levels {
		queues = append(queues, l.Level(k))
	}
	start := time.Now()
	if err := broker.Start(ctx); err != nil {
		return 0, err
	}
	// Queues have no leader for a moment after the start: asking them is refused then.
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	for {
		err := waitForReady(ctx, url, queues, messages)
		if err == nil {
			return time.Since(start), nil
		}
		if ctx.Err() != nil {
			return 0, err
		}
		time.Sleep(100 * time.Millisecond)
	}
}
