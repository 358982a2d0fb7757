package ladder_test

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/rabbitladder/ladder"
)

// Written by hand, so that code and golden file cannot be wrong together.
func TestRoute(t *testing.T) {
	t.Parallel()
	six := ladder.Config{Levels: 6}
	tests := []struct {
		name        string
		config      ladder.Config
		delay       time.Duration
		destination string
		want        ladder.Route
		hops        int
	}{
		{
			"the example of the documentation", six, 42 * time.Second, "email.delivery",
			ladder.Route{Exchange: "ladder.6x1s.level-05", Key: "1.0.1.0.1.0.email.delivery", Units: 42},
			3,
		},
		{
			"no delay", six, 0, "email.delivery",
			ladder.Route{Exchange: "ladder.6x1s.delivery", Key: "0.0.0.0.0.0.email.delivery", Units: 0},
			0,
		},
		{
			"negative", six, -time.Hour, "billing",
			ladder.Route{Exchange: "ladder.6x1s.delivery", Key: "0.0.0.0.0.0.billing", Units: 0},
			0,
		},
		{
			"most negative", six, math.MinInt64, "billing",
			ladder.Route{Exchange: "ladder.6x1s.delivery", Key: "0.0.0.0.0.0.billing", Units: 0},
			0,
		},
		{
			"one", six, time.Second, "billing",
			ladder.Route{Exchange: "ladder.6x1s.level-00", Key: "0.0.0.0.0.1.billing", Units: 1},
			1,
		},
		{
			"two", six, 2 * time.Second, "billing",
			ladder.Route{Exchange: "ladder.6x1s.level-01", Key: "0.0.0.0.1.0.billing", Units: 2},
			1,
		},
		{
			"three", six, 3 * time.Second, "billing",
			ladder.Route{Exchange: "ladder.6x1s.level-01", Key: "0.0.0.0.1.1.billing", Units: 3},
			2,
		},
		{
			"highest level alone", six, 32 * time.Second, "billing",
			ladder.Route{Exchange: "ladder.6x1s.level-05", Key: "1.0.0.0.0.0.billing", Units: 32},
			1,
		},
		{
			"one less than the highest level", six, 31 * time.Second, "billing",
			ladder.Route{Exchange: "ladder.6x1s.level-04", Key: "0.1.1.1.1.1.billing", Units: 31},
			5,
		},
		{
			"all ones, the horizon", six, 63 * time.Second, "billing",
			ladder.Route{Exchange: "ladder.6x1s.level-05", Key: "1.1.1.1.1.1.billing", Units: 63},
			6,
		},
		{
			"1.2 s on a one-second ladder is 2 units", six, 1200 * time.Millisecond, "billing",
			ladder.Route{Exchange: "ladder.6x1s.level-01", Key: "0.0.0.0.1.0.billing", Units: 2},
			1,
		},
		{
			"1 ns is a whole unit", six, 1, "billing",
			ladder.Route{Exchange: "ladder.6x1s.level-00", Key: "0.0.0.0.0.1.billing", Units: 1},
			1,
		},
		{
			"1 ns more is one unit more", six, 31*time.Second + 1, "billing",
			ladder.Route{Exchange: "ladder.6x1s.level-05", Key: "1.0.0.0.0.0.billing", Units: 32},
			1,
		},
		{
			"destination that looks like bits", six, 5 * time.Second, "1.0.1",
			ladder.Route{Exchange: "ladder.6x1s.level-02", Key: "0.0.0.1.0.1.1.0.1", Units: 5},
			2,
		},
		{
			"one level",
			ladder.Config{Levels: 1, Unit: time.Minute},
			time.Second, "billing",
			ladder.Route{Exchange: "ladder.1x1m.level-00", Key: "1.billing", Units: 1},
			1,
		},
		{
			"half seconds",
			ladder.Config{Levels: 3, Unit: 500 * time.Millisecond},
			1100 * time.Millisecond, "billing",
			ladder.Route{Exchange: "ladder.3x500ms.level-01", Key: "0.1.1.billing", Units: 3},
			2,
		},
		{
			"an hour on the default ladder",
			ladder.Config{},
			time.Hour, "billing",
			ladder.Route{
				Exchange: "ladder.20x1s.level-11",
				Key:      "0.0.0.0.0.0.0.0.1.1.1.0.0.0.0.1.0.0.0.0.billing", Units: 3600,
			},
			4,
		},
		{
			"another name",
			ladder.Config{Name: "orders", Levels: 28},
			(1 << 27) * time.Second, "billing",
			ladder.Route{
				Exchange: "orders.28x1s.level-27",
				Key:      "1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.billing", Units: 134_217_728,
			},
			1,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := mustLadder(t, tt.config).Route(tt.delay, tt.destination)
			require.NoError(t, err)
			assert.Equal(t, tt.want, got)
			assert.Equal(t, tt.hops, got.Hops())
		})
	}
}

// The layout and the queue type are the broker's business: they must not change
// what publishers write, or ladders could not change theirs in place.
func TestRouteIsTheSameForEveryLayoutAndQueueType(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := drawLadder(t)
		config := l.Config()
		config.Layout, config.QueueType = ladder.Direct, ladder.Quorum
		delay := time.Duration(rapid.Int64Max(int64(l.Horizon())).Draw(t, "delay"))
		destination := genDestination().Draw(t, "destination")

		want, err := mustLadder(t, config).Route(delay, destination)
		require.NoError(t, err)
		got, err := l.Route(delay, destination)
		require.NoError(t, err)
		require.Equal(t, want, got)
	})
}

func TestDelayTooLong(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name    string
		config  ladder.Config
		delay   time.Duration
		horizon time.Duration
	}{
		{"one nanosecond", ladder.Config{Levels: 6}, 63*time.Second + 1, 63 * time.Second},
		{"one unit", ladder.Config{Levels: 6}, 64 * time.Second, 63 * time.Second},
		{"longest duration", ladder.Config{}, math.MaxInt64, 1_048_575 * time.Second},
		{"most levels", ladder.Config{Unit: time.Millisecond, Levels: 39}, (1 << 39) * time.Millisecond, (1<<39 - 1) * time.Millisecond},
		{"one level", ladder.Config{Unit: tenYearsTTL, Levels: 1}, tenYearsTTL + 1, tenYearsTTL},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			l := mustLadder(t, tt.config)

			check := func(err error) {
				require.ErrorIs(t, err, ladder.ErrDelayTooLong)
				var tooLong *ladder.DelayTooLongError
				require.ErrorAs(t, err, &tooLong)
				assert.Equal(t, tt.delay, tooLong.Delay)
				assert.Equal(t, tt.horizon, tooLong.Horizon)
				assert.EqualError(t, err, fmt.Sprintf(
					"ladder: delay too long: %v is beyond the horizon of %v", tt.delay, tt.horizon))
			}
			units, err := l.Units(tt.delay)
			check(err)
			assert.Zero(t, units)
			route, err := l.Route(tt.delay, "billing")
			check(err)
			assert.Zero(t, route)

			units, err = l.Units(tt.horizon)
			require.NoError(t, err, "the horizon itself is within reach")
			assert.Equal(t, uint64(tt.horizon/l.Config().Unit), units)
		})
	}
}

func TestValidDestinations(t *testing.T) {
	t.Parallel()
	l := mustLadder(t, ladder.Config{Levels: 20})
	const room = 255 - 2*20
	tests := []struct {
		name        string
		destination string
	}{
		{"one word", "billing"},
		{"two words", "sales.billing"},
		{"many words", "a.b.c.d.e.f.g"},
		{"empty word inside", "a..b"},
		{"empty word first", ".a"},
		{"empty word last", "a."},
		{"nothing but a dot", "."},
		{"nothing but dots", "..."},
		{"star in a word", "a*"},
		{"star first in a word", "*a"},
		{"hash in a word", "#1.a#b"},
		{"two hashes", "##"},
		{"two stars", "a.**.b"},
		{"both wildcards in one word", "*#"},
		{"looks like bits", "1.0.1"},
		{"blank", " "},
		{"line end", "a\nb"},
		{"zero byte", "\x00"},
		{"beyond ASCII", "größe.日本.🐇"},
		{"longest", strings.Repeat("x", room)},
		{"longest in bytes", strings.Repeat("é", room/2) + "x"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			route, err := l.Route(5*time.Second, tt.destination)
			require.NoError(t, err)
			assert.LessOrEqual(t, len(route.Key), 255)

			units, destination, err := l.ParseKey(route.Key)
			require.NoError(t, err)
			assert.Equal(t, uint64(5), units)
			assert.Equal(t, tt.destination, destination)

			_, err = l.BindingKey(tt.destination)
			require.NoError(t, err)
		})
	}
}

func TestInvalidDestinations(t *testing.T) {
	t.Parallel()
	l := mustLadder(t, ladder.Config{Levels: 20})
	const room = 255 - 2*20
	tests := []struct {
		name        string
		destination string
		reason      string
	}{
		{"empty", "", "empty"},
		{"one byte too long", strings.Repeat("x", room+1), "216 bytes"},
		{"too long in bytes, not in characters", strings.Repeat("é", room/2+1), "216 bytes"},
		{"much too long", strings.Repeat("x.", 1<<16), "131072 bytes"},
		{"star", "*", `"*" is a wildcard`},
		{"hash", "#", `"#" is a wildcard`},
		{"star as first word", "*.a", `"*" is a wildcard`},
		{"star as middle word", "a.*.b", `"*" is a wildcard`},
		{"star as last word", "a.*", `"*" is a wildcard`},
		{"hash as first word", "#.a", `"#" is a wildcard`},
		{"hash as middle word", "a.#.b", `"#" is a wildcard`},
		{"hash as last word", "a.#", `"#" is a wildcard`},
		{"star between empty words", ".*.", `"*" is a wildcard`},
		{"hash after words that only have one", "a#.##.#", `"#" is a wildcard`},
		{"not UTF-8", "a.\xff", "UTF-8"},
		{"half of a character", "\xc3", "UTF-8"},
		{"surrogate", "\xed\xa0\x80", "UTF-8"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			check := func(err error) {
				require.ErrorIs(t, err, ladder.ErrInvalidDestination)
				assert.ErrorContains(t, err, "ladder: invalid destination")
				assert.ErrorContains(t, err, tt.reason)
			}
			// Without a delay too: what is published at once needs a
			// binding as well.
			for _, delay := range []time.Duration{0, time.Second} {
				route, err := l.Route(delay, tt.destination)
				check(err)
				assert.Zero(t, route)
			}
			key, err := l.BindingKey(tt.destination)
			check(err)
			assert.Empty(t, key)
		})
	}
}

// The room for a destination depends on the levels, to the byte.
func TestDestinationRoom(t *testing.T) {
	t.Parallel()
	for levels := 1; levels <= 39; levels++ {
		l := mustLadder(t, ladder.Config{Unit: time.Millisecond, Levels: levels})
		require.Equal(t, 255-2*levels, l.MaxDestination())

		route, err := l.Route(0, strings.Repeat("x", 255-2*levels))
		require.NoError(t, err)
		require.Len(t, route.Key, 255)
		key, err := l.BindingKey(strings.Repeat("x", 255-2*levels))
		require.NoError(t, err)
		require.Len(t, key, 255)

		_, err = l.Route(0, strings.Repeat("x", 255-2*levels+1))
		require.ErrorIs(t, err, ladder.ErrInvalidDestination)
	}
}

// Rounding up is the promise that nothing arrives early; rounding up by less than
// a unit is the promise that nothing is later than it must be.
func TestUnitsIsCeiling(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		unit := genUnit().Draw(t, "unit")
		// With each unit a ladder is possible that reaches this far.
		delay := time.Duration(rapid.Int64Range(1, int64(tenYearsTTL-unit)).Draw(t, "delay"))
		levels, err := ladder.LevelsFor(unit, delay)
		require.NoError(t, err)
		l := mustLadder(t, ladder.Config{Unit: unit, Levels: levels})

		units, err := l.Units(delay)

		require.NoError(t, err)
		require.GreaterOrEqual(t, time.Duration(units)*unit, delay)
		require.Less(t, time.Duration(units-1)*unit, delay)
	})
}

func TestUnitsIsMonotone(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := drawLadder(t)
		shorter := time.Duration(rapid.Int64Max(int64(l.Horizon())).Draw(t, "shorter"))
		longer := time.Duration(rapid.Int64Range(int64(shorter), int64(l.Horizon())).Draw(t, "longer"))

		less, err := l.Units(shorter)
		require.NoError(t, err)
		more, err := l.Units(longer)
		require.NoError(t, err)
		require.LessOrEqual(t, less, more)
	})
}

func TestRouteAgreesWithOracle(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := drawLadder(t)
		destination := genDestination().Draw(t, "destination")
		delay := time.Duration(rapid.Int64Max(int64(l.Horizon())).Draw(t, "delay"))
		checkRoute(t, l, delay, destination)
	})
}

// checkRoute asks for the route of a delay and compares it with the oracle's, and
// with what ParseKey and Waits make of it.
func checkRoute(t require.TestingT, l *ladder.Ladder, delay time.Duration, destination string) {
	config := l.Config()
	want := oracle{levels: config.Levels, unit: config.Unit, prefix: l.String()}

	route, err := l.Route(delay, destination)
	if want.tooLong(delay) {
		require.ErrorIs(t, err, ladder.ErrDelayTooLong)
		return
	}
	require.NoError(t, err)
	units := want.units(delay)
	require.Equal(t, units.String(), fmt.Sprint(route.Units))
	require.Equal(t, want.key(units, destination), route.Key)
	require.Equal(t, want.exchange(units), route.Exchange)
	require.Equal(t, want.hops(units), route.Hops())
	require.LessOrEqual(t, len(route.Key), 255)

	parsed, cut, err := l.ParseKey(route.Key)
	require.NoError(t, err)
	require.Equal(t, route.Units, parsed)
	require.Equal(t, destination, cut)

	checkWaits(t, l, route.Units)
}

// checkWaits compares the waits of a value with its bits, from the top.
func checkWaits(t require.TestingT, l *ladder.Ladder, units uint64) {
	var sum time.Duration
	hops, last := 0, l.Config().Levels
	for level, wait := range l.Waits(units) {
		require.Less(t, level, last, "the highest level comes first")
		require.GreaterOrEqual(t, level, 0)
		require.NotZero(t, units&(1<<level), "only levels whose bit is 1")
		require.Equal(t, time.Duration(math.Pow(2, float64(level)))*l.Config().Unit, wait)
		sum += wait
		hops++
		last = level
	}
	require.Equal(t, time.Duration(units)*l.Config().Unit, sum)
	require.Equal(t, bits.OnesCount64(units), hops)
}

func TestWaits(t *testing.T) {
	t.Parallel()
	l := mustLadder(t, ladder.Config{Levels: 6})
	var got []string
	for level, wait := range l.Waits(42) {
		got = append(got, fmt.Sprintf("%d: %v", level, wait))
	}
	assert.Equal(t, []string{"5: 32s", "3: 8s", "1: 2s"}, got)
}

func TestWaitsOfNoDelay(t *testing.T) {
	t.Parallel()
	l := mustLadder(t, ladder.Config{Levels: 6})
	for range l.Waits(0) {
		t.Fatal("a message without delay waits nowhere")
	}
}

func TestWaitsCanBeLeftAndRepeated(t *testing.T) {
	t.Parallel()
	l := mustLadder(t, ladder.Config{Levels: 6})
	waits := l.Waits(42)
	for range 2 {
		for level := range waits {
			assert.Equal(t, 5, level)
			break
		}
	}
	checkWaits(t, l, 42)
}

// What does not fit must not be cut: the message would be early.
func TestUnitsBeyondHorizonPanic(t *testing.T) {
	t.Parallel()
	for _, config := range []ladder.Config{{Levels: 1}, {Levels: 6}, {}, {Levels: 39, Unit: time.Millisecond}} {
		l := mustLadder(t, config)
		most := uint64(1)<<l.Config().Levels - 1
		for _, units := range []uint64{most + 1, math.MaxUint64} {
			assert.Panics(t, func() { l.AppendKey(nil, units, "billing") })
			assert.Panics(t, func() { l.Waits(units) })
		}
		assert.NotPanics(t, func() { l.AppendKey(nil, most, "billing") })
		assert.NotPanics(t, func() { l.Waits(most) })
	}
}

func TestAppendKeyAppends(t *testing.T) {
	t.Parallel()
	l := mustLadder(t, ladder.Config{Levels: 6})
	assert.Equal(t, "1.0.1.0.1.0.billing", string(l.AppendKey(nil, 42, "billing")))
	assert.Equal(t, "before 0.0.0.0.0.1.billing", string(l.AppendKey([]byte("before "), 1, "billing")))

	// With room for all of it, the buffer is used and not replaced.
	buffer := make([]byte, 0, 255)
	got := l.AppendKey(buffer, 42, "billing")
	assert.Same(t, &buffer[:1][0], &got[0])
	assert.Equal(t, "1.0.1.0.1.0.", string(l.AppendKey(buffer, 42, "")), "destinations are not its business")
}

func TestParseKeyRefuses(t *testing.T) {
	t.Parallel()
	l := mustLadder(t, ladder.Config{Levels: 6})
	tests := []struct {
		name        string
		key         string
		reason      string
		destination bool
	}{
		{"empty", "", "shorter than the 6 bits", false},
		{"too few bits", "1.0.1.0.1.", "shorter than the 6 bits", false},
		{"bits without the last dot", "1.0.1.0.1.0", "shorter than the 6 bits", false},
		{"no destination", "1.0.1.0.1.0.", "empty", true},
		{"five bits and a destination", "1.0.1.0.1.billing", "word 6", false},
		{"no bits", "email.delivery.of.something", "word 1", false},
		{"a two", "1.0.2.0.1.0.billing", "word 3", false},
		{"the character before 0", "1.0.1./.1.0.billing", "word 4", false},
		{"the character after 1", "1.0.1.0.1.2.billing", "word 6", false},
		{"a letter", "x.0.1.0.1.0.billing", "word 1", false},
		{"a bit of two characters", "10.1.0.1.0.billing", "word 1", false},
		{"an empty word", "1..0.1.0.1.0.billing", "word 2", false},
		{"another separator", "1,0.1.0.1.0.billing", "word 1", false},
		{"no separator before the destination", "1.0.1.0.1.0billing", "word 6", false},
		{"a blank first", " 1.0.1.0.1.0.billing", "word 1", false},
		{"a wildcard as bit", "*.0.1.0.1.0.billing", "word 1", false},
		{"a binding key", "*.*.*.*.*.*.billing", "word 1", false},
		{"a wildcard as destination", "1.0.1.0.1.0.a.#", "wildcard", true},
		{"destination too long", "1.0.1.0.1.0." + strings.Repeat("x", 244), "244 bytes", true},
		{"destination not UTF-8", "1.0.1.0.1.0.\xff", "UTF-8", true},
		{"bit not UTF-8", "\xb1.0.1.0.1.0.billing", "word 1", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			units, destination, err := l.ParseKey(tt.key)
			require.ErrorIs(t, err, ladder.ErrInvalidKey)
			assert.Equal(t, tt.destination, errors.Is(err, ladder.ErrInvalidDestination))
			assert.ErrorContains(t, err, "ladder: invalid routing key ")
			assert.ErrorContains(t, err, tt.reason)
			assert.Zero(t, units)
			assert.Empty(t, destination)
		})
	}
}

func TestParseKeyRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := drawLadder(t)
		units := drawUnits(t, l)
		destination := genDestination().Draw(t, "destination")

		gotUnits, gotDestination, err := l.ParseKey(string(l.AppendKey(nil, units, destination)))

		require.NoError(t, err)
		require.Equal(t, units, gotUnits)
		require.Equal(t, destination, gotDestination)
	})
}

// A damaged key is refused, or it is the right key for something else: there are
// no two spellings of one route.
func TestParseKeyOfDamagedKeys(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := drawLadder(t)
		key := l.AppendKey(nil, drawUnits(t, l), genDestination().Draw(t, "destination"))
		for range rapid.IntRange(1, 3).Draw(t, "how often") {
			key = damage(t, key)
		}
		checkParseKey(t, l, string(key))
	})
}

// damage changes, adds or takes away a byte, or cuts the key. It prefers the
// bytes that have a meaning, and the bits rather than the destination.
func damage(t *rapid.T, key []byte) []byte {
	at := rapid.IntRange(0, len(key)).Draw(t, "at")
	with := rapid.OneOf(rapid.SampledFrom([]byte("01.*#2/")), rapid.Byte()).Draw(t, "with")
	kind := rapid.SampledFrom([]string{"change", "add", "remove", "cut"}).Draw(t, "kind")
	head, tail := key[:at:at], key[at:]
	switch {
	case kind == "add" || len(tail) == 0:
		return append(append(head, with), tail...)
	case kind == "change":
		return append(append(head, with), tail[1:]...)
	case kind == "remove":
		return append(head, tail[1:]...)
	default:
		return head
	}
}

// checkParseKey parses any key at all: either it is exactly what the ladder
// writes, or the error says that it is not.
func checkParseKey(t require.TestingT, l *ladder.Ladder, key string) {
	units, destination, err := l.ParseKey(key)
	if err != nil {
		require.ErrorIs(t, err, ladder.ErrInvalidKey)
		require.Zero(t, units)
		require.Empty(t, destination)
		return
	}
	require.Less(t, units, uint64(1)<<l.Config().Levels)
	require.Equal(t, key, string(l.AppendKey(nil, units, destination)))
	route, err := l.Route(time.Duration(units)*l.Config().Unit, destination)
	require.NoError(t, err)
	require.Equal(t, key, route.Key)
}

// The first queue is that of the highest 1 bit: a message never visits a level
// above.
func TestRouteEntersAtHighestBit(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := drawLadder(t)
		units := drawUnits(t, l)

		route, err := l.Route(time.Duration(units)*l.Config().Unit, "billing")

		require.NoError(t, err)
		require.Equal(t, units, route.Units)
		for level := range l.Waits(units) {
			require.Equal(t, l.Level(level), route.Exchange)
			return
		}
		require.Equal(t, l.DeliveryExchange(), route.Exchange)
	})
}

// Not parallel: AllocsPerRun counts the allocations of the whole process.
func TestEncodeAllocations(t *testing.T) { //nolint:paralleltest // see above
	l := mustLadder(t, ladder.Config{})
	buffer := make([]byte, 0, 255)
	assert.Zero(t, testing.AllocsPerRun(1000, func() {
		buffer = l.AppendKey(buffer[:0], 699_050, "email.delivery")
	}), "AppendKey")

	var route ladder.Route
	assert.LessOrEqual(t, testing.AllocsPerRun(1000, func() {
		route, _ = l.Route(699_050*time.Second, "email.delivery")
	}), 1.0, "Route allocates the key and nothing else")

	loose := mustLadder(t, ladder.Config{Slack: 0.01})
	assert.LessOrEqual(t, testing.AllocsPerRun(1000, func() {
		_, _ = loose.Route(699_050*time.Second, "email.delivery")
	}), 1.0, "Route with slack")

	assert.Zero(t, testing.AllocsPerRun(1000, func() {
		_, _ = l.UnitsWithin(699_050*time.Second, time.Hour)
	}), "UnitsWithin")

	assert.Zero(t, testing.AllocsPerRun(1000, func() {
		_, _, _ = l.ParseKey(route.Key)
	}), "ParseKey")
}
