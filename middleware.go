package ladder

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"time"
)

// A Middleware wraps a [Handler] in another one, to do something before or after it, or
// instead of it.
type Middleware func(Handler) Handler

// Wrap wraps a handler in middleware. The first is the outermost: it is the first
// to see a message and the last to see its result.
func Wrap(handler Handler, middleware ...Middleware) Handler {
	for _, m := range slices.Backward(middleware) {
		handler = m(handler)
	}
	return handler
}

// A PanicError is the error of a handler that panicked. See [Recover].
type PanicError struct {
	// Value is what the handler panicked with.
	Value any
	// Stack is the stack of its goroutine then, as debug.Stack has it.
	Stack []byte
}

// Error gives the value without the stack.
func (e *PanicError) Error() string { return fmt.Sprintf("ladder: handler panicked: %v", e.Value) }

// Recover is the [Middleware] that makes a panic a [*PanicError]. A [Consumer] has it around
// its handler already; use it within other middleware, so that they see an error.
func Recover(handler Handler) Handler {
	return func(ctx context.Context, d *Delivery) (err error) {
		defer func() {
			if r := recover(); r != nil {
				err = &PanicError{Value: r, Stack: debug.Stack()}
			}
		}()
		return handler(ctx, d)
	}
}

// Timeout returns the [Middleware] that ends the handler's context after a time, with
// context.DeadlineExceeded. A handler that does not look at its context goes on. A timeout
// that is not positive is none. ConsumerConfig.HandlerTimeout is the same for a whole
// handler; this is for a part of its middleware.
func Timeout(timeout time.Duration) Middleware {
	return func(handler Handler) Handler {
		if timeout <= 0 {
			return handler
		}
		return func(ctx context.Context, d *Delivery) error {
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			return handler(ctx, d)
		}
	}
}

// Logging returns the [Middleware] that logs each call of the handler with its
// destination, message id, attempt, lateness and duration: at level Debug when it returns nil or
// [RetryAfter], and at Warn with its error when it failed, panicked or ended its goroutine. A nil
// logger is none. A [Consumer] with a Logger logs the handler's errors, and what
// becomes of the messages, without it; with both, each error is logged twice.
func Logging(logger *slog.Logger) Middleware {
	logger = orSilent(logger)
	return func(handler Handler) Handler {
		handler = Recover(handler)
		return func(ctx context.Context, d *Delivery) error {
			start := time.Now()
			err := errHandlerExited
			// Deferred, because a handler can end its goroutine.
			defer func() {
				attributes := []any{
					"destination", d.Destination, "message", d.MessageId, "attempt", d.Attempt,
					"lateness", d.Lateness, "duration", time.Since(start),
				}
				permanent, after, _ := inspect(err)
				switch {
				case err == nil:
					logger.DebugContext(ctx, "ladder: handled", attributes...)
				case after != nil && !permanent:
					logger.DebugContext(ctx, "ladder: handler asked for another time", append(attributes, "error", err)...)
				default:
					logger.WarnContext(ctx, "ladder: handler failed", append(attributes, "error", err)...)
				}
			}()
			err = handler(ctx, d)
			return err
		}
	}
}
