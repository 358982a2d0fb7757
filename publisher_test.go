package ladder_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

// declared returns a declared small ladder with a queue bound to "work", and
// what arrives there.
func declared(t *testing.T) (*ladder.Ladder, string, *arrivals) {
	t.Helper()
	l, url := small(t), brokertest.VHost(t)
	ch := openChannel(t, url)
	require.NoError(t, l.Declare(within(t), ch))
	declareBound(t, ch, l, "work", "work")
	return l, url, collect(t, ch, l, "work")
}

func TestPublishFillsInAndKeeps(t *testing.T) {
	t.Parallel()
	l, url, got := declared(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	stamp := time.Now().Add(-time.Hour).Truncate(time.Second)
	msg := amqp.Publishing{
		ContentType: "text/plain", ContentEncoding: "identity", CorrelationId: "c", ReplyTo: "r",
		MessageId: "mine", Timestamp: stamp, Type: "t", AppId: "a", DeliveryMode: amqp.Transient,
		Body: []byte("body"),
		Headers: amqp.Table{
			"string": "s", "int": 1 << 40, "nested": amqp.Table{"int": 1, "list": []any{1, []byte{2}, nil}},
			"x-death": []any{amqp.Table{"queue": l.Level(0)}}, "x-first-death-queue": "q", "x-last-death-reason": "expired",
			"x-delivery-count": int64(3), "x-acquired-count": int64(3), "ladder-attempt": int64(7),
		},
	}
	before := maps.Clone(msg.Headers)
	called := time.Now()
	require.NoError(t, p.PublishDelayed(within(t), "work", 70*time.Millisecond, msg))
	require.NoError(t, p.PublishAt(within(t), "work", called.Add(90*time.Millisecond), amqp.Publishing{}))
	assert.Equal(t, before, msg.Headers, "the caller's headers")
	assert.Equal(t, amqp.Transient, msg.DeliveryMode)

	list := got.waitFor(t, 2)
	requireOnTime(t, list)
	first, second := list[0], list[1]
	if first.MessageId != "mine" { // order is not promised
		first, second = second, first
	}
	assert.Equal(t, amqp.Table{
		"string": "s", "int": int64(1 << 40), "nested": amqp.Table{"int": int64(1), "list": []any{int64(1), []byte{2}, nil}},
		ladder.HeaderNotBefore: first.NotBefore.UnixMilli(),
	}, first.Headers)
	assert.WithinDuration(t, called.Add(70*time.Millisecond), first.NotBefore, patience)
	assert.Equal(t, amqp.Persistent, first.DeliveryMode)
	assert.Equal(t, []string{"text/plain", "identity", "c", "r", "mine", "t", "a", "body"},
		[]string{first.ContentType, first.ContentEncoding, first.CorrelationId, first.ReplyTo, first.MessageId, first.Type, first.AppId, string(first.Body)})
	assert.True(t, stamp.Equal(first.Timestamp))

	assert.Len(t, second.MessageId, 26)
	assert.WithinDuration(t, called, second.Timestamp, patience)
	assert.Equal(t, called.Add(90*time.Millisecond).UnixMilli(), second.NotBefore.UnixMilli())
}

func TestPublishRefuses(t *testing.T) {
	t.Parallel()
	l, url, got := declared(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}, MaxMessageBytes: 1000})
	long := strings.Repeat("x", 256)
	for name, c := range map[string]struct {
		m    ladder.Message
		want error
		text string
	}{
		"an expiration":            {ladder.Message{Publishing: amqp.Publishing{Expiration: "100"}}, ladder.ErrInvalidMessage, `Expiration "100"`},
		"a CC header":              {ladder.Message{Publishing: amqp.Publishing{Headers: amqp.Table{"CC": []any{"other"}}}}, ladder.ErrInvalidMessage, "header CC"},
		"a BCC header":             {ladder.Message{Publishing: amqp.Publishing{Headers: amqp.Table{"BCC": []any{"other"}}}}, ladder.ErrInvalidMessage, "header BCC"},
		"a uint64 header":          {ladder.Message{Publishing: amqp.Publishing{Headers: amqp.Table{"n": uint64(1)}}}, ladder.ErrInvalidMessage, `header "n": a uint64`},
		"a map header":             {ladder.Message{Publishing: amqp.Publishing{Headers: amqp.Table{"m": map[string]any{}}}}, ladder.ErrInvalidMessage, `header "m": a map[string]interface {}`},
		"a bad value in a list":    {ladder.Message{Publishing: amqp.Publishing{Headers: amqp.Table{"l": []any{amqp.Table{"d": time.Second}}}}}, ladder.ErrInvalidMessage, `element 0`},
		"a long header name":       {ladder.Message{Publishing: amqp.Publishing{Headers: amqp.Table{long: 1}}}, ladder.ErrInvalidMessage, "256 bytes"},
		"a long message id":        {ladder.Message{Publishing: amqp.Publishing{MessageId: long}}, ladder.ErrInvalidMessage, "MessageId has 256 bytes"},
		"a long content type":      {ladder.Message{Publishing: amqp.Publishing{ContentType: long}}, ladder.ErrInvalidMessage, "ContentType has 256 bytes"},
		"a long correlation id":    {ladder.Message{Publishing: amqp.Publishing{CorrelationId: long}}, ladder.ErrInvalidMessage, "CorrelationId has 256 bytes"},
		"a header without end":     {ladder.Message{Publishing: amqp.Publishing{Headers: endless()}}, ladder.ErrInvalidMessage, "more than 32 deep"},
		"a header with many parts": {ladder.Message{Publishing: amqp.Publishing{Headers: doubling()}}, ladder.ErrInvalidMessage, "more than 131072 values"},
		"too long an array":        {ladder.Message{Publishing: amqp.Publishing{Headers: amqp.Table{"a": make([]any, 8193)}}}, ladder.ErrInvalidMessage, "8193 elements"},
		"too large a table":        {ladder.Message{Publishing: amqp.Publishing{Headers: amqp.Table{"t": numbered(8193)}}}, ladder.ErrInvalidMessage, "8193 entries"},
		"too many headers":         {ladder.Message{Publishing: amqp.Publishing{Headers: numbered(8177)}}, ladder.ErrInvalidMessage, "8177 headers"},
		"a float that is none":     {ladder.Message{Publishing: amqp.Publishing{Headers: amqp.Table{"f": []any{math.NaN()}}}}, ladder.ErrInvalidMessage, "NaN"},
		"an infinite float":        {ladder.Message{Publishing: amqp.Publishing{Headers: amqp.Table{"f": float32(math.Inf(1))}}}, ladder.ErrInvalidMessage, "Inf"},
		"an instant before all":    {ladder.Message{At: time.Date(-5, 1, 1, 0, 0, 0, 0, time.UTC)}, ladder.ErrInvalidMessage, "year -5"},
		"another's user id":        {ladder.Message{Publishing: amqp.Publishing{UserId: "someone else"}}, ladder.ErrInvalidMessage, `UserId "someone else"`},
		"headers beyond a frame":   {ladder.Message{Publishing: amqp.Publishing{Headers: amqp.Table{"s": strings.Repeat("x", 131072)}}}, ladder.ErrInvalidMessage, "frame"},
		"a large body":             {ladder.Message{Publishing: amqp.Publishing{Body: make([]byte, 1001)}}, ladder.ErrMessageTooLarge, "1001 bytes, MaxMessageBytes is 1000"},
		"no destination":           {ladder.Message{Destination: "-"}, ladder.ErrInvalidDestination, "empty"},
		"a delay over the horizon": {ladder.Message{Delay: l.Horizon() + 1}, ladder.ErrDelayTooLong, l.Horizon().String()},
		"an instant over it":       {ladder.Message{At: time.Now().Add(time.Hour)}, ladder.ErrDelayTooLong, l.Horizon().String()},
		"a delay and an instant":   {ladder.Message{Delay: 1, At: time.Now()}, ladder.ErrInvalidMessage, "both"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if c.m.Destination == "" {
				c.m.Destination = "work"
			}
			c.m.Destination = strings.TrimPrefix(c.m.Destination, "-")
			err := p.PublishBatch(within(t), []ladder.Message{{Destination: "work"}, c.m, {Destination: "work"}})
			var batch *ladder.BatchError
			require.ErrorAs(t, err, &batch)
			require.Len(t, batch.Failed, 1)
			assert.Equal(t, 1, batch.Failed[0].Index)
			require.ErrorIs(t, err, c.want)
			require.ErrorIs(t, batch.Failed[0].Err, c.want)
			assert.ErrorContains(t, err, c.text)
			assert.True(t, ladder.SafeToRetry(err))
			assert.Equal(t, ladder.KindInvalid, ladder.KindOf(batch.Failed[0].Err))
			got.waitFor(t, 2)
		})
	}
}

func numbered(n int) amqp.Table {
	table := amqp.Table{}
	for i := range n {
		table[strconv.Itoa(i)] = nil
	}
	return table
}

// TestPublishManyHeaders shows that what is not refused can be read by a
// consumer, with what the broker has added.
func TestPublishManyHeaders(t *testing.T) {
	t.Parallel()
	l, url, got := declared(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, p.PublishDelayed(within(t), "work", l.Horizon(), amqp.Publishing{Headers: numbered(8176)}))
	require.NoError(t, p.PublishDelayed(within(t), "work", l.Horizon(), amqp.Publishing{Headers: amqp.Table{"a": make([]any, 8192), "t": numbered(8192)}}))
	got.waitFor(t, 2)
}

// doubling returns a small table with 2^30 leaves.
func doubling() amqp.Table {
	table := amqp.Table{}
	for range 30 {
		table = amqp.Table{"a": table, "b": table}
	}
	return table
}

func endless() amqp.Table {
	table := amqp.Table{}
	table["itself"] = table
	return table
}

// TestPublishDeepHeader shows that what is not refused can be read by a
// consumer: amqp091-go has a limit, and closes the connection beyond it.
func TestPublishDeepHeader(t *testing.T) {
	t.Parallel()
	l, url, got := declared(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	deep, depth := any("bottom"), 0
	for {
		next := []any{deep}
		if err := p.PublishDelayed(within(t), "work", 30*time.Millisecond, amqp.Publishing{Headers: amqp.Table{"deep": next}}); err != nil {
			require.ErrorIs(t, err, ladder.ErrInvalidMessage)
			break
		}
		deep = next
		depth++
	}
	assert.Equal(t, 32, depth)
	got.waitFor(t, depth)
}

func TestPublishAtZeroTime(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	err := p.PublishAt(within(t), "work", time.Time{}, amqp.Publishing{})
	require.ErrorIs(t, err, ladder.ErrInvalidMessage)
	assert.True(t, ladder.SafeToRetry(err))
}

func TestPublishOwnUserID(t *testing.T) {
	t.Parallel()
	l, target, got := declared(t)
	u, err := url.Parse(target)
	require.NoError(t, err)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{target}})
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{UserId: u.User.Username()}))
	assert.Equal(t, u.User.Username(), got.waitFor(t, 1)[0].UserId)
}

// TestPublishAgainWhatWasConsumed sends a message on as it came, with the x-death
// that the broker put into it: before 4.0 RabbitMQ drops it without stripping.
func TestPublishAgainWhatWasConsumed(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	ch := openChannel(t, url)
	require.NoError(t, l.Declare(within(t), ch))
	declareBound(t, ch, l, "work", "work")
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	deliveries, err := ch.Consume("work", "", true, false, false, false, nil)
	require.NoError(t, err)
	msg := amqp.Publishing{MessageId: "round", Headers: amqp.Table{"own": "header"}}
	for round := range 12 {
		require.NoError(t, p.PublishDelayed(within(t), "work", 30*time.Millisecond, msg))
		select {
		case d := <-deliveries:
			require.Contains(t, d.Headers, "x-death", "the broker's record is what this test is about")
			msg = amqp.Publishing{MessageId: d.MessageId, Headers: d.Headers}
		case <-time.After(patience):
			require.Fail(t, "lost", "in round %d", round)
		}
	}
	assert.Equal(t, "header", msg.Headers["own"])
}

func TestPublishConcurrently(t *testing.T) {
	t.Parallel()
	l, url, got := declared(t)
	for _, inFlight := range []int{1, 3, 1000} {
		p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}, MaxInFlight: inFlight})
		ctx := within(t)
		before := len(got.list())
		var publishing sync.WaitGroup
		for range 16 {
			publishing.Go(func() {
				for i := range 10 {
					assert.NoError(t, p.PublishDelayed(ctx, "work", time.Duration(i)*time.Millisecond, amqp.Publishing{}))
				}
			})
			publishing.Go(func() {
				assert.NoError(t, p.PublishBatch(ctx, make20(t)))
			})
		}
		publishing.Wait()
		list := got.waitFor(t, before+16*30)
		requireOnTime(t, list)
		assert.Len(t, list, before+16*30)
	}
}

func make20(t *testing.T) []ladder.Message {
	t.Helper()
	batch := make([]ladder.Message, 20)
	for i := range batch {
		batch[i] = ladder.Message{Destination: "work", Delay: time.Duration(i) * 7 * time.Millisecond}
	}
	return batch
}

func TestPublishBatchOfNone(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	assert.NoError(t, p.PublishBatch(within(t), nil))
}

func TestPublishWithEndedContext(t *testing.T) {
	t.Parallel()
	l, url, got := declared(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}})
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for range 200 {
		err := p.PublishDelayed(ended, "work", 0, amqp.Publishing{})
		require.ErrorIs(t, err, context.Canceled)
		require.True(t, ladder.SafeToRetry(err))
	}
	require.NoError(t, p.PublishDelayed(within(t), "work", 0, amqp.Publishing{MessageId: "the only one"}))
	assert.Len(t, got.waitFor(t, 1), 1)
}

// TestPublishCancelledAtRandom ends contexts while thousands of messages are on
// their way: what is reported as not sent must not arrive, and no slot may be lost.
func TestPublishCancelledAtRandom(t *testing.T) {
	t.Parallel()
	const messages, inFlight = 3000, 50
	l, url, got := declared(t)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}, MaxInFlight: inFlight})
	var mu sync.Mutex
	unsent, confirmed := map[string]bool{}, map[string]bool{}
	var publishing sync.WaitGroup
	for g := range 100 {
		publishing.Go(func() {
			for i := range messages / 100 {
				id := fmt.Sprintf("%d-%d", g, i)
				ctx, cancel := context.WithTimeout(t.Context(), rand.N(10*time.Millisecond))
				err := p.PublishDelayed(ctx, "work", 0, amqp.Publishing{MessageId: id})
				cancel()
				mu.Lock()
				if err == nil {
					confirmed[id] = true
				} else if ladder.SafeToRetry(err) {
					unsent[id] = true
				}
				mu.Unlock()
			}
		})
	}
	publishing.Wait()
	// A batch needs all slots at once.
	require.NoError(t, p.PublishBatch(within(t), make20(t)))
	for _, a := range got.waitFor(t, len(confirmed)+20) {
		assert.False(t, unsent[a.MessageId], "%s was said not to be sent", a.MessageId)
	}
	t.Logf("%d confirmed, %d not sent, %d unknown", len(confirmed), len(unsent), messages-len(confirmed)-len(unsent))
}

func TestPublisherClose(t *testing.T) {
	t.Parallel()
	l, url, got := declared(t)
	p, err := ladder.NewPublisher(within(t), l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, err)
	ctx := within(t)
	const callers = 50
	errs := make([]error, callers)
	var publishing sync.WaitGroup
	for i := range callers {
		publishing.Go(func() { errs[i] = p.PublishDelayed(ctx, "work", 0, amqp.Publishing{}) })
	}
	require.NoError(t, p.Close(ctx))
	publishing.Wait()
	confirmed := 0
	for _, err := range errs {
		if err == nil {
			confirmed++
			continue
		}
		require.ErrorIs(t, err, ladder.ErrClosed)
		assert.True(t, ladder.SafeToRetry(err), "Close waited for what was under way")
	}
	got.waitFor(t, confirmed)
	require.NoError(t, p.Close(ctx), "closing again")
	require.ErrorIs(t, p.PublishDelayed(ctx, "work", 0, amqp.Publishing{}), ladder.ErrClosed)
	require.ErrorIs(t, p.PublishBatch(ctx, make20(t)), ladder.ErrClosed)
}

func TestPublisherBindings(t *testing.T) {
	t.Parallel()
	l, url := small(t), brokertest.VHost(t)
	ch := openChannel(t, url)
	_, err := ch.QueueDeclare("work", true, false, false, false, nil)
	require.NoError(t, err)
	p := newPublisher(t, l, ladder.PublisherConfig{URLs: []string{url}, Bindings: []ladder.QueueBinding{{Queue: "work", Destinations: []string{"a", "b"}}}})
	require.NoError(t, p.PublishBatch(within(t), []ladder.Message{{Destination: "a"}, {Destination: "b"}}))
	waitForCount(t, url, "work", 2)

	_, err = ladder.NewPublisher(within(t), l, ladder.PublisherConfig{URLs: []string{url}, Bindings: []ladder.QueueBinding{{Queue: "none", Destinations: []string{"a"}}}})
	require.ErrorIs(t, err, ladder.ErrTopologyMissing)
}

func TestPublisherConfigRefuses(t *testing.T) {
	t.Parallel()
	l := small(t)
	const good = "amqp://localhost"
	for name, c := range map[string]struct {
		config ladder.PublisherConfig
		text   string
	}{
		"no URL":                   {ladder.PublisherConfig{}, "URLs"},
		"a malformed URL":          {ladder.PublisherConfig{URLs: []string{good, "amqp://user:se#cret@host"}}, "URLs[1]"},
		"another scheme":           {ladder.PublisherConfig{URLs: []string{"http://user:secret@host"}}, "URLs[0]"},
		"a negative MaxInFlight":   {ladder.PublisherConfig{URLs: []string{good}, MaxInFlight: -1}, "MaxInFlight -1"},
		"a huge MaxInFlight":       {ladder.PublisherConfig{URLs: []string{good}, MaxInFlight: 65536}, "MaxInFlight 65536"},
		"a negative Timeout":       {ladder.PublisherConfig{URLs: []string{good}, Timeout: -1}, "Timeout"},
		"a tiny ConfirmTimeout":    {ladder.PublisherConfig{URLs: []string{good}, ConfirmTimeout: 1}, "ConfirmTimeout"},
		"a negative size":          {ladder.PublisherConfig{URLs: []string{good}, MaxMessageBytes: -1}, "MaxMessageBytes -1"},
		"passive bindings":         {ladder.PublisherConfig{URLs: []string{good}, Passive: true, Bindings: []ladder.QueueBinding{{Queue: "q"}}}, "Bindings"},
		"a binding of a bad queue": {ladder.PublisherConfig{URLs: []string{good}, Bindings: []ladder.QueueBinding{{Queue: "a\r\nb"}}}, "control characters"},
		"a password with a slash":  {ladder.PublisherConfig{URLs: []string{"amqp://user:123/secret@host"}}, "URLs[0]"},
		"no heartbeat":             {ladder.PublisherConfig{URLs: []string{good + "?heartbeat=0"}}, "heartbeat"},
		"a binding of no queue":    {ladder.PublisherConfig{URLs: []string{good}, Bindings: []ladder.QueueBinding{{}}}, "Bindings[0].Queue"},
		"a bad destination":        {ladder.PublisherConfig{URLs: []string{good}, Bindings: []ladder.QueueBinding{{Queue: "q", Destinations: []string{"#"}}}}, "Bindings[0]"},
		"a short heartbeat":        {ladder.PublisherConfig{URLs: []string{good}, Connection: ladder.ConnectionConfig{Heartbeat: time.Millisecond}}, "Heartbeat"},
		"a negative dial timeout":  {ladder.PublisherConfig{URLs: []string{good}, Connection: ladder.ConnectionConfig{DialTimeout: -1}}, "DialTimeout"},
		"a negative write timeout": {ladder.PublisherConfig{URLs: []string{good}, Connection: ladder.ConnectionConfig{WriteTimeout: -1}}, "WriteTimeout"},
		"a negative setup timeout": {ladder.PublisherConfig{URLs: []string{good}, Connection: ladder.ConnectionConfig{SetupTimeout: -1}}, "SetupTimeout"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := ladder.NewPublisher(t.Context(), l, c.config)
			require.ErrorIs(t, err, ladder.ErrInvalidConfig)
			assert.ErrorContains(t, err, c.text)
			assert.NotContains(t, err.Error(), "cret")
		})
	}
}

func TestPublisherConnectErrors(t *testing.T) {
	t.Parallel()
	env := brokertest.For(t)
	l := small(t)

	t.Run("wrong password", func(t *testing.T) {
		t.Parallel()
		_, err := ladder.NewPublisher(within(t), l, ladder.PublisherConfig{URLs: []string{env.Broker.UserURL("nobody", "topsecret", env.VHost)}})
		require.ErrorIs(t, err, ladder.ErrAccessRefused)
		assert.NotContains(t, err.Error(), "topsecret")
	})
	t.Run("no such virtual host", func(t *testing.T) {
		t.Parallel()
		_, err := ladder.NewPublisher(within(t), l, ladder.PublisherConfig{URLs: []string{env.Broker.URL("no such host")}})
		require.ErrorIs(t, err, ladder.ErrAccessRefused)
	})
	t.Run("nobody listens", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		_, err := ladder.NewPublisher(ctx, l, ladder.PublisherConfig{URLs: []string{"amqp://guest:topsecret@127.0.0.1:1/"}})
		require.ErrorIs(t, err, ladder.ErrNotConnected)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.ErrorContains(t, err, "127.0.0.1:1")
		assert.NotContains(t, err.Error(), "topsecret")
	})
	t.Run("the second URL answers", func(t *testing.T) {
		t.Parallel()
		newPublisher(t, l, ladder.PublisherConfig{URLs: []string{"amqp://127.0.0.1:1/", env.URL, "amqp://127.0.0.1:1/"}})
	})
}

func TestSafeToRetry(t *testing.T) {
	t.Parallel()
	unsent := &ladder.PublishError{Err: ladder.ErrNotConnected}
	unknown := &ladder.PublishError{Err: ladder.ErrOutcomeUnknown, MaybeSent: true}
	batch := func(errs ...error) error {
		b := &ladder.BatchError{}
		for i, err := range errs {
			b.Failed = append(b.Failed, ladder.FailedMessage{Index: i, Err: err})
		}
		return b
	}
	assert.True(t, ladder.SafeToRetry(unsent))
	assert.True(t, ladder.SafeToRetry(fmt.Errorf("wrapped: %w", unsent)))
	assert.False(t, ladder.SafeToRetry(unknown))
	assert.True(t, ladder.SafeToRetry(batch(unsent, unsent)))
	assert.False(t, ladder.SafeToRetry(batch(unsent, unknown)))
	assert.False(t, ladder.SafeToRetry(nil))
	assert.False(t, ladder.SafeToRetry(errors.New("another")))
}
