package brokertest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// vhostTimeout bounds the creation or deletion of one virtual host.
const vhostTimeout = 30 * time.Second

// Env is what a test gets to work with: a broker, and the virtual host that all tests of its package share.
type Env struct {
	Broker *Broker
	VHost  string
	// URL is the AMQP URL of VHost.
	URL string
}

var packageEnv struct {
	sync.Mutex
	env *Env
}

// mainRuns is set while Main runs; without it nobody would end what For starts.
var mainRuns bool

// Main runs the tests of a package and exits: a TestMain consists of a call of it. Afterwards it deletes the package's
// virtual host, ends a broker that was started for the package, and fails if a goroutine was left behind.
func Main(m *testing.M, opts ...goleak.Option) {
	mainRuns = true
	code := m.Run()
	if err := errors.Join(closePackageEnv(), CloseShared()); err != nil {
		fmt.Fprintln(os.Stderr, "brokertest: cleaning up:", err)
		code = max(code, 1)
	}
	if code == 0 { // after a failure, goroutines left behind are only noise
		if err := goleak.Find(opts...); err != nil {
			fmt.Fprintln(os.Stderr, "brokertest: goroutines left behind:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// For returns the broker for a test and the package's virtual host, starting the broker if this is the first call in
// this process. Without any broker it skips the test, or fails it where CI is set, with a text that says how to get one.
func For(tb testing.TB) *Env {
	tb.Helper()
	broker := sharedFor(tb)
	packageEnv.Lock()
	defer packageEnv.Unlock()
	if packageEnv.env == nil {
		ctx, cancel := context.WithTimeout(tb.Context(), vhostTimeout)
		defer cancel()
		name := uniqueName(strings.TrimSuffix(filepath.Base(os.Args[0]), ".test"))
		if err := broker.CreateVHost(ctx, name); err != nil {
			tb.Fatal(err)
		}
		packageEnv.env = &Env{Broker: broker, VHost: name, URL: broker.URL(name)}
	}
	return packageEnv.env
}

// VHost makes a virtual host for one test and returns its AMQP URL. It is deleted when the test is over. It skips or
// fails like For where there is no broker.
func VHost(tb testing.TB) string {
	tb.Helper()
	return sharedFor(tb).VHost(tb)
}

// VHost makes a virtual host on this broker for one test and returns its AMQP URL. It is deleted when the test is over.
func (b *Broker) VHost(tb testing.TB) string {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), vhostTimeout)
	defer cancel()
	name := uniqueName(tb.Name())
	if err := b.CreateVHost(ctx, name); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), vhostTimeout)
		defer cancel()
		if err := b.DeleteVHost(ctx, name); err != nil {
			tb.Error(err)
		}
	})
	return b.URL(name)
}

func sharedFor(tb testing.TB) *Broker {
	tb.Helper()
	if !mainRuns {
		tb.Fatal("brokertest: the package's TestMain must call brokertest.Main, which cleans up")
	}
	broker, err := Shared(tb.Context())
	if err != nil {
		giveUp(tb, err)
	}
	return broker
}

// giveUp ends a test that cannot have a broker: missing ones are no failure on a developer's machine.
func giveUp(tb testing.TB, err error) {
	tb.Helper()
	if ci := os.Getenv("CI"); errors.Is(err, ErrNoBroker) && (ci == "" || ci == "false") {
		tb.Skip(err)
	}
	tb.Fatal(err)
}

// Private starts a broker for one test, which may kill it, and closes it when the test is over. It skips or fails like
// For where there is no broker.
func Private(tb testing.TB) *Broker {
	tb.Helper()
	return Cluster(tb, 1)[0]
}

// Cluster starts a cluster of n nodes for one test and closes it when the test is over. It skips or fails like For where
// there is no broker.
func Cluster(tb testing.TB, n int) []*Broker {
	tb.Helper()
	brokers, err := StartCluster(tb.Context(), n)
	if err != nil {
		giveUp(tb, err)
	}
	tb.Cleanup(func() {
		for _, b := range brokers {
			if err := b.Close(); err != nil {
				tb.Error(err)
			}
		}
	})
	return brokers
}

func closePackageEnv() error {
	packageEnv.Lock()
	defer packageEnv.Unlock()
	if packageEnv.env == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), vhostTimeout)
	defer cancel()
	err := packageEnv.env.Broker.DeleteVHost(ctx, packageEnv.env.VHost)
	packageEnv.env = nil
	return err
}

// uniqueName makes a name that no other test binary uses, and that shows whose it is.
func uniqueName(hint string) string {
	return fmt.Sprintf("%.80s-%s", strings.ReplaceAll(hint, "/", "."), rand.Text()[:8])
}

// Proxied starts a fault proxy in front of the broker of an AMQP URL, and returns it with the URL through it. It is
// closed when the test is over.
func Proxied(tb testing.TB, target string) (proxy *FaultProxy, through string) {
	tb.Helper()
	u, err := url.Parse(target)
	if err != nil {
		tb.Fatal("brokertest: the target is not a URL") // the parser's error would show the password
	}
	proxy, err = NewFaultProxy(tb.Context(), u.Host)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := proxy.Close(); err != nil {
			tb.Error(err)
		}
	})
	through, err = proxy.URL(target)
	if err != nil {
		tb.Fatal(err)
	}
	return proxy, through
}
