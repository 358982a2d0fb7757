//nolint:thelper // they are tests
package laddertest_test

import (
	"context"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/laddertest"
)

const misuseVariable = "LADDERTEST_MISUSE"

// misuses are tests that fail, and what they say.
var misuses = map[string]struct {
	test func(t *testing.T, b *laddertest.Broker)
	says string
}{
	"for ever": {func(t *testing.T, b *laddertest.Broker) {
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Destinations: []string{"mail.due"}}, func(context.Context, *ladder.Delivery) error {
			return ladder.RetryAfter(0)
		})
		publish(t, b, "mail.due", time.Minute, "hello")
		b.Drain()
	}, `Drain: 100000 deliveries and no end; the last was of message "id-hello" (destination "mail.due") in queue "mails", attempt 1`},
	"invalid consumer": {func(_ *testing.T, b *laddertest.Broker) {
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Destinations: []string{"mail.#"}}, newRecorder().handle)
	}, `ladder: invalid configuration: Destinations`},
	"no handler": {func(_ *testing.T, b *laddertest.Broker) {
		b.Consume(ladder.ConsumerConfig{Queue: "mails"}, nil)
	}, `Consume("mails"): the handler is nil`},
	"second consumer": {func(_ *testing.T, b *laddertest.Broker) {
		b.Consume(ladder.ConsumerConfig{Queue: "mails"}, newRecorder().handle)
		b.Consume(ladder.ConsumerConfig{Queue: "mails"}, newRecorder().handle)
	}, `Consume("mails"): the queue has a consumer already`},
	"invalid publisher": {func(_ *testing.T, b *laddertest.Broker) {
		b.PublisherWith(ladder.PublisherConfig{MaxInFlight: -1})
	}, `ladder: invalid configuration: MaxInFlight`},
	"invalid binding": {func(_ *testing.T, b *laddertest.Broker) {
		b.Bind("mails", "")
	}, `ladder: invalid destination`},
	"unknown queue": {func(_ *testing.T, b *laddertest.Broker) {
		b.Bind("mails", "mail.due")
		b.Failed("mails")
	}, `Failed("mails"): nobody consumes that queue`},
	"drain in a handler": {func(t *testing.T, b *laddertest.Broker) {
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Destinations: []string{"mail.due"}}, func(context.Context, *ladder.Delivery) error {
			b.Drain()
			return nil
		})
		publish(t, b, "mail.due", 0, "hello")
		b.Advance(time.Hour)
	}, `Drain is called while messages are being delivered`},
	"handler fails the test": {func(t *testing.T, b *laddertest.Broker) {
		b.Consume(ladder.ConsumerConfig{Queue: "mails", Destinations: []string{"mail.due"}}, func(context.Context, *ladder.Delivery) error {
			require.Fail(t, "seen by the test")
			return nil
		})
		publish(t, b, "mail.due", 0, "hello")
		b.Drain()
		t.Log("the test went on")
	}, `seen by the test`},
}

// TestMisuse runs itself in another process, once for each test that is to fail.
func TestMisuse(t *testing.T) {
	t.Parallel()
	if name := os.Getenv(misuseVariable); name != "" {
		run(t, misuses[name].test)
		return
	}
	for name, misuse := range misuses {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			command := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestMisuse$")
			command.Env = append(os.Environ(), misuseVariable+"="+name)
			output, err := command.CombinedOutput()
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit, "the test must fail: %s", output)
			assert.Contains(t, string(output), misuse.says)
			assert.NotContains(t, string(output), "the test went on")
			assert.NotContains(t, string(output), "goroutine ", "a panic or a deadlock")
		})
	}
}
