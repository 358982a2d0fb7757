package ladder_test

import (
	"slices"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/rabbitladder/ladder"
)

// mustLadder returns a ladder whose configuration the test knows to be valid.
func mustLadder(t require.TestingT, config ladder.Config) *ladder.Ladder {
	l, err := ladder.New(config)
	require.NoError(t, err)
	return l
}

// drawLadder draws a ladder of 1 to 39 levels, all that RabbitMQ's longest TTL
// allows for a unit of 1 ms, of either layout and queue type.
func drawLadder(t *rapid.T) *ladder.Ladder {
	return mustLadder(t, ladder.Config{
		Unit:      time.Millisecond,
		Levels:    rapid.IntRange(1, 39).Draw(t, "levels"),
		QueueType: rapid.SampledFrom([]ladder.QueueType{ladder.Quorum, ladder.Classic}).Draw(t, "queue type"),
		Layout:    rapid.SampledFrom([]ladder.Layout{ladder.Direct, ladder.Chain}).Draw(t, "layout"),
	})
}

// drawUnits draws a value that the ladder can carry.
func drawUnits(t *rapid.T, l *ladder.Ladder) uint64 {
	return rapid.Uint64Max(uint64(1)<<l.Config().Levels-1).Draw(t, "units")
}

// genUnit generates a unit of any size, spread over the orders of magnitude from
// 1 ms to ten years rather than over their range.
func genUnit() *rapid.Generator[time.Duration] {
	return rapid.Custom(func(t *rapid.T) time.Duration {
		most := int64(1) << rapid.IntRange(0, 38).Draw(t, "magnitude")
		return time.Duration(rapid.Int64Range(1, most).Draw(t, "milliseconds")) * time.Millisecond
	})
}

// genDestination generates valid destinations that are hard on a matcher: empty
// words, words that look like bits, wildcards that are only a part of a word, and
// multi-byte characters. None is longer than the 177 bytes that 39 levels leave.
func genDestination() *rapid.Generator[string] {
	awkward := rapid.StringOfN(rapid.RuneFrom([]rune("01ab*#é日 \n")), 0, 4, -1)
	words := rapid.SliceOfN(awkward, 1, 6)
	return rapid.OneOf(
		rapid.Map(words, func(words []string) string { return strings.Join(words, ".") }),
		rapid.StringN(1, 40, 170),
		rapid.SampledFrom([]string{"billing", "sales.billing", ".", "a..b", "0", "1.0", strings.Repeat("x", 177)}),
	).Filter(func(destination string) bool { return destination != "" && !hasWildcardWord(destination) })
}

// hasWildcardWord is the rule for words once more, in the simplest way.
func hasWildcardWord(destination string) bool {
	words := strings.Split(destination, ".")
	return slices.Contains(words, "*") || slices.Contains(words, "#")
}
