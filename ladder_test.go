package ladder_test

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/rabbitladder/ladder"
)

// tenYearsTTL is RabbitMQ's limit for a level's wait.
const tenYearsTTL = 315_360_000_000 * time.Millisecond

func TestNewFillsInDefaults(t *testing.T) {
	t.Parallel()
	l := mustLadder(t, ladder.Config{})
	assert.Equal(t, ladder.Config{
		Name: "ladder", Unit: time.Second, Levels: 20, QueueType: "quorum", Layout: "direct",
	}, l.Config())
	assert.Equal(t, "ladder.20x1s", l.String())
	assert.Equal(t, 1_048_575*time.Second, l.Horizon())
	assert.Equal(t, 215, l.MaxDestination())
}

func TestNewKeepsWhatIsGiven(t *testing.T) {
	t.Parallel()
	config := ladder.Config{
		Name: "orders", Unit: 250 * time.Millisecond, Levels: 8, QueueType: ladder.Classic, Layout: ladder.Chain,
		Slack: 0.05,
	}
	assert.Equal(t, config, mustLadder(t, config).Config())
}

// Each case stands on the allowed side of a limit that TestNewRefuses crosses.
func TestNewAccepts(t *testing.T) {
	t.Parallel()
	// The longest object name is <Name>.1x1s.unroutable.
	const room = 255 - len(".1x1s.unroutable")
	tests := []struct {
		name   string
		config ladder.Config
	}{
		{"smallest unit", ladder.Config{Unit: time.Millisecond}},
		{"unit of odd milliseconds", ladder.Config{Unit: 1001 * time.Millisecond}},
		{"unit of ten years, one level", ladder.Config{Unit: tenYearsTTL, Levels: 1}},
		{"unit of five years, two levels", ladder.Config{Unit: tenYearsTTL / 2, Levels: 2}},
		{"one level", ladder.Config{Levels: 1}},
		{"most levels at 1 ms", ladder.Config{Unit: time.Millisecond, Levels: 39}},
		{"most levels at 1 s", ladder.Config{Unit: time.Second, Levels: 29}},
		{"most levels at 1 m", ladder.Config{Unit: time.Minute, Levels: 23}},
		{"longest name", ladder.Config{Name: strings.Repeat("n", room), Levels: 1}},
		{"longest name in bytes", ladder.Config{Name: strings.Repeat("é", room/2), Levels: 1}},
		{"name with amq. inside", ladder.Config{Name: "my.amq.ladder"}},
		{"name that starts with amq only", ladder.Config{Name: "amqp"}},
		{"name in capitals", ladder.Config{Name: "AMQ.ladder"}},
		{"name with dots, blanks and wildcards", ladder.Config{Name: "a..b *.#"}},
		{"name beyond ASCII", ladder.Config{Name: "leiter-größe-梯子"}},
		{"classic", ladder.Config{QueueType: ladder.Classic}},
		{"quorum", ladder.Config{QueueType: ladder.Quorum}},
		{"chain", ladder.Config{Layout: ladder.Chain}},
		{"direct", ladder.Config{Layout: ladder.Direct}},
		{"smallest slack", ladder.Config{Slack: math.SmallestNonzeroFloat64}},
		{"slack of the whole delay", ladder.Config{Slack: 1}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			l, err := ladder.New(tt.config)
			require.NoError(t, err)
			// What New accepts, a broker must accept too.
			require.NoError(t, newBrokerModel().declare(l.Topology()))
		})
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	const room = 255 - len(".1x1s.unroutable")
	tests := []struct {
		name   string
		config ladder.Config
		field  string
		value  string
		rule   string
	}{
		{"negative unit", ladder.Config{Unit: -time.Second}, "Unit", "-1s", "at least 1ms"},
		{"unit below 1 ms", ladder.Config{Unit: time.Millisecond - 1}, "Unit", "999.999µs", "at least 1ms"},
		{"unit of 1 ns", ladder.Config{Unit: 1}, "Unit", "1ns", "at least 1ms"},
		{"unit of 1.5 ms", ladder.Config{Unit: 1500 * time.Microsecond}, "Unit", "1.5ms", "whole number of milliseconds"},
		{"unit just above 1 s", ladder.Config{Unit: time.Second + 1}, "Unit", "1.000000001s", "whole number of milliseconds"},
		{"unit above ten years", ladder.Config{Unit: tenYearsTTL + time.Millisecond, Levels: 1}, "Unit", "87600h0m0.001s", "ten years"},
		{"no levels", ladder.Config{Levels: -1}, "Levels", "-1", "1 to"},
		{"fewest levels of all", ladder.Config{Levels: math.MinInt}, "Levels", fmt.Sprint(math.MinInt), "1 to"},
		{"64 levels", ladder.Config{Unit: time.Millisecond, Levels: 64}, "Levels", "64", "1 to"},
		{"most levels of all", ladder.Config{Levels: math.MaxInt}, "Levels", fmt.Sprint(math.MaxInt), "1 to"},
		{"one level more at 1 ms", ladder.Config{Unit: time.Millisecond, Levels: 40}, "Levels", "40", "at most 39 levels"},
		{"one level more at 1 s", ladder.Config{Unit: time.Second, Levels: 30}, "Levels", "30", "at most 29 levels"},
		{"one level more at 1 m", ladder.Config{Unit: time.Minute, Levels: 24}, "Levels", "24", "at most 23 levels"},
		{"two levels at ten years", ladder.Config{Unit: tenYearsTTL, Levels: 2}, "Levels", "2", "at most 1 levels"},
		{"two levels just above five years", ladder.Config{Unit: tenYearsTTL/2 + time.Millisecond, Levels: 2}, "Levels", "2", "at most 1 levels"},
		{"63 levels", ladder.Config{Unit: time.Millisecond, Levels: 63}, "Levels", "63", "at most 39 levels"},
		{"name one byte too long", ladder.Config{Name: strings.Repeat("n", room+1), Levels: 1}, "Name", strings.Repeat("n", room+1), "256 bytes"},
		{"name too long in bytes", ladder.Config{Name: strings.Repeat("é", room/2+1), Levels: 1}, "Name", strings.Repeat("é", room/2+1), "bytes; AMQP allows 255"},
		{"reserved name", ladder.Config{Name: "amq.ladder"}, "Name", `"amq.ladder"`, "reserved"},
		{"nothing but the reserved prefix", ladder.Config{Name: "amq."}, "Name", `"amq."`, "reserved"},
		// Its objects would be amq.20x1s.level-00 and so on.
		{"reserved as soon as the dot is added", ladder.Config{Name: "amq"}, "Name", `"amq"`, "reserved"},
		{"name not UTF-8", ladder.Config{Name: "a\xffb"}, "Name", `"a\xffb"`, "UTF-8"},
		{"name with a line end", ladder.Config{Name: "a\nb"}, "Name", `"a\nb"`, "control characters"},
		{"name with a carriage return", ladder.Config{Name: "a\r"}, "Name", `"a\r"`, "control characters"},
		{"name with a zero byte", ladder.Config{Name: "\x00"}, "Name", `"\x00"`, "control characters"},
		{"queue type", ladder.Config{QueueType: "stream"}, "QueueType", `"stream"`, `"quorum" or "classic"`},
		{"queue type in capitals", ladder.Config{QueueType: "Quorum"}, "QueueType", `"Quorum"`, `"quorum" or "classic"`},
		{"layout", ladder.Config{Layout: "ring"}, "Layout", `"ring"`, `"direct" or "chain"`},
		{"negative slack", ladder.Config{Slack: -0.01}, "Slack", "-0.01", "0 to 1"},
		{"slack in percent", ladder.Config{Slack: 5}, "Slack", "5", "0 to 1"},
		{"slack just above the delay", ladder.Config{Slack: math.Nextafter(1, 2)}, "Slack", "1.0000000000000002", "0 to 1"},
		{"slack that is no number", ladder.Config{Slack: math.NaN()}, "Slack", "NaN", "0 to 1"},
		{"infinite slack", ladder.Config{Slack: math.Inf(1)}, "Slack", "+Inf", "0 to 1"},
		{"negative infinite slack", ladder.Config{Slack: math.Inf(-1)}, "Slack", "-Inf", "0 to 1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			l, err := ladder.New(tt.config)
			assert.Nil(t, l)
			require.ErrorIs(t, err, ladder.ErrInvalidConfig)
			assert.ErrorContains(t, err, "ladder: invalid configuration: "+tt.field+" ")
			assert.ErrorContains(t, err, tt.value)
			assert.ErrorContains(t, err, tt.rule)
		})
	}
}

func TestNames(t *testing.T) {
	t.Parallel()
	l := mustLadder(t, ladder.Config{Name: "orders", Levels: 12, Unit: 1500 * time.Millisecond})
	assert.Equal(t, "orders.12x1500ms", l.String())
	assert.Equal(t, "orders.12x1500ms.level-00", l.Level(0))
	assert.Equal(t, "orders.12x1500ms.level-07", l.Level(7))
	assert.Equal(t, "orders.12x1500ms.level-11", l.Level(11))
	assert.Equal(t, "orders.12x1500ms.delivery", l.DeliveryExchange())
	assert.Equal(t, "orders.12x1500ms.unroutable", l.UnroutableExchange())
	assert.Equal(t, "orders.12x1500ms.parking", l.ParkingQueue())
	assert.Panics(t, func() { l.Level(12) })
	assert.Panics(t, func() { l.Level(-1) })
}

// A unit is written in one way only: two notations would be two ladders.
func TestUnitInNames(t *testing.T) {
	t.Parallel()
	tests := []struct {
		unit time.Duration
		want string
	}{
		{time.Millisecond, "1ms"},
		{500 * time.Millisecond, "500ms"},
		{999 * time.Millisecond, "999ms"},
		{1000 * time.Millisecond, "1s"},
		{1500 * time.Millisecond, "1500ms"},
		{59 * time.Second, "59s"},
		{60 * time.Second, "1m"},
		{90 * time.Second, "90s"},
		{60_001 * time.Millisecond, "60001ms"},
		{59 * time.Minute, "59m"},
		{60 * time.Minute, "1h"},
		{90 * time.Minute, "90m"},
		{24 * time.Hour, "24h"},
		{3601 * time.Second, "3601s"},
		{tenYearsTTL, "87600h"},
	}
	for _, tt := range tests {
		t.Run(tt.want, func(t *testing.T) {
			t.Parallel()
			l := mustLadder(t, ladder.Config{Unit: tt.unit, Levels: 1})
			assert.Equal(t, "ladder.1x"+tt.want, l.String())
		})
	}
}

// Ladders that differ in name, unit or levels have no object in common.
func TestGeometriesShareNoName(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		draw := func(label string) *ladder.Ladder {
			config := ladder.Config{
				Name:   rapid.SampledFrom([]string{"a", "a.1x1s", "a.2x1m", "a.1x1s.level-00"}).Draw(t, label+" name"),
				Unit:   rapid.SampledFrom([]time.Duration{1, 60, 1000, 60_000, 3_600_000}).Draw(t, label+" unit") * time.Millisecond,
				Levels: rapid.IntRange(1, 12).Draw(t, label+" levels"),
			}
			return mustLadder(t, config)
		}
		one, other := draw("one"), draw("other")
		if one.Config() == other.Config() {
			return
		}
		names := map[string]bool{}
		for _, queue := range one.Topology().Queues {
			names[queue.Name] = true
		}
		for _, exchange := range one.Topology().Exchanges {
			names[exchange.Name] = true
		}
		for _, queue := range other.Topology().Queues {
			require.NotContains(t, names, queue.Name)
		}
		for _, exchange := range other.Topology().Exchanges {
			require.NotContains(t, names, exchange.Name)
		}
	})
}

func TestLevelsFor(t *testing.T) {
	t.Parallel()
	const day = 24 * time.Hour
	tests := []struct {
		name    string
		unit    time.Duration
		horizon time.Duration
		want    int
	}{
		{"less than a unit", time.Second, 1, 1},
		{"one unit", time.Second, time.Second, 1},
		{"a little more than one unit", time.Second, time.Second + 1, 2},
		{"all ones", time.Second, 63 * time.Second, 6},
		{"a little more than all ones", time.Second, 63*time.Second + 1, 7},
		{"one more than all ones", time.Second, 64 * time.Second, 7},
		{"a day in seconds", time.Second, day, 17},
		{"twelve days in seconds", time.Second, 12 * day, 20},
		{"a year in seconds", time.Second, 365 * day, 25},
		{"a year in milliseconds", time.Millisecond, 365 * day, 35},
		{"ten years in seconds", time.Second, tenYearsTTL, 29},
		{"as far as seconds reach", time.Second, (1<<29 - 1) * time.Second, 29},
		{"as far as milliseconds reach", time.Millisecond, (1<<39 - 1) * time.Millisecond, 39},
		{"largest unit", tenYearsTTL, tenYearsTTL, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := ladder.LevelsFor(tt.unit, tt.horizon)
			require.NoError(t, err)
			assert.Equal(t, tt.want, got)
		})
	}
}

func TestLevelsForRefuses(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name    string
		unit    time.Duration
		horizon time.Duration
		field   string
		value   string
	}{
		{"no unit", 0, time.Hour, "Unit", "0s"},
		{"negative unit", -time.Second, time.Hour, "Unit", "-1s"},
		{"unit below 1 ms", time.Microsecond, time.Hour, "Unit", "1µs"},
		{"unit not whole milliseconds", 2500 * time.Microsecond, time.Hour, "Unit", "2.5ms"},
		{"unit above ten years", tenYearsTTL + time.Millisecond, time.Hour, "Unit", "87600h0m0.001s"},
		{"no horizon", time.Second, 0, "horizon", "0s"},
		{"negative horizon", time.Second, -1, "horizon", "-1ns"},
		{"one second beyond seconds", time.Second, (1 << 29) * time.Second, "horizon", "149130h48m32s"},
		{"a little beyond seconds", time.Second, (1<<29-1)*time.Second + 1, "horizon", "149130h48m31.000000001s"},
		{"beyond milliseconds", time.Millisecond, (1 << 39) * time.Millisecond, "horizon", "152709h56m53.888s"},
		{"beyond the largest unit", tenYearsTTL, tenYearsTTL + 1, "horizon", "87600h0m0.000000001s"},
		{"longest duration", time.Second, math.MaxInt64, "horizon", "2562047h47m16.854775807s"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := ladder.LevelsFor(tt.unit, tt.horizon)
			assert.Zero(t, got)
			require.ErrorIs(t, err, ladder.ErrInvalidConfig)
			assert.ErrorContains(t, err, tt.field+" "+tt.value+":")
		})
	}
}

// The levels found are the first that New accepts and that reach the horizon, and
// where LevelsFor refuses there are none.
func TestLevelsForIsSmallest(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		unit := genUnit().Draw(t, "unit")
		horizon := time.Duration(rapid.Int64Min(1).Draw(t, "horizon"))
		if rapid.Bool().Draw(t, "at a limit") {
			near := oracle{levels: rapid.IntRange(1, 39).Draw(t, "levels"), unit: unit}.horizon()
			if !near.IsInt64() {
				t.Skip("the horizon is longer than a Duration")
			}
			horizon = time.Duration(near.Int64()) + time.Duration(rapid.Int64Range(-1, 1).Draw(t, "off by"))
		}

		got, err := ladder.LevelsFor(unit, horizon)

		for levels := 1; levels <= 63; levels++ {
			l, newErr := ladder.New(ladder.Config{Unit: unit, Levels: levels})
			if newErr != nil {
				break
			}
			if l.Horizon() >= horizon {
				require.NoError(t, err)
				require.Equal(t, levels, got)
				return
			}
		}
		require.ErrorIs(t, err, ladder.ErrInvalidConfig)
	})
}

func TestHorizonAndLimitsAgreeWithOracle(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := oracle{
			unit:   genUnit().Draw(t, "unit"),
			levels: rapid.IntRange(1, 63).Draw(t, "levels"),
		}
		l, err := ladder.New(ladder.Config{Unit: want.unit, Levels: want.levels})
		if want.tooLongTTL() {
			require.ErrorIs(t, err, ladder.ErrInvalidConfig)
			return
		}
		require.NoError(t, err)
		require.Equal(t, want.horizon().String(), fmt.Sprint(int64(l.Horizon())))
	})
}
