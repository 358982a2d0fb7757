package brokertest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	tcexec "github.com/testcontainers/testcontainers-go/exec"
	tclog "github.com/testcontainers/testcontainers-go/log"
)

const (
	defaultImage = "rabbitmq:4-management"
	// pullTimeout bounds the attempt to fetch the image: long enough for a slow line, short enough to fall back.
	pullTimeout = 90 * time.Second
	// portAttempts is how often a container is created anew because someone else took one of its ports.
	portAttempts = 5
)

var (
	amqpPort       = network.MustParsePort("5672/tcp")
	managementPort = network.MustParsePort("15672/tcp")
)

// dockerNode is a RabbitMQ container. Its ports on the host are chosen here and not by Docker, which would choose others
// at every start.
type dockerNode struct {
	engine    client.APIClient
	container *testcontainers.DockerContainer
	hostname  string
	cluster   *dockerCluster
}

// dockerCluster is what the containers of one cluster share.
type dockerCluster struct {
	provider *testcontainers.DockerProvider
	image    string
	host     string // where published ports are reached
	cookie   string
	network  string // the name of the cluster's own network; "" for a single node
	guard    *guard // nil without the docker command line

	mu         sync.Mutex
	containers []string // those not closed yet
}

// prepareTestcontainers sets what testcontainers-go keeps for the whole process,
// once: tests start brokers at the same time.
var prepareTestcontainers = sync.OnceValue(func() error {
	tclog.SetDefault(tclog.NewNoopLogger()) // it greets at every start
	// The reaper is a second image, and does after a crash what our guard does too.
	if os.Getenv("TESTCONTAINERS_RYUK_DISABLED") != "" {
		return nil
	}
	return os.Setenv("TESTCONTAINERS_RYUK_DISABLED", "true")
})

// startDocker starts a cluster of n containers.
func startDocker(ctx context.Context, n int) ([]*Broker, error) {
	if err := prepareTestcontainers(); err != nil {
		return nil, fmt.Errorf("brokertest: %w", err)
	}
	provider, err := testcontainers.NewDockerProvider(testcontainers.WithLogger(tclog.NewNoopLogger()))
	if err != nil {
		return nil, fmt.Errorf("docker: engine %w: %w", errUnavailable, err)
	}
	defer provider.Close() //nolint:errcheck // only idle connections
	image := os.Getenv("LADDER_BROKER_IMAGE")
	if image == "" {
		image = defaultImage
	}
	if err := ensureImage(ctx, provider, image); err != nil {
		return nil, err
	}
	host, err := dockerHost(ctx, provider)
	if err != nil {
		return nil, err
	}

	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	cluster := &dockerCluster{provider: provider, image: image, host: host, cookie: rand.Text()}
	if err := cluster.prepare(ctx, n); err != nil {
		return nil, errors.Join(err, cluster.closeIfEmpty(context.WithoutCancel(ctx)))
	}
	brokers, err := startNodes(ctx, n, cluster.add)
	if err != nil {
		return nil, errors.Join(err, cluster.closeIfEmpty(context.WithoutCancel(ctx)))
	}
	return brokers, nil
}

// ensureImage pulls the image if the engine does not have it.
func ensureImage(ctx context.Context, provider *testcontainers.DockerProvider, image string) error {
	if _, err := provider.Client().ImageInspect(ctx, image); err == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, pullTimeout)
	defer cancel()
	pull, err := provider.Client().ImagePull(ctx, image, client.ImagePullOptions{})
	if err == nil {
		defer pull.Close() //nolint:errcheck // read to its end
		err = pull.Wait(ctx)
	}
	if err != nil {
		return fmt.Errorf("docker: image %s %w: %w", image, errUnavailable, err)
	}
	return nil
}

// dockerHost is the host on which published ports are reached. An engine behind a Unix socket publishes them on this
// machine; testcontainers would take the default gateway instead on machines that have a /.dockerenv, although most of
// those run an engine of their own. TESTCONTAINERS_HOST_OVERRIDE is for the others.
func dockerHost(ctx context.Context, provider *testcontainers.DockerProvider) (string, error) {
	if host := os.Getenv("TESTCONTAINERS_HOST_OVERRIDE"); host != "" {
		return host, nil
	}
	if strings.HasPrefix(provider.Client().DaemonHost(), "unix:") {
		return "127.0.0.1", nil
	}
	host, err := provider.DaemonHost(ctx)
	if err != nil {
		return "", fmt.Errorf("docker: the engine's host is %w: %w", errUnavailable, err)
	}
	return host, nil
}

func (c *dockerCluster) prepare(ctx context.Context, n int) (err error) {
	if _, missing := exec.LookPath("docker"); missing == nil {
		if c.guard, err = newGuard(); err != nil {
			return err
		}
	}
	if n == 1 {
		return nil
	}
	name := uniqueName("ladder-brokertest")
	_, err = c.provider.Client().NetworkCreate(ctx, name, client.NetworkCreateOptions{Driver: "bridge", Labels: testcontainers.GenericLabels()})
	if err != nil {
		return fmt.Errorf("brokertest: creating a Docker network: %w", err)
	}
	c.network = name
	return c.tellGuard()
}

// tellGuard names to the guard what exists now. It is called with mu held, or before any container exists.
func (c *dockerCluster) tellGuard() error {
	if c.guard == nil {
		return nil
	}
	var command string
	if len(c.containers) > 0 {
		command = "docker rm --force --volumes " + strings.Join(c.containers, " ") + " >/dev/null 2>&1; "
	}
	if c.network != "" {
		command += "docker network rm " + c.network + " >/dev/null 2>&1; "
	}
	return c.guard.set(command + ":")
}

// add starts one more container; those with a number above 1 join the first.
func (c *dockerCluster) add(ctx context.Context, number int) (*Broker, error) {
	for attempt := 1; ; attempt++ {
		ports, err := freePorts(ctx, 2)
		if err != nil {
			return nil, err
		}
		ctr, err := testcontainers.Run(ctx, c.image, c.options(number, ports[0], ports[1])...)
		if err == nil {
			return c.adopt(ctr, number, ports[0], ports[1])
		}
		taken := strings.Contains(err.Error(), "already allocated") || strings.Contains(err.Error(), "already in use")
		err = fmt.Errorf("brokertest: starting a container of %s: %w", c.image, err)
		if err = errors.Join(err, testcontainers.TerminateContainer(ctr)); !taken || attempt == portAttempts {
			return nil, err
		}
	}
}

// options describes the container with a number and its ports on the host.
func (c *dockerCluster) options(number, amqp, management int) []testcontainers.ContainerCustomizer {
	hostname := dockerName(number)
	config := commonConfig
	if number > 1 {
		config += joinConfig("rabbit@" + dockerName(1))
	}
	// Where this machine is the host, nobody else can reach the broker.
	bind := netip.IPv4Unspecified()
	if c.host == "127.0.0.1" || c.host == "localhost" {
		bind = netip.MustParseAddr("127.0.0.1")
	}
	binding := func(port int) []network.PortBinding {
		return []network.PortBinding{{HostIP: bind, HostPort: strconv.Itoa(port)}}
	}
	options := []testcontainers.ContainerCustomizer{
		testcontainers.WithConfigModifier(func(cfg *container.Config) { cfg.Hostname = hostname }),
		testcontainers.WithExposedPorts(amqpPort.String(), managementPort.String()),
		testcontainers.WithHostConfigModifier(func(h *container.HostConfig) {
			h.PortBindings = network.PortMap{amqpPort: binding(amqp), managementPort: binding(management)}
		}),
		testcontainers.WithFiles(
			file("/etc/rabbitmq/conf.d/99-brokertest.conf", config, 0o644),
			file("/etc/rabbitmq/enabled_plugins", enabledPlugins, 0o644),
			file("/var/lib/rabbitmq/.erlang.cookie", c.cookie, 0o400),
		),
	}
	if c.network == "" {
		return options
	}
	// The ports are published by way of the first network. So the node can leave the second, which carries what the
	// nodes have to say to each other, and stay within reach of its clients.
	return append(options, testcontainers.CustomizeRequest(testcontainers.GenericContainerRequest{
		ContainerRequest: testcontainers.ContainerRequest{
			Networks:       []string{"bridge", c.network},
			NetworkAliases: map[string][]string{c.network: {hostname}},
		},
	}))
}

// adopt takes over a container that was started.
func (c *dockerCluster) adopt(ctr *testcontainers.DockerContainer, number, amqp, management int) (*Broker, error) {
	ctr.SetProvider(c.provider) // whose idle connections we close
	c.mu.Lock()
	defer c.mu.Unlock()
	c.containers = append(c.containers, ctr.GetContainerID())
	guest := url.UserPassword("guest", "guest")
	return &Broker{
		amqp:       &url.URL{Scheme: "amqp", User: guest, Host: net.JoinHostPort(c.host, strconv.Itoa(amqp)), Path: "/"},
		management: &url.URL{Scheme: "http", User: guest, Host: net.JoinHostPort(c.host, strconv.Itoa(management))},
		source:     "docker " + c.image,
		node:       &dockerNode{engine: c.provider.Client(), container: ctr, hostname: dockerName(number), cluster: c},
	}, c.tellGuard()
}

func dockerName(number int) string { return "ladder" + strconv.Itoa(number) }

func file(path, content string, mode int64) testcontainers.ContainerFile {
	return testcontainers.ContainerFile{Reader: strings.NewReader(content), ContainerFilePath: path, FileMode: mode}
}

func (c *dockerCluster) closeIfEmpty(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.containers) > 0 {
		return nil
	}
	var errs []error
	if c.network != "" {
		_, err := c.provider.Client().NetworkRemove(ctx, c.network, client.NetworkRemoveOptions{})
		errs = append(errs, err)
		c.network = ""
	}
	if c.guard != nil {
		errs = append(errs, c.guard.set(":"), c.guard.close())
		c.guard = nil
	}
	errs = append(errs, c.provider.Close())
	return errors.Join(errs...)
}

// done gives an engine call its name when it failed, and closes the connection that it left idle.
func (n *dockerNode) done(what string, err error) error {
	_ = n.engine.Close() // only idle connections; the client can be used again
	if err != nil {
		return fmt.Errorf("brokertest: %s container %s: %w", what, n.hostname, err)
	}
	return nil
}

func (n *dockerNode) start(ctx context.Context) error {
	_, err := n.engine.ContainerStart(ctx, n.container.GetContainerID(), client.ContainerStartOptions{})
	return n.done("starting", err)
}

func (n *dockerNode) stop(ctx context.Context) error {
	seconds := 60
	_, err := n.engine.ContainerStop(ctx, n.container.GetContainerID(), client.ContainerStopOptions{Timeout: &seconds})
	return n.done("stopping", err)
}

func (n *dockerNode) kill(ctx context.Context) error {
	id := n.container.GetContainerID()
	if _, err := n.engine.ContainerKill(ctx, id, client.ContainerKillOptions{Signal: "SIGKILL"}); err != nil {
		return n.done("killing", err)
	}
	wait := n.engine.ContainerWait(ctx, id, client.ContainerWaitOptions{Condition: container.WaitConditionNotRunning})
	select {
	case err := <-wait.Error:
		return n.done("killing", err)
	case <-wait.Result:
		return n.done("killing", nil)
	}
}

func (n *dockerNode) pause(ctx context.Context) error {
	_, err := n.engine.ContainerPause(ctx, n.container.GetContainerID(), client.ContainerPauseOptions{})
	return n.done("pausing", err)
}

func (n *dockerNode) resume(ctx context.Context) error {
	_, err := n.engine.ContainerUnpause(ctx, n.container.GetContainerID(), client.ContainerUnpauseOptions{})
	return n.done("resuming", err)
}

func (n *dockerNode) ctl(ctx context.Context, args ...string) (string, error) {
	code, output, err := n.container.Exec(ctx, append([]string{"rabbitmqctl", "--quiet"}, args...), tcexec.Multiplexed())
	if err != nil {
		return "", n.done("running rabbitmqctl in", err)
	}
	text, err := io.ReadAll(output)
	if err != nil {
		return "", n.done("reading from rabbitmqctl in", err)
	}
	if code != 0 {
		err = fmt.Errorf("rabbitmqctl %s: exit status %d: %s", strings.Join(args, " "), code, text)
	}
	return string(text), n.done("in", err)
}

func (n *dockerNode) exited(ctx context.Context) error {
	state, err := n.container.State(ctx)
	if err != nil || state.Running {
		return n.done("looking at", err)
	}
	logs, err := n.container.Logs(ctx)
	if err != nil {
		return n.done("reading the log of", err)
	}
	defer logs.Close() //nolint:errcheck // only read
	log, err := io.ReadAll(logs)
	if err != nil {
		return n.done("reading the log of", err)
	}
	return n.done("in", fmt.Errorf("exit status %d, its log ends with:\n%s", state.ExitCode, lastLines(log)))
}

func (n *dockerNode) disconnect(ctx context.Context) error {
	if n.cluster.network == "" {
		return nil
	}
	_, err := n.engine.NetworkDisconnect(ctx, n.cluster.network, client.NetworkDisconnectOptions{Container: n.container.GetContainerID()})
	return n.done("disconnecting", err)
}

func (n *dockerNode) reconnect(ctx context.Context) error {
	if n.cluster.network == "" {
		return nil
	}
	_, err := n.engine.NetworkConnect(ctx, n.cluster.network, client.NetworkConnectOptions{
		Container:      n.container.GetContainerID(),
		EndpointConfig: &network.EndpointSettings{Aliases: []string{n.hostname}},
	})
	return n.done("reconnecting", err)
}

func (n *dockerNode) close(ctx context.Context) error {
	id := n.container.GetContainerID()
	_, err := n.engine.ContainerRemove(ctx, id, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
	err = n.done("removing", err)
	n.cluster.mu.Lock()
	n.cluster.containers = slices.DeleteFunc(n.cluster.containers, func(other string) bool { return other == id })
	n.cluster.mu.Unlock()
	return errors.Join(err, n.cluster.closeIfEmpty(ctx))
}
