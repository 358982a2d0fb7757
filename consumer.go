package ladder

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder/internal/session"
)

// A Handler handles one message. [Consumer.Run] acknowledges the message when the handler
// returns nil, and puts it back into its queue when it returns an error or
// panics.
//
// A message that is put back comes again, before those behind it, for ever. As
// many that always fail as there are handlers (ConsumerConfig.Concurrency) leave
// none for other messages. Until the consumer can retry through the ladder, a
// handler should see to it: publish the message again with a delay, or store it
// elsewhere, and return nil; or give the queue an x-delivery-limit and a dead-letter
// exchange with ConsumerConfig.QueueArguments.
//
// Its context ends when the connection is lost, since the broker then gives the
// message to someone else, and at the end of ConsumerConfig.ShutdownTimeout.
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
	// Defaults to Quorum, in which messages survive the loss of a node.
	QueueType QueueType

	// QueueArguments are further arguments of the queue. For a quorum queue
	// x-delivery-limit defaults to 2147483647 here: RabbitMQ 4 drops a
	// message by default when it was put back 20 times.
	QueueArguments map[string]any

	// Passive makes the consumer declare and bind nothing. It cannot be
	// combined with Destinations, QueueType or QueueArguments.
	Passive bool

	// Concurrency is the number of handlers that run at the same time. One
	// that goes on after its connection was lost counts. Defaults to 10.
	Concurrency int

	// Prefetch is the most messages that the broker hands over before they are
	// acknowledged, 1 to 65535. Those beyond Concurrency wait here, and the
	// broker's consumer_timeout, 30 minutes by default, runs for them as well: with
	// handlers that take many minutes set it to Concurrency. Defaults to twice
	// Concurrency.
	Prefetch int

	// RequeueDelay is how long a message whose handler failed is held before
	// it goes back into its queue, so that it does not come again at once. It
	// occupies one of Concurrency meanwhile.
	// Defaults to one second.
	RequeueDelay time.Duration

	// ShutdownTimeout is how long Run goes on after its context has ended, to
	// give messages back and to wait for handlers. Closing the connection takes up to
	// five seconds more. Defaults to 30 seconds.
	ShutdownTimeout time.Duration

	// Logger gets what happens to the connection, and the errors of handlers,
	// which nothing else shows. Defaults to none.
	Logger *slog.Logger

	// Observer is told what happens to the connection. Defaults to none.
	Observer Observer
}

var (
	errConsumerCancelled = errors.New("the broker cancelled the consumer")
	errHandlerExited     = errors.New("ladder: the handler ended its goroutine (runtime.Goexit)")
)

// withDefaults returns the checked configuration with the defaults filled in.
func (c ConsumerConfig) withDefaults(l *Ladder) (ConsumerConfig, error) {
	if c.Passive && (len(c.Destinations) > 0 || c.QueueType != "" || len(c.QueueArguments) > 0) {
		return c, invalidConfig("Passive", true, "a passive consumer declares and binds nothing: Destinations, QueueType and QueueArguments must be empty")
	}
	c.QueueType = cmp.Or(c.QueueType, Quorum)
	c.Concurrency = cmp.Or(c.Concurrency, 10)
	c.Prefetch = cmp.Or(c.Prefetch, min(2*c.Concurrency, math.MaxUint16))
	c.RequeueDelay = cmp.Or(c.RequeueDelay, time.Second)
	c.ShutdownTimeout = cmp.Or(c.ShutdownTimeout, 30*time.Second)
	c.Logger = orSilent(c.Logger)
	if err := checkQueueName("Queue", c.Queue); err != nil {
		return c, err
	}
	switch {
	case c.QueueType != Quorum && c.QueueType != Classic:
		return c, invalidConfig("QueueType", fmt.Sprintf("%q", c.QueueType), "must be %q or %q", Quorum, Classic)
	case c.Concurrency < 1:
		return c, invalidConfig("Concurrency", c.Concurrency, "must be at least 1")
	case c.Prefetch < 1 || c.Prefetch > math.MaxUint16:
		return c, invalidConfig("Prefetch", c.Prefetch, "must be 1 to %d", math.MaxUint16)
	case c.RequeueDelay < 0:
		return c, invalidConfig("RequeueDelay", c.RequeueDelay, "must be positive")
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

// allArguments returns a copy of the queue's arguments with the defaults.
func (c ConsumerConfig) allArguments() (amqp.Table, error) {
	arguments := amqp.Table{"x-queue-type": string(c.QueueType)}
	if c.QueueType == Quorum {
		arguments["x-delivery-limit"] = int64(math.MaxInt32)
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
	running    atomic.Bool
	ready      chan struct{}
	readyOnce  sync.Once
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
	return &Consumer{ladder: l, config: config, connection: connection, ready: make(chan struct{})}, nil
}

// Ready returns a channel that is closed once Run has declared and bound the
// queue and consumes it for the first time. A message that is due before a
// destination was ever bound is parked.
func (c *Consumer) Ready() <-chan struct{} { return c.ready }

// Run declares the ladder, the queue and its bindings unless the config says Passive,
// and handles messages until ctx ends; when the connection is lost it makes a new one. It
// then takes no more messages, gives back those that no handler has begun with, waits
// for the handlers at work, and returns nil, or [ErrShutdownTimeout].
//
// It returns an error at once if the broker refuses the first connection for what
// does not change by itself, as [NewPublisher] does, and [ErrRunTwice] when called a second time.
// If ctx ends before there is any connection the error wraps [ErrNotConnected].
//
// A message is acknowledged after its handler has returned nil, never before. So it is
// handled at least once: again after a lost connection, if the
// acknowledgement did not get through.
func (c *Consumer) Run(ctx context.Context, handler Handler) error {
	if !c.running.CompareAndSwap(false, true) {
		return ErrRunTwice
	}
	keeper, err := session.Keep(ctx, c.connection, c.config.Logger, sessionEvents(c.connection.Name, c.config.Observer), c.setup)
	if err != nil {
		return connectError(err)
	}
	handlers := &pool{slots: make(chan struct{}, c.config.Concurrency)}
	var last *subscription
	for ctx.Err() == nil {
		s, err := keeper.Current(ctx)
		if err != nil {
			break // ctx has ended
		}
		last = s
		c.readyOnce.Do(func() { close(c.ready) })
		c.consume(ctx, s, handler, handlers)
	}
	// All that is left to do shares one ShutdownTimeout.
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.config.ShutdownTimeout)
	defer cancel()
	if last != nil {
		c.stop(closing, last)
	}
	if !handlers.wait(closing) {
		_ = keeper.Close(ctx) // ctx has ended, so this cuts the session off
		return ErrShutdownTimeout
	}
	return keeper.Close(context.WithoutCancel(ctx))
}

// A pool bounds the handlers at work, those of a lost session included.
type pool struct {
	slots chan struct{}
	work  sync.WaitGroup
}

func (p *pool) run(f func()) {
	p.work.Go(func() {
		defer func() { <-p.slots }()
		f()
	})
}

// wait waits until no handler is at work; it returns false if ctx ends first.
func (p *pool) wait(ctx context.Context) bool {
	return await(ctx, func() error { p.work.Wait(); return nil }) == nil
}

// A subscription is what a consumer makes of a session.
type subscription struct {
	session    *session.Session
	tag        string
	deliveries <-chan amqp.Delivery
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
	tag := fmt.Sprintf("ladder-%d", s.Generation)
	deliveries, err := s.Channel.Consume(c.config.Queue, tag, false, false, false, false, nil)
	if err != nil {
		return nil, fmt.Errorf("ladder: consume queue %s: %w", c.config.Queue, brokerError(err))
	}
	return &subscription{session: s, tag: tag, deliveries: deliveries}, nil
}

func (c *Consumer) declare(ctx context.Context, s *session.Session) error {
	if err := s.Do(ctx, func(ch *amqp.Channel) error { return c.ladder.Declare(ctx, ch) }); err != nil {
		return err
	}
	queue := Queue{Name: c.config.Queue, Arguments: c.config.QueueArguments}
	if err := s.Do(ctx, func(ch *amqp.Channel) error {
		return run(ctx, []step{{"declare queue " + queue.Name, func() error { return declareQueue(ch, queue) }}})
	}); err != nil {
		return err
	}
	err := c.ladder.bindEach(ctx, s, queue.Name, c.config.Destinations)
	if err != nil && s.Generation > 1 {
		c.config.Logger.Error("ladder: binding failed", "queue", queue.Name, "error", err)
		return nil
	}
	return err
}

// consume handles the messages of one session until it or ctx ends.
func (c *Consumer) consume(ctx context.Context, s *subscription, handler Handler, handlers *pool) {
	handling, cancel := context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		<-s.session.Done()
		cancel()
	}()
	for {
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
			select {
			case handlers.slots <- struct{}{}:
				handlers.run(func() { c.handle(ctx, handling, s, d, handler) })
			case <-ctx.Done():
				c.settle(s, d, d.Nack(false, true))
				return
			case <-s.session.Done():
				return
			}
		case <-ctx.Done():
			return
		case <-s.session.Done():
			return
		}
	}
}

// stop makes the broker send no more messages, and gives back those that are
// here already.
func (c *Consumer) stop(ctx context.Context, s *subscription) {
	if err := s.session.Call(ctx, func() error { return s.session.Channel.Cancel(s.tag, false) }); err != nil {
		c.config.Logger.Warn("ladder: cancelling the consumer failed", "queue", c.config.Queue, "error", err)
		return // its session ends, and the broker takes the messages back
	}
	for d := range s.deliveries {
		c.settle(s, d, d.Nack(false, true))
	}
}

// handle runs the handler on one message and settles it.
func (c *Consumer) handle(ctx, handling context.Context, s *subscription, raw amqp.Delivery, handler Handler) {
	d := c.ladder.ParseDelivery(raw)
	d.Acknowledger = disarmed{}
	err := errHandlerExited
	// Deferred, because a handler can end the goroutine: a test's FailNow does.
	defer func() {
		if err == nil {
			c.settle(s, raw, raw.Ack(false))
			return
		}
		c.config.Logger.Error("ladder: handler failed, message goes back into its queue",
			"queue", c.config.Queue, "destination", d.Destination, "message", d.MessageId, "error", err)
		select {
		case <-time.After(c.config.RequeueDelay):
		case <-handling.Done():
		case <-ctx.Done():
		}
		c.settle(s, raw, raw.Nack(false, true))
	}()
	err = call(handling, handler, d)
}

// call runs the handler; a panic in it is an error.
func call(ctx context.Context, handler Handler, d *Delivery) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("ladder: handler panicked: %v\n%s", r, debug.Stack())
		}
	}()
	return handler(ctx, d)
}

// settle logs the error of an acknowledgement. Its channel has then ended, so
// the broker delivers the message again.
func (c *Consumer) settle(s *subscription, d amqp.Delivery, err error) {
	if err != nil {
		c.config.Logger.Warn("ladder: settling failed, message comes again",
			"queue", c.config.Queue, "message", d.MessageId, "generation", s.session.Generation, "error", err)
	}
}

// disarmed keeps handlers from settling messages on their own.
type disarmed struct{}

func (disarmed) Ack(uint64, bool) error        { return ErrSettledByRun }
func (disarmed) Nack(uint64, bool, bool) error { return ErrSettledByRun }
func (disarmed) Reject(uint64, bool) error     { return ErrSettledByRun }
