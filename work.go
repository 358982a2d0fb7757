package ladder

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder/internal/session"
)

var errHandlerExited = errors.New("ladder: the handler ended its goroutine (runtime.Goexit)")

// A worker handles messages, and sends on those that have to come again. It knows
// no session, and package laddertest has it work without a broker.
type worker struct {
	ladder    *Ladder
	config    ConsumerConfig
	handler   Handler
	publisher *Publisher

	// slots holds a token for each handler at work, those of lost sessions
	// included.
	slots chan struct{}
	work  sync.WaitGroup

	// interrupted is closed when handlers must come to an end.
	interrupted chan struct{}

	// troubles counts messages that could not be sent on, since the last that
	// could.
	troubles atomic.Int32
}

func newWorker(l *Ladder, config ConsumerConfig, handler Handler, publisher *Publisher) *worker {
	return &worker{
		ladder: l, config: config, publisher: publisher,
		handler: Wrap(handler, Timeout(config.HandlerTimeout), Recover),
		slots:   make(chan struct{}, config.Concurrency), interrupted: make(chan struct{}),
	}
}

// wait waits until no handler is at work; it returns false if ctx ends first.
func (w *worker) wait(ctx context.Context) bool {
	return await(ctx, func() error { w.work.Wait(); return nil }) == nil
}

// A place is where a worker works: a session.
type place struct {
	*worker
	session *session.Session
	// alive ends with the session. handling, the handlers' context, ends with
	// it or when they are interrupted.
	alive, handling context.Context
	// redeclare declares the failed queue. It is nil where others do.
	redeclare func(context.Context) error
}

func (w *worker) in(ctx context.Context, s *session.Session, redeclare func(context.Context) error) *place {
	p := &place{worker: w, session: s, redeclare: redeclare}
	alive, lost := context.WithCancelCause(context.WithoutCancel(ctx))
	handling, interrupt := context.WithCancelCause(alive)
	p.alive, p.handling = alive, handling
	go func() {
		select {
		case <-s.Done():
		case <-w.interrupted:
			interrupt(ErrShutdownTimeout)
			<-s.Done()
		}
		lost(ErrSessionLost)
	}()
	return p
}

// start handles a message in a goroutine. The caller has a slot for it.
func (p *place) start(ctx context.Context, raw amqp.Delivery) {
	p.work.Go(func() {
		defer func() { <-p.slots }()
		//nolint:contextcheck // ctx is Run's; handlers go on after its end
		p.process(p.alive, p.handling, raw, p.redeclare, func(e *HandleEvent) {
			if e.SendErr != nil && e.Outcome == OutcomeReturned {
				p.hold(ctx)
			}
			p.settle(raw, e)
		})
	})
}

// hold waits before a message goes back that could not be sent on, longer each time up
// to maxHold. It keeps its slot meanwhile, so while nothing can be sent on
// less is taken.
func (p *place) hold(ctx context.Context) {
	limit := maxHold
	if troubles := max(p.troubles.Load(), 1); troubles < 6 {
		limit = time.Second << (troubles - 1)
	}
	select {
	case <-time.After(limit/2 + rand.N(limit/2)):
	case <-p.handling.Done():
	case <-ctx.Done():
	}
}

const maxHold = 30 * time.Second

// settle acknowledges a message or gives it back.
func (p *place) settle(raw amqp.Delivery, e *HandleEvent) {
	var err error
	if e.Outcome == OutcomeReturned || e.Outcome == OutcomeLost {
		err = raw.Nack(false, true)
	} else {
		err = raw.Ack(false)
	}
	if err != nil {
		e.Outcome, e.SettleErr = OutcomeLost, settleError(p.config, p.session, raw, err)
	}
	if p.config.Observer != nil {
		p.config.Observer.Handled(p.handling, *e)
	}
}

// giveBack puts a message back that no handler has begun with.
func giveBack(config ConsumerConfig, s *session.Session, raw amqp.Delivery) {
	if err := raw.Nack(false, true); err != nil {
		_ = settleError(config, s, raw, err)
	}
}

// settleError logs an acknowledgement that failed. Its channel has then ended, so the
// broker delivers the message again.
func settleError(config ConsumerConfig, s *session.Session, raw amqp.Delivery, err error) error {
	config.Logger.Warn("ladder: settling failed, message comes again",
		"queue", config.Queue, "message", raw.MessageId, "generation", s.Generation, "error", err)
	return fmt.Errorf("%w: %w", ErrSessionLost, err)
}

// process runs the handler on a message, sends the message on if need be, and reports
// what is left to do: to acknowledge it, or to give it back if it was neither handled nor sent
// on. What is sent on has until the end of alive, and the handler until the end
// of handling.
func (w *worker) process(alive, handling context.Context, raw amqp.Delivery, redeclare func(context.Context) error, done func(*HandleEvent)) {
	d := w.parse(raw)
	d.Acknowledger = disarmed{}
	// A handler may change them, and have the message come again.
	d.Body = bytes.Clone(raw.Body)
	for key, value := range d.Headers {
		switch value.(type) {
		case []any, amqp.Table, []byte:
			if copied, err := new(copier).field(value, 0); err == nil { // as it is for all that can be sent on
				d.Headers[key] = copied
			}
		}
	}
	e := &HandleEvent{
		Queue: d.Queue, Destination: d.Destination, MessageID: d.MessageId, Attempt: d.Attempt,
		Lateness: d.Lateness, Err: errHandlerExited,
	}
	start := time.Now()
	// Deferred, because a handler can end the goroutine: a test's FailNow does.
	defer func() {
		e.Duration = time.Since(start)
		if alive.Err() != nil && e.Err != nil {
			e.Outcome = OutcomeLost
		} else {
			w.decide(alive, handling.Err() != nil, raw, e, redeclare)
		}
		done(e)
	}()
	e.Err = w.handler(handling, d)
}

func (w *worker) parse(raw amqp.Delivery) *Delivery {
	d := w.ladder.ParseDelivery(raw)
	d.Queue = w.config.Queue
	return d
}

// decide finds out what becomes of a message, and sends it on.
func (w *worker) decide(ctx context.Context, interrupted bool, raw amqp.Delivery, e *HandleEvent, redeclare func(context.Context) error) {
	v := w.ladder.judge(w.config.Retry, e.Attempt, e.Err, interrupted)
	if v.outcome == OutcomeHandled {
		e.Outcome = v.outcome
		return
	}
	d := w.parse(raw) // anew: the handler may have changed its own
	now := time.Now()
	if v.outcome == OutcomeRetried {
		headers, attempt := keptHeaders(d), d.Attempt
		if v.counted {
			headers, attempt = failureHeaders(d, v.reason, now), d.Attempt+1
		}
		e.SendErr = w.publisher.send(ctx, w.publisher.retry(ctx, d, attempt, headers, v.delay))
		if KindOf(e.SendErr) == KindInvalid {
			v.outcome = OutcomeFailed
			v.reason = fmt.Sprintf("no further attempt, as the message cannot be sent through the ladder: %v; the handler's error: %v", e.SendErr, e.Err)
		}
	}
	if v.outcome == OutcomeFailed {
		e.SendErr = w.fail(ctx, d, failureHeaders(d, v.reason, now), redeclare)
	}
	switch {
	case e.SendErr != nil && ctx.Err() != nil:
		v.outcome = OutcomeLost
	case e.SendErr != nil:
		v.outcome = OutcomeReturned
		w.troubles.Add(1)
	case v.outcome == OutcomeRetried || v.outcome == OutcomeFailed:
		w.troubles.Store(0)
	}
	e.Outcome = v.outcome
	if v.outcome == OutcomeRetried {
		e.RetryDelay = v.delay
	}
	w.log(d, e, v)
}

// fail sends a message to the failed queue.
func (w *worker) fail(ctx context.Context, d *Delivery, headers amqp.Table, redeclare func(context.Context) error) error {
	headers[HeaderAttempt] = int64(d.Attempt)
	if notBefore, ok := d.Headers[HeaderNotBefore]; ok {
		headers[HeaderNotBefore] = notBefore
	}
	err := w.forward(ctx, d, headers, redeclare)
	if KindOf(err) == KindInvalid {
		// Its own headers leave no room for the ladder's: better there without them than
		// come again for ever. The log has the reason.
		err = w.forward(ctx, d, nil, redeclare)
	}
	return err
}

// forward sends a message to the failed queue, and declares that if it is missing.
func (w *worker) forward(ctx context.Context, d *Delivery, headers amqp.Table, redeclare func(context.Context) error) error {
	send := func() error { return w.publisher.send(ctx, w.publisher.forward(ctx, d, w.config.FailedQueue, headers)) }
	err := send()
	if !errors.Is(err, ErrUnroutable) || redeclare == nil {
		return err
	}
	if err := redeclare(ctx); err != nil {
		return err
	}
	return send()
}

// log tells what became of a message that was not handled.
func (w *worker) log(d *Delivery, e *HandleEvent, v verdict) {
	attributes := []any{
		"queue", d.Queue, "destination", d.Destination, "message", d.MessageId, "attempt", d.Attempt, "error", e.Err,
	}
	if _, _, panicked := inspect(e.Err); panicked != nil {
		attributes = append(attributes, "stack", string(panicked.Stack))
	}
	if v.note != "" {
		attributes = append(attributes, "note", v.note)
	}
	logger := w.config.Logger
	switch {
	case v.outcome == OutcomeLost:
		logger.Warn("ladder: handler failed, and its session was lost: its message comes again", append(attributes, "send_error", e.SendErr)...)
	case e.SendErr != nil:
		logger.Error("ladder: handler failed, and its message could not be sent on: it goes back into its queue", append(attributes, "send_error", e.SendErr)...)
	case v.outcome == OutcomeFailed:
		logger.Error("ladder: message failed", append(attributes, "failed_queue", w.config.FailedQueue)...)
	case v.outcome == OutcomeReturned:
		logger.Warn("ladder: handler was interrupted, its message goes back into its queue", attributes...)
	case v.outcome == OutcomeRetried && (v.counted || v.note != ""):
		logger.Warn("ladder: handler failed, its message comes again", append(attributes, "delay", v.delay)...)
	case v.outcome == OutcomeRetried:
		logger.Debug("ladder: message comes again as its handler asked", append(attributes, "delay", v.delay)...)
	}
}

// disarmed keeps handlers from settling messages on their own.
type disarmed struct{}

func (disarmed) Ack(uint64, bool) error        { return ErrSettledByRun }
func (disarmed) Nack(uint64, bool, bool) error { return ErrSettledByRun }
func (disarmed) Reject(uint64, bool) error     { return ErrSettledByRun }
