// Command quickstart sends three dozen messages with delays of all kinds
// through one ladder, all at once, and shows how each of them arrives.
//
//	LADDER_AMQP_URL=amqp://guest:guest@127.0.0.1:5672/ go run ./examples/quickstart
//
// It uses the library's public API and nothing else of it. This file has what
// an application does: declare, bind, publish, consume, remove. The others
// have what a demonstration needs besides: messages.go makes up the delays,
// objects.go counts what is on the broker, table.go prints.
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder"
)

const (
	defaultURL  = "amqp://guest:guest@127.0.0.1:5672/" //nolint:gosec // RabbitMQ's own default
	destination = "quickstart.message"

	// patience is how long after its instant a message is given up.
	patience = 6 * time.Second
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the second Ctrl-C does not wait for anything
	url := os.Getenv("LADDER_AMQP_URL")
	if url == "" {
		url = defaultURL
	}
	err := run(ctx, os.Stdout, url, os.Getenv("LADDER_MANAGEMENT_URL"))
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

// run is the whole program. It returns an error when a message was early or did
// not arrive.
func run(ctx context.Context, out io.Writer, url, managementURL string) error {
	conn, err := connect(url)
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // nothing is lost with it

	// Eight levels of 100 ms: queues that wait 0.1, 0.2, 0.4 ... 12.8 s, for any
	// delay of up to 25.5 s. A few letters of chance keep two programs that run
	// at the same time apart; an application has a fixed name here.
	l, err := ladder.New(ladder.Config{
		Name:   "quickstart-" + strings.ToLower(rand.Text()[:4]),
		Unit:   100 * time.Millisecond,
		Levels: 8,
	})
	if err != nil {
		return err
	}

	queue := l.String() + ".inbox"
	defer tearDown(conn, l, queue) //nolint:contextcheck // it runs after an interruption too

	// A publisher declares the ladder when it connects.
	publisher, err := ladder.NewPublisher(ctx, l, ladder.PublisherConfig{URLs: []string{url}})
	if err != nil {
		return err
	}
	defer publisher.Close(context.WithoutCancel(ctx)) //nolint:errcheck // all publishes are over by then

	// A consumer declares its queue, which it binds to its destinations, and another for
	// messages that fail for good; examples/retry shows that one at work. What falls due
	// for a destination before anyone has bound it is parked, so the program waits for
	// that. An application whose queues are there from an earlier run need not.
	consumer, err := ladder.NewConsumer(l, ladder.ConsumerConfig{
		URLs:         []string{url},
		Queue:        queue,
		Destinations: []string{destination},
	})
	if err != nil {
		return err
	}
	arrivals := make(chan arrival)
	consuming, stopConsuming := context.WithCancel(ctx)
	consumed := make(chan error, 1)
	go func() {
		defer close(consumed)
		consumed <- consumer.Run(consuming, func(_ context.Context, d *ladder.Delivery) error {
			select {
			case arrivals <- newArrival(l, d):
				return nil // acknowledges the message
			case <-consuming.Done():
				return consuming.Err() // the message waits in the ladder for another attempt
			}
		})
	}()
	defer func() {
		stopConsuming()
		for range consumed { // until Run has returned
		}
	}()
	select {
	case <-consumer.Ready():
	case err := <-consumed:
		return errors.Join(ctx.Err(), err)
	}

	messages, err := plan(l)
	if err != nil {
		return err
	}
	before := countObjects(ctx, l, url, managementURL)
	t := newTable(out, l)
	t.ladder(conn, url)
	t.plan(messages)

	start := time.Now()
	if err := publishAll(ctx, publisher, messages); err != nil {
		return err
	}
	t.published(len(messages), time.Since(start))

	if err := receive(ctx, t, messages, arrivals, consumed); err != nil {
		return err
	}
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	parked, err := ch.QueueDeclarePassive(l.ParkingQueue(), true, false, false, false, nil)
	if err != nil {
		return err
	}
	return t.summary(messages, parked.Messages, before, countObjects(ctx, l, url, managementURL))
}

// connect opens a plain connection: for a clear word when there is no broker, for a
// look at the parking queue, and to clean up.
func connect(url string) (*amqp.Connection, error) {
	uri, err := amqp.ParseURI(url)
	if err != nil {
		// The parser's own words can have the password in them.
		return nil, errors.New("LADDER_AMQP_URL is not an AMQP URL like amqp://user:password@host:5672/vhost")
	}
	conn, err := amqp.DialConfig(url, amqp.Config{Dial: amqp.DefaultDial(5 * time.Second)})
	if err != nil {
		return nil, fmt.Errorf("cannot connect to a broker at %s: %w\nstart RabbitMQ there, set LADDER_AMQP_URL, or run make demo, which brings a broker along",
			net.JoinHostPort(uri.Host, strconv.Itoa(uri.Port)), err)
	}
	return conn, nil
}

// publishAll publishes all messages at the same time and waits until the broker
// has confirmed each of them.
func publishAll(ctx context.Context, publisher *ladder.Publisher, messages []*message) error {
	confirmed := make(chan error)
	for _, m := range messages {
		m.sent = time.Now()
		go func() {
			msg := amqp.Publishing{MessageId: m.id, ContentType: "text/plain", Body: []byte("hello from " + m.id)}
			if m.absolute {
				confirmed <- publisher.PublishAt(ctx, destination, m.sent.Add(m.delay), msg)
			} else {
				confirmed <- publisher.PublishDelayed(ctx, destination, m.delay, msg)
			}
		}()
	}
	var errs []error
	for range messages {
		errs = append(errs, <-confirmed)
	}
	return errors.Join(errs...)
}

// receive prints each message as it arrives, until all have or time is up.
func receive(ctx context.Context, t *table, messages []*message, arrivals <-chan arrival, consumed <-chan error) error {
	byID := map[string]*message{}
	var longest time.Duration
	for _, m := range messages {
		byID[m.id] = m
		longest = max(longest, m.delay)
	}
	timeUp := time.After(longest + patience)
	for missing := len(messages); ; {
		select {
		case a := <-arrivals:
			m := byID[a.id]
			if m == nil {
				continue // someone else's
			}
			m.take(a)
			t.arrived(m)
			if m.arrivals == 1 {
				missing--
			}
			if missing == 0 {
				timeUp = time.After(300 * time.Millisecond) // for a second copy, if there is one
			}
		case err := <-consumed:
			return errors.Join(ctx.Err(), err)
		case <-ctx.Done():
			return ctx.Err()
		case <-timeUp:
			return nil
		}
	}
}

// tearDown removes the queues, and the ladder with whatever still waits in it.
func tearDown(conn *amqp.Connection, l *ladder.Ladder, queue string) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	ch, err := conn.Channel()
	if err == nil {
		_, err = ch.QueueDelete(queue, false, false, false)
		if err == nil {
			_, err = ch.QueueDelete(ladder.FailedQueue(queue), false, false, false)
		}
		err = errors.Join(err, l.Remove(ctx, ch, ladder.Force()))
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "quickstart: %s was not removed: %v\n", l, err)
	}
}
