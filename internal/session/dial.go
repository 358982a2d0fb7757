package session

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	neturl "net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Config says how to connect. All fields but TLS and SASL must be set.
type Config struct {
	// URLs are AMQP URLs of one broker or of the nodes of a cluster.
	URLs []string
	// TLS is used for amqps URLs; nil takes the URL's parameters.
	TLS *tls.Config
	// SASL returns the mechanisms to log in with, anew for each dial; nil
	// takes the URL's user and password.
	SASL func(context.Context) ([]amqp.Authentication, error)
	// Name is the connection's name, as the management UI shows it.
	Name string
	// Heartbeat is the interval that is proposed to the broker.
	Heartbeat time.Duration
	// DialTimeout bounds connecting and the handshakes, for each URL.
	DialTimeout time.Duration
	// WriteTimeout bounds each write to the socket.
	WriteTimeout time.Duration
	// SetupTimeout bounds opening a channel and what the setup function does.
	SetupTimeout time.Duration
}

// CheckURL returns an error if amqp091-go cannot parse the URL. The error does not quote it:
// where an URL is malformed, any part of it may be the password.
func CheckURL(url string) error {
	if url == "" {
		return errors.New("is empty: it must be an AMQP URL, such as amqp://user:password@host:5672/vhost")
	}
	_, err := amqp.ParseURI(url)
	parsed, parseErr := neturl.Parse(url)
	// Where "/", "?" or "#" of a password is not encoded, the rest of it can be taken
	// for a path, a query or a fragment.
	if err != nil || parseErr != nil || parsed.User == nil && strings.Contains(url, "@") || strings.Contains(url, "#") {
		return errors.New("is not an AMQP URL (amqp://user:password@host:port/vhost, reserved characters percent-encoded); it is not quoted here, as it may hold a password")
	}
	if heartbeat := parsed.Query().Get("heartbeat"); heartbeat != "" {
		if seconds, err := strconv.Atoi(heartbeat); err != nil || seconds < 1 {
			return fmt.Errorf("has heartbeat %q: must be at least 1 second, or a lost connection may never be noticed", heartbeat)
		}
	}
	return nil
}

// Redact returns the URL without user and password, for errors and logs.
func Redact(url string) string {
	uri, err := amqp.ParseURI(url)
	if err != nil {
		return "(malformed URL)"
	}
	return fmt.Sprintf("%s://%s/%s", uri.Scheme, net.JoinHostPort(uri.Host, strconv.Itoa(uri.Port)), neturl.PathEscape(uri.Vhost))
}

// dialed is a connection with its socket and the URL that led to it.
type dialed struct {
	conn   *amqp.Connection
	socket net.Conn
	url    string
}

// dial tries all URLs in random order, but one that has just failed last, and
// returns the first connection, or all errors.
func dial(ctx context.Context, config Config, failed string) (dialed, error) {
	urls := slices.Clone(config.URLs)
	rand.Shuffle(len(urls), func(i, j int) { urls[i], urls[j] = urls[j], urls[i] })
	slices.SortStableFunc(urls, func(a, b string) int {
		switch {
		case a == b:
			return 0
		case a == failed:
			return 1
		case b == failed:
			return -1
		}
		return 0
	})
	var errs []error
	for _, url := range urls {
		conn, socket, err := dialURL(ctx, config, url)
		if err == nil {
			return dialed{conn, socket, url}, nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", Redact(url), err))
		if ctx.Err() != nil {
			break
		}
	}
	return dialed{}, &dialError{errs}
}

// NodeDown tells whether the broker could not find a queue because the node that
// holds it is down: a durable classic queue.
func NodeDown(refused *amqp.Error) bool {
	return refused.Code == amqp.NotFound && strings.Contains(refused.Reason, "home node")
}

// A dialError has the error of each URL.
type dialError struct{ errs []error }

func (e *dialError) Error() string   { return errors.Join(e.errs...).Error() }
func (e *dialError) Unwrap() []error { return e.errs }

func dialURL(ctx context.Context, config Config, url string) (*amqp.Connection, net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, config.DialTimeout)
	defer cancel()
	var (
		socket       net.Conn
		stopWatching = func() bool { return true }
	)
	// Everything is made anew for each dial: amqp091-go writes into what it
	// is given.
	properties := amqp.NewConnectionProperties()
	properties.SetClientConnectionName(config.Name)
	amqpConfig := amqp.Config{
		Heartbeat:  config.Heartbeat,
		Properties: properties,
		Dial: func(network, addr string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			// The handshakes that follow take no context.
			stopWatching = context.AfterFunc(ctx, func() { _ = conn.Close() })
			socket = deadlineConn{Conn: conn, timeout: config.WriteTimeout}
			return socket, nil
		},
	}
	if config.TLS != nil {
		amqpConfig.TLSClientConfig = config.TLS.Clone()
	}
	if config.SASL != nil {
		var err error
		if amqpConfig.SASL, err = config.SASL(ctx); err != nil {
			return nil, nil, fmt.Errorf("credentials: %w", err)
		}
	}
	conn, err := amqp.DialConfig(url, amqpConfig)
	if !stopWatching() && err == nil {
		err = context.DeadlineExceeded // the socket is closed already
	}
	if err != nil {
		if socket != nil {
			_ = socket.Close() // ends amqp091-go's reader
		}
		switch {
		case ctx.Err() != nil:
			// Not wrapped: amqp091-go takes a handshake that was cut off for
			// a refusal.
			return nil, nil, fmt.Errorf("%w (%v)", ctx.Err(), err) //nolint:errorlint // see above
		case errors.Is(err, amqp.ErrVhost):
			// Nor is this RabbitMQ's own refusal of a virtual host, which
			// comes with its own words.
			return nil, nil, errors.New("connection lost while opening the virtual host")
		}
		return nil, nil, err
	}
	return conn, socket, nil
}

// wrongCredentials returns how many URLs of a round had wrong credentials, by
// amqp091-go's account: it takes any other end of the connection during the
// login for that too.
func wrongCredentials(err error) int {
	if !errors.Is(err, amqp.ErrCredentials) {
		return 0
	}
	dial, ok := errors.AsType[*dialError](err)
	if !ok {
		return 1
	}
	n := 0
	for _, err := range dial.errs {
		if errors.Is(err, amqp.ErrCredentials) {
			n++
		}
	}
	return n
}

// Refused tells whether the broker refused something for a reason that stays
// until someone changes it: credentials, the virtual host, a permission, an object
// that is missing or has other arguments. A reached connection limit is not
// among them, nor a node that is down. If several URLs were dialed, all must have
// refused.
func Refused(err error) bool {
	if dial, ok := errors.AsType[*dialError](err); ok {
		return !slices.ContainsFunc(dial.errs, func(err error) bool { return !Refused(err) })
	}
	var refused *amqp.Error
	if !errors.As(err, &refused) {
		return false
	}
	switch refused.Code {
	case amqp.AccessRefused, amqp.PreconditionFailed:
		return true
	case amqp.NotFound:
		return !NodeDown(refused)
	case amqp.NotAllowed:
		return !strings.Contains(refused.Reason, "limit")
	}
	return false
}
