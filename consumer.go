package ladder

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strconv"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder/internal/session"
)

// A Handler handles one message. What it returns decides what becomes of the
// message:
//
//   - nil: it is acknowledged.
//   - An error: the retry policy says whether and when it comes again, by the ladder and to this
//     queue alone, with Delivery.Attempt one higher. If not, it goes to the failed queue.
//   - [Permanent]: it goes to the failed queue.
//   - [RetryAfter]: it comes again after that time, with the same Delivery.Attempt.
//
// A panic is an error, and so is runtime.Goexit. What goes into the ladder or the failed queue is
// confirmed there before it is acknowledged here, so it is never lost and can come twice.
//
// The handler's context ends when the connection is lost, since the broker then gives
// the message to someone else; shortly before the end of
// ConsumerConfig.ShutdownTimeout; and at ConsumerConfig.HandlerTimeout.
// context.Cause tells which: [ErrSessionLost], [ErrShutdownTimeout] or
// context.DeadlineExceeded. In the first two cases an error is not an attempt that failed: the
// message goes back into its queue. [Permanent] and [RetryAfter] count in the second.
type Handler func(ctx context.Context, d *Delivery) error

// ConsumerConfig configures a [Consumer]. URLs and Queue must be given; the other
// fields have useful defaults.
type ConsumerConfig struct {
	// URLs are the AMQP URLs of the broker, or of the nodes of a cluster: they
	// are tried in random order. Reserved characters in the user and
	// the password must be percent-encoded.
	URLs []string

	// Connection says how to connect. Its zero value is fine.
	Connection ConnectionConfig

	// Queue is the name of the queue to consume, 1 to 255 bytes.
	Queue string

	// Destinations are what the queue gets messages for. It is bound to each of
	// them; bindings that it has already stay.
	Destinations []string

	// QueueType is the type of the queue where the consumer declares it.
	// Defaults to that of the ladder's queues.
	QueueType QueueType

	// QueueArguments are further arguments of the queue. For a quorum queue
	// x-delivery-limit defaults to 2147483647 here: RabbitMQ 4 drops a
	// message by default when it was put back 20 times.
	QueueArguments map[string]any

	// Passive makes the consumer declare and bind nothing. It cannot be
	// combined with Destinations, QueueType or QueueArguments. The ladder, the queue and the failed
	// queue must be there, and the queue must be bound to [Ladder.RetryDestination]:
	// otherwise messages that wait for another attempt are parked.
	Passive bool

	// Retry decides what becomes of a message whose handler failed. Defaults to
	// ExponentialBackoff{}: ten attempts within about nine minutes.
	Retry RetryPolicy

	// FailedQueue is the name of the queue for messages that have no attempt left or failed for
	// good. The consumer declares it as a quorum queue without limits; see
	// [Publisher.ReplayFailed] for the way back. Defaults to the queue's name and
	// ".failed".
	FailedQueue string

	// Concurrency is the number of handlers that run at the same time. One
	// that goes on after its connection was lost counts. 1 to 65535. Defaults to 10.
	Concurrency int

	// Prefetch is the most messages that the broker hands over before they are
	// acknowledged, Concurrency to 65535. Those beyond Concurrency wait here, and the
	// broker's consumer_timeout, 30 minutes by default, runs for them as well: with
	// handlers that take many minutes set it to Concurrency. After Pause and Resume
	// the messages of handlers that are still at work do not count. Defaults to
	// twice Concurrency.
	Prefetch int

	// HandlerTimeout ends the handler's context when a message takes longer. That is an
	// attempt that failed, if the handler returns an error then. Defaults to none.
	HandlerTimeout time.Duration

	// ShutdownTimeout is how long Run goes on after its context has ended, to
	// give messages back and to wait for handlers. Their contexts end when four fifths of it have
	// passed. Closing the connections takes up to five seconds more. Defaults to
	// 20 seconds: with that it is within the 30 that Kubernetes gives a pod.
	ShutdownTimeout time.Duration

	// Logger gets what happens to the connections, the errors of handlers, and what
	// becomes of their messages. Defaults to none.
	Logger *slog.Logger

	// Observer is told the outcome of each message and what happens to the
	// connections. Defaults to none.
	Observer Observer
}

var errConsumerCancelled = errors.New("the broker cancelled the consumer")

// withDefaults returns the checked configuration with the defaults filled in.
func (c ConsumerConfig) withDefaults(l *Ladder) (ConsumerConfig, error) {
	if err := l.check(); err != nil {
		return c, err
	}
	if c.Passive && (len(c.Destinations) > 0 || c.QueueType != "" || len(c.QueueArguments) > 0) {
		return c, invalidConfig("Passive", true, "a passive consumer declares and binds nothing: Destinations, QueueType and QueueArguments must be empty")
	}
	c.QueueType = cmp.Or(c.QueueType, l.config.QueueType)
	c.Concurrency = cmp.Or(c.Concurrency, 10)
	c.Prefetch = cmp.Or(c.Prefetch, min(2*c.Concurrency, math.MaxUint16))
	c.FailedQueue = cmp.Or(c.FailedQueue, FailedQueue(c.Queue))
	if c.Retry == nil {
		c.Retry = ExponentialBackoff{}
	}
	c.ShutdownTimeout = cmp.Or(c.ShutdownTimeout, 20*time.Second)
	c.Logger = orSilent(c.Logger)
	if err := checkQueueName("Queue", c.Queue); err != nil {
		return c, err
	}
	if err := checkQueueName("FailedQueue", c.FailedQueue); err != nil {
		return c, err
	}
	if policy, ok := c.Retry.(interface{ validate() error }); ok {
		if err := policy.validate(); err != nil {
			return c, err
		}
	}
	switch {
	case c.FailedQueue == c.Queue:
		return c, invalidConfig("FailedQueue", strconv.Quote(c.FailedQueue), "must be another queue than Queue")
	case c.QueueType != Quorum && c.QueueType != Classic:
		return c, invalidConfig("QueueType", fmt.Sprintf("%q", c.QueueType), "must be %q or %q", Quorum, Classic)
	case c.Concurrency < 1 || c.Concurrency > math.MaxUint16:
		return c, invalidConfig("Concurrency", c.Concurrency, "must be 1 to %d", math.MaxUint16)
	case c.Prefetch < c.Concurrency || c.Prefetch > math.MaxUint16:
		return c, invalidConfig("Prefetch", c.Prefetch, "must be %d to %d: with less than Concurrency, handlers would have nothing to do", c.Concurrency, math.MaxUint16)
	case c.HandlerTimeout < 0:
		return c, invalidConfig("HandlerTimeout", c.HandlerTimeout, "must be positive")
	case c.ShutdownTimeout < 0:
		return c, invalidConfig("ShutdownTimeout", c.ShutdownTimeout, "must be positive")
	}
	c.Destinations = slices.Clone(c.Destinations)
	for _, destination := range c.Destinations {
		if err := l.checkDestination(destination); err != nil {
			return c, fmt.Errorf("%w: Destinations: %w", ErrInvalidConfig, err)
		}
	}
	arguments, err := c.allArguments()
	if err != nil {
		return c, err
	}
	c.QueueArguments = arguments
	return c, nil
}

// maxArguments is the most bytes of a queue's arguments. They must fit into a
// frame, which has 4 KiB where a broker allows the least.
const maxArguments = 3 << 10

// noDeliveryLimit keeps a quorum queue from dropping what was put back often.
const noDeliveryLimit = int64(math.MaxInt32)

// allArguments returns a copy of the queue's arguments with the defaults.
func (c ConsumerConfig) allArguments() (amqp.Table, error) {
	arguments := amqp.Table{"x-queue-type": string(c.QueueType)}
	if c.QueueType == Quorum {
		arguments["x-delivery-limit"] = noDeliveryLimit
	}
	var copies copier
	for key, value := range c.QueueArguments {
		copied, err := copies.entry(key, value, 0)
		if err != nil {
			return nil, invalidConfig("QueueArguments", strconv.Quote(key), "%w", err)
		}
		arguments[key] = copied
	}
	if size := tableSize(arguments); size > maxArguments {
		return nil, invalidConfig("QueueArguments", fmt.Sprintf("of %d bytes", size), "at most %d are possible", maxArguments)
	}
	return arguments, nil
}

// A Consumer handles the messages of one queue.
type Consumer struct {
	ladder     *Ladder
	config     ConsumerConfig
	connection session.Config
	ready      chan struct{}
	readyOnce  sync.Once

	mu        sync.Mutex
	phase     ConsumerState // new, connecting (Run goes on), stopping, stopped
	paused    bool
	changed   chan struct{} // closed and replaced when paused changes
	keeper    *session.Keeper[*subscription]
	publisher *Publisher
}

// NewConsumer checks the configuration. It does not connect: [Consumer.Run] does. An
// error wraps [ErrInvalidConfig].
func NewConsumer(l *Ladder, config ConsumerConfig) (*Consumer, error) {
	config, err := config.withDefaults(l)
	if err != nil {
		return nil, err
	}
	connection, err := config.Connection.session(config.URLs, "ladder consumer "+config.Queue)
	if err != nil {
		return nil, err
	}
	return &Consumer{
		ladder: l, config: config, connection: connection,
		ready: make(chan struct{}), phase: StateNew, changed: make(chan struct{}),
	}, nil
}

// Ready returns a channel that is closed once Run has declared and bound the
// queue and consumes it for the first time, or would if it were not paused. A message that
// is due before a destination was ever bound is parked.
func (c *Consumer) Ready() <-chan struct{} { return c.ready }

// Run declares the ladder, the queue, its bindings and the failed queue unless the config
// says Passive, and handles messages until ctx ends. It has two connections, one to
// consume and one to send messages on; when one is lost it makes a new one, for ever. When
// ctx has ended it takes no more messages, gives back those that no handler has begun
// with, waits for the handlers at work, and returns nil, or [ErrShutdownTimeout].
//
// It returns an error at once if the broker refuses the first connection for what
// does not change by itself, as [NewPublisher] does, and [ErrRunTwice] when called a second time.
// If ctx ends before there is any connection the error wraps [ErrNotConnected].
//
// A message is acknowledged after its handler has returned nil, or after it was
// confirmed elsewhere, never before. So it is handled at least once: again after a lost
// connection, if the acknowledgement did not get through.
func (c *Consumer) Run(ctx context.Context, handler Handler) error {
	if handler == nil {
		return errors.New("ladder: Run: the handler is nil")
	}
	if !c.enter(StateNew, StateConnecting) {
		return ErrRunTwice
	}
	defer c.enter(StateStopping, StateStopped)
	defer c.enter(StateConnecting, StateStopping)
	publisher, keeper, err := c.connect(ctx)
	if err != nil {
		return err
	}
	work := newWorker(c.ladder, c.config, handler, publisher)
	defer work.end()
	for ctx.Err() == nil {
		s, err := keeper.Current(ctx)
		if err != nil {
			break // ctx has ended
		}
		c.readyOnce.Do(func() { close(c.ready) })
		c.consume(ctx, s, work)
	}
	c.enter(StateConnecting, StateStopping)
	// All that is left to do shares one ShutdownTimeout.
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.config.ShutdownTimeout)
	defer cancel()
	interrupt := time.AfterFunc(c.config.ShutdownTimeout-c.config.ShutdownTimeout/5, func() { close(work.interrupted) })
	defer interrupt.Stop()
	defer time.AfterFunc(c.config.ShutdownTimeout-c.config.ShutdownTimeout/10, work.end).Stop()
	last, _ := keeper.Present()
	if last != nil && last.deliveries != nil {
		c.stop(closing, last)
	}
	if !work.wait(closing) {
		// ctx has ended, so this cuts the sessions off.
		_ = keeper.Close(ctx)
		_ = publisher.Close(ctx)
		return ErrShutdownTimeout
	}
	if last != nil {
		c.linger(closing, last)
	}
	farewell := context.WithoutCancel(ctx)
	closed := make(chan error)
	go func() { closed <- publisher.Close(farewell) }()
	return errors.Join(keeper.Close(farewell), <-closed)
}

// connect makes the first connections.
func (c *Consumer) connect(ctx context.Context) (*Publisher, *session.Keeper[*subscription], error) {
	publisher, err := c.newPublisher(ctx)
	if err != nil {
		return nil, nil, err
	}
	keeper, err := session.Keep(ctx, c.connection, c.config.Logger, sessionEvents(c.connection.Name, c.config.Observer), c.setup)
	if err != nil {
		_ = publisher.Close(ctx)
		return nil, nil, connectError(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.publisher, c.keeper = publisher, keeper
	return publisher, keeper, nil
}

// newPublisher makes the publisher for what is sent on.
func (c *Consumer) newPublisher(ctx context.Context) (*Publisher, error) {
	connection := c.config.Connection
	connection.Name = c.connection.Name + " (retries)"
	config := PublisherConfig{
		URLs: c.config.URLs, Connection: connection, Passive: c.config.Passive, Logger: c.config.Logger,
		MaxInFlight: c.config.Concurrency,
		// The broker has had the message already.
		MaxMessageBytes: math.MaxInt,
	}
	if c.config.Observer != nil {
		config.Observer = sessionObserver{c.config.Observer}
	}
	return NewPublisher(ctx, c.ladder, config)
}

// A sessionObserver leaves away the outcomes of publishes: the consumer reports what it sends
// on with the message that it received.
type sessionObserver struct{ Observer }

func (sessionObserver) Published(context.Context, PublishEvent) {}

// A subscription is what a consumer makes of a session.
type subscription struct {
	session    *session.Session
	tags       int
	tag        string
	deliveries <-chan amqp.Delivery // nil while paused
}

func (c *Consumer) setup(ctx context.Context, s *session.Session) (*subscription, error) {
	if !c.config.Passive {
		if err := c.declare(ctx, s); err != nil {
			return nil, err
		}
	}
	if err := s.Channel.Qos(c.config.Prefetch, 0, false); err != nil {
		return nil, fmt.Errorf("ladder: prefetch: %w", err)
	}
	sub := &subscription{session: s}
	if paused, _ := c.pausing(); paused || c.stopping() {
		return sub, nil
	}
	if err := sub.subscribe(c.config.Queue); err != nil {
		return nil, err
	}
	if c.stopping() {
		// Run may not see this session any more.
		c.stop(ctx, sub)
	}
	return sub, nil
}

// subscribe makes the broker send messages.
func (s *subscription) subscribe(queue string) error {
	s.tags++
	s.tag = fmt.Sprintf("ladder-%d-%d", s.session.Generation, s.tags)
	deliveries, err := s.session.Channel.Consume(queue, s.tag, false, false, false, false, nil)
	if err != nil {
		return fmt.Errorf("ladder: consume queue %s: %w", queue, brokerError(err))
	}
	s.deliveries = deliveries
	return nil
}

func (c *Consumer) declare(ctx context.Context, s *session.Session) error {
	if err := s.Do(ctx, func(ch *amqp.Channel) error { return c.ladder.Declare(ctx, ch) }); err != nil {
		return err
	}
	if err := declareQueues(ctx, s, Queue{Name: c.config.Queue, Arguments: c.config.QueueArguments}, failedQueue(c.config.FailedQueue)); err != nil {
		return err
	}
	destinations := append([]string{c.ladder.RetryDestination(c.config.Queue)}, c.config.Destinations...)
	err := c.ladder.bindEach(ctx, s, c.config.Queue, destinations)
	if err != nil && s.Generation > 1 {
		c.config.Logger.Error("ladder: binding failed", "queue", c.config.Queue, "error", err)
		return nil
	}
	return err
}

func failedQueue(name string) Queue {
	return Queue{Name: name, Arguments: amqp.Table{"x-queue-type": string(Quorum), "x-delivery-limit": noDeliveryLimit}}
}

func declareQueues(ctx context.Context, s *session.Session, queues ...Queue) error {
	return s.Do(ctx, func(ch *amqp.Channel) error {
		var steps []step
		for _, q := range queues {
			steps = append(steps, step{"declare queue " + q.Name, func() error { return declareQueue(ch, q) }})
		}
		return run(ctx, steps)
	})
}

// consume handles the messages of one session until it or ctx ends.
func (c *Consumer) consume(ctx context.Context, s *subscription, work *worker) {
	place := work.in(ctx, s.session, c.redeclare(s.session))
	for ctx.Err() == nil {
		paused, changed := c.pausing()
		switch {
		case !paused && s.deliveries == nil:
			c.resume(ctx, s)
		case paused && s.deliveries != nil:
			c.pause(ctx, s)
		}
		if paused || s.deliveries == nil {
			select {
			case <-changed:
				continue
			case <-ctx.Done():
			case <-s.session.Done():
			}
			return
		}
		select {
		case d, open := <-s.deliveries:
			if !open {
				// The session has ended, or the broker has cancelled the consumer
				// because its queue was deleted: the next session declares it.
				if !s.session.Channel.IsClosed() {
					s.session.Drop(errConsumerCancelled)
				}
				<-s.session.Done()
				return
			}
			if !c.begin(ctx, place, d, changed) {
				giveBack(c.config, s.session, d)
			}
		case <-changed:
		case <-ctx.Done():
		case <-s.session.Done():
			return
		}
	}
}

// begin waits for a free handler and hands it the message. It returns false if
// that is not to be any more.
func (c *Consumer) begin(ctx context.Context, place *place, d amqp.Delivery, changed <-chan struct{}) bool {
	select {
	case <-changed:
		return false
	default:
	}
	select {
	case place.slots <- struct{}{}:
		place.start(ctx, d)
		return true
	case <-changed:
	case <-ctx.Done():
	case <-place.session.Done():
	}
	return false
}

// callTimeout bounds a call to the broker in the midst of a session, which
// goes on when Run's context ends.
const callTimeout = 10 * time.Second

// calling returns a context for a call that goes on when ctx ends, for a part of what
// the shutdown has.
func (c *Consumer) calling(ctx context.Context) (context.Context, context.CancelFunc) {
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(c.config.ShutdownTimeout/5, cancel) })
	return call, func() {
		stop()
		cancel()
	}
}

func (c *Consumer) resume(ctx context.Context, s *subscription) {
	ctx, cancel := c.calling(ctx)
	defer cancel()
	if err := s.session.Call(ctx, func() error { return s.subscribe(c.config.Queue) }); err != nil {
		s.session.Drop(err)
	}
}

func (c *Consumer) pause(ctx context.Context, s *subscription) {
	ctx, cancel := c.calling(ctx)
	defer cancel()
	c.stop(ctx, s)
}

// stop makes the broker send no more messages, and gives back those that are
// here already.
func (c *Consumer) stop(ctx context.Context, s *subscription) {
	deliveries := s.deliveries
	s.deliveries = nil
	if err := s.session.Call(ctx, func() error { return s.session.Channel.Cancel(s.tag, false) }); err != nil {
		c.config.Logger.Warn("ladder: cancelling the consumer failed", "queue", c.config.Queue, "error", err)
		s.session.Drop(err) // so the broker takes the messages back
		return
	}
	for d := range deliveries {
		giveBack(c.config, s.session, d)
	}
}

// lingering is how long the broker gets to pass on acknowledgements.
const lingering = 250 * time.Millisecond

// linger keeps the session open for a moment after the last acknowledgement. RabbitMQ
// holds acknowledgements to a quorum queue back while 32 are on their way to its log, and
// forgets them when the channel closes: without this, up to 97 of 100 that were
// acknowledged at the end came again.
func (c *Consumer) linger(ctx context.Context, s *subscription) {
	// The answer comes once the broker has read all that was written before.
	if err := s.session.Call(ctx, func() error { return s.session.Channel.Qos(c.config.Prefetch, 0, false) }); err != nil {
		return // they are lost with the session
	}
	select {
	case <-time.After(lingering):
	case <-s.session.Done():
	case <-ctx.Done():
	}
}

// redeclare returns what declares the failed queue again, when it turns out to be
// missing.
func (c *Consumer) redeclare(s *session.Session) func(context.Context) error {
	if c.config.Passive {
		return nil
	}
	return func(ctx context.Context) error { return declareQueues(ctx, s, failedQueue(c.config.FailedQueue)) }
}
