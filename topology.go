package ladder

import "strings"

// Topology is everything that makes up a ladder on a broker, as plain data: what
// [Ladder.Declare] declares. Exchanges and Queues are all durable. The first of
// each are the unroutable exchange, the parking queue and the binding between
// them; once these are there, any part of the rest parks messages rather than
// lose them.
type Topology struct {
	Exchanges []Exchange
	Queues    []Queue
	Bindings  []Binding
}

// An Exchange is a durable exchange of a ladder.
type Exchange struct {
	Name string
	// Kind is "topic", or "fanout" for the unroutable exchange.
	Kind string
	// Internal is true for the unroutable exchange: clients cannot publish to
	// it.
	Internal bool
	// Arguments has the alternate-exchange of each topic exchange.
	Arguments map[string]any
}

// A Queue is a durable queue of a ladder.
type Queue struct {
	Name string
	// Arguments are the x- arguments. Integers are int64, because
	// amqp091-go sends an int as 32 bits.
	Arguments map[string]any
}

// BindingTarget is what a binding leads to.
type BindingTarget string

const (
	// ToQueue is a binding to a queue.
	ToQueue BindingTarget = "queue"
	// ToExchange is a binding to another exchange.
	ToExchange BindingTarget = "exchange"
)

// A Binding leads from the exchange Source to the queue or exchange Destination.
type Binding struct {
	Source      string
	Destination string
	// Target says whether Destination is a queue or an exchange.
	Target BindingTarget
	// Key is the binding key: words, of which "*" stands for any one word
	// and "#" for any number of words.
	Key string
}

// Topology returns the objects of the ladder as data, freshly made.
//
// Level k has a topic exchange and a queue of one name. A message in queue k
// waits 2^k units and is then dead-lettered, under its own routing key, to
// exchange k-1, or to the delivery exchange from level 0. So each exchange
// looks at the bits from its own level down and finds the next queue: bits
// above it have been waited for already.
func (l *Ladder) Topology() Topology {
	t := Topology{
		Exchanges: []Exchange{
			{Name: l.unroutable, Kind: "fanout", Internal: true},
			{Name: l.delivery, Kind: "topic", Arguments: l.topicArguments()},
		},
		Queues:   []Queue{{Name: l.parking, Arguments: map[string]any{"x-queue-type": string(l.config.QueueType)}}},
		Bindings: []Binding{{Source: l.unroutable, Destination: l.parking, Target: ToQueue}},
	}
	for k, name := range l.levels {
		t.Exchanges = append(t.Exchanges, Exchange{Name: name, Kind: "topic", Arguments: l.topicArguments()})
		t.Queues = append(t.Queues, Queue{Name: name, Arguments: l.levelArguments(k)})
		if l.config.Layout == Chain {
			t.Bindings = append(t.Bindings, l.chainBindings(k)...)
		} else {
			t.Bindings = append(t.Bindings, l.directBindings(k)...)
		}
	}
	return t
}

// topicArguments make a topic exchange park what none of its bindings wants.
func (l *Ladder) topicArguments() map[string]any {
	return map[string]any{"alternate-exchange": l.unroutable}
}

func (l *Ladder) levelArguments(k int) map[string]any {
	arguments := map[string]any{
		"x-queue-type":           string(l.config.QueueType),
		"x-message-ttl":          l.wait(k).Milliseconds(),
		"x-dead-letter-exchange": l.below(k),
	}
	if l.config.QueueType == Quorum {
		// At-least-once needs reject-publish: with drop-head RabbitMQ falls
		// back to at-most-once.
		arguments["x-dead-letter-strategy"] = "at-least-once"
		arguments["x-overflow"] = "reject-publish"
	}
	return arguments
}

// below returns the exchange under level k.
func (l *Ladder) below(k int) string {
	if k == 0 {
		return l.delivery
	}
	return l.levels[k-1]
}

// directBindings lead from exchange k to the queue of the highest 1 bit from k
// down, or to the delivery exchange where all of them are 0. Exactly one of
// them matches a key.
func (l *Ladder) directBindings(k int) []Binding {
	above := strings.Repeat("*.", l.config.Levels-1-k)
	bindings := make([]Binding, 0, k+2)
	for j := k; j >= 0; j-- {
		bindings = append(bindings, Binding{
			Source: l.levels[k], Destination: l.levels[j], Target: ToQueue,
			Key: above + strings.Repeat("0.", k-j) + "1.#",
		})
	}
	return append(bindings, Binding{
		Source: l.levels[k], Destination: l.delivery, Target: ToExchange,
		Key: above + strings.Repeat("0.", k+1) + "#",
	})
}

// chainBindings lead from exchange k to its queue if bit k is 1, else to the
// exchange below.
func (l *Ladder) chainBindings(k int) []Binding {
	above := strings.Repeat("*.", l.config.Levels-1-k)
	return []Binding{
		{Source: l.levels[k], Destination: l.levels[k], Target: ToQueue, Key: above + "1.#"},
		{Source: l.levels[k], Destination: l.below(k), Target: ToExchange, Key: above + "0.#"},
	}
}

// BindingKey returns the key that binds a queue to the delivery exchange for a
// destination: one "*" for each bit, then the destination. The number of words
// is exact, so that a binding for billing does not catch sales.billing. An
// error wraps [ErrInvalidDestination].
//
// Bind queues only. A binding to an exchange counts as a route even if that
// exchange leads nowhere, and so keeps messages from the parking queue.
func (l *Ladder) BindingKey(destination string) (string, error) {
	if err := l.checkDestination(destination); err != nil {
		return "", err
	}
	return strings.Repeat("*.", l.config.Levels) + destination, nil
}
