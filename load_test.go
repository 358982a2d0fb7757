package ladder_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
)

// A load is many publishes from many goroutines, and what is known of each.
type load struct {
	ladder.NopObserver
	mu        sync.Mutex
	confirmed map[string]bool
	failed    map[string]error
	attempts  int
	sessions  int
}

func (o *load) Published(_ context.Context, e ladder.PublishEvent) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.attempts += e.Attempts
}

func (o *load) SessionUp(ladder.SessionEvent) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sessions++
}

func newLoad() *load { return &load{confirmed: map[string]bool{}, failed: map[string]error{}} }

// run publishes n messages to "work" from some goroutines, with delays below
// most.
func (o *load) run(ctx context.Context, p *ladder.Publisher, n, goroutines int, most time.Duration) {
	round := o.progress()
	work := make(chan int)
	var publishing sync.WaitGroup
	for range goroutines {
		publishing.Go(func() {
			for i := range work {
				id := fmt.Sprintf("%p-%d-%d", o, round, i)
				err := p.PublishDelayed(ctx, "work", rand.N(most), amqp.Publishing{MessageId: id, Body: body(i)})
				o.mu.Lock()
				if err == nil {
					o.confirmed[id] = true
				} else {
					o.failed[id] = err
				}
				o.mu.Unlock()
			}
		})
	}
	for i := range n {
		work <- i
	}
	close(work)
	publishing.Wait()
}

func (o *load) progress() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.confirmed) + len(o.failed)
}

// tally is what a consumer has seen.
type tally struct {
	mu    sync.Mutex
	seen  map[string]int
	early []string
	late  time.Duration
}

// count is a Handler.
func (c *tally) count(_ context.Context, d *ladder.Delivery) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.seen == nil {
		c.seen = map[string]int{}
	}
	c.seen[d.MessageId]++
	if d.Lateness < 0 {
		c.early = append(c.early, fmt.Sprintf("%s by %v", d.MessageId, -d.Lateness))
	}
	c.late = max(c.late, d.Lateness)
	return nil
}

// check waits until all confirmed messages have arrived and none waits any
// more, and checks that every error told the truth.
func (o *load) check(t *testing.T, c *tally) (duplicates int) {
	t.Helper()
	if missing := o.wait(c, 4*patience); len(missing) > 0 {
		require.Fail(t, "lost", "%d confirmed messages never arrived, such as %s", len(missing), missing[0])
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	o.mu.Lock()
	defer o.mu.Unlock()
	require.Empty(t, c.early)
	unknown := 0
	for id, err := range o.failed {
		if ladder.SafeToRetry(err) {
			assert.Zero(t, c.seen[id], "%s arrived, but its error says that it was not sent: %v", id, err)
		} else {
			require.ErrorIs(t, err, ladder.ErrOutcomeUnknown)
			unknown++
		}
	}
	arrivals := 0
	for _, n := range c.seen {
		arrivals += n
		duplicates += n - 1
	}
	t.Logf("%d confirmed, %d failed (%d of them unknown), %d attempts in %d sessions; %d arrivals, %d duplicates, none early, at most %v late",
		len(o.confirmed), len(o.failed), unknown, o.attempts, o.sessions, arrivals, duplicates, c.late.Round(time.Millisecond))
	return duplicates
}

// wait waits until all confirmed messages have arrived, and returns those that
// have not in time.
func (o *load) wait(c *tally, timeout time.Duration) (missing []string) {
	for deadline := time.Now().Add(timeout); ; {
		missing = o.missing(c)
		if len(missing) == 0 || time.Now().After(deadline) {
			return missing
		}
		time.Sleep(50 * time.Millisecond) // between two looks at the condition
	}
}

func (o *load) missing(c *tally) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	o.mu.Lock()
	defer o.mu.Unlock()
	var missing []string
	for id := range o.confirmed {
		if c.seen[id] == 0 {
			missing = append(missing, id)
		}
	}
	return missing
}

// repeats returns how many attempts were made beyond the first of each message: no
// more messages than that can have come twice by the publisher's doing.
func (o *load) repeats() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.attempts - len(o.confirmed) - len(o.failed)
}
