package laddertest

import (
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
)

// TestDeaths has a message pass two levels, as RabbitMQ tells of it.
func TestDeaths(t *testing.T) {
	t.Parallel()
	l, err := ladder.New(ladder.Config{Levels: 6})
	require.NoError(t, err)
	start := time.Date(2030, 1, 1, 0, 0, 0, 999, time.UTC)
	const key = "0.1.0.1.0.0.mail.due"
	raw := received(l, &message{
		due: start.Add(20 * time.Second), units: 20, exchange: l.Level(4), key: key,
		publishing: amqp.Publishing{Headers: amqp.Table{"own": "header"}},
	})
	death := func(level int, exchange string, after time.Duration) amqp.Table {
		return amqp.Table{
			"count": int64(1), "reason": "expired", "queue": l.Level(level), "exchange": exchange,
			"routing-keys": []any{key}, "time": time.Unix(start.Add(after).Unix(), 0),
		}
	}
	assert.Equal(t, amqp.Table{
		"own":     "header",
		"x-death": []any{death(2, l.Level(3), 20*time.Second), death(4, l.Level(4), 16*time.Second)},

		"x-first-death-queue": l.Level(4), "x-first-death-exchange": l.Level(4), "x-first-death-reason": "expired",
		"x-last-death-queue": l.Level(2), "x-last-death-exchange": l.Level(3), "x-last-death-reason": "expired",
	}, raw.Headers)
	assert.Equal(t, l.Level(1), raw.Exchange)
	assert.Equal(t, key, raw.RoutingKey)
	assert.Equal(t, "mail.due", l.ParseDelivery(raw).Destination)
	assert.True(t, raw.Timestamp.IsZero())
}

func TestNoDelayLeavesNoTrace(t *testing.T) {
	t.Parallel()
	l, err := ladder.New(ladder.Config{Levels: 3})
	require.NoError(t, err)
	raw := received(l, &message{exchange: l.DeliveryExchange(), key: "0.0.0.work"})
	assert.Empty(t, raw.Headers)
	assert.Equal(t, l.DeliveryExchange(), raw.Exchange)
}
