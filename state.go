package ladder

import "fmt"

// A ConsumerState is what a [Consumer] is doing.
type ConsumerState string

// The states of a consumer.
const (
	StateNew        ConsumerState = "new"        // Run was not called yet
	StateConnecting ConsumerState = "connecting" // there is no connection, or not yet
	StateConsuming  ConsumerState = "consuming"  // messages are handled
	StatePaused     ConsumerState = "paused"     // connected, and takes no messages until Resume
	StateStopping   ConsumerState = "stopping"   // Run's context has ended, handlers are at work
	StateStopped    ConsumerState = "stopped"    // Run has returned
)

// State returns what the consumer is doing.
func (c *Consumer) State() ConsumerState {
	state, _ := c.state()
	return state
}

// Healthy returns nil while the consumer takes messages, or would if it were not paused, and can send
// messages on for another attempt: in a readiness probe. Otherwise the error tells
// what it is doing, and what keeps it from having a connection; it wraps [ErrNotConnected]
// where it is that.
func (c *Consumer) Healthy() error {
	state, err := c.state()
	switch {
	case err != nil:
		return fmt.Errorf("ladder: consumer of queue %s is %s: %w", c.config.Queue, state, err)
	case state != StateConsuming && state != StatePaused:
		return fmt.Errorf("ladder: consumer of queue %s is %s", c.config.Queue, state)
	}
	return nil
}

// state returns the state, and why a connection is missing.
func (c *Consumer) state() (ConsumerState, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.phase != StateConnecting {
		return c.phase, nil
	}
	if c.keeper == nil {
		return StateConnecting, ErrNotConnected
	}
	if s, err := c.keeper.Present(); s == nil {
		if err != nil {
			return StateConnecting, fmt.Errorf("%w: %w", ErrNotConnected, err)
		}
		return StateConnecting, ErrNotConnected
	}
	state := StateConsuming
	if c.paused {
		state = StatePaused
	}
	if err := c.publisher.obstacle(); err != nil {
		return state, fmt.Errorf("its connection for retries: %w", err)
	}
	return state, nil
}

// stopping tells whether Run takes no more messages.
func (c *Consumer) stopping() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.phase == StateStopping || c.phase == StateStopped
}

// enter goes from one phase to another; it returns false if the consumer is not
// in the first.
func (c *Consumer) enter(from, to ConsumerState) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.phase != from {
		return false
	}
	c.phase = to
	return true
}

// Pause makes the consumer take no more messages until [Consumer.Resume]. It does not
// wait: handlers at work, and those just beginning, go on, and what they return counts as always. The
// connection stays. Messages that are here already go back into the queue, where
// other consumers get them. It can be called at any time, also before Run.
func (c *Consumer) Pause() { c.setPaused(true) }

// Resume undoes [Consumer.Pause].
func (c *Consumer) Resume() { c.setPaused(false) }

func (c *Consumer) setPaused(paused bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.paused == paused {
		return
	}
	c.paused = paused
	close(c.changed)
	c.changed = make(chan struct{})
}

// pausing tells whether the consumer is paused, and returns a channel that is
// closed when that changes.
func (c *Consumer) pausing() (paused bool, changed <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.paused, c.changed
}
