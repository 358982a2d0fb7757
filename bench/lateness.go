package main

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"gonum.org/v1/plot/plotter"

	"github.com/rabbitladder/ladder"
)

const (
	latenessUnit   = 100 * time.Millisecond
	latenessLevels = 6
)

// lateness measures how long after its instant a message is delivered, at fixed rates, and compares with a queue for
// each delay, where a message has one hop.
func lateness(ctx context.Context, l *lab) (*section, error) {
	most := pick(l, 1<<4, 1<<latenessLevels) - 1
	var delays []time.Duration
	for units := range most {
		delays = append(delays, time.Duration(units+1)*latenessUnit)
	}
	config := ladder.Config{Name: "lateness", Unit: latenessUnit}
	exact, err := ladderSystem(direct, config)
	if err != nil {
		return nil, err
	}
	floor := ttlQueues(delays, ladder.Quorum)
	systems := []*system{floor, exact}

	type sample struct {
		system string
		rate   int
	}
	rates := pick(l, []int{500}, []int{100, 500, 1000})
	all, p99 := make(map[sample][]time.Duration), make(map[int]*runs)
	byHops := make([][]time.Duration, latenessLevels+1)
	early := 0
	for _, rate := range rates {
		p99[rate] = new(runs)
		rounds := 1
		if rate == 500 { // the one with a target
			rounds = 3
		}
		if err := interleaved(pick(l, 1, rounds), systems, func(of *system) error {
			late, hops, err := steady(ctx, l, of, delays, rate)
			if err != nil {
				return fmt.Errorf("%s at %d per second: %w", of.name, rate, err)
			}
			if of == exact {
				for i, d := range late {
					if d < 0 {
						early++
					}
					if rate == 500 {
						byHops[hops[i]] = append(byHops[hops[i]], d)
					}
				}
			}
			slices.Sort(late)
			p99[rate].add(of.name, milliseconds(percentile(late, 0.99)))
			all[sample{of.name, rate}] = append(all[sample{of.name, rate}], late...)
			l.say("%-24s %5d/s  p50 %6.1f ms  p99 %6.1f ms", of.name, rate, milliseconds(percentile(late, 0.5)), milliseconds(percentile(late, 0.99)))
			return nil
		}); err != nil {
			return nil, err
		}
	}

	t := table{columns: []string{"", "p50, ms", "p90, ms", "p99, ms", "max, ms", "early", "messages"}}
	f := figure{name: "lateness", title: "Lateness at 500 messages per second", x: "milliseconds after the instant", y: "part of the messages", logX: true}
	for _, rate := range rates {
		for _, of := range systems {
			late := all[sample{of.name, rate}]
			slices.Sort(late)
			t.rows = append(t.rows, append([]string{fmt.Sprintf("%s, %d/s", of.name, rate)}, describe(late)...))
			if rate == 500 {
				f.curves = append(f.curves, curve{of.name, distribution(late)})
			}
		}
	}
	hopTable := table{caption: "The ladder at 500 per second, by the hops of a message", columns: t.columns}
	for hops, late := range byHops {
		if len(late) > 0 {
			slices.Sort(late)
			hopTable.rows = append(hopTable.rows, append([]string{fmt.Sprintf("%d hops", hops)}, describe(late)...))
		}
	}
	return &section{
		title: "Lateness",
		text: fmt.Sprintf("Delays are uniform over 1 to %d times %s, on quorum queues. The floor is one queue for each of the %d delays, where each message has one hop. "+
			"Both are published with as many goroutines as needed, each waiting for its confirm.", most, latenessUnit, most),
		tables:  []table{t, hopTable},
		figures: []figure{f},
		targets: []target{
			{what: "messages of the ladder that were early", got: float64(early), want: 0, atMost: true},
			{what: "p99 at 500 per second to the floor's", got: p99[500].ratio(exact.name, floor.name), want: 3, atMost: true},
		},
	}, nil
}

// describe returns percentiles of a sorted sample in milliseconds, and how many were early.
func describe(late []time.Duration) []string {
	early, _ := slices.BinarySearch(late, 0)
	cells := []string{}
	for _, p := range []float64{0.5, 0.9, 0.99, 1} {
		cells = append(cells, number(milliseconds(percentile(late, p))))
	}
	return append(cells, strconv.Itoa(early), strconv.Itoa(len(late)))
}

// distribution is the part of a sorted sample that is no later than some time.
func distribution(late []time.Duration) plotter.XYs {
	const points = 200
	var curve plotter.XYs
	for i := 1; i <= points; i++ {
		p := float64(i) / points
		curve = append(curve, plotter.XY{X: max(milliseconds(percentile(late, p)), 0.1), Y: p})
	}
	return curve
}

// steady publishes at a rate for a while and returns the lateness and the hops of each message.
func steady(ctx context.Context, l *lab, of *system, delays []time.Duration, rate int) (late []time.Duration, hops []int, err error) {
	span := pick(l, 2*time.Second, 8*time.Second)
	messages := int(span.Seconds() * float64(rate))
	if err := with(l.url, of.declare); err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, with(l.url, of.remove)) }()
	conn, ch, err := dial(l.url)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	if err := ch.Confirm(false); err != nil {
		return nil, nil, err
	}
	arriving, err := openSink(l.url)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, arriving.close()) }()

	ctx, cancel := context.WithTimeoutCause(ctx, span+delays[len(delays)-1]+time.Minute, errors.New("not all messages arrived in a minute"))
	defer cancel()
	sent := make(chan error, 1)
	go func() { sent <- paced(ctx, messages, rate, func() error { return post(ctx, ch, of, delays) }) }()
	seen := 0
	err = arriving.take(ctx, func(body []byte, at time.Time) bool {
		due, n := unstamp(body)
		late, hops = append(late, at.Sub(due)), append(hops, int(n))
		seen++
		return seen < messages
	})
	if failed := <-sent; failed != nil {
		err = failed
	}
	return late, hops, err
}

// post publishes one message with a random delay and waits for its confirm. The message carries the hops that it would
// have in a ladder.
func post(ctx context.Context, ch *amqp.Channel, of *system, delays []time.Duration) error {
	delay := delays[rand.IntN(len(delays))]
	exchange, key, err := of.route(delay)
	if err != nil {
		return err
	}
	hops := bits.OnesCount64(uint64(delay / latenessUnit))
	confirm, err := ch.PublishWithDeferredConfirmWithContext(ctx, exchange, key, false, false, stamped(time.Now().Add(delay), uint32(hops)))
	if err != nil {
		return err
	}
	acked, err := confirm.WaitContext(ctx)
	if err == nil && !acked {
		err = errNacked
	}
	return err
}

// paced calls do a number of times at a rate per second, each in a goroutine of its own, and returns the first error.
func paced(ctx context.Context, times, rate int, do func() error) error {
	start := time.Now()
	failed := make(chan error, 1)
	var working sync.WaitGroup
	for i := range times {
		at := start.Add(time.Duration(i) * time.Second / time.Duration(rate))
		select {
		case <-ctx.Done():
			working.Wait()
			return context.Cause(ctx)
		case <-time.After(time.Until(at)):
		}
		working.Go(func() {
			if err := do(); err != nil {
				select {
				case failed <- err:
				default:
				}
			}
		})
	}
	working.Wait()
	close(failed)
	return <-failed
}
