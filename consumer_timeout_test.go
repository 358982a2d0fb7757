package ladder_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

// TestConsumerTimeoutOfTheBroker has a handler that takes longer than the broker's
// consumer_timeout: the broker takes the message back, and whatever else the consumer has.
func TestConsumerTimeoutOfTheBroker(t *testing.T) {
	t.Parallel()
	broker := brokertest.Private(t)
	_, err := broker.Ctl(within(t), "eval", "application:set_env(rabbit, consumer_timeout, 1000), application:set_env(rabbit, channel_tick_interval, 200).")
	require.NoError(t, err)
	l, url := small(t), broker.AMQPURL()
	var o handled
	var slow atomic.Int64
	release := make(chan struct{})
	stop := start(t, l, ladder.ConsumerConfig{
		URLs: []string{url}, Queue: "work", Destinations: []string{"work"}, Observer: &o,
	}, func(_ context.Context, d *ladder.Delivery) error {
		if d.MessageId == "slow" && slow.Add(1) == 1 {
			<-release // it does not look at its context
		}
		return nil
	})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{MessageId: "slow"}))
	// It comes again while the first handler is still at work.
	require.Eventually(t, func() bool { return slow.Load() >= 2 }, patience, 10*time.Millisecond)
	events := o.waitFor(t, 1)
	assert.Equal(t, ladder.OutcomeHandled, events[0].Outcome)
	close(release)
	stale := o.waitFor(t, 2)[1]
	assert.Equal(t, ladder.OutcomeLost, stale.Outcome)
	require.ErrorIs(t, stale.SettleErr, ladder.ErrSessionLost)
	for range 100 {
		require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	}
	for _, e := range o.waitFor(t, 102)[2:] {
		assert.Equal(t, ladder.OutcomeHandled, e.Outcome)
	}
	require.NoError(t, stop())
	assert.Zero(t, messageCount(t, url, "work"))
}
