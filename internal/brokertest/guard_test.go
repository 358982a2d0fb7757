//go:build unix

package brokertest

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestGuardCleansUpAfterKill lets a process start another and kills it: the guard must end what it started and remove
// its directory.
func TestGuardCleansUpAfterKill(t *testing.T) {
	if dir := os.Getenv("BROKERTEST_GUARDED_DIR"); dir != "" {
		liveAndDie(t, dir)
	}
	t.Parallel()
	dir := t.TempDir() + "/guarded"
	require.NoError(t, os.Mkdir(dir, 0o700))
	victim := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestGuardCleansUpAfterKill$")
	victim.Env = append(os.Environ(), "BROKERTEST_GUARDED_DIR="+dir)
	out, err := victim.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, victim.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	group, err := strconv.Atoi(strings.TrimSpace(line))
	require.NoError(t, err)
	require.NoError(t, victim.Process.Kill())
	require.Error(t, victim.Wait())
	require.Eventually(t, func() bool {
		_, err := os.Stat(dir)
		return syscall.Kill(-group, 0) == syscall.ESRCH && os.IsNotExist(err)
	}, 20*time.Second, 10*time.Millisecond)
}

// liveAndDie plays a test binary with a broker that is a sleep, and waits to be killed.
func liveAndDie(t *testing.T, dir string) {
	t.Helper()
	g, err := newGuard()
	require.NoError(t, err)
	sleep, err := startGroup(exec.CommandContext(t.Context(), "/bin/sh", "-c", "sleep 1000 & sleep 1000"))
	require.NoError(t, err)
	require.NoError(t, g.set(cleanUpCommand([]*group{nil, sleep}, dir)))
	fmt.Println(sleep.id())
	<-sleep.done
	t.Fatal("the sleep ended by itself")
}
