// Package laddertest tests handlers and publishing code of package ladder without a
// broker, on a virtual clock: a week of retries takes milliseconds, and every
// instant in it is exact.
//
// [Run] runs a test in a bubble of testing/synctest. In it time.Now, time.Sleep,
// timers and the deadlines of contexts are virtual, in the code under test as in the
// library. The [Broker] stands in for RabbitMQ. What goes through it is the
// production code: the validation, headers and encoding of a [ladder.Publisher], and the
// timeout, panic, retry and failure handling of a [ladder.Consumer]. A delivery looks
// as one of RabbitMQ's does, x-death header, header types and all.
//
//	func TestReminder(t *testing.T) {
//		l, err := ladder.New(ladder.Config{})
//		if err != nil {
//			t.Fatal(err)
//		}
//		laddertest.Run(t, l, func(t *testing.T, b *laddertest.Broker) {
//			mailer := &fakeMailer{failures: 2}
//			b.Consume(ladder.ConsumerConfig{
//				Queue:        "reminders",
//				Destinations: []string{"reminder.due"},
//				Retry:        ladder.FixedSteps{time.Minute, time.Hour},
//			}, newReminderHandler(mailer))
//
//			start := time.Now()
//			err := b.Publisher().PublishDelayed(t.Context(), "reminder.due", 7*24*time.Hour, amqp.Publishing{Body: []byte("dentist")})
//			if err != nil {
//				t.Fatal(err)
//			}
//			b.Drain()
//
//			// It failed twice, so it was sent after a week, a minute and an hour.
//			if want := start.Add(7*24*time.Hour + time.Minute + time.Hour); !mailer.sentAt.Equal(want) {
//				t.Errorf("sent at %v, want %v", mailer.sentAt, want)
//			}
//			if failed := b.Failed("reminders"); len(failed) > 0 {
//				t.Errorf("failed: %v", failed[0].Failure)
//			}
//		})
//	}
//
// # What happens when
//
// Nothing is delivered by itself: [Broker.Drain] delivers until nothing waits any
// more, and [Broker.Advance] what falls due within a time. Messages come in the order in
// which they fall due, and those of the same instant in that of their publishing;
// RabbitMQ promises no order. Handlers are called one at a time in the goroutine of
// the test, whatever ConsumerConfig.Concurrency says, so that t.FailNow and what is built on
// it work in a handler. A handler that sleeps moves the clock, and what fell due
// meanwhile comes late, with its Delivery.Lateness.
//
// A message is due as with a broker: at the instant of its publishing plus its delay in
// whole units of the ladder, rounded up. Broker and network take no time. Jitter in a
// retry policy is random here as well: a test that asks for exact instants sets
// ExponentialBackoff.Jitter to -1.
//
// # What it is not
//
// It has no connections: Connection and URLs in configurations are ignored, and nothing of
// what a broker refuses, blocks or loses happens, but for [Broker.LoseAcks]. Topology
// is not declared, and channels of amqp091-go are not there, so [ladder.Publisher.ReplayFailed]
// cannot be called. Test those against a real broker.
//
// The rules of testing/synctest hold: goroutines that the code under test starts must end
// before the test does, t.Run and t.Parallel cannot be called in the function that Run
// runs (call t.Parallel before Run), and a goroutine that waits for the network keeps
// the clock from moving.
package laddertest
