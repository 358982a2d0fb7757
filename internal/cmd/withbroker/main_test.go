package main

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder/internal/brokertest"
)

func TestMain(m *testing.M) { brokertest.Main(m) }

func TestCommandGetsTheBrokerAndGivesItsStatus(t *testing.T) {
	t.Parallel()
	broker := brokertest.For(t).Broker
	file := filepath.Join(t.TempDir(), "env")
	script := `printf '%s %s %s' "$LADDER_AMQP_URL" "$LADDER_MANAGEMENT_URL" "$LADDER_BROKER_VERSION" >"$1"; exit 7`
	require.Equal(t, 7, runCommand([]string{"sh", "-c", script, "sh", file}, broker, nil))
	got, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, broker.AMQPURL()+" "+broker.ManagementURL()+" "+broker.Version(), string(got))
}

func TestExitStatus(t *testing.T) {
	t.Parallel()
	broker := brokertest.For(t).Broker
	require.Equal(t, 0, runCommand([]string{"true"}, broker, nil))
	require.Equal(t, 128+int(syscall.SIGKILL), runCommand([]string{"sh", "-c", "kill -9 $$"}, broker, nil))
	require.Equal(t, exitNoStart, runCommand([]string{"/no/such/command"}, broker, nil))
}

func TestSignalsReachTheCommand(t *testing.T) {
	t.Parallel()
	broker := brokertest.For(t).Broker
	ready := filepath.Join(t.TempDir(), "ready")
	signals := make(chan os.Signal, 1)
	status := make(chan int, 1)
	go func() {
		script := `trap 'exit 3' TERM; : >"$1"; while :; do sleep 0.01; done`
		status <- runCommand([]string{"sh", "-c", script, "sh", ready}, broker, signals)
	}()
	require.Eventually(t, func() bool {
		_, err := os.Stat(ready)
		return err == nil
	}, 10*time.Second, 10*time.Millisecond)
	signals <- syscall.SIGTERM
	require.Equal(t, 3, <-status)
}
