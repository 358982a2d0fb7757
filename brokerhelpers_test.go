package ladder_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

// patience is how long a test waits for what must come sooner or later: long
// enough for a loaded machine, since only a failing test waits it out.
const patience = time.Minute

// within returns a context that ends with the test or when patience does.
func within(tb testing.TB) context.Context {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	tb.Cleanup(cancel)
	return ctx
}

// openConnection opens a connection that is closed with the test.
func openConnection(tb testing.TB, url string) *amqp.Connection {
	tb.Helper()
	conn, err := amqp.DialConfig(url, amqp.Config{Heartbeat: 10 * time.Second})
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = conn.Close() })
	return conn
}

// openChannel opens a channel on a connection of its own.
func openChannel(tb testing.TB, url string) *amqp.Channel {
	tb.Helper()
	return channelOn(tb, openConnection(tb, url))
}

func channelOn(tb testing.TB, conn *amqp.Connection) *amqp.Channel {
	tb.Helper()
	ch, err := conn.Channel()
	require.NoError(tb, err)
	return ch
}

// newPublisher opens a publisher that is closed with the test.
func newPublisher(tb testing.TB, l *ladder.Ladder, config ladder.PublisherConfig) *ladder.Publisher {
	tb.Helper()
	p, err := ladder.NewPublisher(within(tb), l, config)
	require.NoError(tb, err)
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		assert.NoError(tb, p.Close(ctx))
	})
	return p
}

// declareBound declares a queue of the ladder's type and binds it.
func declareBound(tb testing.TB, ch *amqp.Channel, l *ladder.Ladder, queue string, destinations ...string) {
	tb.Helper()
	_, err := ch.QueueDeclare(queue, true, false, false, false, amqp.Table{"x-queue-type": string(l.Config().QueueType)})
	require.NoError(tb, err)
	// RabbitMQ 4.3 writes each binding to the disk, and some tests have a thousand.
	ctx, cancel := context.WithTimeout(tb.Context(), 10*patience)
	defer cancel()
	require.NoError(tb, l.Bind(ctx, ch, queue, destinations...))
}

// An arrival is a message as a test's own consumer received it.
type arrival struct {
	*ladder.Delivery
	queue string
	at    time.Time
}

// arrivals collects what arrives at some queues.
type arrivals struct {
	mu  sync.Mutex
	all []arrival
}

// collect consumes queues until the test ends.
func collect(tb testing.TB, ch *amqp.Channel, l *ladder.Ladder, queues ...string) *arrivals {
	tb.Helper()
	require.NoError(tb, ch.Qos(1000, 0, false))
	c := &arrivals{}
	for _, queue := range queues {
		deliveries, err := ch.Consume(queue, "", false, false, false, false, nil)
		require.NoError(tb, err)
		go func() {
			for d := range deliveries {
				a := arrival{Delivery: l.ParseDelivery(d), queue: queue, at: time.Now()}
				c.mu.Lock()
				c.all = append(c.all, a)
				c.mu.Unlock()
				if d.Ack(false) != nil {
					return
				}
			}
		}()
	}
	return c
}

func (c *arrivals) list() []arrival {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]arrival(nil), c.all...)
}

// waitFor waits until n different messages have arrived, and returns all
// arrivals.
func (c *arrivals) waitFor(tb testing.TB, n int) []arrival {
	tb.Helper()
	var list []arrival
	require.EventuallyWithT(tb, func(t *assert.CollectT) {
		list = c.list()
		ids := map[string]bool{}
		for _, a := range list {
			ids[a.MessageId] = true
		}
		assert.GreaterOrEqual(t, len(ids), n, "messages arrived")
	}, patience, 20*time.Millisecond)
	return list
}

// requireOnTime checks that no message came before it was due, by its header.
// Broker, publisher and consumer share this machine's clock.
func requireOnTime(tb testing.TB, list []arrival) {
	tb.Helper()
	for _, a := range list {
		require.False(tb, a.NotBefore.IsZero(), "message %s has no ladder-not-before", a.MessageId)
		require.False(tb, a.at.Before(a.NotBefore), "message %s came %v early", a.MessageId, a.NotBefore.Sub(a.at))
	}
}

// messageCount returns the number of ready messages in a queue.
func messageCount(tb testing.TB, url, queue string) int {
	tb.Helper()
	conn := openConnection(tb, url)
	defer func() { _ = conn.Close() }()
	q, err := channelOn(tb, conn).QueueDeclarePassive(queue, true, false, false, false, nil)
	require.NoError(tb, err)
	return q.Messages
}

func waitForCount(tb testing.TB, url, queue string, want int) {
	tb.Helper()
	require.Eventually(tb, func() bool { return messageCount(tb, url, queue) == want }, patience, 100*time.Millisecond,
		"queue %s never had %d messages", queue, want)
}

func body(i int) []byte { return fmt.Appendf(nil, "message %d", i) }

// receive receives from a channel, and fails the test if nothing comes.
func receive[T any](tb testing.TB, ch <-chan T) T {
	tb.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(patience):
		require.Fail(tb, "nothing came")
		panic("unreachable")
	}
}

// logQueuesOnFailure shows where messages are when a test has failed.
func logQueuesOnFailure(t *testing.T, broker *brokertest.Broker) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			queues, err := broker.Ctl(ctx, "list_queues", "name", "messages", "messages_ready", "messages_unacknowledged", "messages_dlx", "leader", "online")
			t.Log(queues, err)
		}
	})
}
