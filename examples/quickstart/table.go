package main

import (
	"errors"
	"fmt"
	"io"
	"math/bits"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder"
)

// A table prints what happens.
type table struct {
	out    io.Writer
	l      *ladder.Ladder
	colour bool
}

func newTable(out io.Writer, l *ladder.Ladder) *table {
	return &table{out: out, l: l, colour: isTerminal(out) && os.Getenv("NO_COLOR") == ""}
}

func isTerminal(out io.Writer) bool {
	file, ok := out.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return false
	}
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

func (t *table) printf(format string, args ...any) {
	fmt.Fprintf(t.out, format, args...) //nolint:errcheck // there is nowhere else to say so
}

const (
	bold  = "1"
	red   = "31"
	green = "32"
)

func (t *table) paint(code, text string) string {
	if !t.colour {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

func (t *table) ladder(conn *amqp.Connection, url string) {
	uri, _ := amqp.ParseURI(url) // it has been dialled, so it is valid
	config := t.l.Config()
	t.printf("broker   RabbitMQ %v at %s, virtual host %s\n", conn.Properties["version"], conn.RemoteAddr(), uri.Vhost)
	t.printf("ladder   %s: %d levels, unit %v, delays up to %v\n", t.l, config.Levels, config.Unit, t.l.Horizon())
}

// plan shows the way that each message will take.
func (t *table) plan(messages []*message) {
	t.printf("\n%s\n", t.paint(bold, " no  delay         units  waits, in seconds                         enters at"))
	for _, m := range messages {
		how := m.delay.String()
		if m.absolute {
			how = "at " + signed(m.delay)
		}
		t.printf("%3s  %-12s %6d  %-40s  %s\n", m.id, how, m.route.Units, t.path(m.route.Units), t.short(m.route.Exchange))
	}
}

func signed(d time.Duration) string {
	if d < 0 {
		return d.String()
	}
	return "+" + d.String()
}

// path writes the waits of a delay as a sum: 3.2 + 0.8 + 0.2.
func (t *table) path(units uint64) string {
	var waits []string
	for _, wait := range t.l.Waits(units) {
		waits = append(waits, strconv.FormatFloat(wait.Seconds(), 'f', -1, 64))
	}
	if len(waits) == 0 {
		return "none"
	}
	return strings.Join(waits, " + ")
}

// short leaves the ladder's own name away.
func (t *table) short(name string) string { return strings.TrimPrefix(name, t.l.String()+".") }

func (t *table) published(n int, took time.Duration) {
	t.printf("\npublished and confirmed: %d messages at once, in %s\n", n, strings.TrimSpace(milliseconds(took)))
	t.printf("\n%s\n", t.paint(bold, " no      asked        got       late  for rounding  hops"))
}

// arrived shows a message that has just come.
func (t *table) arrived(m *message) {
	note := ""
	switch {
	case m.arrivals > 1:
		note = "  " + t.paint(red, "again")
	case m.lateness < 0:
		note = "  " + t.paint(red, "EARLY")
	}
	t.printf("%3s  %s  %s  %s     %s  %4d%s\n", m.id, seconds(m.asked()), seconds(m.at.Sub(m.sent)),
		milliseconds(m.lateness), milliseconds(m.rounding(t.l.Config().Unit)), bits.OnesCount64(m.units), note)
}

func seconds(d time.Duration) string { return fmt.Sprintf("%7.3f s", d.Seconds()) }

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%6.1f ms", float64(d)/float64(time.Millisecond))
}

// summary prints the account, and returns an error if it is not clean.
func (t *table) summary(messages []*message, parked int, before, after objects) error {
	var early, missing, duplicates, hops, most int
	var lateness, beyondRounding []time.Duration
	for _, m := range messages {
		if m.arrivals == 0 {
			missing++
			continue
		}
		duplicates += m.arrivals - 1
		n := bits.OnesCount64(m.units)
		hops += n
		most = max(most, n)
		if m.lateness < 0 {
			early++
		}
		lateness = append(lateness, m.lateness)
		beyondRounding = append(beyondRounding, m.lateness-m.rounding(t.l.Config().Unit))
	}
	row := func(name, format string, args ...any) {
		t.printf("%-18s %s\n", name, fmt.Sprintf(format, args...))
	}
	must := func(name string, n int) {
		colour := green
		if n > 0 {
			colour = red
		}
		row(name, "%s", t.paint(colour, strconv.Itoa(n)))
	}

	t.printf("\n%s\n", t.paint(bold, "summary"))
	row("published", "%d, all confirmed", len(messages))
	row("arrived", "%d", len(lateness))
	must("early", early)
	must("missing", missing)
	row("duplicates", "%d", duplicates)
	row("parked", "%d", parked)
	row("lateness", "%s", distribution(lateness))
	row("  beyond rounding", "%s", distribution(beyondRounding))
	row("hops", "%d in all, at most %d for one message", hops, most)
	switch {
	case !before.counted || !after.counted:
		row("objects", "%v", after)
	case before == after:
		row("objects before", "%v", before)
		row("objects after", "%v: unchanged", after)
	default:
		row("objects before", "%v", before)
		row("objects after", "%v: changed", after)
	}
	row("  counted", "%s", after.source)

	if early+missing > 0 {
		return errors.New(t.paint(red, fmt.Sprintf("%d of %d messages came early, %d did not arrive", early, len(messages), missing)))
	}
	return nil
}

func distribution(ds []time.Duration) string {
	if len(ds) == 0 {
		return "nothing arrived"
	}
	slices.Sort(ds)
	p := func(percent int) string { // the smallest value that so many are not above
		return strings.TrimSpace(milliseconds(ds[(len(ds)*percent+99)/100-1]))
	}
	return fmt.Sprintf("p50 %s, p99 %s, max %s", p(50), p(99), p(100))
}
