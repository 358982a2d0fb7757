// Package seam is where package laddertest gets at the parts of package ladder that it runs without a broker. Package
// ladder fills it in: it cannot be imported from here, so the values have the types that the comments tell.
package seam

var (
	// NewPublisher makes a publisher that hands each message to a function in place of a broker.
	//
	//	func(*ladder.Ladder, ladder.PublisherConfig, func(exchange, key string, msg amqp.Publishing) error) (*ladder.Publisher, error)
	NewPublisher any

	// NewWorker makes a function that handles one message as a consumer does. The last argument settles a message in
	// place of a broker, by the outcome: it goes back into its queue if that is OutcomeReturned or OutcomeLost, and
	// is gone from it otherwise. Its error says that the settlement did not get through. The ladder.ConsumerConfig
	// that is returned has the defaults filled in.
	//
	//	func(*ladder.Ladder, ladder.ConsumerConfig, ladder.Handler, *ladder.Publisher, func(ladder.Outcome) error) (func(context.Context, amqp.Delivery), ladder.ConsumerConfig, error)
	NewWorker any
)
