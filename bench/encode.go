package main

import (
	"context"
	"math/bits"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/rabbitladder/ladder"
)

// encode measures the encoder, and counts the hops that slack saves.
func encode(_ context.Context, l *lab) (*section, error) {
	exact, err := ladder.New(ladder.Config{})
	if err != nil {
		return nil, err
	}
	slack, err := ladder.New(ladder.Config{Slack: 0.01})
	if err != nil {
		return nil, err
	}
	const (
		units = 699_050 // 10101010101010101010
		delay = units * time.Second
	)
	buffer := make([]byte, 0, 255)
	route := func(of *ladder.Ladder) func() error {
		return func() error {
			_, err := of.Route(delay, destination)
			return err
		}
	}
	functions := []struct {
		name string
		call func() error
	}{
		{"AppendKey", func() error { buffer = exact.AppendKey(buffer[:0], units, destination); return nil }},
		{"Route", route(exact)},
		{"Route, slack 1 %", route(slack)},
	}
	var measured runs
	allocations := make(map[string]int64)
	err = interleaved(pick(l, 1, 3), functions, func(f struct {
		name string
		call func() error
	},
	) error {
		var failed error
		result := testing.Benchmark(func(b *testing.B) { //nolint:thelper // a benchmark of its own
			b.ReportAllocs()
			for b.Loop() {
				if err := f.call(); err != nil {
					failed = err
				}
			}
		})
		measured.add(f.name, float64(result.T.Nanoseconds())/float64(result.N))
		allocations[f.name] = result.AllocsPerOp()
		return failed
	})
	if err != nil {
		return nil, err
	}
	t := table{columns: []string{"function", "ns", "allocations"}}
	s := &section{
		title: "Encoder",
		text: "A ladder of 20 levels and a delay of ten hops. And how many hops slack leaves on average, of delays that are " +
			"uniform over all 20 bits, with the time that it adds to the delay.",
	}
	for _, name := range measured.names {
		t.rows = append(t.rows, []string{name, number(measured.median(name)), strconv.FormatInt(allocations[name], 10)})
		if name != "AppendKey" {
			s.targets = append(
				s.targets,
				target{what: name + ", ns", got: measured.median(name), want: 60, atMost: true},
				target{what: name + ", allocations", got: float64(allocations[name]), want: 1, atMost: true},
			)
		} else {
			s.targets = append(s.targets, target{what: name + ", allocations", got: float64(allocations[name]), want: 0, atMost: true})
		}
	}
	saved, picture, err := hopsWithSlack(exact)
	s.tables, s.figures = []table{t, saved}, []figure{picture}
	return s, err
}

// hopsWithSlack computes what slack saves. The sample has a fixed seed.
func hopsWithSlack(l *ladder.Ladder) (table, figure, error) {
	const sample = 100_000
	t := table{columns: []string{"slack", "hops", "time added, % of the delay"}}
	f := figure{name: "hops", title: "Slack saves hops", x: "hops of a message (uniform over 20 bits, mean)"}
	for _, slack := range []float64{0, 0.01, 0.05, 0.125, 0.25} {
		random := rand.New(rand.NewPCG(1, 2))
		var hops, added float64
		for range sample {
			delay := time.Duration(1+random.Int64N(1<<20-1)) * time.Second
			units, err := l.UnitsWithin(delay, time.Duration(slack*float64(delay)))
			if err != nil {
				return t, f, err
			}
			hops += float64(bits.OnesCount64(units))
			added += (time.Duration(units)*time.Second - delay).Seconds() / delay.Seconds()
		}
		name := "none"
		if slack > 0 {
			name = number(100*slack) + " %"
		}
		t.rows = append(t.rows, []string{name, number(hops / sample), number(100 * added / sample)})
		f.bars = append(f.bars, bar{name: "slack " + name, value: hops / sample, ours: slack > 0})
	}
	return t, f, nil
}
