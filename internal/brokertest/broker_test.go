package brokertest

import (
	"context"
	"errors"
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

// roundTrip publishes one message and takes it out again.
func roundTrip(t *testing.T, target string) {
	t.Helper()
	publish(t, target)
	consume(t, target)
}

// publish publishes one message to a durable quorum queue. It tries again for a
// while, as consume does: a node that heals after a partition can start anew.
func publish(t *testing.T, target string) {
	t.Helper()
	retry(t, func(conn *amqp.Connection) error {
		ch, err := conn.Channel()
		if err != nil {
			return err
		}
		if err := ch.Confirm(false); err != nil {
			return err
		}
		if _, err := ch.QueueDeclare("durable", true, false, false, false, amqp.Table{"x-queue-type": "quorum"}); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		confirm, err := ch.PublishWithDeferredConfirmWithContext(ctx, "", "durable", true, false,
			amqp.Publishing{DeliveryMode: amqp.Persistent, Body: []byte("hello")})
		if err != nil {
			return err
		}
		acked, err := confirm.WaitContext(ctx)
		if err == nil && !acked {
			err = errors.New("the broker did not take the message")
		}
		return err
	}, target)
}

func consume(t *testing.T, target string) {
	t.Helper()
	retry(t, func(conn *amqp.Connection) error {
		ch, err := conn.Channel()
		if err != nil {
			return err
		}
		deliveries, err := ch.Consume("durable", "", false, false, false, false, nil)
		if err != nil {
			return err
		}
		select {
		case d, open := <-deliveries:
			if !open {
				return errors.New("the consumer ended")
			}
			require.Equal(t, "hello", string(d.Body))
			return d.Ack(false)
		case <-time.After(20 * time.Second):
			return errors.New("the message did not arrive")
		}
	}, target)
}

// retry calls what with a connection of its own until it succeeds.
func retry(t *testing.T, what func(*amqp.Connection) error, target string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(pollInterval) {
		conn, err := amqp.DialConfig(target, amqp.Config{Dial: amqp.DefaultDial(5 * time.Second)})
		if err == nil {
			err = what(conn)
			_ = conn.CloseDeadline(time.Now().Add(time.Second)) // or it would take the next message too
		}
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			require.NoError(t, err)
		}
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
