package ladder_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

// vhostOf returns the virtual host in an AMQP URL.
func vhostOf(t *testing.T, target string) string {
	t.Helper()
	uri, err := amqp.ParseURI(target)
	require.NoError(t, err)
	return uri.Vhost
}

// asUser makes a user with the given permissions in the URL's virtual host, and
// returns the URL with it.
func asUser(t *testing.T, target, configure, write, read string) string {
	t.Helper()
	broker := brokertest.For(t).Broker
	vhost := vhostOf(t, target)
	user := "user-" + vhost
	require.NoError(t, broker.AddUser(within(t), user, "secret", vhost, configure, write, read))
	t.Cleanup(func() { assert.NoError(t, broker.DeleteUser(context.Background(), user)) })
	return broker.UserURL(user, "secret", vhost)
}

func shortly(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	t.Cleanup(cancel)
	return ctx
}

// An outcomes observer keeps what it was told.
type outcomes struct {
	ladder.NopObserver
	mu     sync.Mutex
	events []ladder.PublishEvent
	names  []string
}

func (o *outcomes) Published(_ context.Context, e ladder.PublishEvent) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.events = append(o.events, e)
}

func (o *outcomes) name(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.names = append(o.names, name)
}

func (o *outcomes) SessionUp(ladder.SessionEvent)   { o.name("up") }
func (o *outcomes) SessionLost(ladder.SessionEvent) { o.name("lost") }
func (o *outcomes) Blocked(ladder.SessionEvent)     { o.name("blocked") }
func (o *outcomes) Unblocked(ladder.SessionEvent)   { o.name("unblocked") }

func (o *outcomes) seen() ([]ladder.PublishEvent, []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]ladder.PublishEvent(nil), o.events...), append([]string(nil), o.names...)
}

func TestObserverIsToldOutcomes(t *testing.T) {
	t.Parallel()
	l, url := mustLadder(t, ladder.Config{Name: "observed", Levels: 5}), brokertest.VHost(t)
	o := &outcomes{}
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}, Observer: o})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	require.NoError(t, p.PublishDelayed(within(t), "work", 11*time.Second, amqp.Publishing{}))
	require.Error(t, p.PublishDelayed(within(t), "work", time.Hour, amqp.Publishing{}))
	events, names := o.seen()
	require.Len(t, events, 3)
	for i := range events {
		assert.Positive(t, events[i].Duration)
	}
	assert.Equal(t, []int{-1, 3, -1}, []int{events[0].Level, events[1].Level, events[2].Level})
	assert.Equal(t, []int{0, 3, 0}, []int{events[0].Hops, events[1].Hops, events[2].Hops})
	assert.Equal(t, []int{1, 1, 0}, []int{events[0].Attempts, events[1].Attempts, events[2].Attempts})
	assert.Equal(t, []ladder.ErrorKind{ladder.KindNone, ladder.KindNone, ladder.KindInvalid}, []ladder.ErrorKind{events[0].Kind, events[1].Kind, events[2].Kind})
	assert.Equal(t, []string{"up"}, names)
}

// TestPassivePublisherNeedsWritePermissionAlone also shows that nothing is
// declared: the user could not.
func TestPassivePublisherNeedsWritePermissionAlone(t *testing.T) {
	t.Parallel()
	l, target, got := declared(t)
	restricted := asUser(t, target, "^$", `^small\.5x10ms\.(level-\d\d|delivery)$`, "^$")
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{restricted}, Passive: true})
	require.NoError(t, p.PublishBatch(within(t), make20(t)))
	got.waitFor(t, 20)

	_, err := ladder.NewPublisher(within(t), l, ladder.PublisherConfig{URLs: []string{restricted}})
	require.ErrorIs(t, err, ladder.ErrAccessRefused, "an active one needs configure permission")
	assert.NotContains(t, err.Error(), "secret")
}

func TestPublishWithoutPermission(t *testing.T) {
	t.Parallel()
	l, target, _ := declared(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{asUser(t, target, "^$", "^$", "^$")}, Passive: true})
	err := p.PublishDelayed(within(t), "work", 0, amqp.Publishing{})
	require.ErrorIs(t, err, ladder.ErrAccessRefused)
	assert.True(t, ladder.SafeToRetry(err))
	assert.Equal(t, ladder.KindRefused, ladder.KindOf(err))
}

func TestPassivePublisherWithoutLadder(t *testing.T) {
	t.Parallel()
	// Seconds, so that a message that is sent again still enters at its level.
	l, url := mustLadder(t, ladder.Config{Name: "partly", Levels: 9}), brokertest.VHost(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}, Passive: true})
	err := p.PublishDelayed(within(t), "work", 3*time.Second, amqp.Publishing{})
	require.ErrorIs(t, err, ladder.ErrTopologyMissing)
	assert.ErrorContains(t, err, l.Level(1))
	assert.True(t, ladder.SafeToRetry(err))

	// A part of it is missing: what does not need it goes on.
	ch := openChannel(t, url)
	require.NoError(t, l.Declare(within(t), ch))
	declareBound(t, ch, l, "work", "work")
	got := collect(t, openChannel(t, url), l, "work")
	require.NoError(t, ch.ExchangeDelete(l.Level(8), false, false))
	var publishing sync.WaitGroup
	ctx := within(t)
	for i := range 40 {
		publishing.Go(func() {
			delay := time.Second
			if i%10 == 0 {
				delay = l.Horizon()
			}
			err := p.PublishDelayed(ctx, "work", delay, amqp.Publishing{})
			if i%10 == 0 {
				assert.ErrorIs(t, err, ladder.ErrTopologyMissing)
			} else {
				assert.NoError(t, err)
			}
		})
	}
	publishing.Wait()
	got.waitFor(t, 36)
}

// TestActivePublisherHeals removes the ladder under a publisher.
func TestActivePublisherHeals(t *testing.T) {
	t.Parallel()
	l, url, _ := declared(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	ch := openChannel(t, url)
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
	require.NoError(t, l.Remove(within(t), ch))
	require.NoError(t, p.PublishDelayed(within(t), "work", 30*time.Millisecond, amqp.Publishing{}))
	require.NoError(t, l.Verify(within(t), ch))
	waitForCount(t, url, l.ParkingQueue(), 1)
}

func TestPublishReturned(t *testing.T) {
	t.Parallel()
	// Seconds, so that what waits for its turn to be written keeps its level.
	l, url := mustLadder(t, ladder.Config{Name: "unbound", Levels: 5}), brokertest.VHost(t)
	ch := openChannel(t, url)
	require.NoError(t, l.Declare(within(t), ch))
	declareBound(t, ch, l, "work", "work")
	got := collect(t, openChannel(t, url), l, "work")
	unbind := func() {
		for _, b := range l.Topology().Bindings {
			if b.Target == ladder.ToExchange {
				require.NoError(t, ch.ExchangeUnbind(b.Destination, b.Key, b.Source, false, nil))
			} else {
				require.NoError(t, ch.QueueUnbind(b.Destination, b.Key, b.Source, nil))
			}
		}
	}
	unbind()
	passive := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}, Passive: true})
	// Levels have no bindings, and the way to the parking queue is gone. The
	// delivery exchange still has its destination.
	batch := make([]ladder.Message, 60)
	for i := range batch {
		batch[i] = ladder.Message{Destination: "work", Delay: time.Duration(i%3) * time.Second}
		batch[i].Publishing.MessageId = "the same for all"
	}
	err := passive.PublishBatch(within(t), batch)
	var failed *ladder.BatchError
	require.ErrorAs(t, err, &failed)
	require.Len(t, failed.Failed, 40)
	for _, f := range failed.Failed {
		assert.NotZero(t, f.Index%3, "message %d has a route", f.Index)
		require.ErrorIs(t, f.Err, ladder.ErrUnroutable)
		assert.True(t, ladder.SafeToRetry(f.Err))
	}
	require.Eventually(t, func() bool { return len(got.list()) == 20 }, patience, 10*time.Millisecond)

	// An active publisher declares again, for the next message.
	active := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	unbind()
	require.ErrorIs(t, active.PublishDelayed(within(t), "work", time.Second, amqp.Publishing{}), ladder.ErrUnroutable)
	require.Eventually(t, func() bool {
		return active.PublishDelayed(within(t), "work", time.Second, amqp.Publishing{}) == nil
	}, patience, 10*time.Millisecond)
}

func TestPublishNacked(t *testing.T) {
	t.Parallel()
	l, url := mustLadder(t, ladder.Config{Name: "full", Unit: time.Hour, Levels: 3}), brokertest.VHost(t)
	broker := brokertest.For(t).Broker
	require.NoError(t, broker.SetPolicy(within(t), vhostOf(t, url), "limit", `level-01$`, map[string]any{"max-length": 1}))
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	// A queue rejects once it has noticed that it is over its limit.
	require.Eventually(t, func() bool {
		err := p.PublishDelayed(shortly(t), "work", 2*time.Hour, amqp.Publishing{})
		if err == nil || (errors.Is(err, ladder.ErrOutcomeUnknown) && !errors.Is(err, ladder.ErrNacked)) {
			return false // not full yet, or the deadline came while an attempt had no answer yet
		}
		require.ErrorIs(t, err, ladder.ErrNacked)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		var publish *ladder.PublishError
		require.ErrorAs(t, err, &publish)
		assert.Greater(t, publish.Attempts, 1, "it was tried again")
		return assert.True(t, ladder.SafeToRetry(err))
	}, patience, 10*time.Millisecond)
	require.NoError(t, p.PublishDelayed(within(t), "work", time.Hour, amqp.Publishing{}), "other levels take messages")
}

// TestPublishNackedByOneOfTwo sends to a destination with two queues, of which one
// is full: the other has the message, so trying again is not safe.
func TestPublishNackedByOneOfTwo(t *testing.T) {
	t.Parallel()
	l, url, got := declared(t)
	ch := openChannel(t, url)
	_, err := ch.QueueDeclare("full", true, false, false, false, amqp.Table{"x-queue-type": "classic", "x-max-length": int64(1), "x-overflow": "reject-publish"})
	require.NoError(t, err)
	require.NoError(t, l.Bind(within(t), ch, "full", "work"))
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.Eventually(t, func() bool {
		return errors.Is(p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}, ladder.Republish(false)), ladder.ErrNacked)
	}, patience, 10*time.Millisecond)
	before := len(got.list())
	err = p.PublishDelayed(within(t), "work", 0, amqp.Publishing{MessageId: "one of two"}, ladder.Republish(false))
	require.ErrorIs(t, err, ladder.ErrNacked)
	require.ErrorIs(t, err, ladder.ErrOutcomeUnknown)
	assert.False(t, ladder.SafeToRetry(err))
	require.Eventually(t, func() bool { return len(got.list()) > before }, patience, 10*time.Millisecond)
}

// TestDeclareWithoutPermissionToBind: bindings are declared without waiting for
// each answer, and the refusal must be told all the same.
func TestDeclareWithoutPermissionToBind(t *testing.T) {
	t.Parallel()
	url := brokertest.VHost(t)
	restricted := asUser(t, url, ".*", ".*", "^$")
	for range 10 {
		err := mustLadder(t, ladder.Config{}).Declare(within(t), openChannel(t, restricted))
		require.ErrorIs(t, err, ladder.ErrAccessRefused)
	}
	_, err := ladder.NewPublisher(within(t), mustLadder(t, ladder.Config{}), ladder.PublisherConfig{URLs: []string{restricted}})
	require.ErrorIs(t, err, ladder.ErrAccessRefused)
}

func TestPublisherConnectionLimit(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	broker := brokertest.For(t).Broker
	require.NoError(t, broker.LimitConnections(within(t), vhostOf(t, url), 0))
	var err error
	require.Eventually(t, func() bool { // a broker under load can take longer than this deadline to answer
		_, err = ladder.NewPublisher(shortly(t), l, ladder.PublisherConfig{URLs: []string{url}})
		return errors.Is(err, ladder.ErrAccessRefused)
	}, patience, 10*time.Millisecond)
	assert.ErrorContains(t, err, "limit")
}

// TestPriority is refused where quorum queues hold messages back by it.
func TestPriority(t *testing.T) {
	t.Parallel()
	l, url, got := declared(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	err := p.PublishDelayed(within(t), "work", 30*time.Millisecond, amqp.Publishing{Priority: 5})
	switch version := brokertest.For(t).Broker.Version(); version[:4] {
	case "4.0.", "4.1.", "4.2.":
		require.ErrorIs(t, err, ladder.ErrInvalidMessage)
		assert.ErrorContains(t, err, version)
	default:
		require.NoError(t, err)
		assert.Equal(t, uint8(5), got.waitFor(t, 1)[0].Priority)
	}
}

// TestMessageLargerThanTheBrokerTakes costs the channel, and must cost no other
// message more than another attempt.
func TestMessageLargerThanTheBrokerTakes(t *testing.T) {
	t.Parallel()
	broker := brokertest.Private(t)
	const limit = 100_000
	_, err := broker.Ctl(within(t), "eval", "application:set_env(rabbit, max_message_size, 100000), persistent_term:put(max_message_size, 100000).")
	require.NoError(t, err)
	l, url := small(t), broker.AMQPURL()
	ch := openChannel(t, url)
	require.NoError(t, l.Declare(within(t), ch))
	declareBound(t, ch, l, "work", "work")
	got := collect(t, ch, l, "work")
	o := &outcomes{}
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}, Observer: o})

	const messages, large = 200, 3
	errs := make([]error, messages)
	var publishing sync.WaitGroup
	ctx := within(t)
	for i := range messages {
		publishing.Go(func() {
			b := body(i)
			if i < large {
				b = make([]byte, limit+1)
			}
			errs[i] = p.PublishDelayed(ctx, "work", 20*time.Millisecond, amqp.Publishing{Body: b})
		})
	}
	publishing.Wait()
	for i, err := range errs {
		if i < large {
			require.ErrorIs(t, err, ladder.ErrMessageTooLarge)
			assert.ErrorContains(t, err, "100000")
			continue
		}
		require.NoError(t, err)
	}
	list := got.waitFor(t, messages-large)
	events, names := o.seen()
	attempts := 0
	for _, e := range events {
		attempts += e.Attempts
	}
	lost := 0
	for _, name := range names {
		if name == "lost" {
			lost++
		}
	}
	t.Logf("%d messages, %d attempts, %d sessions lost, %d arrivals", messages, attempts, lost, len(list))
	assert.LessOrEqual(t, lost, large, "the publisher learns the limit")
	assert.LessOrEqual(t, len(list), messages-large+attempts-messages)
}

// TestInternalErrorAfterRouting crashes the broker's channel while it waits for
// one of two queues: the other has the message already.
func TestInternalErrorAfterRouting(t *testing.T) {
	t.Parallel()
	broker := brokertest.Private(t)
	l, url := small(t), broker.AMQPURL()
	ch := openChannel(t, url)
	require.NoError(t, l.Declare(within(t), ch))
	for _, queue := range []string{"awake", "asleep"} {
		declareBound(t, ch, l, queue, "work")
	}
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	eval := func(expression string) {
		_, err := broker.Ctl(within(t), "eval", expression)
		require.NoError(t, err)
	}
	asleep := func(verb string) string {
		return `[sys:` + verb + `(element(1, amqqueue:get_pid(Q))) || Q <- rabbit_amqqueue:list(), element(4, amqqueue:get_name(Q)) =:= <<"asleep">>].`
	}
	eval(asleep("suspend"))
	result := make(chan error, 1)
	go func() { result <- p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}) }()
	require.Eventually(t, func() bool { return messageCount(t, url, "awake") == 1 }, patience, 50*time.Millisecond)
	var err error
	require.Eventually(t, func() bool {
		eval(`[exit(P, kill) || P <- rabbit_channel:list()].`)
		select {
		case err = <-result:
			return true
		case <-time.After(2 * time.Second): // the next session sends it again
			return false
		}
	}, patience, 50*time.Millisecond)
	eval(asleep("resume"))
	require.ErrorIs(t, err, ladder.ErrInvalidMessage)
	require.ErrorIs(t, err, ladder.ErrOutcomeUnknown)
	assert.False(t, ladder.SafeToRetry(err), "a queue has it")
}
