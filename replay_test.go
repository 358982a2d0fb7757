package ladder_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

// failAll has n messages fail in the queue work, and returns once they are in its failed
// queue. The consumer is stopped then.
func failAll(t *testing.T, l *ladder.Ladder, url string, p *ladder.Publisher, n int) {
	t.Helper()
	stop := start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Destinations: []string{"a", "b"}, Retry: ladder.FixedSteps{0}},
		func(context.Context, *ladder.Delivery) error { return errTest })
	var batch []ladder.Message
	for i := range n {
		batch = append(batch, ladder.Message{
			Destination: []string{"a", "b"}[i%2],
			Publishing:  amqp.Publishing{MessageId: fmt.Sprint(i), Headers: amqp.Table{"own": int64(i)}, Type: []string{"a", "b"}[i%2]},
		})
	}
	require.NoError(t, p.PublishBatch(within(t), batch))
	waitForCount(t, url, "work.failed", n)
	require.NoError(t, stop())
	require.Equal(t, n, messageCount(t, url, "work.failed"))
}

func TestReplayFailed(t *testing.T) {
	t.Parallel()
	const messages = 250 // more than are read at a time
	l, url := small(t), brokertest.VHost(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	failAll(t, l, url, p, messages)

	ch := openChannel(t, url)
	odd := func(d *ladder.Delivery) bool { return d.Destination == "b" }
	n, err := p.ReplayFailed(within(t), ch, "work.failed", odd)
	require.NoError(t, err)
	assert.Equal(t, messages/2, n)
	waitForCount(t, url, "work.failed", messages/2) // the others stay
	waitForCount(t, url, "work", messages/2)

	n, err = p.ReplayFailed(within(t), ch, "work.failed", nil)
	require.NoError(t, err)
	assert.Equal(t, messages/2, n)
	n, err = p.ReplayFailed(within(t), ch, "work.failed", nil)
	require.NoError(t, err)
	assert.Zero(t, n)

	var mu sync.Mutex
	seen := map[string]int{}
	var o handled
	start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Destinations: []string{"a", "b"}, Observer: &o},
		func(_ context.Context, d *ladder.Delivery) error {
			mu.Lock()
			defer mu.Unlock()
			seen[d.MessageId]++
			assert.Equal(t, 1, d.Attempt)
			assert.Nil(t, d.Failure)
			assert.Equal(t, d.Type, d.Destination)
			assert.Equal(t, d.MessageId, fmt.Sprint(d.Headers["own"]))
			assert.GreaterOrEqual(t, d.Lateness, time.Duration(0))
			return nil
		})
	o.waitFor(t, messages)
	assert.Len(t, seen, messages)
	waitForCount(t, url, "work", 0)
	assert.Zero(t, messageCount(t, url, "work.failed"))
}

// TestReplayFailedOfMessagesThatFailAgain does not take those that come in
// meanwhile.
func TestReplayFailedOfMessagesThatFailAgain(t *testing.T) {
	t.Parallel()
	const messages = 120
	l, url := small(t), brokertest.VHost(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	failAll(t, l, url, p, messages)
	start(t, l, ladder.ConsumerConfig{URLs: []string{url}, Queue: "work", Retry: ladder.NoRetry{}},
		func(context.Context, *ladder.Delivery) error { return errTest })
	n, err := p.ReplayFailed(within(t), openChannel(t, url), "work.failed", nil)
	require.NoError(t, err)
	assert.Equal(t, messages, n)
	waitForCount(t, url, "work.failed", messages)
}

func TestReplayFailedOfWhatCannotGoBack(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	failAll(t, l, url, p, 1)
	ch := openChannel(t, url)
	require.NoError(t, ch.Publish("", "work.failed", true, false, amqp.Publishing{MessageId: "foreign"}))
	require.NoError(t, ch.Publish("", "work.failed", true, false, amqp.Publishing{
		MessageId: "homeless", Headers: amqp.Table{ladder.HeaderFailureReason: "none", ladder.HeaderFailureQueue: "gone"},
	}))
	waitForCount(t, url, "work.failed", 3)
	n, err := p.ReplayFailed(within(t), ch, "work.failed", nil)
	assert.Equal(t, 1, n)
	var batch *ladder.BatchError
	require.ErrorAs(t, err, &batch)
	require.Len(t, batch.Failed, 2)
	assert.Equal(t, 1, batch.Failed[0].Index)
	require.ErrorIs(t, batch.Failed[0].Err, ladder.ErrInvalidMessage)
	assert.ErrorContains(t, batch.Failed[0].Err, "foreign")
	assert.Equal(t, 2, batch.Failed[1].Index)
	require.ErrorIs(t, batch.Failed[1].Err, ladder.ErrUnroutable)
	assert.ErrorContains(t, batch.Failed[1].Err, "gone")
	waitForCount(t, url, "work.failed", 2)

	_, err = p.ReplayFailed(within(t), openChannel(t, url), "missing", nil)
	require.ErrorIs(t, err, ladder.ErrTopologyMissing)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = p.ReplayFailed(ended, openChannel(t, url), "work.failed", nil)
	require.ErrorIs(t, err, context.Canceled)
}

// TestReplayFailedInterrupted cuts the connection that it reads with, over and over:
// nothing is lost, and what comes twice was published and not yet acknowledged.
func TestReplayFailedInterrupted(t *testing.T) {
	t.Parallel()
	const messages = 300
	l, direct := small(t), brokertest.VHost(t)
	proxy, through := brokertest.Proxied(t, direct)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{direct}})
	failAll(t, l, direct, p, messages)
	cuts := 0
	read := func() error {
		conn, err := amqp.Dial(through)
		require.NoError(t, err)
		defer func() { _ = conn.Close() }()
		reads := 0
		_, err = p.ReplayFailed(within(t), channelOn(t, conn), "work.failed", func(*ladder.Delivery) bool {
			reads++
			if reads == 50 && cuts < 3 {
				cuts++
				proxy.Cut()
			}
			return true
		})
		return err
	}
	for range 3 {
		require.Error(t, read())
	}
	require.Eventually(t, func() bool { // the broker takes back what was unacknowledged
		err := read()
		var batch *ladder.BatchError
		assert.NotErrorAs(t, err, &batch)
		return messageCount(t, direct, "work.failed") == 0
	}, patience, 200*time.Millisecond)
	require.Equal(t, 3, cuts)

	var mu sync.Mutex
	seen := map[string]int{}
	start(t, l, ladder.ConsumerConfig{URLs: []string{direct}, Queue: "work"}, func(_ context.Context, d *ladder.Delivery) error {
		mu.Lock()
		defer mu.Unlock()
		seen[d.MessageId]++
		return nil
	})
	waitForCount(t, direct, "work", 0)
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(seen) == messages
	}, patience, 20*time.Millisecond)
}

// TestReplayFailedShowsACopy has an accept that settles and changes what it is shown.
func TestReplayFailedShowsACopy(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	failAll(t, l, url, p, 4)
	n, err := p.ReplayFailed(within(t), openChannel(t, url), "work.failed", func(d *ladder.Delivery) bool {
		assert.ErrorIs(t, d.Ack(false), ladder.ErrSettledByRun)
		accepted := d.Destination == "a"
		d.Body, d.MessageId, d.Destination, d.Headers = []byte("changed"), "changed", "changed", amqp.Table{"own": "changed"}
		return accepted
	})
	require.NoError(t, err)
	assert.Equal(t, 2, n)
	waitForCount(t, url, "work.failed", 2)
	waitForCount(t, url, "work", 2)
	var ids []string
	for range 2 {
		d, found, err := openChannel(t, url).Get("work", true)
		require.NoError(t, err)
		require.True(t, found)
		ids = append(ids, d.MessageId)
		assert.Empty(t, d.Body)
		assert.Equal(t, d.MessageId, fmt.Sprint(d.Headers["own"]))
		assert.Equal(t, "a", d.Headers[ladder.HeaderDestination])
	}
	assert.ElementsMatch(t, []string{"0", "2"}, ids)
}

// TestReplayFailedThatPanics gives back what it has read.
func TestReplayFailedThatPanics(t *testing.T) {
	t.Parallel()
	const messages = 150
	l, url := small(t), brokertest.VHost(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	failAll(t, l, url, p, messages)
	ch := openChannel(t, url)
	shown := 0
	assert.Panics(t, func() {
		_, _ = p.ReplayFailed(within(t), ch, "work.failed", func(*ladder.Delivery) bool {
			shown++
			if shown == messages-10 {
				panic(errTest)
			}
			return false
		})
	})
	waitForCount(t, url, "work.failed", messages)

	ctx, cancel := context.WithCancel(t.Context())
	_, err := p.ReplayFailed(ctx, ch, "work.failed", func(*ladder.Delivery) bool {
		cancel()
		return true
	})
	require.ErrorIs(t, err, context.Canceled)
	assert.False(t, ch.IsClosed())
	require.Eventually(t, func() bool { return messageCount(t, url, "work.failed") >= messages-1 }, patience, 50*time.Millisecond,
		"all but one whose reading was interrupted")
}

// TestReplayFailedOfForeignMessages neither sends a message into a level nor
// harms the publisher's session.
func TestReplayFailedOfForeignMessages(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	var o handled
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}, Observer: &o})
	require.NoError(t, p.PublishDelayed(within(t), "nobody", 3*l.Config().Unit, amqp.Publishing{MessageId: "parked"}))
	waitForCount(t, url, l.ParkingQueue(), 1)
	ch := openChannel(t, url)
	require.NoError(t, ch.Publish("", l.ParkingQueue(), true, false, amqp.Publishing{
		MessageId: "forged", Headers: amqp.Table{ladder.HeaderFailureReason: "none", ladder.HeaderFailureQueue: strings.Repeat("q", 300)},
	}))
	waitForCount(t, url, l.ParkingQueue(), 2)
	n, err := p.ReplayFailed(within(t), ch, l.ParkingQueue(), nil)
	assert.Zero(t, n)
	var batch *ladder.BatchError
	require.ErrorAs(t, err, &batch)
	require.Len(t, batch.Failed, 2)
	for i, id := range []string{"parked", "forged"} {
		require.ErrorIs(t, batch.Failed[i].Err, ladder.ErrInvalidMessage)
		require.ErrorContains(t, batch.Failed[i].Err, id)
	}
	waitForCount(t, url, l.ParkingQueue(), 2)
	d, found, err := openChannel(t, url).Get(l.ParkingQueue(), false)
	require.NoError(t, err)
	require.True(t, found)
	assert.Equal(t, "nobody", l.ParseDelivery(d).Destination)
	assert.Zero(t, o.lost())
}
