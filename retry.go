package ladder

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"
)

// A RetryPolicy decides what becomes of a message whose handler failed.
//
// Next gets the number of the attempt that failed, from 1, and the handler's
// error. It returns how long the message waits until the next attempt, or false if
// there is none: the message then goes to the failed queue. It is called from many
// goroutines at once.
//
// A delay that is negative counts as none, and one beyond the ladder's horizon as the
// horizon; both are logged. A policy that panics counts as one that returns false.
type RetryPolicy interface {
	Next(attempt int, err error) (delay time.Duration, retry bool)
}

// ExponentialBackoff is the retry policy that a consumer has by default. Each
// delay is a multiple of the one before. The zero value waits about 1 s, 2 s, 4 s and so
// on, nine times, and gives up about nine minutes after the first attempt.
type ExponentialBackoff struct {
	// Initial is the delay after the first attempt. Defaults to one second.
	Initial time.Duration

	// Max is the longest delay. Defaults to one hour.
	Max time.Duration

	// Multiplier is what each delay is multiplied with for the next, at least
	// 1. Defaults to 2.
	Multiplier float64

	// Jitter is the part of the delay, at most 1, by which it is randomly
	// longer or shorter, so that what failed together does not come back
	// together. A negative value is none. Defaults to 0.2.
	Jitter float64

	// MaxAttempts is the number of attempts, the first included. A negative
	// value sets no limit. Defaults to 10.
	MaxAttempts int
}

func (b ExponentialBackoff) withDefaults() ExponentialBackoff {
	b.Initial = cmp.Or(b.Initial, time.Second)
	b.Max = cmp.Or(b.Max, max(time.Hour, b.Initial))
	b.Multiplier = cmp.Or(b.Multiplier, 2)
	b.Jitter = max(cmp.Or(b.Jitter, 0.2), 0)
	b.MaxAttempts = cmp.Or(b.MaxAttempts, 10)
	return b
}

func (b ExponentialBackoff) validate() error {
	filled := b.withDefaults()
	switch {
	case b.Initial < 0:
		return invalidConfig("Retry.Initial", b.Initial, "must be positive")
	case b.Max < 0:
		return invalidConfig("Retry.Max", b.Max, "must be positive")
	case filled.Max < filled.Initial:
		return invalidConfig("Retry.Max", b.Max, "must be at least Retry.Initial, which is %v", filled.Initial)
	case !(filled.Multiplier >= 1) || math.IsInf(filled.Multiplier, 1):
		return invalidConfig("Retry.Multiplier", b.Multiplier, "must be a number of at least 1")
	case math.IsNaN(b.Jitter) || b.Jitter > 1:
		return invalidConfig("Retry.Jitter", b.Jitter, "must be at most 1")
	}
	return nil
}

// Next returns Initial times Multiplier to the power of attempt-1, with jitter, and
// at most Max.
func (b ExponentialBackoff) Next(attempt int, _ error) (time.Duration, bool) {
	b = b.withDefaults()
	if b.MaxAttempts > 0 && attempt >= b.MaxAttempts {
		return 0, false
	}
	delay := float64(b.Initial) * math.Pow(b.Multiplier, float64(attempt-1))
	delay = min(delay, float64(b.Max))
	delay *= 1 + b.Jitter*(2*rand.Float64()-1)
	if !(delay < float64(b.Max)) {
		return b.Max, true
	}
	return time.Duration(delay), true
}

// FixedSteps is the retry policy with a delay of its own for each attempt: the first is
// that after the first attempt. After the last one there is no other attempt.
type FixedSteps []time.Duration

// Next returns the step of the attempt.
func (s FixedSteps) Next(attempt int, _ error) (time.Duration, bool) {
	if attempt < 1 || attempt > len(s) {
		return 0, false
	}
	return s[attempt-1], true
}

func (s FixedSteps) validate() error {
	if len(s) == 0 {
		return invalidConfig("Retry", "FixedSteps{}", "must have a step; NoRetry has none")
	}
	for i, step := range s {
		if step < 0 {
			return invalidConfig(fmt.Sprintf("Retry[%d]", i), step, "must not be negative")
		}
	}
	return nil
}

// NoRetry is the retry policy that makes one attempt only.
type NoRetry struct{}

// Next returns false.
func (NoRetry) Next(int, error) (time.Duration, bool) { return 0, false }

// A permanentError says that another attempt is of no use.
type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// Permanent returns what a [Handler] returns for a message that no attempt will
// help: it goes to the failed queue, whatever the retry policy says. The error may be
// wrapped further. Permanent(nil) is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

// A retryAfterError says when the message wants to come again.
type retryAfterError struct{ delay time.Duration }

func (e *retryAfterError) Error() string { return fmt.Sprintf("ladder: retry after %v", e.delay) }

// RetryAfter returns what a [Handler] returns to get the message again after a
// delay of its own choice, when a service is busy, for example, and says for how long. It is not
// an attempt: the message comes with the same Delivery.Attempt, and there is no limit. The
// error may be wrapped, as in fmt.Errorf("quota used up: %w", ladder.RetryAfter(d)). A negative
// delay counts as none, and one beyond the ladder's horizon as the horizon.
func RetryAfter(delay time.Duration) error { return &retryAfterError{delay} }

// An Outcome is what became of a message that a consumer received.
type Outcome string

// The outcomes.
const (
	// OutcomeHandled is that the handler returned nil.
	OutcomeHandled Outcome = "handled"
	// OutcomeRetried is that the message waits in the ladder for its next
	// attempt.
	OutcomeRetried Outcome = "retried"
	// OutcomeFailed is that the message is in the failed queue.
	OutcomeFailed Outcome = "failed"
	// OutcomeReturned is that the message went back into its queue: the
	// consumer shuts down, or could neither send it through the ladder nor to the
	// failed queue.
	OutcomeReturned Outcome = "returned"
	// OutcomeLost is that the session ended before the message was settled. The broker
	// has given it back to the queue, and it comes again.
	OutcomeLost Outcome = "lost"
)

// A verdict is what is to become of a message.
type verdict struct {
	outcome Outcome
	delay   time.Duration // of a retry
	counted bool          // the attempt counts: it failed
	reason  string        // why it failed
	note    string        // what was wrong with the delay
}

// judge decides by a handler's result. An attempt is interrupted if its context
// ended because the consumer shuts down.
func (l *Ladder) judge(policy RetryPolicy, attempt int, err error, interrupted bool) verdict {
	if err == nil {
		return verdict{outcome: OutcomeHandled}
	}
	reason := fmt.Sprint(err) // which bears an Error method that panics
	permanent, after, _ := inspect(err)
	if permanent {
		return verdict{outcome: OutcomeFailed, counted: true, reason: reason}
	}
	if after != nil {
		v := verdict{outcome: OutcomeRetried}
		v.delay, v.note = l.within(after.delay)
		return v
	}
	if interrupted {
		return verdict{outcome: OutcomeReturned}
	}
	delay, retry, panicked := next(policy, attempt, err)
	switch {
	case panicked != nil:
		return verdict{outcome: OutcomeFailed, counted: true, reason: fmt.Sprintf("the retry policy panicked: %v; the handler's error: %s", panicked, reason)}
	case !retry:
		return verdict{outcome: OutcomeFailed, counted: true, reason: reason}
	}
	v := verdict{outcome: OutcomeRetried, counted: true, reason: reason}
	v.delay, v.note = l.within(delay)
	return v
}

// inspect looks for what this package knows in a handler's error. An error's methods
// may panic, as those of a nil pointer in an error often do: it is then an error like any other.
func inspect(err error) (permanent bool, after *retryAfterError, panicked *PanicError) {
	defer func() { _ = recover() }()
	panicked, _ = errors.AsType[*PanicError](err)
	after, _ = errors.AsType[*retryAfterError](err)
	_, permanent = errors.AsType[*permanentError](err)
	return permanent, after, panicked
}

func next(policy RetryPolicy, attempt int, err error) (delay time.Duration, retry bool, panicked any) {
	defer func() { panicked = recover() }()
	delay, retry = policy.Next(attempt, err)
	return delay, retry, nil
}

// within returns the delay that the ladder can carry, and what was wrong if it
// is another.
func (l *Ladder) within(delay time.Duration) (_ time.Duration, note string) {
	switch {
	case delay < 0:
		return 0, fmt.Sprintf("a delay of %v is negative and counts as none", delay)
	case delay > l.Horizon():
		return l.Horizon(), fmt.Sprintf("a delay of %v is beyond the horizon and counts as %v", delay, l.Horizon())
	}
	return delay, ""
}
