package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestReport(t *testing.T) {
	t.Parallel()
	directory := filepath.Join(t.TempDir(), "new")
	sections := map[string]*section{"one": {
		title: "One", text: "What was done.",
		tables: []table{{caption: "Speeds", columns: []string{"", "per second"}, rows: [][]string{{"ours", "2"}, {"theirs, too", "1"}}}},
		figures: []figure{
			{name: "bars", title: "Bars", bars: []bar{{name: "ours", value: 2, ours: true}, {name: "theirs", value: 1}}},
			{name: "curves", title: "Curves", logX: true, curves: []curve{{name: "ours", points: distribution([]time.Duration{time.Millisecond, 50 * time.Millisecond})}}},
		},
		targets: []target{{what: "ratio", got: 2, want: 1.5}, {what: "early", got: 1, want: 0, atMost: true}},
	}}
	require.NoError(t, write(directory, []string{"a machine"}, sections, []string{"one"}))

	report, err := os.ReadFile(filepath.Join(directory, "report.md"))
	require.NoError(t, err)
	for _, part := range []string{
		"- a machine\n", "## One\n\nWhat was done.\n", "Speeds:\n\n|  | per second |\n|---|---:|\n| ours | 2 |\n",
		"![Bars](bars.png)", "- ratio: 2.00 (at least 1.50): met\n", "- early: 1.00 (at most 0): **missed**\n",
	} {
		assert.Contains(t, string(report), part)
	}
	values, err := os.ReadFile(filepath.Join(directory, "results.csv"))
	require.NoError(t, err)
	assert.Equal(t, "scenario,table,row,column,value\none,Speeds,ours,per second,2\none,Speeds,\"theirs, too\",per second,1\n", string(values))
	for _, picture := range []string{"bars.png", "curves.png"} {
		content, err := os.ReadFile(filepath.Join(directory, picture))
		require.NoError(t, err)
		assert.Contains(t, string(content), "PNG")
	}
}

func TestNumber(t *testing.T) {
	t.Parallel()
	for f, want := range map[float64]string{0: "0", 0.456: "0.46", 12.34: "12.3", 1234.5: "1234", -0.5: "-0.50"} {
		assert.Equal(t, want, number(f), f)
	}
}

func TestRunRefuses(t *testing.T) {
	t.Parallel()
	require.ErrorContains(t, run(t.Context(), []string{"-only", "encode,none"}), `no scenario "none"`)
	require.ErrorContains(t, run(t.Context(), []string{"extra"}), `unexpected argument "extra"`)
}
