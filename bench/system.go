package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder"
)

const (
	destination  = "bench.message"
	sinkName     = "bench.sink"
	argQueueType = "x-queue-type"
)

// A system is one way to delay messages: its objects on the broker as data, and the way of a message into them.
type system struct {
	name     string
	ours     bool
	topology ladder.Topology
	// route returns the exchange and the routing key for a delay.
	route func(time.Duration) (exchange, key string, err error)
}

// ladderSystem is a ladder of this library whose delivery exchange leads to the sink.
func ladderSystem(name string, config ladder.Config) (*system, error) {
	l, err := ladder.New(config)
	if err != nil {
		return nil, err
	}
	key, err := l.BindingKey(destination)
	if err != nil {
		return nil, err
	}
	topology := l.Topology()
	topology.Queues = append(topology.Queues, sinkQueue(l.Config().QueueType))
	topology.Bindings = append(topology.Bindings, ladder.Binding{
		Source: l.DeliveryExchange(), Destination: sinkName, Target: ladder.ToQueue, Key: key,
	})
	return &system{name: name, ours: true, topology: topology, route: func(d time.Duration) (exchange, key string, err error) {
		r, err := l.Route(d, destination)
		return r.Exchange, r.Key, err
	}}, nil
}

// otherLevels is the number of levels of NServiceBus's and Kombu's ladders.
const otherLevels = 28

// nserviceBus is a copy of the ladder of NServiceBus.RabbitMQ, version 2: 28 levels in a chain, entered at the highest
// bit, no alternate exchanges. The real one has a unit of one second.
func nserviceBus(unit time.Duration, queueType ladder.QueueType) *system {
	name := func(level int) string { return fmt.Sprintf("nsb.v2.delay-level-%02d", level) }
	const delivery = "nsb.v2.delay-delivery"
	t := chain(name, delivery, unit, queueType)
	t.Queues = append(t.Queues, sinkQueue(queueType))
	t.Bindings = append(t.Bindings, ladder.Binding{Source: delivery, Destination: sinkName, Target: ladder.ToQueue, Key: "#." + destination})
	return &system{name: "NServiceBus copy", topology: t, route: func(d time.Duration) (exchange, key string, err error) {
		units := ceiling(d, unit)
		top := 0
		for units>>(top+1) != 0 {
			top++
		}
		return name(top), prefix(units) + destination, nil
	}}
}

// kombu is a copy of the ladder of Celery and Kombu: as NServiceBus's, but always entered at the top, and with an
// exchange of the user's between the delivery exchange and the queue.
func kombu(unit time.Duration, queueType ladder.QueueType) *system {
	name := func(level int) string { return "celery_delayed_" + strconv.Itoa(level) }
	const (
		delivery = "celery_delayed_delivery"
		users    = "bench.users"
	)
	t := chain(name, delivery, unit, queueType)
	t.Exchanges = append(t.Exchanges, ladder.Exchange{Name: users, Kind: amqp.ExchangeTopic})
	t.Queues = append(t.Queues, sinkQueue(queueType))
	t.Bindings = append(
		t.Bindings,
		ladder.Binding{Source: delivery, Destination: users, Target: ladder.ToExchange, Key: "#." + destination},
		ladder.Binding{Source: users, Destination: sinkName, Target: ladder.ToQueue, Key: "#." + destination},
	)
	return &system{name: "Kombu copy", topology: t, route: func(d time.Duration) (exchange, key string, err error) {
		return name(otherLevels - 1), prefix(ceiling(d, unit)) + destination, nil
	}}
}

// chain is what the ladders of NServiceBus and Kombu have in common.
func chain(name func(level int) string, delivery string, unit time.Duration, queueType ladder.QueueType) ladder.Topology {
	t := ladder.Topology{Exchanges: []ladder.Exchange{{Name: delivery, Kind: amqp.ExchangeTopic}}}
	below := delivery
	for level := range otherLevels {
		arguments := map[string]any{
			argQueueType:             string(queueType),
			"x-message-ttl":          unit.Milliseconds() << level,
			"x-dead-letter-exchange": below,
			"x-overflow":             "reject-publish",
		}
		if queueType == ladder.Quorum {
			arguments["x-dead-letter-strategy"] = "at-least-once"
		}
		stars := strings.Repeat("*.", otherLevels-1-level)
		t.Exchanges = append(t.Exchanges, ladder.Exchange{Name: name(level), Kind: amqp.ExchangeTopic})
		t.Queues = append(t.Queues, ladder.Queue{Name: name(level), Arguments: arguments})
		t.Bindings = append(
			t.Bindings,
			ladder.Binding{Source: name(level), Destination: name(level), Target: ladder.ToQueue, Key: stars + "1.#"},
			ladder.Binding{Source: name(level), Destination: below, Target: ladder.ToExchange, Key: stars + "0.#"},
		)
		below = name(level)
	}
	return t
}

// prefix writes units as words of a routing key, as those ladders do.
func prefix(units uint64) string {
	var b strings.Builder
	for level := otherLevels - 1; level >= 0; level-- {
		b.WriteString(strconv.FormatUint(units>>level&1, 10) + ".")
	}
	return b.String()
}

func ceiling(d, unit time.Duration) uint64 { return uint64((d + unit - 1) / unit) }

// ttlQueues is the floor for lateness: a queue of its own for each delay, one hop, dead-lettered by the default exchange
// into the sink.
func ttlQueues(delays []time.Duration, queueType ladder.QueueType) *system {
	name := func(d time.Duration) string { return "bench.ttl." + d.String() }
	t := ladder.Topology{Queues: []ladder.Queue{sinkQueue(queueType)}}
	for _, d := range delays {
		arguments := map[string]any{
			argQueueType: string(queueType), "x-message-ttl": d.Milliseconds(),
			"x-dead-letter-exchange": "", "x-dead-letter-routing-key": sinkName, "x-overflow": "reject-publish",
		}
		if queueType == ladder.Quorum {
			arguments["x-dead-letter-strategy"] = "at-least-once"
		}
		t.Queues = append(t.Queues, ladder.Queue{Name: name(d), Arguments: arguments})
	}
	return &system{name: "a TTL queue per delay", topology: t, route: func(d time.Duration) (exchange, key string, err error) {
		return "", name(d), nil
	}}
}

func sinkQueue(queueType ladder.QueueType) ladder.Queue {
	return ladder.Queue{Name: sinkName, Arguments: map[string]any{argQueueType: string(queueType)}}
}

// declare makes all objects of a system.
func (s *system) declare(ch *amqp.Channel) error {
	for _, e := range s.topology.Exchanges {
		if err := ch.ExchangeDeclare(e.Name, e.Kind, true, false, e.Internal, false, e.Arguments); err != nil {
			return fmt.Errorf("exchange %s: %w", e.Name, err)
		}
	}
	for _, q := range s.topology.Queues {
		if _, err := ch.QueueDeclare(q.Name, true, false, false, false, q.Arguments); err != nil {
			return fmt.Errorf("queue %s: %w", q.Name, err)
		}
	}
	for _, b := range s.topology.Bindings {
		bind := ch.QueueBind
		if b.Target == ladder.ToExchange {
			bind = func(name, key, exchange string, noWait bool, args amqp.Table) error {
				return ch.ExchangeBind(name, key, exchange, noWait, args)
			}
		}
		if err := bind(b.Destination, b.Key, b.Source, false, nil); err != nil {
			return fmt.Errorf("binding of %s to %s: %w", b.Destination, b.Source, err)
		}
	}
	return nil
}

// remove deletes all objects of a system, with the messages in them. The exchanges go first and then nothing moves any
// more: RabbitMQ 4.3 may end at-least-once dead-lettering on the whole node if quorum queues are deleted while messages
// move between them.
func (s *system) remove(ch *amqp.Channel) error {
	for _, e := range s.topology.Exchanges {
		if err := ch.ExchangeDelete(e.Name, false, false); err != nil {
			return fmt.Errorf("deleting exchange %s: %w", e.Name, err)
		}
	}
	time.Sleep(time.Second)
	for _, q := range s.topology.Queues {
		if _, err := ch.QueueDelete(q.Name, false, false, false); err != nil {
			return fmt.Errorf("deleting queue %s: %w", q.Name, err)
		}
	}
	return nil
}
