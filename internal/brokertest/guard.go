package brokertest

import (
	"fmt"
	"io"
	"os/exec"
)

// guardScript keeps the last line it reads and runs it when its input ends.
const guardScript = `while IFS= read -r line; do last=$line; done; eval "$last"`

// guard cleans up for a process that can no longer do it: a shell that waits for the end of a pipe whose other end only
// this process holds. However this process ends, by a panic of the test binary or kill -9, the pipe ends with it, and
// the shell runs the command that it was given last.
type guard struct {
	shell *exec.Cmd
	pipe  io.WriteCloser
}

func newGuard() (*guard, error) {
	shell := exec.Command("/bin/sh", "-c", guardScript) //nolint:noctx // it must outlive every context
	shell.SysProcAttr = ownGroup()                      // Ctrl-C in the terminal must not end it before its time
	pipe, err := shell.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("brokertest: starting the guard: %w", err)
	}
	if err := shell.Start(); err != nil {
		return nil, fmt.Errorf("brokertest: starting the guard: %w", err)
	}
	return &guard{shell: shell, pipe: pipe}, nil
}

// set replaces the one-line shell command that runs at the end.
func (g *guard) set(command string) error {
	if _, err := fmt.Fprintln(g.pipe, command); err != nil {
		return fmt.Errorf("brokertest: telling the guard: %w", err)
	}
	return nil
}

// close lets the guard run its command now and waits for it.
func (g *guard) close() error {
	if err := g.pipe.Close(); err != nil {
		return fmt.Errorf("brokertest: ending the guard: %w", err)
	}
	if err := g.shell.Wait(); err != nil {
		return fmt.Errorf("brokertest: cleaning up failed: %w", err)
	}
	return nil
}
