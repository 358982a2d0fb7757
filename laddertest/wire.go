package laddertest

import (
	"slices"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/rabbitladder/ladder"
)

// received returns a message as it comes from a queue, after its way through the ladder.
func received(l *ladder.Ladder, m *message) amqp.Delivery {
	headers := table(m.publishing.Headers)
	exchange := m.exchange
	if m.units > 0 {
		exchange = die(l, m, headers)
	}
	timestamp := m.publishing.Timestamp
	if !timestamp.IsZero() {
		timestamp = seconds(timestamp)
	}
	return amqp.Delivery{
		Headers:         headers,
		ContentType:     m.publishing.ContentType,
		ContentEncoding: m.publishing.ContentEncoding,
		DeliveryMode:    m.publishing.DeliveryMode,
		Priority:        m.publishing.Priority,
		CorrelationId:   m.publishing.CorrelationId,
		ReplyTo:         m.publishing.ReplyTo,
		MessageId:       m.publishing.MessageId,
		Timestamp:       timestamp,
		Type:            m.publishing.Type,
		UserId:          m.publishing.UserId,
		AppId:           m.publishing.AppId,
		Exchange:        exchange,
		RoutingKey:      m.key,
		Body:            append([]byte{}, m.publishing.Body...),
	}
}

// die notes in the headers of a message how it expired in one level queue after another, as RabbitMQ does, and
// returns the exchange that it came to last.
func die(l *ladder.Ladder, m *message, headers amqp.Table) string {
	exchange, at := m.exchange, m.due.Add(-time.Duration(m.units)*l.Config().Unit)
	var deaths []any
	for level, wait := range l.Waits(m.units) {
		at = at.Add(wait)
		death := amqp.Table{
			"count": int64(1), "reason": "expired", "queue": l.Level(level), "time": seconds(at),
			"exchange": exchange, "routing-keys": []any{m.key},
		}
		deaths = slices.Insert(deaths, 0, any(death))
		for key, value := range map[string]string{"queue": l.Level(level), "exchange": exchange, "reason": "expired"} {
			if len(deaths) == 1 {
				headers["x-first-death-"+key] = value
			}
			headers["x-last-death-"+key] = value
		}
		exchange = l.DeliveryExchange()
		if level > 0 {
			exchange = l.Level(level - 1)
		}
	}
	headers["x-death"] = deaths
	return exchange
}

// table returns a deep copy of headers as amqp091-go decodes them. The types of what a publisher has
// accepted stay the same on the wire, but a time has whole seconds.
func table(headers amqp.Table) amqp.Table {
	copied := make(amqp.Table, len(headers))
	for key, value := range headers {
		copied[key] = field(value)
	}
	return copied
}

func field(value any) any {
	switch v := value.(type) {
	case amqp.Table:
		return table(v)
	case []any:
		array := make([]any, len(v))
		for i := range v {
			array[i] = field(v[i])
		}
		return array
	case []byte:
		return append([]byte{}, v...)
	case time.Time:
		return seconds(v)
	}
	return value
}

// seconds is a time on the wire.
func seconds(t time.Time) time.Time { return time.Unix(t.Unix(), 0) }
