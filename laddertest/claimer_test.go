package laddertest_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/laddertest"
)

func TestClaimer(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	var c laddertest.Claimer
	claim := func(want bool) {
		t.Helper()
		first, err := c.Claim(ctx, "key", "holder")
		require.NoError(t, err)
		require.Equal(t, want, first)
	}
	claim(true)
	_, err := c.Claim(ctx, "key", "holder")
	require.ErrorIs(t, err, ladder.ErrClaimHeld)
	require.NoError(t, c.Release(ctx, "key", "holder"))
	claim(true)
	assert.Empty(t, c.Completed())
	require.NoError(t, c.Complete(ctx, "key", "holder"))
	claim(false)
	require.NoError(t, c.Release(ctx, "key", "holder"))
	claim(false)
	require.NoError(t, c.Complete(ctx, "a", "holder"))
	assert.Equal(t, []string{"a", "key"}, c.Completed())
}

func TestClaimerLease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := laddertest.Claimer{Lease: time.Minute}
		first, err := c.Claim(t.Context(), "key", "holder")
		require.NoError(t, err)
		require.True(t, first)
		time.Sleep(time.Minute - time.Nanosecond)
		_, err = c.Claim(t.Context(), "key", "holder")
		require.ErrorIs(t, err, ladder.ErrClaimHeld)
		time.Sleep(time.Nanosecond)
		first, err = c.Claim(t.Context(), "key", "next")
		require.NoError(t, err)
		assert.True(t, first)
		// The first holder comes too late.
		require.NoError(t, c.Release(t.Context(), "key", "holder"))
		_, err = c.Claim(t.Context(), "key", "third")
		require.ErrorIs(t, err, ladder.ErrClaimHeld)
	})
}

func TestClaimerEndedContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var c laddertest.Claimer
	_, err := c.Claim(ctx, "key", "holder")
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, c.Complete(ctx, "key", "holder"), context.Canceled)
	require.ErrorIs(t, c.Release(ctx, "key", "holder"), context.Canceled)
	assert.Empty(t, c.Completed())
}

func TestClaimerConcurrently(t *testing.T) {
	t.Parallel()
	var c laddertest.Claimer
	var claimed atomic.Int32
	var claiming sync.WaitGroup
	for range 50 {
		claiming.Go(func() {
			if first, err := c.Claim(t.Context(), "key", "holder"); err == nil && first {
				claimed.Add(1)
			}
		})
	}
	claiming.Wait()
	assert.Equal(t, int32(1), claimed.Load())
}
