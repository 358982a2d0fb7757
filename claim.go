package ladder

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"
)

// A Claimer remembers which messages have been handled, so that one which is delivered
// twice is handled once. See [Deduplicate], and docs/consuming.md for what one that
// keeps its memory in a database must do.
//
// A key stands for one message in one queue. Claims of one key may come
// from many processes at the same time; exactly one of them may be the first. A holder stands
// for one call of a handler, and is never used again.
type Claimer interface {
	// Claim takes the key for the holder. It returns true if the caller is the first to
	// have it, or the first after a Release. It returns false if the key has been
	// completed: the message was handled. If another holder has the key, and has
	// neither completed nor released it, the error wraps [ErrClaimHeld].
	//
	// A claim must end by itself at some time after its holder died, or the message
	// would never be handled: a lease, longer than a handler may take.
	Claim(ctx context.Context, key, holder string) (first bool, err error)

	// Complete says that the message has been handled, whoever holds the key now. It must be
	// remembered for as long as a duplicate may come: over the longest outage of a consumer, and the
	// longest delay of its retries.
	Complete(ctx context.Context, key, holder string) error

	// Release gives up a claim, as the message was not handled. It does nothing if the key
	// has another holder by now, because the lease was over.
	Release(ctx context.Context, key, holder string) error
}

// ErrClaimHeld is wrapped by the error of a [Claimer] for a message that another
// handler is at work on.
var ErrClaimHeld = errors.New("ladder: another handler is at work on the message")

const (
	// claimDelay is how long a message waits that cannot be claimed: someone
	// else is at work on it, or the Claimer does not work.
	claimDelay = 10 * time.Second
	// claimTimeout bounds a Complete or Release, which goes on when the
	// handler's context has ended.
	claimTimeout = 10 * time.Second
)

// Deduplicate returns the [Middleware] that calls the handler only for messages which it
// has not handled yet, as the [Claimer] says. The key is the queue's name, a slash, and the
// MessageId: the same message in another queue is other work. A message without MessageId
// is handled without a claim.
//
// One that was handled already is acknowledged. One that another handler is at work on comes
// again ten seconds later, or after the ladder's horizon where that is shorter: that handler may still fail. So does one of which the Claimer does not know, because
// its database is down, for example: neither counts as an attempt. If the handler fails, panics, or asks for
// another attempt in any way, the claim is released.
//
// Errors of Claim go to the logger, which may be nil, and so does each duplicate, at level Info.
// To an Observer it is a message that was handled; count duplicates in the Claimer. An error of
// Complete, or a panic, goes to the logger alone: the message is handled, and returning the error would have
// it handled again.
//
// Complete and Release get a context of ten seconds that goes on when the handler's has ended,
// by a timeout or a lost connection.
//
// A nil claimer panics at once.
//
// This narrows the gap in which a message is handled twice and does not close it: the handler's
// effect and Complete are two steps, and the process can die between them. Where that
// matters, let the handler write MessageId and effect in one transaction of its own.
func Deduplicate(claimer Claimer, logger *slog.Logger) Middleware {
	if claimer == nil {
		panic("ladder: Deduplicate: the Claimer is nil")
	}
	logger = orSilent(logger)
	return func(handler Handler) Handler {
		return func(ctx context.Context, d *Delivery) (err error) {
			if d.MessageId == "" {
				return handler(ctx, d)
			}
			key, holder := d.Queue+"/"+d.MessageId, rand.Text()
			first, err := claimer.Claim(ctx, key, holder)
			switch {
			case err != nil:
				if !errors.Is(err, ErrClaimHeld) {
					logger.ErrorContext(ctx, "ladder: claiming a message failed", "key", key, "error", err)
				}
				return fmt.Errorf("ladder: claim %s: %w: %w", key, err, RetryAfter(claimDelay))
			case !first:
				logger.InfoContext(ctx, "ladder: duplicate acknowledged", "key", key, "attempt", d.Attempt)
				return nil
			}
			handled := false
			// Deferred, because a handler can panic, or end its goroutine.
			defer func() {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), claimTimeout)
				defer cancel()
				if handled {
					if failed := contained(func() error { return claimer.Complete(ctx, key, holder) }); failed != nil {
						logger.ErrorContext(ctx, "ladder: completing a claim failed", "key", key, "error", failed)
					}
					return
				}
				if failed := contained(func() error { return claimer.Release(ctx, key, holder) }); failed != nil {
					err = errors.Join(err, fmt.Errorf("ladder: release %s: %w", key, failed))
				}
			}()
			err = handler(ctx, d)
			handled = err == nil
			return err
		}
	}
}

// contained makes a panic an error.
func contained(call func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	return call()
}
