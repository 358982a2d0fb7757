package brokertest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Without keep-alive no idle connection, and so no goroutine, outlives a test.
var httpClient = &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// stillness is how long what is under way between two queues takes to arrive.
const stillness = 250 * time.Millisecond

// manage sends one request to the management API and, if answer is not nil, decodes what comes back into it. The path is
// escaped already.
func (b *Broker) manage(ctx context.Context, method, path string, body, answer any) error {
	content, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("brokertest: %s %s: %w", method, path, err)
	}
	base := *b.management
	base.User = nil // credentials travel in a header and stay out of errors
	target := strings.TrimSuffix(base.String(), "/") + path
	req, err := http.NewRequestWithContext(ctx, method, target, bytes.NewReader(content))
	if err != nil {
		return fmt.Errorf("brokertest: %s %s: %w", method, target, err)
	}
	password, _ := b.management.User.Password()
	req.SetBasicAuth(b.management.User.Username(), password)
	req.Header.Set("Content-Type", "application/json")
	resp, err := httpClient.Do(req)
	if err != nil {
		return fmt.Errorf("brokertest: the management API does not answer (set LADDER_MANAGEMENT_URL if it is elsewhere): %w", err)
	}
	defer resp.Body.Close() //nolint:errcheck // nothing was written
	received, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("brokertest: %s %s: %w", method, target, err)
	}
	if resp.StatusCode >= http.StatusBadRequest {
		return fmt.Errorf("brokertest: %s %s: %s: %s", method, target, resp.Status, bytes.TrimSpace(received))
	}
	if answer != nil {
		if err := json.Unmarshal(received, answer); err != nil {
			return fmt.Errorf("brokertest: %s %s: %w", method, target, err)
		}
	}
	return nil
}

// CreateVHost creates a virtual host and gives the broker's own user all permissions in it.
func (b *Broker) CreateVHost(ctx context.Context, vhost string) error {
	if err := b.manage(ctx, http.MethodPut, "/api/vhosts/"+url.PathEscape(vhost), struct{}{}, nil); err != nil {
		return err
	}
	return b.permit(ctx, b.amqp.User.Username(), vhost, ".*", ".*", ".*")
}

// DeleteVHost deletes a virtual host with everything in it. It deletes the exchanges first: RabbitMQ 4.3 may end
// at-least-once dead-lettering on the whole node if quorum queues are deleted while messages move between them.
func (b *Broker) DeleteVHost(ctx context.Context, vhost string) error {
	var exchanges []struct{ Name string }
	list := "/api/exchanges/" + url.PathEscape(vhost)
	if err := b.manage(ctx, http.MethodGet, list+"?columns=name", nil, &exchanges); err != nil {
		return err
	}
	for _, e := range exchanges {
		if e.Name == "" || strings.HasPrefix(e.Name, "amq.") {
			continue
		}
		if err := b.manage(ctx, http.MethodDelete, list+"/"+url.PathEscape(e.Name), nil, nil); err != nil {
			return err
		}
	}
	select {
	case <-time.After(stillness):
	case <-ctx.Done():
		return ctx.Err()
	}
	return b.manage(ctx, http.MethodDelete, "/api/vhosts/"+url.PathEscape(vhost), nil, nil)
}

// AddUser creates a user who may only use AMQP, in one virtual host, with the permissions that the three regular
// expressions give; "" gives none.
func (b *Broker) AddUser(ctx context.Context, user, password, vhost, configure, write, read string) error {
	err := b.manage(ctx, http.MethodPut, "/api/users/"+url.PathEscape(user), map[string]string{"password": password, "tags": ""}, nil)
	if err != nil {
		return err
	}
	return b.permit(ctx, user, vhost, configure, write, read)
}

// DeleteUser deletes a user.
func (b *Broker) DeleteUser(ctx context.Context, user string) error {
	return b.manage(ctx, http.MethodDelete, "/api/users/"+url.PathEscape(user), nil, nil)
}

func (b *Broker) permit(ctx context.Context, user, vhost, configure, write, read string) error {
	return b.manage(ctx, http.MethodPut, "/api/permissions/"+url.PathEscape(vhost)+"/"+url.PathEscape(user),
		map[string]string{"configure": configure, "write": write, "read": read}, nil)
}
