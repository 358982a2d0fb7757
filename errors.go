package ladder

import (
	"context"
	"errors"
	"fmt"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

var (
	// ErrInvalidConfig is wrapped by the errors of [New], [LevelsFor],
	// [NewPublisher] and [NewConsumer] for a setting that breaks a rule. The
	// error names the field, the value and the rule.
	ErrInvalidConfig = errors.New("ladder: invalid configuration")

	// ErrInvalidDestination is wrapped when a destination is empty, too long
	// for a routing key behind the ladder's bits, not valid UTF-8, or has a
	// word that is exactly "*" or "#", which a binding would take for a
	// wildcard.
	ErrInvalidDestination = errors.New("ladder: invalid destination")

	// ErrInvalidKey is wrapped by the errors of [Ladder.ParseKey] for a routing
	// key that is not one of the ladder's.
	ErrInvalidKey = errors.New("ladder: invalid routing key")

	// ErrDelayTooLong is wrapped by [DelayTooLongError]: a delay is beyond the
	// ladder's horizon.
	ErrDelayTooLong = errors.New("ladder: delay too long")

	// ErrTopologyMissing is wrapped when an exchange or queue is not there: the
	// ladder was not declared on this broker and virtual host, or was deleted.
	ErrTopologyMissing = errors.New("ladder: object missing on the broker")

	// ErrAccessRefused is wrapped when the broker refuses the user: wrong
	// credentials, no access to the virtual host or no such host, a reached
	// connection limit, or no permission for an object. The [*amqp.Error]
	// within has the broker's words.
	ErrAccessRefused = errors.New("ladder: access refused by the broker")

	// ErrInvalidMessage is wrapped when a message cannot be sent, or would not
	// survive the ladder: Expiration is set, a CC or BCC header, a header
	// value of a type that AMQP does not have, a property over 255 bytes,
	// headers too large for a frame, a UserId that is not the
	// connection's user, or a Priority on RabbitMQ 4.0 to 4.2, whose
	// quorum queues hold messages back by it. Also for a negative [WithSlack],
	// and when the broker closes the channel over this message for any other
	// reason.
	ErrInvalidMessage = errors.New("ladder: invalid message")

	// ErrMessageTooLarge is wrapped when a body is larger than
	// PublisherConfig.MaxMessageBytes, or than the broker's max_message_size.
	ErrMessageTooLarge = errors.New("ladder: message too large")

	// ErrNacked is wrapped when the broker answered basic.nack and still did
	// when time ran out: it could not take responsibility for the message, as
	// when a length limit, set by a policy, makes a level queue reject it. With
	// no delay, or on classic queues, it comes with [ErrOutcomeUnknown]: of
	// several queues one can have taken the message.
	ErrNacked = errors.New("ladder: nacked by the broker")

	// ErrUnroutable is wrapped when the broker returned the message: the
	// exchange of its first level, or the delivery exchange for no delay, has
	// no binding for it, and its alternate exchange leads to no queue. Parts
	// of the ladder are missing; or the queue, for a message that goes into one queue, as with
	// [Publisher.ReplayFailed]. A destination that nobody has bound is not
	// this: such a message is taken, and is parked when it is due.
	ErrUnroutable = errors.New("ladder: returned by the broker as unroutable")

	// ErrBlocked is wrapped when time ran out while the broker blocked the
	// connection: a memory or disk alarm.
	ErrBlocked = errors.New("ladder: connection blocked by the broker")

	// ErrNotConnected is wrapped when time ran out while there was no
	// connection. The reason for that is wrapped too.
	ErrNotConnected = errors.New("ladder: not connected")

	// ErrOutcomeUnknown is wrapped when a message was written, but the session
	// or the time ended before the broker's answer. The broker may have it
	// or not.
	ErrOutcomeUnknown = errors.New("ladder: outcome unknown")

	// ErrClosed is wrapped when the Publisher has been closed.
	ErrClosed = errors.New("ladder: publisher closed")

	// ErrRunTwice is returned by [Consumer.Run] when it has been called before.
	ErrRunTwice = errors.New("ladder: Run was called before")

	// ErrShutdownTimeout is returned by [Consumer.Run] when handlers were still
	// at work ShutdownTimeout after its context had ended. Their
	// messages went back into the queue. It is also the cause (context.Cause) of the
	// end of a handler's context shortly before that.
	ErrShutdownTimeout = errors.New("ladder: handlers did not end in time")

	// ErrSessionLost is wrapped when a message could not be acknowledged or given
	// back, because the connection that it came by has ended. The broker gives it
	// to someone else. It is also the cause (context.Cause) of the end of the handler's context
	// then.
	ErrSessionLost = errors.New("ladder: session lost")

	// ErrSettledByRun is returned by the Ack, Nack and Reject of a [Delivery]
	// in a [Handler]: Run settles the message by what the handler returns.
	ErrSettledByRun = errors.New("ladder: Run settles the message, by what the handler returns")
)

// A DelayTooLongError says that a delay is beyond the ladder's horizon. Nothing was
// sent; delays are never cut. It wraps [ErrDelayTooLong].
type DelayTooLongError struct {
	// Delay is the delay that was asked for.
	Delay time.Duration
	// Horizon is the longest delay the ladder can carry.
	Horizon time.Duration
}

// Error names both values.
func (e *DelayTooLongError) Error() string {
	return fmt.Sprintf("%v: %v is beyond the horizon of %v", ErrDelayTooLong, e.Delay, e.Horizon)
}

// Unwrap returns [ErrDelayTooLong].
func (e *DelayTooLongError) Unwrap() error { return ErrDelayTooLong }

func invalidConfig(field string, value any, rule string, args ...any) error {
	return fmt.Errorf("%w: %s %v: %w", ErrInvalidConfig, field, value, fmt.Errorf(rule, args...))
}

// A PublishError is the outcome of a message that was not confirmed. It wraps
// the reason: one of this package's Err values, and with it the context's or the
// broker's error where there is one.
type PublishError struct {
	// Destination is the message's destination.
	Destination string
	// MessageID is the message's MessageId, also where the publisher made it up.
	MessageID string
	// Attempts is the number of times the message was handed to a connection.
	Attempts int
	// MaybeSent is true if the broker may have the message. See [SafeToRetry].
	MaybeSent bool
	// Err is the reason.
	Err error
}

// Error gives the reason and names the message.
func (e *PublishError) Error() string {
	if e.Attempts == 0 {
		return e.Err.Error()
	}
	return fmt.Sprintf("%v (message %s to %s, attempts: %d)", e.Err, e.MessageID, e.Destination, e.Attempts)
}

// Unwrap returns the reason.
func (e *PublishError) Unwrap() error { return e.Err }

// SafeToRetry tells whether a publish that failed with err can be repeated
// without a second delivery: whether it is certain that the broker has not
// taken the message. It does not say that a repetition helps: what is invalid stays so. It is false for nil, for errors that are not of a publish,
// and for a [*BatchError] if it is false for one of its messages.
func SafeToRetry(err error) bool {
	if batch, ok := errors.AsType[*BatchError](err); ok {
		for _, failed := range batch.Failed {
			if !SafeToRetry(failed.Err) {
				return false
			}
		}
		return true
	}
	publish, ok := errors.AsType[*PublishError](err)
	return ok && !publish.MaybeSent
}

// A BatchError tells which messages of a [Publisher.PublishBatch] failed. All others are
// confirmed.
type BatchError struct {
	// Failed has the messages that failed, in the order of the batch.
	Failed []FailedMessage
}

// A FailedMessage is a message of a batch that was not confirmed.
type FailedMessage struct {
	// Index is the message's place in the batch, from 0.
	Index int
	// Err is what PublishDelayed would have returned for it.
	Err error
}

// Error gives the number of messages and the first reason.
func (e *BatchError) Error() string {
	return fmt.Sprintf("ladder: %d messages of the batch failed, the first is message %d: %v", len(e.Failed), e.Failed[0].Index, e.Failed[0].Err)
}

// Unwrap returns the errors of all messages that failed.
func (e *BatchError) Unwrap() []error {
	errs := make([]error, len(e.Failed))
	for i, failed := range e.Failed {
		errs[i] = failed.Err
	}
	return errs
}

// connectError adds the sentinels for what kept a first session from coming up.
func connectError(err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", ErrNotConnected, err)
	}
	refused, ok := errors.AsType[*amqp.Error](err)
	if ok && (refused.Code == amqp.AccessRefused || refused.Code == amqp.NotAllowed) && !errors.Is(err, ErrAccessRefused) {
		err = fmt.Errorf("%w: %w", ErrAccessRefused, err)
	}
	return fmt.Errorf("ladder: connect: %w", err)
}
