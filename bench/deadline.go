package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder"
)

// deadline lets many messages fall due at one instant.
func deadline(ctx context.Context, l *lab) (_ *section, err error) {
	const unit = 10 * time.Millisecond
	spread := pick(l, time.Second, 5*time.Second)
	messages := pick(l, 1_000, 20_000)
	exact, err := ladder.New(ladder.Config{Name: "deadline", Unit: unit})
	if err != nil {
		return nil, err
	}
	slack, err := ladder.New(ladder.Config{Name: "deadline", Unit: unit, Slack: 0.125})
	if err != nil {
		return nil, err
	}
	if err := with(l.url, func(ch *amqp.Channel) error {
		if _, err := ch.QueueDeclare(sinkName, true, false, false, false, amqp.Table{argQueueType: "quorum"}); err != nil {
			return err
		}
		return errors.Join(exact.Declare(ctx, ch), exact.Bind(ctx, ch, sinkName, destination))
	}); err != nil {
		return nil, err
	}
	defer func() {
		err = errors.Join(err, with(l.url, func(ch *amqp.Channel) error {
			_, err := ch.QueueDelete(sinkName, false, false, false)
			return err
		}))
	}()

	variants := []struct {
		name   string
		ladder *ladder.Ladder
		jitter time.Duration
	}{
		{"one instant", exact, 0},
		{"one instant, slack 12.5 %", slack, 0},
		{fmt.Sprintf("instants spread over %s", spread), exact, spread},
	}
	drained, late := new(runs), make(map[string][]time.Duration)
	if err := interleaved(pick(l, 1, 2), variants, func(v struct {
		name   string
		ladder *ladder.Ladder
		jitter time.Duration
	},
	) error {
		last, sample, err := allDueAt(ctx, l, v.ladder, messages, v.jitter)
		if err != nil {
			return fmt.Errorf("%s: %w", v.name, err)
		}
		drained.add(v.name, last.Seconds())
		late[v.name] = append(late[v.name], sample...)
		l.say("%-28s the last after %.1f s", v.name, last.Seconds())
		return nil
	}); err != nil {
		return nil, err
	}
	t := table{columns: []string{"", "the last after the first instant, s", "p50, ms", "p90, ms", "p99, ms", "max, ms", "early", "messages"}}
	for _, v := range variants {
		sample := late[v.name]
		slices.Sort(sample)
		t.rows = append(t.rows, append([]string{v.name, number(drained.median(v.name))}, describe(sample)...))
	}
	return &section{
		title: "One deadline",
		text: fmt.Sprintf("%d messages are due at the same instant, about %s after they are published in one batch, on quorum queues. "+
			"Lateness counts from the instant that was asked for.", messages, pick(l, quickAhead, fullAhead)),
		tables: []table{t},
	}, nil
}

const (
	quickAhead = 2 * time.Second
	fullAhead  = 6 * time.Second
)

// allDueAt publishes messages that are due together, or within the jitter after it, and returns when the last arrived,
// counted from the instant, and the lateness of each.
func allDueAt(ctx context.Context, l *lab, of *ladder.Ladder, messages int, jitter time.Duration) (last time.Duration, late []time.Duration, err error) {
	publisher, err := ladder.NewPublisher(ctx, of, ladder.PublisherConfig{URLs: []string{l.url}})
	if err != nil {
		return 0, nil, err
	}
	defer func() { err = errors.Join(err, publisher.Close(context.WithoutCancel(ctx))) }()
	instant := time.Now().Add(pick(l, quickAhead, fullAhead)).Truncate(time.Second)
	batch := make([]ladder.Message, messages)
	for i := range batch {
		due := instant
		if jitter > 0 {
			due = due.Add(rand.N(jitter))
		}
		batch[i] = ladder.Message{Destination: destination, At: due, Publishing: stamped(due, 0)}
	}
	if err := publisher.PublishBatch(ctx, batch); err != nil {
		return 0, nil, err
	}
	if time.Now().After(instant) {
		return 0, nil, fmt.Errorf("this machine needs longer to publish %d messages than until they are due", messages)
	}
	arriving, err := openSink(l.url)
	if err != nil {
		return 0, nil, err
	}
	defer func() { err = errors.Join(err, arriving.close()) }()
	err = arriving.take(ctx, func(body []byte, at time.Time) bool {
		due, _ := unstamp(body)
		late = append(late, at.Sub(due))
		last = at.Sub(instant)
		return len(late) < messages
	})
	return last, late, err
}
