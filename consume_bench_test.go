package ladder_test

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

// BenchmarkConsume empties a queue with a consumer whose handler does nothing, and
// with a bare loop that acknowledges each message, in turn and with the same prefetch. Each
// round counts from its first message to its last. The ratio is that of the medians of the
// throughputs; use -benchtime 10x or so.
func BenchmarkConsume(b *testing.B) {
	const messages, prefetch, concurrency = 20_000, 100, 16
	l, err := ladder.New(ladder.Config{Name: "bench", Levels: 8})
	require.NoError(b, err)
	url := brokertest.VHost(b)
	p := newPublisher(b, l, ladder.PublisherConfig{URLs: []string{url}})
	ch := openChannel(b, url)
	const queue = "bench"
	declareBound(b, ch, l, queue, queue, l.RetryDestination(queue))
	_, err = ch.QueueDeclare(ladder.FailedQueue(queue), true, false, false, false, amqp.Table{"x-queue-type": "quorum"})
	require.NoError(b, err)
	batch := make([]ladder.Message, messages)
	for i := range batch {
		batch[i] = ladder.Message{Destination: queue, Publishing: amqp.Publishing{Body: make([]byte, 256)}}
	}

	var bare, consumer []float64
	variants := []func(){
		func() { bare = append(bare, messages/consumeBare(b, url, queue, messages, prefetch).Seconds()) },
		func() {
			consumer = append(consumer, messages/consumeWithLadder(b, l, ladder.ConsumerConfig{
				URLs: []string{url}, Queue: queue, Passive: true, Prefetch: prefetch, Concurrency: concurrency,
			}, messages).Seconds())
		},
	}
	for b.Loop() {
		for _, variant := range variants {
			require.NoError(b, p.PublishBatch(b.Context(), batch))
			waitForCount(b, url, queue, messages)
			variant()
		}
		slices.Reverse(variants)
	}
	b.ReportMetric(median(bare), "bare/s")
	b.ReportMetric(median(consumer), "consumer/s")
	b.ReportMetric(median(consumer)/median(bare), "ratio")
}

func median(values []float64) float64 {
	slices.Sort(values)
	n := len(values)
	return (values[(n-1)/2] + values[n/2]) / 2
}

func consumeBare(b *testing.B, url, queue string, messages, prefetch int) time.Duration {
	b.Helper()
	conn := openConnection(b, url)
	defer func() { _ = conn.Close() }()
	ch := channelOn(b, conn)
	require.NoError(b, ch.Qos(prefetch, 0, false))
	deliveries, err := ch.Consume(queue, "", false, false, false, false, nil)
	require.NoError(b, err)
	var start time.Time
	for n := range messages {
		d := <-deliveries
		if n == 0 {
			start = time.Now()
		}
		require.NoError(b, d.Ack(false))
	}
	end := time.Now()
	// The broker forgets acknowledgements that it is still holding back when
	// the channel closes: the next round would have these messages as well.
	time.Sleep(300 * time.Millisecond)
	return end.Sub(start)
}

func consumeWithLadder(b *testing.B, l *ladder.Ladder, config ladder.ConsumerConfig, messages int64) time.Duration {
	b.Helper()
	c, err := ladder.NewConsumer(l, config)
	require.NoError(b, err)
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	var n atomic.Int64
	started, finished, ended := make(chan time.Time, 1), make(chan time.Time, 1), make(chan error, 1)
	go func() {
		ended <- c.Run(ctx, func(context.Context, *ladder.Delivery) error {
			switch n.Add(1) {
			case 1:
				started <- time.Now()
			case messages:
				finished <- time.Now()
			}
			return nil
		})
	}()
	end := receive(b, finished)
	cancel()
	require.NoError(b, receive(b, ended))
	return end.Sub(<-started)
}
