package brokertest

import (
	"context"
	"net/url"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"
)

func TestForGivesTheSameBrokerAndVHost(t *testing.T) {
	env := For(t)
	require.Same(t, env, For(t))
	require.Regexp(t, `^\d+\.\d+\.\d+`, env.Broker.Version())
	require.NotEmpty(t, env.Broker.Source())
	require.Equal(t, env.Broker.URL(env.VHost), env.URL)
	roundTrip(t, env.URL)
}

func TestVHostIsOnesOwn(t *testing.T) {
	t.Parallel()
	first, second := VHost(t), VHost(t)
	require.NotEqual(t, first, second)
	roundTrip(t, first)
	conn := dial(t, second)
	ch, err := conn.Channel()
	require.NoError(t, err)
	_, err = ch.QueueDeclarePassive("durable", true, false, false, false, nil)
	require.ErrorContains(t, err, "NOT_FOUND")
}

func TestAddUserWithPermissions(t *testing.T) {
	t.Parallel()
	env := For(t)
	const name, password = "reader@home", "p?a/s#s word"
	ctx := t.Context()
	require.NoError(t, env.Broker.AddUser(ctx, name, password, env.VHost, "", "", ".*"))
	t.Cleanup(func() { require.NoError(t, env.Broker.DeleteUser(context.WithoutCancel(ctx), name)) })
	ch, err := dial(t, env.Broker.UserURL(name, password, env.VHost)).Channel()
	require.NoError(t, err)
	_, err = ch.QueueDeclare("refused", true, false, false, false, nil)
	require.ErrorContains(t, err, "ACCESS_REFUSED")
}

func dial(t *testing.T, target string) *amqp.Connection {
	t.Helper()
	conn, err := amqp.DialConfig(target, amqp.Config{Dial: amqp.DefaultDial(5 * time.Second)})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.CloseDeadline(time.Now().Add(time.Second)) })
	return conn
}

// roundTrip publishes one message to a durable quorum queue and takes it out again.
func roundTrip(t *testing.T, target string) {
	t.Helper()
	publish(t, target)
	consume(t, target)
}

func publish(t *testing.T, target string) {
	t.Helper()
	ch, err := dial(t, target).Channel()
	require.NoError(t, err)
	require.NoError(t, ch.Confirm(false))
	_, err = ch.QueueDeclare("durable", true, false, false, false, amqp.Table{"x-queue-type": "quorum"})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	confirm, err := ch.PublishWithDeferredConfirmWithContext(ctx, "", "durable", true, false,
		amqp.Publishing{DeliveryMode: amqp.Persistent, Body: []byte("hello")})
	require.NoError(t, err)
	acked, err := confirm.WaitContext(ctx)
	require.NoError(t, err)
	require.True(t, acked)
}

func consume(t *testing.T, target string) {
	t.Helper()
	conn := dial(t, target)
	ch, err := conn.Channel()
	require.NoError(t, err)
	deliveries, err := ch.Consume("durable", "", false, false, false, false, nil)
	require.NoError(t, err)
	select {
	case d := <-deliveries:
		require.Equal(t, "hello", string(d.Body))
		require.NoError(t, d.Ack(false))
		require.NoError(t, conn.Close()) // or it would take the next message too
	case <-time.After(20 * time.Second):
		t.Fatal("the message did not arrive")
	}
}

func TestGivenBroker(t *testing.T) {
	t.Parallel()
	b, err := givenBroker("amqp://broker.example", "")
	require.NoError(t, err)
	require.Equal(t, "amqp://guest:guest@broker.example", b.AMQPURL())
	require.Equal(t, "http://guest:guest@broker.example:15672", b.ManagementURL())
	require.False(t, b.CanControl())
	require.ErrorIs(t, b.Kill(t.Context()), errGiven)

	b, err = givenBroker("amqp://a:b@broker.example:1/x", "http://other.example:2")
	require.NoError(t, err)
	require.Equal(t, "http://a:b@other.example:2", b.ManagementURL())
	u, err := url.Parse(b.URL("team/one"))
	require.NoError(t, err)
	require.Equal(t, "/team%2Fone", u.EscapedPath())

	_, err = givenBroker("amqp://a:secret@[", "")
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
}
