// Package ladder delivers RabbitMQ messages after a delay of any length.
//
// # The idea
//
// A delay is data, not topology. A ladder of L levels has one queue for each
// power of two: queue k holds a message for 2^k units. A delay of n units is
// written as L bits at the front of the routing key, the highest first, and
// the broker walks the message through exactly the queues whose bit is 1. With
// six levels, 42 units to the destination email.delivery are
//
//	1.0.1.0.1.0.email.delivery
//	32 + 8 + 2
//
// The message is published to the exchange of its highest 1 bit, level-05,
// whose binding takes it to queue level-05. When its 32 units are over, the
// broker dead-letters it, under the same key, to the exchange below, which
// looks at the bits from level 4 down and finds queue level-03. After 8 units
// more it goes to queue level-01, and after 2 more to the delivery exchange,
// where the destination's queues are bound. All of this is declared once. The
// number of queues, exchanges and bindings depends on L alone: not on the
// number of messages, destinations or different delays.
//
// Some words have one meaning everywhere in this package. The unit is the
// resolution. Units are a delay in them, rounded up. A hop is one wait in one
// queue, so a message has as many hops as its units have 1 bits. The horizon
// is the longest delay, (2^L - 1) units. A destination is what follows the
// bits in the key. The delivery exchange is the last one. The parking queue is
// where messages end that no binding wanted. Not before is the instant a
// message is due, and lateness is what it arrives after that.
//
// # The types
//
// A [Ladder] is a value that knows the arithmetic and the names. [New] makes
// one from a [Config]; it talks to no broker. [Ladder.Route] turns a delay and
// a destination into a [Route], [Ladder.ParseKey] is the inverse, and
// [Ladder.Waits] walks a delay level by level. [Ladder.Topology] lists all
// objects of the ladder as data, and [Ladder.Declare], [Ladder.Verify],
// [Ladder.Bind], [Ladder.Unbind] and [Ladder.Remove] work on them over a
// channel of yours.
//
// A [Publisher] sends messages: [Publisher.PublishDelayed],
// [Publisher.PublishAt] and [Publisher.PublishBatch] return nil when the
// broker has confirmed. It keeps a connection, makes a new one when that is
// lost, and sends again what was not confirmed, with what is left of the
// delay. An error is a [*PublishError], which says what is known, and
// [SafeToRetry] tells whether the broker can have the message.
//
// A [Consumer] declares a queue, binds it to destinations and runs a [Handler]
// for each message, which sees a [Delivery]. What the handler returns decides what
// becomes of the message: nil acknowledges it. After an error it waits in the
// ladder for its next attempt, for this queue alone, as a [RetryPolicy] says;
// [RetryAfter] waits without counting an attempt. What has no attempt left, or
// failed with [Permanent], goes to a failed queue, and [Publisher.ReplayFailed] sends
// it back. A [Middleware] wraps handlers; [Deduplicate] is one. Programs with a
// consumer of their own need [Ladder.Bind] and [Ladder.ParseDelivery] and
// nothing else.
//
// An [Observer] is told what a publisher or a consumer does, for metrics. Package
// laddertest runs handlers without a broker, on a virtual clock.
//
// # What to know
//
// A message is never delivered before its instant, by the broker's clock and
// to the millisecond. Rounding up to whole units makes it late by less than
// one unit. Slack, where it is wanted, makes it late by up to a given part of the
// delay (Config.Slack) or time ([WithSlack]) and saves hops: 1 % turns ten hops
// into four on average. With the default queue type, [Quorum], it is delivered at least
// once: it can come twice, with the same MessageId. Messages come in no
// particular order. With [Classic] queues the broker passes messages from
// level to level at most once.
//
// A message for a destination that no queue is bound to when it falls due goes
// to the parking queue and stays there. So bind destinations, or start their
// consumers, before the first message is due.
//
// A delay beyond the horizon is a [*DelayTooLongError]; no delay is ever cut.
// The names of the objects carry name, levels and unit, so a ladder of another
// shape is another ladder. [LevelsFor] computes the levels for a horizon.
//
// The level queues must keep their arguments: a policy with a message TTL, an
// expiry, a length limit or an overflow behaviour that matches them makes
// messages early, or deletes them.
//
// The library needs RabbitMQ 3.10 or later, and no plugin.
package ladder
