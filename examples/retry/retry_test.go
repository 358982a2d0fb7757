package main

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder/internal/brokertest"
)

func TestMain(m *testing.M) { brokertest.Main(m) }

func TestRun(t *testing.T) {
	t.Parallel()
	url := brokertest.VHost(t)
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out, url))
	t.Log(out.String())
	// The lines of different messages come in any order.
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	slices.Sort(lines)
	assert.Equal(t, []string{
		"broken, attempt 1: failed in 0s, the address has no @",
		"flaky, attempt 1: retried in 300ms, the mail server does not answer",
		"flaky, attempt 2: retried in 600ms, the mail server does not answer",
		"flaky, attempt 3: handled in 0s, <nil>",
		"quota, attempt 1: handled in 0s, <nil>",
		"quota, attempt 1: retried in 700ms, ladder: retry after 700ms",
	}, lines)

	conn, err := amqp.Dial(url)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close()) }()
	ch, err := conn.Channel()
	require.NoError(t, err)
	d, found, err := ch.Get("mails.failed", true)
	require.NoError(t, err)
	require.True(t, found)
	assert.Equal(t, "broken", d.MessageId)
}

func TestNothingListens(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	require.ErrorIs(t, run(ctx, nil, "amqp://guest:guest@127.0.0.1:1/"), context.DeadlineExceeded)
}
