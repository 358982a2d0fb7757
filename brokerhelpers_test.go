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
)

// patience is how long a test waits for what must come sooner or later: long
// enough for a loaded machine, since only a failing test waits it out.
const patience = time.Minute

// within returns a context that ends with the test or when patience does.
func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// openConnection opens a connection that is closed with the test.
func openConnection(t testing.TB, url string) *amqp.Connection {
	t.Helper()
	conn, err := amqp.DialConfig(url, amqp.Config{Heartbeat: 10 * time.Second})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// openChannel opens a channel on a connection of its own.
func openChannel(t testing.TB, url string) *amqp.Channel {
	t.Helper()
	return channelOn(t, openConnection(t, url))
}

func channelOn(t testing.TB, conn *amqp.Connection) *amqp.Channel {
	t.Helper()
	ch, err := conn.Channel()
	require.NoError(t, err)
	return ch
}

// newPublisher opens a publisher that is closed with the test.
func newPublisher(t testing.TB, l *ladder.Ladder, config ladder.PublisherConfig) *ladder.Publisher {
	t.Helper()
	p, err := ladder.NewPublisher(within(t), l, config)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		assert.NoError(t, p.Close(ctx))
	})
	return p
}

// declareBound declares a queue of the ladder's type and binds it.
func declareBound(t testing.TB, ch *amqp.Channel, l *ladder.Ladder, queue string, destinations ...string) {
	t.Helper()
	_, err := ch.QueueDeclare(queue, true, false, false, false, amqp.Table{"x-queue-type": string(l.Config().QueueType)})
	require.NoError(t, err)
	require.NoError(t, l.Bind(within(t), ch, queue, destinations...))
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
func collect(t testing.TB, ch *amqp.Channel, l *ladder.Ladder, queues ...string) *arrivals {
	t.Helper()
	require.NoError(t, ch.Qos(1000, 0, false))
	c := &arrivals{}
	for _, queue := range queues {
		deliveries, err := ch.Consume(queue, "", false, false, false, false, nil)
		require.NoError(t, err)
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
func (c *arrivals) waitFor(t testing.TB, n int) []arrival {
	t.Helper()
	var list []arrival
	require.EventuallyWithT(t, func(t *assert.CollectT) {
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
func requireOnTime(t testing.TB, list []arrival) {
	t.Helper()
	for _, a := range list {
		require.False(t, a.NotBefore.IsZero(), "message %s has no ladder-not-before", a.MessageId)
		require.False(t, a.at.Before(a.NotBefore), "message %s came %v early", a.MessageId, a.NotBefore.Sub(a.at))
	}
}

// messageCount returns the number of ready messages in a queue.
func messageCount(t testing.TB, url, queue string) int {
	t.Helper()
	conn := openConnection(t, url)
	defer func() { _ = conn.Close() }()
	q, err := channelOn(t, conn).QueueDeclarePassive(queue, true, false, false, false, nil)
	require.NoError(t, err)
	return q.Messages
}

func waitForCount(t testing.TB, url, queue string, want int) {
	t.Helper()
	require.Eventually(t, func() bool { return messageCount(t, url, queue) == want }, patience, 100*time.Millisecond,
		"queue %s never had %d messages", queue, want)
}

func body(i int) []byte { return fmt.Appendf(nil, "message %d", i) }
