package brokertest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
)

// Ports of brokers are taken from below the range that kernels give to outgoing connections (32768 and up on Linux,
// 49152 elsewhere). So no client's connection can take the port of a broker while the broker is down.
const (
	firstPort = 20000
	lastPort  = 32000
)

// freePorts finds n ports of 127.0.0.1 that nobody listens on. Another process may take one before it is used; random
// choice makes that rare.
func freePorts(ctx context.Context, n int) ([]int, error) {
	var ports []int
	for range 1000 {
		if len(ports) == n {
			return ports, nil
		}
		port := firstPort + rand.IntN(lastPort-firstPort)
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp4", loopback(port))
		if err != nil || listener.Close() != nil || slices.Contains(ports, port) {
			continue
		}
		ports = append(ports, port)
	}
	return nil, fmt.Errorf("brokertest: found no %d free ports between %d and %d", n, firstPort, lastPort)
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
