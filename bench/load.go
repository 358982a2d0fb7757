package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	bodySize = 256
	window   = 1000 // confirms that a bare sender has outstanding, as a Publisher has by default
	prefetch = 1000
)

var errNacked = errors.New("nacked by the broker")

// A letter is a message for a bare channel.
type letter struct {
	exchange, key string
	publishing    amqp.Publishing
}

// stamped is a message whose body begins with the instant it is due, to the millisecond as the ladder's header, and
// with a number.
func stamped(due time.Time, n uint32) amqp.Publishing {
	body := make([]byte, bodySize)
	binary.BigEndian.PutUint64(body, uint64(due.UnixMilli()))
	binary.BigEndian.PutUint32(body[8:], n)
	return amqp.Publishing{DeliveryMode: amqp.Persistent, Body: body}
}

// unstamp reads what stamped wrote.
func unstamp(body []byte) (due time.Time, n uint32) {
	return time.UnixMilli(int64(binary.BigEndian.Uint64(body))), binary.BigEndian.Uint32(body[8:])
}

// dial opens a connection with one channel. Closing the connection closes both.
func dial(url string) (*amqp.Connection, *amqp.Channel, error) {
	conn, err := amqp.Dial(url)
	if err != nil {
		return nil, nil, err
	}
	ch, err := conn.Channel()
	if err != nil {
		return nil, nil, errors.Join(err, conn.Close())
	}
	return conn, ch, nil
}

// with gives a channel on a connection of its own to a function.
func with(url string, use func(*amqp.Channel) error) error {
	conn, ch, err := dial(url)
	if err != nil {
		return err
	}
	return errors.Join(use(ch), conn.Close())
}

// stream sends letters until next has no more, with up to most confirms outstanding: what one goroutine can do with
// amqp091-go alone. It returns when the broker has confirmed all.
func stream(ctx context.Context, ch *amqp.Channel, most int, next func() (letter, bool, error)) error {
	if err := ch.Confirm(false); err != nil {
		return err
	}
	outstanding := make([]*amqp.DeferredConfirmation, 0, most)
	oldest := 0
	settle := func() error {
		acked, err := outstanding[oldest].WaitContext(ctx)
		if err == nil && !acked {
			err = errNacked
		}
		oldest = (oldest + 1) % len(outstanding)
		return err
	}
	for {
		m, more, err := next()
		if err != nil {
			return err
		}
		if !more {
			break
		}
		if len(outstanding) == most {
			if err := settle(); err != nil {
				return err
			}
		}
		confirm, err := ch.PublishWithDeferredConfirmWithContext(ctx, m.exchange, m.key, false, false, m.publishing)
		if err != nil {
			return err
		}
		if len(outstanding) < most {
			outstanding = append(outstanding, confirm)
		} else {
			outstanding[(oldest+most-1)%most] = confirm
		}
	}
	for range outstanding {
		if err := settle(); err != nil {
			return err
		}
	}
	return nil
}

// A sink consumes the queue that all systems deliver to.
type sink struct {
	conn       *amqp.Connection
	ch         *amqp.Channel
	deliveries <-chan amqp.Delivery
}

func openSink(url string) (*sink, error) {
	conn, ch, err := dial(url)
	if err != nil {
		return nil, err
	}
	if err := ch.Qos(prefetch, 0, false); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	deliveries, err := ch.Consume(sinkName, "", false, false, false, false, nil)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &sink{conn: conn, ch: ch, deliveries: deliveries}, nil
}

// take calls got for each message, until it returns false. It acknowledges them by the dozen.
func (s *sink) take(ctx context.Context, got func(body []byte, at time.Time) bool) error {
	const together = 50
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case d, ok := <-s.deliveries:
			if !ok {
				return errors.New("the consumer's channel was closed")
			}
			more := got(d.Body, time.Now())
			if !more || n%together == 0 {
				if err := d.Ack(true); err != nil {
					return fmt.Errorf("acknowledging: %w", err)
				}
			}
			if !more {
				return nil
			}
		}
	}
}

func (s *sink) close() error { return s.conn.Close() }
