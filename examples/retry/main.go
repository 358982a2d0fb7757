// Command retry shows what becomes of messages whose handler fails. It leaves its ladder and its queues on the broker, as
// an application would; the message that failed for good is in the queue mails.failed.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder"
)

func main() {
	if err := run(context.Background(), os.Stdout, cmp.Or(os.Getenv("LADDER_AMQP_URL"), "amqp://guest:guest@127.0.0.1:5672/")); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, out io.Writer, url string) error {
	ctx, done := context.WithTimeout(ctx, time.Minute)
	defer done()
	l, err := ladder.New(ladder.Config{Name: "example", Unit: 100 * time.Millisecond, Levels: 8}) // delays up to 25.5 s
	if err != nil {
		return err
	}
	consumer, err := ladder.NewConsumer(l, ladder.ConsumerConfig{
		URLs: []string{url}, Queue: "mails", Destinations: []string{"mail.due"}, Concurrency: 1,
		Retry:    ladder.FixedSteps{300 * time.Millisecond, 600 * time.Millisecond}, // so there are three attempts
		Observer: &journal{out: out, left: 3, done: done},
	})
	if err != nil {
		return err
	}
	busy := true
	ended := make(chan error, 1)
	go func() {
		ended <- consumer.Run(ctx, func(_ context.Context, d *ladder.Delivery) error {
			switch {
			case d.MessageId == "flaky" && d.Attempt < 3:
				return errors.New("the mail server does not answer") // the retry policy decides
			case d.MessageId == "quota" && busy:
				busy = false
				return ladder.RetryAfter(700 * time.Millisecond) // this is no attempt
			case d.MessageId == "broken":
				return ladder.Permanent(errors.New("the address has no @")) // to the failed queue
			}
			return nil
		})
	}()
	select {
	case <-consumer.Ready():
	case err := <-ended:
		return err
	}
	publisher, err := ladder.NewPublisher(ctx, l, ladder.PublisherConfig{URLs: []string{url}})
	if err != nil {
		return err
	}
	for _, id := range []string{"flaky", "quota", "broken"} {
		err = errors.Join(err, publisher.PublishDelayed(ctx, "mail.due", 200*time.Millisecond, amqp.Publishing{MessageId: id}))
	}
	if err != nil {
		done()
	}
	return errors.Join(err, publisher.Close(ctx), <-ended)
}

// A journal prints what becomes of each message, and ends the program after the last.
type journal struct {
	ladder.NopObserver
	out  io.Writer
	left int
	done func()
}

func (j *journal) Handled(_ context.Context, e ladder.HandleEvent) {
	_, _ = fmt.Fprintf(j.out, "%s, attempt %d: %s in %v, %v\n", e.MessageID, e.Attempt, e.Outcome, e.RetryDelay, e.Err)
	if e.Outcome == ladder.OutcomeHandled || e.Outcome == ladder.OutcomeFailed {
		j.left--
		if j.left == 0 {
			j.done()
		}
	}
}
