package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/rabbitladder/ladder"
)

const (
	capacityUnit = time.Millisecond
	// capacityRange is what delays are uniform over: 12 bits of units.
	capacityRange = 1 << 12
)

// The systems that capacity compares, by their names in the report.
const (
	direct        = "ladder"
	directSlack1  = "ladder, slack 1 %"
	directSlack8  = "ladder, slack 12.5 %"
	directSlack4  = "ladder, slack 25 %"
	chainOf20     = "ladder, chain layout"
	nserviceBusIs = "NServiceBus copy"
	kombuIs       = "Kombu copy"
)

func capacitySystems(queueType ladder.QueueType) ([]*system, error) {
	var systems []*system
	for _, of := range []struct {
		name   string
		config ladder.Config
	}{
		{direct, ladder.Config{Layout: ladder.Direct}},
		{directSlack1, ladder.Config{Layout: ladder.Direct, Slack: 0.01}},
		{directSlack8, ladder.Config{Layout: ladder.Direct, Slack: 0.125}},
		{directSlack4, ladder.Config{Layout: ladder.Direct, Slack: 0.25}},
		{chainOf20, ladder.Config{Layout: ladder.Chain}},
	} {
		of.config.Name, of.config.Unit, of.config.QueueType = "capacity", capacityUnit, queueType
		s, err := ladderSystem(of.name, of.config)
		if err != nil {
			return nil, err
		}
		systems = append(systems, s)
	}
	return append(systems, nserviceBus(capacityUnit, queueType), kombu(capacityUnit, queueType)), nil
}

// capacity measures how many messages per second each system sustains from publish to delivery.
func capacity(ctx context.Context, l *lab) (*section, error) {
	s := &section{
		title: "Capacity",
		text: fmt.Sprintf("Messages per second that go in and come out while %d are always on their way: one bare sender publishes "+
			"the next as one arrives. Delays are uniform over 1 to %d units of %s. NServiceBus's and Kombu's ladders have 28 "+
			"levels, ours 20. After a warm-up in which as many messages arrive as are on their way, %s are measured.",
			pick(l, quickOnTheirWay, onTheirWay), capacityRange-1, capacityUnit, pick(l, quickWindow, fullWindow)),
	}
	for _, queueType := range []ladder.QueueType{ladder.Quorum, ladder.Classic} {
		systems, err := capacitySystems(queueType)
		if err != nil {
			return nil, err
		}
		rounds := pick(l, 1, 3)
		if queueType == ladder.Classic {
			rounds = pick(l, 0, 2)
		}
		if l.quick { // one of each kind
			systems = slices.DeleteFunc(systems, func(of *system) bool { return !slices.Contains([]string{directSlack8, kombuIs}, of.name) })
		}
		var measured runs
		if err := interleaved(rounds, systems, func(of *system) error {
			rate, err := sustained(ctx, l, l.url, of)
			if err != nil {
				return fmt.Errorf("%s, %s queues: %w", of.name, queueType, err)
			}
			measured.add(of.name, rate)
			l.say("%-8s %-24s %6.0f/s", queueType, of.name, rate)
			return nil
		}); err != nil {
			return nil, err
		}
		if rounds == 0 {
			continue
		}
		t := table{
			caption: fmt.Sprintf("%s queues, median of %d", queueType, rounds),
			columns: []string{"", "messages per second", "lowest", "highest", "to NServiceBus", "to Kombu", "to chain"},
		}
		f := figure{name: "capacity-" + string(queueType), title: fmt.Sprintf("Delayed messages per second, %s queues", queueType), x: "messages per second, from publish to delivery"}
		for _, of := range systems {
			low, high := measured.spread(of.name)
			t.rows = append(t.rows, []string{
				of.name, number(measured.median(of.name)), number(low), number(high),
				number(measured.ratio(of.name, nserviceBusIs)), number(measured.ratio(of.name, kombuIs)), number(measured.ratio(of.name, chainOf20)),
			})
			f.bars = append(f.bars, bar{name: of.name, value: measured.median(of.name), ours: of.ours})
		}
		s.tables, s.figures = append(s.tables, t), append(s.figures, f)
		if queueType == ladder.Quorum {
			s.targets = []target{
				{what: "slack 1 % to NServiceBus", got: measured.ratio(directSlack1, nserviceBusIs), want: 1.6},
				{what: "slack 12.5 % to NServiceBus", got: measured.ratio(directSlack8, nserviceBusIs), want: 2},
				{what: "slack 12.5 % to Kombu", got: measured.ratio(directSlack8, kombuIs), want: 2.5},
				{what: "direct without slack to chain", got: measured.ratio(direct, chainOf20), want: 1},
			}
		}
	}
	return s, nil
}

const (
	quickOnTheirWay = 2_000
	onTheirWay      = 12_000
	quickWindow     = time.Second
	fullWindow      = 5 * time.Second
)

// sustained declares a system, keeps a number of messages on their way through it, counts for a while what arrives,
// and removes it.
func sustained(ctx context.Context, l *lab, url string, of *system) (perSecond float64, err error) {
	unfinished, measure := pick(l, quickOnTheirWay, onTheirWay), pick(l, quickWindow, fullWindow)
	if err := with(url, of.declare); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, with(url, of.remove)) }()
	conn, ch, err := dial(url)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	arriving, err := openSink(url)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, arriving.close()) }()

	places := make(chan struct{}, unfinished)
	sending, stop := context.WithCancel(ctx)
	sent := make(chan error, 1)
	go func() {
		random := rand.New(rand.NewPCG(3, 4))
		sent <- stream(ctx, ch, window, func() (letter, bool, error) {
			select {
			case places <- struct{}{}:
			case <-sending.Done():
				return letter{}, false, nil
			}
			delay := time.Duration(1+random.Int64N(capacityRange-1)) * capacityUnit
			exchange, key, err := of.route(delay)
			return letter{exchange, key, stamped(time.Now().Add(delay), 0)}, true, err
		})
	}()
	var from, to time.Time
	arrived, early, counted := 0, 0, 0
	err = arriving.take(ctx, func(body []byte, at time.Time) bool {
		<-places
		arrived++
		if due, _ := unstamp(body); of.ours && at.Before(due) {
			early++
		}
		switch {
		case arrived == unfinished:
			from = at
		case arrived > unfinished:
			counted++
			to = at
		}
		return arrived <= unfinished || to.Sub(from) < measure
	})
	stop()
	err = errors.Join(err, <-sent)
	if err == nil && early > 0 {
		err = fmt.Errorf("%d of %d messages were early", early, arrived)
	}
	if err != nil {
		return 0, err
	}
	return float64(counted) / to.Sub(from).Seconds(), nil
}

// settings measures what settings of the broker change, on a broker of its own.
func settings(ctx context.Context, l *lab) (_ *section, err error) {
	broker, url, err := private(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, broker.Close()) }() //nolint:contextcheck // it ends when ctx has ended, too
	of, err := ladderSystem(direct, ladder.Config{Name: "settings", Unit: capacityUnit})
	if err != nil {
		return nil, err
	}
	const (
		workers = "dead_letter_worker_consumer_prefetch"
		soft    = "quorum_commands_soft_limit"
	)
	variants := []struct {
		name          string
		workers, soft int
	}{
		{"as they are by default", 32, 32},
		{workers + " = 256", 256, 32},
		{soft + " = 256", 32, 256},
	}
	if l.quick {
		variants = variants[:1]
	}
	var measured runs
	if err := interleaved(pick(l, 1, 2), variants, func(v struct {
		name          string
		workers, soft int
	},
	) error {
		set := fmt.Sprintf("application:set_env(rabbit, %s, %d), application:set_env(rabbit, %s, %d).", workers, v.workers, soft, v.soft)
		if _, err := broker.Ctl(ctx, "eval", set); err != nil {
			return err
		}
		rate, err := sustained(ctx, l, url, of)
		if err != nil {
			return fmt.Errorf("%s: %w", v.name, err)
		}
		measured.add(v.name, rate)
		l.say("%-48s %6.0f/s", v.name, rate)
		return nil
	}); err != nil {
		return nil, err
	}
	t := table{columns: []string{"setting", "messages per second, median", "lowest", "highest", "to the default"}}
	for _, v := range variants {
		low, high := measured.spread(v.name)
		t.rows = append(t.rows, []string{v.name, number(measured.median(v.name)), number(low), number(high), number(measured.ratio(v.name, variants[0].name))})
	}
	return &section{
		title:  "Settings of the broker",
		text:   "Capacity of the ladder without slack, with quorum queues declared anew after each change of a setting of the broker.",
		tables: []table{t},
	}, nil
}
