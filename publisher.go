package ladder

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder/internal/session"
)

// PublisherConfig configures a [Publisher]. URLs must be given; the other fields
// have useful defaults.
type PublisherConfig struct {
	// URLs are the AMQP URLs of the broker, or of the nodes of a cluster: they
	// are tried in random order. Reserved characters in the user and
	// the password must be percent-encoded.
	URLs []string

	// Connection says how to connect. Its zero value is fine.
	Connection ConnectionConfig

	// MaxInFlight is the most messages that are written and not yet
	// confirmed, 1 to 65535; further publishes wait. Defaults to 1000.
	MaxInFlight int

	// Timeout bounds a publish whose context has no deadline. Defaults to 30
	// seconds.
	Timeout time.Duration

	// ConfirmTimeout is how long the broker may confirm nothing at all, while
	// messages are in flight and it does not block the connection, before the
	// connection is given up for one to another URL. A node that is cut off from
	// the majority of its cluster is like this. Defaults to 10 seconds.
	ConfirmTimeout time.Duration

	// MaxMessageBytes is the largest body that is sent. The broker closes the
	// channel over a message larger than its max_message_size, which
	// is 16 MiB by default in RabbitMQ 4 and 128 MiB before; once that has
	// happened, the publisher knows that limit and keeps to it. Defaults to 16
	// MiB.
	MaxMessageBytes int

	// Passive makes the publisher declare nothing. The ladder is then declared
	// by others, and the user needs write permission alone. It cannot be
	// combined with Bindings.
	Passive bool

	// Bindings are ensured before the first publish on each connection, for
	// consumers that do not bind their queues themselves. The queues must
	// exist.
	Bindings []QueueBinding

	// NoRepublish makes a publish fail with [ErrOutcomeUnknown] when its
	// connection is lost before the confirm, where by default it is sent
	// again. Sending again may deliver a message twice; not sending it again
	// may lose it.
	NoRepublish bool

	// Logger gets what happens to the connection. Defaults to none.
	Logger *slog.Logger

	// Observer is told the outcome of each message and what happens to the
	// connection. Defaults to none.
	Observer Observer
}

// A QueueBinding binds a queue to destinations. See [Ladder.Bind].
type QueueBinding struct {
	Queue        string
	Destinations []string
}

const (
	defaultMaxInFlight     = 1000
	defaultTimeout         = 30 * time.Second
	defaultConfirmTimeout  = 10 * time.Second
	defaultMaxMessageBytes = 16 << 20
)

// withDefaults returns the checked configuration with the defaults filled in.
func (c PublisherConfig) withDefaults(l *Ladder) (PublisherConfig, error) {
	if err := l.check(); err != nil {
		return c, err
	}
	c.MaxInFlight = cmp.Or(c.MaxInFlight, defaultMaxInFlight)
	c.Timeout = cmp.Or(c.Timeout, defaultTimeout)
	c.ConfirmTimeout = cmp.Or(c.ConfirmTimeout, defaultConfirmTimeout)
	c.MaxMessageBytes = cmp.Or(c.MaxMessageBytes, defaultMaxMessageBytes)
	c.Logger = orSilent(c.Logger)
	c.Bindings = slices.Clone(c.Bindings)
	switch {
	case c.MaxInFlight < 1 || c.MaxInFlight > 65535:
		return c, invalidConfig("MaxInFlight", c.MaxInFlight, "must be 1 to 65535")
	case c.Timeout < 0:
		return c, invalidConfig("Timeout", c.Timeout, "must be positive")
	case c.ConfirmTimeout < time.Millisecond:
		return c, invalidConfig("ConfirmTimeout", c.ConfirmTimeout, "must be at least 1ms")
	case c.MaxMessageBytes < 0:
		return c, invalidConfig("MaxMessageBytes", c.MaxMessageBytes, "must be positive")
	case c.Passive && len(c.Bindings) > 0:
		return c, invalidConfig("Bindings", c.Bindings, "a passive publisher binds nothing")
	}
	for i, b := range c.Bindings {
		if err := checkQueueName(fmt.Sprintf("Bindings[%d].Queue", i), b.Queue); err != nil {
			return c, err
		}
		for _, destination := range b.Destinations {
			if err := l.checkDestination(destination); err != nil {
				return c, fmt.Errorf("%w: Bindings[%d]: %w", ErrInvalidConfig, i, err)
			}
		}
	}
	return c, nil
}

// A Publisher sends messages into a ladder. It keeps one connection, and makes a
// new one whenever that is lost. It is safe for concurrent use: publishes of many
// goroutines share the connection and do not wait for each other's confirms.
type Publisher struct {
	ladder *Ladder
	config PublisherConfig
	keeper *session.Keeper[*link]

	// slots holds a token for each message in flight. alone is held by the
	// one that takes all of them, to be in flight on its own.
	slots chan struct{}
	alone chan struct{}

	// inMemory takes messages in place of a broker, for package laddertest.
	// There is no keeper then.
	inMemory func(exchange, key string, msg amqp.Publishing) error

	// brokerLimit is the broker's max_message_size in bytes once a message
	// has shown it; 0 before.
	brokerLimit atomic.Int64

	mu     sync.Mutex
	closed bool
	calls  sync.WaitGroup // publishes under way; none is added once closed
}

// NewPublisher connects to the broker and, unless the config says Passive, declares the
// ladder. It tries until ctx ends, but returns at once when the broker
// refuses what will not change by itself (wrong credentials are tried twice,
// which takes RabbitMQ some seconds): [ErrAccessRefused], a
// [*TopologyMismatchError], or [ErrTopologyMissing] for a queue of Bindings that does not
// exist. Other errors wrap [ErrInvalidConfig] or
// [ErrNotConnected], or the broker's refusal, an [*amqp.Error]. Close the publisher after use.
func NewPublisher(ctx context.Context, l *Ladder, config PublisherConfig) (*Publisher, error) {
	config, err := config.withDefaults(l)
	if err != nil {
		return nil, err
	}
	connection, err := config.Connection.session(config.URLs, "ladder publisher "+l.String())
	if err != nil {
		return nil, err
	}
	p := &Publisher{
		ladder: l,
		config: config,
		slots:  make(chan struct{}, config.MaxInFlight),
		alone:  make(chan struct{}, 1),
	}
	p.keeper, err = session.Keep(ctx, connection, config.Logger, sessionEvents(connection.Name, config.Observer), p.setup)
	if err != nil {
		return nil, connectError(err)
	}
	return p, nil
}

// setup makes a session ready for publishing.
func (p *Publisher) setup(ctx context.Context, s *session.Session) (*link, error) {
	if err := p.declare(ctx, s); err != nil {
		return nil, err
	}
	if err := p.bind(ctx, s); err != nil {
		if s.Generation == 1 {
			return nil, err
		}
		// Publishing to all other destinations goes on, and what is due for
		// this one is parked.
		p.config.Logger.Error("ladder: binding failed", "error", err)
	}
	return newLink(s, p.ladder, p.config.MaxInFlight, p.config.ConfirmTimeout)
}

func (p *Publisher) declare(ctx context.Context, s *session.Session) error {
	if p.config.Passive {
		return nil
	}
	return s.Do(ctx, func(ch *amqp.Channel) error { return p.ladder.Declare(ctx, ch) })
}

func (p *Publisher) bind(ctx context.Context, s *session.Session) error {
	var errs []error
	for _, b := range p.config.Bindings {
		errs = append(errs, p.ladder.bindEach(ctx, s, b.Queue, b.Destinations))
	}
	return errors.Join(errs...)
}

// A PublishOption changes one publish. Only this package makes them.
type PublishOption interface{ applyPublish(*publishOptions) }

type publishOptions struct {
	noRepublish bool
	slack       time.Duration
	slackGiven  bool // else it is the ladder's
}

type republishOption bool

func (o republishOption) applyPublish(p *publishOptions) { p.noRepublish = !bool(o) }

// Republish says for one publish whether it is sent again when its connection is
// lost before the confirm, whatever PublisherConfig.NoRepublish says.
func Republish(again bool) PublishOption { return republishOption(again) }

type slackOption time.Duration

func (o slackOption) applyPublish(p *publishOptions) { p.slack, p.slackGiven = time.Duration(o), true }

// WithSlack lets a message wait up to slack longer than it must, if it has fewer
// hops then: see [Ladder.UnitsWithin]. For one publish it takes the place of
// Config.Slack, also if it is 0. A negative slack is refused with
// [ErrInvalidMessage], for all messages of a batch.
//
// The window is fixed at the call: it begins when the message is due, and ends
// slack later. Some of the delay has passed when the message is sent, so a window
// that ends just where a wait with few hops would is too short by that: 60 s with
// a slack of 4 s does not become 64 units of 1 s, with 5 s it does.
func WithSlack(slack time.Duration) PublishOption { return slackOption(slack) }

// PublishDelayed sends msg, to be delivered to a destination once delay has
// passed. It returns nil when the broker has confirmed the message: it is then on disk
// (classic queue) or on a majority of nodes (quorum queue). A delay that is zero or negative
// is none.
//
// nil does not say that anyone has bound the destination: that counts when the
// message is due. If nobody has then, it goes to the parking queue.
//
// The message is due at the instant of the call plus delay. It is delivered not
// before that, by the broker's clock and to the millisecond. If the broker keeps
// up it is less than one unit later, or as late as the slack of Config.Slack or
// [WithSlack] allows. The way there takes what is left of the delay: if it has to
// be sent again after an outage, it is not late by the outage.
//
// A publish that fails for a passing reason (connection lost, connection blocked, nack) is
// repeated with the same MessageId until ctx ends, or after PublisherConfig.Timeout if it has no
// deadline. So a message may be delivered twice, and a consumer tells by the MessageId. The
// error then is a [*PublishError], and [SafeToRetry] tells whether the
// broker can have the message. Errors for which nothing is sent at all are a
// [*DelayTooLongError], and those that wrap [ErrInvalidDestination], [ErrInvalidMessage],
// [ErrMessageTooLarge] and [ErrClosed].
//
// msg is copied and never modified. In the copy, DeliveryMode is persistent, an
// empty MessageId and a zero Timestamp are filled in, int headers become
// int64, the header ladder-not-before is set, and other headers starting with
// "ladder-" and the broker's own (x-death and its like) are dropped.
func (p *Publisher) PublishDelayed(ctx context.Context, destination string, delay time.Duration, msg amqp.Publishing, opts ...PublishOption) error {
	return p.publish(ctx, Message{Destination: destination, Delay: delay, Publishing: msg}, opts)
}

// PublishAt is [Publisher.PublishDelayed] with the instant at which the message
// is due. The zero time is refused with [ErrInvalidMessage]. Another instant that
// has passed is no delay, and the message's lateness
// counts from it all the same. The broker counts down a duration: if its clock
// or this machine's is set meanwhile, the message does not follow.
func (p *Publisher) PublishAt(ctx context.Context, destination string, at time.Time, msg amqp.Publishing, opts ...PublishOption) error {
	if at.IsZero() {
		// In a Message it means that At is not set; this year is refused.
		at = at.AddDate(-1, 0, 0)
	}
	return p.publish(ctx, Message{Destination: destination, At: at, Publishing: msg}, opts)
}

// A Message is one message of [Publisher.PublishBatch].
type Message struct {
	// Destination is what consumers bind their queue to.
	Destination string
	// Delay is the time until the message is due; zero or less is none.
	Delay time.Duration
	// At is the instant at which it is due. If it is set, Delay must be zero.
	At time.Time
	// Publishing is the message itself.
	Publishing amqp.Publishing
}

// PublishBatch sends many messages at once and waits for all their confirms, in
// about the time of one publish. Each message is treated as by
// [Publisher.PublishDelayed], on its own: one that fails does not keep the
// others from being sent. It returns nil when the broker has confirmed all of
// them, and otherwise a [*BatchError] that names those that failed.
func (p *Publisher) PublishBatch(ctx context.Context, messages []Message, opts ...PublishOption) error {
	outs := make([]*outgoing, len(messages))
	for i := range messages {
		outs[i] = p.prepare(ctx, messages[i], opts)
	}
	p.deliver(ctx, outs)
	var failed []FailedMessage
	for i, out := range outs {
		if out.err != nil {
			failed = append(failed, FailedMessage{Index: i, Err: out.err})
		}
	}
	if len(failed) > 0 {
		return &BatchError{Failed: failed}
	}
	return nil
}

func (p *Publisher) publish(ctx context.Context, m Message, opts []PublishOption) error {
	out := p.prepare(ctx, m, opts)
	p.deliver(ctx, []*outgoing{out})
	return out.err
}

// An outgoing is a message on its way, through as many attempts as it takes.
type outgoing struct {
	called      time.Time
	destination string
	notBefore   time.Time
	slack       time.Duration // from notBefore on
	msg         amqp.Publishing
	headerSize  int
	noRepublish bool
	queue       string // where it goes without the ladder, or ""
	resent      bool   // a consumer received it and sends it on

	attempts  int
	units     uint64 // of the last attempt
	maybeSent bool   // an attempt's outcome is unknown
	suspect   bool   // may be why the broker ended a session
	crashes   int    // sessions that ended with an internal error of the broker while it was alone
	last      error

	done bool
	err  error
}

// finish sets the outcome, once.
func (p *Publisher) finish(ctx context.Context, o *outgoing, err error) {
	o.done = true
	if o.maybeSent && err != nil && !errors.Is(err, ErrOutcomeUnknown) {
		err = fmt.Errorf("%w: %w", ErrOutcomeUnknown, err)
	}
	if err != nil {
		o.err = &PublishError{
			Destination: o.destination, MessageID: o.msg.MessageId, Attempts: o.attempts,
			MaybeSent: o.maybeSent, Err: err,
		}
	}
	if p.config.Observer != nil {
		p.config.Observer.Published(ctx, PublishEvent{
			Destination: o.destination, MessageID: o.msg.MessageId,
			Level: bits.Len64(o.units) - 1, Hops: bits.OnesCount64(o.units), Attempts: o.attempts,
			Duration: time.Since(o.called), Kind: KindOf(o.err), Err: o.err,
		})
	}
}

// prepare checks a message before anything is sent; what is wrong with it is
// its outcome.
func (p *Publisher) prepare(ctx context.Context, m Message, opts []PublishOption) *outgoing {
	o := publishOptions{noRepublish: p.config.NoRepublish}
	for _, opt := range opts {
		opt.applyPublish(&o)
	}
	now := time.Now()
	out := &outgoing{called: now, destination: m.Destination, noRepublish: o.noRepublish}
	delay := m.Delay
	switch {
	case o.slack < 0:
		p.finish(ctx, out, fmt.Errorf("%w: WithSlack %v: must not be negative", ErrInvalidMessage, o.slack))
		return out
	case m.At.IsZero():
		out.notBefore = now.Add(max(delay, 0))
	case m.At.Year() < 1:
		p.finish(ctx, out, fmt.Errorf("%w: At is in the year %d", ErrInvalidMessage, m.At.Year()))
		return out
	case delay != 0:
		p.finish(ctx, out, fmt.Errorf("%w: both Delay %v and At %v are set", ErrInvalidMessage, delay, m.At))
		return out
	default:
		out.notBefore = m.At
		delay = m.At.Sub(now)
	}
	if _, err := p.ladder.Units(delay); err != nil {
		p.finish(ctx, out, err)
		return out
	}
	if err := p.ladder.checkDestination(m.Destination); err != nil {
		p.finish(ctx, out, err)
		return out
	}
	out.slack = o.slack
	if !o.slackGiven {
		out.slack = p.ladder.slack(delay)
	}
	p.fill(ctx, out, m.Publishing, amqp.Table{HeaderNotBefore: out.notBefore.UnixMilli()})
	return out
}

// fill gives an outgoing its message.
func (p *Publisher) fill(ctx context.Context, out *outgoing, msg amqp.Publishing, ladderHeaders amqp.Table) {
	msg, err := prepare(msg, ladderHeaders, p.config.MaxMessageBytes)
	if err != nil {
		p.finish(ctx, out, err)
		return
	}
	out.msg = msg
	out.headerSize = headerFrameSize(&msg)
}

// deliver sends messages until each has its outcome.
func (p *Publisher) deliver(ctx context.Context, outs []*outgoing) {
	if !p.enter() {
		for _, out := range outs {
			if !out.done {
				p.finish(ctx, out, ErrClosed)
			}
		}
		return
	}
	defer p.calls.Done()
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, p.config.Timeout)
		defer cancel()
	}
	if p.inMemory != nil {
		p.deliverInMemory(ctx, outs)
		return
	}
	for round := 1; ctx.Err() == nil && p.round(ctx, outs); round++ {
		pause(ctx, round)
	}
	for _, out := range outs {
		if !out.done {
			p.finish(ctx, out, p.outOfTime(ctx, out))
		}
	}
}

// pause waits before another round, up to a second. A lost session has its own pause;
// this one is for a broker that nacks.
func pause(ctx context.Context, round int) {
	limit := time.Second
	if round < 7 {
		limit = 10 * time.Millisecond << round
	}
	select {
	case <-time.After(rand.N(limit)):
	case <-ctx.Done():
	}
}

// round makes one attempt for each message that has no outcome yet: all of them
// in flight together, but each suspect alone. It tells whether some still have
// none.
func (p *Publisher) round(ctx context.Context, outs []*outgoing) (again bool) {
	var started []*attempt
	settleOldest := func() {
		p.settle(ctx, started[0])
		started = started[1:]
	}
	for _, out := range outs {
		if out.done || out.suspect {
			continue
		}
		acquired := p.tryAcquire()
		// Two batches that waited for a slot while holding others would wait
		// for each other.
		for !acquired && len(started) > 0 {
			settleOldest()
			acquired = p.tryAcquire()
		}
		if !acquired && !p.acquire(ctx) {
			return true
		}
		if a := p.start(ctx, out, 1); a != nil {
			started = append(started, a)
		}
	}
	for len(started) > 0 {
		settleOldest()
	}
	for _, out := range outs {
		if !out.done && out.suspect {
			p.sendAlone(ctx, out)
		}
		again = again || !out.done
	}
	return again
}

func (p *Publisher) tryAcquire() bool {
	select {
	case p.slots <- struct{}{}:
		return true
	default:
		return false
	}
}

// acquire waits for a slot; it returns false if ctx ends first.
func (p *Publisher) acquire(ctx context.Context) bool {
	select {
	case p.slots <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

func (p *Publisher) release(slots int) {
	for range slots {
		<-p.slots
	}
}

// sendAlone makes an attempt with nothing else in flight, so that the session's end, if it
// comes to that again, is this message's doing.
func (p *Publisher) sendAlone(ctx context.Context, out *outgoing) {
	select {
	case p.alone <- struct{}{}:
	case <-ctx.Done():
		return
	}
	defer func() { <-p.alone }()
	for held := range cap(p.slots) {
		if !p.acquire(ctx) {
			p.release(held)
			return
		}
	}
	if a := p.start(ctx, out, cap(p.slots)); a != nil {
		p.settle(ctx, a)
	}
}

// outOfTime returns what kept a message from being confirmed before ctx ended.
func (p *Publisher) outOfTime(ctx context.Context, out *outgoing) error {
	reason := out.last
	if reason == nil {
		reason = p.obstacle()
	}
	if reason == nil {
		return fmt.Errorf("ladder: not sent, for lack of time or of room among MaxInFlight (%d): %w", p.config.MaxInFlight, ctx.Err())
	}
	return fmt.Errorf("%w: %w", reason, ctx.Err())
}

// obstacle returns what keeps publishes from being sent just now, or nil.
func (p *Publisher) obstacle() error {
	k, err := p.keeper.Present()
	switch {
	case k == nil && err != nil:
		return fmt.Errorf("%w: %w", ErrNotConnected, err)
	case k == nil:
		return ErrNotConnected
	}
	return k.blocked()
}

// enter counts a publish that is under way; it returns false after Close.
func (p *Publisher) enter() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.calls.Add(1)
	return true
}

// Close refuses further publishes, waits until those under way have their
// outcome or ctx ends, and closes the connection. What is still under way then
// fails with [ErrClosed], or [ErrOutcomeUnknown] where it has been written. Close returns
// ctx's error if it came to that. Closing again does nothing.
//
// With a context that has ended already nothing gets that time: where a signal ends the
// program's context, give Close another one.
func (p *Publisher) Close(ctx context.Context) error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	drained := await(ctx, func() error { p.calls.Wait(); return nil })
	if p.keeper == nil {
		return drained
	}
	closed := p.keeper.Close(ctx)
	if drained != nil {
		return drained // ctx's error, as the other one is then
	}
	return closed
}
