package ladder

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder/internal/session"
)

// A link is what a publisher makes of a session: a channel in confirm mode, on
// which one goroutine writes.
type link struct {
	session *session.Session
	ladder  *Ladder
	queue   chan *attempt
	returns returns
	// unsettled counts messages that were written and have no answer from the
	// broker. At the session's end it is the number whose outcome is unknown.
	unsettled atomic.Int64
	healing   atomic.Bool
}

// An attempt is one try to get a message confirmed in one session.
type attempt struct {
	*outgoing
	link  *link
	slots int
	// taken is set by the writer, or by the caller that gives up before:
	// whoever comes first.
	taken   atomic.Bool
	written chan struct{}

	// These are set before written is closed.
	route   Route
	confirm *amqp.DeferredConfirmation
	failure error // of the write
}

func newLink(s *session.Session, l *Ladder, maxInFlight int, confirmTimeout time.Duration) (*link, error) {
	if err := s.Channel.Confirm(false); err != nil {
		return nil, fmt.Errorf("ladder: confirm mode: %w", err)
	}
	k := &link{session: s, ladder: l, queue: make(chan *attempt, maxInFlight)}
	// There is room for all that can be in flight, so that amqp091-go never
	// waits with a return and has always put it here before it resolves the
	// message's confirm.
	k.returns.pending = s.Channel.NotifyReturn(make(chan amqp.Return, maxInFlight))
	go k.write(confirmTimeout)
	return k, nil
}

// write takes one attempt after another, as amqp091-go's publish may wait for
// the socket as long as WriteTimeout whatever a caller's context says. It also
// ends a session whose broker has stopped to answer, as a node does
// that was cut off from the majority: it takes messages and heartbeats, and confirms
// nothing.
func (k *link) write(confirmTimeout time.Duration) {
	ticker := time.NewTicker(confirmTimeout / silentTicks)
	defer ticker.Stop()
	silent := 0
	var open []*amqp.DeferredConfirmation
	for {
		select {
		case a := <-k.queue:
			if !k.waitUnblocked() {
				return
			}
			k.publish(a)
			if a.confirm != nil {
				open = append(open, a.confirm)
			}
		case <-ticker.C:
			written := len(open)
			open = slices.DeleteFunc(open, isResolved)
			if len(open) < written || len(open) == 0 || k.blocked() != nil {
				silent = 0
				continue
			}
			// One more, since a message can have been written just before the
			// first.
			silent++
			if silent > silentTicks {
				k.session.Drop(fmt.Errorf("the broker has confirmed nothing for %v", confirmTimeout))
			}
		case <-k.session.Done():
			return
		}
	}
}

const silentTicks = 4

func isResolved(confirm *amqp.DeferredConfirmation) bool {
	select {
	case <-confirm.Done():
		return true
	default:
		return false
	}
}

func (k *link) waitUnblocked() bool {
	for {
		until, _ := k.session.Blocked()
		if until == nil {
			return true
		}
		select {
		case <-until:
		case <-k.session.Done():
			return false
		}
	}
}

// publish encodes what is left of the delay and writes the message.
func (k *link) publish(a *attempt) {
	if !a.taken.CompareAndSwap(false, true) {
		return
	}
	defer close(a.written)
	a.route, a.failure = k.ladder.routeOf(a.outgoing)
	if a.failure != nil {
		return
	}
	k.unsettled.Add(1)
	a.confirm, a.failure = k.session.Channel.PublishWithDeferredConfirm(a.route.Exchange, a.route.Key, true, false, a.msg)
	if a.failure != nil && !errors.Is(a.failure, amqp.ErrClosed) {
		k.session.Drop(a.failure) // part of the message may be on the wire
	}
}

// routeOf encodes what is left of a message's delay.
func (l *Ladder) routeOf(out *outgoing) (Route, error) {
	if out.queue != "" {
		return Route{Key: out.queue}, nil // the default exchange
	}
	units, err := l.UnitsWithin(time.Until(out.notBefore), out.slack)
	if err != nil {
		return Route{}, err
	}
	return l.route(units, out.destination), nil
}

// blocked returns an error that wraps ErrBlocked while the broker blocks the
// connection.
func (k *link) blocked() error {
	if until, reason := k.session.Blocked(); until != nil {
		return fmt.Errorf("%w: %s", ErrBlocked, reason)
	}
	return nil
}

// check refuses what this session's broker would punish with the end of the channel
// or the connection, or would not deliver in time.
func (k *link) check(out *outgoing) error {
	if out.resent {
		k.adapt(&out.msg)
	}
	if out.msg.Priority > 0 && k.ladder.config.QueueType == Quorum && delaysByPriority(k.session.Version()) {
		return fmt.Errorf("%w: Priority %d: quorum queues of RabbitMQ %s hold messages back by priority; 4.3 does not; or use a header of your own",
			ErrInvalidMessage, out.msg.Priority, k.session.Version())
	}
	if user := k.session.User; user != "" && out.msg.UserId != "" && out.msg.UserId != user {
		return fmt.Errorf("%w: UserId %q: the broker accepts only the connection's user, %q", ErrInvalidMessage, out.msg.UserId, user)
	}
	size := out.headerSize
	if out.queue == "" {
		size += k.ladder.deathSize()
	}
	if limit := k.session.FrameSize(); limit > 0 && size > limit {
		return fmt.Errorf("%w: its headers have %d bytes; with what the broker adds on the way they do not fit into a frame of %d",
			ErrInvalidMessage, out.headerSize, limit)
	}
	return nil
}

// adapt takes from a message that was received what this connection cannot send:
// better without it than not at all.
func (k *link) adapt(msg *amqp.Publishing) {
	if k.ladder.config.QueueType == Quorum && delaysByPriority(k.session.Version()) {
		msg.Priority = 0
	}
	if msg.UserId != k.session.User {
		msg.UserId = ""
	}
}

// delaysByPriority tells whether quorum queues of a RabbitMQ version look for
// expired messages in one of their two priority queues alone.
func delaysByPriority(version string) bool {
	return strings.HasPrefix(version, "4.0.") || strings.HasPrefix(version, "4.1.") || strings.HasPrefix(version, "4.2.")
}

// deathSize returns an upper bound in bytes of the x-death header and its like
// after all hops: an entry for each level with its queue, exchange and routing
// key.
func (l *Ladder) deathSize() int {
	const (
		entry = 200 // field names, reason, count, time
		other = 2048
	)
	return l.config.Levels*(entry+2*len(l.levels[0])+maxShortString) + other
}

// checkSize refuses what the broker has shown not to take.
func (p *Publisher) checkSize(out *outgoing) error {
	if limit := p.brokerLimit.Load(); limit > 0 && int64(len(out.msg.Body)) > limit {
		return fmt.Errorf("%w: the body has %d bytes, the broker's max_message_size is %d", ErrMessageTooLarge, len(out.msg.Body), limit)
	}
	return nil
}

// start hands a message to the session's writer. The slots are given back
// when the attempt is settled. It returns nil if there is nothing to settle.
func (p *Publisher) start(ctx context.Context, out *outgoing, slots int) *attempt {
	k, err := p.keeper.Current(ctx)
	if err != nil {
		p.release(slots)
		if errors.Is(err, session.ErrClosed) {
			p.finish(ctx, out, ErrClosed)
		}
		return nil
	}
	if err := cmp.Or(p.checkSize(out), k.check(out)); err != nil {
		p.release(slots)
		p.finish(ctx, out, err)
		return nil
	}
	if ctx.Err() != nil { // select would take its chance
		p.release(slots)
		return nil
	}
	a := &attempt{outgoing: out, link: k, slots: slots, written: make(chan struct{})}
	select {
	case k.queue <- a:
		out.attempts++
		return a
	case <-k.session.Done():
	case <-ctx.Done():
	}
	p.release(slots)
	return nil
}

// settle waits for the outcome of an attempt. It either finishes the message or
// leaves it for another attempt.
func (p *Publisher) settle(ctx context.Context, a *attempt) {
	select {
	case <-a.written:
	case <-a.link.session.Done():
		if a.taken.CompareAndSwap(false, true) {
			p.release(a.slots)
			return
		}
		<-a.written // the socket is closed, so this takes no time
	case <-ctx.Done():
		if a.taken.CompareAndSwap(false, true) {
			p.release(a.slots)
			return
		}
		select {
		case <-a.written: // both: what is known counts
		default:
			p.abandon(ctx, a)
			return
		}
	}
	a.units = a.route.Units
	if a.failure != nil {
		p.release(a.slots)
		p.unwritten(ctx, a)
		return
	}
	select {
	case <-a.confirm.Done():
	case <-ctx.Done():
		select {
		case <-a.confirm.Done(): // both: what is known counts
		default:
			p.abandon(ctx, a)
			return
		}
	}
	returned := a.link.returns.take(a)
	p.release(a.slots)
	switch {
	case a.confirm.Acked():
		a.link.unsettled.Add(-1)
		if returned {
			if a.queue != "" {
				p.finish(ctx, a.outgoing, fmt.Errorf("%w: queue %s does not exist", ErrUnroutable, a.queue))
				return
			}
			p.heal(ctx, a.link)
			p.finish(ctx, a.outgoing, fmt.Errorf("%w: exchange %s, routing key %s", ErrUnroutable, a.route.Exchange, a.route.Key))
			return
		}
		p.finish(ctx, a.outgoing, nil)
	case a.link.session.Channel.IsClosed():
		// Not a nack: amqp091-go resolves all open confirms like this when a
		// channel ends, and marks it closed before.
		p.lost(ctx, a)
	default:
		a.link.unsettled.Add(-1)
		p.nacked(ctx, a)
	}
}

// nacked handles a basic.nack. The one level queue that a message goes to has
// rejected it then; but of several destination queues, for no delay, another may
// have taken it, and so may a classic queue that failed.
func (p *Publisher) nacked(ctx context.Context, a *attempt) {
	a.last = ErrNacked
	if a.route.Units > 0 && p.ladder.config.QueueType == Quorum {
		return
	}
	a.maybeSent = true
	if a.noRepublish {
		p.finish(ctx, a.outgoing, a.last)
	}
}

// unwritten handles an attempt that amqp091-go refused or could not write.
func (p *Publisher) unwritten(ctx context.Context, a *attempt) {
	switch {
	case a.confirm == nil && a.route.Key == "":
		p.finish(ctx, a.outgoing, a.failure)
	case errors.Is(a.failure, amqp.ErrClosed):
		// The channel was closed before the last frame, so the broker cannot
		// have the message. It stays among the unsettled, for it may be the
		// one over which the channel was closed.
		select {
		case <-a.link.session.Done():
			a.suspect = a.suspect || refusedPublish(a.link.session.Err())
		case <-ctx.Done():
		}
	default:
		p.lost(ctx, a)
	}
}

// lost handles an attempt whose session ended before the broker's answer.
func (p *Publisher) lost(ctx context.Context, a *attempt) {
	reason := a.link.session.Err()
	limit, overLimit := sizeLimit(reason)
	switch {
	case overLimit:
		p.brokerLimit.Store(limit)
		if int64(len(a.msg.Body)) > limit {
			p.finish(ctx, a.outgoing, fmt.Errorf("%w: %w", ErrMessageTooLarge, reason))
			return
		}
	case !refusedPublish(reason):
	case a.link.unsettled.Load() == 1:
		p.refused(ctx, a, reason)
		return
	case mayConcern(reason, a.route.Exchange):
		a.suspect = true
	}
	a.maybeSent = true
	a.last = fmt.Errorf("%w: session lost: %w", ErrOutcomeUnknown, reason)
	if a.noRepublish {
		p.finish(ctx, a.outgoing, a.last)
	}
}

// tooLarge is RabbitMQ's reason for closing a channel over the size of a body.
var tooLarge = regexp.MustCompile(`^PRECONDITION_FAILED - message size \d+ is larger than (?:configured )?max size (\d+)`)

// sizeLimit returns the broker's max_message_size if it ended the session over
// it. Of the messages in flight those that are larger did it, and no other.
func sizeLimit(reason error) (int64, bool) {
	var e *amqp.Error
	if !errors.As(reason, &e) || !e.Server {
		return 0, false
	}
	found := tooLarge.FindStringSubmatch(e.Reason)
	if found == nil {
		return 0, false
	}
	limit, err := strconv.ParseInt(found[1], 10, 64)
	return limit, err == nil
}

// refusedPublish tells whether the broker ended the session over something that
// was published, rather than for its own reasons or those of the network.
func refusedPublish(reason error) bool {
	var e *amqp.Error
	if !errors.As(reason, &e) || !e.Server {
		return false
	}
	switch e.Code {
	case amqp.AccessRefused, amqp.NotFound, amqp.PreconditionFailed, amqp.ContentTooLarge,
		amqp.FrameError, amqp.SyntaxError, amqp.UnexpectedFrame, amqp.NotImplemented, amqp.InternalError:
		return true
	}
	return false
}

// mayConcern tells whether a refusal can be over a message to this exchange. One
// for a missing exchange or permission names it, unless RabbitMQ has cut the
// text, at 255 bytes.
func mayConcern(reason error, exchange string) bool {
	var e *amqp.Error
	if !errors.As(reason, &e) {
		return false
	}
	if exchange == "" {
		exchange = "amq.default" // as RabbitMQ calls it
	}
	named := e.Code == amqp.NotFound || e.Code == amqp.AccessRefused
	return !named || len(e.Reason) >= maxShortString || strings.Contains(e.Reason, "'"+exchange+"'")
}

// refused handles a message over which the broker closed the channel: no other
// was in flight.
func (p *Publisher) refused(ctx context.Context, a *attempt, reason error) {
	err := brokerError(reason)
	var e *amqp.Error
	errors.As(reason, &e)
	switch {
	case e.Code == amqp.NotFound && !p.config.Passive:
		a.last = err // the next session has declared the ladder again
		return
	case e.Code == amqp.NotFound, e.Code == amqp.AccessRefused:
	case e.Code == amqp.InternalError:
		// The broker may have crashed over it after it had taken it, or over
		// something of its own: it gets another try.
		a.maybeSent = true
		a.crashes++
		if a.crashes == 1 && !a.noRepublish {
			a.last = err
			return
		}
		err = fmt.Errorf("%w: %w", ErrInvalidMessage, reason)
	default:
		err = fmt.Errorf("%w: %w", ErrInvalidMessage, reason)
	}
	p.finish(ctx, a.outgoing, err)
}

// abandon leaves an attempt that may be on the wire. Its slots are given back only
// when the broker has answered: until then a return may come for it.
func (p *Publisher) abandon(ctx context.Context, a *attempt) {
	a.maybeSent = true
	err := fmt.Errorf("%w: %w", ErrOutcomeUnknown, ctx.Err())
	if blocked := a.link.blocked(); blocked != nil {
		err = fmt.Errorf("%w: %w", err, blocked)
	}
	p.finish(ctx, a.outgoing, err)
	go func() {
		<-a.written
		if a.failure == nil {
			<-a.confirm.Done()
			a.link.returns.take(a)
			if !a.link.session.Channel.IsClosed() {
				a.link.unsettled.Add(-1)
			}
		}
		p.release(a.slots)
	}()
}

// heal declares the ladder again after a message was returned, for the next one.
func (p *Publisher) heal(ctx context.Context, k *link) {
	if p.config.Passive || !k.healing.CompareAndSwap(false, true) {
		return
	}
	go func() {
		defer k.healing.Store(false)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), healTimeout)
		defer cancel()
		if err := errors.Join(p.declare(ctx, k.session), p.bind(ctx, k.session)); err != nil {
			p.config.Logger.Error("ladder: declaring again after a returned message failed", "error", err)
			return
		}
		p.config.Logger.Warn("ladder: declared again after a returned message")
	}()
}

const healTimeout = time.Minute

// returns holds messages that the broker has returned until the attempts that
// they belong to ask for them.
type returns struct {
	pending <-chan amqp.Return
	mu      sync.Mutex
	found   map[returnKey]int
	size    atomic.Int64 // of found
}

// returnKey identifies a message in flight. Two with the same key are the same
// message on the same way, so it does not matter which of them is told.
type returnKey struct{ id, exchange, key string }

// take tells whether the broker returned the message of an attempt. Call it
// once the attempt's confirm is resolved: the return comes before that.
func (r *returns) take(a *attempt) bool {
	if len(r.pending) == 0 && r.size.Load() == 0 {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.collect()
	key := returnKey{a.msg.MessageId, a.route.Exchange, a.route.Key}
	if r.found[key] == 0 {
		return false
	}
	r.found[key]--
	if r.found[key] == 0 {
		delete(r.found, key)
	}
	r.size.Add(-1)
	return true
}

func (r *returns) collect() {
	for {
		select {
		case ret, open := <-r.pending:
			if !open {
				return
			}
			if r.found == nil {
				r.found = map[returnKey]int{}
			}
			r.found[returnKey{ret.MessageId, ret.Exchange, ret.RoutingKey}]++
			r.size.Add(1)
		default:
			return
		}
	}
}
