package ladder_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
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

// start runs a consumer and waits until it consumes. The returned function ends
// its context and returns what Run returned; it is called at the end of the test in any case.
func start(t *testing.T, l *ladder.Ladder, config ladder.ConsumerConfig, handler ladder.Handler) (stop func() error) {
	t.Helper()
	c, err := ladder.NewConsumer(l, config)
	require.NoError(t, err)
	return startConsumer(t, c, handler)
}

func startConsumer(t *testing.T, c *ladder.Consumer, handler ladder.Handler) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	var result error
	go func() {
		result = c.Run(ctx, handler)
		close(ended)
	}()
	stop = func() error {
		cancel()
		select {
		case <-ended:
		case <-time.After(patience):
			assert.Fail(t, "Run did not return")
		}
		return result
	}
	t.Cleanup(func() { _ = stop() })
	select {
	case <-c.Ready():
	case <-ended:
		require.NoError(t, result)
	case <-time.After(patience):
		require.Fail(t, "the consumer is not ready")
	}
	return stop
}

func TestConsumerHandlesWhatIsDue(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	const messages = 200
	got := make(chan *ladder.Delivery, messages)
	stop := start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Destinations: []string{"a", "b.c"}},
		func(_ context.Context, d *ladder.Delivery) error {
			got <- d
			return nil
		})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	var batch []ladder.Message
	for i := range messages {
		batch = append(batch, ladder.Message{
			Destination: []string{"a", "b.c"}[i%2], Delay: time.Duration(i) * time.Millisecond, Publishing: amqp.Publishing{Body: body(i)},
		})
	}
	require.NoError(t, p.PublishBatch(within(t), batch))
	seen := map[string]bool{}
	for range messages {
		select {
		case d := <-got:
			seen[string(d.Body)] = true
			assert.GreaterOrEqual(t, d.Lateness, time.Duration(0))
			assert.Contains(t, []string{"a", "b.c"}, d.Destination)
			assert.NotContains(t, d.Headers, "x-death")
		case <-time.After(patience):
			require.Fail(t, "lost")
		}
	}
	assert.Len(t, seen, messages)
	require.NoError(t, stop())
	assert.Zero(t, messageCount(t, url, "work"))
}

func TestConsumerPutsBackWhatFails(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	const failures = 30 // more than RabbitMQ 4's default delivery limit
	var calls atomic.Int64
	done := make(chan struct{})
	stop := start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, Retry: ladder.ExponentialBackoff{Initial: time.Millisecond, Max: 20 * time.Millisecond, MaxAttempts: -1}},
		func(context.Context, *ladder.Delivery) error {
			switch n := calls.Add(1); {
			case n > failures:
				close(done)
				return nil
			case n%3 == 0:
				panic("a handler's panic")
			case n%3 == 1:
				runtime.Goexit()
			}
			return errors.New("a handler's error")
		})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	select {
	case <-done:
	case <-time.After(patience):
		require.Fail(t, "the message was lost", "after %d calls", calls.Load())
	}
	require.NoError(t, stop())
	assert.Equal(t, int64(failures+1), calls.Load())
	assert.Zero(t, messageCount(t, url, "work"))
}

func TestConsumerSettlesItself(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	errs := make(chan error, 3)
	stop := start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Destinations: []string{"work"}},
		func(_ context.Context, d *ladder.Delivery) error {
			errs <- d.Ack(true)
			errs <- d.Nack(true, false)
			errs <- d.Reject(false)
			return nil
		})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	for range 3 {
		require.ErrorIs(t, receive(t, errs), ladder.ErrSettledByRun)
	}
	require.NoError(t, stop())
	assert.Zero(t, messageCount(t, url, "work"))
}

func TestConsumerConcurrency(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	const concurrency = 4
	var working, most atomic.Int64
	full := make(chan struct{})
	var once sync.Once
	var handled atomic.Int64
	start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, Concurrency: concurrency, Prefetch: 100},
		func(ctx context.Context, _ *ladder.Delivery) error {
			if n := working.Add(1); n > most.Load() {
				most.Store(n)
			}
			if working.Load() == concurrency {
				once.Do(func() { close(full) })
			}
			select { // the first ones wait for each other
			case <-full:
			case <-ctx.Done():
			}
			working.Add(-1)
			handled.Add(1)
			return nil
		})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishBatch(within(t), make20(t)))
	require.Eventually(t, func() bool { return handled.Load() == 20 }, patience, 10*time.Millisecond)
	assert.LessOrEqual(t, most.Load(), int64(concurrency))
}

func TestConsumerDrainsOnShutdown(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	begun, release := make(chan struct{}, 20), make(chan struct{})
	var handled atomic.Int64
	stop := start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, Concurrency: 3, Prefetch: 10},
		func(ctx context.Context, _ *ladder.Delivery) error {
			begun <- struct{}{}
			<-release
			assert.NoError(t, ctx.Err(), "a handler may go on after the end of Run's context")
			handled.Add(1)
			return nil
		})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishBatch(within(t), make20(t)))
	for range 3 {
		receive(t, begun)
	}
	result := make(chan error, 1)
	go func() { result <- stop() }()
	// The others are given back while three handlers are still at work.
	waitForCount(t, url, "work", 17)
	select {
	case err := <-result:
		require.Fail(t, "Run did not wait for its handlers", "%v", err)
	default:
	}
	close(release)
	require.NoError(t, receive(t, result))
	assert.Equal(t, int64(3), handled.Load())
	waitForCount(t, url, "work", 17)
}

// TestConsumerStopsAfterItsAcknowledgements has very many handlers end at the same time, at
// the end: RabbitMQ holds back most of their acknowledgements for a moment, and would
// forget them if the consumer left at once.
func TestConsumerStopsAfterItsAcknowledgements(t *testing.T) {
	t.Parallel()
	const messages = 1000
	l, url := small(t), brokertest.VHost(t)
	release := make(chan struct{})
	var begun atomic.Int64
	stop := start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, Concurrency: messages, Prefetch: messages},
		func(context.Context, *ladder.Delivery) error {
			begun.Add(1)
			<-release
			return nil
		})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishBatch(within(t), slices.Repeat([]ladder.Message{{Destination: "work"}}, messages)))
	require.Eventually(t, func() bool { return begun.Load() == messages }, patience, 5*time.Millisecond)
	time.AfterFunc(200*time.Millisecond, func() { close(release) }) // most likely after the consumer was cancelled
	require.NoError(t, stop())
	for range 5 { // the queue takes back what was not acknowledged within a moment
		assert.Zero(t, messageCount(t, url, "work"))
		time.Sleep(50 * time.Millisecond)
	}
}

// TestConsumerLosesItsConnection cuts the connection while a handler is at work.
func TestConsumerLosesItsConnection(t *testing.T) {
	t.Parallel()
	l, direct := small(t), brokertest.VHost(t)
	proxy, through := brokertest.Proxied(t, direct)
	type call struct {
		body string
		ctx  context.Context
	}
	calls, release := make(chan call, 10), make(chan struct{})
	stop := start(t, l, ladder.ConsumerConfig{URLs: []string{through}, Connection: impatient, Queue: "work", Destinations: []string{"work"}, Concurrency: 2, Prefetch: 2},
		func(ctx context.Context, d *ladder.Delivery) error {
			calls <- call{string(d.Body), ctx}
			<-release
			return nil
		})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{direct}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{Body: []byte("first")}))
	first := receive(t, calls)
	proxy.Cut()
	<-first.ctx.Done() // that the session was lost
	again := receive(t, calls)
	assert.Equal(t, "first", again.body, "the broker gives it to someone else")
	require.NoError(t, again.ctx.Err())
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{Body: []byte("second")}))
	// The late acknowledgement of the first call must not be taken for one of
	// the second message.
	close(release)
	assert.Equal(t, "second", receive(t, calls).body)
	waitForCount(t, direct, "work", 0)
	require.NoError(t, stop())
	assert.Zero(t, messageCount(t, direct, "work"))
}

// TestConsumerWaitsForHandlersOfALostSession ends Run's context while there is
// no connection.
func TestConsumerWaitsForHandlersOfALostSession(t *testing.T) {
	t.Parallel()
	for name, timeout := range map[string]time.Duration{"in time": patience, "too late": 200 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, direct := small(t), brokertest.VHost(t)
			proxy, through := brokertest.Proxied(t, direct)
			begun, release, ended := make(chan struct{}, 1), make(chan struct{}), make(chan struct{})
			stop := start(t, l, ladder.ConsumerConfig{URLs: []string{through}, Connection: impatient, Queue: "work", Destinations: []string{"work"}, ShutdownTimeout: timeout},
				func(context.Context, *ladder.Delivery) error {
					begun <- struct{}{}
					<-release
					close(ended)
					return nil
				})
			p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{direct}})
			require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
			receive(t, begun)
			proxy.Refuse()
			proxy.Cut()
			result := make(chan error, 1)
			go func() { result <- stop() }()
			if timeout < patience {
				require.ErrorIs(t, receive(t, result), ladder.ErrShutdownTimeout)
				close(release)
				return
			}
			select {
			case err := <-result:
				require.Fail(t, "Run did not wait", "%v", err)
			case <-time.After(300 * time.Millisecond): // for what must not happen
			}
			close(release)
			require.NoError(t, receive(t, result))
			select {
			case <-ended:
			default:
				require.Fail(t, "Run did not wait for the handler's end")
			}
		})
	}
}

// TestConsumerShutdownTimeout has a handler that comes to an end when its context does, and
// one that does not.
func TestConsumerShutdownTimeout(t *testing.T) {
	t.Parallel()
	for name, obeys := range map[string]bool{"obeys": true, "goes on": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, url := small(t), brokertest.VHost(t)
			begun, ended, release := make(chan struct{}), make(chan error, 1), make(chan struct{})
			defer close(release)
			var o handled
			stop := start(t, l, ladder.ConsumerConfig{
				URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, ShutdownTimeout: time.Second, Observer: &o,
			}, func(ctx context.Context, _ *ladder.Delivery) error {
				close(begun)
				<-ctx.Done()
				ended <- context.Cause(ctx)
				if !obeys {
					<-release
				}
				return ctx.Err()
			})
			p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
			require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
			receive(t, begun)
			if obeys {
				require.NoError(t, stop())
				assert.Equal(t, ladder.OutcomeReturned, o.list()[0].Outcome)
			} else {
				require.ErrorIs(t, stop(), ladder.ErrShutdownTimeout)
			}
			require.ErrorIs(t, receive(t, ended), ladder.ErrShutdownTimeout)
			waitForCount(t, url, "work", 1)
			assert.Equal(t, 1, attemptInQueue(t, l, url), "an attempt that was interrupted is not counted")
		})
	}
}

// attemptInQueue returns the attempt of the message in the queue work.
func attemptInQueue(t *testing.T, l *ladder.Ladder, url string) int {
	t.Helper()
	d, found, err := openChannel(t, url).Get("work", true)
	require.NoError(t, err)
	require.True(t, found)
	return l.ParseDelivery(d).Attempt
}

func TestConsumerRunErrors(t *testing.T) {
	t.Parallel()
	env := brokertest.For(t)
	l := small(t)
	nothing := func(context.Context, *ladder.Delivery) error { return nil }

	t.Run("twice", func(t *testing.T) {
		t.Parallel()
		url := brokertest.VHost(t)
		c, err := ladder.NewConsumer(l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work"})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, c.Run(ctx, nothing), ladder.ErrNotConnected)
		require.ErrorIs(t, c.Run(t.Context(), nothing), ladder.ErrRunTwice)
	})
	t.Run("wrong password", func(t *testing.T) {
		t.Parallel()
		c, err := ladder.NewConsumer(l, ladder.ConsumerConfig{URLs: []string{env.Broker.UserURL("nobody", "topsecret", env.VHost)}, Queue: "work"})
		require.NoError(t, err)
		err = c.Run(t.Context(), nothing)
		require.ErrorIs(t, err, ladder.ErrAccessRefused)
		assert.NotContains(t, err.Error(), "topsecret")
	})
	t.Run("passive without a queue", func(t *testing.T) {
		t.Parallel()
		c, err := ladder.NewConsumer(l, ladder.ConsumerConfig{URLs: []string{brokertest.VHost(t)}, Queue: "none", Passive: true})
		require.NoError(t, err)
		require.ErrorIs(t, c.Run(t.Context(), nothing), ladder.ErrTopologyMissing)
	})
	t.Run("a queue with other arguments", func(t *testing.T) {
		t.Parallel()
		url := brokertest.VHost(t)
		_, err := openChannel(t, url).QueueDeclare("work", true, false, false, false, nil)
		require.NoError(t, err)
		c, err := ladder.NewConsumer(l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work"})
		require.NoError(t, err)
		var mismatch *ladder.TopologyMismatchError
		require.ErrorAs(t, c.Run(t.Context(), nothing), &mismatch)
		assert.Equal(t, "work", mismatch.Object)
	})
}

// TestConsumerDeclaresAgain deletes the queue under a consumer: the broker
// cancels it, and it must not stop silently.
func TestConsumerDeclaresAgain(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	got := make(chan string, 10)
	start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Destinations: []string{"work"}},
		func(_ context.Context, d *ladder.Delivery) error {
			got <- string(d.Body)
			return nil
		})
	ch := openChannel(t, url)
	_, err := ch.QueueDelete("work", false, false, false)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		if ch.IsClosed() {
			ch = openChannel(t, url)
		}
		q, err := ch.QueueDeclarePassive("work", true, false, false, false, nil)
		return err == nil && q.Consumers > 0
	}, patience, 20*time.Millisecond)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{Body: []byte("again")}))
	select {
	case b := <-got:
		assert.Equal(t, "again", b)
	case <-time.After(patience):
		require.Fail(t, "the consumer stopped")
	}
}

func TestConsumerClassicQueueWithArguments(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	start(t, l, ladder.ConsumerConfig{
		URLs: []string{url}, Queue: "work", QueueType: ladder.Classic, QueueArguments: map[string]any{"x-expires": 60 * 24 * 3600 * 1000},
	}, func(context.Context, *ladder.Delivery) error { return nil })
	// An int is sent as it is, not cut to 32 bits.
	_, err := openChannel(t, url).QueueDeclare("work", true, false, false, false, amqp.Table{"x-queue-type": "classic", "x-expires": int64(60 * 24 * 3600 * 1000)})
	require.NoError(t, err)
}

func TestConsumerConfigRefuses(t *testing.T) {
	t.Parallel()
	l := small(t)
	urls := []string{"amqp://localhost"}
	for name, c := range map[string]struct {
		config ladder.ConsumerConfig
		text   string
	}{
		"no URL":                     {ladder.ConsumerConfig{Queue: "q"}, "URLs"},
		"no queue":                   {ladder.ConsumerConfig{URLs: urls}, "Queue"},
		"a long queue":               {ladder.ConsumerConfig{URLs: urls, Queue: strings.Repeat("q", 256)}, "Queue"},
		"a queue of two lines":       {ladder.ConsumerConfig{URLs: urls, Queue: "a\nb"}, "control characters"},
		"a queue not in UTF-8":       {ladder.ConsumerConfig{URLs: urls, Queue: "\xff"}, "UTF-8"},
		"an argument AMQP lacks":     {ladder.ConsumerConfig{URLs: urls, Queue: "q", QueueArguments: map[string]any{"x-expires": time.Hour}}, "x-expires"},
		"an argument's long name":    {ladder.ConsumerConfig{URLs: urls, Queue: "q", QueueArguments: map[string]any{strings.Repeat("k", 300): 1}}, "300 bytes"},
		"arguments over a frame":     {ladder.ConsumerConfig{URLs: urls, Queue: "q", QueueArguments: map[string]any{"x": strings.Repeat("y", 200_000)}}, "at most 3072"},
		"another queue type":         {ladder.ConsumerConfig{URLs: urls, Queue: "q", QueueType: "stream"}, "QueueType"},
		"negative concurrency":       {ladder.ConsumerConfig{URLs: urls, Queue: "q", Concurrency: -1}, "Concurrency -1"},
		"a huge prefetch":            {ladder.ConsumerConfig{URLs: urls, Queue: "q", Prefetch: 65536}, "Prefetch 65536"},
		"prefetch below concurrency": {ladder.ConsumerConfig{URLs: urls, Queue: "q", Concurrency: 8, Prefetch: 7}, "Prefetch 7: must be 8 to 65535"},
		"a negative prefetch":        {ladder.ConsumerConfig{URLs: urls, Queue: "q", Prefetch: -1}, "Prefetch -1"},
		"a negative handler timeout": {ladder.ConsumerConfig{URLs: urls, Queue: "q", HandlerTimeout: -1}, "HandlerTimeout"},
		"a negative timeout":         {ladder.ConsumerConfig{URLs: urls, Queue: "q", ShutdownTimeout: -1}, "ShutdownTimeout"},
		"a bad destination":          {ladder.ConsumerConfig{URLs: urls, Queue: "q", Destinations: []string{"a.*"}}, "Destinations"},
		"passive with a type":        {ladder.ConsumerConfig{URLs: urls, Queue: "q", Passive: true, QueueType: ladder.Quorum}, "Passive"},
		"passive with bindings":      {ladder.ConsumerConfig{URLs: urls, Queue: "q", Passive: true, Destinations: []string{"a"}}, "Passive"},
		"passive with arguments":     {ladder.ConsumerConfig{URLs: urls, Queue: "q", Passive: true, QueueArguments: map[string]any{"x": 1}}, "Passive"},
		"a huge concurrency":         {ladder.ConsumerConfig{URLs: urls, Queue: "q", Concurrency: 1 << 20}, "Concurrency 1048576"},
		"an empty URL":               {ladder.ConsumerConfig{URLs: []string{""}, Queue: "q"}, "URLs[0] is empty"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := ladder.NewConsumer(l, c.config)
			require.ErrorIs(t, err, ladder.ErrInvalidConfig)
			assert.ErrorContains(t, err, c.text)
		})
	}
}

// TestNothingGiven has nil, and zero values, where something is needed.
func TestNothingGiven(t *testing.T) {
	t.Parallel()
	l := small(t)
	for _, none := range []*ladder.Ladder{nil, {}} {
		_, err := ladder.NewConsumer(none, ladder.ConsumerConfig{URLs: []string{"amqp://localhost"}, Queue: "q"})
		require.ErrorIs(t, err, ladder.ErrInvalidConfig)
		require.ErrorContains(t, err, "ladder is nil")
		_, err = ladder.NewPublisher(within(t), none, ladder.PublisherConfig{URLs: []string{"amqp://localhost"}})
		require.ErrorIs(t, err, ladder.ErrInvalidConfig)
		require.ErrorContains(t, err, "ladder is nil")
	}
	c, err := ladder.NewConsumer(l, ladder.ConsumerConfig{URLs: []string{"amqp://localhost"}, Queue: "q"})
	require.NoError(t, err)
	require.ErrorContains(t, c.Run(within(t), nil), "handler is nil")
	assert.Equal(t, ladder.StateNew, c.State())
	for name, call := range map[string]func() error{
		"Declare": func() error { return l.Declare(within(t), nil) },
		"Verify":  func() error { return l.Verify(within(t), nil) },
		"Bind":    func() error { return l.Bind(within(t), nil, "q", "a") },
		"Unbind":  func() error { return l.Unbind(within(t), nil, "q", "a") },
		"Remove":  func() error { return l.Remove(within(t), nil) },
		"ReplayFailed": func() error {
			_, err := new(ladder.Publisher).ReplayFailed(within(t), nil, "q.failed", nil)
			return err
		},
	} {
		assert.ErrorContains(t, call(), "channel is nil", name)
	}
	assert.Panics(t, func() { ladder.Deduplicate(nil, nil) })
}

func TestParseDelivery(t *testing.T) {
	t.Parallel()
	l := mustLadder(t, ladder.Config{Levels: 3})
	due := time.UnixMilli(time.Now().UnixMilli() - 1500)
	for name, c := range map[string]struct {
		d    amqp.Delivery
		want ladder.Delivery
	}{
		"through the delivery exchange": {
			amqp.Delivery{
				Exchange: l.DeliveryExchange(), RoutingKey: "0.0.0.mail.due",
				Headers: amqp.Table{ladder.HeaderNotBefore: due.UnixMilli(), ladder.HeaderAttempt: int64(4), "x-death": []any{}, "own": 1},
			},
			ladder.Delivery{Destination: "mail.due", NotBefore: due, Attempt: 4, Delivery: amqp.Delivery{Headers: amqp.Table{ladder.HeaderNotBefore: due.UnixMilli(), ladder.HeaderAttempt: int64(4), "own": 1}}},
		},
		"through a level": {
			amqp.Delivery{Exchange: l.Level(1), RoutingKey: "1.0.0.mail"},
			ladder.Delivery{Destination: "mail", Attempt: 1},
		},
		"dead-lettered by the queue that it had come to": {
			amqp.Delivery{RoutingKey: "mailer.failed", Headers: amqp.Table{"x-death": []any{
				amqp.Table{"exchange": "orders", "routing-keys": []any{"an.order"}, "queue": "between"},
				amqp.Table{"exchange": l.DeliveryExchange(), "routing-keys": []any{"0.1.0.mail.due"}, "queue": "mailer"},
				"not of the broker",
			}}},
			ladder.Delivery{Destination: "mail.due", Attempt: 1, Delivery: amqp.Delivery{Headers: amqp.Table{}}},
		},
		"dead-lettered, and never in a ladder": {
			amqp.Delivery{RoutingKey: "orders.failed", Headers: amqp.Table{"x-death": []any{
				amqp.Table{"exchange": "orders", "routing-keys": []any{"0.1.0.mail.due"}, "queue": "orders"},
			}}},
			ladder.Delivery{Destination: "orders.failed", Attempt: 1, Delivery: amqp.Delivery{Headers: amqp.Table{}}},
		},
		"from elsewhere, with a key like the ladder's": {
			amqp.Delivery{Exchange: "orders", RoutingKey: "1.0.0.mail"},
			ladder.Delivery{Destination: "1.0.0.mail", Attempt: 1},
		},
		"with a key that is not the ladder's": {
			amqp.Delivery{Exchange: l.DeliveryExchange(), RoutingKey: "a.b.c.mail"},
			ladder.Delivery{Destination: "a.b.c.mail", Attempt: 1},
		},
		"with headers of other types": {
			amqp.Delivery{RoutingKey: "q", Headers: amqp.Table{ladder.HeaderNotBefore: "soon", ladder.HeaderAttempt: int32(2)}},
			ladder.Delivery{Destination: "q", Attempt: 2, Delivery: amqp.Delivery{Headers: amqp.Table{ladder.HeaderNotBefore: "soon", ladder.HeaderAttempt: int32(2)}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			before := fmt.Sprint(c.d.Headers)
			earliest := time.Since(due)
			got := l.ParseDelivery(c.d)
			latest := time.Since(due)
			assert.Equal(t, c.want.Destination, got.Destination)
			assert.True(t, c.want.NotBefore.Equal(got.NotBefore))
			assert.Equal(t, c.want.Attempt, got.Attempt)
			assert.Len(t, got.Headers, len(c.want.Headers))
			for key, value := range c.want.Headers {
				assert.Equal(t, value, got.Headers[key])
			}
			assert.Equal(t, before, fmt.Sprint(c.d.Headers), "the raw message is as it was")
			if c.want.NotBefore.IsZero() {
				assert.Zero(t, got.Lateness)
			} else {
				assert.GreaterOrEqual(t, got.Lateness, earliest)
				assert.LessOrEqual(t, got.Lateness, latest)
			}
		})
	}
}
