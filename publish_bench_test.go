package ladder_test

import (
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

// BenchmarkPublish publishes the same thousand messages one after another, from
// 64 goroutines, and as a batch: compare the three within one run.
func BenchmarkPublish(b *testing.B) {
	const messages = 1000
	l, err := ladder.New(ladder.Config{Name: "bench", Levels: 8, QueueType: ladder.Quorum})
	require.NoError(b, err)
	p := newPublisher(b, l, ladder.PublisherConfig{URLs: []string{brokertest.For(b).URL}})
	batch := make([]ladder.Message, messages)
	for i := range batch {
		batch[i] = ladder.Message{Destination: "bench", Delay: time.Duration(1+i%255) * time.Second, Publishing: amqp.Publishing{Body: make([]byte, 256)}}
	}
	one := func(b *testing.B, m ladder.Message) {
		b.Helper()
		if err := p.PublishDelayed(b.Context(), m.Destination, m.Delay, m.Publishing); err != nil {
			b.Error(err)
		}
	}
	for name, publish := range map[string]func(*testing.B){
		"one by one": func(b *testing.B) {
			b.Helper()
			for _, m := range batch {
				one(b, m)
			}
		},
		"64 goroutines": func(b *testing.B) {
			b.Helper()
			work := make(chan ladder.Message)
			var publishing sync.WaitGroup
			for range 64 {
				publishing.Go(func() {
					for m := range work {
						one(b, m)
					}
				})
			}
			for _, m := range batch {
				work <- m
			}
			close(work)
			publishing.Wait()
		},
		"batch": func(b *testing.B) {
			b.Helper()
			require.NoError(b, p.PublishBatch(b.Context(), batch))
		},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				publish(b)
			}
			b.ReportMetric(float64(b.N*messages)/b.Elapsed().Seconds(), "messages/s")
		})
	}
}
