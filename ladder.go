package ladder

import (
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	// DefaultName is the name of a ladder whose Config.Name is empty.
	DefaultName = "ladder"
	// DefaultUnit is the unit of a ladder whose Config.Unit is zero.
	DefaultUnit = time.Second
	// DefaultLevels is the number of levels of a ladder whose Config.Levels
	// is zero. With DefaultUnit they reach 12 days.
	DefaultLevels = 20
)

const (
	// maxTTL is the largest x-message-ttl that RabbitMQ accepts: ten years,
	// 315,360,000,000 ms. More is refused with 406 value_too_large.
	maxTTL = 10 * 365 * 24 * time.Hour

	// maxLevels keeps 1<<levels within a uint64. With the smallest unit, 1 ms,
	// maxTTL ends a ladder earlier, at 39 levels.
	maxLevels = 63

	// maxShortString is the longest name or routing key in AMQP 0-9-1, in
	// bytes: both are short strings, with a length of one octet.
	maxShortString = 255
)

// QueueType is the type of a ladder's level queues and of its parking queue,
// as RabbitMQ's x-queue-type argument spells it.
type QueueType string

const (
	// Quorum makes replicated queues that dead-letter at least once
	// (RabbitMQ 3.10 and later). It is the default, and the only type that
	// loses nothing when a node restarts while messages fall due.
	Quorum QueueType = "quorum"
	// Classic makes classic queues. They dead-letter at most once: what falls
	// due while its destination queue is still starting is lost if that is a
	// quorum queue. Give a classic ladder classic destinations.
	Classic QueueType = "classic"
)

// Layout is the way a ladder's exchanges are bound. Both layouts take a message
// through the same queues, and both have the same exchanges and queues.
type Layout string

const (
	// Direct binds each exchange to every lower queue, so that one topic match
	// finds the next wait however many zero bits lie between. It is the
	// default. It has L(L+1)/2 + L bindings for L levels, and that of the
	// parking queue.
	Direct Layout = "direct"
	// Chain binds each exchange to its own queue and to the next exchange
	// below, so that each zero bit costs one more topic match. It is what
	// NServiceBus and Celery use. It has 2L bindings for L levels, and that of
	// the parking queue.
	Chain Layout = "chain"
)

// Config says what a ladder looks like. The zero value is a useful ladder: 20
// levels of quorum queues in steps of one second, up to 12 days.
//
// Name, Unit and Levels are part of the name of each broker object, so ladders
// that differ in one of them are apart. QueueType is not: two ladders that
// differ in it alone are refused by the broker ([TopologyMismatchError]). Layout and
// Slack are not either, and ladders that differ in these share their objects.
type Config struct {
	// Name is the prefix of all object names. It must not be "amq" or start
	// with "amq." (reserved by AMQP 0-9-1), must be valid UTF-8 without control
	// characters (RabbitMQ removes line ends from names), and must leave the
	// longest object name within 255 bytes. Defaults to "ladder".
	Name string

	// Unit is the resolution: delays are rounded up to whole units. It is a
	// whole number of milliseconds, at least 1 ms. Defaults to one second.
	Unit time.Duration

	// Levels is the number of level queues, and of bits at the front of each
	// routing key: 1 to 63, as far as the highest level's wait, 2^(Levels-1)
	// units, is at most ten years, RabbitMQ's limit for a message TTL: 39 with
	// a unit of 1 ms, 29 with 1 s.
	// Defaults to 20. See [LevelsFor].
	Levels int

	// QueueType is the type of the level queues and of the parking queue.
	// Defaults to Quorum.
	QueueType QueueType

	// Layout is the way the exchanges are bound. Defaults to Direct.
	Layout Layout

	// Slack is how much longer than asked a message may wait so that it has
	// fewer hops: a fraction of its delay, 0 to 1. 0.01 takes 1024 s for 1023,
	// one hop instead of ten. It never makes a message early. It is for
	// [Ladder.Route], for the retries of consumers, and for publishers, where
	// [WithSlack] overrides it. Defaults to 0: what is asked, rounded up to a
	// whole unit.
	Slack float64
}

// A Ladder is the geometry and the names of one ladder: a value without a
// connection, which turns delays into routes and knows what must be declared.
// It never changes and is safe for concurrent use. Make one with [New].
type Ladder struct {
	config Config
	// geometry is the prefix shared by all object names, "ladder.20x1s".
	geometry string
	// levels holds the name of each level's exchange and queue.
	levels     []string
	delivery   string
	unroutable string
	parking    string
}

// New checks config, fills in its defaults and returns its ladder. It talks to
// no broker. An error wraps [ErrInvalidConfig] and names the field, the value
// and the rule.
func New(config Config) (*Ladder, error) {
	if config.Name == "" {
		config.Name = DefaultName
	}
	if config.Unit == 0 {
		config.Unit = DefaultUnit
	}
	if config.Levels == 0 {
		config.Levels = DefaultLevels
	}
	if config.QueueType == "" {
		config.QueueType = Quorum
	}
	if config.Layout == "" {
		config.Layout = Direct
	}
	if err := config.validate(); err != nil {
		return nil, err
	}

	l := &Ladder{
		config:   config,
		geometry: fmt.Sprintf("%s.%dx%s", config.Name, config.Levels, formatUnit(config.Unit)),
		levels:   make([]string, config.Levels),
	}
	for k := range l.levels {
		l.levels[k] = fmt.Sprintf("%s.level-%02d", l.geometry, k)
	}
	l.delivery = l.geometry + ".delivery"
	l.unroutable = l.geometry + ".unroutable"
	l.parking = l.geometry + ".parking"

	if longest := l.unroutable; len(longest) > maxShortString {
		return nil, invalidConfig("Name", strconv.Quote(config.Name),
			"the longest object name, <Name>%s, would have %d bytes; AMQP allows %d",
			strings.TrimPrefix(longest, config.Name), len(longest), maxShortString)
	}
	return l, nil
}

func (c Config) validate() error {
	if strings.HasPrefix(c.Name+".", "amq.") {
		return invalidConfig("Name", strconv.Quote(c.Name), `names that start with "amq." are reserved by AMQP`)
	}
	if err := checkCharacters("Name", c.Name); err != nil {
		return err
	}
	if err := validateUnit(c.Unit); err != nil {
		return err
	}
	switch {
	case c.Levels < 1 || c.Levels > maxLevels:
		return invalidConfig("Levels", c.Levels, "must be 1 to %d", maxLevels)
	case c.Levels > levelLimit(c.Unit):
		return invalidConfig("Levels", c.Levels,
			"level %d would wait 2^%d units of %v, more than RabbitMQ's largest message TTL of ten years; with this unit at most %d levels are possible",
			c.Levels-1, c.Levels-1, c.Unit, levelLimit(c.Unit))
	}
	if c.QueueType != Quorum && c.QueueType != Classic {
		return invalidConfig("QueueType", strconv.Quote(string(c.QueueType)), "must be %q or %q", Quorum, Classic)
	}
	if c.Layout != Direct && c.Layout != Chain {
		return invalidConfig("Layout", strconv.Quote(string(c.Layout)), "must be %q or %q", Direct, Chain)
	}
	if math.IsNaN(c.Slack) || c.Slack < 0 || c.Slack > 1 {
		return invalidConfig("Slack", c.Slack, "must be 0 to 1, a fraction of the delay")
	}
	return nil
}

// checkCharacters refuses a name that RabbitMQ would change or choke on: it
// removes line ends, and closes the connection over what is not UTF-8.
func checkCharacters(field, name string) error {
	switch {
	case !utf8.ValidString(name):
		return invalidConfig(field, strconv.Quote(name), "must be valid UTF-8")
	case strings.ContainsFunc(name, unicode.IsControl):
		return invalidConfig(field, strconv.Quote(name), "must have no control characters")
	}
	return nil
}

// check tells a ladder from the zero value.
func (l *Ladder) check() error {
	if l == nil || len(l.levels) == 0 {
		return fmt.Errorf("%w: the ladder is nil or not made by New", ErrInvalidConfig)
	}
	return nil
}

// checkQueueName refuses a name that a queue of a user's cannot have.
func checkQueueName(field, name string) error {
	if name == "" || len(name) > maxShortString {
		return invalidConfig(field, strconv.Quote(name), "must have 1 to %d bytes", maxShortString)
	}
	return checkCharacters(field, name)
}

func validateUnit(unit time.Duration) error {
	switch {
	case unit < time.Millisecond:
		return invalidConfig("Unit", unit, "must be at least 1ms, the resolution of a message TTL")
	case unit%time.Millisecond != 0:
		return invalidConfig("Unit", unit, "must be a whole number of milliseconds, the resolution of a message TTL")
	case unit > maxTTL:
		return invalidConfig("Unit", unit, "must be at most ten years, RabbitMQ's largest message TTL")
	}
	return nil
}

// levelLimit returns the largest number of levels whose highest wait,
// 2^(levels-1) units, is within maxTTL. The unit must be valid.
func levelLimit(unit time.Duration) int {
	return bits.Len64(uint64(maxTTL / unit))
}

// LevelsFor returns the smallest number of levels with which a ladder of this
// unit reaches the horizon: the longest delay it has to carry. An error wraps
// [ErrInvalidConfig]: the unit is not valid (see [Config]), the horizon is not
// positive, or it is further than RabbitMQ's limit of ten years for one level
// allows.
func LevelsFor(unit, horizon time.Duration) (int, error) {
	if err := validateUnit(unit); err != nil {
		return 0, err
	}
	if horizon <= 0 {
		return 0, invalidConfig("horizon", horizon, "must be positive")
	}
	levels := bits.Len64(ceilUnits(horizon, unit))
	if limit := levelLimit(unit); levels > limit {
		return 0, invalidConfig("horizon", horizon,
			"a ladder with a unit of %v ends at %v, where a level's wait passes ten years, RabbitMQ's largest message TTL",
			unit, horizonOf(unit, limit))
	}
	return levels, nil
}

// horizonOf cannot overflow: 2^(levels-1) units are at most ten years.
func horizonOf(unit time.Duration, levels int) time.Duration {
	return time.Duration(1<<levels-1) * unit
}

// ceilUnits returns d, which must not be negative, in units, rounded up.
func ceilUnits(d, unit time.Duration) uint64 {
	units := uint64(d / unit)
	if d%unit != 0 {
		units++
	}
	return units
}

// formatUnit writes a unit as object names have it: a whole number of the
// largest of h, m, s and ms that divides it, such as 1s, 500ms or 90s.
func formatUnit(unit time.Duration) string {
	for _, u := range []struct {
		size time.Duration
		name string
	}{{time.Hour, "h"}, {time.Minute, "m"}, {time.Second, "s"}} {
		if unit%u.size == 0 {
			return strconv.FormatInt(int64(unit/u.size), 10) + u.name
		}
	}
	return strconv.FormatInt(unit.Milliseconds(), 10) + "ms"
}

// Config returns the ladder's configuration with the defaults filled in.
func (l *Ladder) Config() Config { return l.config }

// String returns the ladder's name and geometry as object names have it, such
// as ladder.20x1s: 20 levels, the lowest of which waits one second.
func (l *Ladder) String() string { return l.geometry }

// Horizon returns the longest delay the ladder can carry: (2^Levels - 1) units.
func (l *Ladder) Horizon() time.Duration {
	return horizonOf(l.config.Unit, l.config.Levels)
}

// MaxDestination returns the longest destination in bytes: a routing key has
// 255, and two for each level are taken by the bits.
func (l *Ladder) MaxDestination() int { return maxShortString - 2*l.config.Levels }

// Level returns the name of level k, which its exchange and its queue share. It
// panics unless 0 <= k < Levels, as an index into a slice does.
func (l *Ladder) Level(k int) string { return l.levels[k] }

// DeliveryExchange returns the name of the topic exchange that destinations are
// bound to.
func (l *Ladder) DeliveryExchange() string { return l.delivery }

// UnroutableExchange returns the name of the internal fanout exchange that is the
// alternate exchange of all others and leads to the parking queue.
func (l *Ladder) UnroutableExchange() string { return l.unroutable }

// ParkingQueue returns the name of the queue where messages end that no
// binding wanted: those to a destination that nobody had bound when they fell
// due.
func (l *Ladder) ParkingQueue() string { return l.parking }
