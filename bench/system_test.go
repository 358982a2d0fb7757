package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
)

// TestOtherLadders compares with the formats that these projects document.
func TestOtherLadders(t *testing.T) {
	t.Parallel()
	nsb := nserviceBus(time.Second, ladder.Quorum)
	exchange, key, err := nsb.route(41500 * time.Millisecond)
	require.NoError(t, err)
	assert.Equal(t, "nsb.v2.delay-level-05", exchange)
	assert.Equal(t, strings.Repeat("0.", 22)+"1.0.1.0.1.0."+destination, key)
	assert.Len(t, nsb.topology.Queues, 29)
	assert.Len(t, nsb.topology.Exchanges, 29)
	assert.Equal(t, map[string]any{
		"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
		"x-message-ttl": int64(134_217_728_000), "x-dead-letter-exchange": "nsb.v2.delay-level-26",
	}, nsb.topology.Queues[27].Arguments)
	assert.Contains(t, nsb.topology.Bindings, ladder.Binding{
		Source: "nsb.v2.delay-level-26", Destination: "nsb.v2.delay-level-26", Target: ladder.ToQueue, Key: "*.1.#",
	})
	assert.Contains(t, nsb.topology.Bindings, ladder.Binding{
		Source: "nsb.v2.delay-level-00", Destination: "nsb.v2.delay-delivery", Target: ladder.ToExchange, Key: strings.Repeat("*.", 27) + "0.#",
	})

	exchange, key, err = kombu(time.Second, ladder.Classic).route(time.Second)
	require.NoError(t, err)
	assert.Equal(t, "celery_delayed_27", exchange)
	assert.Equal(t, strings.Repeat("0.", 27)+"1."+destination, key)
}

func TestLadderSystem(t *testing.T) {
	t.Parallel()
	s, err := ladderSystem(direct, ladder.Config{Name: "x", Unit: time.Millisecond})
	require.NoError(t, err)
	exchange, key, err := s.route(5 * time.Millisecond)
	require.NoError(t, err)
	assert.Equal(t, "x.20x1ms.level-02", exchange)
	assert.Equal(t, strings.Repeat("0.", 17)+"1.0.1."+destination, key)
	assert.Contains(t, s.topology.Bindings, ladder.Binding{
		Source: "x.20x1ms.delivery", Destination: sinkName, Target: ladder.ToQueue, Key: strings.Repeat("*.", 20) + destination,
	})
}
