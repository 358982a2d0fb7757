package brokertest

import (
	"context"
	"net/http"
	"net/url"
)

// SetPolicy sets a policy for the queues of a virtual host whose names match a regular expression.
func (b *Broker) SetPolicy(ctx context.Context, vhost, name, pattern string, definition map[string]any) error {
	return b.manage(ctx, http.MethodPut, "/api/policies/"+url.PathEscape(vhost)+"/"+url.PathEscape(name),
		map[string]any{"pattern": pattern, "apply-to": "queues", "definition": definition}, nil)
}

// LimitConnections limits the number of connections to a virtual host.
func (b *Broker) LimitConnections(ctx context.Context, vhost string, most int) error {
	return b.manage(ctx, http.MethodPut, "/api/vhost-limits/"+url.PathEscape(vhost)+"/max-connections", map[string]int{"value": most}, nil)
}
