package ladder_test

import (
	"context"
	"encoding/binary"
	"flag"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

var soak = flag.Duration("soak", 0, "how long TestSoak runs; 0 skips it")

// TestSoak publishes and consumes at a steady rate while connections are cut,
// and looks for anything that grows.
func TestSoak(t *testing.T) {
	if *soak == 0 {
		t.Skip("takes minutes: make soak")
	}
	const rate, publishers = 500, 16 // messages per second
	l, direct := faultLadder(t), brokertest.VHost(t)
	proxy, through := brokertest.Proxied(t, direct)

	// What is counted is allocated beforehand, so as not to grow itself.
	most := int(soak.Seconds()+10) * rate
	arrived := make([]atomic.Uint32, most)
	confirmed := make([]atomic.Bool, most)
	var early atomic.Int64
	stop := start(t, l, ladder.ConsumerConfig{URLs: []string{through}, Connection: impatient, Queue: "work", Destinations: []string{"work"}},
		func(_ context.Context, d *ladder.Delivery) error {
			arrived[binary.BigEndian.Uint64(d.Body)].Add(1)
			if d.Lateness < 0 {
				early.Add(1)
			}
			return nil
		})
	p, err := ladder.NewPublisher(within(t), l, ladder.PublisherConfig{URLs: []string{through}, Connection: impatient, Timeout: 2 * patience})
	require.NoError(t, err)

	var published, cuts atomic.Int64
	work := make(chan int)
	var publishing sync.WaitGroup
	for range publishers {
		publishing.Go(func() {
			for i := range work {
				err := p.PublishDelayed(context.WithoutCancel(t.Context()), "work", rand.N(l.Horizon()),
					amqp.Publishing{Body: binary.BigEndian.AppendUint64(nil, uint64(i))})
				if assert.NoError(t, err) {
					confirmed[i].Store(true)
				}
				published.Add(1)
			}
		})
	}
	ending := time.After(*soak)
	tick := time.NewTicker(time.Second / rate)
	defer tick.Stop()
	cut := time.NewTimer(time.Second)
	sample := time.NewTicker(max(*soak/30, time.Second))
	defer sample.Stop()
	type reading struct {
		goroutines int
		heap       uint64
	}
	var readings []reading
	for n, running := 0, true; running && n < most; {
		select {
		case <-tick.C:
			work <- n
			n++
		case <-cut.C:
			proxy.Cut()
			cuts.Add(1)
			cut.Reset(time.Second + rand.N(4*time.Second))
		case <-sample.C:
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			readings = append(readings, reading{runtime.NumGoroutine(), m.HeapAlloc})
			t.Logf("%7d published, %3d cuts, %3d goroutines, heap %5.1f MiB", published.Load(), cuts.Load(), runtime.NumGoroutine(), float64(m.HeapAlloc)/(1<<20))
		case <-ending:
			running = false
		}
	}
	close(work)
	publishing.Wait()
	closePublisher(t, p)
	count := func() (missing, duplicates int) {
		for i := range arrived {
			n := int(arrived[i].Load())
			if confirmed[i].Load() && n == 0 {
				missing++
			}
			duplicates += max(n-1, 0)
		}
		return missing, duplicates
	}
	require.Eventually(t, func() bool { missing, _ := count(); return missing == 0 }, 2*patience, 100*time.Millisecond)
	_, duplicates := count()
	t.Logf("%d published, %d cuts, %d duplicates, %d early", published.Load(), cuts.Load(), duplicates, early.Load())
	assert.Zero(t, early.Load())
	require.NoError(t, stop())

	// The second half must look like the first: the least of each, since a
	// reading may fall into a reconnect.
	half := len(readings) / 2
	require.Positive(t, half)
	least := func(readings []reading) reading {
		low := readings[0]
		for _, r := range readings {
			low.goroutines, low.heap = min(low.goroutines, r.goroutines), min(low.heap, r.heap)
		}
		return low
	}
	first, second := least(readings[:half]), least(readings[half:])
	assert.LessOrEqual(t, second.goroutines, first.goroutines+2)
	assert.LessOrEqual(t, second.heap, first.heap+first.heap/10+1<<20)
}
