//nolint:thelper // what laddertest.Run runs is a test, and no helper
package laddertest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/laddertest"
)

var errDown = errors.New("the mail server is down")

// run runs a test on a ladder with the default configuration.
func run(t *testing.T, f func(t *testing.T, b *laddertest.Broker)) {
	t.Helper()
	l, err := ladder.New(ladder.Config{})
	require.NoError(t, err)
	laddertest.Run(t, l, f)
}

func publish(t *testing.T, b *laddertest.Broker, destination string, delay time.Duration, body string) {
	t.Helper()
	require.NoError(t, b.Publisher().PublishDelayed(t.Context(), destination, delay, amqp.Publishing{MessageId: "id-" + body, Body: []byte(body)}))
}

// A record is what a handler saw, and when.
type record struct {
	after    time.Duration // since the start of the test
	queue    string
	body     string
	attempt  int
	lateness time.Duration
}

// A recorder is a handler that fails as often as it is told.
type recorder struct {
	start    time.Time
	failures int
	err      error
	seen     []record
}

func newRecorder() *recorder { return &recorder{start: time.Now(), err: errDown} }

func (r *recorder) handle(_ context.Context, d *ladder.Delivery) error {
	r.seen = append(r.seen, record{time.Since(r.start), d.Queue, string(d.Body), d.Attempt, d.Lateness})
	if len(r.seen) <= r.failures {
		return r.err
	}
	return nil
}

// instants returns when the handler was called.
func (r *recorder) instants() []time.Duration {
	instants := make([]time.Duration, len(r.seen))
	for i, s := range r.seen {
		instants[i] = s.after
	}
	return instants
}

// TestWeekOfRetries is what this package is for: a handler that fails for a week, until the mail server
// is back.
func TestWeekOfRetries(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		handler := newRecorder()
		handler.failures = 7
		b.Consume(ladder.ConsumerConfig{
			Queue:        "mails",
			Destinations: []string{"mail.due"},
			Retry:        ladder.ExponentialBackoff{Initial: time.Hour, Max: 64 * time.Hour, Jitter: -1, MaxAttempts: 9},
		}, handler.handle)

		publish(t, b, "mail.due", 30*time.Minute, "hello")
		b.Drain()

		const first = 30 * time.Minute
		require.Len(t, handler.seen, 8)
		for i, seen := range handler.seen {
			want := first + (time.Hour<<i - time.Hour) // 1 h + 2 h + 4 h and so on
			assert.Equal(t, record{want, "mails", "hello", i + 1, 0}, seen)
		}
		assert.Equal(t, 127*time.Hour+first, time.Since(handler.start), "the clock stands at the last delivery")
		assert.Empty(t, b.Failed("mails"))

		published := b.Published()
		require.Len(t, published, 8)
		assert.Equal(t, "mail.due", published[0].Destination)
		assert.Equal(t, first, published[0].Delay)
		assert.False(t, published[0].Retry)
		assert.Empty(t, published[0].Queue)
		for i, retry := range published[1:] {
			assert.True(t, retry.Retry)
			assert.Equal(t, "mail.due", retry.Destination)
			assert.Equal(t, "mails", retry.Queue)
			assert.Equal(t, time.Hour<<i, retry.Delay)
			assert.True(t, retry.NotBefore.Equal(retry.At.Add(retry.Delay)))
			assert.Equal(t, int64(i+2), retry.Publishing.Headers[ladder.HeaderAttempt])
			assert.Equal(t, "id-hello", retry.Publishing.MessageId)
		}
	})
}

func TestNoAttemptLeft(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		handler := newRecorder()
		handler.failures = 3
		b.Consume(ladder.ConsumerConfig{
			Queue: "mails", Destinations: []string{"mail.due"}, Retry: ladder.FixedSteps{time.Minute, time.Hour}, FailedQueue: "dead mails",
		}, handler.handle)
		publish(t, b, "mail.due", 0, "hello")
		b.Drain()

		assert.Equal(t, []time.Duration{0, time.Minute, time.Minute + time.Hour}, handler.instants())
		failed := b.Failed("mails")
		require.Len(t, failed, 1)
		assert.Equal(t, "hello", string(failed[0].Body))
		assert.Equal(t, "mail.due", failed[0].Destination)
		assert.Equal(t, "dead mails", failed[0].RoutingKey)
		assert.Equal(t, 3, failed[0].Attempt)
		require.NotNil(t, failed[0].Failure)
		assert.Equal(t, errDown.Error(), failed[0].Failure.Reason)
		assert.Equal(t, "mails", failed[0].Failure.Queue)
		assert.True(t, failed[0].Failure.First.Equal(handler.start))
		assert.True(t, failed[0].Failure.Last.Equal(handler.start.Add(time.Minute+time.Hour)))

		last := b.Published()[3]
		assert.False(t, last.Retry)
		assert.Equal(t, "dead mails", last.Queue)
		assert.Equal(t, "mail.due", last.Destination)
		assert.Zero(t, last.Delay)
	})
}

func TestRetryAfterIsNoAttempt(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		handler := newRecorder()
		handler.failures, handler.err = 50, fmt.Errorf("quota used up: %w", ladder.RetryAfter(time.Hour))
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Destinations: []string{"mail.due"}, Retry: ladder.NoRetry{}}, handler.handle)
		publish(t, b, "mail.due", 0, "hello")
		b.Drain()
		require.Len(t, handler.seen, 51)
		assert.Equal(t, record{50 * time.Hour, "mails", "hello", 1, 0}, handler.seen[50])
		assert.Empty(t, b.Failed("mails"))
		assert.True(t, b.Published()[1].Retry)
	})
}

func TestPermanent(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		handler := newRecorder()
		handler.failures, handler.err = 1, ladder.Permanent(errors.New("no such address"))
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Destinations: []string{"mail.due"}}, handler.handle)
		publish(t, b, "mail.due", time.Second, "hello")
		b.Drain()
		assert.Len(t, handler.seen, 1)
		require.Len(t, b.Failed("mails"), 1)
		assert.Equal(t, "no such address", b.Failed("mails")[0].Failure.Reason)
		b.Drain()
		assert.Len(t, handler.seen, 1, "what has failed stays where it is")
	})
}

// TestFanOut has two queues get each message, and one of them fail: the other sees no retry.
func TestFanOut(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		bad, good := newRecorder(), newRecorder()
		bad.failures = 1
		retry := ladder.FixedSteps{time.Minute}
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Destinations: []string{"user.created"}, Retry: retry}, func(ctx context.Context, d *ladder.Delivery) error {
			err := bad.handle(ctx, d)
			d.Body[0], d.Headers["list"].([]any)[0] = 'X', "changed"
			return err
		})
		b.Consume(ladder.ConsumerConfig{Queue: "statistics", Destinations: []string{"user.created", "user.deleted"}, Retry: retry}, func(ctx context.Context, d *ladder.Delivery) error {
			assert.Equal(t, []any{"mine"}, d.Headers["list"], "each queue has a copy of its own")
			return good.handle(ctx, d)
		})
		require.NoError(t, b.Publisher().PublishDelayed(t.Context(), "user.created", time.Hour, amqp.Publishing{
			Headers: amqp.Table{"list": []any{"mine"}}, Body: []byte("anna"),
		}))
		b.Drain()
		assert.Equal(t, []record{{time.Hour, "statistics", "anna", 1, 0}}, good.seen)
		require.Len(t, bad.seen, 2)
		assert.Equal(t, record{time.Hour + time.Minute, "mails", "anna", 2, 0}, bad.seen[1], "what the handler did to its copy is not sent on")
	})
}

func TestParked(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		handler := newRecorder()
		publish(t, b, "mail.due", time.Hour, "early")
		publish(t, b, "mail.due", 2*time.Hour, "bound in time")
		publish(t, b, "mail", 3*time.Hour, "another destination")
		b.Advance(90 * time.Minute)
		assert.Equal(t, 90*time.Minute, time.Since(handler.start))
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Destinations: []string{"mail.due"}}, handler.handle)
		b.Drain()
		assert.Equal(t, []record{{2 * time.Hour, "mails", "bound in time", 1, 0}}, handler.seen)
		parked := b.Parked()
		require.Len(t, parked, 2)
		assert.Equal(t, "early", string(parked[0].Body))
		assert.Equal(t, "mail.due", parked[0].Destination)
		assert.Equal(t, "mail", parked[1].Destination)
	})
}

// TestBindIsAtTheDueTime has the clock pass the due time by sleeping, before the queue is bound.
func TestBindIsAtTheDueTime(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		publish(t, b, "mail.due", time.Minute, "lost")
		time.Sleep(2 * time.Minute)
		b.Bind("mails", "mail.due")
		b.Drain()
		assert.Len(t, b.Parked(), 1)

		// A queue keeps what it gets for its consumer.
		publish(t, b, "mail.due", time.Minute, "kept")
		b.Advance(time.Hour)
		handler := newRecorder()
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Passive: true}, handler.handle)
		b.Drain()
		assert.Equal(t, []record{{0, "mails", "kept", 1, 59 * time.Minute}}, handler.seen)
	})
}

// TestDeduplicate has each message published twice and the first acknowledgement lost: each is handled
// once.
func TestDeduplicate(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		handler := newRecorder()
		handler.failures = 1
		var claimer laddertest.Claimer
		b.Consume(ladder.ConsumerConfig{
			Queue: "mails", Destinations: []string{"mail.due"}, Retry: ladder.FixedSteps{time.Hour},
		}, ladder.Wrap(handler.handle, ladder.Deduplicate(&claimer, nil)))
		first, err := claimer.Claim(t.Context(), "mails/id-held", "other")
		require.NoError(t, err)
		require.True(t, first)

		publish(t, b, "mail.due", 0, "fails once")
		publish(t, b, "mail.due", time.Minute, "twice")
		publish(t, b, "mail.due", 2*time.Minute, "twice")
		publish(t, b, "mail.due", 3*time.Minute, "held")
		b.Advance(time.Minute)
		b.LoseAcks(1)
		b.Advance(2*time.Minute + 55*time.Second)
		require.Len(t, handler.seen, 2)
		assert.Equal(t, []string{"mails/id-twice"}, claimer.Completed())
		require.NoError(t, claimer.Release(t.Context(), "mails/id-held", "other"))
		b.Drain()
		assert.Equal(t, []record{
			{0, "mails", "fails once", 1, 0},
			{time.Minute, "mails", "twice", 1, 0},
			{4 * time.Minute, "mails", "held", 1, 0}, // every ten seconds it asked
			{time.Hour, "mails", "fails once", 2, 0},
		}, handler.seen)
		assert.Equal(t, []string{"mails/id-fails once", "mails/id-held", "mails/id-twice"}, claimer.Completed())
		assert.Empty(t, b.Failed("mails"))
	})
}

func TestLoseAcks(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		handler := newRecorder()
		handler.failures = 1
		var observer observer
		var redelivered []bool
		b.Consume(ladder.ConsumerConfig{
			Queue: "mails", Destinations: []string{"mail.due"}, Retry: ladder.FixedSteps{time.Minute}, Observer: &observer,
		}, func(ctx context.Context, d *ladder.Delivery) error {
			redelivered = append(redelivered, d.Redelivered)
			assert.NotContains(t, d.Headers, "x-delivery-count")
			return handler.handle(ctx, d)
		})
		publish(t, b, "mail.due", 0, "hello")
		b.LoseAcks(2)
		b.Drain()
		assert.Equal(t, []time.Duration{0, 0, 0, time.Minute}, handler.instants(), "the retry was sent before the acknowledgement was lost")
		assert.Equal(t, []bool{false, true, true, false}, redelivered)
		require.Len(t, observer.handled, 4)
		assert.Equal(t, ladder.OutcomeLost, observer.handled[0].Outcome)
		require.ErrorIs(t, observer.handled[0].SettleErr, ladder.ErrSessionLost)
		assert.Equal(t, ladder.OutcomeLost, observer.handled[1].Outcome)
		assert.Equal(t, ladder.OutcomeHandled, observer.handled[2].Outcome)
	})
}

func TestHandlerTimeout(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		handler := newRecorder()
		b.Consume(ladder.ConsumerConfig{
			Queue: "mails", Destinations: []string{"mail.due"}, Retry: ladder.FixedSteps{time.Minute}, HandlerTimeout: 30 * time.Second,
		}, func(ctx context.Context, d *ladder.Delivery) error {
			_ = handler.handle(ctx, d)
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(time.Hour):
				return nil
			}
		})
		publish(t, b, "mail.due", 0, "hello")
		b.Drain()
		assert.Equal(t, []time.Duration{0, 90 * time.Second}, handler.instants())
		require.Len(t, b.Failed("mails"), 1)
		assert.Equal(t, context.DeadlineExceeded.Error(), b.Failed("mails")[0].Failure.Reason)
		assert.Equal(t, 2*time.Minute, time.Since(handler.start))
	})
}

// A policy computes the delay of the second attempt.
type policy time.Duration

func (p policy) Next(attempt int, _ error) (time.Duration, bool) {
	return time.Duration(p), attempt < 2
}

func TestPolicyDelaysOutOfRange(t *testing.T) {
	t.Parallel()
	l, err := ladder.New(ladder.Config{Levels: 6})
	require.NoError(t, err)
	for name, tc := range map[string]struct{ asked, got time.Duration }{
		"negative":           {-time.Second, 0},
		"beyond the horizon": {64 * time.Second, 63 * time.Second},
		"a year":             {365 * 24 * time.Hour, 63 * time.Second},
		"the horizon":        {63 * time.Second, 63 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			laddertest.Run(t, l, func(t *testing.T, b *laddertest.Broker) {
				handler := newRecorder()
				handler.failures = 1
				var observer observer
				b.Consume(ladder.ConsumerConfig{
					Queue: "mails", Destinations: []string{"mail.due"}, Retry: policy(tc.asked), Observer: &observer,
				}, handler.handle)
				publish(t, b, "mail.due", 0, "hello")
				b.Drain()
				assert.Equal(t, []time.Duration{0, tc.got}, handler.instants())
				assert.Equal(t, tc.got, observer.handled[0].RetryDelay)
			})
		})
	}
}

func TestDelayBeyondHorizonIsRefused(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		err := b.Publisher().PublishDelayed(t.Context(), "mail.due", 365*24*time.Hour, amqp.Publishing{})
		require.ErrorIs(t, err, ladder.ErrDelayTooLong)
		err = b.Publisher().PublishDelayed(t.Context(), "mail.*", 0, amqp.Publishing{})
		require.ErrorIs(t, err, ladder.ErrInvalidDestination)
		err = b.Publisher().PublishDelayed(t.Context(), "mail.due", 0, amqp.Publishing{Headers: amqp.Table{"big": strings.Repeat("x", 128<<10)}})
		require.ErrorIs(t, err, ladder.ErrInvalidMessage)
		err = b.PublisherWith(ladder.PublisherConfig{MaxMessageBytes: 10}).PublishDelayed(t.Context(), "mail.due", 0, amqp.Publishing{Body: make([]byte, 11)})
		require.ErrorIs(t, err, ladder.ErrMessageTooLarge)
		closed := b.Publisher()
		require.NoError(t, closed.Close(t.Context()))
		require.ErrorIs(t, closed.PublishDelayed(t.Context(), "mail.due", 0, amqp.Publishing{}), ladder.ErrClosed)
		assert.Empty(t, b.Published())
	})
}

// TestHandlerPublishes has each handled message be the cause of the next one.
func TestHandlerPublishes(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		orders, reminders := newRecorder(), newRecorder()
		publisher := b.Publisher()
		b.Consume(ladder.ConsumerConfig{Queue: "orders", Destinations: []string{"order.placed"}}, func(ctx context.Context, d *ladder.Delivery) error {
			_ = orders.handle(ctx, d)
			return publisher.PublishDelayed(ctx, "order.unpaid", 3*24*time.Hour, amqp.Publishing{Body: d.Body})
		})
		b.Consume(ladder.ConsumerConfig{Queue: "reminders", Destinations: []string{"order.unpaid"}}, reminders.handle)
		publish(t, b, "order.placed", 0, "42")
		b.Advance(3*24*time.Hour - time.Nanosecond)
		assert.Len(t, orders.seen, 1)
		assert.Empty(t, reminders.seen)
		b.Advance(time.Nanosecond)
		assert.Equal(t, []record{{3 * 24 * time.Hour, "reminders", "42", 1, 0}}, reminders.seen)
	})
}

// An observer keeps what it is told.
type observer struct {
	ladder.NopObserver
	published []ladder.PublishEvent
	handled   []ladder.HandleEvent
}

func (o *observer) Published(_ context.Context, e ladder.PublishEvent) {
	o.published = append(o.published, e)
}

func (o *observer) Handled(_ context.Context, e ladder.HandleEvent) { o.handled = append(o.handled, e) }

func TestObserver(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		var observer observer
		handler := newRecorder()
		handler.failures = 2
		b.Consume(ladder.ConsumerConfig{
			Queue: "mails", Destinations: []string{"mail.due"}, Retry: ladder.FixedSteps{time.Minute, time.Minute}, Observer: &observer,
		}, func(ctx context.Context, d *ladder.Delivery) error {
			time.Sleep(time.Second)
			return handler.handle(ctx, d)
		})
		p := b.PublisherWith(ladder.PublisherConfig{Observer: &observer})
		require.NoError(t, p.PublishDelayed(t.Context(), "mail.due", 5*time.Second, amqp.Publishing{MessageId: "m"}))
		b.Drain()
		assert.Equal(t, []ladder.PublishEvent{{Destination: "mail.due", MessageID: "m", Level: 2, Hops: 2, Attempts: 1}}, observer.published)
		want := ladder.HandleEvent{
			Queue: "mails", Destination: "mail.due", MessageID: "m", Attempt: 1, Duration: time.Second,
			Outcome: ladder.OutcomeRetried, RetryDelay: time.Minute, Err: errDown,
		}
		second, third := want, want
		second.Attempt, third.Attempt = 2, 3
		third.Outcome, third.RetryDelay, third.Err = ladder.OutcomeHandled, 0, nil
		assert.Equal(t, []ladder.HandleEvent{want, second, third}, observer.handled)
	})
}

// TestOrder has messages come by due time, then by publishing, and one that a slow handler kept
// waiting late.
func TestOrder(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		handler := newRecorder()
		consume := func(queue, destination string) {
			b.Consume(ladder.ConsumerConfig{Queue: queue, Destinations: []string{destination}}, func(ctx context.Context, d *ladder.Delivery) error {
				if string(d.Body) == "slow" {
					time.Sleep(10 * time.Minute)
				}
				return handler.handle(ctx, d)
			})
		}
		consume("b", "to.b")
		consume("a", "to.a")
		publish(t, b, "to.a", 3*time.Minute, "later")
		publish(t, b, "to.a", time.Minute, "same 1")
		publish(t, b, "to.b", time.Minute, "same 2")
		publish(t, b, "to.a", time.Minute, "same 3")
		publish(t, b, "to.b", 2*time.Minute, "slow")
		publish(t, b, "to.b", 12*time.Minute, "last")
		b.Drain()
		assert.Equal(t, []record{
			{time.Minute, "a", "same 1", 1, 0},
			{time.Minute, "b", "same 2", 1, 0},
			{time.Minute, "a", "same 3", 1, 0},
			{12 * time.Minute, "b", "slow", 1, 0},
			{12 * time.Minute, "a", "later", 1, 9 * time.Minute},
			{12 * time.Minute, "b", "last", 1, 0},
		}, handler.seen)
	})
}

// TestAdvance has the clock stand at the end of what was asked for.
func TestAdvance(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		handler := newRecorder()
		b.Consume(ladder.ConsumerConfig{Queue: "ticks", Destinations: []string{"tick"}}, func(ctx context.Context, d *ladder.Delivery) error {
			return errors.Join(handler.handle(ctx, d), b.Publisher().PublishDelayed(ctx, "tick", time.Hour, amqp.Publishing{}))
		})
		publish(t, b, "tick", 0, "")
		b.Advance(0)
		assert.Len(t, handler.seen, 1, "what is due already")
		b.Advance(-time.Hour)
		b.Advance(150 * time.Minute)
		assert.Len(t, handler.seen, 3)
		assert.Equal(t, 150*time.Minute, time.Since(handler.start))
		b.Advance(30 * time.Minute)
		assert.Len(t, handler.seen, 4, "what falls due at the very end")
	})
}

// TestPublishFromAnotherGoroutine has the code under test publish while the clock moves.
func TestPublishFromAnotherGoroutine(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		handler := newRecorder()
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Destinations: []string{"mail.due"}}, handler.handle)
		p := b.Publisher()
		go func() {
			for range 3 {
				time.Sleep(time.Minute)
				assert.NoError(t, p.PublishDelayed(t.Context(), "mail.due", time.Second, amqp.Publishing{}))
			}
		}()
		publish(t, b, "mail.due", time.Hour, "")
		b.Drain()
		assert.Equal(t, []time.Duration{61 * time.Second, 121 * time.Second, 181 * time.Second, time.Hour}, handler.instants())
	})
}

// TestRoundedUp shows the ladder's unit: a message is late by less than one.
func TestRoundedUp(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		handler := newRecorder()
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Destinations: []string{"mail.due"}}, handler.handle)
		publish(t, b, "mail.due", 1250*time.Millisecond, "hello")
		b.Drain()
		assert.Equal(t, []record{{2 * time.Second, "mails", "hello", 1, 750 * time.Millisecond}}, handler.seen)
		assert.Equal(t, 1250*time.Millisecond, b.Published()[0].Delay)
	})
}

func TestPublishAt(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		handler := newRecorder()
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Destinations: []string{"mail.due"}}, handler.handle)
		time.Sleep(time.Hour)
		require.NoError(t, b.Publisher().PublishAt(t.Context(), "mail.due", handler.start, amqp.Publishing{Body: []byte("passed")}))
		require.NoError(t, b.Publisher().PublishAt(t.Context(), "mail.due", handler.start.Add(25*time.Hour), amqp.Publishing{Body: []byte("tomorrow")}))
		b.Drain()
		assert.Equal(t, []record{{time.Hour, "mails", "passed", 1, time.Hour}, {25 * time.Hour, "mails", "tomorrow", 1, 0}}, handler.seen)
		assert.Zero(t, b.Published()[0].Delay)
		assert.Equal(t, 24*time.Hour, b.Published()[1].Delay)
	})
}

// TestDeliveryLooksReal compares what a handler sees with what comes from RabbitMQ.
func TestDeliveryLooksReal(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		when := time.Date(2030, 1, 2, 3, 4, 5, 678, time.UTC)
		var got *ladder.Delivery
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Destinations: []string{"mail.due"}}, func(_ context.Context, d *ladder.Delivery) error {
			got = d
			assert.ErrorIs(t, d.Ack(false), ladder.ErrSettledByRun)
			return nil
		})
		time.Sleep(1500 * time.Millisecond)
		require.NoError(t, b.Publisher().PublishDelayed(t.Context(), "mail.due", 6*time.Second, amqp.Publishing{
			Headers:  amqp.Table{"int": 1, "table": amqp.Table{"time": when}, "bytes": []byte("b"), "x-death": []any{}, "ladder-x": true},
			Priority: 3, ContentType: "text/plain", CorrelationId: "c", ReplyTo: "r", Type: "t", AppId: "a", Expiration: "",
		}))
		b.Drain()
		require.NotNil(t, got)
		start := got.NotBefore.Add(-7500 * time.Millisecond)
		assert.Equal(t, amqp.Table{
			"int": int64(1), "table": amqp.Table{"time": time.Unix(when.Unix(), 0)}, "bytes": []byte("b"),
			ladder.HeaderNotBefore: start.Add(7500 * time.Millisecond).UnixMilli(),
		}, got.Headers)
		assert.NotEmpty(t, got.MessageId)
		assert.Equal(t, time.Unix(start.Unix()+1, 0), got.Timestamp)
		assert.Equal(t, amqp.Persistent, got.DeliveryMode)
		assert.Equal(t, "ladder.20x1s.level-00", got.Exchange)
		assert.Equal(t, strings.Repeat("0.", 17)+"1.1.0.mail.due", got.RoutingKey)
		assert.Equal(t, []byte{}, got.Body)
		assert.Equal(t, uint64(1), got.DeliveryTag)
		assert.NotEmpty(t, got.ConsumerTag)
		assert.Equal(t, []any{uint8(3), "text/plain", "c", "r", "t", "a"}, []any{got.Priority, got.ContentType, got.CorrelationId, got.ReplyTo, got.Type, got.AppId})
	})
}

// TestRetryTooLarge has a message grow over what a frame holds, as its failure is noted in it.
func TestRetryTooLarge(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		handler := newRecorder()
		handler.failures, handler.err = 1, errors.New(strings.Repeat("long", 256))
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Destinations: []string{"mail.due"}}, handler.handle)
		size := 128 << 10
		for b.Publisher().PublishDelayed(t.Context(), "mail.due", 0, amqp.Publishing{Headers: amqp.Table{"big": strings.Repeat("x", size)}}) != nil {
			size -= 100
		}
		b.Drain()
		assert.Len(t, handler.seen, 1)
		require.Len(t, b.Failed("mails"), 1)
		assert.Contains(t, b.Failed("mails")[0].Failure.Reason, "cannot be sent through the ladder")
	})
}

// TestPanic shows that a panic is a failed attempt as any other.
func TestPanic(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Destinations: []string{"mail.due"}, Retry: ladder.NoRetry{}}, func(context.Context, *ladder.Delivery) error {
			panic("no such template")
		})
		publish(t, b, "mail.due", 0, "hello")
		b.Drain()
		require.Len(t, b.Failed("mails"), 1)
		assert.Contains(t, b.Failed("mails")[0].Failure.Reason, "no such template")
	})
}

// TestConsumeFailedQueue consumes the failed queue of another consumer.
func TestConsumeFailedQueue(t *testing.T) {
	t.Parallel()
	run(t, func(t *testing.T, b *laddertest.Broker) {
		undertaker := newRecorder()
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Destinations: []string{"mail.due"}, Retry: ladder.NoRetry{}}, func(context.Context, *ladder.Delivery) error {
			return errDown
		})
		publish(t, b, "mail.due", time.Minute, "hello")
		b.Drain()
		assert.Len(t, b.Failed("mails"), 1)
		b.Consume(ladder.ConsumerConfig{Queue: ladder.FailedQueue("mails")}, undertaker.handle)
		b.Drain()
		assert.Empty(t, b.Failed("mails"))
		assert.Equal(t, []record{{time.Minute, "mails.failed", "hello", 1, 0}}, undertaker.seen)
	})
}

// TestSlackOfRetries has a ladder that prefers one hop of 8 s to three of 7 s.
func TestSlackOfRetries(t *testing.T) {
	t.Parallel()
	l, err := ladder.New(ladder.Config{Slack: 0.2})
	require.NoError(t, err)
	laddertest.Run(t, l, func(t *testing.T, b *laddertest.Broker) { //nolint:thelper // it is the test
		handler := newRecorder()
		handler.failures = 1
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Destinations: []string{"mail.due"}, Retry: ladder.FixedSteps{7 * time.Second}}, handler.handle)
		publish(t, b, "mail.due", 15*time.Second, "x")
		b.Drain()
		assert.Equal(t, []record{
			{16 * time.Second, "mails", "x", 1, time.Second},
			{24 * time.Second, "mails", "x", 2, time.Second},
		}, handler.seen)
		assert.Equal(t, 7*time.Second, b.Published()[1].Delay, "what was asked for")
	})
}
