package ladder

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
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

	// ending is over when what is being sent on must come to an end, shortly after
	// the handlers. end makes it so.
	ending context.Context
	end    context.CancelFunc

	troubles troubles
}

func newWorker(l *Ladder, config ConsumerConfig, handler Handler, publisher *Publisher) *worker {
	w := &worker{
		ladder: l, config: config, publisher: publisher,
		handler: Wrap(handler, Timeout(config.HandlerTimeout), Recover),
		slots:   make(chan struct{}, config.Concurrency), interrupted: make(chan struct{}),
		troubles: troubles{over: make(chan struct{})},
	}
	w.ending, w.end = context.WithCancel(context.Background())
	return w
}

// wait waits until no handler is at work; it returns false if one still is when ctx
// ends.
func (w *worker) wait(ctx context.Context) bool {
	return await(ctx, func() error { w.work.Wait(); return nil }) == nil || len(w.slots) == 0
}

// troubles counts messages that could not be sent on, since the last that could.
type troubles struct {
	mu    sync.Mutex
	count int
	over  chan struct{} // closed when one could
}

func (t *troubles) add() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.count++
}

func (t *troubles) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.count > 0 {
		t.count = 0
		close(t.over)
		t.over = make(chan struct{})
	}
}

func (t *troubles) now() (count int, over <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.count, t.over
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
// to maxHold, but no longer than until one can be. It keeps its slot meanwhile, so while
// nothing can be sent on less is taken. Handlers at work side by side meet the same
// trouble, so one round of them counts once.
func (p *place) hold(ctx context.Context) {
	limit := maxHold
	count, over := p.troubles.now()
	if rounds := max(count-1, 0) / p.config.Concurrency; rounds < 5 {
		limit = time.Second << rounds
	}
	select {
	case <-time.After(limit/2 + rand.N(limit/2)):
	case <-over:
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
		if err := contained(func() error { p.config.Observer.Handled(p.handling, *e); return nil }); err != nil {
			p.config.Logger.Error("ladder: the Observer panicked", "queue", e.Queue, "message", e.MessageID, "error", err)
		}
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
	d.detach()
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
		e.SendErr = w.send(ctx, w.publisher.retry(ctx, d, attempt, headers, v.delay))
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
		w.troubles.add()
	case v.outcome == OutcomeRetried || v.outcome == OutcomeFailed:
		w.troubles.end()
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
	send := func() error { return w.send(ctx, w.publisher.forward(ctx, d, w.config.FailedQueue, headers)) }
	err := send()
	if !errors.Is(err, ErrUnroutable) || redeclare == nil {
		return err
	}
	bounded, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err := redeclare(bounded); err != nil {
		return err
	}
	return send()
}

// send delivers one message, until the end of ctx or of what the shutdown leaves.
func (w *worker) send(ctx context.Context, out *outgoing) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(w.ending, cancel) //nolint:contextcheck // a signal, and no parent
	defer stop()
	w.publisher.deliver(ctx, []*outgoing{out})
	return out.err
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

// detach makes the delivery one that its receiver can do with as it likes: what is changed is not
// changed in what the broker sent, and settling does nothing.
func (d *Delivery) detach() {
	d.Acknowledger = disarmed{}
	d.Body = bytes.Clone(d.Body)
	for key, value := range d.Headers {
		switch value.(type) {
		case []any, amqp.Table, []byte:
			if copied, err := new(copier).field(value, 0); err == nil { // as it is for all that can be sent on
				d.Headers[key] = copied
			}
		}
	}
}

// disarmed keeps handlers from settling messages on their own.
type disarmed struct{}

func (disarmed) Ack(uint64, bool) error        { return ErrSettledByRun }
func (disarmed) Nack(uint64, bool, bool) error { return ErrSettledByRun }
func (disarmed) Reject(uint64, bool) error     { return ErrSettledByRun }
