package ladder_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

// TestConsumerShutdownUnderLoad stops a consumer over and over while handlers of all
// kinds are at work: each message still comes to its end, once.
func TestConsumerShutdownUnderLoad(t *testing.T) {
	const messages, rounds = 3000, 10
	const timeout = time.Second
	l, url := faultLadder(t), brokertest.VHost(t)
	b := newBooks()
	var mu sync.Mutex
	causes := map[error]int{}
	handler := func(ctx context.Context, d *ladder.Delivery) error {
		if numberOf(d)%20 == 0 && rand.N(3) > 0 {
			select {
			case <-time.After(3 * timeout):
			case <-ctx.Done():
				mu.Lock()
				defer mu.Unlock()
				causes[context.Cause(ctx)]++
				return ctx.Err()
			}
		}
		return b.handle(ctx, d)
	}
	config := ladder.ConsumerConfig{
		URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, Concurrency: 50, Prefetch: 200, ShutdownTimeout: timeout, Observer: b,
		Retry: ladder.ExponentialBackoff{Initial: 10 * time.Millisecond, Max: 100 * time.Millisecond, MaxAttempts: faultyAttempts},
	}
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	before := goleak.IgnoreCurrent()
	for round := range rounds {
		stop := start(t, l, config, handler)
		batch := make([]ladder.Message, messages/rounds)
		for i := range batch {
			batch[i] = ladder.Message{Destination: "work", Delay: rand.N(300 * time.Millisecond), Publishing: amqp.Publishing{MessageId: fmt.Sprint(round*len(batch) + i)}}
		}
		require.NoError(t, p.PublishBatch(within(t), batch))
		time.Sleep(rand.N(300 * time.Millisecond)) // for a moment of any kind
		began := time.Now()
		require.NoError(t, stop(), "handlers end with their contexts")
		assert.Less(t, time.Since(began), timeout+10*time.Second, "it goes on for ShutdownTimeout, and closes two connections")
		require.NoError(t, goleak.Find(before))
	}
	mu.Lock()
	assert.Equal(t, []error{ladder.ErrShutdownTimeout}, keys(causes))
	mu.Unlock()

	config.ShutdownTimeout = patience
	stop := start(t, l, config, b.handle)
	stopFailed := start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work.failed", Retry: ladder.NoRetry{}}, b.fail)
	b.waitFor(t, messages)
	waitForCount(t, url, "work", 0)
	require.NoError(t, stop())
	require.NoError(t, stopFailed())
	_, duplicates, wrong := b.over()
	assert.Empty(t, wrong)
	assert.Zero(t, duplicates)
	assert.Zero(t, b.lost)
	assert.Zero(t, messageCount(t, url, "work.failed.failed"), "an attempt that was interrupted is not counted")
	assert.Positive(t, b.outcomes[ladder.OutcomeReturned])
	t.Logf("%v, %d handlers were interrupted", b.outcomes, causes[ladder.ErrShutdownTimeout])
}

func keys(m map[error]int) []error {
	var list []error
	for key := range m {
		list = append(list, key)
	}
	return list
}

// TestConsumerTakesNothingWhileItStops loses its connection while a handler is at work
// and Run's context has ended.
func TestConsumerTakesNothingWhileItStops(t *testing.T) {
	t.Parallel()
	const messages = 10
	l, direct := small(t), brokertest.VHost(t)
	proxy, through := brokertest.Proxied(t, direct)
	c, err := ladder.NewConsumer(l, ladder.ConsumerConfig{
		URLs: []string{through}, Connection: impatient, Queue: "work", Destinations: []string{"work"}, ShutdownTimeout: patience,
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	begun, end, ended := make(chan struct{}, messages+1), make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- c.Run(ctx, func(context.Context, *ladder.Delivery) error {
			begun <- struct{}{}
			<-end
			return nil
		})
	}()
	receive(t, c.Ready())
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{direct}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	receive(t, begun)
	cancel()
	requireState(t, c, ladder.StateStopping)
	proxy.Cut()
	require.Eventually(t, func() bool { return proxy.Connections() == 2 }, patience, 5*time.Millisecond, "connected again")
	for range messages - 1 {
		require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	}
	waitForCount(t, direct, "work", messages)
	close(end)
	require.NoError(t, receive(t, ended))
	assert.Empty(t, begun)
	assert.Equal(t, messages, messageCount(t, direct, "work"))
}

// TestConsumerStopsIdle returns nil whatever the broker does, as no handler is at work.
func TestConsumerStopsIdle(t *testing.T) {
	t.Parallel()
	l, direct := small(t), brokertest.VHost(t)
	nothing := func(context.Context, *ladder.Delivery) error { return nil }
	assert.NoError(t, start(t, l, ladder.ConsumerConfig{URLs: []string{direct}, Queue: "work", ShutdownTimeout: 1}, nothing)())

	proxy, through := brokertest.Proxied(t, direct)
	stop := start(t, l, ladder.ConsumerConfig{URLs: []string{through}, Connection: impatient, Queue: "work", ShutdownTimeout: time.Second}, nothing)
	proxy.StallBoth()
	assert.NoError(t, stop())
}

// TestConsumerStopsWhileSending cannot send on the message of a handler that has returned.
func TestConsumerStopsWhileSending(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	ch := openChannel(t, url)
	_, err := ch.QueueDeclare("full", true, false, false, false, amqp.Table{"x-queue-type": "quorum", "x-max-length": int64(0), "x-overflow": "reject-publish"})
	require.NoError(t, err)
	require.NoError(t, l.Declare(within(t), ch))
	declareBound(t, ch, l, "work", "work", l.RetryDestination("work"))
	failed := make(chan struct{}, 1)
	stop := start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Passive: true, FailedQueue: "full", ShutdownTimeout: 5 * time.Second},
		func(context.Context, *ladder.Delivery) error {
			failed <- struct{}{}
			return ladder.Permanent(errTest)
		})
	require.NoError(t, ch.Publish("", "work", true, false, amqp.Publishing{}))
	receive(t, failed)
	assert.NoError(t, stop())
	assert.Equal(t, 1, messageCount(t, url, "work")+messageCount(t, url, "full"))
}
