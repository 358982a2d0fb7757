package ladder

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	amqp "github.com/rabbitmq/amqp091-go"
)

// This file is about messages that were received and are sent on: for another
// attempt, to the failed queue, and back from there.

const (
	retryPrefix       = "ladder-retry."
	hashedRetryPrefix = "ladder-retry-sha256."
)

// RetryDestination returns the destination that leads to one queue alone: a message that
// waits for another attempt goes there, so that of several queues which had got
// it no other sees it again. A [Consumer] binds its queue to it; bind it yourself for one
// that is passive.
//
// It is "ladder-retry." and the queue's name where that is a valid destination, and
// otherwise "ladder-retry-sha256." and the name's SHA-256 in hexadecimal: a name can have 255
// bytes, and words that are wildcards.
func (l *Ladder) RetryDestination(queue string) string {
	if destination := retryPrefix + queue; l.checkDestination(destination) == nil {
		return destination
	}
	hash := sha256.Sum256([]byte(queue))
	return hashedRetryPrefix + hex.EncodeToString(hash[:])
}

// FailedQueue returns the name of the queue for the failed messages of a queue, unless a
// consumer is told another one: the queue's name and ".failed".
func FailedQueue(queue string) string { return queue + ".failed" }

// maxReason keeps a failure's reason from being what makes the headers too large.
const maxReason = 1 << 10

// failureHeaders returns the ladder's headers of a message after another failed
// attempt.
func failureHeaders(d *Delivery, reason string, now time.Time) amqp.Table {
	first := now
	if d.Failure != nil && !d.Failure.First.IsZero() {
		first = d.Failure.First
	}
	return amqp.Table{
		HeaderDestination:   d.Destination,
		HeaderFailureReason: cut(reason, maxReason),
		HeaderFailureQueue:  d.Queue,
		HeaderFailureFirst:  first.UnixMilli(),
		HeaderFailureLast:   now.UnixMilli(),
	}
}

// keptHeaders returns the ladder's headers of a message that is sent on although
// no attempt has failed.
func keptHeaders(d *Delivery) amqp.Table {
	headers := amqp.Table{HeaderDestination: d.Destination}
	for _, key := range []string{HeaderFailureReason, HeaderFailureQueue, HeaderFailureFirst, HeaderFailureLast} {
		if value, ok := d.Headers[key]; ok {
			headers[key] = value
		}
	}
	return headers
}

// cut returns at most n bytes of valid UTF-8: a header with other bytes is legal, and many
// programs cannot show it.
func cut(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// publishingOf returns a received message as it is sent on. It leaves away what
// was meant for the way that the message came: Expiration, and the keys in CC,
// which would be routed again.
func publishingOf(d *Delivery) amqp.Publishing {
	headers := make(amqp.Table, len(d.Headers))
	for key, value := range d.Headers {
		if key != "CC" && key != "BCC" {
			headers[key] = value
		}
	}
	return amqp.Publishing{
		Headers:         headers,
		ContentType:     d.ContentType,
		ContentEncoding: d.ContentEncoding,
		Priority:        d.Priority,
		CorrelationId:   d.CorrelationId,
		ReplyTo:         d.ReplyTo,
		MessageId:       d.MessageId,
		Timestamp:       d.Timestamp,
		Type:            d.Type,
		UserId:          d.UserId,
		AppId:           d.AppId,
		Body:            d.Body,
	}
}

// retry prepares a message for another attempt.
func (p *Publisher) retry(ctx context.Context, d *Delivery, attempt int, headers amqp.Table, delay time.Duration) *outgoing {
	now := time.Now()
	out := &outgoing{
		called: now, notBefore: now.Add(delay), slack: p.ladder.slack(delay),
		destination: p.ladder.RetryDestination(d.Queue), resent: true,
	}
	headers[HeaderNotBefore] = out.notBefore.UnixMilli()
	headers[HeaderAttempt] = int64(attempt)
	p.fill(ctx, out, publishingOf(d), headers)
	return out
}

// forward prepares a message to go into a queue without the ladder.
func (p *Publisher) forward(ctx context.Context, d *Delivery, queue string, headers amqp.Table) *outgoing {
	out := &outgoing{called: time.Now(), destination: queue, queue: queue, resent: true}
	p.fill(ctx, out, publishingOf(d), headers)
	return out
}

// deliverInMemory is deliver without a broker.
func (p *Publisher) deliverInMemory(ctx context.Context, outs []*outgoing) {
	for _, out := range outs {
		if out.done {
			continue
		}
		if err := ctx.Err(); err != nil {
			p.finish(ctx, out, err)
			continue
		}
		route, err := p.ladder.routeOf(out)
		if err == nil {
			out.attempts, out.units = 1, route.Units
			err = p.inMemory(route.Exchange, route.Key, out.msg)
		}
		p.finish(ctx, out, err)
	}
}

// replayBatch is how many messages are read before they are published and
// acknowledged.
const replayBatch = 100

// ReplayFailed sends the messages of a failed queue back to the queues that they failed
// in, for a first attempt again, and returns how many. It takes those that are there when it
// begins and for which accept returns true, or all if accept is nil; the others stay. What accept
// changes in a delivery is not sent, and it cannot settle it. ReplayFailed reads with ch, which must be open and
// used by nobody else. Close ch after any error but a [*BatchError]: it may hold a message
// that was being read.
//
// Each message is published and confirmed before it is acknowledged. If ReplayFailed is
// interrupted none is lost, and those that were published and not yet acknowledged are
// there twice, with the same MessageId.
//
// A message goes back by the default exchange, so the publisher's user needs write permission for
// amq.default. One that cannot be published stays in the failed queue: its queue does not exist
// any more ([ErrUnroutable]), or neither a consumer of a ladder has put it there nor a queue that
// dead-letters to the failed queue ([ErrInvalidMessage]). The ladder's own queues are no such queue: of
// the messages in its parking queue only retries can be sent back like this. The errors of all of them are
// in a [*BatchError], whose indexes count the messages in the order of the queue.
func (p *Publisher) ReplayFailed(ctx context.Context, ch *amqp.Channel, failedQueue string, accept func(*Delivery) bool) (int, error) {
	if ch == nil {
		return 0, errNoChannel
	}
	if err := checkQueueName("failed queue", failedQueue); err != nil {
		return 0, err
	}
	r := &replay{publisher: p, channel: ch, queue: failedQueue, accept: accept}
	// Those that stay can go back at the end: before, they would have been read again. Deferred,
	// because accept can panic.
	defer func() {
		for _, d := range r.kept {
			_ = d.Nack(false, true)
		}
	}()
	err := r.run(ctx)
	if err == nil && r.replayed > 0 {
		err = r.linger(ctx)
	}
	for err == nil && len(r.kept) > 0 {
		err = r.kept[0].Nack(false, true)
		r.kept = r.kept[1:]
	}
	if err != nil {
		return r.replayed, fmt.Errorf("ladder: replay %s: %w", failedQueue, brokerError(err))
	}
	if len(r.failed) > 0 {
		return r.replayed, &BatchError{Failed: r.failed}
	}
	return r.replayed, nil
}

type replay struct {
	publisher *Publisher
	channel   *amqp.Channel
	queue     string
	accept    func(*Delivery) bool

	read     int
	replayed int
	kept     []amqp.Delivery // neither acknowledged nor given back, without their bodies
	failed   []FailedMessage
}

func (r *replay) run(ctx context.Context) error {
	left := 1
	for left > 0 {
		var batch []amqp.Delivery
		for left > 0 && len(batch) < replayBatch {
			d, found, err := r.get(ctx)
			if err != nil {
				r.kept = append(r.kept, batch...)
				return err
			}
			if !found {
				left = 0
				break
			}
			if r.read == 0 {
				left = 1 + int(d.MessageCount)
			}
			left--
			r.read++
			batch = append(batch, d)
		}
		if err := r.move(ctx, batch); err != nil {
			return err
		}
	}
	return nil
}

// linger is as Consumer.linger: the caller may close the channel next.
func (r *replay) linger(ctx context.Context) error {
	// The answer comes once the broker has read all that was written before.
	if err := await(ctx, func() error { return r.channel.Flow(true) }); err != nil {
		return err
	}
	select {
	case <-time.After(lingering):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (r *replay) get(ctx context.Context) (amqp.Delivery, bool, error) {
	var d amqp.Delivery
	var found bool
	if err := await(ctx, func() (err error) {
		d, found, err = r.channel.Get(r.queue, false)
		return err
	}); err != nil {
		return amqp.Delivery{}, false, err // the call may still be at work on d
	}
	return d, found, nil
}

// move publishes messages and acknowledges those that were confirmed.
func (r *replay) move(ctx context.Context, batch []amqp.Delivery) error {
	outs := make([]*outgoing, len(batch))
	settled := 0
	defer func() {
		for _, raw := range batch[settled:] {
			raw.Body, raw.Headers = nil, nil
			r.kept = append(r.kept, raw)
		}
	}()
	var going []*outgoing
	for i, raw := range batch {
		if r.accept != nil {
			shown := r.publisher.ladder.ParseDelivery(raw)
			shown.detach()
			if !r.accept(shown) {
				continue
			}
		}
		d := r.publisher.ladder.ParseDelivery(raw)
		queue, err := r.publisher.ladder.originOf(d, raw.Headers)
		if err != nil {
			r.fail(i, len(batch), fmt.Errorf("%w: message %s: %w", ErrInvalidMessage, d.MessageId, err))
			continue
		}
		outs[i] = r.publisher.forward(ctx, d, queue, amqp.Table{
			HeaderDestination: d.Destination,
			HeaderNotBefore:   time.Now().UnixMilli(),
		})
		going = append(going, outs[i])
	}
	r.publisher.deliver(ctx, going)
	for i, raw := range batch {
		settled = i + 1
		switch {
		case outs[i] != nil && outs[i].err == nil:
			if err := raw.Ack(false); err != nil {
				return err
			}
			r.replayed++
			continue
		case outs[i] != nil:
			r.fail(i, len(batch), outs[i].err)
		}
		raw.Body, raw.Headers = nil, nil
		r.kept = append(r.kept, raw)
	}
	return nil
}

// originOf returns the queue that a message in a failed queue came from: one whose
// consumer put it there, or one that dead-lettered it, as over a delivery limit.
func (l *Ladder) originOf(d *Delivery, headers amqp.Table) (string, error) {
	if d.Failure != nil {
		if checkQueueName("", d.Failure.Queue) != nil {
			return "", fmt.Errorf("its header %s is no name of a queue: %.40q", HeaderFailureQueue, d.Failure.Queue)
		}
		return d.Failure.Queue, nil
	}
	for _, death := range deaths(headers) {
		if queue, ok := death["queue"].(string); ok && !l.owns(queue) && checkQueueName("", queue) == nil {
			return queue, nil
		}
	}
	return "", fmt.Errorf("it has no header %s, and no x-death of a queue other than the ladder's", HeaderFailureQueue)
}

// fail notes what kept a message of the last batch from being published.
func (r *replay) fail(i, size int, err error) {
	r.failed = append(r.failed, FailedMessage{Index: r.read - size + i, Err: err})
}
