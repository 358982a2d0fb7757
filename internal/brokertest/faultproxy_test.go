package brokertest

import (
	"bytes"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// echoProxy starts a proxy in front of a server that sends back what it gets.
func echoProxy(t *testing.T) *FaultProxy {
	t.Helper()
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				_, _ = io.Copy(conn, conn)
				_ = conn.Close()
			})
		}
	})
	p, err := NewFaultProxy(t.Context(), listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, p.Close())
		require.NoError(t, listener.Close())
		serving.Wait()
	})
	return p
}

func connect(t *testing.T, p *FaultProxy) *net.TCPConn {
	t.Helper()
	conn, err := net.Dial("tcp", p.Addr())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn.(*net.TCPConn)
}

// echo sends a text and returns what came back in time.
func echo(t *testing.T, conn net.Conn, text string, wait time.Duration) (string, error) {
	t.Helper()
	_, err := conn.Write([]byte(text))
	require.NoError(t, err)
	return receive(t, conn, len(text), wait)
}

func receive(t *testing.T, conn net.Conn, n int, wait time.Duration) (string, error) {
	t.Helper()
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(wait)))
	buf := make([]byte, n)
	n, err := io.ReadFull(conn, buf)
	return string(buf[:n]), err
}

// requireRefused makes a connection that must come to nothing, at once or right afterwards.
func requireRefused(t *testing.T, p *FaultProxy) {
	t.Helper()
	conn, err := net.Dial("tcp", p.Addr())
	if err == nil {
		_, err = receive(t, conn, 1, soon)
		require.NoError(t, conn.Close())
	}
	require.Error(t, err)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
}

const (
	soon  = 5 * time.Second        // for what must happen
	never = 100 * time.Millisecond // for what must not
)

func TestFaultProxyPasses(t *testing.T) {
	t.Parallel()
	p := echoProxy(t)
	conn := connect(t, p)
	big := string(bytes.Repeat([]byte("0123456789"), 100_000))
	sent := make(chan error, 1)
	go func() {
		_, err := conn.Write([]byte(big))
		sent <- err
	}()
	got, err := receive(t, conn, len(big), soon)
	require.NoError(t, err)
	require.NoError(t, <-sent)
	require.Equal(t, big, got)
	require.Equal(t, 1, p.Connections())

	require.NoError(t, conn.CloseWrite())
	_, err = conn.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF, "the end goes through in order")
	require.Eventually(t, func() bool { return p.Connections() == 0 }, soon, time.Millisecond)
}

func TestFaultProxyCut(t *testing.T) {
	t.Parallel()
	p := echoProxy(t)
	conn := connect(t, p)
	_, err := echo(t, conn, "hello", soon)
	require.NoError(t, err)
	p.Cut()
	_, err = receive(t, conn, 1, soon)
	require.ErrorIs(t, err, syscall.ECONNRESET)
	_, err = echo(t, connect(t, p), "again", soon)
	require.NoError(t, err)
}

func TestFaultProxyStall(t *testing.T) {
	t.Parallel()
	for name, stall := range map[string]func(*FaultProxy){
		"upstream":   func(p *FaultProxy) { p.Stall(Upstream) },
		"downstream": func(p *FaultProxy) { p.Stall(Downstream) },
		"both":       (*FaultProxy).StallBoth,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := echoProxy(t)
			conn := connect(t, p)
			stall(p)
			got, err := echo(t, conn, "hello", never)
			require.ErrorIs(t, err, os.ErrDeadlineExceeded)
			require.Empty(t, got)
			p.Pass()
			got, err = receive(t, conn, 5, soon)
			require.NoError(t, err)
			require.Equal(t, "hello", got)
		})
	}
}

func TestFaultProxyStalledWriterBlocks(t *testing.T) {
	t.Parallel()
	p := echoProxy(t)
	conn := connect(t, p)
	p.Stall(Upstream)
	require.NoError(t, conn.SetWriteDeadline(time.Now().Add(time.Second)))
	chunk := make([]byte, 1<<20)
	var err error
	for range 100 { // more than all buffers in between hold
		if _, err = conn.Write(chunk); err != nil {
			break
		}
	}
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
}

func TestFaultProxyDiscard(t *testing.T) {
	t.Parallel()
	p := echoProxy(t)
	conn := connect(t, p)
	p.Discard(Upstream, 3)
	got, err := echo(t, conn, "hello", never)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.Equal(t, "hel", got)
	_, err = echo(t, conn, "more", never)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	p.Pass()
	got, err = echo(t, conn, "hello", soon)
	require.NoError(t, err)
	require.Equal(t, "hello", got, "what was discarded is gone")
}

func TestFaultProxySlow(t *testing.T) {
	t.Parallel()
	p := echoProxy(t)
	conn := connect(t, p)
	p.Slow(Downstream, 100)
	start := time.Now()
	got, err := echo(t, conn, string(make([]byte, 30)), soon)
	require.NoError(t, err)
	require.Len(t, got, 30)
	require.GreaterOrEqual(t, time.Since(start), 200*time.Millisecond)
}

func TestFaultProxyRefuse(t *testing.T) {
	t.Parallel()
	p := echoProxy(t)
	old := connect(t, p)
	_, err := echo(t, old, "hello", soon)
	require.NoError(t, err)
	p.Refuse()
	requireRefused(t, p)
	_, err = echo(t, old, "hello", soon)
	require.NoError(t, err)
}

func TestFaultProxyCloseWhileStalled(t *testing.T) {
	t.Parallel()
	p := echoProxy(t)
	conn := connect(t, p)
	p.StallBoth()
	_, err := conn.Write([]byte("hello"))
	require.NoError(t, err)
	require.NoError(t, p.Close())
	require.NoError(t, p.Close())
	_, err = receive(t, conn, 1, soon)
	require.Error(t, err)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	_, err = net.Dial("tcp", p.Addr())
	require.Error(t, err)
}

func TestFaultProxyWithoutTarget(t *testing.T) {
	t.Parallel()
	ports, err := freePorts(t.Context(), 1)
	require.NoError(t, err)
	p, err := NewFaultProxy(t.Context(), loopback(ports[0]))
	require.NoError(t, err)
	requireRefused(t, p)
	require.NoError(t, p.Close())
}

func TestFaultProxyInFrontOfABroker(t *testing.T) {
	t.Parallel()
	target := VHost(t)
	b := For(t).Broker
	p, err := NewFaultProxy(t.Context(), b.amqp.Host)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	through, err := p.URL(target)
	require.NoError(t, err)
	roundTrip(t, through)
	_, err = p.URL("amqp://guest:secret@[")
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
}
