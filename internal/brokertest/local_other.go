//go:build !unix

package brokertest

import (
	"context"
	"fmt"
	"syscall"
)

// startLocal needs process groups.
func startLocal(context.Context, int) ([]*Broker, error) {
	return nil, fmt.Errorf("local: a private rabbitmq-server is %w on this operating system", errUnavailable)
}

func ownGroup() *syscall.SysProcAttr { return nil }
