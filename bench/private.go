package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder/internal/brokertest"
)

// private starts a broker for a scenario that fills it, changes its settings, or restarts it.
func private(ctx context.Context) (*brokertest.Broker, string, error) {
	broker, err := brokertest.StartPrivate(ctx)
	if err != nil {
		return nil, "", err
	}
	url := broker.AMQPURL()
	return broker, url, nil
}

// A footprint is what a broker takes up.
type footprint struct {
	memory, disk int64 // bytes
}

// measure asks a broker what it takes up, after it has collected its garbage.
func measure(ctx context.Context, broker *brokertest.Broker) (footprint, error) {
	const ask = `[garbage_collect(P) || P <- processes()],
		Directory = try rabbit:data_dir() catch _:_ -> rabbit_mnesia:dir() end,
		[Kilobytes | _] = string:lexemes(os:cmd("du -sk " ++ Directory), "\t "),
		lists:flatten(io_lib:format("~b ~s", [erlang:memory(total), Kilobytes])).`
	answer, err := broker.Ctl(ctx, "eval", ask)
	if err != nil {
		return footprint{}, err
	}
	var f footprint
	fields := strings.Fields(strings.Trim(strings.TrimSpace(answer), `"[]`))
	if len(fields) == 2 {
		if f.memory, err = strconv.ParseInt(fields[0], 10, 64); err == nil {
			f.disk, err = strconv.ParseInt(fields[1], 10, 64)
			f.disk *= 1024
		}
	}
	if err != nil || f.disk == 0 {
		return footprint{}, fmt.Errorf("the broker's answer is not two numbers: %q", answer)
	}
	return f, nil
}

// waitForReady waits until queues have a number of ready messages together.
func waitForReady(ctx context.Context, url string, queues []string, messages int) error {
	for {
		ready := 0
		if err := with(url, func(ch *amqp.Channel) error {
			for _, name := range queues {
				q, err := ch.QueueDeclarePassive(name, true, false, false, false, nil)
				if err != nil {
					return err
				}
				ready += q.Messages
			}
			return nil
		}); err != nil {
			return err
		}
		if ready == messages {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d messages: %w", ready, messages, ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}
