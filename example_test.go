package ladder_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/laddertest"
)

// A delay is written in bits at the front of the routing key. 42 seconds are 32 +
// 8 + 2, so the message waits in three queues, whatever else is on its way.
func Example_bits() {
	l, err := ladder.New(ladder.Config{Levels: 6})
	if err != nil {
		panic(err)
	}
	route, err := l.Route(42*time.Second, "email.delivery")
	if err != nil {
		panic(err)
	}
	fmt.Println("publish to", route.Exchange)
	fmt.Println("with key  ", route.Key)
	for level, wait := range l.Waits(route.Units) {
		fmt.Printf("waits %3v in %s\n", wait, l.Level(level))
	}
	// Output:
	// publish to ladder.6x1s.level-05
	// with key   1.0.1.0.1.0.email.delivery
	// waits 32s in ladder.6x1s.level-05
	// waits  8s in ladder.6x1s.level-03
	// waits  2s in ladder.6x1s.level-01
}

func ExampleNew() {
	l, err := ladder.New(ladder.Config{})
	if err != nil {
		panic(err)
	}
	fmt.Println(l, "reaches", l.Horizon())

	_, err = ladder.New(ladder.Config{Unit: 1500 * time.Microsecond})
	fmt.Println(errors.Is(err, ladder.ErrInvalidConfig))
	fmt.Println(err)
	// Output:
	// ladder.20x1s reaches 291h16m15s
	// true
	// ladder: invalid configuration: Unit 1.5ms: must be a whole number of milliseconds, the resolution of a message TTL
}

// Delays of up to 30 days, to the tenth of a second.
func ExampleLevelsFor() {
	const unit = 100 * time.Millisecond
	levels, err := ladder.LevelsFor(unit, 30*24*time.Hour)
	if err != nil {
		panic(err)
	}
	l, err := ladder.New(ladder.Config{Name: "orders", Unit: unit, Levels: levels})
	if err != nil {
		panic(err)
	}
	fmt.Println(l, "reaches", l.Horizon())
	// Output:
	// orders.25x100ms reaches 932h4m3.1s
}

func ExampleLadder_Horizon() {
	l, err := ladder.New(ladder.Config{Levels: 12})
	if err != nil {
		panic(err)
	}
	fmt.Println(l.Horizon())
	// Output:
	// 1h8m15s
}

// The names of a ladder's objects carry its geometry.
func ExampleLadder_Level() {
	l, err := ladder.New(ladder.Config{Name: "orders", Unit: time.Minute, Levels: 12})
	if err != nil {
		panic(err)
	}
	fmt.Println(l.Level(11))
	fmt.Println(l.Level(0))
	fmt.Println(l.DeliveryExchange())
	fmt.Println(l.UnroutableExchange())
	fmt.Println(l.ParkingQueue())
	// Output:
	// orders.12x1m.level-11
	// orders.12x1m.level-00
	// orders.12x1m.delivery
	// orders.12x1m.unroutable
	// orders.12x1m.parking
}

// Units are rounded up: rather late by less than a unit than early.
func ExampleLadder_Units() {
	l, err := ladder.New(ladder.Config{})
	if err != nil {
		panic(err)
	}
	for _, delay := range []time.Duration{-time.Second, 0, time.Nanosecond, time.Second, 1200 * time.Millisecond} {
		units, err := l.Units(delay)
		fmt.Println(delay, units, err)
	}
	// Output:
	// -1s 0 <nil>
	// 0s 0 <nil>
	// 1ns 1 <nil>
	// 1s 1 <nil>
	// 1.2s 2 <nil>
}

func ExampleLadder_Route() {
	l, err := ladder.New(ladder.Config{Levels: 6})
	if err != nil {
		panic(err)
	}
	for _, delay := range []time.Duration{0, time.Second, 42 * time.Second, time.Minute} {
		route, err := l.Route(delay, "email.delivery")
		if err != nil {
			panic(err)
		}
		fmt.Println(delay, route.Exchange, route.Key, route.Hops())
	}
	// Output:
	// 0s ladder.6x1s.delivery 0.0.0.0.0.0.email.delivery 0
	// 1s ladder.6x1s.level-00 0.0.0.0.0.1.email.delivery 1
	// 42s ladder.6x1s.level-05 1.0.1.0.1.0.email.delivery 3
	// 1m0s ladder.6x1s.level-05 1.1.1.1.0.0.email.delivery 4
}

// A destination may have empty words and characters of all kinds, but no word
// that a binding takes for a wildcard.
func ExampleLadder_Route_invalidDestination() {
	l, err := ladder.New(ladder.Config{Levels: 6})
	if err != nil {
		panic(err)
	}
	_, err = l.Route(time.Second, "email.*")
	fmt.Println(errors.Is(err, ladder.ErrInvalidDestination))
	fmt.Println(err)
	// Output:
	// true
	// ladder: invalid destination "email.*": the word "*" is a wildcard in a binding
}

// What is too long is refused, never cut.
func ExampleDelayTooLongError() {
	l, err := ladder.New(ladder.Config{Levels: 6})
	if err != nil {
		panic(err)
	}
	_, err = l.Route(2*time.Minute, "email.delivery")
	fmt.Println(errors.Is(err, ladder.ErrDelayTooLong))

	if tooLong, ok := errors.AsType[*ladder.DelayTooLongError](err); ok {
		fmt.Println("asked for", tooLong.Delay, "of at most", tooLong.Horizon)
	}
	fmt.Println(err)
	// Output:
	// true
	// asked for 2m0s of at most 1m3s
	// ladder: delay too long: 2m0s is beyond the horizon of 1m3s
}

func ExampleRoute_Hops() {
	l, err := ladder.New(ladder.Config{Levels: 12})
	if err != nil {
		panic(err)
	}
	for _, delay := range []time.Duration{1023 * time.Second, 1024 * time.Second} {
		route, err := l.Route(delay, "email.delivery")
		if err != nil {
			panic(err)
		}
		fmt.Println(delay, "in", route.Hops())
	}
	// Output:
	// 17m3s in 10
	// 17m4s in 1
}

// Slack of one percent of the delay.
func ExampleConfig_slack() {
	l, err := ladder.New(ladder.Config{Slack: 0.01})
	if err != nil {
		panic(err)
	}
	for _, delay := range []time.Duration{time.Minute, 1023 * time.Second, 24 * time.Hour, 100 * time.Hour} {
		route, err := l.Route(delay, "email.delivery")
		if err != nil {
			panic(err)
		}
		exact, err := l.Units(delay)
		if err != nil {
			panic(err)
		}
		fmt.Printf("%v: %d hops instead of %d, %d s longer\n", delay, route.Hops(), bits.OnesCount64(exact), route.Units-exact)
	}
	// Output:
	// 1m0s: 4 hops instead of 4, 0 s longer
	// 17m3s: 1 hops instead of 10, 1 s longer
	// 24h0m0s: 4 hops instead of 5, 128 s longer
	// 100h0m0s: 3 hops instead of 9, 448 s longer
}

// The window is a duration here, and the ladder's own slack plays no part.
func ExampleLadder_UnitsWithin() {
	l, err := ladder.New(ladder.Config{})
	if err != nil {
		panic(err)
	}
	for _, slack := range []time.Duration{0, time.Second, time.Minute, 10 * time.Minute} {
		units, err := l.UnitsWithin(1983*time.Second, slack)
		if err != nil {
			panic(err)
		}
		fmt.Printf("%v: %d units, %d hops\n", slack, units, bits.OnesCount64(units))
	}
	// Output:
	// 0s: 1983 units, 10 hops
	// 1s: 1984 units, 5 hops
	// 1m0s: 1984 units, 5 hops
	// 10m0s: 2048 units, 1 hops
}

// A reminder may come up to ten minutes late. The publisher is one from
// NewPublisher.
func ExampleWithSlack() {
	remind := func(ctx context.Context, publisher *ladder.Publisher, at time.Time, msg amqp.Publishing) error {
		return publisher.PublishAt(ctx, "email.reminder", at, msg, ladder.WithSlack(10*time.Minute))
	}
	_ = remind
}

func ExampleLadder_Waits() {
	l, err := ladder.New(ladder.Config{Levels: 6})
	if err != nil {
		panic(err)
	}
	var sum time.Duration
	for level, wait := range l.Waits(42) {
		sum += wait
		fmt.Printf("level %d: %v\n", level, wait)
	}
	fmt.Println("together", sum)
	// Output:
	// level 5: 32s
	// level 3: 8s
	// level 1: 2s
	// together 42s
}

// AppendKey writes into a buffer of the caller's, and allocates nothing if that
// has room.
func ExampleLadder_AppendKey() {
	l, err := ladder.New(ladder.Config{Levels: 6})
	if err != nil {
		panic(err)
	}
	buffer := make([]byte, 0, 255)
	for units := range uint64(3) {
		buffer = l.AppendKey(buffer[:0], units, "email.delivery")
		fmt.Printf("%s\n", buffer)
	}
	// Output:
	// 0.0.0.0.0.0.email.delivery
	// 0.0.0.0.0.1.email.delivery
	// 0.0.0.0.1.0.email.delivery
}

// The destination is cut off by position, so it may look like anything.
func ExampleLadder_ParseKey() {
	l, err := ladder.New(ladder.Config{Levels: 6})
	if err != nil {
		panic(err)
	}
	for _, key := range []string{"1.0.1.0.1.0.email.delivery", "1.0.1.0.1.0.0.1.0", "email.delivery"} {
		units, destination, err := l.ParseKey(key)
		if err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Printf("%d units to %q\n", units, destination)
	}
	// Output:
	// 42 units to "email.delivery"
	// 42 units to "0.1.0"
	// ladder: invalid routing key "email.delivery": word 1 is not a bit; ladder.6x1s has 6
}

func ExampleLadder_BindingKey() {
	l, err := ladder.New(ladder.Config{Levels: 6})
	if err != nil {
		panic(err)
	}
	key, err := l.BindingKey("email.delivery")
	if err != nil {
		panic(err)
	}
	fmt.Println(key)
	// Output:
	// *.*.*.*.*.*.email.delivery
}

// The topology is plain data, for tools that declare it in another way.
func ExampleLadder_Topology() {
	l, err := ladder.New(ladder.Config{Levels: 2, QueueType: ladder.Classic})
	if err != nil {
		panic(err)
	}
	topology := l.Topology()
	for _, queue := range topology.Queues {
		if ttl, ok := queue.Arguments["x-message-ttl"]; ok {
			fmt.Printf("%s waits %v ms, then %v\n", queue.Name, ttl, queue.Arguments["x-dead-letter-exchange"])
		}
	}
	for _, binding := range topology.Bindings {
		fmt.Printf("%s -> %s %s %q\n", binding.Source, binding.Target, binding.Destination, binding.Key)
	}
	// Output:
	// ladder.2x1s.level-00 waits 1000 ms, then ladder.2x1s.delivery
	// ladder.2x1s.level-01 waits 2000 ms, then ladder.2x1s.level-00
	// ladder.2x1s.unroutable -> queue ladder.2x1s.parking ""
	// ladder.2x1s.level-00 -> queue ladder.2x1s.level-00 "*.1.#"
	// ladder.2x1s.level-00 -> exchange ladder.2x1s.delivery "*.0.#"
	// ladder.2x1s.level-01 -> queue ladder.2x1s.level-01 "1.#"
	// ladder.2x1s.level-01 -> queue ladder.2x1s.level-00 "0.1.#"
	// ladder.2x1s.level-01 -> exchange ladder.2x1s.delivery "0.0.#"
}

// The zero value waits like this, with a fifth more or less by chance, which is off here.
func ExampleExponentialBackoff() {
	policy := ladder.ExponentialBackoff{Jitter: -1}
	for attempt := 1; ; attempt++ {
		delay, retry := policy.Next(attempt, errors.New("the handler's error"))
		if !retry {
			fmt.Printf("attempt %d was the last\n", attempt)
			return
		}
		fmt.Printf("%v ", delay)
	}
	// Output:
	// 1s 2s 4s 8s 16s 32s 1m4s 2m8s 4m16s attempt 10 was the last
}

var errMaintenance = errors.New("down for maintenance")

// A policy waits long for some errors, and has another one decide on the rest.
type policy struct{ ladder.RetryPolicy }

func (p policy) Next(attempt int, err error) (time.Duration, bool) {
	if errors.Is(err, errMaintenance) && attempt < 24 {
		return time.Hour, true
	}
	return p.RetryPolicy.Next(attempt, err)
}

// A policy of your own can look at the error.
func ExampleRetryPolicy() {
	var retry ladder.RetryPolicy = policy{ladder.FixedSteps{time.Second, time.Minute}}
	fmt.Println(retry.Next(1, errMaintenance))
	fmt.Println(retry.Next(2, errors.New("another")))
	fmt.Println(retry.Next(3, errors.New("another")))
	// Output:
	// 1h0m0s true
	// 1m0s true
	// 0s false
}

// What cannot be parsed cannot be parsed the next time either.
func ExamplePermanent() {
	var handler ladder.Handler = func(_ context.Context, d *ladder.Delivery) error {
		var order struct{ Number int }
		if err := json.Unmarshal(d.Body, &order); err != nil {
			return ladder.Permanent(fmt.Errorf("order: %w", err))
		}
		return nil
	}
	fmt.Println(handler(context.Background(), &ladder.Delivery{Delivery: amqp.Delivery{Body: []byte(`{"Number": 42`)}}))
	// Output:
	// order: unexpected end of JSON input
}

// A service says when to come back. That is not an attempt that failed.
func ExampleRetryAfter() {
	call := func() (wait time.Duration, err error) { return 30 * time.Second, nil }
	var handler ladder.Handler = func(context.Context, *ladder.Delivery) error {
		wait, err := call()
		if wait > 0 {
			return fmt.Errorf("quota used up: %w", ladder.RetryAfter(wait))
		}
		return err
	}
	fmt.Println(handler(context.Background(), &ladder.Delivery{}))
	// Output:
	// quota used up: ladder: retry after 30s
}

// The first middleware is the outermost.
func ExampleWrap() {
	say := func(name string) ladder.Middleware {
		return func(next ladder.Handler) ladder.Handler {
			return func(ctx context.Context, d *ladder.Delivery) error {
				fmt.Println(name, "begins")
				err := next(ctx, d)
				fmt.Println(name, "sees:", err)
				return err
			}
		}
	}
	handler := ladder.Wrap(func(context.Context, *ladder.Delivery) error {
		panic("a mistake")
	}, say("outer"), ladder.Recover, say("inner"))
	_ = handler(context.Background(), &ladder.Delivery{})
	// Output:
	// outer begins
	// inner begins
	// outer sees: ladder: handler panicked: a mistake
}

// A message that comes twice is handled once. A real Claimer keeps its memory in a database.
func ExampleDeduplicate() {
	var claimer laddertest.Claimer
	handler := ladder.Wrap(func(_ context.Context, d *ladder.Delivery) error {
		fmt.Println("handled", d.MessageId)
		return nil
	}, ladder.Deduplicate(&claimer, nil))
	for _, id := range []string{"a", "b", "a"} {
		message := &ladder.Delivery{Delivery: amqp.Delivery{MessageId: id}, Queue: "mailer"}
		if err := handler(context.Background(), message); err != nil {
			panic(err)
		}
	}
	fmt.Println(claimer.Completed())
	// Output:
	// handled a
	// handled b
	// [mailer/a mailer/b]
}
