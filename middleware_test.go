package ladder_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/laddertest"
)

func TestWrapOrder(t *testing.T) {
	t.Parallel()
	var steps []string
	named := func(name string) ladder.Middleware {
		return func(handler ladder.Handler) ladder.Handler {
			return func(ctx context.Context, d *ladder.Delivery) error {
				steps = append(steps, name+" before")
				err := handler(ctx, d)
				steps = append(steps, name+" after")
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	handler := func(context.Context, *ladder.Delivery) error {
		steps = append(steps, "handler")
		return errTest
	}
	err := ladder.Wrap(handler, named("first"), named("second"))(t.Context(), &ladder.Delivery{})
	require.ErrorIs(t, err, errTest)
	assert.Equal(t, "first: second: "+errTest.Error(), err.Error())
	assert.Equal(t, []string{"first before", "second before", "handler", "second after", "first after"}, steps)

	require.ErrorIs(t, ladder.Wrap(handler)(t.Context(), &ladder.Delivery{}), errTest)
}

func TestRecover(t *testing.T) {
	t.Parallel()
	call := func(handler ladder.Handler) error { return ladder.Recover(handler)(t.Context(), &ladder.Delivery{}) }
	for _, value := range []any{"a string", errTest, 42} {
		err := call(func(context.Context, *ladder.Delivery) error { panic(value) })
		var panicked *ladder.PanicError
		require.ErrorAs(t, err, &panicked)
		assert.Equal(t, value, panicked.Value)
		assert.Contains(t, string(panicked.Stack), "TestRecover")
		assert.Equal(t, fmt.Sprintf("ladder: handler panicked: %v", value), err.Error())
	}
	require.NoError(t, call(func(context.Context, *ladder.Delivery) error { return nil }))
	require.ErrorIs(t, call(func(context.Context, *ladder.Delivery) error { return errTest }), errTest)
}

func TestTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		untilEnd := func(ctx context.Context, _ *ladder.Delivery) error {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(time.Hour):
				return nil
			}
		}
		start := time.Now()
		err := ladder.Timeout(time.Minute)(untilEnd)(t.Context(), &ladder.Delivery{})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Equal(t, time.Minute, time.Since(start))

		// One that is longer changes nothing, and one that is no timeout neither.
		for _, timeout := range []time.Duration{2 * time.Hour, 0, -time.Second} {
			require.NoError(t, ladder.Timeout(timeout)(untilEnd)(t.Context(), &ladder.Delivery{}))
		}
		stopped := errors.New("stopped")
		ctx, stop := context.WithCancelCause(t.Context())
		stop(stopped)
		require.ErrorIs(t, ladder.Timeout(time.Minute)(untilEnd)(ctx, &ladder.Delivery{}), stopped)
	})
}

func TestLogging(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		logger := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: withoutTime}))
		d := &ladder.Delivery{Delivery: amqp.Delivery{MessageId: "m"}, Destination: "work", Attempt: 3, Lateness: time.Second}
		var result error
		handler := ladder.Logging(logger)(func(context.Context, *ladder.Delivery) error {
			time.Sleep(time.Minute)
			return result
		})
		require.NoError(t, handler(t.Context(), d))
		assert.Equal(t, `level=DEBUG msg="ladder: handled" destination=work message=m attempt=3 lateness=1s duration=1m0s`+"\n", log.String())
		log.Reset()
		result = errTest
		require.ErrorIs(t, handler(t.Context(), d), errTest)
		assert.Equal(t, `level=WARN msg="ladder: handler failed" destination=work message=m attempt=3 lateness=1s duration=1m0s error="a handler's error"`+"\n", log.String())

		log.Reset()
		result = fmt.Errorf("busy: %w", ladder.RetryAfter(time.Hour))
		require.ErrorIs(t, handler(t.Context(), d), result)
		assert.Equal(t, `level=DEBUG msg="ladder: handler asked for another time" destination=work message=m attempt=3 lateness=1s duration=1m0s error="busy: ladder: retry after 1h0m0s"`+"\n", log.String())

		log.Reset()
		var panicked *ladder.PanicError
		require.ErrorAs(t, ladder.Logging(logger)(func(context.Context, *ladder.Delivery) error { panic("boom") })(t.Context(), d), &panicked)
		assert.Equal(t, `level=WARN msg="ladder: handler failed" destination=work message=m attempt=3 lateness=1s duration=0s error="ladder: handler panicked: boom"`+"\n", log.String())

		log.Reset()
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			_ = ladder.Logging(logger)(func(context.Context, *ladder.Delivery) error { runtime.Goexit(); return nil })(t.Context(), d)
		}()
		<-gone
		assert.Contains(t, log.String(), "runtime.Goexit")

		require.ErrorIs(t, ladder.Logging(nil)(func(context.Context, *ladder.Delivery) error { return errTest })(t.Context(), d), errTest)
	})
}

func withoutTime(_ []string, a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey {
		return slog.Attr{}
	}
	return a
}

// A fakeClaimer returns what it is told and notes its calls.
type fakeClaimer struct {
	first                                bool
	claimErr, completeErr, releaseErr    error
	calls                                []string
	completeCtxErr, releaseCtxErr        error
	completeHasDeadline, releaseDeadline bool
}

func (c *fakeClaimer) Claim(_ context.Context, key, _ string) (bool, error) {
	c.calls = append(c.calls, "claim "+key)
	return c.first, c.claimErr
}

func (c *fakeClaimer) Complete(ctx context.Context, key, _ string) error {
	c.calls = append(c.calls, "complete "+key)
	c.completeCtxErr = ctx.Err()
	_, c.completeHasDeadline = ctx.Deadline()
	return c.completeErr
}

func (c *fakeClaimer) Release(ctx context.Context, key, _ string) error {
	c.calls = append(c.calls, "release "+key)
	c.releaseCtxErr = ctx.Err()
	_, c.releaseDeadline = ctx.Deadline()
	return c.releaseErr
}

func TestDeduplicate(t *testing.T) {
	t.Parallel()
	var (
		errClaim   = errors.New("no database")
		errRelease = errors.New("no database any more")
		held       = fmt.Errorf("by someone: %w", ladder.ErrClaimHeld)
	)
	for name, tc := range map[string]struct {
		claimer fakeClaimer
		id      string
		result  error

		handled bool
		errs    []error // nil for none
		calls   []string
		logged  string
	}{
		"first":                {claimer: fakeClaimer{first: true}, id: "m", handled: true, calls: []string{"claim q/m", "complete q/m"}},
		"handled already":      {id: "m", calls: []string{"claim q/m"}, logged: `level=INFO msg="ladder: duplicate acknowledged" key=q/m attempt=2` + "\n"},
		"held":                 {claimer: fakeClaimer{claimErr: held}, id: "m", errs: []error{held}, calls: []string{"claim q/m"}},
		"claim fails":          {claimer: fakeClaimer{claimErr: errClaim}, id: "m", errs: []error{errClaim}, calls: []string{"claim q/m"}, logged: `level=ERROR msg="ladder: claiming a message failed" key=q/m error="no database"` + "\n"},
		"claim fails, true":    {claimer: fakeClaimer{first: true, claimErr: errClaim}, id: "m", errs: []error{errClaim}, calls: []string{"claim q/m"}, logged: `level=ERROR msg="ladder: claiming a message failed" key=q/m error="no database"` + "\n"},
		"handler fails":        {claimer: fakeClaimer{first: true}, id: "m", result: errTest, handled: true, errs: []error{errTest}, calls: []string{"claim q/m", "release q/m"}},
		"release fails too":    {claimer: fakeClaimer{first: true, releaseErr: errRelease}, id: "m", result: errTest, handled: true, errs: []error{errTest, errRelease}, calls: []string{"claim q/m", "release q/m"}},
		"complete fails":       {claimer: fakeClaimer{first: true, completeErr: errClaim}, id: "m", handled: true, calls: []string{"claim q/m", "complete q/m"}, logged: `level=ERROR msg="ladder: completing a claim failed" key=q/m error="no database"` + "\n"},
		"no message id":        {handled: true},
		"no message id, fails": {result: errTest, handled: true, errs: []error{errTest}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var log bytes.Buffer
			logger := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{ReplaceAttr: withoutTime}))
			handled := false
			err := ladder.Deduplicate(&tc.claimer, logger)(func(context.Context, *ladder.Delivery) error {
				handled = true
				return tc.result
			})(t.Context(), dedupDelivery(tc.id))
			assert.Equal(t, tc.handled, handled)
			assert.Equal(t, tc.calls, tc.claimer.calls)
			assert.Equal(t, tc.logged, log.String())
			if tc.errs == nil {
				require.NoError(t, err)
			}
			for _, want := range tc.errs {
				require.ErrorIs(t, err, want)
			}
		})
	}
}

func dedupDelivery(id string) *ladder.Delivery {
	return &ladder.Delivery{Delivery: amqp.Delivery{MessageId: id}, Queue: "q", Attempt: 2}
}

// TestDeduplicateHeldComesAgain asks what a consumer is to make of a claim that another one holds: no
// attempt, and ten seconds.
func TestDeduplicateHeldComesAgain(t *testing.T) {
	t.Parallel()
	err := ladder.Deduplicate(&fakeClaimer{claimErr: ladder.ErrClaimHeld}, nil)(nil)(t.Context(), dedupDelivery("m"))
	require.ErrorIs(t, err, ladder.ErrClaimHeld)
	assert.Contains(t, err.Error(), ladder.RetryAfter(10*time.Second).Error())
}

func TestDeduplicateReleasesOnPanic(t *testing.T) {
	t.Parallel()
	c := &fakeClaimer{first: true}
	handler := ladder.Deduplicate(c, nil)(func(context.Context, *ladder.Delivery) error { panic("boom") })
	require.PanicsWithValue(t, "boom", func() { _ = handler(t.Context(), dedupDelivery("m")) })
	assert.Equal(t, []string{"claim q/m", "release q/m"}, c.calls)
}

func TestDeduplicateReleasesOnGoexit(t *testing.T) {
	t.Parallel()
	c := &fakeClaimer{first: true}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = ladder.Deduplicate(c, nil)(func(context.Context, *ladder.Delivery) error {
			runtime.Goexit()
			return nil
		})(t.Context(), dedupDelivery("m"))
	}()
	<-done
	assert.Equal(t, []string{"claim q/m", "release q/m"}, c.calls)
}

// TestDeduplicateEndedContext has the handler's context end: the claim is settled all the same, within a
// time.
func TestDeduplicateEndedContext(t *testing.T) {
	t.Parallel()
	for _, result := range []error{nil, errTest} {
		c := &fakeClaimer{first: true}
		ctx, cancel := context.WithCancel(t.Context())
		err := ladder.Deduplicate(c, nil)(func(context.Context, *ladder.Delivery) error {
			cancel()
			return result
		})(ctx, dedupDelivery("m"))
		require.ErrorIs(t, err, result)
		require.NoError(t, errors.Join(c.completeCtxErr, c.releaseCtxErr))
		assert.Equal(t, result == nil, c.completeHasDeadline)
		assert.Equal(t, result != nil, c.releaseDeadline)
		assert.Len(t, c.calls, 2)
	}
}

type panickingClaimer struct{ *laddertest.Claimer }

func (panickingClaimer) Complete(context.Context, string, string) error { panic(errTest) }
func (panickingClaimer) Release(context.Context, string, string) error  { panic(errTest) }

// TestDeduplicateWithAPanickingClaimer lets the handler's result count.
func TestDeduplicateWithAPanickingClaimer(t *testing.T) {
	t.Parallel()
	for _, result := range []error{nil, ladder.Permanent(errTest)} {
		handler := ladder.Deduplicate(panickingClaimer{new(laddertest.Claimer)}, nil)(func(context.Context, *ladder.Delivery) error { return result })
		require.ErrorIs(t, handler(t.Context(), &ladder.Delivery{Queue: "work", Delivery: amqp.Delivery{MessageId: "1"}}), result)
	}
}
