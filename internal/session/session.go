// Package session keeps a connection to a broker: it dials one of several URLs,
// makes a session whole (connection, channel, topology), notices its end, drops it whole and
// dials again. Nothing of a session is ever repaired or carried over to the next one, so a
// delivery tag or a confirm can never be taken for one of another session.
//
// It knows AMQP and nothing of ladders.
package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// A Session is one connection with one channel of it that is in constant use.
// It ends as a whole when either of them does.
type Session struct {
	// Generation counts the sessions of a Keeper, from 1.
	Generation uint64
	// Channel is the session's own channel. Topology calls go through Do.
	Channel *amqp.Channel
	// User is the user that logged in, or "" if the mechanism does not tell.
	User string

	conn   *amqp.Connection
	socket net.Conn

	done chan struct{}
	err  error // set before done is closed

	blockedMu sync.Mutex
	blocked   chan struct{} // nil unless blocked, closed when unblocked
	alarm     string

	dropOnce sync.Once
	reason   error // why it was dropped here
}

// open opens the session's channel on a connection just made, and watches both.
func open(conn *amqp.Connection, socket net.Conn, generation uint64, events Events) (*Session, error) {
	s := &Session{Generation: generation, User: user(conn), conn: conn, socket: socket, done: make(chan struct{})}
	// The listeners are buffered: amqp091-go waits for a listener that does not
	// take its error.
	connClosed := conn.NotifyClose(make(chan *amqp.Error, 1))
	blockings := conn.NotifyBlocked(make(chan amqp.Blocking, 1))
	channel, err := conn.Channel()
	if err != nil {
		s.Drop(err)
		return nil, fmt.Errorf("open channel: %w", err)
	}
	s.Channel = channel
	channelClosed := channel.NotifyClose(make(chan *amqp.Error, 1))
	go s.watch(connClosed, channelClosed, blockings, events)
	return s, nil
}

// user returns the user's name as the mechanism in use has it.
func user(conn *amqp.Connection) string {
	for _, auth := range conn.Config.SASL {
		switch auth := auth.(type) {
		case *amqp.PlainAuth:
			return auth.Username
		case *amqp.AMQPlainAuth:
			return auth.Username
		}
	}
	return ""
}

func (s *Session) watch(connClosed, channelClosed <-chan *amqp.Error, blockings <-chan amqp.Blocking, events Events) {
	for {
		select {
		case err := <-connClosed:
			s.end(err, events)
			return
		case err := <-channelClosed:
			// When the connection dies, it closes its channels with the
			// same error; a channel that closes alone takes the session with
			// it.
			s.end(err, events)
			return
		case b, ok := <-blockings:
			if !ok {
				blockings = nil
				continue
			}
			s.setBlocked(b)
			events.blocking(s.Generation, b)
		}
	}
}

func (s *Session) end(err *amqp.Error, events Events) {
	ended := errors.New("connection closed")
	if err != nil {
		ended = err
	}
	s.Drop(ended)
	s.err = s.reason
	if until, _ := s.Blocked(); until != nil {
		events.blocking(s.Generation, amqp.Blocking{})
	}
	s.setBlocked(amqp.Blocking{})
	close(s.done)
}

func (s *Session) setBlocked(b amqp.Blocking) {
	s.blockedMu.Lock()
	defer s.blockedMu.Unlock()
	switch {
	case b.Active && s.blocked == nil:
		s.blocked = make(chan struct{})
	case !b.Active && s.blocked != nil:
		close(s.blocked)
		s.blocked = nil
	}
	s.alarm = b.Reason
}

// Blocked returns nil while the broker takes publishes. While an alarm blocks the
// connection it returns a channel that is closed when the broker
// unblocks it or the session ends, and the broker's reason.
func (s *Session) Blocked() (until <-chan struct{}, reason string) {
	s.blockedMu.Lock()
	defer s.blockedMu.Unlock()
	return s.blocked, s.alarm
}

// Done is closed when the session has ended.
func (s *Session) Done() <-chan struct{} { return s.done }

func (s *Session) ended() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// Err tells why the session ended: an *amqp.Error if the broker or
// amqp091-go said why. Call it after Done is closed.
func (s *Session) Err() error {
	<-s.done
	return s.err
}

// Drop ends the session at once by closing its socket, whatever is under way.
// The first reason that is given is what Err returns.
func (s *Session) Drop(reason error) {
	s.dropOnce.Do(func() { s.reason = reason })
	// The socket first: amqp091-go's own Close waits for a writer that is
	// stuck in it.
	_ = s.socket.Close()
}

var errClosing = errors.New("connection closed on this side")

// closeTimeout bounds the farewell where the caller's context does not.
const closeTimeout = 5 * time.Second

// Close ends the session in good order: the broker is told, and what was
// written before is read by it first. It is cut off when ctx ends, with ctx's
// error, or after five seconds. A connection that breaks meanwhile is closed too.
func (s *Session) Close(ctx context.Context) error {
	farewell, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	stop := context.AfterFunc(farewell, func() { s.Drop(errClosing) })
	defer stop()
	if until, _ := s.Blocked(); until != nil {
		// A blocked broker does not read, so it would not answer.
		s.Drop(errClosing)
	}
	err := s.conn.Close()
	<-s.done
	if err != nil {
		return ctx.Err()
	}
	return nil
}

// Call runs f, which waits for an answer from the broker, and drops the session if
// ctx ends before f is done: nothing else ends amqp091-go's waiting.
func (s *Session) Call(ctx context.Context, f func() error) error {
	stop := context.AfterFunc(ctx, func() { s.Drop(fmt.Errorf("no answer from the broker: %w", ctx.Err())) })
	defer stop()
	return f()
}

// Do is Call with a channel for f alone: on a shared channel two calls could
// get each other's answers.
func (s *Session) Do(ctx context.Context, f func(*amqp.Channel) error) error {
	return s.Call(ctx, func() error {
		channel, err := s.conn.Channel()
		if err != nil {
			return fmt.Errorf("open channel: %w", err)
		}
		if err := f(channel); err != nil {
			_ = channel.Close() // most errors have closed it
			return err
		}
		return channel.Close()
	})
}

// Version returns the broker's version as it introduced itself, such as
// "4.3.6", or "".
func (s *Session) Version() string {
	version, _ := s.conn.Properties["version"].(string)
	return version
}

// FrameSize returns the negotiated largest frame in bytes; 0 is no limit.
func (s *Session) FrameSize() int { return s.conn.Config.FrameSize }

// deadlineConn limits the time of each Write. A stalled peer would else hold
// amqp091-go's writer, and the lock that closing needs, for ever.
type deadlineConn struct {
	net.Conn
	timeout time.Duration
}

func (c deadlineConn) Write(b []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(c.timeout)); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}
