package brokertest

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestCluster takes a cluster through a partition and the loss of a node, in one test since its start is slow.
func TestCluster(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts three brokers")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	nodes := Cluster(t, 3)
	start := time.Now()
	step := func(what string) { t.Logf("%5.1f s: %s", time.Since(start).Seconds(), what) }
	publish(t, nodes[0].AMQPURL())

	step("published")
	require.NoError(t, nodes[2].Disconnect(ctx))
	require.NoError(t, nodes[2].waitForNodes(ctx, 1))
	step("isolated node is alone")
	require.NoError(t, nodes[0].waitForNodes(ctx, 2))
	step("others noticed")
	dial(t, nodes[2].AMQPURL()) // clients still reach it
	consume(t, nodes[1].AMQPURL())
	publish(t, nodes[0].AMQPURL())

	step("used both sides")
	require.NoError(t, nodes[2].Reconnect(ctx))
	require.NoError(t, nodes[2].waitForNodes(ctx, 3))
	step("healed")
	consume(t, nodes[2].AMQPURL())
	step("consumed")

	publish(t, nodes[1].AMQPURL())
	require.NoError(t, nodes[0].Kill(ctx))
	consume(t, nodes[1].AMQPURL())
	step("survived a kill")
	require.NoError(t, nodes[0].Start(ctx))
	step("started again")
	require.NoError(t, nodes[0].waitForNodes(ctx, 3))
	roundTrip(t, nodes[0].AMQPURL())
}
