package session_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http/httptest"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder/internal/brokertest"
	"github.com/rabbitladder/ladder/internal/session"
)

// overTLS puts a TLS listener in front of a broker. It returns the URL through
// it, and the certificate to trust, which is httptest's own.
func overTLS(t *testing.T, target string) (string, *x509.CertPool) {
	t.Helper()
	server := httptest.NewTLSServer(nil)
	defer server.Close()
	pool := x509.NewCertPool()
	pool.AddCert(server.Certificate())
	u, err := url.Parse(target)
	require.NoError(t, err)
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: server.TLS.Certificates, MinVersion: tls.VersionTLS12})
	require.NoError(t, err)
	var serving sync.WaitGroup
	t.Cleanup(func() {
		assert.NoError(t, listener.Close())
		serving.Wait()
	})
	broker := u.Host
	serving.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { join(client, broker) })
		}
	})
	u.Scheme, u.Host = "amqps", listener.Addr().String()
	return u.String(), pool
}

// join passes bytes between a client and an address until one side ends.
func join(client net.Conn, target string) {
	defer client.Close() //nolint:errcheck // it may be closed already
	server, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	defer server.Close() //nolint:errcheck // it may be closed already
	ended := make(chan struct{}, 2)
	go func() { _, _ = io.Copy(server, client); ended <- struct{}{} }()
	go func() { _, _ = io.Copy(client, server); ended <- struct{}{} }()
	<-ended
}

func TestTLS(t *testing.T) {
	t.Parallel()
	target, trusted := overTLS(t, brokertest.For(t).URL)
	c := config(target)
	c.TLS = &tls.Config{RootCAs: trusted, MinVersion: tls.VersionTLS12}
	k := keep(t, c, session.Events{})
	s, err := k.Current(within(t))
	require.NoError(t, err)
	assert.Equal(t, uint64(1), s.Generation)
	assert.Empty(t, c.TLS.ServerName, "the caller's configuration is not changed")

	// A certificate that nobody vouches for.
	c.TLS = nil
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err = session.Keep(ctx, c, silent, session.Events{}, identity)
	require.Error(t, err)
	_, untrusted := errors.AsType[*tls.CertificateVerificationError](err)
	assert.True(t, untrusted, err)
	assert.False(t, session.Refused(err))
}
