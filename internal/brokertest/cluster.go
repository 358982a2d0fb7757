package brokertest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"
)

// startNodes starts n nodes with add, which starts the node of a number, and returns when all are ready and know each
// other. The first goes ahead, since nobody could join it before it is ready; the others start together.
func startNodes(ctx context.Context, n int, add func(ctx context.Context, number int) (*Broker, error)) ([]*Broker, error) {
	brokers := make([]*Broker, n)
	errs := make([]error, n)
	start := func(i int) {
		if brokers[i], errs[i] = add(ctx, i+1); errs[i] == nil {
			errs[i] = brokers[i].waitReady(ctx)
		}
	}
	start(0)
	if errs[0] == nil {
		var wg sync.WaitGroup
		for i := 1; i < n; i++ {
			wg.Go(func() { start(i) })
		}
		wg.Wait()
	}
	err := errors.Join(errs...)
	if err == nil {
		err = brokers[0].waitForNodes(ctx, n)
	}
	if err != nil {
		for _, b := range brokers {
			if b != nil {
				err = errors.Join(err, b.Close()) //nolint:contextcheck // closing has a time limit of its own, ctx may have ended
			}
		}
		return nil, err
	}
	return brokers, nil
}

// waitForNodes waits until the node sees so many running nodes, itself included.
func (b *Broker) waitForNodes(ctx context.Context, want int) error {
	for {
		got, err := b.runningNodes(ctx)
		if err == nil && got == want {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("brokertest: %s sees %d running nodes instead of %d: %w", b, got, want, errors.Join(context.Cause(ctx), err))
		case <-time.After(pollInterval):
		}
	}
}

// runningNodes is how many running nodes of its cluster the node sees, itself included.
func (b *Broker) runningNodes(ctx context.Context) (int, error) {
	var nodes []struct {
		Running bool `json:"running"`
	}
	if err := b.manage(ctx, http.MethodGet, "/api/nodes", nil, &nodes); err != nil {
		return 0, err
	}
	running := 0
	for _, node := range nodes {
		if node.Running {
			running++
		}
	}
	return running, nil
}
