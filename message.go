package ladder

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Headers of the wire contract.
const (
	// HeaderNotBefore is the instant a message is due: an int64, milliseconds
	// since 1970 UTC. The publisher sets it.
	HeaderNotBefore = "ladder-not-before"
	// HeaderAttempt counts the attempts to handle a message, from 1: an int64,
	// and 1 where it is absent. A consumer sets it on what it sends through the
	// ladder again, and on what it sends to the failed queue.
	HeaderAttempt = "ladder-attempt"
	// HeaderDestination is the destination that a message had before it was
	// sent to one queue alone, for another attempt or to the failed queue: a string.
	HeaderDestination = "ladder-destination"
	// HeaderFailureReason is the error of the last attempt that failed: a string,
	// cut at 1 KiB.
	HeaderFailureReason = "ladder-failure-reason"
	// HeaderFailureQueue is the queue whose consumer's attempt failed: a
	// string.
	HeaderFailureQueue = "ladder-failure-queue"
	// HeaderFailureFirst is when the first attempt failed: an int64,
	// milliseconds since 1970 UTC.
	HeaderFailureFirst = "ladder-failure-first"
	// HeaderFailureLast is when the last attempt failed: like
	// HeaderFailureFirst.
	HeaderFailureLast = "ladder-failure-last"

	reservedPrefix = "ladder-"
)

// isBrokerHeader tells whether a header is the broker's record of a message's
// past. Such headers must not be published again: before 4.0 RabbitMQ takes an
// x-death that a client sent for its own, and drops the message
// as a cycle when it comes to a level that is named there.
func isBrokerHeader(key string) bool {
	switch key {
	case "x-death", "x-delivery-count", "x-acquired-count":
		return true
	}
	return strings.HasPrefix(key, "x-first-death-") || strings.HasPrefix(key, "x-last-death-")
}

// prepare returns the message as it goes on the wire: a deep copy, so that the
// caller's stays as it is and can be changed while this one waits. Of the headers
// that start with ladder- it has those that are given apart; without any it gets no
// MessageId and Timestamp either. The error wraps ErrInvalidMessage or
// ErrMessageTooLarge.
func prepare(msg amqp.Publishing, ladderHeaders amqp.Table, maxBytes int) (amqp.Publishing, error) {
	if err := checkProperties(msg); err != nil {
		return amqp.Publishing{}, err
	}
	if len(msg.Body) > maxBytes {
		return amqp.Publishing{}, fmt.Errorf("%w: the body has %d bytes, MaxMessageBytes is %d", ErrMessageTooLarge, len(msg.Body), maxBytes)
	}
	headers := make(amqp.Table, len(msg.Headers)+len(ladderHeaders))
	var c copier
	for key, value := range msg.Headers {
		if isBrokerHeader(key) || strings.HasPrefix(key, reservedPrefix) {
			continue
		}
		if key == "CC" || key == "BCC" {
			return amqp.Publishing{}, fmt.Errorf("%w: header %s: its keys would be routed through the ladder as well, at each level", ErrInvalidMessage, key)
		}
		copied, err := c.entry(key, value, 0)
		if err != nil {
			return amqp.Publishing{}, fmt.Errorf("%w: header %w", ErrInvalidMessage, err)
		}
		headers[key] = copied
	}
	if len(ladderHeaders) > 0 && len(headers) > maxElements-addedHeaders {
		return amqp.Publishing{}, fmt.Errorf("%w: it has %d headers; at most %d are possible", ErrInvalidMessage, len(headers), maxElements-addedHeaders)
	}
	maps.Copy(headers, ladderHeaders)
	msg.Headers = headers
	msg.Body = bytes.Clone(msg.Body)
	msg.DeliveryMode = amqp.Persistent
	if len(ladderHeaders) == 0 {
		return msg, nil // where there is no room for more
	}
	if msg.MessageId == "" {
		msg.MessageId = rand.Text()
	}
	if msg.Timestamp.IsZero() {
		msg.Timestamp = time.Now()
	}
	return msg, nil
}

func checkProperties(msg amqp.Publishing) error {
	if msg.Expiration != "" {
		return fmt.Errorf("%w: Expiration %q: a level queue would pass the message on when it expires, before it is due", ErrInvalidMessage, msg.Expiration)
	}
	for _, p := range shortProperties(&msg) {
		if len(p.value) > maxShortString {
			return fmt.Errorf("%w: %s has %d bytes; AMQP allows %d", ErrInvalidMessage, p.name, len(p.value), maxShortString)
		}
	}
	return nil
}

type property struct{ name, value string }

func shortProperties(msg *amqp.Publishing) []property {
	return []property{
		{"ContentType", msg.ContentType},
		{"ContentEncoding", msg.ContentEncoding},
		{"CorrelationId", msg.CorrelationId},
		{"ReplyTo", msg.ReplyTo},
		{"MessageId", msg.MessageId},
		{"Type", msg.Type},
		{"UserId", msg.UserId},
		{"AppId", msg.AppId},
	}
}

// amqp091-go closes the connection over a message that it receives with values
// nested more than 32 deep, or with more than 8192 of them in one array or
// table, so that such a message would come back to its consumers for ever.
const (
	maxDepth    = 31
	maxElements = 8192
	// maxValues is more than fit into a frame.
	maxValues = 1 << 17
	// addedHeaders is room for those that ladder and the broker add.
	addedHeaders = 16
)

var errTooDeep = fmt.Errorf("arrays and tables nested more than %d deep", maxDepth+1)

// A copier makes deep copies of headers and arguments. It makes an int an
// int64, because amqp091-go cuts an int to 32 bits.
type copier struct{ copied int }

func (c *copier) entry(key string, value any, depth int) (any, error) {
	if len(key) > maxShortString {
		return nil, fmt.Errorf("the name %.40q... has %d bytes; AMQP allows %d", key, len(key), maxShortString)
	}
	copied, err := c.field(value, depth)
	if err != nil {
		return nil, fmt.Errorf("%q: %w", key, err)
	}
	return copied, nil
}

func (c *copier) field(value any, depth int) (any, error) {
	// Tables that share parts can be small in memory and without end on the
	// wire.
	c.copied++
	if c.copied > maxValues {
		return nil, fmt.Errorf("more than %d values", maxValues)
	}
	switch v := value.(type) {
	case nil, bool, byte, int8, int16, int32, int64, uint16, uint32, string, amqp.Decimal, time.Time:
		return v, nil
	case int:
		return int64(v), nil
	case float32:
		return v, checkFinite(float64(v))
	case float64:
		return v, checkFinite(v)
	case []byte:
		return slices.Clone(v), nil
	case []any:
		if depth > maxDepth {
			return nil, errTooDeep
		}
		if len(v) > maxElements {
			return nil, fmt.Errorf("an array of %d elements; at most %d are possible", len(v), maxElements)
		}
		array := make([]any, len(v))
		for i := range v {
			var err error
			if array[i], err = c.field(v[i], depth+1); err != nil {
				return nil, fmt.Errorf("element %d: %w", i, err)
			}
		}
		return array, nil
	case amqp.Table:
		if depth > maxDepth {
			return nil, errTooDeep
		}
		if len(v) > maxElements {
			return nil, fmt.Errorf("a table of %d entries; at most %d are possible", len(v), maxElements)
		}
		table := make(amqp.Table, len(v))
		for key := range v {
			var err error
			if table[key], err = c.entry(key, v[key], depth+1); err != nil {
				return nil, err
			}
		}
		return table, nil
	}
	return nil, fmt.Errorf("a %T cannot be sent; AMQP has bool, integers up to 64 bits but uint and uint64, floats, string, []byte, time.Time, []any, amqp.Table and nil", value)
}

// checkFinite refuses what Erlang has no floats for: RabbitMQ answers such a
// header with an internal error and closes the connection.
func checkFinite(f float64) error {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return fmt.Errorf("RabbitMQ cannot hold the float %v", f)
	}
	return nil
}

// headerFrameSize returns the size in bytes of the AMQP content header of a
// prepared message. Unlike a body, a header must fit into one frame: a larger
// one costs the connection.
func headerFrameSize(msg *amqp.Publishing) int {
	const fixed = 8 + 2 + 2 + 8 + 2 // frame, class, weight, body size, flags
	size := fixed + tableSize(msg.Headers)
	for _, p := range shortProperties(msg) {
		if p.value != "" {
			size += 1 + len(p.value)
		}
	}
	size++ // delivery mode
	if msg.Priority > 0 {
		size++
	}
	if !msg.Timestamp.IsZero() {
		size += 8
	}
	return size
}

func tableSize(table amqp.Table) int {
	size := 4
	for key, value := range table {
		size += 1 + len(key) + fieldSize(value)
	}
	return size
}

func fieldSize(value any) int {
	switch v := value.(type) {
	case nil:
		return 1
	case bool, byte, int8:
		return 2
	case int16, uint16:
		return 3
	case int32, uint32, float32:
		return 5
	case amqp.Decimal:
		return 6
	case string:
		return 5 + len(v)
	case []byte:
		return 5 + len(v)
	case []any:
		size := 5
		for i := range v {
			size += fieldSize(v[i])
		}
		return size
	case amqp.Table:
		return 1 + tableSize(v)
	}
	return 9 // int64, float64, time.Time
}
