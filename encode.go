package ladder

import (
	"fmt"
	"iter"
	"math"
	"math/bits"
	"strings"
	"time"
	"unicode/utf8"
)

// A Route says where a message with some delay enters the ladder.
type Route struct {
	// Exchange is the exchange to publish to: that of the highest level whose
	// bit is 1, or the delivery exchange for no delay.
	Exchange string
	// Key is the routing key: one word of 0 or 1 for each level, the highest
	// first, then the destination.
	Key string
	// Units is the delay in units, rounded up, and longer where Config.Slack
	// saved hops.
	Units uint64
}

// Hops returns the number of queues the message waits in: the 1 bits of Units.
func (r Route) Hops() int { return bits.OnesCount64(r.Units) }

// Units returns d in whole units, rounded up: a message is late by less than a
// unit rather than early. No or a negative delay is 0. A delay beyond the
// horizon is a [*DelayTooLongError].
func (l *Ladder) Units(d time.Duration) (uint64, error) {
	if d <= 0 {
		return 0, nil
	}
	units := ceilUnits(d, l.config.Unit)
	if units > l.maxUnits() {
		return 0, &DelayTooLongError{Delay: d, Horizon: l.Horizon()}
	}
	return units, nil
}

// UnitsWithin returns the delay in whole units from d to d + slack that has the
// fewest hops, and the shortest of several: of 1023 s with 1 s of slack it makes
// 1024 units of 1 s, one hop, where [Ladder.Units] makes 1023, ten hops.
//
// It never returns less than Units, and just that if no whole unit lies in the
// window or slack is zero or negative. The window ends at the horizon, however
// large slack is. The error is that of Units: d is beyond the horizon.
// Config.Slack plays no part here.
func (l *Ladder) UnitsWithin(d, slack time.Duration) (uint64, error) {
	units, err := l.Units(d)
	if units == 0 || slack <= 0 {
		return units, err
	}
	// Two positive durations have room in a uint64.
	latest := (uint64(d) + uint64(slack)) / uint64(l.config.Unit)
	return fewestBits(units, max(units, min(latest, l.maxUnits()))), nil
}

// fewestBits returns the value from least to most with the fewest 1 bits, and the
// smallest of several. It takes least <= most < 1<<63.
func fewestBits(least, most uint64) uint64 {
	// All values in between begin with the bits that least and most have in
	// common. Only least can do without a 1 behind these: if its rest is 0.
	// Else one is enough, at the next power of two: that is not above the
	// highest bit of most's rest, which least's rest does not have.
	rest := least & (1<<bits.Len64(least^most) - 1)
	if rest&(rest-1) == 0 {
		return least
	}
	return least - rest + 1<<bits.Len64(rest)
}

// slack returns the ladder's slack for a delay. It means nothing beyond the
// horizon, where the product can overflow.
func (l *Ladder) slack(d time.Duration) time.Duration {
	if l.config.Slack == 0 {
		return 0
	}
	return time.Duration(math.RoundToEven(l.config.Slack * float64(d)))
}

func (l *Ladder) maxUnits() uint64 { return 1<<l.config.Levels - 1 }

// Route returns the way of a message with delay d to a destination: with the
// fewest hops that Config.Slack allows, as by [Ladder.UnitsWithin]. Its error is
// a [*DelayTooLongError] or wraps [ErrInvalidDestination].
//
// A destination is what consumers bind a queue to: any UTF-8 string of 1 to
// [Ladder.MaxDestination] bytes. Dots separate words, which may be empty, but
// none may be exactly "*" or "#".
func (l *Ladder) Route(d time.Duration, destination string) (Route, error) {
	units, err := l.UnitsWithin(d, l.slack(d))
	if err != nil {
		return Route{}, err
	}
	if err := l.checkDestination(destination); err != nil {
		return Route{}, err
	}
	return l.route(units, destination), nil
}

func (l *Ladder) route(units uint64, destination string) Route {
	var buf [maxShortString]byte
	return Route{
		Exchange: l.entry(units),
		Key:      string(l.AppendKey(buf[:0], units, destination)),
		Units:    units,
	}
}

// entry returns the exchange of the highest set bit, from where on a message
// passes no level in vain.
func (l *Ladder) entry(units uint64) string {
	if units == 0 {
		return l.delivery
	}
	return l.levels[bits.Len64(units)-1]
}

// AppendKey appends the routing key for a delay of units to a destination, and
// returns the extended buffer. It is the bare encoder behind [Ladder.Route]: it does
// not check the destination. It panics if units is beyond the horizon,
// as [Ladder.Units] never returns it: to cut it would make a message early.
func (l *Ladder) AppendKey(dst []byte, units uint64, destination string) []byte {
	if units > l.maxUnits() {
		panic(fmt.Sprintf("ladder: AppendKey: %d units are beyond the horizon of %d", units, l.maxUnits()))
	}
	shift := l.config.Levels
	for ; shift%4 != 0; shift-- {
		dst = append(dst, '0'+byte(units>>(shift-1)&1), '.')
	}
	for ; shift > 0; shift -= 4 {
		four := units >> (shift - 4) & 0xf * 8
		dst = append(dst, fourBits[four:four+8]...)
	}
	return append(dst, destination...)
}

// fourBits has the words of four bits for each value from 0 to 15: a key is
// written faster in fours than bit by bit.
const fourBits = "0.0.0.0.0.0.0.1.0.0.1.0.0.0.1.1." +
	"0.1.0.0.0.1.0.1.0.1.1.0.0.1.1.1." +
	"1.0.0.0.1.0.0.1.1.0.1.0.1.0.1.1." +
	"1.1.0.0.1.1.0.1.1.1.1.0.1.1.1.1."

// ParseKey is the inverse of [Ladder.Route]: it cuts a routing key into the delay
// in units and the destination. The cut is by position, after the ladder's
// number of bits, so that dots and digits in the destination are safe. A key that
// this ladder does not make is refused with an error that wraps
// [ErrInvalidKey], and [ErrInvalidDestination] too where that is the reason.
func (l *Ladder) ParseKey(key string) (units uint64, destination string, err error) {
	n := 2 * l.config.Levels
	if len(key) < n {
		return 0, "", fmt.Errorf("%w %.80q: shorter than the %d bits of %s", ErrInvalidKey, key, l.config.Levels, l)
	}
	for i := 0; i < n; i += 2 {
		bit := key[i] - '0'
		if bit > 1 || key[i+1] != '.' {
			return 0, "", fmt.Errorf("%w %.80q: word %d is not a bit; %s has %d", ErrInvalidKey, key, i/2+1, l, l.config.Levels)
		}
		units = units<<1 | uint64(bit)
	}
	destination = key[n:]
	if err := l.checkDestination(destination); err != nil {
		return 0, "", fmt.Errorf("%w %.80q: %w", ErrInvalidKey, key, err)
	}
	return units, destination, nil
}

// Waits walks the waits of a delay in units in the order the broker takes
// them, the highest level first: each level whose bit is 1, with the time a
// message spends in its queue. The durations sum to units times the unit. Bits
// beyond the ladder's levels are an error of the caller's and panic, as in
// [Ladder.AppendKey].
func (l *Ladder) Waits(units uint64) iter.Seq2[int, time.Duration] {
	if units > l.maxUnits() {
		panic(fmt.Sprintf("ladder: Waits: %d units are beyond the horizon of %d", units, l.maxUnits()))
	}
	return func(yield func(level int, wait time.Duration) bool) {
		for rest := units; rest != 0; {
			level := bits.Len64(rest) - 1
			if !yield(level, l.wait(level)) {
				return
			}
			rest &^= 1 << level
		}
	}
}

// wait returns the time a message spends in the queue of a level.
func (l *Ladder) wait(level int) time.Duration { return l.config.Unit << level }

func (l *Ladder) checkDestination(destination string) error {
	switch {
	case destination == "":
		return fmt.Errorf("%w: it is empty", ErrInvalidDestination)
	case len(destination) > l.MaxDestination():
		return fmt.Errorf("%w %.40q...: it has %d bytes; a routing key of %s has room for %d",
			ErrInvalidDestination, destination, len(destination), l, l.MaxDestination())
	case isPlain(destination):
		return nil
	case !utf8.ValidString(destination):
		return fmt.Errorf("%w %q: it is not valid UTF-8", ErrInvalidDestination, destination)
	}
	if wildcard := wildcardWord(destination); wildcard != "" {
		return fmt.Errorf("%w %q: the word %q is a wildcard in a binding", ErrInvalidDestination, destination, wildcard)
	}
	return nil
}

// isPlain tells in one pass that a destination can be neither invalid UTF-8 nor
// have a wildcard. Nearly all are like this.
func isPlain(destination string) bool {
	for i := range len(destination) {
		if c := destination[i]; c >= utf8.RuneSelf || c == '*' || c == '#' {
			return false
		}
	}
	return true
}

// wildcardWord returns a word of the destination that a topic exchange takes
// for a wildcard in a binding, or "".
func wildcardWord(destination string) string {
	for word := range strings.SplitSeq(destination, ".") {
		if word == "*" || word == "#" {
			return word
		}
	}
	return ""
}
