package ladder_test

import (
	"context"
	"fmt"
	"math/rand/v2"
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

// running runs a consumer until the test ends.
func running(t *testing.T, l *ladder.Ladder, config ladder.ConsumerConfig, handler ladder.Handler) (c *ladder.Consumer, stop func() error) {
	t.Helper()
	c, err := ladder.NewConsumer(l, config)
	require.NoError(t, err)
	return c, startConsumer(t, c, handler)
}

// requireState waits until a consumer is in a state.
func requireState(t *testing.T, c *ladder.Consumer, want ladder.ConsumerState) {
	t.Helper()
	require.Eventually(t, func() bool { return c.State() == want }, patience, 5*time.Millisecond, "not %s, but %s", want, c.State())
}

func TestConsumerPause(t *testing.T) {
	t.Parallel()
	const messages = 60
	l, url := small(t), brokertest.VHost(t)
	var first, second atomic.Int64
	slow := func(n *atomic.Int64) ladder.Handler {
		return func(context.Context, *ladder.Delivery) error {
			n.Add(1)
			time.Sleep(20 * time.Millisecond)
			return nil
		}
	}
	config := ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, Concurrency: 2, Prefetch: messages}
	c, _ := running(t, l, config, slow(&first))
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	var batch []ladder.Message
	for range messages {
		batch = append(batch, ladder.Message{Destination: "work"})
	}
	require.NoError(t, p.PublishBatch(within(t), batch))
	require.Eventually(t, func() bool { return first.Load() > 4 }, patience, time.Millisecond)
	c.Pause()
	begun := first.Load()
	requireState(t, c, ladder.StatePaused)
	require.NoError(t, c.Healthy())
	// What it had fetched goes to another consumer.
	_, stop := running(t, l, config, slow(&second))
	require.Eventually(t, func() bool { return first.Load()+second.Load() == messages }, patience, 5*time.Millisecond)
	require.NoError(t, stop())
	assert.LessOrEqual(t, first.Load(), begun+2, "handlers that were just beginning")
	assert.Zero(t, messageCount(t, url, "work"))
	begun = first.Load()

	c.Pause() // again
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	waitForCount(t, url, "work", 1)
	c.Resume()
	c.Resume()
	requireState(t, c, ladder.StateConsuming)
	require.Eventually(t, func() bool { return first.Load() == begun+1 }, patience, 5*time.Millisecond)
}

// TestConsumerPausedFromTheStart is paused before it runs, and loses its connection while
// it is.
func TestConsumerPausedFromTheStart(t *testing.T) {
	t.Parallel()
	l, direct := small(t), brokertest.VHost(t)
	proxy, through := brokertest.Proxied(t, direct)
	got := make(chan string, 10)
	c, err := ladder.NewConsumer(l, ladder.ConsumerConfig{URLs: []string{through}, Connection: impatient, Queue: "work", Destinations: []string{"work"}})
	require.NoError(t, err)
	assert.Equal(t, ladder.StateNew, c.State())
	require.ErrorContains(t, c.Healthy(), "new")
	c.Pause()
	stop := startConsumer(t, c, func(_ context.Context, d *ladder.Delivery) error {
		got <- d.MessageId
		return nil
	})
	assert.Equal(t, ladder.StatePaused, c.State())
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{direct}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{MessageId: "first"}))
	waitForCount(t, direct, "work", 1)

	proxy.Refuse()
	proxy.Cut()
	requireState(t, c, ladder.StateConnecting)
	require.Eventually(t, func() bool { return c.Healthy() != nil }, patience, 5*time.Millisecond)
	require.ErrorIs(t, c.Healthy(), ladder.ErrNotConnected)
	proxy.Pass()
	requireState(t, c, ladder.StatePaused)
	require.Eventually(t, func() bool { return c.Healthy() == nil }, patience, 5*time.Millisecond, "the connection for retries is back too")
	assert.Equal(t, 1, messageCount(t, direct, "work"))
	c.Resume()
	assert.Equal(t, "first", receive(t, got))
	require.NoError(t, stop())
	assert.Equal(t, ladder.StateStopped, c.State())
	require.ErrorContains(t, c.Healthy(), "stopped")
}

// TestConsumerPausedAtRandom loses nothing and handles nothing twice, although it
// pauses and resumes all the time.
func TestConsumerPausedAtRandom(t *testing.T) {
	t.Parallel()
	const messages = 1000
	l, url := faultLadder(t), brokertest.VHost(t)
	b := newBooks()
	c, stop := running(t, l, ladder.ConsumerConfig{
		URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, Concurrency: 8, Prefetch: 100, Observer: b,
		Retry: ladder.ExponentialBackoff{Initial: 10 * time.Millisecond, Max: 50 * time.Millisecond, MaxAttempts: faultyAttempts},
	}, b.handle)
	stopFailed := start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work.failed", Retry: ladder.NoRetry{}}, b.fail)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	batch := make([]ladder.Message, messages)
	for i := range batch {
		batch[i] = ladder.Message{Destination: "work", Delay: rand.N(2 * time.Second), Publishing: amqp.Publishing{MessageId: fmt.Sprint(i)}}
	}
	done := make(chan struct{})
	var pausing sync.WaitGroup
	pausing.Go(func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(rand.N(30 * time.Millisecond)):
			}
			c.Pause()
			time.Sleep(rand.N(15 * time.Millisecond))
			c.Resume()
		}
	})
	require.NoError(t, p.PublishBatch(within(t), batch))
	b.waitFor(t, messages)
	close(done)
	pausing.Wait()
	waitForCount(t, url, "work", 0)
	require.NoError(t, stop())
	require.NoError(t, stopFailed())
	_, duplicates, wrong := b.over()
	assert.Empty(t, wrong)
	assert.Zero(t, duplicates)
	assert.Zero(t, b.lost)
	assert.Zero(t, messageCount(t, url, "work.failed.failed"))
}

// TestConsumerInAMemoryAlarm has handlers fail while the broker takes no
// publishes.
func TestConsumerInAMemoryAlarm(t *testing.T) {
	t.Parallel()
	const messages = 40
	broker := brokertest.Private(t)
	l, url := faultLadder(t), broker.AMQPURL()
	var o handled
	c, stop := running(t, l, ladder.ConsumerConfig{
		URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, Concurrency: 4, Observer: &o, Retry: ladder.FixedSteps{10 * time.Millisecond},
	}, func(context.Context, *ladder.Delivery) error { return errTest })
	c.Pause()
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	batch := make([]ladder.Message, messages)
	for i := range batch {
		batch[i] = ladder.Message{Destination: "work"}
	}
	require.NoError(t, p.PublishBatch(within(t), batch))
	waitForCount(t, url, "work", messages)
	_, err := broker.Ctl(within(t), "set_vm_memory_high_watermark", "0")
	require.NoError(t, err)
	c.Resume()
	require.Eventually(t, func() bool { return c.Healthy() != nil }, patience, 5*time.Millisecond)
	require.ErrorIs(t, c.Healthy(), ladder.ErrBlocked)
	assert.Less(t, len(o.list()), 8, "nothing is settled that is not stored; what came before the broker noticed is")
	_, err = broker.Ctl(within(t), "set_vm_memory_high_watermark", "0.9")
	require.NoError(t, err)
	waitForCount(t, url, "work.failed", messages)
	require.Eventually(t, func() bool { return c.Healthy() == nil }, patience, 5*time.Millisecond)
	require.NoError(t, stop())
	assert.Zero(t, messageCount(t, url, "work"))
	assert.Equal(t, messages, messageCount(t, url, "work.failed"))
}
