package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// ErrClosed is returned once a Keeper is closed.
var ErrClosed = errors.New("closed")

const (
	backoffBase = 200 * time.Millisecond
	backoffMax  = 5 * time.Second

	// lasting is how long a session is up before its end starts a new count of
	// failures. One that ends sooner has a longer pause after it than the
	// last, but not beyond that of the soon-th failure: the broker is there.
	lasting = 5 * time.Second
	soon    = 4
)

// Events are called from the goroutines that keep and watch the session. They
// must not block. Each may be nil.
type Events struct {
	Up        func(generation uint64)
	Lost      func(generation uint64, err error)
	Blocked   func(generation uint64, reason string)
	Unblocked func(generation uint64)
}

func (e Events) blocking(generation uint64, b amqp.Blocking) {
	switch {
	case b.Active && e.Blocked != nil:
		e.Blocked(generation, b.Reason)
	case !b.Active && e.Unblocked != nil:
		e.Unblocked(generation)
	}
}

// A Keeper keeps one session up: as soon as one ends it dials the next, with
// exponential back-off and full jitter, until Close. T is what its user makes
// of each session.
type Keeper[T any] struct {
	config Config
	setup  func(context.Context, *Session) (T, error)
	logger *slog.Logger
	events Events

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	gone   chan struct{} // closed when run has returned

	mu      sync.Mutex
	session *Session // nil while there is none
	value   T
	// failures counts attempts that failed, and sessions that ended soon after
	// they had come up, since the last that lasted.
	failures int
	lastErr  error         // why there is none
	changed  chan struct{} // closed and replaced when one of these changes
}

// Keep starts a Keeper and waits for its first session. setup makes each
// session whole before anyone gets it; its context ends after SetupTimeout.
//
// Keep returns an error at once if the broker refuses the user (see Refused),
// and otherwise tries until ctx ends.
func Keep[T any](ctx context.Context, config Config, logger *slog.Logger, events Events, setup func(context.Context, *Session) (T, error)) (*Keeper[T], error) {
	k := &Keeper[T]{
		config:  config,
		setup:   setup,
		logger:  logger,
		events:  events,
		gone:    make(chan struct{}),
		changed: make(chan struct{}),
	}
	k.ctx, k.cancel = context.WithCancel(context.WithoutCancel(ctx)) //nolint:gosec // G118: Close calls it
	go k.run()
	for {
		session, failures, changed, lastErr := k.state()
		if session != nil {
			return k, nil
		}
		// Credentials are believed to be wrong only when they were so twice.
		if Refused(lastErr) && (wrongCredentials(lastErr) != 1 || failures > 1) {
			_ = k.Close(ctx)
			return nil, lastErr
		}
		select {
		case <-changed:
		case <-ctx.Done():
			_ = k.Close(ctx)
			return nil, notConnected(ctx, lastErr)
		}
	}
}

func notConnected(ctx context.Context, lastErr error) error {
	if lastErr == nil {
		return ctx.Err()
	}
	return fmt.Errorf("%w: %w", ctx.Err(), lastErr)
}

func (k *Keeper[T]) state() (session *Session, failures int, changed <-chan struct{}, lastErr error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.session, k.failures, k.changed, k.lastErr
}

func (k *Keeper[T]) set(session *Session, value T, failures int, lastErr error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.session, k.value, k.failures, k.lastErr = session, value, failures, lastErr
	close(k.changed)
	k.changed = make(chan struct{})
}

// Current returns what setup made of the present session, and waits for one if
// there is none. It returns ErrClosed after Close, and if ctx ends first an
// error that wraps ctx's and the reason why there is no session.
func (k *Keeper[T]) Current(ctx context.Context) (T, error) {
	var none T
	for {
		k.mu.Lock()
		session, value, lastErr, changed := k.session, k.value, k.lastErr, k.changed
		k.mu.Unlock()
		switch {
		case k.ctx.Err() != nil:
			return none, ErrClosed
		case session != nil && !session.ended():
			return value, nil
		}
		select {
		case <-changed:
		case <-k.ctx.Done():
		case <-ctx.Done():
			return none, notConnected(ctx, lastErr)
		}
	}
}

// Present returns what setup made of the present session, or the zero value and the
// reason why there is none.
func (k *Keeper[T]) Present() (T, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.value, k.lastErr
}

// run is the one goroutine that makes and drops sessions.
func (k *Keeper[T]) run() {
	defer close(k.gone)
	var none T
	failures := 0
	lastURL := ""
	for generation := uint64(1); ; {
		session, value, url, err := k.connect(generation, lastURL)
		lastURL = url
		if err != nil {
			if k.ctx.Err() != nil {
				return
			}
			failures++
			pause := backoff(failures)
			level := slog.LevelWarn
			if Refused(err) {
				level = slog.LevelError
			}
			k.logger.Log(k.ctx, level, "ladder: no session, trying again", "connection", k.config.Name, "error", err, "failures", failures, "pause", pause)
			k.set(nil, none, failures, err)
			if !k.sleep(pause) {
				return
			}
			continue
		}
		up := time.Now()
		k.logger.Info("ladder: session up", "connection", k.config.Name, "generation", generation, "broker", session.Version())
		if k.events.Up != nil {
			k.events.Up(generation)
		}
		k.set(session, value, failures, nil)

		select {
		case <-session.Done():
		case <-k.ctx.Done():
			return // Close ends the session
		}
		failures++
		if time.Since(up) >= lasting {
			failures = 1
		}
		k.set(nil, none, failures, session.Err())
		k.logger.Warn("ladder: session lost", "connection", k.config.Name, "generation", generation, "error", session.Err())
		if k.events.Lost != nil {
			k.events.Lost(generation, session.Err())
		}
		generation++
		if !k.sleep(backoff(min(failures, soon))) {
			return
		}
	}
}

// connect makes a session. Unless no URL answered it returns the one that did.
func (k *Keeper[T]) connect(generation uint64, failed string) (*Session, T, string, error) {
	var none T
	d, err := dial(k.ctx, k.config, failed)
	if err != nil {
		return nil, none, "", err
	}
	ctx, cancel := context.WithTimeout(k.ctx, k.config.SetupTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = d.socket.Close() })
	defer stop()
	session, err := open(d.conn, d.socket, generation, k.events)
	if err != nil {
		return nil, none, d.url, err
	}
	value, err := k.setup(ctx, session)
	if err == nil && !stop() {
		err = ctx.Err() // the socket is closed
	}
	if err != nil {
		session.Drop(err)
		<-session.Done()
		return nil, none, d.url, fmt.Errorf("%s: %w", Redact(d.url), err)
	}
	return session, value, d.url, nil
}

// backoff returns a random pause up to a limit that doubles with each failure:
// clients that lost the same broker do not come back all at once.
func backoff(failures int) time.Duration {
	limit := backoffMax
	if shift := failures - 1; shift < 7 {
		limit = min(limit, backoffBase<<shift)
	}
	return rand.N(limit)
}

func (k *Keeper[T]) sleep(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-k.ctx.Done():
		return false
	}
}

// Close ends the session in good order and keeps no other. It cuts the session off when ctx
// ends, and returns after its goroutines have. Closing again does nothing.
func (k *Keeper[T]) Close(ctx context.Context) error {
	k.cancel()
	<-k.gone
	session, _, _, _ := k.state()
	if session == nil {
		return nil
	}
	return session.Close(ctx)
}
