package ladder

import (
	"context"
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder/internal/seam"
)

func init() { //nolint:gochecknoinits // what package laddertest uses cannot be reached in another way
	seam.NewPublisher = newInMemoryPublisher
	seam.NewWorker = newInMemoryWorker
}

func newInMemoryPublisher(l *Ladder, config PublisherConfig, take func(exchange, key string, msg amqp.Publishing) error) (*Publisher, error) {
	config, err := config.withDefaults(l)
	if err != nil {
		return nil, err
	}
	checked := func(exchange, key string, msg amqp.Publishing) error {
		size := headerFrameSize(&msg)
		if exchange != "" {
			size += l.deathSize()
		}
		if size > usualFrame {
			return fmt.Errorf("%w: its headers have %d bytes; with what the broker adds on the way they do not fit into a frame of %d",
				ErrInvalidMessage, headerFrameSize(&msg), usualFrame)
		}
		return take(exchange, key, msg)
	}
	return &Publisher{ladder: l, config: config, inMemory: checked}, nil
}

// usualFrame is RabbitMQ's frame_max by default.
const usualFrame = 128 << 10

func newInMemoryWorker(
	l *Ladder, config ConsumerConfig, handler Handler, publisher *Publisher, settle func(Outcome) error,
) (func(context.Context, amqp.Delivery), ConsumerConfig, error) {
	config, err := config.withDefaults(l)
	if err != nil {
		return nil, config, err
	}
	w := newWorker(l, config, handler, publisher)
	handle := func(ctx context.Context, raw amqp.Delivery) {
		w.process(ctx, ctx, raw, nil, func(e *HandleEvent) {
			if err := settle(e.Outcome); err != nil {
				e.Outcome, e.SettleErr = OutcomeLost, fmt.Errorf("%w: %w", ErrSessionLost, err)
			}
			if config.Observer != nil {
				config.Observer.Handled(ctx, *e)
			}
		})
	}
	return handle, config, nil
}
