package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	neturl "net/url"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder"
)

// objects is how many things a virtual host has.
type objects struct {
	queues, exchanges, bindings int
	counted                     bool // by the broker
	source                      string
}

func (o objects) String() string {
	return fmt.Sprintf("%d queues, %d exchanges, %d bindings", o.queues, o.exchanges, o.bindings)
}

// countObjects asks the management API. AMQP itself cannot list anything, so
// without that it counts what the ladder declares.
func countObjects(ctx context.Context, l *ladder.Ladder, url, managementURL string) objects {
	topology := l.Topology()
	declared := objects{len(topology.Queues), len(topology.Exchanges), len(topology.Bindings), false, "not counted: this is what the ladder declares, by Topology()"}
	if managementURL == "" {
		declared.source += "; set LADDER_MANAGEMENT_URL to have the broker's count"
		return declared
	}
	counted := objects{counted: true, source: "in the virtual host, by the management API"}
	for kind, n := range map[string]*int{"queues": &counted.queues, "exchanges": &counted.exchanges, "bindings": &counted.bindings} {
		var err error
		if *n, err = count(ctx, kind, url, managementURL); err != nil {
			declared.source += fmt.Sprintf("; the management API failed: %v", err)
			return declared
		}
	}
	return counted
}

// count returns the number of queues, exchanges or bindings in the virtual host of
// the AMQP URL. The user is that of managementURL, or else of the AMQP URL.
func count(ctx context.Context, kind, url, managementURL string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	uri, err := amqp.ParseURI(url)
	if err != nil {
		return 0, err
	}
	base, err := neturl.Parse(managementURL)
	if err != nil {
		return 0, errors.New("LADDER_MANAGEMENT_URL is not a URL")
	}
	user := base.User
	if user == nil {
		user = neturl.UserPassword(uri.Username, uri.Password)
	}
	base.User = nil // so that no error shows it
	target := strings.TrimSuffix(base.String(), "/") + "/api/" + kind + "/" + neturl.PathEscape(uri.Vhost)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, target, http.NoBody) //nolint:gosec // the URL is the user's
	if err != nil {
		return 0, err
	}
	password, _ := user.Password()
	request.SetBasicAuth(user.Username(), password)
	request.Close = true
	response, err := http.DefaultClient.Do(request) //nolint:gosec // the URL is the user's
	if err != nil {
		return 0, err
	}
	defer response.Body.Close() //nolint:errcheck // nothing was written
	if response.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("%s: %s", target, response.Status)
	}
	var list []json.RawMessage
	if err := json.NewDecoder(response.Body).Decode(&list); err != nil {
		return 0, fmt.Errorf("%s: %w", target, err)
	}
	return len(list), nil
}
