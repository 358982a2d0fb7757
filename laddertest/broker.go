package laddertest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/seam"
)

// maxDeliveries is the most deliveries of one call of Drain or Advance. A retry each second of a day is
// less.
const maxDeliveries = 100_000

var errAckLost = errors.New("laddertest: the acknowledgement is lost, see Broker.LoseAcks")

// A Broker stands in for RabbitMQ and for the ladder that is declared there. [Run]
// makes it. Publishers can be used in any goroutine of the test, and what makes a test fail here, as the
// other methods can, only in the test's own.
type Broker struct {
	t      *testing.T
	ladder *ladder.Ladder

	newPublisher newPublisher
	newWorker    newWorker

	mu        sync.Mutex
	published []Published
	waiting   []*message          // in the ladder, by due and number
	bound     map[string][]*queue // by destination
	queues    map[string]*queue
	order     []*queue      // in which they were declared
	more      chan struct{} // has a token when something was published
	numbers   uint64
	loseAcks  int
	driving   bool
}

// What package seam holds.
type (
	newPublisher = func(*ladder.Ladder, ladder.PublisherConfig, func(exchange, key string, msg amqp.Publishing) error) (*ladder.Publisher, error)
	newWorker    = func(*ladder.Ladder, ladder.ConsumerConfig, ladder.Handler, *ladder.Publisher, func(ladder.Outcome) error) (func(context.Context, amqp.Delivery), ladder.ConsumerConfig, error)
)

// A message waits in the ladder, or has come to a queue.
type message struct {
	number uint64 // counts the publishes
	due    time.Time
	units  uint64
	target string // destination, or queue if exchange is empty

	exchange, key string
	publishing    amqp.Publishing
}

// An entry is a copy of a message in a queue.
type entry struct {
	*message
	raw       amqp.Delivery
	delivered int
}

type queue struct {
	name     string
	consumer *consumer // nil if nobody consumes it
	entries  []*entry
}

type consumer struct {
	config ladder.ConsumerConfig
	handle func(context.Context, amqp.Delivery)
	tags   uint64
	at     *entry // what its handler is at work on
}

// Published is a message that a publisher or a consumer has sent.
type Published struct {
	// At is when it was sent.
	At time.Time
	// Destination is what it was published to. For what a consumer sends on, it is the destination
	// by which the message first came.
	Destination string
	// Queue is the one queue that it was sent to: for a retry that of the consumer, and
	// for a message without an attempt left its failed queue. Empty for what was published to
	// a destination.
	Queue string
	// Retry is true if a consumer sent it for another attempt, or as its handler
	// returned [ladder.RetryAfter].
	Retry bool
	// Delay is the time from At to NotBefore in whole milliseconds, as it was asked for: it is not rounded up
	// to units. Zero for none, and for a failed message.
	Delay time.Duration
	// NotBefore is the instant at which it is due, to the millisecond. It is that of the last delivery for
	// a failed message.
	NotBefore time.Time
	// Publishing is the message on the wire, with the headers and properties that the
	// library has filled in. Do not change what it refers to.
	Publishing amqp.Publishing
}

// Run runs f in a bubble of testing/synctest, with a broker on which the ladder is declared
// and nothing else. The bubble's clock starts at midnight UTC on 2000-01-01. f must use the t and
// the Broker that it is given, and no network. Run returns when f has, and all goroutines that
// were started in it.
func Run(t *testing.T, l *ladder.Ladder, f func(t *testing.T, b *Broker)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		t.Helper()
		f(t, newBroker(t, l))
	})
}

func newBroker(t *testing.T, l *ladder.Ladder) *Broker {
	t.Helper()
	b := &Broker{
		t: t, ladder: l,
		bound: make(map[string][]*queue), queues: make(map[string]*queue), more: make(chan struct{}, 1),
	}
	b.queue(l.ParkingQueue())
	var ok bool
	if b.newPublisher, ok = seam.NewPublisher.(newPublisher); !ok {
		t.Fatalf("laddertest: seam.NewPublisher is a %T", seam.NewPublisher)
	}
	if b.newWorker, ok = seam.NewWorker.(newWorker); !ok {
		t.Fatalf("laddertest: seam.NewWorker is a %T", seam.NewWorker)
	}
	return b
}

// Publisher returns a new publisher with the default configuration, which publishes here. It need not be
// closed.
func (b *Broker) Publisher() *ladder.Publisher {
	b.t.Helper()
	return b.PublisherWith(ladder.PublisherConfig{})
}

// PublisherWith returns a new publisher with a configuration of the caller's, which publishes
// here: for its Observer, MaxMessageBytes or Bindings, for example. URLs, Connection and what is about connections
// are ignored. A configuration that [ladder.NewPublisher] would refuse fails the test.
func (b *Broker) PublisherWith(config ladder.PublisherConfig) *ladder.Publisher {
	b.t.Helper()
	p := b.publisher(config, nil)
	for _, binding := range config.Bindings {
		b.Bind(binding.Queue, binding.Destinations...)
	}
	return p
}

// publisher makes a publisher, or a consumer's for what that sends on.
func (b *Broker) publisher(config ladder.PublisherConfig, from *queue) *ladder.Publisher {
	b.t.Helper()
	p, err := b.newPublisher(b.ladder, config, func(exchange, key string, msg amqp.Publishing) error {
		return b.take(exchange, key, msg, from)
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return p
}

// Consume declares a queue and its failed queue, binds it to config.Destinations, and has
// the handler called for its messages, as [ladder.Consumer.Run] does with the same
// configuration. Retry, FailedQueue, HandlerTimeout, Logger and Observer have their
// effect; the fields that are about connections and concurrency are ignored, and URLs need not be given. A
// Passive consumer finds its queues declared, and the one bound for its retries; bind it to
// destinations with [Broker.Bind].
//
// A configuration that [ladder.NewConsumer] would refuse fails the test, and so does a second consumer
// of one queue.
func (b *Broker) Consume(config ladder.ConsumerConfig, handler ladder.Handler) {
	b.t.Helper()
	if handler == nil {
		b.t.Fatalf("laddertest: Consume(%q): the handler is nil", config.Queue)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.arrive()
	q := b.queue(config.Queue)
	if q.consumer != nil {
		b.t.Fatalf("laddertest: Consume(%q): the queue has a consumer already", config.Queue)
	}
	publisher := b.publisher(ladder.PublisherConfig{Logger: config.Logger, MaxMessageBytes: math.MaxInt}, q)
	settle := func(outcome ladder.Outcome) error { return b.settle(q, outcome) }
	handle, config, err := b.newWorker(b.ladder, config, handler, publisher, settle)
	if err != nil {
		b.t.Fatal(err)
	}
	q.consumer = &consumer{config: config, handle: handle}
	b.queue(config.FailedQueue)
	b.bind(q, b.ladder.RetryDestination(config.Queue))
	for _, destination := range config.Destinations {
		b.bind(q, destination)
	}
}

// Bind declares a queue if it is not there, and binds it to destinations, as [ladder.Ladder.Bind] does. What
// comes to a queue that nobody consumes waits there until somebody does. A destination that
// is not valid fails the test.
func (b *Broker) Bind(queue string, destinations ...string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.arrive()
	for _, destination := range destinations {
		if _, err := b.ladder.BindingKey(destination); err != nil {
			b.t.Fatal(err)
		}
		b.bind(b.queue(queue), destination)
	}
}

func (b *Broker) bind(q *queue, destination string) {
	if !slices.Contains(b.bound[destination], q) {
		b.bound[destination] = append(b.bound[destination], q)
	}
}

// queue declares a queue.
func (b *Broker) queue(name string) *queue {
	if q := b.queues[name]; q != nil {
		return q
	}
	q := &queue{name: name}
	b.queues[name] = q
	b.order = append(b.order, q)
	return q
}

// Published returns all that was sent, in order: by publishers, and by consumers for
// another attempt or to a failed queue.
func (b *Broker) Published() []Published {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.published)
}

// Parked returns what is in the parking queue, in the order of its coming: the messages to a
// destination that no queue was bound to when they fell due.
func (b *Broker) Parked() []*ladder.Delivery {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.inside(b.queue(b.ladder.ParkingQueue()))
}

// Failed returns what is in the failed queue of the consumer of a queue, in the order of its
// coming. Delivery.Failure has the reason. It takes the name of the queue that is consumed, not that of
// the failed queue; one that is not consumed fails the test.
func (b *Broker) Failed(queue string) []*ladder.Delivery {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	q := b.queues[queue]
	if q == nil || q.consumer == nil {
		b.t.Fatalf("laddertest: Failed(%q): nobody consumes that queue", queue)
	}
	return b.inside(b.queue(q.consumer.config.FailedQueue))
}

// inside returns what is in a queue.
func (b *Broker) inside(q *queue) []*ladder.Delivery {
	b.arrive()
	deliveries := make([]*ladder.Delivery, len(q.entries))
	for i, e := range q.entries {
		deliveries[i] = b.ladder.ParseDelivery(e.raw)
	}
	return deliveries
}

// LoseAcks has the next n acknowledgements not get through, as if the connection were lost after the handler
// had returned: the message is delivered again at once, with Delivery.Redelivered set. If it was to be
// retried or had failed, that has happened already, and it is there twice, as with RabbitMQ. The observer is
// told [ladder.OutcomeLost].
func (b *Broker) LoseAcks(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.loseAcks = n
}

// take has the broker accept a message. Consumers send on from their queue.
func (b *Broker) take(exchange, key string, msg amqp.Publishing, from *queue) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	m := &message{number: b.numbers, due: now, exchange: exchange, key: key, target: key, publishing: msg}
	record := Published{At: now, Destination: key, Publishing: msg}
	if exchange == "" {
		if b.queues[key] == nil {
			return fmt.Errorf("%w: there is no queue %q", ladder.ErrUnroutable, key)
		}
		record.Queue = key
	} else {
		units, destination, err := b.ladder.ParseKey(key)
		if err != nil {
			return err
		}
		m.units, m.target = units, destination
		m.due = now.Add(time.Duration(units) * b.ladder.Config().Unit)
		record.Destination = destination
		if from != nil {
			record.Queue, record.Retry = from.name, true
		}
	}
	if ms, ok := msg.Headers[ladder.HeaderNotBefore].(int64); ok {
		record.NotBefore = time.UnixMilli(ms)
	}
	if exchange != "" {
		record.Delay = max(record.NotBefore.Sub(now.Truncate(time.Millisecond)), 0)
	}
	if from != nil {
		if destination, ok := msg.Headers[ladder.HeaderDestination].(string); ok {
			record.Destination = destination
		}
	}
	b.published = append(b.published, record)
	b.numbers++
	i, _ := slices.BinarySearchFunc(b.waiting, m, byDue)
	b.waiting = slices.Insert(b.waiting, i, m)
	select {
	case b.more <- struct{}{}:
	default:
	}
	return nil
}

func byDue(a, b *message) int {
	return cmp.Or(a.due.Compare(b.due), cmp.Compare(a.number, b.number))
}

// arrive takes what has fallen due to its queues. It is called before anything changes that
// says which.
func (b *Broker) arrive() {
	now := time.Now()
	arrived := 0
	for _, m := range b.waiting {
		if m.due.After(now) {
			break
		}
		arrived++
		if m.exchange == "" {
			b.put(b.queues[m.target], m)
			continue
		}
		bound := b.bound[m.target]
		if len(bound) == 0 {
			bound = []*queue{b.queues[b.ladder.ParkingQueue()]}
		}
		for _, q := range bound {
			b.put(q, m)
		}
	}
	b.waiting = b.waiting[arrived:]
}

// put puts a copy of a message into a queue.
func (b *Broker) put(q *queue, m *message) {
	q.entries = append(q.entries, &entry{message: m, raw: received(b.ladder, m)})
}

// Drain delivers until nothing waits any more, however long that takes on the virtual clock, which then
// stands at the last delivery's end. What waits in a queue without a consumer stays. It first lets other
// goroutines of the test go on until they wait too.
//
// After 100000 deliveries it fails the test: a handler that has a message come again for
// ever, or publishes another each time, is for [Broker.Advance]. A handler cannot call it.
func (b *Broker) Drain() {
	b.t.Helper()
	b.drive("Drain", time.Time{})
}

// Advance delivers what falls due within d, what is due already included and what falls due at its very end
// too, and moves the virtual clock to the end of d, or beyond it if a handler sleeps longer. A negative d
// is none. It has the same limit of deliveries as [Broker.Drain].
func (b *Broker) Advance(d time.Duration) {
	b.t.Helper()
	b.drive("Advance", time.Now().Add(max(d, 0)))
}

// drive delivers until an instant, or until nothing waits if that is zero.
func (b *Broker) drive(name string, until time.Time) {
	b.t.Helper()
	if !b.enter() {
		b.t.Fatalf("laddertest: %s is called while messages are being delivered; a handler cannot call it", name)
	}
	defer b.leave()
	var last *entry
	for deliveries := 0; ; {
		synctest.Wait()
		q, e, due := b.next(until)
		switch {
		case e != nil && deliveries == maxDeliveries:
			b.t.Fatalf("laddertest: %s: %d deliveries and no end; the last was of message %q (destination %q) in queue %q, attempt %d: does its handler have messages come again for ever?",
				name, deliveries, last.raw.MessageId, b.ladder.ParseDelivery(last.raw).Destination, q.name, b.ladder.ParseDelivery(last.raw).Attempt)
		case e != nil:
			deliveries++
			last = e
			b.deliver(q, e)
		case due.IsZero():
			return
		default:
			b.sleep(due)
		}
	}
}

func (b *Broker) enter() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.driving {
		return false
	}
	b.driving = true
	return true
}

func (b *Broker) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.driving = false
}

// sleep moves the clock to an instant, or until a message is published.
func (b *Broker) sleep(until time.Time) {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-b.more:
	case <-timer.C:
	}
}

// next returns what is to be delivered now, or until when to sleep, or neither at the end.
func (b *Broker) next(until time.Time) (*queue, *entry, time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	b.arrive()
	var from *queue
	for _, q := range b.order {
		if q.consumer == nil || len(q.entries) == 0 {
			continue
		}
		if from == nil || byDue(q.entries[0].message, from.entries[0].message) < 0 {
			from = q
		}
	}
	if from != nil && (until.IsZero() || !from.entries[0].due.After(until)) {
		return from, from.entries[0], time.Time{}
	}
	if len(b.waiting) > 0 && (until.IsZero() || !b.waiting[0].due.After(until)) {
		return nil, nil, b.waiting[0].due
	}
	if now.Before(until) {
		return nil, nil, until
	}
	return nil, nil, time.Time{}
}

// deliver hands a message to its queue's consumer.
func (b *Broker) deliver(q *queue, e *entry) {
	c := q.consumer
	b.mu.Lock()
	q.entries = q.entries[1:]
	c.at = e
	c.tags++
	raw := e.raw
	b.mu.Unlock()
	raw.ConsumerTag = "ladder-1-1"
	raw.DeliveryTag = c.tags
	raw.Redelivered = e.delivered > 0
	raw.Headers, raw.Body = table(raw.Headers), append([]byte{}, raw.Body...)
	if e.delivered > 0 && c.config.QueueType == ladder.Quorum {
		raw.Headers["x-delivery-count"] = int64(e.delivered)
	}
	e.delivered++
	c.handle(b.t.Context(), raw)
}

// settle acknowledges what a queue's consumer is at work on, or puts it back.
func (b *Broker) settle(q *queue, outcome ladder.Outcome) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := q.consumer.at
	q.consumer.at = nil
	if outcome == ladder.OutcomeReturned || outcome == ladder.OutcomeLost {
		q.entries = slices.Insert(q.entries, 0, e)
		return nil
	}
	if b.loseAcks > 0 {
		b.loseAcks--
		q.entries = slices.Insert(q.entries, 0, e)
		return errAckLost
	}
	return nil
}
