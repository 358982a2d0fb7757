// Command withbroker runs a command with a RabbitMQ broker at hand:
//
//	go run ./internal/cmd/withbroker -- go test ./...
//
// It takes or starts a broker as internal/brokertest does, and gives the command its URLs and version in
// LADDER_AMQP_URL, LADDER_MANAGEMENT_URL and LADDER_BROKER_VERSION. It passes signals on, ends the broker after the
// command, and exits with the command's status.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"github.com/rabbitladder/ladder/internal/brokertest"
)

const (
	exitUsage   = 2
	exitNoStart = 127 // what a shell returns for a command that it cannot start
)

func main() {
	args := os.Args[1:]
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 {
		fmt.Fprintln(os.Stderr, "usage: withbroker -- command [argument ...]")
		os.Exit(exitUsage)
	}
	os.Exit(run(args))
}

// run starts the broker, runs the command and returns its exit status.
func run(args []string) int {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)

	broker, err := start(signals)
	if err != nil {
		fmt.Fprintln(os.Stderr, "withbroker:", err)
		return 1
	}
	code := runCommand(args, broker, signals)
	if err := brokertest.CloseShared(); err != nil {
		fmt.Fprintln(os.Stderr, "withbroker: ending the broker:", err)
		code = max(code, 1)
	}
	return code
}

// start gives up when a signal arrives.
func start(signals <-chan os.Signal) (*brokertest.Broker, error) {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	started := make(chan struct{})
	defer close(started)
	go func() {
		select {
		case sig := <-signals:
			cancel(fmt.Errorf("stopped by signal: %s", sig))
		case <-started:
		}
	}()
	return brokertest.Shared(ctx)
}

func runCommand(args []string, broker *brokertest.Broker, signals <-chan os.Signal) int {
	cmd := exec.Command(args[0], args[1:]...) //nolint:noctx,gosec // running what it is given is its purpose; it ends by signals
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(
		os.Environ(),
		"LADDER_AMQP_URL="+broker.AMQPURL(),
		"LADDER_MANAGEMENT_URL="+broker.ManagementURL(),
		"LADDER_BROKER_VERSION="+broker.Version(),
	)
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "withbroker:", err)
		return exitNoStart
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case sig := <-signals:
			_ = cmd.Process.Signal(sig) // if it has just ended, that is what the signal asked for
		case err := <-ended:
			return exitStatus(err)
		}
	}
}

// exitStatus is the status as a shell reports it: 128 and the signal's number for a command that a signal ended.
func exitStatus(err error) int {
	if err == nil {
		return 0
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		fmt.Fprintln(os.Stderr, "withbroker:", err)
		return 1
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal())
	}
	return exit.ExitCode()
}
