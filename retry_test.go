package ladder_test

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/rabbitladder/ladder"
)

var errTest = errors.New("a handler's error")

func TestExponentialBackoffDefaults(t *testing.T) {
	t.Parallel()
	b := ladder.ExponentialBackoff{Jitter: -1}
	var total time.Duration
	for attempt := 1; attempt <= 9; attempt++ {
		delay, retry := b.Next(attempt, errTest)
		require.True(t, retry)
		require.Equal(t, time.Second<<(attempt-1), delay)
		total += delay
	}
	_, retry := b.Next(10, errTest)
	assert.False(t, retry)
	assert.Equal(t, 511*time.Second, total)
}

func TestExponentialBackoffMax(t *testing.T) {
	t.Parallel()
	b := ladder.ExponentialBackoff{Initial: time.Minute, Max: 3 * time.Minute, Multiplier: 1.5, Jitter: -1, MaxAttempts: -1}
	for attempt, want := range map[int]time.Duration{
		1: time.Minute, 2: 90 * time.Second, 3: 135 * time.Second, 4: 3 * time.Minute, 1000: 3 * time.Minute, math.MaxInt32: 3 * time.Minute,
	} {
		delay, retry := b.Next(attempt, errTest)
		require.True(t, retry)
		assert.Equal(t, want, delay, "attempt %d", attempt)
	}
}

// TestExponentialBackoffIsBounded takes any valid policy and any attempt.
func TestExponentialBackoffIsBounded(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := ladder.ExponentialBackoff{
			Initial:     time.Duration(rapid.Int64Range(1, math.MaxInt64/2).Draw(t, "initial")),
			Multiplier:  rapid.Float64Range(1, math.MaxFloat64).Draw(t, "multiplier"),
			Jitter:      rapid.Float64Range(0.001, 1).Draw(t, "jitter"),
			MaxAttempts: -1,
		}
		b.Max = b.Initial + time.Duration(rapid.Int64Range(0, math.MaxInt64/2).Draw(t, "more"))
		attempt := rapid.IntRange(1, math.MaxInt).Draw(t, "attempt")
		delay, retry := b.Next(attempt, errTest)
		require.True(t, retry)
		require.GreaterOrEqual(t, delay, time.Duration(0))
		require.LessOrEqual(t, delay, b.Max)
		if attempt == 1 {
			low := float64(b.Initial) * (1 - b.Jitter)
			require.GreaterOrEqual(t, float64(delay)+float64(b.Initial)*1e-9+1, low)
		}
	})
}

func TestExponentialBackoffJitterSpreads(t *testing.T) {
	t.Parallel()
	var least, most time.Duration = math.MaxInt64, 0
	for range 1000 {
		delay, _ := ladder.ExponentialBackoff{Initial: time.Second}.Next(1, errTest)
		least, most = min(least, delay), max(most, delay)
	}
	assert.GreaterOrEqual(t, least, 800*time.Millisecond)
	assert.LessOrEqual(t, most, 1200*time.Millisecond)
	assert.Less(t, least, 900*time.Millisecond)
	assert.Greater(t, most, 1100*time.Millisecond)
}

func TestFixedSteps(t *testing.T) {
	t.Parallel()
	steps := ladder.FixedSteps{time.Second, 0, time.Hour}
	for i, want := range steps {
		delay, retry := steps.Next(i+1, errTest)
		assert.True(t, retry)
		assert.Equal(t, want, delay)
	}
	for _, attempt := range []int{-1, 0, 4, 100} {
		_, retry := steps.Next(attempt, errTest)
		assert.False(t, retry)
	}
}

func TestRetryPolicyRefuses(t *testing.T) {
	t.Parallel()
	l := small(t)
	for name, c := range map[string]struct {
		policy ladder.RetryPolicy
		text   string
	}{
		"a negative delay":        {ladder.ExponentialBackoff{Initial: -1}, "Retry.Initial -1ns"},
		"a negative longest":      {ladder.ExponentialBackoff{Max: -1}, "Retry.Max"},
		"longest below the first": {ladder.ExponentialBackoff{Initial: time.Minute, Max: time.Second}, "Retry.Initial, which is 1m0s"},
		"a multiplier below 1":    {ladder.ExponentialBackoff{Multiplier: 0.5}, "Retry.Multiplier 0.5"},
		"a multiplier of NaN":     {ladder.ExponentialBackoff{Multiplier: math.NaN()}, "Retry.Multiplier NaN"},
		"an endless multiplier":   {ladder.ExponentialBackoff{Multiplier: math.Inf(1)}, "Retry.Multiplier +Inf"},
		"a jitter above 1":        {ladder.ExponentialBackoff{Jitter: 1.1}, "Retry.Jitter 1.1"},
		"a jitter of NaN":         {ladder.ExponentialBackoff{Jitter: math.NaN()}, "Retry.Jitter NaN"},
		"no step":                 {ladder.FixedSteps{}, "must have a step"},
		"a negative step":         {ladder.FixedSteps{time.Second, -time.Second}, "Retry[1] -1s"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := ladder.NewConsumer(l, ladder.ConsumerConfig{URLs: []string{"amqp://localhost"}, Queue: "q", Retry: c.policy})
			require.ErrorIs(t, err, ladder.ErrInvalidConfig)
			assert.ErrorContains(t, err, c.text)
		})
	}
	for name, policy := range map[string]ladder.RetryPolicy{
		"the first delay is beyond the default of Max": ladder.ExponentialBackoff{Initial: 2 * time.Hour},
		"none": ladder.NoRetry{},
	} {
		_, err := ladder.NewConsumer(l, ladder.ConsumerConfig{URLs: []string{"amqp://localhost"}, Queue: "q", Retry: policy})
		require.NoError(t, err, name)
	}
}

func TestPermanentAndRetryAfter(t *testing.T) {
	t.Parallel()
	require.NoError(t, ladder.Permanent(nil))
	err := ladder.Permanent(errTest)
	require.ErrorIs(t, err, errTest)
	require.EqualError(t, err, errTest.Error())
	assert.ErrorContains(t, ladder.RetryAfter(time.Minute), "1m0s")
}

func TestRetryDestination(t *testing.T) {
	t.Parallel()
	l := mustLadder(t, ladder.Config{})
	seen := map[string]string{}
	for _, queue := range append(queueNames(), "ladder-retry.mailer", "sha256.mailer") {
		destination := l.RetryDestination(queue)
		_, err := l.Route(time.Second, destination)
		require.NoError(t, err, queue)
		require.Equal(t, destination, l.RetryDestination(queue))
		require.Empty(t, seen[destination], "%q shares its address with %q", queue, seen[destination])
		seen[destination] = queue
	}
	assert.Equal(t, "ladder-retry.mailer", l.RetryDestination("mailer"))
}

func TestFailedQueueName(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "mailer.failed", ladder.FailedQueue("mailer"))
}
