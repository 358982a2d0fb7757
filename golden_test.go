package ladder_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
)

var update = flag.Bool("update", false, "rewrite the golden files in testdata from the code")

// goldenFile compares what the code makes with a file in testdata, or writes it
// there with -update. A difference is a change of the wire contract: messages under
// way were written by the old code and are read by the new.
func goldenFile(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, got, 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err, "`go test . -run TestGolden -update` writes it")
	require.Equal(t, strings.Split(string(want), "\n"), strings.Split(string(got), "\n"),
		"%s differs from the code; if that is meant, `go test . -run TestGolden -update` rewrites it", path)
}

const routesHeader = `# Routes of ladders named "ladder", written by TestGoldenRoutes. Columns are divided by tabs; "-" is empty.
# A row whose delay is "-" says what New returns. Levels, unit, delay and destination go in; the others come out.
# levels	unit	delay	destination	exchange	key	units	hops	error
`

func TestGoldenRoutes(t *testing.T) {
	t.Parallel()
	var got bytes.Buffer
	got.WriteString(routesHeader)
	for _, levels := range []int{1, 6, 12, 20, 28} {
		for _, unit := range []time.Duration{time.Millisecond, time.Second, time.Minute} {
			writeRoutes(&got, levels, unit)
		}
	}
	goldenFile(t, "routes.golden.tsv", got.Bytes())
	checkRoutes(t, got.Bytes())
}

// writeRoutes writes the rows of one ladder.
func writeRoutes(to *bytes.Buffer, levels int, unit time.Duration) {
	l, err := ladder.New(ladder.Config{Levels: levels, Unit: unit})
	if err != nil {
		fmt.Fprintf(to, "%d\t%v\t-\t-\t-\t-\t-\t-\t%v\n", levels, unit, err)
		return
	}
	row := func(delay time.Duration, destination string) {
		route, err := l.Route(delay, destination)
		if err != nil {
			fmt.Fprintf(to, "%d\t%v\t%v\t%s\t-\t-\t-\t-\t%v\n", levels, unit, delay, destination, err)
			return
		}
		fmt.Fprintf(to, "%d\t%v\t%v\t%s\t%s\t%s\t%d\t%d\t-\n",
			levels, unit, delay, destination, route.Exchange, route.Key, route.Units, route.Hops())
	}
	for _, delay := range goldenDelays(levels, unit) {
		row(delay, "email.delivery")
	}
	for _, destination := range []string{
		"billing", "sales.billing", "a..b", ".", "a*", "##", "0", "1.0.1", "größe.日本",
		strings.Repeat("x", l.MaxDestination()),
		"*", "a.#", strings.Repeat("x", l.MaxDestination()+1),
	} {
		row(unit, destination)
	}
}

// goldenDelays returns the delays at which an encoder is most likely to be wrong,
// in ascending order.
func goldenDelays(levels int, unit time.Duration) []time.Duration {
	horizon := time.Duration(1)<<levels - 1
	values := []time.Duration{-1, 0, 1, 2, 3, 42, horizon, horizon + 1}
	for k := range levels {
		power := time.Duration(1) << k
		values = append(values, power-1, power, power+1)
	}
	var delays []time.Duration
	for _, value := range values {
		delays = append(delays, value*unit)
	}
	delays = append(delays, -1, 1, unit-1, unit+1, unit*6/5, horizon*unit-1, horizon*unit+1)
	slices.Sort(delays)
	return slices.Compact(delays)
}

// checkRoutes compares each row with the oracle. A golden file that the code has
// written proves only that the code has not changed; this proves that it is right.
func checkRoutes(t *testing.T, rows []byte) {
	t.Helper()
	checked := 0
	for lines := bufio.NewScanner(bytes.NewReader(rows)); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), "#") {
			continue
		}
		column := strings.Split(lines.Text(), "\t")
		require.Len(t, column, 9, lines.Text())
		assert.Equal(t, oracleColumns(t, column[0], column[1], column[2], column[3], column[8]), column[4:], lines.Text())
		checked++
	}
	require.Greater(t, checked, 600)
}

// oracleColumns returns what has to stand behind a row's first four columns. Of
// an error it takes the wording from the row, if that begins as it has to.
func oracleColumns(t *testing.T, levelsText, unitText, delayText, destination, message string) []string {
	t.Helper()
	levels, err := strconv.Atoi(levelsText)
	require.NoError(t, err)
	unitName := map[string]string{"1ms": "1ms", "1s": "1s", "1m0s": "1m"}[unitText]
	unit, err := time.ParseDuration(unitText)
	require.NoError(t, err)
	o := oracle{levels: levels, unit: unit, prefix: "ladder." + levelsText + "x" + unitName}

	fails := func(kind string) []string {
		require.True(t, strings.HasPrefix(message, kind), "%q should begin with %q", message, kind)
		return []string{"-", "-", "-", "-", message}
	}
	if o.tooLongTTL() {
		require.Equal(t, "-", delayText)
		return fails("ladder: invalid configuration: Levels " + levelsText + ": ")
	}
	delay, err := time.ParseDuration(delayText)
	require.NoError(t, err)
	switch {
	case o.tooLong(delay):
		return fails("ladder: delay too long: " + delayText + " ")
	case destination == "*" || destination == "a.#" || len(destination)+2*levels > 255:
		return fails("ladder: invalid destination " + strconv.Quote(destination[:min(len(destination), 40)]))
	}
	units := o.units(delay)
	return []string{o.exchange(units), o.key(units, destination), units.String(), strconv.Itoa(o.hops(units)), "-"}
}

func TestGoldenTopologies(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]ladder.Config{
		"topology-quorum-direct-4x1s":   {Levels: 4},
		"topology-quorum-chain-4x1s":    {Levels: 4, Layout: ladder.Chain},
		"topology-classic-direct-4x1s":  {Levels: 4, QueueType: ladder.Classic},
		"topology-classic-chain-4x1s":   {Levels: 4, QueueType: ladder.Classic, Layout: ladder.Chain},
		"topology-quorum-direct-1x50ms": {Name: "orders", Levels: 1, Unit: 50 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			goldenFile(t, name+".golden.json", topologyJSON(t, mustLadder(t, config).Topology()))
		})
	}
}

// topologyJSON writes a topology as JSON with one object a line, so that a
// difference is read at a glance.
func topologyJSON(t *testing.T, topology ladder.Topology) []byte {
	t.Helper()
	var out bytes.Buffer
	line := func(object any, last bool) {
		text, err := json.Marshal(object)
		require.NoError(t, err)
		fmt.Fprintf(&out, "    %s", text)
		if !last {
			out.WriteString(",")
		}
		out.WriteString("\n")
	}
	out.WriteString("{\n  \"Exchanges\": [\n")
	for i, exchange := range topology.Exchanges {
		line(exchange, i == len(topology.Exchanges)-1)
	}
	out.WriteString("  ],\n  \"Queues\": [\n")
	for i, queue := range topology.Queues {
		line(queue, i == len(topology.Queues)-1)
	}
	out.WriteString("  ],\n  \"Bindings\": [\n")
	for i, binding := range topology.Bindings {
		line(binding, i == len(topology.Bindings)-1)
	}
	out.WriteString("  ]\n}\n")
	require.True(t, json.Valid(out.Bytes()))
	return out.Bytes()
}
