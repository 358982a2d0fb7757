package ladder

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder/internal/session"
)

// The methods in this file run on a channel that the caller gives. AMQP 0-9-1
// sets two rules for it. A channel that the broker has refused anything is
// closed: after an error, open a new one. And answers on one channel are told
// apart by their order alone, so nothing else may use it meanwhile.
//
// amqp091-go's calls take no context. When ctx ends during one, the method returns
// and the call is left to end with its channel: close the connection.

var errNoChannel = errors.New("ladder: the channel is nil")

// Declare declares the whole ladder on ch. It can be repeated at any time and
// from anywhere: what is there already stays as it is, what is missing is added.
// It needs configure, write and read permission on the ladder's names.
//
// Its errors are a [*TopologyMismatchError] where an object exists with other
// arguments, one that wraps [ErrAccessRefused], the context's, or the
// channel's. After an error the channel is of no more use. If ctx ends during a call to
// the broker, Declare returns and leaves the call to end with its channel: close
// the connection. The same goes for Verify, Bind, Unbind and Remove.
func (l *Ladder) Declare(ctx context.Context, ch *amqp.Channel) error {
	if ch == nil {
		return errNoChannel
	}
	t := l.Topology()
	var steps []step
	declareAll := func(exchanges []Exchange, queues []Queue, bindings []Binding) {
		for _, e := range exchanges {
			steps = append(steps, step{"declare exchange " + e.Name, func() error { return declareExchange(ch, e) }})
		}
		for _, q := range queues {
			steps = append(steps, step{"declare queue " + q.Name, func() error { return declareQueue(ch, q) }})
		}
		steps = append(steps, step{"bind the ladder's exchanges", func() error { return declareBindings(ch, bindings) }})
	}
	// Parking comes first, so that it catches what others publish meanwhile.
	declareAll(t.Exchanges[:1], t.Queues[:1], t.Bindings[:1])
	declareAll(t.Exchanges[1:], t.Queues[1:], t.Bindings[1:])
	return run(ctx, steps)
}

// Verify checks that every exchange and queue of the ladder is there and is
// what [Ladder.Declare] would make, and changes nothing. It returns the first
// difference: an error that wraps [ErrTopologyMissing] and names the object, or a
// [*TopologyMismatchError].
//
// AMQP 0-9-1 limits what it can see. Bindings and policies cannot be read at all. A
// passive declaration tells only that an object exists, so its arguments are
// compared by declaring it again: Verify needs configure permission, and an
// object deleted between the two calls would be made anew.
func (l *Ladder) Verify(ctx context.Context, ch *amqp.Channel) error {
	if ch == nil {
		return errNoChannel
	}
	t := l.Topology()
	var steps []step
	for _, e := range t.Exchanges {
		steps = append(steps, step{"verify exchange " + e.Name, func() error {
			if err := ch.ExchangeDeclarePassive(e.Name, e.Kind, true, false, e.Internal, false, nil); err != nil {
				return err
			}
			return declareExchange(ch, e)
		}})
	}
	for _, q := range t.Queues {
		steps = append(steps, step{"verify queue " + q.Name, func() error {
			if _, err := ch.QueueDeclarePassive(q.Name, true, false, false, false, nil); err != nil {
				return err
			}
			return declareQueue(ch, q)
		}})
	}
	return run(ctx, steps)
}

// Bind binds a queue to destinations, so that it gets what is due for them. Each is
// bound on its own: the errors are joined, and one that is refused here
// ([ErrInvalidDestination]) does not keep the others from being bound. If the
// broker refuses one it closes the channel, and the error names those that
// were not bound for this reason. Binding again changes nothing.
func (l *Ladder) Bind(ctx context.Context, ch *amqp.Channel, queue string, destinations ...string) error {
	if ch == nil {
		return errNoChannel
	}
	return l.eachBinding(ctx, "bind", queue, destinations, func(key string) error {
		return ch.QueueBind(queue, key, l.delivery, false, nil)
	})
}

// bindEach is Bind with a channel for each destination: one that the broker
// refuses, as it can by a topic permission, closes its channel and does not keep
// the others from being bound.
func (l *Ladder) bindEach(ctx context.Context, s *session.Session, queue string, destinations []string) error {
	var errs []error
	for _, destination := range destinations {
		errs = append(errs, s.Do(ctx, func(ch *amqp.Channel) error { return l.Bind(ctx, ch, queue, destination) }))
	}
	return errors.Join(errs...)
}

// Unbind undoes [Ladder.Bind]. What falls due for the destinations afterwards is
// parked unless another queue is bound to them. Unbinding what is not bound
// changes nothing.
func (l *Ladder) Unbind(ctx context.Context, ch *amqp.Channel, queue string, destinations ...string) error {
	if ch == nil {
		return errNoChannel
	}
	return l.eachBinding(ctx, "unbind", queue, destinations, func(key string) error {
		return ch.QueueUnbind(queue, key, l.delivery, nil)
	})
}

func (l *Ladder) eachBinding(ctx context.Context, verb, queue string, destinations []string, call func(key string) error) error {
	var errs []error
	for _, destination := range destinations {
		key, err := l.BindingKey(destination)
		if err == nil {
			err = await(ctx, func() error { return call(key) })
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("ladder: %s queue %s, destination %q: %w", verb, queue, destination, brokerError(err)))
		}
	}
	return errors.Join(errs...)
}

// stillness is how long Remove waits until what was under way between two queues has arrived.
const stillness = 250 * time.Millisecond

// A RemoveOption changes what [Ladder.Remove] does.
type RemoveOption interface{ applyRemove(*removeOptions) }

type removeOptions struct{ force bool }

type forceOption struct{}

func (forceOption) applyRemove(o *removeOptions) { o.force = true }

// Force makes [Ladder.Remove] delete the ladder with the messages that wait in
// it, and whatever the arguments of its objects are. It deletes the exchanges first, so
// that no message moves while its queue is deleted.
func Force() RemoveOption { return forceOption{} }

// Remove deletes the whole ladder: its queues, its exchanges, and with them all
// destination bindings. Without [Force] it refuses with a [*NotEmptyError] while a
// level or the parking queue holds messages, and with a
// [*TopologyMismatchError] if an object is not this ladder's. Stop the
// publishers first. A ladder that is partly there or not at all is no error.
//
// It deletes from the highest level down and looks into each queue again just before. If a
// message has come in meanwhile it stops with a [*NotEmptyError]; what
// is left then parks messages, and Declare makes the ladder whole again.
//
// AMQP 0-9-1 tells the number of messages that are ready in a queue. It does not
// tell of those that have been due and could not move on, since their next queue
// rejects them or their next exchange is gone: a quorum queue keeps such messages
// apart, and Remove deletes them with it. The management API shows
// them, as messages that are neither ready nor unacknowledged.
func (l *Ladder) Remove(ctx context.Context, ch *amqp.Channel, opts ...RemoveOption) error {
	if ch == nil {
		return errNoChannel
	}
	var o removeOptions
	for _, opt := range opts {
		opt.applyRemove(&o)
	}
	t := l.Topology()
	parking, levels := t.Queues[0], t.Queues[1:]
	slices.Reverse(levels)

	if o.force {
		// Without exchanges nothing moves any more. It must not: RabbitMQ 4.3 starts the process that passes messages on
		// from a quorum queue again and again, if it fails since the queue is being deleted, and then gives up passing on
		// messages for all quorum queues of the node (rabbitmq-server#16652).
		if err := deleteExchanges(ctx, ch, t.Exchanges[1:]); err != nil {
			return err
		}
	} else if err := checkEmpty(ctx, ch, t.Queues); err != nil {
		return err
	}
	select {
	case <-time.After(stillness):
	case <-ctx.Done():
		return ctx.Err()
	}
	remove := func(q Queue) error {
		if !o.force {
			if err := checkEmpty(ctx, ch, []Queue{q}); err != nil {
				return err
			}
		}
		return run(ctx, []step{{"delete queue " + q.Name, func() error {
			_, err := ch.QueueDelete(q.Name, false, false, false)
			return err
		}}})
	}
	for _, q := range levels {
		if err := remove(q); err != nil {
			return err
		}
	}
	// The parking queue and the way to it go last, to catch until the end.
	if err := deleteExchanges(ctx, ch, t.Exchanges[1:]); err != nil {
		return err
	}
	if err := remove(parking); err != nil {
		return err
	}
	return deleteExchanges(ctx, ch, t.Exchanges[:1])
}

func deleteExchanges(ctx context.Context, ch *amqp.Channel, exchanges []Exchange) error {
	var steps []step
	for _, e := range exchanges {
		steps = append(steps, step{"delete exchange " + e.Name, func() error { return ch.ExchangeDelete(e.Name, false, false) }})
	}
	return run(ctx, steps)
}

// checkEmpty returns a *NotEmptyError if one of the queues has messages. It
// declares them, since asking for the depth of a missing queue closes the
// channel.
func checkEmpty(ctx context.Context, ch *amqp.Channel, queues []Queue) error {
	messages := map[string]int{}
	var steps []step
	for _, q := range queues {
		steps = append(steps, step{"look into queue " + q.Name, func() error {
			state, err := ch.QueueDeclare(q.Name, true, false, false, false, q.Arguments)
			if state.Messages > 0 {
				messages[q.Name] = state.Messages
			}
			return mismatch(err, "queue", q.Name, q.Arguments)
		}})
	}
	if err := run(ctx, steps); err != nil {
		return err
	}
	if len(messages) > 0 {
		return &NotEmptyError{Messages: messages}
	}
	return nil
}

func declareExchange(ch *amqp.Channel, e Exchange) error {
	err := ch.ExchangeDeclare(e.Name, e.Kind, true, false, e.Internal, false, e.Arguments)
	return mismatch(err, "exchange", e.Name, e.Arguments)
}

func declareQueue(ch *amqp.Channel, q Queue) error {
	_, err := ch.QueueDeclare(q.Name, true, false, false, false, q.Arguments)
	return mismatch(err, "queue", q.Name, q.Arguments)
}

// declareBindings waits for the broker's answer to the last binding alone, as
// it does them in order: a ladder has hundreds, and the broker may be far away.
func declareBindings(ch *amqp.Channel, bindings []Binding) error {
	closed := ch.NotifyClose(make(chan *amqp.Error, 1))
	for i, b := range bindings {
		noWait := i < len(bindings)-1
		var err error
		if b.Target == ToExchange {
			err = ch.ExchangeBind(b.Destination, b.Key, b.Source, noWait, nil)
		} else {
			err = ch.QueueBind(b.Destination, b.Key, b.Source, noWait, nil)
		}
		if errors.Is(err, amqp.ErrClosed) {
			// The refusal of an earlier one has come in between.
			if reason := <-closed; reason != nil {
				return reason
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// A step is a call to the broker with what it does, for its error.
type step struct {
	name string
	call func() error
}

// run makes the calls one after another, up to the first error or the end of
// ctx.
func run(ctx context.Context, steps []step) error {
	return await(ctx, func() error {
		for _, s := range steps {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("ladder: %s: %w", s.name, err)
			}
			if err := s.call(); err != nil {
				return fmt.Errorf("ladder: %s: %w", s.name, brokerError(err))
			}
		}
		return nil
	})
}

// await runs f, and returns before it is done if ctx ends: amqp091-go's calls
// do not know about contexts.
func await(ctx context.Context, f func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// brokerError adds the sentinel for what the broker refused.
func brokerError(err error) error {
	var refused *amqp.Error
	if !errors.As(err, &refused) || !refused.Server {
		return err
	}
	switch refused.Code {
	case amqp.NotFound:
		if session.NodeDown(refused) {
			return err
		}
		return fmt.Errorf("%w: %w", ErrTopologyMissing, err)
	case amqp.AccessRefused:
		return fmt.Errorf("%w: %w", ErrAccessRefused, err)
	}
	return err
}

var (
	// RabbitMQ's text for a declaration that differs from what exists. It
	// ends after 255 bytes, so that with long names its tail is missing.
	inequivalent = regexp.MustCompile(`inequivalent arg '([^']+)'(?:.*: received (.+) but current is (.+))?`)
	// The usual form of a value in it.
	typedValue = regexp.MustCompile(`^(?:the value )?'(.*?)'(?: of type '\w+')?$`)
)

// mismatch turns RabbitMQ's refusal of a declaration, 406 with a text of its
// own, into a *TopologyMismatchError, and leaves other errors as they are.
func mismatch(err error, kind, name string, arguments map[string]any) error {
	var refused *amqp.Error
	if !errors.As(err, &refused) || refused.Code != amqp.PreconditionFailed {
		return err
	}
	found := inequivalent.FindStringSubmatch(refused.Reason)
	if found == nil {
		return err
	}
	e := &TopologyMismatchError{Kind: kind, Object: name, Argument: found[1], Want: plainValue(found[2]), Got: plainValue(found[3]), err: err}
	if want, ok := arguments[e.Argument]; ok {
		e.Want = fmt.Sprint(want)
	}
	return e
}

func plainValue(s string) string {
	found := typedValue.FindStringSubmatch(s)
	switch {
	case found == nil:
		return s
	case found[1] == "":
		return `""`
	}
	return found[1]
}

// A TopologyMismatchError says that an object of the ladder exists on the broker with
// another argument than the ladder's: another ladder has the same name, or it
// was declared by hand. Give the ladder another name, or move its messages and
// remove the object.
type TopologyMismatchError struct {
	// Kind is "exchange" or "queue".
	Kind string
	// Object is the name of the exchange or queue.
	Object string
	// Argument is what differs, such as x-message-ttl, type or durable.
	Argument string
	// Want is the ladder's value.
	Want string
	// Got is the value on the broker as its error message has it. It is
	// two quotation marks for an empty value, "none" where the argument is not set, and empty where the message,
	// which RabbitMQ cuts at 255 bytes, does not tell.
	Got string

	err error
}

// Error names the object, the argument and both values.
func (e *TopologyMismatchError) Error() string {
	got := e.Got
	if got == "" {
		got = "another value"
	}
	return fmt.Sprintf("%s %s has %s %s on the broker, not %s", e.Kind, e.Object, e.Argument, got, e.Want)
}

// Unwrap returns the broker's refusal, an [*amqp.Error].
func (e *TopologyMismatchError) Unwrap() error { return e.err }

// A NotEmptyError says that [Ladder.Remove] found messages waiting and removed
// nothing more.
type NotEmptyError struct {
	// Messages has the number of ready messages for each queue that has any.
	Messages map[string]int
}

// Error names the queues and their messages.
func (e *NotEmptyError) Error() string {
	var waiting []string
	for _, name := range slices.Sorted(maps.Keys(e.Messages)) {
		waiting = append(waiting, fmt.Sprintf("%d in %s", e.Messages[name], name))
	}
	return "ladder: not removed, messages wait: " + strings.Join(waiting, ", ")
}
