package ladder_test

import (
	"fmt"
	"math"
	"math/big"
	"math/bits"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

func TestUnitsWithin(t *testing.T) {
	t.Parallel()
	six, twenty := ladder.Config{Levels: 6}, ladder.Config{}
	tests := []struct {
		name   string
		config ladder.Config
		delay  time.Duration
		slack  time.Duration
		want   uint64
	}{
		{"the example of the documentation", twenty, 1023 * time.Second, time.Second, 1024},
		{"no slack", twenty, 1023 * time.Second, 0, 1023},
		{"negative slack", twenty, 1023 * time.Second, -time.Hour, 1023},
		{"most negative slack", twenty, 1023 * time.Second, math.MinInt64, 1023},
		{"1 ns too little", twenty, 1023 * time.Second, time.Second - 1, 1023},
		{"no delay", twenty, 0, time.Hour, 0},
		{"negative delay", twenty, -time.Hour, 2 * time.Hour, 0},
		{"most negative delay", twenty, math.MinInt64, math.MaxInt64, 0},
		{"one hop is not made longer", twenty, 1024 * time.Second, time.Hour, 1024},
		{"the shortest of several", six, 3 * time.Second, 40 * time.Second, 4},
		{"a shorter one with as many hops", six, 18 * time.Second, 6 * time.Second, 18},
		{"less hops, not the fewest of all", six, 43 * time.Second, 6 * time.Second, 48},
		{"slack within the rounding", twenty, 1022*time.Second + 1, time.Second - 2, 1023},
		{"slack that the rounding uses up", twenty, 1022*time.Second + 1, time.Second - 1, 1023},
		{"slack behind the rounding", twenty, 1022*time.Second + 1, 2*time.Second - 1, 1024},
		{"a part of a unit", six, 1, 1, 1},
		{"the horizon cuts it off", six, 59 * time.Second, time.Hour, 60},
		{"at the horizon", six, 63 * time.Second, math.MaxInt64, 63},
		{"longest slack", twenty, 1023 * time.Second, math.MaxInt64, 1024},
		{"one level", ladder.Config{Levels: 1}, time.Second, time.Hour, 1},
		{"most levels", ladder.Config{Unit: time.Millisecond, Levels: 39}, (1<<39 - 1) * time.Millisecond, math.MaxInt64, 1<<39 - 1},
		{"most levels but one", ladder.Config{Unit: time.Millisecond, Levels: 39}, (1<<38 - 1) * time.Millisecond, math.MaxInt64, 1 << 38},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			l := mustLadder(t, tt.config)
			got, err := l.UnitsWithin(tt.delay, tt.slack)
			require.NoError(t, err)
			assert.Equal(t, tt.want, got)
			checkUnitsWithin(t, l, tt.delay, tt.slack)
		})
	}
}

// A delay beyond the horizon is not saved by what is cut off.
func TestUnitsWithinDelayTooLong(t *testing.T) {
	t.Parallel()
	l := mustLadder(t, ladder.Config{Levels: 6})
	for _, slack := range []time.Duration{0, time.Second, math.MaxInt64} {
		for _, delay := range []time.Duration{63*time.Second + 1, math.MaxInt64} {
			units, err := l.UnitsWithin(delay, slack)
			require.ErrorIs(t, err, ladder.ErrDelayTooLong)
			assert.ErrorContains(t, err, delay.String())
			assert.Zero(t, units)
		}
	}
	full := mustLadder(t, ladder.Config{Levels: 6, Slack: 1})
	_, err := full.Route(math.MaxInt64, "billing")
	require.ErrorIs(t, err, ladder.ErrDelayTooLong)
}

// Each window below 700 units, against a search.
func TestUnitsWithinOfAllSmallWindows(t *testing.T) {
	t.Parallel()
	const limit = 700
	l := mustLadder(t, ladder.Config{Unit: time.Millisecond, Levels: 10})
	for least := range uint64(limit) {
		best := least
		for most := least; most < limit; most++ {
			if bits.OnesCount64(most) < bits.OnesCount64(best) {
				best = most
			}
			got, err := l.UnitsWithin(time.Duration(least)*time.Millisecond, time.Duration(most-least)*time.Millisecond)
			if err != nil || got != best {
				require.NoError(t, err)
				require.Equal(t, best, got, "from %d to %d", least, most)
			}
		}
	}
}

// Windows anywhere, against a search.
func TestUnitsWithinAgreesWithSearch(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := drawLadder(t)
		least := drawUnits(t, l)
		room := uint64(1)<<l.Config().Levels - 1 - least
		most := least + rapid.Uint64Max(min(room, 5000)).Draw(t, "slack")

		best := least
		for value := least; value <= most; value++ {
			if bits.OnesCount64(value) < bits.OnesCount64(best) {
				best = value
			}
		}
		if least == 0 {
			best = 0
		}
		got, err := l.UnitsWithin(time.Duration(least)*time.Millisecond, time.Duration(most-least)*time.Millisecond)
		require.NoError(t, err)
		require.Equal(t, best, got)
	})
}

func TestUnitsWithinAgreesWithOracle(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		unit := genUnit().Draw(t, "unit")
		delay := genDuration(0, tenYearsTTL-unit).Draw(t, "delay")
		levels, err := ladder.LevelsFor(unit, max(delay, 1))
		require.NoError(t, err)
		if levels < 39 && rapid.Bool().Draw(t, "another level") {
			if _, err := ladder.New(ladder.Config{Unit: unit, Levels: levels + 1}); err == nil {
				levels++
			}
		}
		checkUnitsWithin(t, mustLadder(t, ladder.Config{Unit: unit, Levels: levels}), delay, genDuration(-1, math.MaxInt64).Draw(t, "slack"))
	})
}

// genDuration generates durations of all orders of magnitude.
func genDuration(least, most time.Duration) *rapid.Generator[time.Duration] {
	return rapid.Custom(func(t *rapid.T) time.Duration {
		limit := min(int64(most), int64(1)<<rapid.IntRange(0, 62).Draw(t, "magnitude"))
		return time.Duration(rapid.Int64Range(int64(least), limit).Draw(t, "nanoseconds"))
	})
}

// checkUnitsWithin asks for the units of a window, checks the promises and
// compares with the oracle.
func checkUnitsWithin(t require.TestingT, l *ladder.Ladder, delay, slack time.Duration) {
	config := l.Config()
	want := oracle{levels: config.Levels, unit: config.Unit}
	units, err := l.UnitsWithin(delay, slack)
	if want.tooLong(delay) {
		require.ErrorIs(t, err, ladder.ErrDelayTooLong)
		return
	}
	require.NoError(t, err)
	require.Equal(t, want.unitsWithin(delay, slack).String(), fmt.Sprint(units))

	exact, err := l.Units(delay)
	require.NoError(t, err)
	require.GreaterOrEqual(t, units, exact, "not early")
	require.LessOrEqual(t, bits.OnesCount64(units), bits.OnesCount64(exact))
	require.Less(t, units, uint64(1)<<config.Levels, "within the horizon")
	if units > exact {
		wait := time.Duration(units) * config.Unit // at most twenty years
		require.LessOrEqual(t, wait-delay, slack, "within the window")
		require.Less(t, bits.OnesCount64(units), bits.OnesCount64(exact), "late for something")
	}
}

// The window is that of the call, whenever the message is sent.
func TestSlackIsNotAddedTwice(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := drawLadder(t)
		delay := genDuration(0, l.Horizon()).Draw(t, "delay")
		slack := genDuration(0, l.Horizon()).Draw(t, "slack")
		passed := time.Duration(rapid.Int64Range(0, int64(delay)).Draw(t, "passed"))

		units, err := l.UnitsWithin(delay-passed, slack)
		require.NoError(t, err)
		exact, err := l.Units(delay - passed)
		require.NoError(t, err)
		if units > exact {
			require.LessOrEqual(t, passed+time.Duration(units)*l.Config().Unit, delay+slack)
		}
	})
}

// A route's slack is the ladder's fraction of the delay, to the nanosecond as
// far as a float64 goes: 53 bits.
func TestRouteWithSlack(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		config := ladder.Config{
			Unit: time.Millisecond, Levels: rapid.IntRange(1, 39).Draw(t, "levels"),
			Slack: rapid.OneOf(rapid.Float64Range(0, 1), rapid.SampledFrom([]float64{0, 0.01, 0.05, 0.125, 0.29, 1})).Draw(t, "slack"),
		}
		l := mustLadder(t, config)
		delay := genDuration(-1, l.Horizon()).Draw(t, "delay")
		route, err := l.Route(delay, "billing")
		require.NoError(t, err)

		fraction := new(big.Rat).SetFloat64(config.Slack)
		exact, _ := fraction.Mul(fraction, new(big.Rat).SetInt64(int64(delay))).Float64()
		near := false
		for _, off := range []float64{-1, 0, 1} { // in the last of 53 bits
			slack := time.Duration(math.Round(exact * (1 + off*0x1p-52)))
			units, err := l.UnitsWithin(delay, slack)
			require.NoError(t, err)
			near = near || units == route.Units
		}
		require.True(t, near, "%d units", route.Units)

		units, destination, err := l.ParseKey(route.Key)
		require.NoError(t, err)
		require.Equal(t, route.Units, units)
		require.Equal(t, "billing", destination)
	})
}

func TestRouteWithSlackByHand(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		slack float64
		delay time.Duration
		want  uint64
	}{
		{0, 1023 * time.Second, 1023},
		{0.01, 1023 * time.Second, 1024},
		{0.28, 100 * time.Second, 128},   // just so
		{0.2799, 100 * time.Second, 100}, // 112 has three hops too
		{0.024, 1000 * time.Second, 1024},
		{1, 513 * time.Second, 1024},
		{1, 1_048_575 * time.Second, 1_048_575},
		{1, 0, 0},
		{1, -time.Hour, 0},
		{1, math.MinInt64, 0},
		{math.SmallestNonzeroFloat64, 1023 * time.Second, 1023},
	} {
		route, err := mustLadder(t, ladder.Config{Slack: c.slack}).Route(c.delay, "billing")
		require.NoError(t, err)
		assert.Equal(t, c.want, route.Units, "%v with %v", c.delay, c.slack)
	}
}

// Slack changes what publishers write and nothing that is declared.
func TestSlackChangesNoObject(t *testing.T) {
	t.Parallel()
	exact, loose := mustLadder(t, ladder.Config{}), mustLadder(t, ladder.Config{Slack: 0.5})
	assert.Equal(t, exact.Topology(), loose.Topology())
	assert.Equal(t, exact.String(), loose.String())
	units, err := loose.Units(1023 * time.Second)
	require.NoError(t, err)
	assert.Equal(t, uint64(1023), units, "Units is exact")
	units, err = loose.UnitsWithin(1023*time.Second, 0)
	require.NoError(t, err)
	assert.Equal(t, uint64(1023), units, "UnitsWithin has its own slack")
}

// The showpiece: over all delays of 20 bits one percent saves six hops of ten.
func TestMeanHopsWithSlack(t *testing.T) {
	t.Parallel()
	const levels = 20
	l := mustLadder(t, ladder.Config{Levels: levels})
	var exact, hops int
	var added, worst float64
	for value := range uint64(1 << levels) {
		delay := time.Duration(value) * time.Second
		units, err := l.UnitsWithin(delay, delay/100)
		if err != nil {
			require.NoError(t, err)
		}
		exact += bits.OnesCount64(value)
		hops += bits.OnesCount64(units)
		if value > 0 {
			share := float64(units-value) / float64(value)
			added += share
			worst = max(worst, share)
		}
	}
	assert.Equal(t, levels<<levels/2, exact)
	assert.InDelta(t, 4.12, float64(hops)/(1<<levels), 0.005)
	assert.InDelta(t, 0.0031, added/(1<<levels), 0.00005)
	assert.LessOrEqual(t, worst, 0.01)
}

// TestPublishWithSlack looks at what publishers write. A unit of a minute leaves
// them that time from the call to the writing.
func TestPublishWithSlack(t *testing.T) {
	t.Parallel()
	const delay = 1023 * time.Minute
	url := brokertest.VHost(t)
	publisher := func(slack float64) (*ladder.Publisher, *outcomes) {
		o := &outcomes{}
		l := mustLadder(t, ladder.Config{Name: "slack", Unit: time.Minute, Levels: 12, Slack: slack})
		return newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}, Observer: o}), o
	}
	exact, exactOutcomes := publisher(0)
	loose, looseOutcomes := publisher(0.01)
	for _, c := range []struct {
		name     string
		p        *ladder.Publisher
		outcomes *outcomes
		opts     []ladder.PublishOption
		hops     int
	}{
		{"exact", exact, exactOutcomes, nil, 10},
		{"the ladder's slack", loose, looseOutcomes, nil, 1},
		{"no slack instead of the ladder's", loose, looseOutcomes, []ladder.PublishOption{ladder.WithSlack(0)}, 10},
		{"less slack than the ladder's", loose, looseOutcomes, []ladder.PublishOption{ladder.WithSlack(1)}, 10},
		{"slack of this publish alone", exact, exactOutcomes, []ladder.PublishOption{ladder.WithSlack(2 * time.Minute)}, 1},
		{"the last option counts", exact, exactOutcomes, []ladder.PublishOption{ladder.WithSlack(-1), ladder.WithSlack(2 * time.Minute)}, 1},
		{"a window that ends too soon by the time that has passed", exact, exactOutcomes, []ladder.PublishOption{ladder.WithSlack(time.Minute)}, 10},
		{"longest slack", exact, exactOutcomes, []ladder.PublishOption{ladder.WithSlack(math.MaxInt64)}, 1},
	} {
		before, _ := c.outcomes.seen()
		require.NoError(t, c.p.PublishDelayed(within(t), "work", delay, amqp.Publishing{}, c.opts...), c.name)
		require.NoError(t, c.p.PublishAt(within(t), "work", time.Now().Add(delay), amqp.Publishing{}, c.opts...), c.name)
		require.NoError(t, c.p.PublishBatch(within(t), []ladder.Message{
			{Destination: "work", Delay: delay}, {Destination: "work", At: time.Now().Add(delay)},
		}, c.opts...), c.name)
		events, _ := c.outcomes.seen()
		require.Len(t, events[len(before):], 4, c.name)
		for _, e := range events[len(before):] {
			assert.Equal(t, c.hops, e.Hops, c.name)
		}
	}
}

func TestPublishRefusesNegativeSlack(t *testing.T) {
	t.Parallel()
	l, url, got := declared(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	for _, slack := range []time.Duration{-1, math.MinInt64} {
		for _, err := range []error{
			p.PublishDelayed(within(t), "work", 0, amqp.Publishing{}, ladder.WithSlack(slack)),
			p.PublishAt(within(t), "work", time.Now(), amqp.Publishing{}, ladder.WithSlack(slack)),
			p.PublishBatch(within(t), []ladder.Message{{Destination: "work"}, {Destination: "work"}}, ladder.WithSlack(slack)),
		} {
			require.ErrorIs(t, err, ladder.ErrInvalidMessage)
			assert.ErrorContains(t, err, "WithSlack "+slack.String()+": must not be negative")
			assert.True(t, ladder.SafeToRetry(err))
		}
	}
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{MessageId: "the only one"}))
	list := got.waitFor(t, 1)
	require.Len(t, list, 1)
	assert.Equal(t, "the only one", list[0].MessageId)
}

// TestSlackThroughTheBroker waits for messages whose delay is all ones: they come
// by one hop, not before their instant, and by their key it is the longer way.
func TestSlackThroughTheBroker(t *testing.T) {
	t.Parallel()
	const messages, delay, slack = 50, 1270 * time.Millisecond, 400 * time.Millisecond
	l := mustLadder(t, ladder.Config{Name: "slack", Unit: 10 * time.Millisecond, Levels: 9})
	url := brokertest.VHost(t)
	ch := openChannel(t, url)
	require.NoError(t, l.Declare(within(t), ch))
	declareBound(t, ch, l, "work", "work")
	got := collect(t, ch, l, "work")
	o := &outcomes{}
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}, Observer: o})

	batch := make([]ladder.Message, messages)
	for i := range batch {
		batch[i] = ladder.Message{Destination: "work", Delay: delay, Publishing: amqp.Publishing{Body: body(i)}}
	}
	called := time.Now()
	require.NoError(t, p.PublishBatch(within(t), batch, ladder.WithSlack(slack)))
	events, _ := o.seen()
	require.Len(t, events, messages)

	list := got.waitFor(t, messages)
	requireOnTime(t, list)
	require.Len(t, list, messages)
	for _, a := range list {
		// The header has the instant asked for: lateness shows what slack took.
		assert.WithinRange(t, a.NotBefore, called.Add(delay-time.Millisecond), called.Add(delay+time.Second))
		units, _, err := l.ParseKey(a.RoutingKey)
		require.NoError(t, err)
		// 127 units have seven. Two are for a machine that takes 0.5 s to write them.
		assert.LessOrEqual(t, bits.OnesCount64(units), 2)
		assert.LessOrEqual(t, time.Duration(units)*10*time.Millisecond, delay+slack)
	}
	for _, e := range events {
		assert.LessOrEqual(t, e.Hops, 2)
	}
}

// TestSlackAfterAnOutage publishes while the broker cannot be reached: what is left
// of the delay is sent with what is left of the window.
func TestSlackAfterAnOutage(t *testing.T) {
	t.Parallel()
	const delay, outage, slack = 6 * time.Second, 3 * time.Second, time.Second
	l := mustLadder(t, ladder.Config{Name: "slack", Unit: 100 * time.Millisecond, Levels: 8})
	direct := brokertest.VHost(t)
	ch := openChannel(t, direct)
	require.NoError(t, l.Declare(within(t), ch))
	declareBound(t, ch, l, "work", "work")
	got := collect(t, ch, l, "work")
	proxy, through := brokertest.Proxied(t, direct)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{through}, Connection: impatient})
	proxy.Refuse()
	proxy.Cut()
	began := time.Now()
	time.AfterFunc(outage, proxy.Pass)
	require.NoError(t, p.PublishDelayed(within(t), "work", delay, amqp.Publishing{}, ladder.WithSlack(slack)))

	list := got.waitFor(t, 1)
	requireOnTime(t, list)
	units, _, err := l.ParseKey(list[0].RoutingKey)
	require.NoError(t, err)
	// It was not written before the outage was over.
	wait := time.Duration(units) * 100 * time.Millisecond
	assert.LessOrEqual(t, wait, list[0].NotBefore.Add(time.Millisecond+slack).Sub(began.Add(outage)))
	assert.LessOrEqual(t, bits.OnesCount64(units), 2)
}
