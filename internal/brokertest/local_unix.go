//go:build unix

package brokertest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// serverScripts are where rabbitmq-server is looked for. Debian's /usr/sbin/rabbitmq-server changes the user and refuses
// all but root, so the script behind it comes first.
var serverScripts = []string{
	"/usr/lib/rabbitmq/bin/rabbitmq-server",
	"rabbitmq-server",
	"/opt/homebrew/opt/rabbitmq/sbin/rabbitmq-server",
	"/usr/local/opt/rabbitmq/sbin/rabbitmq-server",
}

func findServer() (string, error) {
	candidates := serverScripts
	if given := os.Getenv("LADDER_RABBITMQ_SERVER"); given != "" {
		candidates = []string{given}
	}
	for _, candidate := range candidates {
		if path, err := exec.LookPath(candidate); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("local: rabbitmq-server %w; looked for %s", errUnavailable, strings.Join(candidates, ", "))
}

// site is what the local nodes of one cluster share: a directory, a cookie, and an epmd of their own. With its own port
// map the site neither sees nor disturbs other Erlang nodes of the machine.
type site struct {
	server   string
	dir      string
	epmdPort int
	epmd     *group
	guard    *guard

	mu    sync.Mutex
	nodes []*localNode // those started and not closed yet
}

// localNode is a rabbitmq-server that runs as a child of this process.
type localNode struct {
	site    *site
	name    string
	env     []string
	process *group // nil while stopped
}

// startLocal starts a cluster of n nodes from an installed rabbitmq-server, on 127.0.0.1 only.
func startLocal(ctx context.Context, n int) ([]*Broker, error) {
	server, err := findServer()
	if err != nil {
		return nil, err
	}
	epmd, err := exec.LookPath("epmd")
	if err != nil {
		return nil, fmt.Errorf("local: Erlang's epmd %w: %w", errUnavailable, err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	s, err := newSite(ctx, server, epmd)
	if err != nil {
		return nil, err
	}
	brokers, err := startNodes(ctx, n, s.add)
	if err != nil {
		return nil, errors.Join(err, s.closeIfEmpty(context.WithoutCancel(ctx)))
	}
	return brokers, nil
}

func newSite(ctx context.Context, server, epmd string) (*site, error) {
	ports, err := freePorts(ctx, 1)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "ladder-broker-")
	if err != nil {
		return nil, fmt.Errorf("brokertest: %w", err)
	}
	s := &site{server: server, dir: dir, epmdPort: ports[0]}
	if err := s.start(epmd); err != nil {
		return nil, errors.Join(err, s.close(context.WithoutCancel(ctx)))
	}
	return s, nil
}

func (s *site) start(epmd string) (err error) {
	if s.guard, err = newGuard(); err != nil {
		return err
	}
	if err := s.tellGuard(); err != nil {
		return err
	}
	// Erlang wants the cookie to be readable by its owner alone.
	if err := os.WriteFile(filepath.Join(s.dir, ".erlang.cookie"), []byte(rand.Text()), 0o400); err != nil {
		return fmt.Errorf("brokertest: %w", err)
	}
	// Left to itself, Erlang would start an epmd that detaches and is never ended.
	cmd := exec.Command(epmd, "-port", strconv.Itoa(s.epmdPort), "-address", "127.0.0.1") //nolint:noctx,gosec // ended by close
	cmd.Env = s.environment()
	if s.epmd, err = startGroup(cmd); err != nil {
		return err
	}
	return s.tellGuard()
}

// environment is this process's own less what would steer Erlang or RabbitMQ, plus what all nodes share.
func (s *site) environment() []string {
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "RABBITMQ_") || strings.HasPrefix(v, "ERL_") || strings.HasPrefix(v, "HOME=")
	})
	return append(env, "HOME="+s.dir, "ERL_EPMD_PORT="+strconv.Itoa(s.epmdPort), "ERL_EPMD_ADDRESS=127.0.0.1", "LANG=C.UTF-8")
}

// tellGuard names to the guard what runs now. It is called with mu held, or before any node exists.
func (s *site) tellGuard() error {
	groups := make([]*group, 0, 1+len(s.nodes))
	groups = append(groups, s.epmd)
	for _, n := range s.nodes {
		groups = append(groups, n.process)
	}
	return s.guard.set(cleanUpCommand(groups, s.dir))
}

// cleanUpCommand is the shell command that ends process groups and removes a directory.
func cleanUpCommand(groups []*group, dir string) string {
	var command strings.Builder
	for _, g := range groups {
		if g != nil {
			fmt.Fprintf(&command, "kill -s KILL -- -%d 2>/dev/null; ", g.id())
		}
	}
	// A node that dies can still be writing when rm passes for the first time.
	fmt.Fprintf(&command, "rm -rf '%[1]s' || { sleep 1; rm -rf '%[1]s'; }", dir)
	return command.String()
}

// add starts one more node; those with a number above 1 join the first.
func (s *site) add(ctx context.Context, number int) (*Broker, error) {
	ports, err := freePorts(ctx, 4)
	if err != nil {
		return nil, err
	}
	amqpPort, managementPort, prometheusPort, distPort := ports[0], ports[1], ports[2], ports[3]

	n := &localNode{site: s, name: localName(number)}
	config := fmt.Sprintf(`listeners.tcp.1 = 127.0.0.1:%d
management.tcp.ip = 127.0.0.1
management.tcp.port = %d
prometheus.tcp.ip = 127.0.0.1
prometheus.tcp.port = %d
`, amqpPort, managementPort, prometheusPort) + commonConfig
	if number > 1 {
		config += joinConfig(localName(1))
	}
	dir := filepath.Join(s.dir, strings.TrimSuffix(n.name, "@localhost"))
	files := map[string]string{"rabbitmq.conf": config, "enabled_plugins": enabledPlugins, "advanced.config": "[].\n", "env.conf": ""}
	if err := os.MkdirAll(filepath.Join(dir, "conf.d"), 0o700); err != nil {
		return nil, fmt.Errorf("brokertest: %w", err)
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			return nil, fmt.Errorf("brokertest: %w", err)
		}
	}
	// Everything that has a default outside of dir is set, so that no configuration of the machine's own broker counts.
	n.env = append(s.environment(),
		"RABBITMQ_NODENAME="+n.name,
		"RABBITMQ_DIST_PORT="+strconv.Itoa(distPort),
		"RABBITMQ_MNESIA_BASE="+filepath.Join(dir, "data"),
		"RABBITMQ_SCHEMA_DIR="+filepath.Join(dir, "schema"),
		"RABBITMQ_GENERATED_CONFIG_DIR="+filepath.Join(dir, "generated"),
		"RABBITMQ_LOG_BASE="+filepath.Join(dir, "log"),
		"RABBITMQ_LOGS=-",
		"RABBITMQ_PID_FILE="+filepath.Join(dir, "pid"),
		"RABBITMQ_CONF_ENV_FILE="+filepath.Join(dir, "env.conf"),
		"RABBITMQ_CONFIG_FILE="+filepath.Join(dir, "rabbitmq.conf"),
		"RABBITMQ_CONFIG_FILES="+filepath.Join(dir, "conf.d"),
		"RABBITMQ_ADVANCED_CONFIG_FILE="+filepath.Join(dir, "advanced.config"),
		"RABBITMQ_ENABLED_PLUGINS_FILE="+filepath.Join(dir, "enabled_plugins"),
		// Schedulers that spin while idle would take the cores from the test.
		"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=+sbwt none +sbwtdcpu none +sbwtdio none -kernel inet_dist_use_interface {127,0,0,1}",
		"RABBITMQ_CTL_ERL_ARGS=-kernel inet_dist_use_interface {127,0,0,1}",
	)
	if err := n.start(ctx); err != nil {
		return nil, err
	}
	guest := url.UserPassword("guest", "guest")
	return &Broker{
		amqp:       &url.URL{Scheme: "amqp", User: guest, Host: loopback(amqpPort), Path: "/"},
		management: &url.URL{Scheme: "http", User: guest, Host: loopback(managementPort)},
		source:     "local " + s.server,
		node:       n,
	}, nil
}

func localName(number int) string { return fmt.Sprintf("ladder%d@localhost", number) }

func (s *site) closeIfEmpty(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.nodes) > 0 {
		return nil
	}
	return s.close(ctx)
}

func (s *site) close(ctx context.Context) error {
	var errs []error
	if s.epmd != nil {
		errs = append(errs, s.epmd.end(ctx, syscall.SIGKILL))
		s.epmd = nil
	}
	errs = append(errs, removeAll(ctx, s.dir))
	if s.guard != nil {
		errs = append(errs, s.guard.set(""), s.guard.close())
		s.guard = nil
	}
	return errors.Join(errs...)
}

// removeAll removes a directory. A process that is about to end, such as a
// rabbitmqctl whose context has ended, can put a file into it meanwhile.
func removeAll(ctx context.Context, dir string) error {
	for {
		err := os.RemoveAll(dir)
		if err == nil {
			return nil
		}
		select {
		case <-time.After(pollInterval):
		case <-ctx.Done():
			return err
		}
	}
}

func (n *localNode) start(context.Context) error {
	n.site.mu.Lock()
	defer n.site.mu.Unlock()
	if n.process != nil {
		return fmt.Errorf("brokertest: %s runs already", n.name)
	}
	log, err := os.OpenFile(n.logFile(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("brokertest: %w", err)
	}
	defer log.Close()                  //nolint:errcheck // the child has its own descriptor
	cmd := exec.Command(n.site.server) //nolint:noctx,gosec // ended by stop, kill and close
	cmd.Env = n.env
	cmd.Stdout, cmd.Stderr = log, log
	if n.process, err = startGroup(cmd); err != nil {
		return err
	}
	if !slices.Contains(n.site.nodes, n) {
		n.site.nodes = append(n.site.nodes, n)
	}
	return n.site.tellGuard()
}

func (n *localNode) logFile() string { return filepath.Join(n.site.dir, n.name+".log") }

func (n *localNode) exited(context.Context) error {
	n.site.mu.Lock()
	process := n.process
	n.site.mu.Unlock()
	if process == nil {
		return errors.New("it is stopped")
	}
	select {
	case <-process.done:
	default:
		return nil
	}
	log, err := os.ReadFile(n.logFile())
	if err != nil {
		return fmt.Errorf("%w, and its log is gone: %w", process.err, err)
	}
	return fmt.Errorf("%w, its log ends with:\n%s", process.err, lastLines(log))
}

func (n *localNode) end(ctx context.Context, sig syscall.Signal) error {
	n.site.mu.Lock()
	defer n.site.mu.Unlock()
	if n.process == nil {
		return nil
	}
	if err := n.process.end(ctx, sig); err != nil {
		return err
	}
	n.process = nil
	return n.site.tellGuard()
}

func (n *localNode) kill(ctx context.Context) error { return n.end(ctx, syscall.SIGKILL) }

func (n *localNode) stop(ctx context.Context) error { return n.end(ctx, syscall.SIGTERM) }

func (n *localNode) signal(sig syscall.Signal) error {
	n.site.mu.Lock()
	defer n.site.mu.Unlock()
	if n.process == nil {
		return fmt.Errorf("brokertest: %s is stopped", n.name)
	}
	return n.process.signal(sig)
}

func (n *localNode) pause(context.Context) error { return n.signal(syscall.SIGSTOP) }

func (n *localNode) resume(context.Context) error { return n.signal(syscall.SIGCONT) }

func (n *localNode) ctl(ctx context.Context, args ...string) (string, error) {
	tool := filepath.Join(filepath.Dir(n.site.server), "rabbitmqctl")
	cmd := exec.CommandContext(ctx, tool, append([]string{"--quiet"}, args...)...) //nolint:gosec // arguments are the test's own
	cmd.Env = n.env
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("brokertest: rabbitmqctl %s: %w: %s%s", strings.Join(args, " "), err, stdout.Bytes(), stderr.Bytes())
	}
	return stdout.String(), nil
}

func (n *localNode) close(ctx context.Context) error {
	err := n.end(ctx, syscall.SIGKILL)
	n.site.mu.Lock()
	n.site.nodes = slices.DeleteFunc(n.site.nodes, func(other *localNode) bool { return other == n })
	n.site.mu.Unlock()
	return errors.Join(err, n.site.closeIfEmpty(ctx))
}

// disconnect makes the node refuse its peers: with another cookie for each of them, neither side can set up a
// connection, and those that exist are closed.
func (n *localNode) disconnect(ctx context.Context) error {
	_, err := n.ctl(ctx, "eval", `[begin erlang:set_cookie(N, cut_off), erlang:disconnect_node(N) end || N <- nodes()].`)
	return err
}

// reconnect undoes disconnect.
func (n *localNode) reconnect(ctx context.Context) error {
	var peers []string
	n.site.mu.Lock()
	for _, other := range n.site.nodes {
		if other != n {
			peers = append(peers, other.name)
		}
	}
	n.site.mu.Unlock()
	_, err := n.ctl(ctx, "eval", fmt.Sprintf(
		`[begin erlang:set_cookie(N, erlang:get_cookie()), net_kernel:connect_node(N) end || N <- ['%s']].`,
		strings.Join(peers, "','")))
	return err
}
