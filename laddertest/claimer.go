package laddertest

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/rabbitladder/ladder"
)

var _ ladder.Claimer = (*Claimer)(nil)

// A Claimer is a [ladder.Claimer] in memory, for tests of handlers with
// [ladder.Deduplicate]. It forgets nothing that was completed. Its zero value is ready for
// use, and it is safe for concurrent use. Do not copy it.
type Claimer struct {
	// Lease is how long a claim holds that is neither completed nor released: after
	// that the next caller gets it. Do not change it after the first claim. Zero or
	// less sets no limit, which is the default.
	Lease time.Duration

	mu        sync.Mutex
	held      map[string]claim
	completed map[string]bool
}

type claim struct {
	holder string
	until  time.Time // zero without a lease
}

// Claim takes the key. It returns true for the first holder, false if the key has been
// completed, and otherwise an error that wraps [ladder.ErrClaimHeld], or ctx's error if it has
// ended.
func (c *Claimer) Claim(ctx context.Context, key, holder string) (first bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.completed[key] {
		return false, nil
	}
	if held, ok := c.held[key]; ok && (held.until.IsZero() || time.Now().Before(held.until)) {
		return false, ladder.ErrClaimHeld
	}
	if c.held == nil {
		c.held = make(map[string]claim)
	}
	var until time.Time
	if c.Lease > 0 {
		until = time.Now().Add(c.Lease)
	}
	c.held[key] = claim{holder, until}
	return true, nil
}

// Complete says that the message has been handled, whether or not the claim is still held. It
// returns ctx's error if it has ended, and nil otherwise.
func (c *Claimer) Complete(ctx context.Context, key, _ string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.completed == nil {
		c.completed = make(map[string]bool)
	}
	c.completed[key] = true
	delete(c.held, key)
	return nil
}

// Release gives up a claim, unless another holder has the key by now. A key that is completed stays
// so. It returns ctx's error if it
// has ended, and nil otherwise.
func (c *Claimer) Release(ctx context.Context, key, holder string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held[key].holder == holder {
		delete(c.held, key)
	}
	return nil
}

// Completed returns the keys that have been completed, sorted. A key is the queue's name, a
// slash, and the MessageId.
func (c *Claimer) Completed() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.completed))
}
