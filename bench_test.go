package ladder_test

import (
	"testing"
	"time"

	"github.com/rabbitladder/ladder"
)

// BenchmarkEncode measures the encoder on the default ladder, 20 levels, with
// a delay of ten hops.
func BenchmarkEncode(b *testing.B) {
	const (
		units       = 699_050 // 10101010101010101010
		delay       = units * time.Second
		destination = "email.delivery"
	)
	l := mustLadder(b, ladder.Config{})

	b.Run("AppendKey", func(b *testing.B) {
		buffer := make([]byte, 0, 255)
		b.ReportAllocs()
		for b.Loop() {
			buffer = l.AppendKey(buffer[:0], units, destination)
		}
	})

	b.Run("Route", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := l.Route(delay, destination); err != nil {
				b.Fatal(err)
			}
		}
	})

	b.Run("RouteWithSlack", func(b *testing.B) {
		l := mustLadder(b, ladder.Config{Slack: 0.01})
		b.ReportAllocs()
		for b.Loop() {
			if _, err := l.Route(delay, destination); err != nil {
				b.Fatal(err)
			}
		}
	})

	b.Run("UnitsWithin", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := l.UnitsWithin(delay, delay/100); err != nil {
				b.Fatal(err)
			}
		}
	})

	b.Run("ParseKey", func(b *testing.B) {
		route, err := l.Route(delay, destination)
		if err != nil {
			b.Fatal(err)
		}
		b.ReportAllocs()
		for b.Loop() {
			if _, _, err := l.ParseKey(route.Key); err != nil {
				b.Fatal(err)
			}
		}
	})
}
