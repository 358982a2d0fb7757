package ladder

import (
	"errors"
	"fmt"
	"time"
)

var (
	// ErrInvalidConfig is wrapped by the errors of [New], [LevelsFor],
	// [NewPublisher] and [NewConsumer] for a setting that breaks a rule. The
	// error names the field, the value and the rule.
	ErrInvalidConfig = errors.New("ladder: invalid configuration")

	// ErrInvalidDestination is wrapped when a destination is empty, too long
	// for a routing key behind the ladder's bits, not valid UTF-8, or has a
	// word that is exactly "*" or "#", which a binding would take for a
	// wildcard.
	ErrInvalidDestination = errors.New("ladder: invalid destination")

	// ErrInvalidKey is wrapped by the errors of [Ladder.ParseKey] for a routing
	// key that is not one of the ladder's.
	ErrInvalidKey = errors.New("ladder: invalid routing key")

	// ErrDelayTooLong is wrapped by [DelayTooLongError]: a delay is beyond the
	// ladder's horizon.
	ErrDelayTooLong = errors.New("ladder: delay too long")

	// ErrTopologyMissing is wrapped when an exchange or queue is not there: the
	// ladder was not declared on this broker and virtual host, or was deleted.
	ErrTopologyMissing = errors.New("ladder: object missing on the broker")

	// ErrAccessRefused is wrapped when the user lacks the permission for a
	// broker object (403 ACCESS_REFUSED).
	ErrAccessRefused = errors.New("ladder: access refused by the broker")
)

// A DelayTooLongError says that a delay is beyond the ladder's horizon. Nothing was
// sent; delays are never cut. It wraps [ErrDelayTooLong].
type DelayTooLongError struct {
	// Delay is the delay that was asked for.
	Delay time.Duration
	// Horizon is the longest delay the ladder can carry.
	Horizon time.Duration
}

// Error names both values.
func (e *DelayTooLongError) Error() string {
	return fmt.Sprintf("%v: %v is beyond the horizon of %v", ErrDelayTooLong, e.Delay, e.Horizon)
}

// Unwrap returns [ErrDelayTooLong].
func (e *DelayTooLongError) Unwrap() error { return ErrDelayTooLong }

func invalidConfig(field string, value any, rule string, args ...any) error {
	return fmt.Errorf("%w: %s %v: %s", ErrInvalidConfig, field, value, fmt.Sprintf(rule, args...))
}
