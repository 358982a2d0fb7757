//go:build unix

package brokertest

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"time"
)

// ownGroup makes a child the leader of a process group of its own, so that all it starts can be signalled at once and
// Ctrl-C in the terminal does not reach it.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// group is a child process with what it started.
type group struct {
	leader *exec.Cmd
	done   chan struct{} // closed when the leader has ended
	err    error         // how it ended; read after done
}

func startGroup(cmd *exec.Cmd) (*group, error) {
	cmd.SysProcAttr = ownGroup()
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("brokertest: starting %s: %w", cmd.Path, err)
	}
	g := &group{leader: cmd, done: make(chan struct{})}
	go func() {
		defer close(g.done)
		g.err = cmd.Wait()
	}()
	return g, nil
}

// id is the process group, as kill(1) wants it after a minus sign.
func (g *group) id() int { return g.leader.Process.Pid }

func (g *group) signal(sig syscall.Signal) error {
	if err := syscall.Kill(-g.id(), sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("brokertest: signal to process group %d: %w", g.id(), err)
	}
	return nil
}

// alive reports whether any process of the group is left.
func (g *group) alive() bool { return syscall.Kill(-g.id(), 0) == nil }

// end sends a signal and waits until no process of the group is left.
func (g *group) end(ctx context.Context, sig syscall.Signal) error {
	if err := g.signal(sig); err != nil {
		return err
	}
	for {
		select {
		case <-g.done:
			if !g.alive() {
				return nil
			}
		default:
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("brokertest: process group %d did not end: %w", g.id(), context.Cause(ctx))
		case <-time.After(10 * time.Millisecond):
		}
	}
}
