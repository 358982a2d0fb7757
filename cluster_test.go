package ladder_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

// TestCluster loses, under load, the node that leads all level queues, and later
// the connection of another node with its peers.
func TestCluster(t *testing.T) {
	t.Parallel()
	nodes := brokertest.Cluster(t, 3)
	urls := make([]string, len(nodes))
	for i, node := range nodes {
		urls[i] = node.AMQPURL()
	}
	logQueuesOnFailure(t, nodes[2])
	l := faultLadder(t)
	// A queue's leader is on the node where it is declared.
	require.NoError(t, l.Declare(within(t), openChannel(t, urls[0])))

	var c tally
	stop := start(t, l, ladder.ConsumerConfig{URLs: urls[2:], Connection: impatient, Queue: "work", Destinations: []string{"work"}, Concurrency: 1, Prefetch: 1000}, c.count)
	o := newLoad()
	p, err := ladder.NewPublisher(within(t), l, ladder.PublisherConfig{URLs: urls, Connection: impatient, Observer: o, ConfirmTimeout: 5 * time.Second, Timeout: 2 * patience})
	require.NoError(t, err)

	under := func(what string, fault func()) {
		t.Helper()
		loading, end := context.WithCancel(context.WithoutCancel(t.Context()))
		loaded := make(chan struct{})
		go func() {
			defer close(loaded)
			// Three nodes on one machine, each message in four queues on
			// average: more than this would test patience.
			for rate := time.NewTicker(200 * time.Millisecond); loading.Err() == nil; <-rate.C {
				o.run(context.WithoutCancel(loading), p, 64, 64, l.Horizon())
			}
		}()
		before := o.progress()
		require.Eventually(t, func() bool { return o.progress() > before+500 }, 2*patience, 10*time.Millisecond, "before: %s", what)
		fault()
		end()
		<-loaded
	}
	flows := func(what string) {
		t.Helper()
		before := o.progress()
		require.Eventually(t, func() bool { return o.progress() > before+500 }, 2*patience, 10*time.Millisecond, what)
	}
	under("the leaders' node is killed", func() {
		require.NoError(t, nodes[0].Kill(within(t)))
		flows("while the node is down")
		require.NoError(t, nodes[0].Start(within(t)))
		flows("after its return")
	})
	under("a node is cut off", func() {
		require.NoError(t, nodes[1].Disconnect(within(t)))
		const partition = 30 * time.Second
		began := time.Now()
		flows("while the node is cut off")
		<-time.After(partition - time.Since(began)) // the partition itself
		require.NoError(t, nodes[1].Reconnect(within(t)))
		flows("after its return")
	})
	closePublisher(t, p)
	// RabbitMQ 3.10.8 has a fault that was mended in March 2023
	// (rabbitmq-server#7677): after the death of a node or a partition a
	// dead-letter worker can hold messages until its queue gets another
	// leader. They are not lost.
	for range 5 {
		held := o.wait(&c, patience)
		if len(held) == 0 || !strings.HasPrefix(nodes[0].Version(), "3.10.") {
			break
		}
		t.Logf("%d messages are held by dead-letter workers; all nodes are restarted, one after another", len(held))
		for _, node := range nodes {
			require.NoError(t, node.Stop(within(t)))
			require.NoError(t, node.Start(within(t)))
		}
	}
	o.check(t, &c)
	assert.Empty(t, o.failed)
	require.NoError(t, stop())
}
