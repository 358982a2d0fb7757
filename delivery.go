package ladder

import (
	"math"
	"slices"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// A Delivery is a message that a consumer received, with what the ladder knows
// of it.
type Delivery struct {
	// Delivery is the message as amqp091-go has it, but without the broker's
	// x-death headers and their like, which must not be published again.
	// In a [Handler], [Consumer.Run] settles the message: Ack, Nack and
	// Reject return an error and do nothing.
	amqp.Delivery

	// Queue is the queue that a [Consumer] received the message from. [Ladder.ParseDelivery]
	// leaves it empty.
	Queue string

	// Destination is what the publisher sent the message to, also when it comes for
	// another attempt, or was dead-lettered by the queue that it had come to: the routing key
	// without the ladder's bits. For a message that did not come through the ladder it is the
	// whole routing key.
	Destination string

	// NotBefore is the instant at which the message was due, to the millisecond,
	// by its publisher's clock. It is zero if the message does not say.
	NotBefore time.Time

	// Lateness is how long after NotBefore the message was received, by this
	// machine's clock. It is negative where that clock is behind the
	// publisher's, and 0 if NotBefore is zero.
	Lateness time.Duration

	// Attempt counts the attempts to handle the message, from 1. It does not count the
	// times that the message went back into its queue, as after a lost connection (see
	// Redelivered), and not a [RetryAfter].
	Attempt int

	// Failure tells of the last attempt that failed, or is nil if none did.
	Failure *Failure
}

// A Failure is what is known of the attempts that failed: in the handler of a
// further attempt, and of a message in a failed queue.
type Failure struct {
	// Queue is the queue that the message was consumed from.
	Queue string
	// Reason is the error of the last attempt, cut at 1 KiB.
	Reason string
	// First and Last are when the first and the last attempt failed, to the
	// millisecond, by the consumer's clock.
	First, Last time.Time
}

// ParseDelivery returns what the ladder knows of a message, for programs with a
// consumer of their own. It works for each message: see [Delivery] for what it
// says of one that did not come through the ladder.
func (l *Ladder) ParseDelivery(d amqp.Delivery) *Delivery {
	parsed := &Delivery{Delivery: d, Destination: l.destinationOf(d), Attempt: 1}
	if ms, ok := integer(d.Headers[HeaderNotBefore]); ok {
		parsed.NotBefore = time.UnixMilli(ms)
		parsed.Lateness = time.Since(parsed.NotBefore)
	}
	if attempt, ok := integer(d.Headers[HeaderAttempt]); ok && attempt > 1 {
		parsed.Attempt = int(min(attempt, math.MaxInt32))
	}
	parsed.Failure = parseFailure(d.Headers)
	parsed.Headers = make(amqp.Table, len(d.Headers))
	for key, value := range d.Headers {
		if !isBrokerHeader(key) {
			parsed.Headers[key] = value
		}
	}
	return parsed
}

// destinationOf looks for a message's destination where it is told: in the header that
// retries have, in the key that it came with, or, where the queue that it had come to has
// dead-lettered it, in the key that it had before.
func (l *Ladder) destinationOf(d amqp.Delivery) string {
	if destination, ok := d.Headers[HeaderDestination].(string); ok {
		return destination
	}
	if destination, ok := l.destinationIn(d.Exchange, d.RoutingKey); ok {
		return destination
	}
	for _, death := range deaths(d.Headers) {
		exchange, _ := death["exchange"].(string)
		keys, _ := death["routing-keys"].([]any)
		for _, key := range keys {
			key, _ := key.(string)
			if destination, ok := l.destinationIn(exchange, key); ok {
				return destination
			}
		}
	}
	return d.RoutingKey
}

// destinationIn returns the destination in a key, if it is one of the ladder's.
func (l *Ladder) destinationIn(exchange, key string) (string, bool) {
	if !l.owns(exchange) {
		return "", false
	}
	_, destination, err := l.ParseKey(key)
	return destination, err == nil
}

// deaths returns what the broker notes of each queue that has dead-lettered a message,
// the last one first.
func deaths(headers amqp.Table) []amqp.Table {
	list, _ := headers["x-death"].([]any)
	var tables []amqp.Table
	for _, entry := range list {
		if table, ok := entry.(amqp.Table); ok {
			tables = append(tables, table)
		}
	}
	return tables
}

func parseFailure(headers amqp.Table) *Failure {
	reason, ok := headers[HeaderFailureReason].(string)
	if !ok {
		return nil
	}
	f := &Failure{Reason: reason}
	f.Queue, _ = headers[HeaderFailureQueue].(string)
	if ms, ok := integer(headers[HeaderFailureFirst]); ok {
		f.First = time.UnixMilli(ms)
	}
	if ms, ok := integer(headers[HeaderFailureLast]); ok {
		f.Last = time.UnixMilli(ms)
	}
	return f
}

// owns tells whether messages come to queues from this exchange with the
// ladder's bits in front of their key. With direct bindings the last one is
// often a level's, which passes on to the delivery exchange.
func (l *Ladder) owns(exchange string) bool {
	return strings.HasPrefix(exchange, l.geometry) && (exchange == l.delivery || slices.Contains(l.levels, exchange))
}

// integer returns an integer header of any width: other clients choose theirs.
func integer(value any) (int64, bool) {
	switch v := value.(type) {
	case int64:
		return v, true
	case int32:
		return int64(v), true
	case int16:
		return int64(v), true
	case int8:
		return int64(v), true
	case uint32:
		return int64(v), true
	case uint16:
		return int64(v), true
	case byte:
		return int64(v), true
	}
	return 0, false
}
