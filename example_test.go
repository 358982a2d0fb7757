package ladder_test

import (
	"errors"
	"fmt"
	"time"

	"github.com/rabbitladder/ladder"
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
