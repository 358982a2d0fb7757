package main

import (
	"bytes"
	"context"
	"io"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

func TestMain(m *testing.M) { brokertest.Main(m) }

func TestRun(t *testing.T) {
	t.Parallel()
	url := brokertest.VHost(t)
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out, url, brokertest.For(t).Broker.ManagementURL()))
	t.Log(out.String())

	for _, want := range []string{
		`(?m)^ *\d\d  4.2s +42  3.2 \+ 0.8 \+ 0.2 +level-05$`,
		`(?m)^ *\d\d  at \+6s +60  3.2 \+ 1.6 \+ 0.8 \+ 0.4 +level-05$`,
		`(?m)^ *\d\d  12.7s +127  6.4 \+ 3.2 \+ 1.6 \+ 0.8 \+ 0.4 \+ 0.2 \+ 0.1 +level-06$`,
		`(?m)^ *\d\d  -1m0s +0  none +delivery$`,
		`(?m)^ *\d\d +4.200 s +4.[2-9]\d\d s +\d+\.\d ms +0.0 ms +3$`,
		`(?m)^published +36, all confirmed$`,
		`(?m)^arrived +36$`,
		`(?m)^early +0$`,
		`(?m)^missing +0$`,
		`(?m)^duplicates +0$`,
		`(?m)^parked +0$`,
		`(?m)^lateness +p50 \d+\.\d ms, p99 \d+\.\d ms, max \d+\.\d ms$`,
		// The ladder's, the inbox and its failed queue, the seven exchanges of each virtual host, the inbox's binding for
		// retries, and one of each queue to the default exchange.
		`(?m)^objects before +11 queues, 17 exchanges, 58 bindings$`,
		`(?m)^objects after +11 queues, 17 exchanges, 58 bindings: unchanged$`,
		`(?m)^  counted +in the virtual host, by the management API$`,
	} {
		assert.Regexp(t, want, out.String())
	}
	assert.NotContains(t, out.String(), "\x1b", "colour is for terminals")
	requireNothingLeft(t, url)
}

func TestRunWithoutManagement(t *testing.T) {
	t.Parallel()
	url := brokertest.VHost(t)
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out, url, ""))
	assert.Regexp(t, `(?m)^objects +9 queues, 10 exchanges, 45 bindings$`, out.String())
	assert.Regexp(t, `(?m)^  counted +not counted: this is what the ladder declares, by Topology\(\); set LADDER_MANAGEMENT_URL`, out.String())
}

func TestInterrupted(t *testing.T) {
	t.Parallel()
	url := brokertest.VHost(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	start := time.Now()
	require.ErrorIs(t, run(ctx, io.Discard, url, ""), context.DeadlineExceeded)
	assert.Less(t, time.Since(start), 10*time.Second)
	requireNothingLeft(t, url)
}

// requireNothingLeft checks that the program has removed what it made.
func requireNothingLeft(t *testing.T, url string) {
	t.Helper()
	objects := countObjects(t.Context(), mustLadder(t), url, brokertest.For(t).Broker.ManagementURL())
	require.Zero(t, objects.queues)
	require.Equal(t, 7, objects.exchanges, "the ones that each virtual host has")
}

func TestNoBroker(t *testing.T) {
	t.Parallel()
	start := time.Now()
	err := run(t.Context(), io.Discard, "amqp://someone:secret@127.0.0.1:1/", "")
	require.ErrorContains(t, err, "cannot connect to a broker at 127.0.0.1:1:")
	require.ErrorContains(t, err, "LADDER_AMQP_URL")
	require.NotContains(t, err.Error(), "secret")
	require.Less(t, time.Since(start), 10*time.Second)

	err = run(t.Context(), io.Discard, "amqp://someone:sec%ret@127.0.0.1:1/", "")
	require.ErrorContains(t, err, "is not an AMQP URL")
	require.NotContains(t, err.Error(), "sec%ret")
}

func TestWrongPassword(t *testing.T) {
	t.Parallel()
	env := brokertest.For(t)
	err := run(t.Context(), io.Discard, env.Broker.UserURL("nobody", "secret", env.VHost), "")
	require.ErrorIs(t, err, amqp.ErrCredentials)
	require.NotContains(t, err.Error(), "secret")
}

func TestSummaryOfFaults(t *testing.T) {
	t.Parallel()
	l := mustLadder(t)
	var out bytes.Buffer
	messages := []*message{
		{id: "01", arrivals: 1, arrival: arrival{lateness: time.Millisecond}},
		{id: "02", arrivals: 2, arrival: arrival{lateness: -time.Millisecond}},
		{id: "03"},
	}
	err := newTable(&out, l).summary(messages, 1, objects{queues: 1, counted: true}, objects{queues: 2, counted: true})
	require.EqualError(t, err, "1 of 3 messages came early, 1 did not arrive")
	for _, want := range []string{
		`(?m)^arrived +2$`, `(?m)^early +1$`, `(?m)^missing +1$`, `(?m)^duplicates +1$`, `(?m)^parked +1$`, `: changed\n`,
	} {
		assert.Regexp(t, want, out.String())
	}
}

func mustLadder(t *testing.T) *ladder.Ladder {
	t.Helper()
	l, err := ladder.New(ladder.Config{Unit: 100 * time.Millisecond, Levels: 8})
	require.NoError(t, err)
	return l
}
