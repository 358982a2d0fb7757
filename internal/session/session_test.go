package session_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder/internal/brokertest"
	"github.com/rabbitladder/ladder/internal/session"
)

func TestMain(m *testing.M) { brokertest.Main(m) }

const patience = time.Minute

func config(urls ...string) session.Config {
	return session.Config{
		URLs: urls, Name: "session test", Heartbeat: 10 * time.Second,
		DialTimeout: 5 * time.Second, WriteTimeout: 5 * time.Second, SetupTimeout: 10 * time.Second,
	}
}

// identity uses sessions as they are.
func identity(_ context.Context, s *session.Session) (*session.Session, error) { return s, nil }

var silent = slog.New(slog.DiscardHandler)

func keep(t *testing.T, c session.Config, events session.Events) *session.Keeper[*session.Session] {
	t.Helper()
	k, err := session.Keep(within(t), c, silent, events, identity)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		assert.NoError(t, k.Close(ctx))
	})
	return k
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func TestNextSessionIsAnother(t *testing.T) {
	t.Parallel()
	proxy, through := brokertest.Proxied(t, brokertest.For(t).URL)
	var mu sync.Mutex
	var told []string
	tell := func(s string) {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, s)
	}
	k := keep(t, config(through), session.Events{
		Up:   func(uint64) { tell("up") },
		Lost: func(_ uint64, err error) { assert.Error(t, err); tell("lost") },
	})
	first, err := k.Current(within(t))
	require.NoError(t, err)
	assert.Equal(t, uint64(1), first.Generation)
	assert.NotEmpty(t, first.Version())
	assert.NotEmpty(t, first.User)
	assert.Positive(t, first.FrameSize())

	proxy.Cut()
	<-first.Done()
	require.Error(t, first.Err())
	second, err := k.Current(within(t))
	require.NoError(t, err)
	assert.Equal(t, uint64(2), second.Generation)
	assert.True(t, first.Channel.IsClosed(), "the first is gone for good")
	require.ErrorIs(t, first.Channel.Ack(1, false), amqp.ErrClosed)
	mu.Lock()
	defer mu.Unlock()
	assert.Equal(t, []string{"up", "lost", "up"}, told)
}

func TestClosedChannelEndsTheSession(t *testing.T) {
	t.Parallel()
	k := keep(t, config(brokertest.For(t).URL), session.Events{})
	s, err := k.Current(within(t))
	require.NoError(t, err)
	_, err = s.Channel.QueueDeclarePassive("no such queue", true, false, false, false, nil)
	require.Error(t, err)
	<-s.Done()
	var refused *amqp.Error
	require.ErrorAs(t, s.Err(), &refused)
	assert.Equal(t, amqp.NotFound, refused.Code)
}

// TestDo shows that a refused call costs its own channel only, and that calls
// at the same time get their own answers.
func TestDo(t *testing.T) {
	t.Parallel()
	k := keep(t, config(brokertest.For(t).URL), session.Events{})
	s, err := k.Current(within(t))
	require.NoError(t, err)
	ctx := within(t)
	var calling sync.WaitGroup
	for i := range 20 {
		calling.Go(func() {
			err := s.Do(ctx, func(ch *amqp.Channel) error {
				if i%2 == 0 {
					_, err := ch.QueueDeclarePassive("no such queue", true, false, false, false, nil)
					return err
				}
				q, err := ch.QueueDeclare("", false, false, true, false, nil)
				assert.Zero(t, q.Messages)
				return err
			})
			if i%2 == 0 {
				assert.Error(t, err)
			} else {
				assert.NoError(t, err)
			}
		})
	}
	calling.Wait()
	select {
	case <-s.Done():
		assert.Fail(t, "the session ended", "%v", s.Err())
	default:
	}
}

func TestDoEndsWithItsContext(t *testing.T) {
	t.Parallel()
	proxy, through := brokertest.Proxied(t, brokertest.For(t).URL)
	k := keep(t, config(through), session.Events{})
	s, err := k.Current(within(t))
	require.NoError(t, err)
	proxy.Stall(brokertest.Downstream)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	require.Error(t, s.Do(ctx, func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclare("", false, false, true, false, nil)
		return err
	}))
	<-s.Done()
	require.ErrorIs(t, s.Err(), context.DeadlineExceeded)
	proxy.Pass()
}

func TestCloseOfStalledSessionIsPrompt(t *testing.T) {
	t.Parallel()
	proxy, through := brokertest.Proxied(t, brokertest.For(t).URL)
	c := config(through)
	c.WriteTimeout, c.Heartbeat = time.Hour, time.Hour
	k, err := session.Keep(within(t), c, silent, session.Events{}, identity)
	require.NoError(t, err)
	s, err := k.Current(within(t))
	require.NoError(t, err)
	proxy.StallBoth()
	writing := make(chan struct{})
	go func() { // fills all buffers and then holds amqp091-go's lock
		close(writing)
		for s.Channel.Publish("", "nobody", false, false, amqp.Publishing{Body: make([]byte, 1<<20)}) == nil {
		}
	}()
	<-writing
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	closed := make(chan struct{})
	go func() { _ = k.Close(ctx); close(closed) }()
	select {
	case <-closed:
	case <-time.After(patience / 4):
		require.Fail(t, "Close hangs")
	}
	_, err = k.Current(within(t))
	require.ErrorIs(t, err, session.ErrClosed)
}

// TestSilentPeer dials what accepts and never speaks.
func TestSilentPeer(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	c := config("amqp://user:topsecret@"+listener.Addr().String()+"/", brokertest.For(t).URL)
	c.DialTimeout = 200 * time.Millisecond
	for range 4 { // in whichever order they are tried
		keep(t, c, session.Events{})
	}
	c.URLs = c.URLs[:1]
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err = session.Keep(ctx, c, silent, session.Events{}, identity)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	assert.ErrorContains(t, err, listener.Addr().String())
	assert.NotContains(t, err.Error(), "topsecret")
}

func TestSetupThatFails(t *testing.T) {
	t.Parallel()
	env := brokertest.For(t)
	passing := errors.New("passing")
	tries := 0
	k, err := session.Keep(within(t), config(env.URL), silent, session.Events{}, func(context.Context, *session.Session) (int, error) {
		tries++
		if tries < 3 {
			return 0, passing
		}
		return tries, nil
	})
	require.NoError(t, err)
	got, err := k.Current(within(t))
	require.NoError(t, err)
	assert.Equal(t, 3, got)
	require.NoError(t, k.Close(within(t)))

	refused := &amqp.Error{Code: amqp.PreconditionFailed, Server: true}
	_, err = session.Keep(within(t), config(env.URL), silent, session.Events{}, func(context.Context, *session.Session) (int, error) {
		return 0, refused
	})
	require.ErrorIs(t, err, refused, "at once")
}

func TestCredentialsAreAskedForEachDial(t *testing.T) {
	t.Parallel()
	env := brokertest.For(t)
	u, err := url.Parse(env.URL)
	require.NoError(t, err)
	password, _ := u.User.Password()
	c := config(env.Broker.UserURL("nobody", "wrong", env.VHost))
	asked := 0
	c.SASL = func(context.Context) ([]amqp.Authentication, error) {
		asked++
		return []amqp.Authentication{&amqp.PlainAuth{Username: u.User.Username(), Password: password}}, nil
	}
	proxy, through := brokertest.Proxied(t, c.URLs[0])
	c.URLs = []string{through}
	k := keep(t, c, session.Events{})
	s, err := k.Current(within(t))
	require.NoError(t, err)
	proxy.Cut()
	<-s.Done()
	_, err = k.Current(within(t))
	require.NoError(t, err)
	assert.GreaterOrEqual(t, asked, 2)
	assert.Equal(t, u.User.Username(), s.User)
}

func TestLogsHaveNoPassword(t *testing.T) {
	t.Parallel()
	env := brokertest.For(t)
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	_, err := session.Keep(within(t), config(env.Broker.UserURL("nobody", "topsecret", env.VHost)), logger, session.Events{}, identity)
	require.Error(t, err)
	assert.True(t, session.Refused(err))
	assert.Contains(t, log.String(), "no session")
	assert.NotContains(t, log.String(), "topsecret")
	assert.NotContains(t, err.Error(), "topsecret")
}

func TestRedact(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"amqp://user:pass@host:1234/vhost":        "amqp://host:1234/vhost",
		"amqps://user:p%40ss@host":                "amqps://host:5671/%2F",
		"amqp://user:pa#ss@host/":                 "(malformed URL)",
		"amqp://u:p@[::1]:5672/a%2Fb?heartbeat=5": "amqp://[::1]:5672/a%2Fb",
	} {
		got := session.Redact(in)
		assert.Equal(t, want, got)
		assert.NotContains(t, got, "ss@")
	}
	for _, bad := range []string{"", "host", "http://user:secret@host", "amqp://user:sec#ret@host", "amqp://user:sec/ret@host", "amqp://user:secret@host:port", "amqp://user:123/secret@host/", "amqp://user:1?secret@host/", "amqp://host/#sec", "amqp://host?heartbeat=0"} {
		err := session.CheckURL(bad)
		require.Error(t, err, bad)
		assert.NotContains(t, err.Error(), "secret")
		assert.NotContains(t, err.Error(), "ret@")
	}
	assert.NoError(t, session.CheckURL("amqp://user:se%23cret@host/"))
}

func TestRefused(t *testing.T) {
	t.Parallel()
	assert.True(t, session.Refused(amqp.ErrCredentials))
	assert.True(t, session.Refused(amqp.ErrVhost))
	assert.True(t, session.Refused(&amqp.Error{Code: amqp.NotFound}))
	assert.False(t, session.Refused(&amqp.Error{Code: amqp.NotFound, Reason: "NOT_FOUND - home node 'a@b' of durable queue 'q' in vhost '/' is down or inaccessible"}))
	assert.False(t, session.Refused(&amqp.Error{Code: amqp.NotAllowed, Reason: "NOT_ALLOWED - access to vhost 'a' refused for user 'b': connection limit (0) is reached"}))
	assert.False(t, session.Refused(&amqp.Error{Code: amqp.ConnectionForced}))
	assert.False(t, session.Refused(errors.New("another")))
	assert.False(t, session.Refused(nil))
}
