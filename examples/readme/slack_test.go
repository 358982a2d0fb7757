package readme

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
)

// The rows of "Fewer hops with slack", computed from the ladders.
func TestSlackTable(t *testing.T) {
	t.Parallel()
	var ladders []*ladder.Ladder
	for _, slack := range []float64{0, 0.01, 0.05, 0.125} {
		l, err := ladder.New(ladder.Config{Levels: 22, Slack: slack})
		require.NoError(t, err)
		ladders = append(ladders, l)
	}
	const day = 24 * time.Hour
	var rows []string
	for _, d := range []struct {
		name  string
		delay time.Duration
	}{
		{"1 m", time.Minute}, {"5 m", 5 * time.Minute}, {"1 h", time.Hour}, {"1 day", day}, {"7 days", 7 * day}, {"30 days", 30 * day},
	} {
		row := "| " + d.name + " |"
		for _, l := range ladders {
			row += cell(t, l, d.delay)
		}
		rows = append(rows, row)
	}
	rows = append(rows, "| any up to 1 h, mean |", "| any up to 1 day, mean |", "| any of 20 bits, mean |")
	means := rows[len(rows)-3:]
	for _, l := range ladders {
		means[0] += meanCell(t, l, time.Hour)
		means[1] += meanCell(t, l, day)
		// With 20 levels, as at the horizon there is no room for slack.
		config := l.Config()
		config.Levels = 20
		twenty, err := ladder.New(config)
		require.NoError(t, err)
		means[2] += meanCell(t, twenty, twenty.Horizon())
	}
	table := strings.Join(rows, "\n") + "\n"
	assert.Contains(t, read(t, "README.md"), table, "the table should be\n%s", table)
}

// cell has the hops of a delay and what it becomes longer.
func cell(t *testing.T, l *ladder.Ladder, delay time.Duration) string {
	t.Helper()
	route, err := l.Route(delay, "any")
	require.NoError(t, err)
	// A publisher comes to the same, some time after the call.
	later, err := l.UnitsWithin(delay-time.Millisecond, time.Duration(l.Config().Slack*float64(delay)))
	require.NoError(t, err)
	require.Equal(t, route.Units, later)
	added := time.Duration(route.Units)*l.Config().Unit - delay
	if added == 0 {
		return fmt.Sprintf(" %d |", route.Hops())
	}
	return fmt.Sprintf(" %d, +%v (%.2g %%) |", route.Hops(), added, 100*added.Seconds()/delay.Seconds())
}

// meanCell has the means of all delays in whole units from 0 to the longest.
func meanCell(t *testing.T, l *ladder.Ladder, longest time.Duration) string {
	t.Helper()
	most, err := l.Units(longest)
	require.NoError(t, err)
	hops, sum, worst := 0, 0.0, 0.0
	for value := uint64(1); value <= most; value++ {
		route, err := l.Route(time.Duration(value)*l.Config().Unit, "any")
		if err != nil {
			require.NoError(t, err)
		}
		hops += route.Hops()
		added := float64(route.Units-value) / float64(value)
		sum += added
		worst = max(worst, added)
	}
	mean := 1 / float64(most+1)
	if sum == 0 {
		return fmt.Sprintf(" %.1f |", float64(hops)*mean)
	}
	return fmt.Sprintf(" %.1f, +%.2g %%, at worst %g %% |", float64(hops)*mean, 100*sum*mean, math.Round(1000*worst)/10)
}
