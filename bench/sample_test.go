package main

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMedian(t *testing.T) {
	t.Parallel()
	values := []float64{5, 1, 9, 3}
	assert.InDelta(t, 4, median(values), 0)
	assert.Equal(t, []float64{5, 1, 9, 3}, values, "unchanged")
	assert.InDelta(t, 5, median([]float64{5, 1, 9}), 0)
	assert.Zero(t, median(nil))
}

func TestPercentile(t *testing.T) {
	t.Parallel()
	var sorted []int
	for i := range 100 {
		sorted = append(sorted, i+1)
	}
	for p, want := range map[float64]int{0: 1, 0.5: 50, 0.9: 90, 0.99: 99, 1: 100} {
		assert.Equal(t, want, percentile(sorted, p), p)
	}
	assert.Equal(t, 7, percentile([]int{7}, 0.99))
	assert.Zero(t, percentile([]time.Duration(nil), 0.5))
}

// TestRatio compares within rounds: both were slower in the second.
func TestRatio(t *testing.T) {
	t.Parallel()
	var r runs
	for _, round := range [][2]float64{{200, 100}, {20, 10}, {190, 100}} {
		r.add("a", round[0])
		r.add("b", round[1])
	}
	assert.Equal(t, []string{"a", "b"}, r.names)
	assert.InDelta(t, 2, r.ratio("a", "b"), 0)
	assert.InDelta(t, 190, r.median("a"), 0)
	low, high := r.spread("b")
	assert.InDelta(t, 10, low, 0)
	assert.InDelta(t, 100, high, 0)
}

func TestInterleaved(t *testing.T) {
	t.Parallel()
	var order []string
	variants := []string{"a", "b", "c"}
	require.NoError(t, interleaved(2, variants, func(v string) error {
		order = append(order, v)
		return nil
	}))
	assert.Equal(t, []string{"a", "b", "c", "c", "b", "a"}, order)
	assert.Equal(t, []string{"a", "b", "c"}, variants, "unchanged")
	order = nil
	require.Error(t, interleaved(2, variants, func(v string) error {
		order = append(order, v)
		return assert.AnError
	}))
	assert.Len(t, slices.Compact(order), 1)
}
