package brokertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"sync"
	"time"
)

// Direction is a way through a [FaultProxy].
type Direction int

// The directions of a FaultProxy, as seen by the client.
const (
	Upstream   Direction = iota // from the client to the broker
	Downstream                  // from the broker to the client
)

// FaultProxy is a TCP proxy on 127.0.0.1 that misbehaves on demand, as networks do. What is set applies to connections
// that exist and to those that come.
type FaultProxy struct {
	target   string
	listener *net.TCPListener
	cancel   context.CancelFunc // ends dials that are under way
	running  sync.WaitGroup

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at each change of what follows
	closed  bool
	refuse  bool
	links   map[*link]struct{}
	ways    [2]way
}

// way is how one direction behaves.
type way struct {
	stalled bool
	rate    int // bytes per second; 0 is no limit
	// After so many more bytes the rest is taken and thrown away; negative is never.
	discardAfter int
}

// link is one connection through the proxy.
type link struct {
	client, server *net.TCPConn
	gone           chan struct{} // closed by reset
	once           sync.Once
}

const (
	proxyDialTimeout = 5 * time.Second
	// slowSteps is how many pieces a second's worth of bytes is sent in when there is a rate.
	slowSteps = 20
)

// NewFaultProxy starts a proxy in front of an address (host:port) that passes everything. It runs until Close.
func NewFaultProxy(ctx context.Context, target string) (*FaultProxy, error) {
	listener, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, fmt.Errorf("brokertest: fault proxy: %w", err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p := &FaultProxy{
		target:   target,
		listener: listener,
		cancel:   cancel,
		changed:  make(chan struct{}),
		links:    make(map[*link]struct{}),
	}
	p.Pass()
	p.running.Go(func() { p.accept(ctx) })
	return p, nil
}

// Addr is the address that clients connect to.
func (p *FaultProxy) Addr() string { return p.listener.Addr().String() }

// URL puts the proxy's address into a URL of what it is in front of.
func (p *FaultProxy) URL(target string) (string, error) {
	u, err := url.Parse(target)
	if err != nil {
		return "", errors.New("brokertest: fault proxy: the target is not a URL") // the parser's error would show the password
	}
	u.Host = p.Addr()
	return u.String(), nil
}

// Pass ends every fault. What a stall held back goes on its way.
func (p *FaultProxy) Pass() {
	p.change(func() {
		p.refuse = false
		p.ways = [2]way{{discardAfter: -1}, {discardAfter: -1}}
	})
}

// Cut resets all connections (RST, where the system does as asked). New ones are accepted.
func (p *FaultProxy) Cut() {
	p.change(func() {
		for l := range p.links {
			l.reset()
		}
	})
}

// Refuse resets new connections right after they are made, and leaves those that exist alone.
func (p *FaultProxy) Refuse() { p.change(func() { p.refuse = true }) }

// Stall stops passing bytes one way: the sender fills the buffers in between and then blocks.
func (p *FaultProxy) Stall(d Direction) { p.change(func() { p.ways[d].stalled = true }) }

// StallBoth stops passing bytes in both directions, as a host that vanished does.
func (p *FaultProxy) StallBoth() {
	p.change(func() { p.ways[Upstream].stalled, p.ways[Downstream].stalled = true, true })
}

// Discard passes n more bytes one way, over all connections, and then accepts and drops what is sent.
func (p *FaultProxy) Discard(d Direction, n int) { p.change(func() { p.ways[d].discardAfter = n }) }

// Slow limits each connection to so many bytes per second one way.
func (p *FaultProxy) Slow(d Direction, bytesPerSecond int) {
	p.change(func() { p.ways[d].rate = max(bytesPerSecond, 1) })
}

// Connections is how many connections are open through the proxy.
func (p *FaultProxy) Connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

// Close ends the proxy and all connections through it, and waits for its goroutines.
func (p *FaultProxy) Close() error {
	p.change(func() {
		p.closed = true
		for l := range p.links {
			l.reset()
		}
	})
	p.cancel()
	err := p.listener.Close()
	p.running.Wait()
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("brokertest: fault proxy: %w", err)
	}
	return nil
}

// change changes the state and wakes up whoever waits for a change.
func (p *FaultProxy) change(do func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	do()
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *FaultProxy) accept(ctx context.Context) {
	for {
		conn, err := p.listener.AcceptTCP()
		if err != nil {
			return // Close was called
		}
		p.running.Go(func() { p.serve(ctx, &link{client: conn, gone: make(chan struct{})}) })
	}
}

// serve connects a client to the target and passes bytes until both sides have ended.
func (p *FaultProxy) serve(ctx context.Context, l *link) {
	defer l.reset()
	if !p.accepts() {
		return
	}
	server, err := (&net.Dialer{Timeout: proxyDialTimeout}).DialContext(ctx, "tcp", p.target)
	if err != nil {
		return
	}
	l.server, _ = server.(*net.TCPConn) // what dialing tcp gives
	if !p.register(l) {
		return
	}
	var both sync.WaitGroup
	both.Go(func() { p.pass(l, Upstream, l.client, l.server) })
	both.Go(func() { p.pass(l, Downstream, l.server, l.client) })
	both.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.links, l)
}

func (p *FaultProxy) accepts() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.refuse && !p.closed
}

// register makes a connection known to Cut and Close; false means that Close came first.
func (p *FaultProxy) register(l *link) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.links[l] = struct{}{}
	}
	return !p.closed
}

// reset closes both sides with RST instead of FIN, so that peers see a failure and not an end. Where both have been
// ended in order it changes nothing.
func (l *link) reset() {
	l.once.Do(func() {
		close(l.gone)
		for _, conn := range []*net.TCPConn{l.client, l.server} {
			if conn != nil {
				_ = conn.SetLinger(0) // what fails here is closed already
				_ = conn.Close()
			}
		}
	})
}

// pass carries bytes one way until the sender ends or something breaks.
func (p *FaultProxy) pass(l *link, d Direction, from, to *net.TCPConn) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if !p.forward(l, d, to, buf[:n]) {
			l.reset()
			return
		}
		if errors.Is(err, io.EOF) {
			_ = to.CloseWrite() // the other way goes on; if this fails, it notices
			return
		}
		if err != nil {
			l.reset()
			return
		}
	}
}

// forward writes or drops data as the direction demands, and reports whether the connection still works. Without data it
// still waits while the direction is stalled, since the end of a stream must not overtake its bytes.
func (p *FaultProxy) forward(l *link, d Direction, to *net.TCPConn, data []byte) bool {
	for {
		passed, dropped, pause, ok := p.allow(l, d, len(data))
		if !ok {
			return false
		}
		if passed > 0 {
			if _, err := to.Write(data[:passed]); err != nil {
				return false
			}
		}
		data = data[passed+dropped:]
		if pause > 0 {
			select {
			case <-time.After(pause):
			case <-l.gone:
				return false
			}
		}
		if len(data) == 0 {
			return true
		}
	}
}

// allow waits while the direction is stalled. It returns how many of n bytes to pass and how many to drop after them, and
// how long to pause then.
func (p *FaultProxy) allow(l *link, d Direction, n int) (passed, dropped int, pause time.Duration, ok bool) {
	for {
		p.mu.Lock()
		if !p.ways[d].stalled {
			break // with the lock held
		}
		changed := p.changed
		p.mu.Unlock()
		select {
		case <-changed:
		case <-l.gone:
			return 0, 0, 0, false
		}
	}
	defer p.mu.Unlock()
	w := &p.ways[d]
	passed = n
	if w.discardAfter >= 0 {
		passed = min(n, w.discardAfter)
		dropped = n - passed
	}
	if w.rate > 0 && passed > 0 {
		passed = min(passed, max(1, w.rate/slowSteps))
		dropped = 0 // what is over comes back here
		pause = time.Duration(passed) * time.Second / time.Duration(w.rate)
	}
	if w.discardAfter >= 0 {
		w.discardAfter -= passed
	}
	return passed, dropped, pause, true
}
