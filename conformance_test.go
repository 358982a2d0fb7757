package ladder_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

// TestConformance is what every queue type and layout must do on every broker.
func TestConformance(t *testing.T) {
	t.Parallel()
	brokertest.For(t)
	for _, queueType := range []ladder.QueueType{ladder.Quorum, ladder.Classic} {
		for _, layout := range []ladder.Layout{ladder.Direct, ladder.Chain} {
			config := ladder.Config{Name: "conformance", Unit: time.Millisecond, Levels: 12, QueueType: queueType, Layout: layout}
			t.Run(fmt.Sprintf("%s/%s", queueType, layout), func(t *testing.T) {
				t.Parallel()
				t.Run("delivers random delays once, on time, to the right queue", func(t *testing.T) { testRandomDelays(t, config) })
				t.Run("parks the unbound while others flow", func(t *testing.T) { testUnbound(t, config) })
				t.Run("tells a destination from a thousand neighbours", func(t *testing.T) { testNeighbours(t, config) })
			})
		}
	}
}

func testRandomDelays(t *testing.T, config ladder.Config) {
	t.Helper()
	const messages = 400
	l, url := mustLadder(t, config), brokertest.VHost(t)
	ch := openChannel(t, url)
	require.NoError(t, l.Declare(within(t), ch))
	queues := []string{"mail", "billing", "sales.billing"}
	for _, queue := range queues {
		declareBound(t, ch, l, queue, queue+".due")
	}
	got := collect(t, ch, l, queues...)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})

	type sent struct {
		queue string
		due   time.Time
	}
	bodies := map[string]sent{}
	var batch []ladder.Message
	for i := range messages {
		queue := queues[rand.N(len(queues))]
		delay := rand.N(3 * time.Second)
		switch i {
		case 0:
			delay = 0
		case 1:
			delay = -time.Hour
		case 2:
			delay = l.Horizon()
		}
		bodies[string(body(i))] = sent{queue, time.Now().Add(max(delay, 0))}
		batch = append(batch, ladder.Message{Destination: queue + ".due", Delay: delay, Publishing: amqp.Publishing{Body: body(i)}})
	}
	require.NoError(t, p.PublishBatch(within(t), batch))

	list := got.waitFor(t, messages)
	requireOnTime(t, list)
	require.Len(t, list, messages, "each message arrives once")
	for _, a := range list {
		want, ok := bodies[string(a.Body)]
		require.True(t, ok, "unknown or repeated body %q", a.Body)
		delete(bodies, string(a.Body))
		assert.Equal(t, want.queue, a.queue)
		assert.Equal(t, want.queue+".due", a.Destination)
		assert.Equal(t, 1, a.Attempt)
		// The broker's clock for TTLs has whole milliseconds.
		assert.False(t, a.at.Before(want.due.Truncate(time.Millisecond)), "came %v early", want.due.Sub(a.at))
		for _, header := range []string{"x-death", "x-first-death-queue", "x-last-death-queue"} {
			assert.NotContains(t, a.Headers, header)
		}
	}
	assert.Zero(t, messageCount(t, url, l.ParkingQueue()))
}

func testUnbound(t *testing.T, config ladder.Config) {
	t.Helper()
	// With 32 undeliverable messages a level queue without an alternate
	// exchange behind it stands still for everyone.
	const unbound, bound = 40, 40
	l, url := mustLadder(t, config), brokertest.VHost(t)
	ch := openChannel(t, url)
	require.NoError(t, l.Declare(within(t), ch))
	declareBound(t, ch, l, "work", "work")
	got := collect(t, ch, l, "work")
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})

	var batch []ladder.Message
	for i := range unbound {
		batch = append(batch, ladder.Message{Destination: "nobody.home", Delay: 63 * time.Millisecond, Publishing: amqp.Publishing{Body: body(i)}})
	}
	for i := range bound {
		batch = append(batch, ladder.Message{Destination: "work", Delay: 127 * time.Millisecond, Publishing: amqp.Publishing{Body: body(i)}})
	}
	require.NoError(t, p.PublishBatch(within(t), batch))

	requireOnTime(t, got.waitFor(t, bound))
	waitForCount(t, url, l.ParkingQueue(), unbound)
	parked := collect(t, openChannel(t, url), l, l.ParkingQueue()).waitFor(t, unbound)
	requireOnTime(t, parked)
	for _, a := range parked {
		assert.Equal(t, "nobody.home", a.Destination)
	}
}

func testNeighbours(t *testing.T, config ladder.Config) {
	t.Helper()
	const neighbours = 1000
	l, url := mustLadder(t, config), brokertest.VHost(t)
	ch := openChannel(t, url)
	require.NoError(t, l.Declare(within(t), ch))
	declareBound(t, ch, l, "own", "billing")
	var others []string
	for i := range neighbours {
		others = append(others, []string{
			fmt.Sprintf("n%d.billing", i), fmt.Sprintf("billing.n%d", i), fmt.Sprintf("billing%d", i), fmt.Sprintf(".billing.n%d", i),
		}[i%4])
	}
	declareBound(t, ch, l, "others", others...)
	got := collect(t, ch, l, "own", "others")
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})

	batch := []ladder.Message{{Destination: "billing", Delay: 42 * time.Millisecond}, {Destination: "billing"}}
	for _, other := range others[:100] {
		batch = append(batch, ladder.Message{Destination: other, Delay: rand.N(200 * time.Millisecond)})
	}
	require.NoError(t, p.PublishBatch(within(t), batch))

	for _, a := range got.waitFor(t, len(batch)) {
		assert.Equal(t, a.Destination == "billing", a.queue == "own", "%s arrived at %s", a.Destination, a.queue)
	}
	assert.Len(t, got.list(), len(batch))
}

// TestLayoutsTogether shows that the layout can be changed in place: the
// bindings of both lead to the same queues, and a queue gets a message once.
func TestLayoutsTogether(t *testing.T) {
	t.Parallel()
	url := brokertest.VHost(t)
	direct := mustLadder(t, ladder.Config{Unit: time.Millisecond, Levels: 9, Layout: ladder.Direct})
	chain := mustLadder(t, ladder.Config{Unit: time.Millisecond, Levels: 9, Layout: ladder.Chain})
	ch := openChannel(t, url)
	require.NoError(t, chain.Declare(within(t), ch))
	require.NoError(t, direct.Declare(within(t), ch))
	declareBound(t, ch, direct, "work", "work")
	got := collect(t, ch, direct, "work")
	p := newPublisher(t, direct, ladder.PublisherConfig{URLs: []string{url}})
	var batch []ladder.Message
	for i := range 1 << 9 {
		batch = append(batch, ladder.Message{Destination: "work", Delay: time.Duration(i) * time.Millisecond})
	}
	require.NoError(t, p.PublishBatch(within(t), batch))
	list := got.waitFor(t, len(batch))
	requireOnTime(t, list)
	assert.Len(t, list, len(batch))
}
