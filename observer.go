package ladder

import (
	"context"
	"errors"
	"time"

	"github.com/rabbitladder/ladder/internal/session"
)

// An Observer is told what a [Publisher] or [Consumer] does, for metrics and traces. Its
// methods are called from the goroutine in which the thing happens, outside of locks, and
// must return soon. Embed [NopObserver], so that methods which are added
// later have something to do nothing.
type Observer interface {
	// Published is called once for each message with its outcome, when that
	// is known. ctx is the caller's.
	Published(ctx context.Context, e PublishEvent)
	// Handled is called once for each message that a handler was called for, when it is
	// settled. ctx is the handler's, and can have ended.
	Handled(ctx context.Context, e HandleEvent)
	// SessionUp is called when a connection is ready for use.
	SessionUp(SessionEvent)
	// SessionLost is called when a connection that was ready has ended for a
	// reason other than Close.
	SessionLost(SessionEvent)
	// Blocked is called when the broker blocks a connection: a memory or
	// disk alarm.
	Blocked(SessionEvent)
	// Unblocked is called when the broker takes publishes again.
	Unblocked(SessionEvent)
}

// NopObserver does nothing. Embed it in an [Observer].
type NopObserver struct{}

// Published does nothing.
func (NopObserver) Published(context.Context, PublishEvent) {}

// Handled does nothing.
func (NopObserver) Handled(context.Context, HandleEvent) {}

// SessionUp does nothing.
func (NopObserver) SessionUp(SessionEvent) {}

// SessionLost does nothing.
func (NopObserver) SessionLost(SessionEvent) {}

// Blocked does nothing.
func (NopObserver) Blocked(SessionEvent) {}

// Unblocked does nothing.
func (NopObserver) Unblocked(SessionEvent) {}

// A PublishEvent is the outcome of one message.
type PublishEvent struct {
	// Destination and MessageID are the message's: for traces and logs. They
	// are not for labels, as there is no end of them.
	Destination, MessageID string
	// Level is the level at which the message entered the ladder in its last
	// attempt, from 0, or -1 for the delivery exchange or if there was no
	// attempt.
	Level int
	// Hops is the number of queues it was to wait in, or 0.
	Hops int
	// Attempts is the number of times it was handed to a connection.
	Attempts int
	// Duration is the time from the call to the outcome.
	Duration time.Duration
	// Kind is the kind of Err, of which there are few: use it as a label.
	Kind ErrorKind
	// Err is what the publish returned, nil if the message is confirmed.
	Err error
}

// A HandleEvent is what became of a message that a consumer received. The message that a
// consumer sends on, for another attempt or to the failed queue, is part of it, and has no
// PublishEvent.
type HandleEvent struct {
	// Queue is the consumer's.
	Queue string
	// Destination and MessageID are the message's, as in a PublishEvent.
	Destination, MessageID string
	// Attempt is the message's Delivery.Attempt.
	Attempt int
	// Lateness is the message's Delivery.Lateness.
	Lateness time.Duration
	// Duration is how long the handler took.
	Duration time.Duration
	// Outcome is what became of the message.
	Outcome Outcome
	// RetryDelay is how long it waits for its next attempt if Outcome is OutcomeRetried.
	RetryDelay time.Duration
	// Err is what the handler returned, a [*PanicError] if it panicked.
	Err error
	// SendErr is why the message could not be sent on, for another attempt or to
	// the failed queue.
	SendErr error
	// SettleErr is why it could not be acknowledged or given back, so that it comes
	// again. It wraps [ErrSessionLost].
	SettleErr error
}

// A SessionEvent tells of a connection.
type SessionEvent struct {
	// Connection is the connection's name, see ConnectionConfig.
	Connection string
	// Generation counts the connections of the publisher or consumer, from 1.
	Generation uint64
	// Err is why the connection was lost.
	Err error
	// Reason is why the broker blocks, in its words.
	Reason string
}

// ErrorKind is the kind of outcome of a publish. There is a fixed number of
// them, so that they can be label values.
type ErrorKind string

// The kinds of outcome, in the order in which [KindOf] looks for them.
const (
	KindNone         ErrorKind = ""              // confirmed
	KindUnknown      ErrorKind = "unknown"       // ErrOutcomeUnknown, whatever the reason
	KindInvalid      ErrorKind = "invalid"       // refused before or by the broker for what the message is
	KindMissing      ErrorKind = "missing"       // ErrTopologyMissing
	KindRefused      ErrorKind = "refused"       // ErrAccessRefused
	KindUnroutable   ErrorKind = "unroutable"    // ErrUnroutable
	KindNacked       ErrorKind = "nacked"        // ErrNacked
	KindBlocked      ErrorKind = "blocked"       // ErrBlocked
	KindNotConnected ErrorKind = "not_connected" // ErrNotConnected
	KindClosed       ErrorKind = "closed"        // ErrClosed
	KindTimeout      ErrorKind = "timeout"       // the context ended for no other known reason
	KindOther        ErrorKind = "other"
)

// KindOf returns the kind of an error of this package.
func KindOf(err error) ErrorKind {
	if err == nil {
		return KindNone
	}
	for _, k := range []struct {
		kind ErrorKind
		errs []error
	}{
		{KindUnknown, []error{ErrOutcomeUnknown}},
		{KindInvalid, []error{ErrInvalidMessage, ErrMessageTooLarge, ErrInvalidDestination, ErrDelayTooLong, ErrInvalidConfig, ErrInvalidKey}},
		{KindMissing, []error{ErrTopologyMissing}},
		{KindRefused, []error{ErrAccessRefused}},
		{KindUnroutable, []error{ErrUnroutable}},
		{KindNacked, []error{ErrNacked}},
		{KindBlocked, []error{ErrBlocked}},
		{KindNotConnected, []error{ErrNotConnected}},
		{KindClosed, []error{ErrClosed}},
		{KindTimeout, []error{context.Canceled, context.DeadlineExceeded}},
	} {
		for _, target := range k.errs {
			if errors.Is(err, target) {
				return k.kind
			}
		}
	}
	return KindOther
}

// sessionEvents passes what happens to sessions on to an observer.
func sessionEvents(connection string, o Observer) session.Events {
	if o == nil {
		return session.Events{}
	}
	event := func(generation uint64) SessionEvent {
		return SessionEvent{Connection: connection, Generation: generation}
	}
	return session.Events{
		Up: func(generation uint64) { o.SessionUp(event(generation)) },
		Lost: func(generation uint64, err error) {
			e := event(generation)
			e.Err = err
			o.SessionLost(e)
		},
		Blocked: func(generation uint64, reason string) {
			e := event(generation)
			e.Reason = reason
			o.Blocked(e)
		},
		Unblocked: func(generation uint64) { o.Unblocked(event(generation)) },
	}
}
