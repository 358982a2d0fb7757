package readme

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
	"github.com/rabbitladder/ladder/laddertest"
)

// The code of docs/consuming.md, in the order in which it stands there.

type order struct{ Number int }

var errBusy = errors.New("busy")

func bill(_ context.Context, o order) error {
	switch o.Number {
	case 1:
		return errBusy
	case 2:
		return errors.New("no money")
	}
	return nil
}

// consuming: results
func handle(ctx context.Context, d *ladder.Delivery) error {
	var o order
	if err := json.Unmarshal(d.Body, &o); err != nil {
		return ladder.Permanent(err) // no attempt will help
	}
	switch err := bill(ctx, o); {
	case errors.Is(err, errBusy):
		return ladder.RetryAfter(time.Minute) // not an attempt that failed
	case err != nil:
		return fmt.Errorf("attempt %d: %w", d.Attempt, err) // the retry policy decides
	}
	return nil
}

// consuming: end

func replay(ctx context.Context, conn *amqp.Connection, publisher *ladder.Publisher) error {
	// consuming: replay
	ch, err := conn.Channel() // a plain connection of amqp091-go, or one that you have
	if err != nil {
		return err
	}
	defer func() { _ = ch.Close() }() // what was not acknowledged goes back
	recent := func(d *ladder.Delivery) bool {
		return d.Failure != nil && time.Since(d.Failure.Last) < 24*time.Hour
	}
	n, err := publisher.ReplayFailed(ctx, ch, ladder.FailedQueue("mailer"), recent)
	log.Printf("replayed: %d", n)
	return err
	// consuming: end
}

// consuming: service
func serve(l *ladder.Ladder, url string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	publisher, err := ladder.NewPublisher(ctx, l, ladder.PublisherConfig{URLs: []string{url}})
	if err != nil {
		return err
	}
	consumer, err := ladder.NewConsumer(l, ladder.ConsumerConfig{
		URLs:         []string{url},
		Queue:        "mailer",
		Destinations: []string{"email.delivery"},
	})
	if err != nil {
		return err
	}
	err = consumer.Run(ctx, handle) // until the signal
	if ctx.Err() != nil && errors.Is(err, ladder.ErrNotConnected) {
		err = nil // the signal came before the first connection
	}
	closing, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return errors.Join(err, publisher.Close(closing))
}

// consuming: end

func ready(mux *http.ServeMux, consumer *ladder.Consumer) {
	// consuming: ready
	mux.HandleFunc("GET /ready", func(w http.ResponseWriter, _ *http.Request) {
		if err := consumer.Healthy(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
	// consuming: end
}

func deduplicate(ctx context.Context, consumer *ladder.Consumer, handler ladder.Handler, claimer ladder.Claimer, logger *slog.Logger) error {
	// consuming: deduplicate
	handler = ladder.Wrap(handler, ladder.Deduplicate(claimer, logger))
	return consumer.Run(ctx, handler)
	// consuming: end
}

func limited(url string) ladder.ConsumerConfig {
	// consuming: limited
	config := ladder.ConsumerConfig{
		URLs:         []string{url},
		Queue:        "mailer",
		Destinations: []string{"email.delivery"},
		QueueArguments: map[string]any{
			"x-delivery-limit":          20,
			"x-dead-letter-exchange":    "",
			"x-dead-letter-routing-key": ladder.FailedQueue("mailer"),
			"x-dead-letter-strategy":    "at-least-once",
			"x-overflow":                "reject-publish",
		},
	}
	// consuming: end
	return config
}

func declare(ctx context.Context, l *ladder.Ladder, ch *amqp.Channel) error {
	// consuming: passive
	if err := l.Declare(ctx, ch); err != nil {
		return err
	}
	withoutLimit := amqp.Table{"x-queue-type": "quorum", "x-delivery-limit": int64(2147483647)}
	for _, queue := range []string{"mailer", ladder.FailedQueue("mailer")} {
		if _, err := ch.QueueDeclare(queue, true, false, false, false, withoutLimit); err != nil {
			return err
		}
	}
	return l.Bind(ctx, ch, "mailer", "email.delivery", l.RetryDestination("mailer"))
	// consuming: end
}

//nolint:thelper // the document shows a test, not a helper
func testHandler(t *testing.T, l *ladder.Ladder, handler ladder.Handler) {
	t.Helper()
	// consuming: laddertest
	laddertest.Run(t, l, func(t *testing.T, b *laddertest.Broker) {
		b.Consume(ladder.ConsumerConfig{
			Queue:        "mailer",
			Destinations: []string{"email.delivery"},
			Retry:        ladder.FixedSteps{time.Hour, 24 * time.Hour},
		}, handler)
		message := amqp.Publishing{MessageId: "1", Body: []byte("Welcome!")}
		if err := b.Publisher().PublishDelayed(t.Context(), "email.delivery", 42*time.Second, message); err != nil {
			t.Fatal(err)
		}
		b.Advance(42 * time.Second) // the first attempt
		b.Drain()                   // all others
		for _, d := range b.Failed("mailer") {
			t.Errorf("%s failed after %d attempts: %s", d.MessageId, d.Attempt, d.Failure.Reason)
		}
	})
	// consuming: end
}

func TestConsumingCodeWithoutBroker(t *testing.T) {
	t.Parallel()
	l, err := ladder.New(ladder.Config{})
	require.NoError(t, err)
	attempts := 0
	testHandler(t, l, func(_ context.Context, d *ladder.Delivery) error {
		attempts++
		if d.Attempt < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	assert.Equal(t, 3, attempts)
}

//nolint:thelper // laddertest.Run is given a test
func TestHandlerOfConsuming(t *testing.T) {
	t.Parallel()
	l, err := ladder.New(ladder.Config{})
	require.NoError(t, err)
	laddertest.Run(t, l, func(t *testing.T, b *laddertest.Broker) {
		b.Consume(ladder.ConsumerConfig{Queue: "billing", Destinations: []string{"order"}, Retry: ladder.NoRetry{}}, handle)
		for _, body := range []string{`{"Number": 0}`, `{"Number": 1}`, `{"Number": 2}`, `{`} {
			require.NoError(t, b.Publisher().PublishDelayed(t.Context(), "order", 0, amqp.Publishing{Body: []byte(body)}))
		}
		b.Advance(time.Hour)
		var reasons []string
		for _, d := range b.Failed("billing") {
			reasons = append(reasons, d.Failure.Reason)
		}
		assert.Equal(t, []string{"attempt 1: no money", "unexpected end of JSON input"}, reasons)
		postponed := 0
		for _, p := range b.Published() {
			if p.Retry {
				postponed++
				assert.Equal(t, time.Minute, p.Delay)
			}
		}
		assert.InDelta(t, 60, postponed, 1)
	})
}

// TestConsumingCode has a passive consumer with what the document declares for it, and replays
// what it fails.
func TestConsumingCode(t *testing.T) {
	t.Parallel()
	url := brokertest.VHost(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := ladder.New(ladder.Config{Unit: 10 * time.Millisecond, Levels: 8})
	require.NoError(t, err)
	conn, err := amqp.Dial(url)
	require.NoError(t, err)
	defer conn.Close() //nolint:errcheck // nothing is lost with it
	ch, err := conn.Channel()
	require.NoError(t, err)
	require.NoError(t, declare(ctx, l, ch))

	outcomes := outcomes{events: make(chan ladder.HandleEvent, 10)}
	consumer, err := ladder.NewConsumer(l, ladder.ConsumerConfig{
		URLs: []string{url}, Queue: "mailer", Passive: true, Retry: ladder.FixedSteps{10 * time.Millisecond}, Observer: outcomes,
	})
	require.NoError(t, err)
	mux := http.NewServeMux()
	ready(mux, consumer)
	status := func() int {
		answer := httptest.NewRecorder()
		mux.ServeHTTP(answer, httptest.NewRequestWithContext(ctx, http.MethodGet, "/ready", http.NoBody))
		return answer.Code
	}
	require.Equal(t, http.StatusServiceUnavailable, status())

	var claimer laddertest.Claimer
	fails := make(chan bool, 3)
	consuming, stop := context.WithCancel(ctx)
	consumed := make(chan error)
	go func() {
		consumed <- deduplicate(consuming, consumer, func(context.Context, *ladder.Delivery) error {
			if <-fails {
				return errors.New("not yet")
			}
			return nil
		}, &claimer, nil)
	}()
	<-consumer.Ready()
	require.Equal(t, http.StatusOK, status())

	publisher, err := ladder.NewPublisher(ctx, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, err)
	for _, fail := range []bool{true, true, false} {
		fails <- fail
	}
	require.NoError(t, publisher.PublishDelayed(ctx, "email.delivery", 0, amqp.Publishing{MessageId: "1"}))
	require.Equal(t, ladder.OutcomeRetried, outcomes.next(t))
	require.Equal(t, ladder.OutcomeFailed, outcomes.next(t))
	require.NoError(t, replay(ctx, conn, publisher))
	require.Equal(t, ladder.OutcomeHandled, outcomes.next(t))
	require.Equal(t, []string{"mailer/1"}, claimer.Completed())
	stop()
	require.NoError(t, <-consumed)
	require.Equal(t, http.StatusServiceUnavailable, status())
	require.NoError(t, publisher.Close(ctx))
}

// TestDeliveryLimit has a queue with the document's limit, and a message that is the end of all who
// take it.
func TestDeliveryLimit(t *testing.T) {
	t.Parallel()
	url := brokertest.VHost(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := ladder.New(ladder.Config{Unit: 10 * time.Millisecond, Levels: 8})
	require.NoError(t, err)
	consumer, err := ladder.NewConsumer(l, limited(url))
	require.NoError(t, err)
	declaring, stop := context.WithCancel(ctx)
	declared := make(chan error)
	go func() { declared <- consumer.Run(declaring, handle) }()
	<-consumer.Ready()
	stop()
	require.NoError(t, <-declared)

	publisher, err := ladder.NewPublisher(ctx, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, err)
	require.NoError(t, publisher.PublishDelayed(ctx, "email.delivery", 0, amqp.Publishing{MessageId: "deadly"}))
	defer func() { require.NoError(t, publisher.Close(ctx)) }()
	var failed *ladder.Delivery
	deliveries := 0
	for failed == nil {
		require.NoError(t, ctx.Err())
		conn, err := amqp.Dial(url)
		require.NoError(t, err)
		ch, err := conn.Channel()
		require.NoError(t, err)
		_, found, err := ch.Get("mailer", false)
		require.NoError(t, err)
		if found {
			deliveries++
		} else if d, found, err := ch.Get(ladder.FailedQueue("mailer"), false); found {
			require.NoError(t, err)
			failed = l.ParseDelivery(d)
			require.NoError(t, d.Nack(false, true))
			replayed, err := publisher.ReplayFailed(ctx, ch, ladder.FailedQueue("mailer"), nil)
			require.NoError(t, err)
			assert.Equal(t, 1, replayed)
			again, found, err := ch.Get("mailer", true)
			require.NoError(t, err)
			require.True(t, found)
			assert.Equal(t, "email.delivery", l.ParseDelivery(again).Destination)
		}
		require.NoError(t, conn.Close())
	}
	assert.Equal(t, 21, deliveries, "the limit is that of the deliveries after the first")
	assert.Equal(t, "deadly", failed.MessageId)
	assert.Nil(t, failed.Failure)
	assert.Equal(t, "email.delivery", failed.Destination)
}

type outcomes struct {
	ladder.NopObserver
	events chan ladder.HandleEvent
}

func (o outcomes) Handled(_ context.Context, e ladder.HandleEvent) { o.events <- e }

func (o outcomes) next(t *testing.T) ladder.Outcome {
	t.Helper()
	select {
	case e := <-o.events:
		return e.Outcome
	case <-t.Context().Done():
		return ""
	case <-time.After(30 * time.Second):
		t.Fatal("nothing was handled")
		return ""
	}
}

// TestServiceOfConsuming ends the document's service as an operating system does.
func TestServiceOfConsuming(t *testing.T) {
	url := brokertest.VHost(t)
	l, err := ladder.New(ladder.Config{Unit: 10 * time.Millisecond, Levels: 8})
	require.NoError(t, err)
	served := make(chan error)
	go func() { served <- serve(l, url) }()
	conn, err := amqp.Dial(url)
	require.NoError(t, err)
	defer conn.Close() //nolint:errcheck // nothing is lost with it
	// It has asked for signals before it consumes: until then they would end the test.
	require.Eventually(t, func() bool {
		ch, err := conn.Channel()
		require.NoError(t, err)
		mailer, err := ch.QueueDeclarePassive("mailer", true, false, false, false, nil)
		return err == nil && mailer.Consumers == 1
	}, time.Minute, 20*time.Millisecond)
	self, err := os.FindProcess(os.Getpid())
	require.NoError(t, err)
	require.NoError(t, self.Signal(syscall.SIGTERM))
	require.NoError(t, <-served)
}
