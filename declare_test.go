package ladder_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

// small is a ladder that is quick to declare.
func small(tb testing.TB) *ladder.Ladder {
	tb.Helper()
	return mustLadder(tb, ladder.Config{Name: "small", Unit: 10 * time.Millisecond, Levels: 5})
}

// requireWorks sends a message through every level and sees it arrive.
func requireWorks(t *testing.T, l *ladder.Ladder, url string) {
	t.Helper()
	ch := openChannel(t, url)
	declareBound(t, ch, l, "works", "works")
	got := collect(t, ch, l, "works")
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}, Passive: true})
	require.NoError(t, p.PublishDelayed(within(t), "works", l.Horizon(), amqp.Publishing{}))
	requireOnTime(t, got.waitFor(t, 1))
}

func TestDeclareIsRepeatable(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	ch := openChannel(t, url)
	require.NoError(t, l.Declare(within(t), ch))
	require.NoError(t, l.Declare(within(t), ch))
	require.NoError(t, l.Verify(within(t), ch))
	requireWorks(t, l, url)
}

func TestDeclareFromManyAtOnce(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	ctx := within(t)
	errs := make([]error, 10)
	var declaring sync.WaitGroup
	for i := range errs {
		ch := openChannel(t, url)
		declaring.Go(func() { errs[i] = l.Declare(ctx, ch) })
	}
	declaring.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	requireWorks(t, l, url)
}

func TestDeclareHealsWhatIsMissing(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	ch := openChannel(t, url)
	for _, object := range []struct {
		name   string
		remove func() error
	}{
		{"a level queue", func() error { _, err := ch.QueueDelete(l.Level(2), false, false, false); return err }},
		{"a level exchange", func() error { return ch.ExchangeDelete(l.Level(3), false, false) }},
		{"the delivery exchange", func() error { return ch.ExchangeDelete(l.DeliveryExchange(), false, false) }},
		{"the unroutable exchange", func() error { return ch.ExchangeDelete(l.UnroutableExchange(), false, false) }},
		{"the parking queue", func() error { _, err := ch.QueueDelete(l.ParkingQueue(), false, false, false); return err }},
		{"a binding", func() error {
			b := l.Topology().Bindings[3]
			if b.Target == ladder.ToExchange {
				return ch.ExchangeUnbind(b.Destination, b.Key, b.Source, false, nil)
			}
			return ch.QueueUnbind(b.Destination, b.Key, b.Source, nil)
		}},
	} {
		require.NoError(t, l.Declare(within(t), ch), "before removing %s", object.name)
		require.NoError(t, object.remove(), object.name)
	}
	require.NoError(t, l.Declare(within(t), ch))
	require.NoError(t, l.Verify(within(t), ch))
	requireWorks(t, l, url)
}

func TestVerifyNamesWhatIsMissing(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	err := l.Verify(within(t), openChannel(t, url))
	require.ErrorIs(t, err, ladder.ErrTopologyMissing)
	assert.ErrorContains(t, err, l.UnroutableExchange())

	ch := openChannel(t, url)
	require.NoError(t, l.Declare(within(t), ch))
	_, err = ch.QueueDelete(l.Level(4), false, false, false)
	require.NoError(t, err)
	err = l.Verify(within(t), ch)
	require.ErrorIs(t, err, ladder.ErrTopologyMissing)
	assert.ErrorContains(t, err, l.Level(4))
	assert.ErrorIs(t, l.Verify(within(t), openChannel(t, url)), ladder.ErrTopologyMissing, "Verify must not have declared it")
}

func TestTopologyMismatch(t *testing.T) {
	t.Parallel()
	brokertest.For(t)
	long := mustLadder(t, ladder.Config{Name: strings.Repeat("n", 230), Unit: 10 * time.Millisecond, Levels: 5})
	for _, c := range []struct {
		name string
		l    *ladder.Ladder
		make func(l *ladder.Ladder, ch *amqp.Channel) error
		want ladder.TopologyMismatchError
	}{
		{
			"another TTL", small(t),
			func(l *ladder.Ladder, ch *amqp.Channel) error {
				_, err := ch.QueueDeclare(l.Level(1), true, false, false, false, amqp.Table{
					"x-queue-type": "quorum", "x-message-ttl": int64(21), "x-dead-letter-exchange": l.Level(0),
					"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
				})
				return err
			},
			ladder.TopologyMismatchError{Kind: "queue", Object: small(t).Level(1), Argument: "x-message-ttl", Want: "20", Got: "21"},
		},
		{
			"another queue type", small(t),
			func(_ *ladder.Ladder, ch *amqp.Channel) error {
				return mustLadder(t, ladder.Config{Name: "small", Unit: 10 * time.Millisecond, Levels: 5, QueueType: ladder.Classic}).Declare(within(t), ch)
			},
			ladder.TopologyMismatchError{Kind: "queue", Object: small(t).ParkingQueue(), Argument: "x-queue-type", Want: "quorum", Got: "classic"},
		},
		{
			"no alternate exchange", small(t),
			func(l *ladder.Ladder, ch *amqp.Channel) error {
				return ch.ExchangeDeclare(l.DeliveryExchange(), "topic", true, false, false, false, nil)
			},
			ladder.TopologyMismatchError{Kind: "exchange", Object: small(t).DeliveryExchange(), Argument: "alternate-exchange", Want: small(t).UnroutableExchange(), Got: "none"},
		},
		{
			"another exchange type", small(t),
			func(l *ladder.Ladder, ch *amqp.Channel) error {
				return ch.ExchangeDeclare(l.Level(0), "fanout", true, false, false, false, amqp.Table{"alternate-exchange": l.UnroutableExchange()})
			},
			ladder.TopologyMismatchError{Kind: "exchange", Object: small(t).Level(0), Argument: "type", Want: "topic", Got: "fanout"},
		},
		{
			"an empty value", small(t),
			func(l *ladder.Ladder, ch *amqp.Channel) error {
				_, err := ch.QueueDeclare(l.Level(0), true, false, false, false, amqp.Table{
					"x-queue-type": "quorum", "x-message-ttl": int64(10), "x-dead-letter-exchange": "",
					"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
				})
				return err
			},
			ladder.TopologyMismatchError{Kind: "queue", Object: small(t).Level(0), Argument: "x-dead-letter-exchange", Want: small(t).DeliveryExchange(), Got: `""`},
		},
		{
			// RabbitMQ's message ends after 255 bytes, within the name.
			"a message cut short", long,
			func(l *ladder.Ladder, ch *amqp.Channel) error {
				_, err := ch.QueueDeclare(l.ParkingQueue(), true, false, false, false, amqp.Table{"x-queue-type": "classic"})
				return err
			},
			ladder.TopologyMismatchError{Kind: "queue", Object: long.ParkingQueue(), Argument: "x-queue-type", Want: "quorum"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			url := brokertest.VHost(t)
			require.NoError(t, c.make(c.l, openChannel(t, url)))

			check := func(t *testing.T, err error) {
				t.Helper()
				var mismatch *ladder.TopologyMismatchError
				require.ErrorAs(t, err, &mismatch)
				got := ladder.TopologyMismatchError{Kind: mismatch.Kind, Object: mismatch.Object, Argument: mismatch.Argument, Want: mismatch.Want, Got: mismatch.Got}
				assert.Equal(t, c.want, got, err.Error())
				var refused *amqp.Error
				require.ErrorAs(t, err, &refused)
				assert.Equal(t, amqp.PreconditionFailed, refused.Code)
			}
			check(t, c.l.Declare(within(t), openChannel(t, url)))
			// What Declare made before it came to the mismatch lets Verify come to
			// it too, as the parking queue is declared early.
			declareAround(t, c.l, url)
			check(t, c.l.Verify(within(t), openChannel(t, url)))
			_, err := ladder.NewPublisher(within(t), c.l, ladder.PublisherConfig{URLs: []string{url}})
			check(t, err)
		})
	}
}

// declareAround declares what it can of a ladder.
func declareAround(t *testing.T, l *ladder.Ladder, url string) {
	t.Helper()
	conn := openConnection(t, url)
	for _, e := range l.Topology().Exchanges {
		_ = channelOn(t, conn).ExchangeDeclare(e.Name, e.Kind, true, false, e.Internal, false, e.Arguments)
	}
	for _, q := range l.Topology().Queues {
		_, _ = channelOn(t, conn).QueueDeclare(q.Name, true, false, false, false, q.Arguments)
	}
}

func TestBind(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	ch := openChannel(t, url)
	require.NoError(t, l.Declare(within(t), ch))
	_, err := ch.QueueDeclare("work", true, false, false, false, nil)
	require.NoError(t, err)

	err = l.Bind(within(t), ch, "work", "first", "bad.#", "second", "")
	require.ErrorIs(t, err, ladder.ErrInvalidDestination)
	assert.ErrorContains(t, err, `"bad.#"`)
	assert.NotContains(t, err.Error(), "first")
	got := collect(t, openChannel(t, url), l, "work")
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishBatch(within(t), []ladder.Message{{Destination: "first"}, {Destination: "second"}}))
	got.waitFor(t, 2)

	require.NoError(t, l.Unbind(within(t), ch, "work", "first", "first"))
	require.NoError(t, p.PublishDelayed(within(t), "first", 0, amqp.Publishing{}))
	waitForCount(t, url, l.ParkingQueue(), 1)

	err = l.Bind(within(t), ch, "no such queue", "third", "fourth")
	require.ErrorIs(t, err, ladder.ErrTopologyMissing)
	require.ErrorIs(t, err, amqp.ErrClosed, "the second is named as not bound because the broker closed the channel")
	assert.ErrorContains(t, err, "third")
	assert.ErrorContains(t, err, "fourth")
}

func TestRemove(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	ch := openChannel(t, url)
	require.NoError(t, l.Remove(within(t), ch), "a ladder that is not there")

	require.NoError(t, l.Declare(within(t), ch))
	_, err := ch.QueueDelete(l.Level(1), false, false, false)
	require.NoError(t, err)
	require.NoError(t, l.Remove(within(t), ch), "a part of a ladder")
	requireGone(t, l, url)

	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "nobody", 0, amqp.Publishing{}))
	waitForCount(t, url, l.ParkingQueue(), 1)
	var notEmpty *ladder.NotEmptyError
	require.ErrorAs(t, l.Remove(within(t), ch), &notEmpty)
	assert.Equal(t, map[string]int{l.ParkingQueue(): 1}, notEmpty.Messages)
	assert.ErrorContains(t, notEmpty, l.ParkingQueue())
	require.NoError(t, l.Verify(within(t), ch), "nothing was removed")

	require.NoError(t, l.Remove(within(t), ch, ladder.Force()))
	requireGone(t, l, url)
}

// TestRemoveWhileMessagesMove leaves the broker able to pass on what is due: RabbitMQ 4.3
// was not, for any quorum queue, after queues had been deleted in the middle of it.
func TestRemoveWhileMessagesMove(t *testing.T) {
	t.Parallel()
	const messages = 12_000
	broker := brokertest.Private(t)
	moving := mustLadder(t, ladder.Config{Name: "moving", Unit: time.Millisecond, Levels: 10})
	ch := openChannel(t, broker.AMQPURL())
	p := newPublisher(t, moving, ladder.PublisherConfig{URLs: []string{broker.AMQPURL()}})
	declareBound(t, ch, moving, "work", "work")
	batch := make([]ladder.Message, messages)
	for i := range batch {
		batch[i] = ladder.Message{Destination: "work", Delay: rand.N(moving.Horizon())}
	}
	require.NoError(t, p.PublishBatch(within(t), batch))
	require.NoError(t, moving.Remove(within(t), ch, ladder.Force()))

	other, url := mustLadder(t, ladder.Config{Name: "other", Unit: time.Millisecond, Levels: 10}), broker.AMQPURL()
	p = newPublisher(t, other, ladder.PublisherConfig{URLs: []string{url}})
	declareBound(t, ch, other, "others", "work")
	for range 20 {
		require.NoError(t, p.PublishDelayed(within(t), "work", 700*time.Millisecond, amqp.Publishing{}))
	}
	waitForCount(t, url, "others", 20)
}

func TestRemoveRefusesWhileALevelWaits(t *testing.T) {
	t.Parallel()
	l, url := mustLadder(t, ladder.Config{Name: "slow", Unit: time.Hour, Levels: 3}), brokertest.VHost(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "later", 3*time.Hour, amqp.Publishing{}))
	ch := openChannel(t, url)
	var notEmpty *ladder.NotEmptyError
	require.ErrorAs(t, l.Remove(within(t), ch), &notEmpty)
	assert.Equal(t, map[string]int{l.Level(1): 1}, notEmpty.Messages)
	require.NoError(t, l.Verify(within(t), ch), "nothing was removed")
}

func TestRemoveRefusesWhatIsNotTheLadders(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	ch := openChannel(t, url)
	_, err := ch.QueueDeclare(l.Level(0), true, false, false, false, amqp.Table{"x-queue-type": "classic"})
	require.NoError(t, err)
	var mismatch *ladder.TopologyMismatchError
	require.ErrorAs(t, l.Remove(within(t), openChannel(t, url)), &mismatch)
	_, err = ch.QueueDeclarePassive(l.Level(0), true, false, false, false, nil)
	require.NoError(t, err, "it is still there")
	require.NoError(t, l.Remove(within(t), openChannel(t, url), ladder.Force()))
	requireGone(t, l, url)
}

func requireGone(t *testing.T, l *ladder.Ladder, url string) {
	t.Helper()
	conn := openConnection(t, url)
	for _, e := range l.Topology().Exchanges {
		require.Error(t, channelOn(t, conn).ExchangeDeclarePassive(e.Name, e.Kind, true, false, e.Internal, false, nil), e.Name)
	}
	for _, q := range l.Topology().Queues {
		_, err := channelOn(t, conn).QueueDeclarePassive(q.Name, true, false, false, false, nil)
		require.Error(t, err, q.Name)
	}
}

func TestTopologyCallsEndWithTheirContext(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	ch := openChannel(t, url)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, call := range map[string]func() error{
		"Declare": func() error { return l.Declare(ended, ch) },
		"Verify":  func() error { return l.Verify(ended, ch) },
		"Bind":    func() error { return l.Bind(ended, ch, "work", "work") },
		"Unbind":  func() error { return l.Unbind(ended, ch, "work", "work") },
		"Remove":  func() error { return l.Remove(ended, ch) },
	} {
		assert.ErrorIs(t, call(), context.Canceled, name)
	}
	requireGone(t, l, url)
}

func TestDeclareWithoutPermission(t *testing.T) {
	t.Parallel()
	env := brokertest.For(t)
	l := small(t)
	vhost, user := fmt.Sprintf("%s-nobody", env.VHost), "nobody-"+env.VHost
	ctx := within(t)
	require.NoError(t, env.Broker.CreateVHost(ctx, vhost))
	t.Cleanup(func() { assert.NoError(t, env.Broker.DeleteVHost(context.Background(), vhost)) })
	require.NoError(t, env.Broker.AddUser(ctx, user, "secret", vhost, "^$", "^$", "^$"))
	t.Cleanup(func() { assert.NoError(t, env.Broker.DeleteUser(context.Background(), user)) })
	url := env.Broker.UserURL(user, "secret", vhost)
	require.ErrorIs(t, l.Declare(ctx, openChannel(t, url)), ladder.ErrAccessRefused)
	_, err := ladder.NewPublisher(ctx, l, ladder.PublisherConfig{URLs: []string{url}})
	require.ErrorIs(t, err, ladder.ErrAccessRefused)
	assert.NotContains(t, err.Error(), "secret")
}
