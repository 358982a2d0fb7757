package brokertest

import (
	"context"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"
)

// TestControl drives one private broker through everything that can be done to it, in one test since each start takes
// seconds.
func TestControl(t *testing.T) {
	t.Parallel()
	b := Private(t)
	require.True(t, b.CanControl())
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	target := b.AMQPURL()

	out, err := b.Ctl(ctx, "eval", "1 + 1.")
	require.NoError(t, err)
	require.Equal(t, "2", strings.TrimSpace(out))
	_, err = b.Ctl(ctx, "no_such_command")
	require.ErrorContains(t, err, "no_such_command")

	publish(t, target)
	require.NoError(t, b.Stop(ctx))
	_, err = amqp.DialConfig(target, amqp.Config{Dial: amqp.DefaultDial(time.Second)})
	require.Error(t, err, "a stopped broker takes no connections")
	require.NoError(t, b.Start(ctx))
	consume(t, target)

	// Only now: a quorum queue that is declared just before a crash is lost, see Kill.
	publish(t, target)
	require.NoError(t, b.Kill(ctx))
	_, err = amqp.DialConfig(target, amqp.Config{Dial: amqp.DefaultDial(time.Second)})
	require.Error(t, err, "a killed broker takes no connections")
	require.NoError(t, b.Start(ctx))
	consume(t, target)

	require.NoError(t, b.Pause(ctx))
	_, err = amqp.DialConfig(target, amqp.Config{Dial: amqp.DefaultDial(time.Second)})
	require.ErrorContains(t, err, "timeout", "a paused broker takes connections and says nothing")
	require.NoError(t, b.Resume(ctx))
	roundTrip(t, target)
}
