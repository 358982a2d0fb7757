package ladder_test

import (
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
)

// fuzzLadder makes a ladder of 1 to 39 levels from any byte.
func fuzzLadder(t *testing.T, levels uint8) *ladder.Ladder {
	t.Helper()
	return mustLadder(t, ladder.Config{Unit: time.Millisecond, Levels: int(levels)%39 + 1})
}

// FuzzParseKey parses any bytes: what is accepted is written again as the same
// key, and all else is ErrInvalidKey.
func FuzzParseKey(f *testing.F) {
	for _, key := range []string{
		"", ".", "1", "1.", "0.1", "1.0.1.0.1.0.email.delivery", "0.0.0.0.0.0.a..b", "1.0.1.0.1.0.", "1.0.1.0.1.0..",
		"1.0.1.0.1.0.*", "1.0.1.0.1.0.a.#.b", "1.0.1.0.1.0.##", "*.*.*.*.*.*.billing", "1.0.2.0.1.0.billing",
		"1.0.1.0.1.0.größe.日本", "1.0.1.0.1.0.\xff", "1.0.1.0.1.0." + strings.Repeat("x", 243),
		"1.0.1.0.1.0." + strings.Repeat("x", 244), strings.Repeat("1.", 39) + "billing",
	} {
		f.Add(uint8(5), key)
		f.Add(uint8(0), key)
		f.Add(uint8(38), key)
	}
	f.Fuzz(func(t *testing.T, levels uint8, key string) {
		checkParseKey(t, fuzzLadder(t, levels), key)
	})
}

// FuzzRoute makes routes of any delay and destination: they agree with the
// oracle and are parsed again, or the error says which of the two is at fault.
func FuzzRoute(f *testing.F) {
	for _, destination := range []string{
		"", "billing", "sales.billing", "a..b", ".", "*", "#", "a.*", "#.a", "a*", "##", "1.0.1", "größe.日本", "\xff",
		strings.Repeat("x", 243), strings.Repeat("x", 244),
	} {
		f.Add(uint8(5), int64(42*time.Millisecond), destination)
	}
	for _, delay := range []int64{
		math.MinInt64, -1, 0, 1, int64(time.Millisecond) - 1, int64(time.Millisecond), int64(time.Millisecond) + 1,
		int64(63 * time.Millisecond), int64(63*time.Millisecond) + 1, int64(time.Hour), math.MaxInt64,
	} {
		f.Add(uint8(5), delay, "billing")
		f.Add(uint8(0), delay, "billing")
		f.Add(uint8(38), delay, "billing")
	}
	f.Fuzz(func(t *testing.T, levels uint8, delay int64, destination string) {
		l := fuzzLadder(t, levels)
		if !validDestination(l, destination) {
			_, err := l.Route(0, destination)
			require.ErrorIs(t, err, ladder.ErrInvalidDestination)
			_, err = l.BindingKey(destination)
			require.ErrorIs(t, err, ladder.ErrInvalidDestination)
			return
		}
		checkRoute(t, l, time.Duration(delay), destination)

		binding, err := l.BindingKey(destination)
		require.NoError(t, err)
		route, err := l.Route(0, destination)
		require.NoError(t, err)
		require.True(t, topicMatches(splitWords(binding), splitWords(route.Key)))
	})
}

// FuzzUnitsWithin asks for any delay with any slack, and compares with the oracle.
func FuzzUnitsWithin(f *testing.F) {
	for _, slack := range []int64{math.MinInt64, -1, 0, 1, int64(time.Millisecond), int64(time.Second), math.MaxInt64} {
		for _, delay := range []int64{math.MinInt64, 0, 1, int64(41 * time.Millisecond), int64(1023 * time.Millisecond), int64(time.Hour), math.MaxInt64} {
			f.Add(uint8(5), delay, slack)
			f.Add(uint8(19), delay, slack)
			f.Add(uint8(38), delay, slack)
		}
	}
	f.Fuzz(func(t *testing.T, levels uint8, delay, slack int64) {
		checkUnitsWithin(t, fuzzLadder(t, levels), time.Duration(delay), time.Duration(slack))
	})
}

// validDestination is the rule for destinations once more, in the simplest way.
func validDestination(l *ladder.Ladder, destination string) bool {
	return destination != "" && utf8.ValidString(destination) && !hasWildcardWord(destination) &&
		len(destination)+2*l.Config().Levels <= 255
}
