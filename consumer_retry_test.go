package ladder_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

// queueNames returns queue names of all kinds that RabbitMQ allows and that leave room for
// ".failed".
func queueNames() []string {
	return []string{
		"mailer", "mailer.eu", "mailer.eu.", ".mailer", "..", "two words", "*", "#", "a.*.b", "a.#", "a*b", "Ünïcödé 📬",
		"1.0.1.mailer", "ladder-retry.*", strings.Repeat("q", 200), strings.Repeat("q", 201), strings.Repeat("q", 248), strings.Repeat("é", 124),
	}
}

// handled keeps what an Observer is told of a consumer's messages.
type handled struct {
	ladder.NopObserver
	mu       sync.Mutex
	events   []ladder.HandleEvent
	sessions int // lost
}

func (o *handled) SessionLost(ladder.SessionEvent) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sessions++
}

func (o *handled) lost() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.sessions
}

func (o *handled) Handled(_ context.Context, e ladder.HandleEvent) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.events = append(o.events, e)
}

func (o *handled) list() []ladder.HandleEvent {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.events)
}

// waitFor waits until n messages have been settled.
func (o *handled) waitFor(t *testing.T, n int) []ladder.HandleEvent {
	t.Helper()
	require.Eventually(t, func() bool { return len(o.list()) >= n }, patience, 10*time.Millisecond, "%d messages settled", n)
	return o.list()
}

// failedMessages waits for n messages in a failed queue and takes them.
func failedMessages(t *testing.T, l *ladder.Ladder, url, queue string, n int) []*ladder.Delivery {
	t.Helper()
	waitForCount(t, url, queue, n)
	ch := openChannel(t, url)
	var list []*ladder.Delivery
	for range n {
		d, found, err := ch.Get(queue, true)
		require.NoError(t, err)
		require.True(t, found)
		list = append(list, l.ParseDelivery(d))
	}
	return list
}

// TestRetryReturnsToItsQueueAlone has five destinations, each bound to several
// queues, and a handler that fails a number of times.
func TestRetryReturnsToItsQueueAlone(t *testing.T) {
	t.Parallel()
	const perDestination, attempts = 8, 4
	l, url := small(t), brokertest.VHost(t)
	destinations := []string{"a", "b.c", "b.c.d", "email.delivery", "x y"}
	ch := openChannel(t, url)
	require.NoError(t, l.Declare(within(t), ch))
	others := []string{"other-0", "other-1", "other-2"}
	for _, queue := range others {
		declareBound(t, ch, l, queue, destinations...)
	}
	elsewhere := collect(t, openChannel(t, url), l, others...)

	// Message i fails i times; from the fourth time on it goes to the failed
	// queue.
	type call struct {
		*ladder.Delivery
		at time.Time
	}
	var mu sync.Mutex
	calls := map[string][]call{}
	steps := ladder.FixedSteps{50 * time.Millisecond, 0, 120 * time.Millisecond}
	var o handled
	stop := start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Destinations: destinations, Retry: steps, Observer: &o},
		func(_ context.Context, d *ladder.Delivery) error {
			mu.Lock()
			defer mu.Unlock()
			calls[d.MessageId] = append(calls[d.MessageId], call{d, time.Now()})
			var fails int
			_, err := fmt.Sscanf(d.MessageId, "fails %d", &fails)
			assert.NoError(t, err)
			if d.Attempt <= fails {
				return fmt.Errorf("attempt %d of %s", d.Attempt, d.MessageId)
			}
			return nil
		})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	var batch []ladder.Message
	before := time.Now().Truncate(time.Millisecond)
	for _, destination := range destinations {
		for fails := range perDestination {
			batch = append(batch, ladder.Message{
				Destination: destination, Delay: time.Duration(fails) * time.Millisecond,
				Publishing: amqp.Publishing{MessageId: fmt.Sprintf("fails %d %s", fails, destination), Body: []byte(destination)},
			})
		}
	}
	require.NoError(t, p.PublishBatch(within(t), batch))

	// 0 to 3 failures need 1 to 4 attempts, and all others 4.
	const settled = 5 * (1 + 2 + 3 + 4 + 4*attempts)
	events := o.waitFor(t, settled)
	failed := failedMessages(t, l, url, "work.failed", 5*(perDestination-attempts))
	require.NoError(t, stop())
	assert.Len(t, o.list(), settled)
	assert.Zero(t, messageCount(t, url, "work"))

	outcomes := map[ladder.Outcome]int{}
	for _, e := range events {
		outcomes[e.Outcome]++
		require.NoError(t, e.SendErr)
		require.NoError(t, e.SettleErr)
		if e.Outcome == ladder.OutcomeRetried {
			assert.Equal(t, steps[e.Attempt-1], e.RetryDelay)
		}
	}
	assert.Equal(t, map[ladder.Outcome]int{
		ladder.OutcomeHandled: 5 * attempts, ladder.OutcomeFailed: 5 * (perDestination - attempts), ladder.OutcomeRetried: settled - 5*perDestination,
	}, outcomes)

	for id, list := range calls {
		for i, c := range list {
			require.Equal(t, i+1, c.Attempt, id)
			require.Equal(t, string(c.Body), c.Destination, "the handler sees the destination that the message was published to")
			require.Equal(t, "work", c.Queue)
			require.False(t, c.at.Before(c.NotBefore), "%s: attempt %d came early", id, c.Attempt)
			if i == 0 {
				require.Nil(t, c.Failure)
				continue
			}
			last := list[i-1]
			require.GreaterOrEqual(t, c.NotBefore.Sub(last.at.Truncate(time.Millisecond)), steps[i-1], "%s: attempt %d", id, c.Attempt)
			require.Equal(t, fmt.Sprintf("attempt %d of %s", i, id), c.Failure.Reason)
			require.Equal(t, "work", c.Failure.Queue)
			require.False(t, c.Failure.Last.Before(last.at.Truncate(time.Millisecond)))
			if i == 1 {
				require.Equal(t, c.Failure.Last, c.Failure.First)
			} else {
				require.Equal(t, last.Failure.First, c.Failure.First, "the first failure is kept")
			}
		}
	}
	for _, d := range failed {
		assert.Equal(t, attempts, d.Attempt)
		assert.Equal(t, fmt.Sprintf("attempt %d of %s", attempts, d.MessageId), d.Failure.Reason)
		assert.Equal(t, "work", d.Failure.Queue)
		assert.Equal(t, string(d.Body), d.Destination)
		assert.Equal(t, calls[d.MessageId][1].Failure.First, d.Failure.First)
		assert.False(t, d.Failure.First.Before(before))
		assert.True(t, d.Failure.Last.After(d.Failure.First))
		assert.Equal(t, amqp.Persistent, d.DeliveryMode)
	}

	seen := map[string]int{}
	for _, a := range elsewhere.waitFor(t, len(batch)) {
		seen[a.queue+" "+a.MessageId]++
		assert.Equal(t, 1, a.Attempt)
	}
	assert.Len(t, seen, len(others)*len(batch))
	for what, n := range seen {
		assert.Equal(t, 1, n, "%s: a queue that did not fail sees no retry", what)
	}
	assert.Zero(t, messageCount(t, url, l.ParkingQueue()))
}

// TestRetryManyTimes retries a message as it came, twelve times: before 4.0 RabbitMQ would drop
// the second pass of one that brought its x-death header along.
func TestRetryManyTimes(t *testing.T) {
	t.Parallel()
	const attempts = 12
	l, url := small(t), brokertest.VHost(t)
	sent := amqp.Publishing{
		Headers:     amqp.Table{"own": "header", "number": int64(42), "deep": amqp.Table{"list": []any{int32(1), "two"}}},
		ContentType: "text/plain", ContentEncoding: "identity", CorrelationId: "correlation", ReplyTo: "reply", MessageId: "id",
		Timestamp: time.Unix(1_700_000_000, 0), Type: "type", AppId: "app", Body: []byte("body"),
	}
	got := make(chan *ladder.Delivery, attempts)
	stop := start(t, l, ladder.ConsumerConfig{
		URLs: []string{url}, Queue: "work", Destinations: []string{"a.b"},
		// 7 units of 1 ms pass the three lowest levels each time.
		Retry: ladder.ExponentialBackoff{Initial: 7 * time.Millisecond, Max: 7 * time.Millisecond, Jitter: -1, MaxAttempts: attempts},
	}, func(_ context.Context, d *ladder.Delivery) error {
		got <- d
		if d.Attempt < attempts {
			return errTest
		}
		return nil
	})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "a.b", 7*time.Millisecond, sent))
	for attempt := 1; attempt <= attempts; attempt++ {
		d := receive(t, got)
		require.Equal(t, attempt, d.Attempt)
		require.Equal(t, "a.b", d.Destination)
		_, destination, err := l.ParseKey(d.RoutingKey)
		require.NoError(t, err)
		if attempt > 1 {
			require.Equal(t, "ladder-retry.work", destination, "the key does not grow")
		}
		own := amqp.Table{}
		for key, value := range d.Headers {
			require.NotContains(t, key, "x-", "no header of the broker travels along")
			if !strings.HasPrefix(key, "ladder-") {
				own[key] = value
			}
		}
		require.Equal(t, sent.Headers, own)
		require.Equal(t, sent.Timestamp.Unix(), d.Timestamp.Unix())
		require.Equal(t, []string{"text/plain", "identity", "correlation", "reply", "id", "type", "app", "body"},
			[]string{d.ContentType, d.ContentEncoding, d.CorrelationId, d.ReplyTo, d.MessageId, d.Type, d.AppId, string(d.Body)})
	}
	require.NoError(t, stop())
	assert.Zero(t, messageCount(t, url, "work"))
	assert.Zero(t, messageCount(t, url, "work.failed"))
}

func TestRetryOfAnyQueue(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	for _, queue := range queueNames() {
		got := make(chan *ladder.Delivery, 3)
		stop := start(t, l, ladder.ConsumerConfig{
			URLs: []string{url}, Queue: queue, Destinations: []string{"work"}, QueueType: ladder.Classic, Retry: ladder.FixedSteps{0},
		}, func(_ context.Context, d *ladder.Delivery) error {
			got <- d
			return errTest
		})
		ch := openChannel(t, url)
		key, err := l.Route(0, "work")
		require.NoError(t, err)
		require.NoError(t, ch.Publish(key.Exchange, key.Key, true, false, amqp.Publishing{}))
		require.Equal(t, 1, receive(t, got).Attempt, queue)
		d := receive(t, got)
		require.Equal(t, 2, d.Attempt, queue)
		require.Equal(t, "work", d.Destination)
		require.Equal(t, queue, d.Queue)
		waitForCount(t, url, queue+".failed", 1)
		require.NoError(t, stop())
		_, err = ch.QueueDelete(queue, false, false, false) // its binding would catch the next message
		require.NoError(t, err)
	}
	assert.Zero(t, messageCount(t, url, l.ParkingQueue()))
}

func TestRetryAfterCountsNoAttempt(t *testing.T) {
	t.Parallel()
	const after = 20 * time.Millisecond
	l, url := small(t), brokertest.VHost(t)
	var o handled
	var attempts []int // the calls come one after another
	stop := start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, Retry: ladder.FixedSteps{0, 0}, Observer: &o},
		func(_ context.Context, d *ladder.Delivery) error {
			attempts = append(attempts, d.Attempt)
			switch {
			case len(attempts) <= 3 || len(attempts) == 5:
				return fmt.Errorf("busy: %w", ladder.RetryAfter(after))
			case d.Attempt < 3:
				return errTest
			}
			return nil
		})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	delays := map[time.Duration]int{}
	outcomes := map[ladder.Outcome]int{}
	for _, e := range o.waitFor(t, 7) {
		delays[e.RetryDelay]++
		outcomes[e.Outcome]++
	}
	require.NoError(t, stop())
	assert.Equal(t, []int{1, 1, 1, 1, 2, 2, 3}, attempts)
	assert.Equal(t, map[time.Duration]int{after: 4, 0: 3}, delays)
	assert.Equal(t, map[ladder.Outcome]int{ladder.OutcomeRetried: 6, ladder.OutcomeHandled: 1}, outcomes)
}

func TestPermanentGoesToTheFailedQueue(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	var log lockedBuffer
	var o handled
	start(t, l, ladder.ConsumerConfig{
		URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, FailedQueue: "graveyard", Observer: &o, Logger: slog.New(slog.NewTextHandler(&log, nil)),
	}, func(_ context.Context, d *ladder.Delivery) error {
		switch string(d.Body) {
		case "joined":
			return errors.Join(errTest, ladder.Permanent(errors.New("no use")))
		case "over retry after":
			return ladder.Permanent(fmt.Errorf("no use: %w", ladder.RetryAfter(time.Second)))
		}
		return fmt.Errorf("parsing: %w", ladder.Permanent(errors.New(strings.Repeat("é", 5000)+"\xff")))
	})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	bodies := []string{"wrapped", "joined", "over retry after"}
	for _, b := range bodies {
		require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{Body: []byte(b)}))
	}
	for _, d := range failedMessages(t, l, url, "graveyard", len(bodies)) {
		assert.Equal(t, 1, d.Attempt)
		assert.LessOrEqual(t, len(d.Failure.Reason), 1024)
		assert.NotEmpty(t, d.Failure.Reason)
		assert.Equal(t, "work", d.Failure.Queue)
		assert.Equal(t, d.Failure.First, d.Failure.Last)
	}
	for _, e := range o.waitFor(t, len(bodies)) {
		assert.Equal(t, ladder.OutcomeFailed, e.Outcome)
	}
	assert.Contains(t, log.String(), "failed_queue=graveyard")
}

type policyFunc func(attempt int, err error) (time.Duration, bool)

func (f policyFunc) Next(attempt int, err error) (time.Duration, bool) { return f(attempt, err) }

// TestRetryPolicyNonsense has a policy that returns what it should not. The horizon of
// the ladder is short, so that the longest delay can be waited for.
func TestRetryPolicyNonsense(t *testing.T) {
	t.Parallel()
	l, url := mustLadder(t, ladder.Config{Unit: time.Millisecond, Levels: 8}), brokertest.VHost(t)
	var log lockedBuffer
	var o handled
	delays := []time.Duration{-1, math.MinInt64, math.MaxInt64, l.Horizon() + 1}
	start(t, l, ladder.ConsumerConfig{
		URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, Observer: &o, Logger: slog.New(slog.NewTextHandler(&log, nil)),
		Retry: policyFunc(func(attempt int, _ error) (time.Duration, bool) {
			if attempt <= len(delays) {
				return delays[attempt-1], true
			}
			panic("a policy's panic")
		}),
	}, func(context.Context, *ladder.Delivery) error { return errTest })
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	d := failedMessages(t, l, url, "work.failed", 1)[0]
	assert.Equal(t, len(delays)+1, d.Attempt)
	assert.Contains(t, d.Failure.Reason, "a policy's panic")
	assert.Contains(t, d.Failure.Reason, errTest.Error())
	var used []time.Duration
	for _, e := range o.waitFor(t, len(delays)+1) {
		used = append(used, e.RetryDelay)
	}
	assert.ElementsMatch(t, []time.Duration{0, 0, l.Horizon(), l.Horizon(), 0}, used)
	assert.Contains(t, log.String(), "is negative and counts as none")
	assert.Contains(t, log.String(), "is beyond the horizon and counts as 255ms")
}

// TestRetryOfForeignMessages retries messages that other clients put into the queue in
// ways that the publisher would refuse.
func TestRetryOfForeignMessages(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	uri, err := amqp.ParseURI(url)
	require.NoError(t, err)
	config := ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Retry: ladder.FixedSteps{5 * time.Millisecond, 5 * time.Millisecond}}
	var mu sync.Mutex
	attempts := map[string][]int{}
	var o handled
	config.Observer = &o
	start(t, l, config, func(_ context.Context, d *ladder.Delivery) error {
		mu.Lock()
		defer mu.Unlock()
		attempts[d.Type] = append(attempts[d.Type], d.Attempt)
		assert.Equal(t, "work", d.Destination)
		return errTest
	})
	foreign := map[string]amqp.Publishing{
		"expiration":  {Expiration: "60000"},
		"transient":   {DeliveryMode: amqp.Transient},
		"priority":    {Priority: 5},
		"user":        {UserId: uri.Username},
		"carbon copy": {Headers: amqp.Table{"CC": []any{"nowhere"}}},
		"deaths":      {Headers: amqp.Table{"x-death": []any{amqp.Table{"queue": l.Level(0), "reason": "expired", "count": int64(1)}}, "x-first-death-queue": l.Level(0)}},
		"attempts":    {Headers: amqp.Table{"ladder-attempt": int64(-5), "ladder-not-before": "soon", "ladder-failure-first": "once"}},
		"no id":       {},
		"all headers": {Headers: amqp.Table{"nil": nil, "bytes": []byte{0xff}, "text": "\xff", "decimal": amqp.Decimal{Scale: 2, Value: 5}, "time": time.Unix(1, 0), "float": 1.5}},
		// With what the broker adds on the way through the ladder they would
		// not fit into a frame: this one goes to the failed queue at once.
		"large headers": {Headers: amqp.Table{"large": strings.Repeat("x", 128<<10-4096)}},
	}
	// As many headers as can be published: a retry has more of the ladder's own.
	many := amqp.Table{}
	for i := range 8192 - 16 {
		many[fmt.Sprintf("%x", i)] = true
	}
	foreign["many headers"] = amqp.Publishing{Headers: many}
	ch := openChannel(t, url)
	for kind, msg := range foreign {
		msg.Type = kind
		require.NoError(t, ch.Publish("", "work", true, false, msg))
	}
	failed := failedMessages(t, l, url, "work.failed", len(foreign))
	for _, d := range failed {
		assert.Equal(t, "work", d.Failure.Queue, d.Type)
		assert.NotEmpty(t, d.MessageId, d.Type)
		assert.Empty(t, d.Expiration, d.Type)
		assert.Equal(t, "work", d.Destination)
		want := []int{1, 2, 3}
		if d.Type == "large headers" {
			want = []int{1}
			assert.Contains(t, d.Failure.Reason, "cannot be sent through the ladder")
			assert.Contains(t, d.Failure.Reason, errTest.Error())
		}
		mu.Lock()
		assert.Equal(t, want, attempts[d.Type], d.Type)
		mu.Unlock()
		for key, value := range foreign[d.Type].Headers {
			if key != "CC" && !strings.HasPrefix(key, "x-") && !strings.HasPrefix(key, "ladder-") {
				assert.Equal(t, value, d.Headers[key], d.Type)
			}
		}
		if d.Type == "user" {
			assert.Equal(t, uri.Username, d.UserId)
		}
	}
	assert.Zero(t, messageCount(t, url, "work"))
}

// TestFailureWithoutRoomForItsReason has a message whose own headers fill the frame.
func TestFailureWithoutRoomForItsReason(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Retry: ladder.FixedSteps{0}},
		func(context.Context, *ladder.Delivery) error { return errTest })
	large := strings.Repeat("x", 128<<10-300)
	require.NoError(t, openChannel(t, url).Publish("", "work", true, false, amqp.Publishing{MessageId: "id", Headers: amqp.Table{"large": large}}))
	d := failedMessages(t, l, url, "work.failed", 1)[0]
	assert.Equal(t, "id", d.MessageId)
	assert.Len(t, d.Headers["large"], len(large))
	assert.Nil(t, d.Failure)
	waitForCount(t, url, "work", 0)
}

// TestRetryForAnotherUser retries a message of a user that is not the
// consumer's: the broker would take the consumer's for an impostor.
func TestRetryForAnotherUser(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	uri, err := amqp.ParseURI(url)
	require.NoError(t, err)
	got := make(chan *ladder.Delivery, 2)
	start(t, l, ladder.ConsumerConfig{URLs: []string{asUser(t, url, ".*", ".*", ".*")}, Queue: "work", Destinations: []string{"work"}, Retry: ladder.FixedSteps{0}},
		func(_ context.Context, d *ladder.Delivery) error {
			got <- d
			return errTest
		})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{UserId: uri.Username}))
	assert.Equal(t, uri.Username, receive(t, got).UserId)
	assert.Empty(t, receive(t, got).UserId)
	waitForCount(t, url, "work.failed", 1)
}

// TestRetryOfWhatAHandlerChanged has a handler that works on the message in
// place.
func TestRetryOfWhatAHandlerChanged(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	got := make(chan ladder.Delivery, 2)
	start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, Retry: ladder.FixedSteps{0}},
		func(_ context.Context, d *ladder.Delivery) error {
			seen := *d
			seen.Body, seen.Headers = bytes.Clone(d.Body), amqp.Table{"own": d.Headers["own"], "list": slices.Clone(d.Headers["list"].([]any))}
			got <- seen
			clear(d.Body)
			d.Headers["own"] = "changed"
			d.Headers["list"].([]any)[0] = "changed"
			d.Headers["more"] = struct{}{}
			d.MessageId, d.Destination, d.Attempt, d.Queue, d.ContentType, d.Failure = "other", "other", 99, "other", "other", nil
			return errTest
		})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{MessageId: "id", Headers: amqp.Table{"own": "header", "list": []any{"first"}}, Body: []byte("body")}))
	check := func(d *ladder.Delivery, attempt int) {
		assert.Equal(t, attempt, d.Attempt)
		assert.Equal(t, []string{"id", "body", "work", ""}, []string{d.MessageId, string(d.Body), d.Destination, d.ContentType})
		assert.Equal(t, "header", d.Headers["own"])
		assert.Equal(t, []any{"first"}, d.Headers["list"])
		assert.NotContains(t, d.Headers, "more")
	}
	for attempt := range 2 {
		d := receive(t, got)
		check(&d, attempt+1)
	}
	check(failedMessages(t, l, url, "work.failed", 1)[0], 2)
}

// A brokenError is an error whose methods panic for a nil pointer, which is not a
// nil error.
type brokenError struct{ err error }

func (e *brokenError) Error() string { return e.err.Error() }
func (e *brokenError) Unwrap() error { return e.err }

func TestHandlerReturnsABrokenError(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	var log lockedBuffer
	start(t, l, ladder.ConsumerConfig{
		URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, Retry: ladder.FixedSteps{0}, Logger: slog.New(slog.NewJSONHandler(&log, nil)),
	}, func(context.Context, *ladder.Delivery) error {
		var broken *brokenError
		return broken
	})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	d := failedMessages(t, l, url, "work.failed", 1)[0]
	assert.Equal(t, 2, d.Attempt)
	assert.NotEmpty(t, d.Failure.Reason)
}

// TestFailureThatCannotBeStored takes the permission for the failed queue from a
// consumer: its message goes back into the queue until it is there again.
func TestFailureThatCannotBeStored(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	limited := asUser(t, url, ".*", `^(?!amq\.default$)`, ".*")
	var o handled
	start(t, l, ladder.ConsumerConfig{URLs: []string{limited}, Queue: "work", Destinations: []string{"work"}, Observer: &o},
		func(context.Context, *ladder.Delivery) error { return ladder.Permanent(errTest) })
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	for _, e := range o.waitFor(t, 3)[:3] {
		assert.Equal(t, ladder.OutcomeReturned, e.Outcome)
		require.ErrorIs(t, e.SendErr, ladder.ErrAccessRefused)
		require.ErrorIs(t, e.Err, errTest)
		assert.Equal(t, 1, e.Attempt, "an attempt that came to nothing is not counted")
	}
	uri, err := amqp.ParseURI(limited)
	require.NoError(t, err)
	require.NoError(t, brokertest.For(t).Broker.AddUser(within(t), uri.Username, uri.Password, uri.Vhost, ".*", ".*", ".*"))
	waitForCount(t, url, "work.failed", 1)
	waitForCount(t, url, "work", 0)
}

func TestFailedQueueIsDeclaredAgain(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, Retry: ladder.NoRetry{}},
		func(context.Context, *ladder.Delivery) error { return errTest })
	_, err := openChannel(t, url).QueueDelete("work.failed", false, false, false)
	require.NoError(t, err)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	require.Eventually(t, func() bool {
		q, err := openChannel(t, url).QueueDeclarePassive("work.failed", true, false, false, false, nil)
		return err == nil && q.Messages == 1
	}, patience, 100*time.Millisecond)
	waitForCount(t, url, "work", 0)
}

// TestPassiveConsumerRetries has everything declared by others, and a user with
// no permission to configure.
func TestPassiveConsumerRetries(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	ch := openChannel(t, url)
	require.NoError(t, l.Declare(within(t), ch))
	declareBound(t, ch, l, "work", "work", l.RetryDestination("work"))
	_, err := ch.QueueDeclare(ladder.FailedQueue("work"), true, false, false, false, amqp.Table{"x-queue-type": "quorum"})
	require.NoError(t, err)
	limited := asUser(t, url, "", `^(`+strings.ReplaceAll(l.String(), ".", `\.`)+`\.(level-|delivery$)|amq\.default$)`, "^work$")
	var o handled
	start(t, l, ladder.ConsumerConfig{URLs: []string{limited}, Queue: "work", Passive: true, Retry: ladder.FixedSteps{3 * time.Millisecond}, Observer: &o},
		func(context.Context, *ladder.Delivery) error { return errTest })
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	waitForCount(t, url, "work.failed", 1)
	events := o.waitFor(t, 2)
	assert.ElementsMatch(t, []ladder.Outcome{ladder.OutcomeRetried, ladder.OutcomeFailed}, []ladder.Outcome{events[0].Outcome, events[1].Outcome})
}

func TestHandlerTimeout(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	causes := make(chan error, 1)
	start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, HandlerTimeout: 20 * time.Millisecond, Retry: ladder.NoRetry{}},
		func(ctx context.Context, _ *ladder.Delivery) error {
			<-ctx.Done()
			causes <- context.Cause(ctx)
			return ctx.Err()
		})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	require.ErrorIs(t, receive(t, causes), context.DeadlineExceeded)
	assert.Equal(t, context.DeadlineExceeded.Error(), failedMessages(t, l, url, "work.failed", 1)[0].Failure.Reason)
}

func TestPanicIsLoggedWithItsStack(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	var log lockedBuffer
	var o handled
	start(t, l, ladder.ConsumerConfig{
		URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, Retry: ladder.NoRetry{}, Observer: &o, Logger: slog.New(slog.NewTextHandler(&log, nil)),
	}, panicking)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	var panicked *ladder.PanicError
	require.ErrorAs(t, o.waitFor(t, 1)[0].Err, &panicked)
	assert.Equal(t, "a handler's panic", panicked.Value)
	assert.Contains(t, log.String(), "ladder_test.panicking")
	assert.Equal(t, "ladder: handler panicked: a handler's panic", failedMessages(t, l, url, "work.failed", 1)[0].Failure.Reason)
}

func panicking(context.Context, *ladder.Delivery) error { panic("a handler's panic") }

// A lockedBuffer takes a logger's output while a test reads it.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// TestConsumerFailsWhatItReceived has messages that are as large, or nested as deep, as
// what amqp091-go receives.
func TestConsumerFailsWhatItReceived(t *testing.T) {
	t.Parallel()
	integers := amqp.Table{}
	for k := range 2 {
		list := make([]any, 8000)
		for i := range list {
			list[i] = int32(i)
		}
		integers[fmt.Sprint("list", k)] = list
	}
	deep := any("bottom")
	for range 32 {
		deep = amqp.Table{"t": deep}
	}
	for name, headers := range map[string]amqp.Table{"integers": integers, "deep": {"deep": deep}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, url := small(t), brokertest.VHost(t)
			var o handled
			start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Observer: &o}, func(context.Context, *ladder.Delivery) error {
				return ladder.Permanent(errTest)
			})
			require.NoError(t, openChannel(t, url).Publish("", "work", true, false, amqp.Publishing{Headers: headers}))
			waitForCount(t, url, "work.failed", 1)
			require.Equal(t, ladder.OutcomeFailed, o.waitFor(t, 1)[0].Outcome)
		})
	}
}

type panickingObserver struct{ ladder.NopObserver }

func (panickingObserver) Handled(context.Context, ladder.HandleEvent) { panic(errTest) }

func TestConsumerWithAPanickingObserver(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	var log lockedBuffer
	var calls atomic.Int32
	start(t, l, ladder.ConsumerConfig{
		URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, Observer: panickingObserver{}, Logger: slog.New(slog.NewTextHandler(&log, nil)),
	}, func(context.Context, *ladder.Delivery) error { calls.Add(1); return nil })
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	for range 3 {
		require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	}
	require.Eventually(t, func() bool { return calls.Load() == 3 && strings.Count(log.String(), "the Observer panicked") == 3 }, patience, 10*time.Millisecond)
	waitForCount(t, url, "work", 0)
}
