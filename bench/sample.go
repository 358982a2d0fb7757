package main

import (
	"cmp"
	"slices"
	"time"
)

// median returns the middle of the values, or the mean of the two in the middle. It leaves values as they are.
func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// percentile returns the smallest value of a sorted sample that at least the part p of the sample does not exceed
// (nearest rank); the zero value for an empty sample.
func percentile[T cmp.Ordered](sorted []T, p float64) T {
	var zero T
	if len(sorted) == 0 {
		return zero
	}
	rank := int(p * float64(len(sorted)))
	if float64(rank) < p*float64(len(sorted)) {
		rank++
	}
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// runs has the results of several rounds for each variant of a comparison, in the order in which the variants were
// added.
type runs struct {
	names   []string
	results map[string][]float64
}

func (r *runs) add(name string, value float64) {
	if r.results == nil {
		r.results = make(map[string][]float64)
	}
	if _, ok := r.results[name]; !ok {
		r.names = append(r.names, name)
	}
	r.results[name] = append(r.results[name], value)
}

func (r *runs) median(name string) float64 { return median(r.results[name]) }

// spread returns the smallest and the largest result of a variant.
func (r *runs) spread(name string) (low, high float64) {
	return slices.Min(r.results[name]), slices.Max(r.results[name])
}

// ratio is the median over the rounds of a's result to b's in the same round: what both had in common in that round, a
// machine that was slower for a while, cancels out.
func (r *runs) ratio(a, b string) float64 {
	ratios := make([]float64, 0, len(r.results[a]))
	for i, value := range r.results[a] {
		if i < len(r.results[b]) {
			ratios = append(ratios, value/r.results[b][i])
		}
	}
	return median(ratios)
}

// interleaved calls run for each variant in each round, with the order reversed in every other round, so that what
// drifts meets all variants alike.
func interleaved[V any](rounds int, variants []V, run func(V) error) error {
	order := slices.Clone(variants)
	for range rounds {
		for _, v := range order {
			if err := run(v); err != nil {
				return err
			}
		}
		slices.Reverse(order)
	}
	return nil
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
