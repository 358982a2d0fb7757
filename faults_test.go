package ladder_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

// impatient makes a session notice faults soon.
var impatient = ladder.ConnectionConfig{
	Heartbeat: time.Second, DialTimeout: 2 * time.Second, WriteTimeout: time.Second, SetupTimeout: 10 * time.Second,
}

func faultLadder(tb testing.TB) *ladder.Ladder {
	tb.Helper()
	return mustLadder(tb, ladder.Config{Name: "faults", Unit: 10 * time.Millisecond, Levels: 8})
}

// closePublisher closes a publisher as part of a test.
func closePublisher(t *testing.T, p *ladder.Publisher) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(t, p.Close(ctx))
}

// TestNetworkFaults publishes through a proxy that does what networks do.
func TestNetworkFaults(t *testing.T) {
	const messages, goroutines = 20_000, 64
	l, direct := faultLadder(t), brokertest.VHost(t)
	proxy, through := brokertest.Proxied(t, direct)
	var c tally
	stop := start(t, l, ladder.ConsumerConfig{URLs: []string{direct}, Queue: "work", Destinations: []string{"work"}, Concurrency: 1, Prefetch: 1000}, c.count)

	o := newLoad()
	p, err := ladder.NewPublisher(within(t), l, ladder.PublisherConfig{URLs: []string{through}, Connection: impatient, Observer: o, Timeout: 2 * patience})
	require.NoError(t, err)
	loaded := make(chan struct{})
	go func() {
		defer close(loaded)
		o.run(context.WithoutCancel(t.Context()), p, messages, goroutines, 2*time.Second)
	}()
	faults := fireFaults(proxy, loaded)
	<-loaded
	closePublisher(t, p)
	duplicates := o.check(t, &c)
	t.Logf("faults: %v", faults)
	for kind, n := range faults {
		assert.Positive(t, n, kind)
	}
	assert.Len(t, faults, 7)
	assert.Greater(t, o.sessions, 4, "the faults were felt")
	assert.LessOrEqual(t, duplicates, o.repeats())
	assert.Empty(t, o.failed, "every message had the time to be sent again")
	require.NoError(t, stop())
}

// fireFaults makes faults of all kinds until done, and returns how many of
// each.
func fireFaults(proxy *brokertest.FaultProxy, done <-chan struct{}) map[string]int {
	fired := map[string]int{"slow": 0, "cut": 0}
	hold := func(most time.Duration) {
		select {
		case <-time.After(rand.N(most)):
		case <-done:
		}
	}
	kinds := map[string]func(){
		"cut":              proxy.Cut,
		"stall upstream":   func() { proxy.Stall(brokertest.Upstream); hold(3 * time.Second) },
		"stall downstream": func() { proxy.Stall(brokertest.Downstream); hold(3 * time.Second) },
		"stall both":       func() { proxy.StallBoth(); hold(3 * time.Second) },
		"slow":             func() { proxy.Slow(brokertest.Upstream, 20_000); hold(time.Second) },
		"black hole": func() {
			proxy.Discard(brokertest.Upstream, rand.N(10_000))
			proxy.Discard(brokertest.Downstream, rand.N(10_000))
			hold(2 * time.Second)
			proxy.Cut() // a stream with a hole in it must not go on
		},
		"refuse": func() { proxy.Refuse(); proxy.Cut(); hold(time.Second) },
	}
	for {
		for name, fire := range kinds { // in random order
			hold(600 * time.Millisecond)
			select {
			case <-done:
				return fired
			default:
			}
			fire()
			proxy.Pass()
			fired[name]++
		}
	}
}

// TestBrokerKilled kills the broker under load, twice, with messages waiting in
// the ladder.
func TestBrokerKilled(t *testing.T) {
	broker := brokertest.Private(t)
	logQueuesOnFailure(t, broker)
	const messages, goroutines, prefetch = 20_000, 64, 1000
	l, target := faultLadder(t), broker.AMQPURL()
	var c tally
	stop := start(t, l, ladder.ConsumerConfig{URLs: []string{target}, Connection: impatient, Queue: "work", Destinations: []string{"work"}, Concurrency: 1, Prefetch: prefetch}, c.count)

	// RabbitMQ saves the name of a new quorum queue a moment after it has confirmed
	// the declaration. One that is killed before comes back without a leader
	// for that queue, whatever a client does. Stopping saves it.
	require.NoError(t, broker.Stop(within(t)))
	require.NoError(t, broker.Start(within(t)))

	// These are due long after the broker is back, or while it is down.
	waiting := newLoad()
	p, err := ladder.NewPublisher(within(t), l, ladder.PublisherConfig{URLs: []string{target}, Connection: impatient, Observer: waiting, Timeout: 2 * patience})
	require.NoError(t, err)
	waiting.run(t.Context(), p, 500, 16, l.Horizon())
	require.Empty(t, waiting.failed)
	closePublisher(t, p)

	o := newLoad()
	p, err = ladder.NewPublisher(within(t), l, ladder.PublisherConfig{URLs: []string{target}, Connection: impatient, Observer: o, Timeout: 2 * patience})
	require.NoError(t, err)
	loaded := make(chan struct{})
	go func() {
		defer close(loaded)
		o.run(context.WithoutCancel(t.Context()), p, messages, goroutines, l.Horizon())
	}()
	for _, after := range []int{messages / 4, messages / 2} {
		require.Eventually(t, func() bool { return o.progress() >= after }, 2*patience, 5*time.Millisecond)
		require.NoError(t, broker.Kill(within(t)))
		require.NoError(t, broker.Start(within(t)))
	}
	<-loaded
	closePublisher(t, p)
	waiting.check(t, &c)
	duplicates := o.check(t, &c)
	assert.Empty(t, o.failed)
	// In flight at a kill are the publisher's messages, 32 at each level's
	// dead-letter worker, and what the consumer had not acknowledged.
	assert.LessOrEqual(t, duplicates, o.repeats()+2*(32*l.Config().Levels+prefetch))
	require.NoError(t, stop())
}

// TestMemoryAlarm blocks the connection as a memory alarm does.
func TestMemoryAlarm(t *testing.T) {
	t.Parallel()
	broker := brokertest.Private(t)
	l, target := faultLadder(t), broker.AMQPURL()
	o := &outcomes{}
	open := func() *ladder.Publisher {
		p, err := ladder.NewPublisher(within(t), l, ladder.PublisherConfig{URLs: []string{target}, Observer: o})
		require.NoError(t, err)
		return p
	}
	p, other := open(), open()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var loading sync.WaitGroup
	for range 8 {
		loading.Go(func() {
			for ctx.Err() == nil {
				_ = p.PublishDelayed(ctx, "work", time.Second, amqp.Publishing{})
			}
		})
	}
	_, err := broker.Ctl(within(t), "set_vm_memory_high_watermark", "0")
	require.NoError(t, err)
	require.Eventually(t, func() bool { _, names := o.seen(); return slices.Contains(names, "blocked") }, patience, 10*time.Millisecond)

	short, cancelShort := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancelShort()
	began := time.Now()
	err = p.PublishDelayed(short, "work", time.Second, amqp.Publishing{})
	require.ErrorIs(t, err, ladder.ErrBlocked)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	assert.True(t, ladder.SafeToRetry(err), "it was not written")
	assert.Equal(t, ladder.KindBlocked, ladder.KindOf(err))
	assert.Less(t, time.Since(began), patience/2, "at its deadline, not at that of the connection")

	// A publisher that is blocked closes at once, also one with messages in
	// flight. The broker blocks a connection when it first publishes.
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		return errors.Is(other.PublishDelayed(ctx, "work", time.Second, amqp.Publishing{}), ladder.ErrBlocked)
	}, patience, time.Millisecond)
	closing, cancelClosing := context.WithTimeout(t.Context(), patience/2)
	defer cancelClosing()
	require.NoError(t, other.Close(closing))
	require.NoError(t, closing.Err())

	_, err = broker.Ctl(within(t), "set_vm_memory_high_watermark", "0.8")
	require.NoError(t, err)
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}), "publishing goes on")
	cancel()
	loading.Wait()
	closePublisher(t, p)
	_, names := o.seen()
	assert.Contains(t, names, "unblocked")
}

// TestStalledConnection shows that neither a publish nor Close waits longer
// than its context for a peer that has gone silent.
func TestStalledConnection(t *testing.T) {
	t.Parallel()
	l, direct := faultLadder(t), brokertest.VHost(t)
	proxy, through := brokertest.Proxied(t, direct)
	patient := impatient
	patient.WriteTimeout, patient.Heartbeat = time.Hour, time.Hour
	p, err := ladder.NewPublisher(within(t), l, ladder.PublisherConfig{URLs: []string{through}, Connection: patient})
	require.NoError(t, err)
	proxy.StallBoth()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var publishing sync.WaitGroup
	for range 16 { // more than the buffers in between take
		publishing.Go(func() {
			err := p.PublishDelayed(ctx, "work", time.Second, amqp.Publishing{Body: make([]byte, 4<<20)})
			assert.ErrorIs(t, err, context.DeadlineExceeded)
		})
	}
	ended := make(chan struct{})
	go func() { publishing.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(patience / 4): // far below WriteTimeout
		require.Fail(t, "a publish hangs")
	}
	closing, cancelClosing := context.WithTimeout(t.Context(), time.Second)
	defer cancelClosing()
	closed := make(chan struct{})
	go func() { _ = p.Close(closing); close(closed) }()
	select {
	case <-closed:
	case <-time.After(patience / 4):
		require.Fail(t, "Close hangs")
	}
}

// TestConfirmTimeout leaves a publisher with a broker that takes everything and
// answers nothing, heartbeats included.
func TestConfirmTimeout(t *testing.T) {
	t.Parallel()
	l, direct := faultLadder(t), brokertest.VHost(t)
	proxy, through := brokertest.Proxied(t, direct)
	patient := impatient
	patient.Heartbeat = time.Hour
	o := &outcomes{}
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{through}, Connection: patient, ConfirmTimeout: 500 * time.Millisecond, Observer: o})
	proxy.Stall(brokertest.Downstream)
	result := make(chan error, 1)
	go func() { result <- p.PublishDelayed(within(t), "work", time.Second, amqp.Publishing{}) }()
	require.Eventually(t, func() bool { _, names := o.seen(); return slices.Contains(names, "lost") }, patience, 10*time.Millisecond)
	proxy.Pass()
	require.NoError(t, receive(t, result), "the next session has it")
}

// TestBatchAtItsDeadline ends a batch's time when all messages but the first, whose
// queue does not answer, have been confirmed: these must be reported as such.
func TestBatchAtItsDeadline(t *testing.T) {
	t.Parallel()
	broker := brokertest.Private(t)
	l := mustLadder(t, ladder.Config{Name: "deadline", Unit: time.Hour, Levels: 3, QueueType: ladder.Classic})
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{broker.AMQPURL()}, ConfirmTimeout: time.Hour})
	suspend := fmt.Sprintf(`{ok, Q} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<%q>>)), sys:suspend(amqqueue:get_pid(Q)).`, l.Level(2))
	_, err := broker.Ctl(within(t), "eval", suspend)
	require.NoError(t, err)

	const messages = 500
	batch := []ladder.Message{{Destination: "work", Delay: 4 * time.Hour}}
	for range messages {
		batch = append(batch, ladder.Message{Destination: "work", Delay: time.Hour})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var failed *ladder.BatchError
	require.ErrorAs(t, p.PublishBatch(ctx, batch), &failed)
	require.Equal(t, 1, len(failed.Failed), "messages failed") //nolint:testifylint // Len would print them all
	assert.Equal(t, 0, failed.Failed[0].Index)
	require.ErrorIs(t, failed.Failed[0].Err, ladder.ErrOutcomeUnknown)
	assert.Equal(t, messages, messageCount(t, broker.AMQPURL(), l.Level(0)))
}

// TestNoRepublish loses the connection with messages in flight.
func TestNoRepublish(t *testing.T) {
	t.Parallel()
	l, direct := faultLadder(t), brokertest.VHost(t)
	proxy, through := brokertest.Proxied(t, direct)
	for _, c := range []struct {
		config ladder.PublisherConfig
		opts   []ladder.PublishOption
	}{
		{config: ladder.PublisherConfig{NoRepublish: true}},
		{opts: []ladder.PublishOption{ladder.Republish(false)}},
	} {
		c.config.URLs, c.config.Connection = []string{through}, impatient
		p := newPublisher(t, l, c.config)
		proxy.Stall(brokertest.Downstream) // the broker's confirm does not come
		result := make(chan error, 1)
		go func() { result <- p.PublishDelayed(within(t), "work", time.Second, amqp.Publishing{}, c.opts...) }()
		err := receive(t, result) // the heartbeat finds out
		require.ErrorIs(t, err, ladder.ErrOutcomeUnknown)
		require.NotErrorIs(t, err, context.DeadlineExceeded, "not by its deadline")
		assert.False(t, ladder.SafeToRetry(err))
		assert.Equal(t, ladder.KindUnknown, ladder.KindOf(err))
		var publish *ladder.PublishError
		require.ErrorAs(t, err, &publish)
		assert.Equal(t, 1, publish.Attempts)
		proxy.Cut()
		proxy.Pass()
		require.NoError(t, p.PublishDelayed(within(t), "work", time.Second, amqp.Publishing{}, c.opts...), "the next session works")
	}
}

// TestOutageMakesNothingLaterThanItMustBe publishes while the broker cannot be
// reached.
func TestOutageMakesNothingLaterThanItMustBe(t *testing.T) {
	t.Parallel()
	l := mustLadder(t, ladder.Config{Name: "outage", Unit: 100 * time.Millisecond, Levels: 8})
	direct := brokertest.VHost(t)
	ch := openChannel(t, direct)
	require.NoError(t, l.Declare(within(t), ch))
	declareBound(t, ch, l, "work", "work")
	got := collect(t, ch, l, "work")
	proxy, through := brokertest.Proxied(t, direct)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{through}, Connection: impatient})
	proxy.Refuse()
	proxy.Cut()
	const delay, outage = 20 * time.Second, 10 * time.Second
	result := make(chan error, 1)
	called := time.Now()
	go func() { result <- p.PublishDelayed(within(t), "work", delay, amqp.Publishing{}) }()
	<-time.After(outage) // the outage itself
	proxy.Pass()
	require.NoError(t, <-result)
	list := got.waitFor(t, 1)
	requireOnTime(t, list)
	assert.WithinDuration(t, called.Add(delay), list[0].NotBefore, time.Second)
	assert.Less(t, list[0].at.Sub(called), delay+outage, "the outage was not added to the delay")
}

func TestPublisherReconnectsToAnotherURL(t *testing.T) {
	t.Parallel()
	l, direct := faultLadder(t), brokertest.VHost(t)
	first, throughFirst := brokertest.Proxied(t, direct)
	second, throughSecond := brokertest.Proxied(t, direct)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{throughFirst, throughSecond}, Connection: impatient})
	for _, down := range []*brokertest.FaultProxy{first, second} {
		down.Refuse()
		down.Cut()
		require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}))
		down.Pass()
	}
}

// TestCloseWithoutConnection closes a publisher that is trying to connect.
func TestCloseWithoutConnection(t *testing.T) {
	t.Parallel()
	l, direct := faultLadder(t), brokertest.VHost(t)
	proxy, through := brokertest.Proxied(t, direct)
	p, err := ladder.NewPublisher(within(t), l, ladder.PublisherConfig{URLs: []string{through}, Connection: impatient})
	require.NoError(t, err)
	proxy.Refuse()
	proxy.Cut()
	short, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	err = p.PublishDelayed(short, "work", 0, amqp.Publishing{})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	if ladder.SafeToRetry(err) {
		require.ErrorIs(t, err, ladder.ErrNotConnected)
	}
	pending := make(chan error, 1)
	go func() { pending <- p.PublishDelayed(context.WithoutCancel(t.Context()), "work", 0, amqp.Publishing{}) }()
	closing, cancelClosing := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancelClosing()
	_ = p.Close(closing)
	select {
	case err := <-pending:
		require.ErrorIs(t, err, ladder.ErrClosed)
	case <-time.After(patience):
		require.Fail(t, "a publish hangs")
	}
}

// TestNothingListens makes sure that the refusal of a connection is told apart
// from a broker's refusal.
func TestNothingListens(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	// It accepts and never says a word.
	_, err = ladder.NewPublisher(shortly(t), faultLadder(t), ladder.PublisherConfig{URLs: []string{"amqp://guest:topsecret@" + listener.Addr().String()}})
	require.ErrorIs(t, err, ladder.ErrNotConnected)
	assert.NotErrorIs(t, err, ladder.ErrAccessRefused)
	assert.NotContains(t, err.Error(), "topsecret")
}
