package ladder_test

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/rabbitladder/ladder"
)

// layouts are walked one by one and, declared one over the other, both together.
var layouts = []ladder.Layout{ladder.Direct, ladder.Chain}

// Written by hand: all of the smallest ladder that has two levels.
func TestTopologyOfTwoLevels(t *testing.T) {
	t.Parallel()
	alternate := map[string]any{"alternate-exchange": "two.2x90s.unroutable"}
	exchanges := []ladder.Exchange{
		{Name: "two.2x90s.unroutable", Kind: "fanout", Internal: true},
		{Name: "two.2x90s.delivery", Kind: "topic", Arguments: alternate},
		{Name: "two.2x90s.level-00", Kind: "topic", Arguments: alternate},
		{Name: "two.2x90s.level-01", Kind: "topic", Arguments: alternate},
	}
	parking := ladder.Binding{Source: "two.2x90s.unroutable", Destination: "two.2x90s.parking", Target: "queue"}

	t.Run("quorum, direct", func(t *testing.T) {
		t.Parallel()
		l := mustLadder(t, ladder.Config{Name: "two", Unit: 90 * time.Second, Levels: 2})
		assert.Equal(t, ladder.Topology{
			Exchanges: exchanges,
			Queues: []ladder.Queue{
				{Name: "two.2x90s.parking", Arguments: map[string]any{"x-queue-type": "quorum"}},
				{Name: "two.2x90s.level-00", Arguments: map[string]any{
					"x-queue-type":           "quorum",
					"x-message-ttl":          int64(90_000),
					"x-dead-letter-exchange": "two.2x90s.delivery",
					"x-dead-letter-strategy": "at-least-once",
					"x-overflow":             "reject-publish",
				}},
				{Name: "two.2x90s.level-01", Arguments: map[string]any{
					"x-queue-type":           "quorum",
					"x-message-ttl":          int64(180_000),
					"x-dead-letter-exchange": "two.2x90s.level-00",
					"x-dead-letter-strategy": "at-least-once",
					"x-overflow":             "reject-publish",
				}},
			},
			Bindings: []ladder.Binding{
				parking,
				{Source: "two.2x90s.level-00", Destination: "two.2x90s.level-00", Target: "queue", Key: "*.1.#"},
				{Source: "two.2x90s.level-00", Destination: "two.2x90s.delivery", Target: "exchange", Key: "*.0.#"},
				{Source: "two.2x90s.level-01", Destination: "two.2x90s.level-01", Target: "queue", Key: "1.#"},
				{Source: "two.2x90s.level-01", Destination: "two.2x90s.level-00", Target: "queue", Key: "0.1.#"},
				{Source: "two.2x90s.level-01", Destination: "two.2x90s.delivery", Target: "exchange", Key: "0.0.#"},
			},
		}, l.Topology())
	})

	t.Run("classic, chain", func(t *testing.T) {
		t.Parallel()
		l := mustLadder(t, ladder.Config{
			Name: "two", Unit: 90 * time.Second, Levels: 2, QueueType: ladder.Classic, Layout: ladder.Chain,
		})
		assert.Equal(t, ladder.Topology{
			Exchanges: exchanges,
			Queues: []ladder.Queue{
				{Name: "two.2x90s.parking", Arguments: map[string]any{"x-queue-type": "classic"}},
				{Name: "two.2x90s.level-00", Arguments: map[string]any{
					"x-queue-type":           "classic",
					"x-message-ttl":          int64(90_000),
					"x-dead-letter-exchange": "two.2x90s.delivery",
				}},
				{Name: "two.2x90s.level-01", Arguments: map[string]any{
					"x-queue-type":           "classic",
					"x-message-ttl":          int64(180_000),
					"x-dead-letter-exchange": "two.2x90s.level-00",
				}},
			},
			Bindings: []ladder.Binding{
				parking,
				{Source: "two.2x90s.level-00", Destination: "two.2x90s.level-00", Target: "queue", Key: "*.1.#"},
				{Source: "two.2x90s.level-00", Destination: "two.2x90s.delivery", Target: "exchange", Key: "*.0.#"},
				{Source: "two.2x90s.level-01", Destination: "two.2x90s.level-01", Target: "queue", Key: "1.#"},
				{Source: "two.2x90s.level-01", Destination: "two.2x90s.level-00", Target: "exchange", Key: "0.#"},
			},
		}, l.Topology())
	})
}

// The number of objects is what the documentation of [ladder.Layout] says, and
// depends on the levels alone.
func TestTopologySize(t *testing.T) {
	t.Parallel()
	for levels := 1; levels <= 39; levels++ {
		for layout, bindings := range map[ladder.Layout]int{
			ladder.Direct: levels*(levels+1)/2 + levels,
			ladder.Chain:  2 * levels,
		} {
			topology := mustLadder(t, ladder.Config{Unit: time.Millisecond, Levels: levels, Layout: layout}).Topology()
			require.Len(t, topology.Exchanges, levels+2)
			require.Len(t, topology.Queues, levels+1)
			require.Len(t, topology.Bindings, bindings+1, "one more for the parking queue")
		}
	}
}

// The highest TTLs are where an int would be cut to 32 bits, and where RabbitMQ's
// limit is.
func TestTopologyOfMostLevelsIsAccepted(t *testing.T) {
	t.Parallel()
	for _, layout := range layouts {
		for _, queueType := range []ladder.QueueType{ladder.Quorum, ladder.Classic} {
			for unit, levels := range map[time.Duration]int{
				time.Millisecond: 39, time.Second: 29, time.Minute: 23, time.Hour: 17, tenYearsTTL: 1,
			} {
				l := mustLadder(t, ladder.Config{Unit: unit, Levels: levels, Layout: layout, QueueType: queueType})
				require.NoError(t, newBrokerModel().declare(l.Topology()))
			}
		}
	}
}

// A tool may change the values it was given without harm to anyone, or to the
// rest of them.
func TestTopologyIsFreshlyMade(t *testing.T) {
	t.Parallel()
	l := mustLadder(t, ladder.Config{Levels: 3})
	want := l.Topology()
	changed := l.Topology()
	for i := range changed.Queues {
		changed.Queues[i].Arguments["x-queue-type"] = changed.Queues[i].Name
	}
	topics := changed.Exchanges[1:]
	for i := range topics {
		topics[i].Arguments["alternate-exchange"] = topics[i].Name
	}
	changed.Bindings[0].Key = "changed"

	for _, queue := range changed.Queues {
		assert.Equal(t, queue.Name, queue.Arguments["x-queue-type"], "queues share a map")
	}
	for _, exchange := range topics {
		assert.Equal(t, exchange.Name, exchange.Arguments["alternate-exchange"], "exchanges share a map")
	}
	assert.Equal(t, want, l.Topology())
}

func TestBindingKey(t *testing.T) {
	t.Parallel()
	l := mustLadder(t, ladder.Config{Levels: 6})
	for destination, want := range map[string]string{
		"billing":        "*.*.*.*.*.*.billing",
		"email.delivery": "*.*.*.*.*.*.email.delivery",
		".":              "*.*.*.*.*.*..",
		"a*":             "*.*.*.*.*.*.a*",
	} {
		got, err := l.BindingKey(destination)
		require.NoError(t, err)
		assert.Equal(t, want, got)
	}
}

// modelOf returns a broker with these ladders declared one over the other.
func modelOf(t require.TestingT, ladders ...*ladder.Ladder) *brokerModel {
	b := newBrokerModel()
	for _, l := range ladders {
		require.NoError(t, b.declare(l.Topology()))
	}
	return b
}

// withLayout returns the same ladder in another layout.
func withLayout(t require.TestingT, l *ladder.Ladder, layout ladder.Layout) *ladder.Ladder {
	config := l.Config()
	config.Layout = layout
	return mustLadder(t, config)
}

// send publishes a message with a delay in units, where Route says.
func send(t require.TestingT, b *brokerModel, l *ladder.Ladder, units uint64, destination string) []trip {
	route, err := l.Route(time.Duration(units)*l.Config().Unit, destination)
	require.NoError(t, err)
	require.Equal(t, units, route.Units)
	trips, err := b.publish(route.Exchange, route.Key)
	require.NoError(t, err)
	return trips
}

// requireArrival checks that there is one copy, and that it arrives in the queue
// after the waits of its delay: these queues, in this order, for this long.
func requireArrival(t require.TestingT, l *ladder.Ladder, trips []trip, units uint64, queue string) {
	require.Len(t, trips, 1)
	got := trips[0]
	require.Equal(t, queue, got.end)
	require.Equal(t, time.Duration(units)*l.Config().Unit, got.total())
	require.Len(t, got.waits, bits.OnesCount64(units))
	var want []modelWait
	for level, wait := range l.Waits(units) {
		want = append(want, modelWait{l.Level(level), wait})
	}
	require.Equal(t, want, got.waits)
}

// requireOneWay checks that each exchange on the way found exactly one match, but
// for the delivery exchange of a message that is parked.
func requireOneWay(t require.TestingT, l *ladder.Ladder, got trip) {
	for _, lookup := range got.lookups {
		if lookup.exchange == l.DeliveryExchange() && got.end == l.ParkingQueue() {
			require.Zero(t, lookup.matches)
			continue
		}
		require.Equal(t, 1, lookup.matches, lookup.exchange)
	}
}

func TestWalkOfEveryValueOnTwelveLevels(t *testing.T) {
	t.Parallel()
	for _, layout := range layouts {
		t.Run(string(layout), func(t *testing.T) {
			t.Parallel()
			l := mustLadder(t, ladder.Config{Levels: 12, Layout: layout})
			b := modelOf(t, l)
			require.NoError(t, b.bindDestination(l, "billing"))
			for units := range uint64(1 << 12) {
				trips := send(t, b, l, units, "billing")
				requireArrival(t, l, trips, units, destinationQueue("billing"))
				requireOneWay(t, l, trips[0])

				trips = send(t, b, l, units, "sales.billing")
				requireArrival(t, l, trips, units, l.ParkingQueue())
				requireOneWay(t, l, trips[0])
			}
		})
	}
}

// Direct finds the next wait in one lookup, however many zeros lie between. Chain
// asks each exchange from the entry down.
func TestWalkLookups(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := drawLadder(t)
		units := drawUnits(t, l)
		b := modelOf(t, l)
		require.NoError(t, b.bindDestination(l, "billing"))

		got := send(t, b, l, units, "billing")[0]

		want := bits.Len64(units) + 1
		if l.Config().Layout == ladder.Direct {
			// One for each wait, but after the last 1 bit there is one
			// more if level 0 has been passed over.
			want = bits.OnesCount64(units) + 1
			if units != 0 && units&1 == 0 {
				want++
			}
		}
		require.Len(t, got.lookups, want)
	})
}

func TestWalkOfAnyLadder(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := drawLadder(t)
		b := modelOf(t, l)
		bound := rapid.SliceOfNDistinct(genDestination(), 1, 4, rapid.ID).Draw(t, "bound")
		for _, destination := range bound {
			require.NoError(t, b.bindDestination(l, destination))
		}
		unbound := genDestination().Filter(func(d string) bool { return !slices.Contains(bound, d) }).Draw(t, "unbound")

		for range 4 {
			units := drawUnits(t, l)
			for _, destination := range bound {
				trips := send(t, b, l, units, destination)
				requireArrival(t, l, trips, units, destinationQueue(destination))
				requireOneWay(t, l, trips[0])
			}
			trips := send(t, b, l, units, unbound)
			requireArrival(t, l, trips, units, l.ParkingQueue())
			requireOneWay(t, l, trips[0])
		}
	})
}

// A binding catches its own destination and no other that contains it: the fault
// of ladders that bind #.billing.
func TestBindingCatchesItsOwnDestinationOnly(t *testing.T) {
	t.Parallel()
	others := []string{
		"sales.billing", "billing.x", "x.billing.x", ".billing", "billing.", "billing.billing", "billings",
		"Billing", "1.billing", "0.0.billing", "billing*", "*billing",
	}
	for _, layout := range layouts {
		t.Run(string(layout), func(t *testing.T) {
			t.Parallel()
			for _, levels := range []int{1, 2, 6} {
				l := mustLadder(t, ladder.Config{Levels: levels, Layout: layout})
				b := modelOf(t, l)
				require.NoError(t, b.bindDestination(l, "billing"))
				for units := range uint64(1) << levels {
					requireArrival(t, l, send(t, b, l, units, "billing"), units, destinationQueue("billing"))
					for _, other := range others {
						requireArrival(t, l, send(t, b, l, units, other), units, l.ParkingQueue())
					}
				}
			}
		})
	}
}

// Several queues of one destination each get a copy, at the same time.
func TestWalkToSeveralQueues(t *testing.T) {
	t.Parallel()
	for _, layout := range layouts {
		l := mustLadder(t, ladder.Config{Levels: 6, Layout: layout})
		b := modelOf(t, l)
		require.NoError(t, b.bindDestination(l, "billing"))
		key, err := l.BindingKey("billing")
		require.NoError(t, err)
		require.NoError(t, b.declareQueue(ladder.Queue{Name: "audit"}))
		require.NoError(t, b.bind(ladder.Binding{
			Source: l.DeliveryExchange(), Destination: "audit", Target: ladder.ToQueue, Key: key,
		}))
		for units := range uint64(1 << 6) {
			trips := send(t, b, l, units, "billing")
			require.Len(t, trips, 2)
			requireArrival(t, l, trips[:1], units, "audit")
			requireArrival(t, l, trips[1:], units, destinationQueue("billing"))
		}
	}
}

// Entry at the highest bit is a short cut and nothing more: from each exchange
// above, the way is the same. Other ladders' publishers always start at the top.
func TestWalkFromEachExchangeAboveTheEntry(t *testing.T) {
	t.Parallel()
	for _, layout := range layouts {
		t.Run(string(layout), func(t *testing.T) {
			t.Parallel()
			l := mustLadder(t, ladder.Config{Levels: 8, Layout: layout})
			b := modelOf(t, l)
			require.NoError(t, b.bindDestination(l, "billing"))
			for units := range uint64(1 << 8) {
				for destination, end := range map[string]string{
					"billing": destinationQueue("billing"), "sales": l.ParkingQueue(),
				} {
					key := string(l.AppendKey(nil, units, destination))
					for entry := max(bits.Len64(units)-1, 0); entry < 8; entry++ {
						trips, err := b.publish(l.Level(entry), key)
						require.NoError(t, err)
						requireArrival(t, l, trips, units, end)
						requireOneWay(t, l, trips[0])
					}
				}
			}
		})
	}
}

// A key with nothing behind the bits, or one of another ladder, is parked too, or
// delivered to whom it names: nothing that enters is lost.
func TestNoKeyIsLost(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := drawLadder(t)
		b := modelOf(t, l)
		require.NoError(t, b.bindDestination(l, "billing"))
		key := rapid.OneOf(
			rapid.String(),
			rapid.StringOf(rapid.RuneFrom([]rune("01.a"))),
			rapid.Just(strings.Repeat("1.", l.Config().Levels)),
			rapid.Just(strings.TrimSuffix(strings.Repeat("0.", l.Config().Levels), ".")),
		).Draw(t, "key")
		for _, exchange := range l.Topology().Exchanges {
			if exchange.Internal {
				continue
			}
			trips, err := b.publish(exchange.Name, key)
			require.NoError(t, err)
			require.Len(t, trips, 1)
			require.NotEmpty(t, trips[0].end)
		}
	})
}

// requireDeliveredOrParked checks a message on a ladder that is not whole: it
// arrives on time, or is parked before that. It is never lost, doubled or early.
func requireDeliveredOrParked(t require.TestingT, l *ladder.Ladder, trips []trip, units uint64, queue string) {
	require.Len(t, trips, 1)
	if trips[0].end == l.ParkingQueue() {
		require.LessOrEqual(t, trips[0].total(), time.Duration(units)*l.Config().Unit)
		return
	}
	requireArrival(t, l, trips, units, queue)
}

// removeBindings returns the topology with some bindings less. The binding of the
// parking queue stays: it is declared first, and is the net under the others.
func removeBindings(topology ladder.Topology, remove func(ladder.Binding) bool) ladder.Topology {
	parking, rest := topology.Bindings[:1], slices.Clone(topology.Bindings[1:])
	topology.Bindings = append(slices.Clone(parking), slices.DeleteFunc(rest, remove)...)
	return topology
}

func TestOneMissingBinding(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := drawLadder(t)
		topology := l.Topology()
		missing := rapid.SampledFrom(topology.Bindings[1:]).Draw(t, "missing")
		b := newBrokerModel()
		require.NoError(t, b.declare(removeBindings(topology, func(binding ladder.Binding) bool {
			return binding == missing
		})))
		require.NoError(t, b.bindDestination(l, "billing"))

		for range 8 {
			units := drawUnits(t, l)
			requireDeliveredOrParked(t, l, send(t, b, l, units, "billing"), units, destinationQueue("billing"))
			requireDeliveredOrParked(t, l, send(t, b, l, units, "unbound"), units, "none")
		}
	})
}

// All values of a small ladder with each of its bindings missing in turn: each
// loss is noticed by some value, so none of the bindings is idle.
func TestEachBindingIsNeeded(t *testing.T) {
	t.Parallel()
	for _, layout := range layouts {
		t.Run(string(layout), func(t *testing.T) {
			t.Parallel()
			l := mustLadder(t, ladder.Config{Levels: 5, Layout: layout})
			for _, missing := range l.Topology().Bindings[1:] {
				b := newBrokerModel()
				require.NoError(t, b.declare(removeBindings(l.Topology(), func(binding ladder.Binding) bool {
					return binding == missing
				})))
				require.NoError(t, b.bindDestination(l, "billing"))
				parked := 0
				for units := range uint64(1 << 5) {
					key := string(l.AppendKey(nil, units, "billing"))
					// Some bindings serve only what enters above its bit.
					for entry := max(bits.Len64(units)-1, 0); entry < 5; entry++ {
						trips, err := b.publish(l.Level(entry), key)
						require.NoError(t, err)
						requireDeliveredOrParked(t, l, trips, units, destinationQueue("billing"))
						if trips[0].end == l.ParkingQueue() {
							parked++
						}
					}
				}
				require.NotZero(t, parked, "%+v", missing)
			}
		})
	}
}

func TestHalfOfTheBindingsMissing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := drawLadder(t)
		random := rapid.Bool()
		b := newBrokerModel()
		require.NoError(t, b.declare(removeBindings(l.Topology(), func(ladder.Binding) bool {
			return random.Draw(t, "missing")
		})))
		require.NoError(t, b.bindDestination(l, "billing"))

		units := drawUnits(t, l)
		for destination, queue := range map[string]string{"billing": destinationQueue("billing"), "unbound": "none"} {
			key := string(l.AppendKey(nil, units, destination))
			for entry := max(bits.Len64(units)-1, 0); entry < l.Config().Levels; entry++ {
				trips, err := b.publish(l.Level(entry), key)
				require.NoError(t, err)
				requireDeliveredOrParked(t, l, trips, units, queue)
			}
			requireDeliveredOrParked(t, l, send(t, b, l, units, destination), units, queue)
		}
	})
}

// A message that is published while the ladder is being declared is parked or
// delivered in time, wherever the declaration stopped.
func TestDeclaredInPart(t *testing.T) {
	t.Parallel()
	for _, layout := range layouts {
		t.Run(string(layout), func(t *testing.T) {
			t.Parallel()
			l := mustLadder(t, ladder.Config{Levels: 4, Layout: layout})
			for n := range len(l.Topology().Bindings) {
				topology := l.Topology()
				topology.Bindings = topology.Bindings[:n+1]
				b := newBrokerModel()
				require.NoError(t, b.declare(topology))
				require.NoError(t, b.bindDestination(l, "billing"))
				for units := range uint64(1 << 4) {
					requireDeliveredOrParked(t, l, send(t, b, l, units, "billing"), units, destinationQueue("billing"))
					requireDeliveredOrParked(t, l, send(t, b, l, units, "unbound"), units, "none")
				}
			}
		})
	}
}

// The layout of a ladder in use can be changed in place: the bindings of both
// together deliver each message once, after the same waits, and so do any that are
// left over from the other layout.
func TestBothLayoutsAtOnce(t *testing.T) {
	t.Parallel()
	t.Run("every value of eight levels", func(t *testing.T) {
		t.Parallel()
		l := mustLadder(t, ladder.Config{Levels: 8})
		b := modelOf(t, l, withLayout(t, l, ladder.Chain))
		require.NoError(t, b.bindDestination(l, "billing"))
		for units := range uint64(1 << 8) {
			requireArrival(t, l, send(t, b, l, units, "billing"), units, destinationQueue("billing"))
			requireArrival(t, l, send(t, b, l, units, "unbound"), units, l.ParkingQueue())
		}
	})

	t.Run("any ladder, any remains", func(t *testing.T) {
		t.Parallel()
		rapid.Check(t, func(t *rapid.T) {
			l := drawLadder(t)
			other := layouts[0]
			if l.Config().Layout == other {
				other = layouts[1]
			}
			random := rapid.Bool()
			b := modelOf(t, l)
			require.NoError(t, b.declare(removeBindings(withLayout(t, l, other).Topology(), func(ladder.Binding) bool {
				return random.Draw(t, "missing")
			})))
			destination := genDestination().Draw(t, "destination")
			require.NoError(t, b.bindDestination(l, destination))
			for range 4 {
				units := drawUnits(t, l)
				requireArrival(t, l, send(t, b, l, units, destination), units, destinationQueue(destination))
			}
		})
	})
}

// Ladders of different shape live side by side in one virtual host.
func TestLaddersSideBySide(t *testing.T) {
	t.Parallel()
	var ladders []*ladder.Ladder
	for _, config := range []ladder.Config{
		{Levels: 4},
		{Levels: 5},
		{Levels: 4, Unit: time.Minute, Layout: ladder.Chain},
		{Levels: 4, Name: "other", QueueType: ladder.Classic},
	} {
		ladders = append(ladders, mustLadder(t, config))
	}
	b := modelOf(t, ladders...)
	for i, l := range ladders {
		require.NoError(t, b.bindDestination(l, fmt.Sprint(i)))
	}
	for i, l := range ladders {
		for units := range uint64(1 << 4) {
			requireArrival(t, l, send(t, b, l, units, fmt.Sprint(i)), units, destinationQueue(fmt.Sprint(i)))
			requireArrival(t, l, send(t, b, l, units, fmt.Sprint(i+1)), units, l.ParkingQueue())
		}
	}
}

// Two ladders that differ in their queue type alone have the same names. The
// broker must see that and refuse.
func TestOtherQueueTypeIsRefused(t *testing.T) {
	t.Parallel()
	b := modelOf(t, mustLadder(t, ladder.Config{QueueType: ladder.Quorum}))
	require.ErrorContains(t, b.declare(mustLadder(t, ladder.Config{QueueType: ladder.Classic}).Topology()), "406")
}
