package ladder

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"slices"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder/internal/session"
)

// ConnectionConfig says how publishers and consumers connect. The zero value is
// fine. Every wait for the network is bounded by one of its durations.
type ConnectionConfig struct {
	// Name is the connection's name, which RabbitMQ shows to operators.
	// Defaults to "ladder publisher" or "ladder consumer" with the ladder's
	// name.
	Name string

	// TLS is used for amqps URLs, instead of the certificate files that the URL's
	// parameters can name. Defaults to those, the system's roots and the URL's
	// host name.
	TLS *tls.Config

	// SASL returns the mechanisms to log in with. It is called for each
	// connection, so that it can fetch credentials that have changed; an error
	// is like one of the connection. Its context ends after DialTimeout. Defaults to
	// PLAIN with the URL's user and password.
	SASL func(context.Context) ([]amqp.Authentication, error)

	// Heartbeat is the interval proposed to the broker, at least one second.
	// A peer that is silent for one and a half of them is given up. A
	// heartbeat parameter in the URL wins. Defaults to 10 seconds.
	Heartbeat time.Duration

	// DialTimeout bounds connecting to one URL, the TLS and AMQP handshakes
	// included; a connection_timeout parameter in the URL is not looked at.
	// Defaults to 10 seconds.
	DialTimeout time.Duration

	// WriteTimeout bounds each write to the connection; a peer that does not
	// read for so long is given up. Defaults to 10 seconds.
	WriteTimeout time.Duration

	// SetupTimeout bounds what makes a new connection usable: opening its
	// channel, and declaring the topology. Defaults to 30 seconds.
	SetupTimeout time.Duration
}

// session returns the configuration of a session with the defaults filled in.
func (c ConnectionConfig) session(urls []string, name string) (session.Config, error) {
	if len(urls) == 0 {
		return session.Config{}, invalidConfig("URLs", "[]", "must have at least one AMQP URL")
	}
	for i, url := range urls {
		if err := session.CheckURL(url); err != nil {
			return session.Config{}, fmt.Errorf("%w: URLs[%d] %w", ErrInvalidConfig, i, err)
		}
	}
	s := session.Config{
		URLs:         slices.Clone(urls),
		TLS:          c.TLS,
		SASL:         c.SASL,
		Name:         cmp.Or(c.Name, name),
		Heartbeat:    cmp.Or(c.Heartbeat, 10*time.Second),
		DialTimeout:  cmp.Or(c.DialTimeout, 10*time.Second),
		WriteTimeout: cmp.Or(c.WriteTimeout, 10*time.Second),
		SetupTimeout: cmp.Or(c.SetupTimeout, 30*time.Second),
	}
	if s.Heartbeat < time.Second {
		return session.Config{}, invalidConfig("Connection.Heartbeat", s.Heartbeat, "must be at least 1s")
	}
	for _, d := range []struct {
		field string
		value time.Duration
	}{
		{"Connection.DialTimeout", s.DialTimeout},
		{"Connection.WriteTimeout", s.WriteTimeout},
		{"Connection.SetupTimeout", s.SetupTimeout},
	} {
		if d.value < 0 {
			return session.Config{}, invalidConfig(d.field, d.value, "must be positive")
		}
	}
	return s, nil
}

func orSilent(logger *slog.Logger) *slog.Logger {
	if logger == nil {
		return slog.New(slog.DiscardHandler)
	}
	return logger
}
