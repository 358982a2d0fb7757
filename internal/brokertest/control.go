package brokertest

import "context"

// Kill ends the node at once, as a crash would (SIGKILL), and returns when it is gone.
//
// RabbitMQ saves the name of a new quorum queue about half a second after it confirmed the declaration. A queue that was
// declared right before Kill stays without a leader for ever; declare it earlier, or Stop and Start in between.
func (b *Broker) Kill(ctx context.Context) error {
	if b.node == nil {
		return errGiven
	}
	return b.node.kill(ctx)
}

// Stop shuts the node down in order and returns when it is gone.
func (b *Broker) Stop(ctx context.Context) error {
	if b.node == nil {
		return errGiven
	}
	return b.node.stop(ctx)
}

// Start starts a stopped or killed node again, with the data and the ports it had, and returns when it is ready.
func (b *Broker) Start(ctx context.Context) error {
	if b.node == nil {
		return errGiven
	}
	if err := b.node.start(ctx); err != nil {
		return err
	}
	return b.waitReady(ctx)
}

// Pause freezes the node: it keeps its connections and answers nothing, until Resume.
func (b *Broker) Pause(ctx context.Context) error {
	if b.node == nil {
		return errGiven
	}
	return b.node.pause(ctx)
}

// Resume lets a paused node go on.
func (b *Broker) Resume(ctx context.Context) error {
	if b.node == nil {
		return errGiven
	}
	return b.node.resume(ctx)
}

// Ctl runs rabbitmqctl against the node and returns what it printed. It takes one to three seconds: rabbitmqctl starts
// an Erlang of its own.
func (b *Broker) Ctl(ctx context.Context, args ...string) (string, error) {
	if b.node == nil {
		return "", errGiven
	}
	return b.node.ctl(ctx, args...)
}

// Disconnect cuts the node off from the other nodes of its cluster, until Reconnect. Clients still reach it.
//
// In Docker packets between the nodes are lost, so both sides notice after net_ticktime, which is set to some seconds.
// Local nodes close their connections to each other, and notice at once.
func (b *Broker) Disconnect(ctx context.Context) error {
	if b.node == nil {
		return errGiven
	}
	return b.node.disconnect(ctx)
}

// Reconnect lets a disconnected node and its peers reach each other again.
func (b *Broker) Reconnect(ctx context.Context) error {
	if b.node == nil {
		return errGiven
	}
	return b.node.reconnect(ctx)
}
