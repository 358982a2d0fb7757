package ladder_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

// A fate is what a message's handler does, by the message's number.
type fate struct {
	attempts int  // that it takes until it is over
	after    bool // one RetryAfter comes first
	fails    bool // it ends in the failed queue
	result   func(attempt int) error
}

func fateOf(number int) fate {
	switch number % 8 {
	case 3:
		return fate{attempts: 3, result: func(attempt int) error { return failUntil(attempt, 3) }}
	case 4:
		return fate{attempts: 2, result: func(attempt int) error {
			if attempt == 1 {
				panic("a handler's panic")
			}
			return nil
		}}
	case 5:
		return fate{attempts: 1, fails: true, result: func(int) error { return ladder.Permanent(errTest) }}
	case 6:
		return fate{attempts: 1, after: true, result: func(int) error { return nil }}
	case 7:
		return fate{attempts: faultyAttempts, fails: true, result: func(int) error { return errTest }}
	}
	return fate{attempts: 1, result: func(int) error { return nil }}
}

func failUntil(attempt, good int) error {
	if attempt < good {
		return errTest
	}
	return nil
}

const faultyAttempts = 4

// A faulty consumer's books: what its handlers did, and what ended in the failed
// queue.
type books struct {
	ladder.NopObserver
	mu       sync.Mutex
	calls    map[int]int
	handled  map[int]int
	failed   map[int]int
	later    map[int]bool // had its RetryAfter
	outcomes map[ladder.Outcome]int
	lost     int // sessions
	early    int

	connection ladder.ConnectionConfig // of the consumer
	others     bystander               // publisher, and consumer of the failed queue
}

// A bystander counts the sessions that others lose: their messages come twice then, too.
type bystander struct {
	ladder.NopObserver
	lost atomic.Int32
}

func (b *bystander) SessionLost(ladder.SessionEvent) { b.lost.Add(1) }

func newBooks() *books {
	return &books{calls: map[int]int{}, handled: map[int]int{}, failed: map[int]int{}, later: map[int]bool{}, outcomes: map[ladder.Outcome]int{}}
}

func (b *books) SessionLost(ladder.SessionEvent) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lost++
}

func (b *books) Handled(_ context.Context, e ladder.HandleEvent) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.outcomes[e.Outcome]++
}

func numberOf(d *ladder.Delivery) int {
	var n int
	if _, err := fmt.Sscan(d.MessageId, &n); err != nil {
		panic(err)
	}
	return n
}

func (b *books) handle(ctx context.Context, d *ladder.Delivery) error {
	n := numberOf(d)
	f := fateOf(n)
	b.mu.Lock()
	b.calls[n]++
	if d.Lateness < 0 {
		b.early++
	}
	wait := f.after && !b.later[n]
	b.later[n] = true
	b.mu.Unlock()
	if wait {
		return ladder.RetryAfter(rand.N(50 * time.Millisecond))
	}
	if n%101 == 0 {
		select {
		case <-time.After(rand.N(300 * time.Millisecond)):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := f.result(d.Attempt); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.handled[n]++
	return nil
}

// fail is the handler of the failed queue's consumer.
func (b *books) fail(_ context.Context, d *ladder.Delivery) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.failed[numberOf(d)]++
	if want := fateOf(numberOf(d)).attempts; d.Attempt != want {
		return fmt.Errorf("message %s failed after %d attempts, not %d", d.MessageId, d.Attempt, want)
	}
	return nil
}

// over counts the messages that came to the end that they should, and their second copies.
func (b *books) over() (ended, duplicates int, wrong []int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for n := range b.calls {
		good, bad := b.handled[n], b.failed[n]
		if fateOf(n).fails {
			good, bad = bad, good
		}
		if bad > 0 {
			wrong = append(wrong, n)
		}
		if good > 0 {
			ended++
			duplicates += good - 1
		}
	}
	return ended, duplicates, wrong
}

// waitFor waits until all messages have come to their end, however long that takes while there is progress.
func (b *books) waitFor(t *testing.T, messages int) {
	t.Helper()
	best, since := -1, time.Now()
	require.Eventually(t, func() bool {
		ended, _, _ := b.over()
		if ended > best {
			best, since = ended, time.Now()
		}
		return ended == messages || time.Since(since) > patience
	}, 20*patience, 20*time.Millisecond)
	require.Equal(t, messages, best, "messages that came to their end; there was no progress for %s", patience)
}

// run publishes messages of all fates while faults happen, waits until each has come to
// its end, and returns the number of duplicates.
func (b *books) run(t *testing.T, l *ladder.Ladder, direct, through string, messages int, ready, faults func()) (duplicates int) {
	t.Helper()
	stop := start(t, l, ladder.ConsumerConfig{
		URLs: []string{through}, Connection: b.connection, Queue: "work", Destinations: []string{"work"}, Concurrency: 16, Observer: b,
		Retry: ladder.ExponentialBackoff{Initial: 10 * time.Millisecond, Max: 100 * time.Millisecond, MaxAttempts: faultyAttempts},
	}, b.handle)
	stopFailed := start(t, l, ladder.ConsumerConfig{
		URLs: []string{direct}, Observer: &b.others, Queue: "work.failed", QueueArguments: map[string]any{"x-delivery-limit": int64(2147483647)}, Concurrency: 1,
		Retry: ladder.NoRetry{},
	}, b.fail)
	ready()
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{direct}, Observer: &b.others, Timeout: 2 * patience})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for first := 0; first < messages; first += 250 {
			batch := make([]ladder.Message, min(250, messages-first))
			for i := range batch {
				batch[i] = ladder.Message{Destination: "work", Delay: rand.N(time.Second), Publishing: amqp.Publishing{MessageId: fmt.Sprint(first + i)}}
			}
			if err := p.PublishBatch(context.WithoutCancel(t.Context()), batch); err != nil {
				t.Error(err)
			}
		}
	}()
	faults()
	<-done
	b.waitFor(t, messages)
	waitForCount(t, direct, "work", 0)
	ended, duplicates, wrong := b.over()
	require.NoError(t, stop())
	require.NoError(t, stopFailed())
	assert.Empty(t, wrong, "messages that came to another end than they should")
	assert.Zero(t, messageCount(t, direct, "work.failed.failed"), "messages with the wrong number of attempts")
	assert.Zero(t, messageCount(t, direct, l.ParkingQueue()))
	assert.Zero(t, b.early)
	calls := 0
	for _, n := range b.calls {
		calls += n
	}
	t.Logf("%d messages: %d calls, %v, %d duplicates, %d sessions lost, and %d of others", ended, calls, b.outcomes, duplicates, b.lost, b.others.lost.Load())
	return duplicates
}

// TestConsumerWithoutFaults has handlers that fail in all ways, and nothing else.
func TestConsumerWithoutFaults(t *testing.T) {
	t.Parallel()
	const messages = 2000
	l, url := faultLadder(t), brokertest.VHost(t)
	b := newBooks()
	duplicates := b.run(t, l, url, url, messages, func() {}, func() {})
	require.Zero(t, b.lost)
	require.Zero(t, b.others.lost.Load())
	assert.Zero(t, duplicates, "duplicates come from lost sessions alone")
	for n, calls := range b.calls {
		want := fateOf(n).attempts
		if fateOf(n).after {
			want++
		}
		assert.Equal(t, want, calls, "message %d", n)
	}
}

// TestConsumerFaults has in addition cut connections and a killed broker.
func TestConsumerFaults(t *testing.T) {
	broker := brokertest.Private(t)
	logQueuesOnFailure(t, broker)
	const messages = 10_000
	l, direct := faultLadder(t), broker.AMQPURL()
	proxy, through := brokertest.Proxied(t, direct)
	b := newBooks()
	b.connection = impatient
	progress := func() int {
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.calls)
	}
	duplicates := b.run(t, l, direct, through, messages, func() {
		// It saves the names of new quorum queues: see TestBrokerKilled.
		require.NoError(t, errors.Join(broker.Stop(within(t)), broker.Start(within(t))))
	}, func() {
		for cut := 1; cut <= 12; cut++ {
			require.Eventually(t, func() bool { return progress() >= cut*messages/16 }, 2*patience, 5*time.Millisecond)
			if cut == 6 {
				require.NoError(t, broker.Kill(within(t)))
				require.NoError(t, broker.Start(within(t)))
				continue
			}
			proxy.Cut()
		}
	})
	assert.GreaterOrEqual(t, b.lost, 12)
	// With each session at most what was prefetched was unsettled, or sent on and not
	// acknowledged; the broker has copies of its own when it dies.
	assert.LessOrEqual(t, duplicates, (b.lost+int(b.others.lost.Load()))*32+32*l.Config().Levels)
}
