// Package brokertest finds or starts a real RabbitMQ for tests.
//
// A broker is taken, in this order, from the environment (LADDER_AMQP_URL), from a Docker engine through
// testcontainers-go, or from an installed rabbitmq-server that runs as a private child process. A test package calls
// [Main] from its TestMain and [For] or [VHost] from the tests that need a broker; a test binary none of whose tests
// calls them starts nothing. Tests that stop, kill or cut off a broker take one of their own with [StartPrivate] or
// [StartCluster].
//
// The environment steers it:
//
//	LADDER_AMQP_URL         a running broker, with a user that may administer it
//	LADDER_MANAGEMENT_URL   its management API; defaults to port 15672 of the same host with the same user
//	LADDER_BROKER           auto, docker or local: how to start one (auto: docker, then local)
//	LADDER_BROKER_IMAGE     the Docker image; defaults to rabbitmq:4-management
//	LADDER_RABBITMQ_SERVER  the rabbitmq-server script that a local broker is started with
//	CI                      when true, a test that finds no broker fails instead of being skipped
package brokertest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// ErrNoBroker is what Shared, StartPrivate and StartCluster return when no broker is given and none can be started
// here. Its text says what was tried and how to get a broker.
var ErrNoBroker = errors.New("no RabbitMQ broker for the tests: set LADDER_AMQP_URL (and LADDER_MANAGEMENT_URL), " +
	"or start Docker and run `docker pull rabbitmq:4-management`, or install rabbitmq-server (scripts/ensure-broker does)")

// errUnavailable marks a way to get a broker that this machine does not offer, as opposed to one that failed.
var errUnavailable = errors.New("not available")

// errGiven is returned when a broker that was only given by its URL is to be controlled.
var errGiven = errors.New("brokertest: a broker given by LADDER_AMQP_URL cannot be controlled; use StartPrivate")

const (
	// startTimeout bounds the start of one broker, on a loaded machine with two cores.
	startTimeout = 2 * time.Minute
	// givenTimeout bounds the wait for a broker that was given by its URL and that may have been started just before.
	givenTimeout = 30 * time.Second
	// pollInterval is how often a condition of a broker is looked at.
	pollInterval = 100 * time.Millisecond
	// dialTimeout bounds one attempt to reach a broker, handshake included.
	dialTimeout = 3 * time.Second
)

// node is a broker that this package started and may do anything to.
type node interface {
	// start starts a stopped or killed node again, with its data and its ports. It does not wait until it is ready.
	start(ctx context.Context) error
	stop(ctx context.Context) error
	kill(ctx context.Context) error
	pause(ctx context.Context) error
	resume(ctx context.Context) error
	ctl(ctx context.Context, args ...string) (string, error)
	// disconnect and reconnect cut a cluster's node off from its peers, not from its clients.
	disconnect(ctx context.Context) error
	reconnect(ctx context.Context) error
	// exited says why the node is not running; nil while it is.
	exited(ctx context.Context) error
	close(ctx context.Context) error
}

// Broker is one RabbitMQ node.
type Broker struct {
	amqp       *url.URL
	management *url.URL
	version    string
	source     string
	node       node // nil when the broker was given by its URL
}

// AMQPURL returns the URL of the broker's default virtual host, with a user who may administer the broker.
func (b *Broker) AMQPURL() string { return b.amqp.String() }

// ManagementURL returns the base URL of the broker's management HTTP API, with the same user.
func (b *Broker) ManagementURL() string { return b.management.String() }

// Version returns the version that the broker itself gives, such as "4.3.6".
func (b *Broker) Version() string { return b.version }

// Source says where the broker comes from: "environment", "docker IMAGE" or "local PATH".
func (b *Broker) Source() string { return b.source }

// URL returns the AMQP URL of a virtual host.
func (b *Broker) URL(vhost string) string { return b.userURL(b.amqp.User, vhost) }

// UserURL returns the AMQP URL of a virtual host for another user, as made by [Broker.AddUser].
func (b *Broker) UserURL(user, password, vhost string) string {
	return b.userURL(url.UserPassword(user, password), vhost)
}

func (b *Broker) userURL(user *url.Userinfo, vhost string) string {
	u := *b.amqp
	u.User = user
	u.Path = "/" + vhost
	u.RawPath = "/" + url.PathEscape(vhost)
	return u.String()
}

// String describes the broker in one line, without credentials.
func (b *Broker) String() string {
	return fmt.Sprintf("RabbitMQ %s (%s) at %s", b.version, b.source, b.amqp.Host)
}

// CanControl reports whether the broker may be stopped, killed and paused: it was started here.
func (b *Broker) CanControl() bool { return b.node != nil }

// Close ends a broker that was started here and removes its data. It does nothing to a broker that was given.
func (b *Broker) Close() error {
	if b.node == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return b.node.close(ctx)
}

// waitReady waits until the broker takes AMQP connections and answers management requests, and learns its version.
func (b *Broker) waitReady(ctx context.Context) error {
	limit := startTimeout
	if b.node == nil {
		limit = givenTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := b.probe(ctx)
		if err == nil {
			return nil
		}
		if b.node != nil {
			if dead := b.node.exited(ctx); dead != nil {
				return fmt.Errorf("brokertest: %s ended before it was ready: %w", b.source, dead)
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("brokertest: %s at %s is not ready: %w, last: %w", b.source, b.amqp.Host, context.Cause(ctx), err)
		case <-time.After(pollInterval):
		}
	}
}

// probe connects once over AMQP and asks the management API once.
func (b *Broker) probe(ctx context.Context) error {
	conn, err := amqp.DialConfig(b.AMQPURL(), amqp.Config{
		Dial: func(network, addr string) (net.Conn, error) {
			conn, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			// The client lifts the deadline when the handshake is done.
			return conn, conn.SetDeadline(time.Now().Add(dialTimeout))
		},
	})
	if err != nil {
		return fmt.Errorf("connecting to %s: %w", b.amqp.Host, err)
	}
	defer conn.CloseDeadline(time.Now().Add(dialTimeout)) //nolint:errcheck // only the handshake counts
	b.version, _ = conn.Properties["version"].(string)
	return b.manage(ctx, http.MethodGet, "/api/overview", nil, nil)
}

// Shared returns the broker of this process, which it finds or starts at the first call: the one that LADDER_AMQP_URL
// names, else one started as StartPrivate does. It lives until [Main] ends, or until CloseShared.
func Shared(ctx context.Context) (*Broker, error) {
	shared.Lock()
	defer shared.Unlock()
	if shared.broker != nil {
		return shared.broker, nil
	}
	if shared.err != nil {
		return nil, shared.err
	}
	broker, err := find(ctx)
	if err != nil {
		if ctx.Err() == nil { // asking again would find nothing either, and each attempt can take long
			shared.err = err
		}
		return nil, err
	}
	shared.broker = broker
	fmt.Fprintln(os.Stderr, "brokertest:", broker)
	return broker, nil
}

// CloseShared ends the broker that Shared started, if it did.
func CloseShared() error {
	shared.Lock()
	defer shared.Unlock()
	if shared.broker == nil {
		return nil
	}
	err := shared.broker.Close()
	shared.broker = nil
	return err
}

var shared struct {
	sync.Mutex
	broker *Broker
	err    error
}

func find(ctx context.Context) (*Broker, error) {
	given := os.Getenv("LADDER_AMQP_URL")
	if given == "" {
		return StartPrivate(ctx)
	}
	b, err := givenBroker(given, os.Getenv("LADDER_MANAGEMENT_URL"))
	if err != nil {
		return nil, err
	}
	if err := b.waitReady(ctx); err != nil {
		return nil, err
	}
	return b, nil
}

func givenBroker(amqpURL, managementURL string) (*Broker, error) {
	u, err := url.Parse(amqpURL)
	if err != nil {
		return nil, errors.New("brokertest: LADDER_AMQP_URL is not a URL") // the parser's error would show the password
	}
	if u.User == nil {
		u.User = url.UserPassword("guest", "guest")
	}
	b := &Broker{amqp: u, source: "environment"}
	if managementURL == "" {
		b.management = &url.URL{Scheme: "http", User: u.User, Host: net.JoinHostPort(u.Hostname(), "15672")}
		return b, nil
	}
	b.management, err = url.Parse(managementURL)
	if err != nil {
		return nil, errors.New("brokertest: LADDER_MANAGEMENT_URL is not a URL")
	}
	if b.management.User == nil {
		b.management.User = u.User
	}
	return b, nil
}

// StartPrivate starts a broker for the caller alone, whatever LADDER_AMQP_URL says: in Docker, else a local
// rabbitmq-server, or as LADDER_BROKER says. The caller closes it.
func StartPrivate(ctx context.Context) (*Broker, error) {
	brokers, err := StartCluster(ctx, 1)
	if err != nil {
		return nil, err
	}
	return brokers[0], nil
}

// StartCluster starts n nodes that form one cluster, as StartPrivate starts one. Each node has its own ports and can be
// killed, started, paused and cut off from the others on its own. The caller closes each of them.
func StartCluster(ctx context.Context, n int) ([]*Broker, error) {
	ways := []func(context.Context, int) ([]*Broker, error){startDocker, startLocal}
	switch way := os.Getenv("LADDER_BROKER"); way {
	case "", "auto":
	case "docker":
		ways = ways[:1]
	case "local":
		ways = ways[1:]
	default:
		return nil, fmt.Errorf("brokertest: LADDER_BROKER is %q; use auto, docker or local", way)
	}
	tried := ErrNoBroker
	for _, start := range ways {
		brokers, err := start(ctx, n)
		if err == nil {
			return brokers, nil
		}
		if !errors.Is(err, errUnavailable) {
			return nil, err
		}
		tried = fmt.Errorf("%w\n\t%w", tried, err)
	}
	return nil, tried
}
