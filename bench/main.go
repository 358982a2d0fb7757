// Command bench measures ladders of this library beside other ways to delay messages, and the publisher and the
// consumer beside bare amqp091-go, on one broker, in one run, in turns:
//
//	make bench                        about 20 minutes; writes docs/performance/report.md, results.csv and the pictures
//	make bench BENCHFLAGS=-quick      under two minutes, and writes nothing: does it all work?
//	make bench BENCHFLAGS='-only capacity,lateness -out /tmp/report'
//
// The broker is found or started as in the tests (see internal/brokertest). Some scenarios start one of their own,
// because they fill or restart it. Run it on a machine that does nothing else.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/rabbitladder/ladder/internal/brokertest"
)

// A lab is what scenarios work with.
type lab struct {
	quick bool
	// url is of a virtual host of the run's own.
	url   string
	start time.Time
}

// pick returns the first in a quick run, and the second in a full one.
func pick[T any](l *lab, quick, full T) T {
	if l.quick {
		return quick
	}
	return full
}

// say shows progress.
func (l *lab) say(format string, arguments ...any) {
	fmt.Fprintf(os.Stderr, "%5.0f s  %s\n", time.Since(l.start).Seconds(), fmt.Sprintf(format, arguments...))
}

type scenario struct {
	name string
	run  func(context.Context, *lab) (*section, error)
}

var scenarios = []scenario{
	{"encode", encode},
	{"publish", publish},
	{"consume", consume},
	{"capacity", capacity},
	{"lateness", lateness},
	{"deadline", deadline},
	{"settings", settings},
	{"growth", growth},
	{"pending", pending},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, arguments []string) (err error) {
	names := make([]string, len(scenarios))
	for i, s := range scenarios {
		names[i] = s.name
	}
	flags := flag.NewFlagSet("bench", flag.ExitOnError)
	quick := flags.Bool("quick", false, "measure little, in under two minutes: to see whether it works")
	only := flags.String("only", "", "scenarios to run, separated by commas, of: "+strings.Join(names, ", "))
	out := flags.String("out", "", "directory for the report; none is written if empty")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	chosen := names
	if *only != "" {
		chosen = strings.Split(*only, ",")
	}
	for _, name := range chosen {
		if !slices.Contains(names, name) {
			return fmt.Errorf("no scenario %q; there are: %s", name, strings.Join(names, ", "))
		}
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}

	broker, err := brokertest.Shared(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, brokertest.CloseShared()) }() //nolint:contextcheck // it ends when ctx has ended, too
	vhost := fmt.Sprintf("ladder-bench-%d", os.Getpid())
	if err := broker.CreateVHost(ctx, vhost); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, broker.DeleteVHost(context.WithoutCancel(ctx), vhost)) }()
	l := &lab{quick: *quick, url: broker.URL(vhost), start: time.Now()}
	about := []string{
		fmt.Sprintf("RabbitMQ %s, one node, on the same machine as the client", broker.Version()),
		machine(),
		fmt.Sprintf("%s, %s", runtime.Version(), clientVersion()),
	}
	for _, line := range about {
		l.say("%s", line)
	}

	sections, order := make(map[string]*section), []string{}
	for _, s := range scenarios {
		if !slices.Contains(chosen, s.name) {
			continue
		}
		l.say("scenario %s", s.name)
		result, err := s.run(ctx, l)
		if err != nil {
			return fmt.Errorf("scenario %s: %w", s.name, err)
		}
		sections[s.name] = result
		order = append(order, s.name)
	}
	about = append(about, fmt.Sprintf("%s, %.0f minutes in all", l.start.UTC().Format(time.DateOnly), time.Since(l.start).Minutes()))
	if err := writeMarkdown(os.Stdout, about, sections, order); err != nil {
		return err
	}
	if *out == "" {
		return nil
	}
	return write(*out, about, sections, order)
}

// machine describes the computer in one line.
func machine() string {
	cpu := "unknown processor"
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(info)) {
			if name, ok := strings.CutPrefix(line, "model name"); ok {
				cpu = strings.TrimLeft(strings.TrimSpace(name), ": \t")
				break
			}
		}
	}
	return fmt.Sprintf("%s/%s, %d cores, %s", runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), cpu)
}

func clientVersion() string {
	const client = "github.com/rabbitmq/amqp091-go"
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dependency := range info.Deps {
			if dependency.Path == client {
				return "amqp091-go " + dependency.Version
			}
		}
	}
	return "amqp091-go"
}
