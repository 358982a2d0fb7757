package ladder_test

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/rabbitladder/ladder"
)

// splitWords cuts a key as a topic exchange does: at each dot, so that there are
// empty words, but the empty key has no word at all.
func splitWords(key string) []string {
	if key == "" {
		return nil
	}
	return strings.Split(key, ".")
}

// topicMatches says whether a topic exchange sends a key to a binding: "*" stands
// for one word, which may be empty, and "#" for any number of words.
func topicMatches(binding, key []string) bool {
	switch {
	case len(binding) == 0:
		return len(key) == 0
	case binding[0] == "#":
		return topicMatches(binding[1:], key) || len(key) > 0 && topicMatches(binding, key[1:])
	case len(key) == 0:
		return false
	default:
		return (binding[0] == "*" || binding[0] == key[0]) && topicMatches(binding[1:], key[1:])
	}
}

func TestTopicMatches(t *testing.T) {
	t.Parallel()
	tests := []struct {
		binding, key string
		want         bool
	}{
		// From RabbitMQ's tutorial on topics.
		{"*.orange.*", "quick.orange.rabbit", true},
		{"*.orange.*", "quick.orange.male.rabbit", false},
		{"*.*.rabbit", "lazy.pink.rabbit", true},
		{"lazy.#", "lazy.orange.male.rabbit", true},
		{"lazy.#", "lazy", true},
		{"lazy.#", "lazier.orange", false},
		// Literal words.
		{"a", "a", true},
		{"a", "b", false},
		{"a", "A", false},
		{"a", "a.b", false},
		{"a.b", "a", false},
		// One word.
		{"*", "a", true},
		{"*", "a.b", false},
		{"a.*", "a", false},
		{"a.*", "a.", true},
		{"*.b", ".b", true},
		// Any number of words.
		{"#", "", true},
		{"#", "a", true},
		{"#", "a.b.c", true},
		{"#", "..", true},
		{"a.#", "a", true},
		{"a.#", "b.a", false},
		{"#.b", "b", true},
		{"#.b", "a.a.b", true},
		{"#.b", "a.b.a", false},
		{"a.#.b", "a.b", true},
		{"a.#.b", "a.b.b", true},
		{"a.#.b", "a.x.y", false},
		{"#.#", "", true},
		{"#.a.#", "b.a.b.a", true},
		{"#.*", "", false},
		{"#.*", "a.b", true},
		{"*.#", "", false},
		// Empty words are words, but the empty key has none.
		{"", "", true},
		{"*", "", false},
		{"*.*", ".", true},
		{"a.*.b", "a..b", true},
		{"a.b", "a..b", false},
		{"a..b", "a..b", true},
		{"a..b", "a.b", false},
		// Wildcards are whole words, and only in a binding.
		{"a*", "ab", false},
		{"a*", "a*", true},
		{"##", "a.b", false},
		{"##", "##", true},
		{"a", "*", false},
		{"a", "#", false},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprintf("%q %q", tt.binding, tt.key), func(t *testing.T) {
			t.Parallel()
			assert.Equal(t, tt.want, topicMatches(splitWords(tt.binding), splitWords(tt.key)))
			assert.Equal(t, tt.want, topicRegexp(tt.binding).MatchString(beforeEachWord(tt.key)))
		})
	}
}

// topicRegexp is a second formulation of topicMatches. In it each word of a key is
// preceded by a dot (see beforeEachWord), because a word can then be empty and
// "#" can stand for nothing without a dot of its own.
func topicRegexp(binding string) *regexp.Regexp {
	var pattern strings.Builder
	pattern.WriteString("^")
	for _, word := range splitWords(binding) {
		switch word {
		case "*":
			pattern.WriteString(`\.[^.]*`)
		case "#":
			pattern.WriteString(`(\.[^.]*)*`)
		default:
			pattern.WriteString(`\.` + regexp.QuoteMeta(word))
		}
	}
	pattern.WriteString("$")
	return regexp.MustCompile(pattern.String())
}

func beforeEachWord(key string) string {
	if key == "" {
		return ""
	}
	return "." + key
}

func TestTopicMatchesAgreesWithRegexp(t *testing.T) {
	t.Parallel()
	// Few different words, or nothing would ever match.
	key := rapid.Custom(func(t *rapid.T) string {
		return strings.Join(rapid.SliceOfN(rapid.SampledFrom([]string{"0", "1", "a", "", "é*"}), 0, 7).Draw(t, "words"), ".")
	})
	binding := rapid.Custom(func(t *rapid.T) string {
		return strings.Join(rapid.SliceOfN(rapid.SampledFrom([]string{"*", "#", "0", "1", "a", "", "é*"}), 0, 7).Draw(t, "words"), ".")
	})
	rapid.Check(t, func(t *rapid.T) {
		binding := binding.Draw(t, "binding")
		for range 20 {
			key := key.Draw(t, "key")
			want := topicRegexp(binding).MatchString(beforeEachWord(key))
			require.Equal(t, want, topicMatches(splitWords(binding), splitWords(key)))
		}
	})
}

// A brokerModel is as much of RabbitMQ as a ladder makes use of: topic and fanout
// exchanges, exchange-to-exchange bindings, alternate exchanges, and queues whose
// messages expire into a dead-letter exchange. It is strict: an argument that it
// does not know is refused, for it may be one that harms a ladder.
type brokerModel struct {
	exchanges map[string]ladder.Exchange
	queues    map[string]ladder.Queue
	bindings  map[string][]modelBinding
}

type modelBinding struct {
	ladder.Binding
	words []string
}

func newBrokerModel() *brokerModel {
	return &brokerModel{
		exchanges: map[string]ladder.Exchange{},
		queues:    map[string]ladder.Queue{},
		bindings:  map[string][]modelBinding{},
	}
}

// declare declares all of a topology, in its order.
func (b *brokerModel) declare(topology ladder.Topology) error {
	for _, exchange := range topology.Exchanges {
		if err := b.declareExchange(exchange); err != nil {
			return err
		}
	}
	for _, queue := range topology.Queues {
		if err := b.declareQueue(queue); err != nil {
			return err
		}
	}
	for _, binding := range topology.Bindings {
		if err := b.bind(binding); err != nil {
			return err
		}
	}
	return nil
}

// bindDestination makes an application's queue of the same name as the destination,
// bound to it.
func (b *brokerModel) bindDestination(l *ladder.Ladder, destination string) error {
	key, err := l.BindingKey(destination)
	if err != nil {
		return err
	}
	queue := destinationQueue(destination)
	if err := b.declareQueue(ladder.Queue{Name: queue}); err != nil {
		return err
	}
	return b.bind(ladder.Binding{
		Source: l.DeliveryExchange(), Destination: queue, Target: ladder.ToQueue, Key: key,
	})
}

// destinationQueue names the queue of a destination. Queue names are not the
// ladder's business, so the name need not fit AMQP.
func destinationQueue(destination string) string { return "queue of " + destination }

func (b *brokerModel) declareExchange(exchange ladder.Exchange) error {
	if known, ok := b.exchanges[exchange.Name]; ok {
		if !reflect.DeepEqual(known, exchange) {
			return fmt.Errorf("406: exchange %q exists with other arguments", exchange.Name)
		}
		return nil
	}
	if err := checkObjectName(exchange.Name); err != nil {
		return err
	}
	if exchange.Kind != "topic" && exchange.Kind != "fanout" {
		return fmt.Errorf("503: exchange kind %q", exchange.Kind)
	}
	for argument, value := range exchange.Arguments {
		if _, isString := value.(string); argument != "alternate-exchange" || !isString {
			return fmt.Errorf("exchange %q: argument %s = %v (%T)", exchange.Name, argument, value, value)
		}
	}
	b.exchanges[exchange.Name] = exchange
	return nil
}

func (b *brokerModel) declareQueue(queue ladder.Queue) error {
	if known, ok := b.queues[queue.Name]; ok {
		if !reflect.DeepEqual(known, queue) {
			return fmt.Errorf("406: queue %q exists with other arguments", queue.Name)
		}
		return nil
	}
	if _, isLevel := queue.Arguments["x-message-ttl"]; isLevel {
		if err := checkObjectName(queue.Name); err != nil {
			return err
		}
	}
	for argument, value := range queue.Arguments {
		if err := checkQueueArgument(argument, value); err != nil {
			return fmt.Errorf("queue %q: %w", queue.Name, err)
		}
	}
	if queue.Arguments["x-dead-letter-strategy"] == "at-least-once" &&
		(queue.Arguments["x-queue-type"] != "quorum" || queue.Arguments["x-overflow"] != "reject-publish") {
		return fmt.Errorf("queue %q: at-least-once falls back to at-most-once", queue.Name)
	}
	b.queues[queue.Name] = queue
	return nil
}

func checkQueueArgument(argument string, value any) error {
	const mostTTL = 315_360_000_000
	text, isString := value.(string)
	ttl, isInt64 := value.(int64)
	valid := map[string]bool{
		"x-queue-type":           text == "quorum" || text == "classic",
		"x-dead-letter-exchange": isString,
		"x-dead-letter-strategy": text == "at-least-once",
		"x-overflow":             text == "reject-publish",
		// An int would be cut to 32 bits on the wire.
		"x-message-ttl": isInt64 && ttl > 0 && ttl <= mostTTL,
	}
	if !valid[argument] {
		return fmt.Errorf("406: argument %s = %v (%T)", argument, value, value)
	}
	return nil
}

func checkObjectName(name string) error {
	switch {
	case strings.HasPrefix(name, "amq."):
		return fmt.Errorf("403: name %q is reserved", name)
	case len(name) > 255:
		return fmt.Errorf("name %q is too long for a short string", name)
	}
	return nil
}

func (b *brokerModel) bind(binding ladder.Binding) error {
	_, queue := b.queues[binding.Destination]
	_, exchange := b.exchanges[binding.Destination]
	_, source := b.exchanges[binding.Source]
	known := queue && binding.Target == ladder.ToQueue || exchange && binding.Target == ladder.ToExchange
	if !source || !known {
		return fmt.Errorf("404: binding %+v", binding)
	}
	if len(binding.Key) > 255 {
		return fmt.Errorf("binding key %q is too long for a short string", binding.Key)
	}
	words := splitWords(binding.Key)
	if len(slices.DeleteFunc(slices.Clone(words), func(word string) bool { return word != "#" })) > 2 {
		return fmt.Errorf("406: more than two # in %q", binding.Key)
	}
	for _, there := range b.bindings[binding.Source] {
		if there.Binding == binding {
			return nil
		}
	}
	b.bindings[binding.Source] = append(b.bindings[binding.Source], modelBinding{binding, words})
	return nil
}

// A trip is the way of one copy of a message through the broker.
type trip struct {
	// lookups are the exchanges that the copy was routed by, in order.
	lookups []lookup
	// waits are the queues with a TTL that the copy expired from, in order.
	waits []modelWait
	// end is the queue where the copy stays, or "" if it is lost.
	end string
}

type lookup struct {
	exchange string
	// matches is the number of its bindings that matched.
	matches int
}

type modelWait struct {
	queue string
	ttl   time.Duration
}

// total returns the time that the copy has waited.
func (t trip) total() time.Duration {
	var sum time.Duration
	for _, wait := range t.waits {
		sum += wait.ttl
	}
	return sum
}

// publish sends a message to an exchange and follows each copy to its end.
func (b *brokerModel) publish(exchange, key string) ([]trip, error) {
	target, ok := b.exchanges[exchange]
	if !ok {
		return nil, fmt.Errorf("404: no exchange %q", exchange)
	}
	if target.Internal {
		return nil, errors.New("403: clients cannot publish to an internal exchange")
	}
	return b.follow(trip{}, exchange, key), nil
}

// follow routes a copy of a message that has come so far.
func (b *brokerModel) follow(soFar trip, exchange, key string) []trip {
	queues, lookups := b.route(exchange, splitWords(key))
	soFar.lookups = slices.Concat(soFar.lookups, lookups)
	if len(queues) == 0 {
		return []trip{soFar}
	}
	var trips []trip
	for _, name := range queues {
		trips = append(trips, b.enter(soFar, name, key)...)
	}
	return trips
}

// enter puts a copy into a queue, where it stays or expires.
func (b *brokerModel) enter(soFar trip, name, key string) []trip {
	queue := b.queues[name]
	ttl, expires := queue.Arguments["x-message-ttl"].(int64)
	if !expires {
		soFar.end = name
		return []trip{soFar}
	}
	for _, wait := range soFar.waits {
		if wait.queue == name {
			// RabbitMQ drops what expires twice in one queue.
			return []trip{soFar}
		}
	}
	soFar.waits = append(slices.Clone(soFar.waits), modelWait{name, time.Duration(ttl) * time.Millisecond})
	deadLetter, _ := queue.Arguments["x-dead-letter-exchange"].(string)
	if _, ok := b.exchanges[deadLetter]; !ok {
		return []trip{soFar}
	}
	return b.follow(soFar, deadLetter, key)
}

// route returns the queues that a key leads to, each once, as RabbitMQ has it:
// through exchanges bound to the first, none of them twice, and from each that
// has no matching binding at all to its alternate exchange.
func (b *brokerModel) route(exchange string, key []string) (queues []string, lookups []lookup) {
	found := map[string]bool{}
	seen := map[string]bool{exchange: true}
	for todo := []string{exchange}; len(todo) > 0; todo = todo[1:] {
		current := b.exchanges[todo[0]]
		matches := 0
		visit := func(name string) {
			if _, ok := b.exchanges[name]; ok && !seen[name] {
				seen[name] = true
				todo = append(todo, name)
			}
		}
		for _, binding := range b.bindings[current.Name] {
			if current.Kind != "fanout" && !topicMatches(binding.words, key) {
				continue
			}
			matches++
			if binding.Target == ladder.ToQueue {
				found[binding.Destination] = true
			} else {
				visit(binding.Destination)
			}
		}
		lookups = append(lookups, lookup{current.Name, matches})
		if alternate, ok := current.Arguments["alternate-exchange"].(string); ok && matches == 0 {
			visit(alternate)
		}
	}
	return slices.Sorted(maps.Keys(found)), lookups
}

// The model itself, on a topology that is no ladder, with all that it knows.
func TestBrokerModel(t *testing.T) {
	t.Parallel()
	b := newBrokerModel()
	alternate := map[string]any{"alternate-exchange": "other"}
	require.NoError(t, b.declare(ladder.Topology{
		Exchanges: []ladder.Exchange{
			{Name: "other", Kind: "fanout", Internal: true},
			{Name: "first", Kind: "topic", Arguments: alternate},
			{Name: "second", Kind: "topic"},
		},
		Queues: []ladder.Queue{
			{Name: "end"},
			{Name: "rest"},
			{Name: "wait", Arguments: map[string]any{"x-message-ttl": int64(5), "x-dead-letter-exchange": "second"}},
			{Name: "loop", Arguments: map[string]any{"x-message-ttl": int64(7), "x-dead-letter-exchange": "first"}},
			{Name: "void", Arguments: map[string]any{"x-message-ttl": int64(9)}},
		},
		Bindings: []ladder.Binding{
			{Source: "other", Destination: "rest", Target: ladder.ToQueue},
			{Source: "first", Destination: "wait", Target: ladder.ToQueue, Key: "wait.#"},
			{Source: "first", Destination: "loop", Target: ladder.ToQueue, Key: "loop"},
			{Source: "first", Destination: "void", Target: ladder.ToQueue, Key: "void"},
			{Source: "first", Destination: "end", Target: ladder.ToQueue, Key: "end"},
			{Source: "first", Destination: "end", Target: ladder.ToQueue, Key: "*"},
			{Source: "first", Destination: "second", Target: ladder.ToExchange, Key: "over.*"},
			{Source: "second", Destination: "first", Target: ladder.ToExchange, Key: "over.back"},
			{Source: "second", Destination: "end", Target: ladder.ToQueue, Key: "wait.end"},
		},
	}))
	ms := time.Millisecond
	tests := []struct {
		name string
		key  string
		want []trip
	}{
		{"a queue bound twice gets one copy", "end", []trip{
			{lookups: []lookup{{"first", 2}}, end: "end"},
		}},
		{"expired, then delivered", "wait.end", []trip{
			{lookups: []lookup{{"first", 1}, {"second", 1}}, waits: []modelWait{{"wait", 5 * ms}}, end: "end"},
		}},
		{"expired into an exchange without a match", "wait.nowhere", []trip{
			{lookups: []lookup{{"first", 1}, {"second", 0}}, waits: []modelWait{{"wait", 5 * ms}}},
		}},
		{"nothing matches, but there is an alternate exchange", "no.match", []trip{
			{lookups: []lookup{{"first", 0}, {"other", 1}}, end: "rest"},
		}},
		{"an exchange that leads nowhere counts as a match", "over.there", []trip{
			{lookups: []lookup{{"first", 1}, {"second", 0}}},
		}},
		{"exchanges in a circle", "over.back", []trip{
			{lookups: []lookup{{"first", 1}, {"second", 1}}},
		}},
		{"a queue in a circle drops, its neighbour has a copy", "loop", []trip{
			{lookups: []lookup{{"first", 2}}, end: "end"},
			{lookups: []lookup{{"first", 2}, {"first", 2}}, waits: []modelWait{{"loop", 7 * ms}}, end: "end"},
			{lookups: []lookup{{"first", 2}, {"first", 2}}, waits: []modelWait{{"loop", 7 * ms}}},
		}},
		{"expired without a dead-letter exchange", "void", []trip{
			{lookups: []lookup{{"first", 2}}, end: "end"},
			{lookups: []lookup{{"first", 2}}, waits: []modelWait{{"void", 9 * ms}}},
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := b.publish("first", tt.key)
			require.NoError(t, err)
			assert.Equal(t, tt.want, got)
		})
	}

	_, err := b.publish("other", "end")
	require.ErrorContains(t, err, "403")
	_, err = b.publish("third", "end")
	require.ErrorContains(t, err, "404")
}

func TestBrokerModelRefuses(t *testing.T) {
	t.Parallel()
	queue := func(arguments map[string]any) ladder.Topology {
		return ladder.Topology{Queues: []ladder.Queue{{Name: "q", Arguments: arguments}}}
	}
	tests := []struct {
		name     string
		topology ladder.Topology
	}{
		{"TTL as int", queue(map[string]any{"x-message-ttl": 1000})},
		{"TTL as int32", queue(map[string]any{"x-message-ttl": int32(1000)})},
		{"TTL above ten years", queue(map[string]any{"x-message-ttl": int64(315_360_000_001)})},
		{"TTL of nothing", queue(map[string]any{"x-message-ttl": int64(0)})},
		{"expiring queue", queue(map[string]any{"x-expires": int64(1000)})},
		{"limited queue", queue(map[string]any{"x-max-length": int64(1000)})},
		{"dead-letter routing key", queue(map[string]any{"x-dead-letter-routing-key": "a"})},
		{"queue type", queue(map[string]any{"x-queue-type": "stream"})},
		{"at least once, classic", queue(map[string]any{
			"x-queue-type": "classic", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
		})},
		{"at least once without reject-publish", queue(map[string]any{
			"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once",
		})},
		{"same queue, other arguments", ladder.Topology{Queues: []ladder.Queue{
			{Name: "q"}, {Name: "q", Arguments: map[string]any{"x-queue-type": "classic"}},
		}}},
		{"same exchange, other kind", ladder.Topology{Exchanges: []ladder.Exchange{
			{Name: "e", Kind: "topic"}, {Name: "e", Kind: "fanout"},
		}}},
		{"exchange kind", ladder.Topology{Exchanges: []ladder.Exchange{{Name: "e", Kind: "direct"}}}},
		{"exchange argument", ladder.Topology{Exchanges: []ladder.Exchange{
			{Name: "e", Kind: "topic", Arguments: map[string]any{"x-other": "a"}},
		}}},
		{"reserved name", ladder.Topology{Exchanges: []ladder.Exchange{{Name: "amq.e", Kind: "topic"}}}},
		{"long name", ladder.Topology{Exchanges: []ladder.Exchange{{Name: strings.Repeat("e", 256), Kind: "topic"}}}},
		{"binding from nowhere", ladder.Topology{
			Queues:   []ladder.Queue{{Name: "q"}},
			Bindings: []ladder.Binding{{Source: "e", Destination: "q", Target: ladder.ToQueue}},
		}},
		{"binding to nowhere", ladder.Topology{
			Exchanges: []ladder.Exchange{{Name: "e", Kind: "topic"}},
			Bindings:  []ladder.Binding{{Source: "e", Destination: "q", Target: ladder.ToQueue}},
		}},
		{"binding to an exchange called a queue", ladder.Topology{
			Exchanges: []ladder.Exchange{{Name: "e", Kind: "topic"}},
			Bindings:  []ladder.Binding{{Source: "e", Destination: "e", Target: ladder.ToQueue}},
		}},
		{"three # in a binding", ladder.Topology{
			Exchanges: []ladder.Exchange{{Name: "e", Kind: "topic"}},
			Bindings:  []ladder.Binding{{Source: "e", Destination: "e", Target: ladder.ToExchange, Key: "#.#.a.#"}},
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			require.Error(t, newBrokerModel().declare(tt.topology))
		})
	}
}
