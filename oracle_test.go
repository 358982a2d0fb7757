package ladder_test

import (
	"fmt"
	"math/big"
	"strings"
	"time"
)

// The oracle is a second way to a route, slow and independent of the encoder:
// division by math/big and binary by its Text, no shifts and no bit counts. The
// two share the wire contract and nothing else.
type oracle struct {
	levels int
	unit   time.Duration
	// prefix is what comes before the kind in an object name, "ladder.20x1s".
	prefix string
}

// tenYears is RabbitMQ's limit for x-message-ttl, 315,360,000,000 ms.
var tenYears = new(big.Int).Mul(big.NewInt(315_360_000_000), big.NewInt(1_000_000))

func (o oracle) bigUnit() *big.Int { return big.NewInt(int64(o.unit)) }

// power returns 2^exponent, by multiplication.
func power(exponent int) *big.Int {
	return new(big.Int).Exp(big.NewInt(2), big.NewInt(int64(exponent)), nil)
}

// tooLongTTL says whether the highest level would wait longer than RabbitMQ
// allows.
func (o oracle) tooLongTTL() bool {
	return new(big.Int).Mul(power(o.levels-1), o.bigUnit()).Cmp(tenYears) > 0
}

// horizon returns the longest delay in nanoseconds.
func (o oracle) horizon() *big.Int {
	most := new(big.Int).Sub(power(o.levels), big.NewInt(1))
	return most.Mul(most, o.bigUnit())
}

// tooLong says whether a delay is beyond the horizon.
func (o oracle) tooLong(delay time.Duration) bool {
	return big.NewInt(int64(delay)).Cmp(o.horizon()) > 0
}

// units returns the delay in units, rounded up.
func (o oracle) units(delay time.Duration) *big.Int {
	if delay <= 0 {
		return new(big.Int)
	}
	units, rest := new(big.Int).DivMod(big.NewInt(int64(delay)), o.bigUnit(), new(big.Int))
	if rest.Sign() > 0 {
		units.Add(units, big.NewInt(1))
	}
	return units
}

// unitsWithin returns the units with the fewest hops of those that fit between the
// delay and the delay and slack, by looking at all that can be it: the value with
// the fewest 1 bits is the least one, rounded up to some power of two.
func (o oracle) unitsWithin(delay, slack time.Duration) *big.Int {
	best := o.units(delay)
	if delay <= 0 || slack <= 0 {
		return best
	}
	window := new(big.Int).Add(big.NewInt(int64(delay)), big.NewInt(int64(slack)))
	least, most := best, window.Div(window, o.bigUnit())
	for k := 1; k < o.levels; k++ {
		rounded := new(big.Int).Add(least, power(k))
		rounded.Sub(rounded, big.NewInt(1))
		rounded.Mul(rounded.Div(rounded, power(k)), power(k))
		if rounded.Cmp(most) <= 0 && rounded.Cmp(power(o.levels)) < 0 && o.hops(rounded) < o.hops(best) {
			best = rounded
		}
	}
	return best
}

// binary returns the units with one digit for each level.
func (o oracle) binary(units *big.Int) string {
	digits := units.Text(2)
	return strings.Repeat("0", o.levels-len(digits)) + digits
}

func (o oracle) key(units *big.Int, destination string) string {
	return strings.Join(strings.Split(o.binary(units), ""), ".") + "." + destination
}

// exchange returns the name of the exchange of the first 1.
func (o oracle) exchange(units *big.Int) string {
	first := strings.Index(o.binary(units), "1")
	if first < 0 {
		return o.prefix + ".delivery"
	}
	return fmt.Sprintf("%s.level-%02d", o.prefix, o.levels-1-first)
}

func (o oracle) hops(units *big.Int) int { return strings.Count(o.binary(units), "1") }
