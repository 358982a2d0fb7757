package main

import (
	"fmt"
	"time"

	"github.com/rabbitladder/ladder"
)

// A message is one that the program sends, with what becomes of it.
type message struct {
	id       string
	delay    time.Duration
	absolute bool         // sent with PublishAt
	route    ladder.Route // as planned

	sent     time.Time
	arrivals int
	arrival  // the first
}

// An arrival is what the consumer saw of a message.
type arrival struct {
	id       string
	at       time.Time
	units    uint64 // as the routing key has them
	lateness time.Duration
}

func newArrival(l *ladder.Ladder, d *ladder.Delivery) arrival {
	// There is no error: the message came through this ladder.
	units, _, _ := l.ParseKey(d.RoutingKey)
	return arrival{id: d.MessageId, at: time.Now(), units: units, lateness: d.Lateness}
}

func (m *message) take(a arrival) {
	m.arrivals++
	if m.arrivals == 1 {
		m.arrival = a
	}
}

// asked is the delay; a negative one is none.
func (m *message) asked() time.Duration { return max(m.delay, 0) }

// rounding is the part of the lateness that comes from rounding up to whole
// units.
func (m *message) rounding(unit time.Duration) time.Duration {
	return max(0, time.Duration(m.units)*unit-m.asked())
}

// plan makes up the messages. 128 units of 100 ms are the longest delay.
func plan(l *ladder.Ladder) ([]*message, error) {
	var messages []*message
	add := func(absolute bool, delays ...time.Duration) {
		for _, delay := range delays {
			messages = append(messages, &message{delay: delay, absolute: absolute})
		}
	}
	addUnits := func(counts ...int) {
		for _, units := range counts {
			add(false, time.Duration(units)*l.Config().Unit)
		}
	}
	add(false, -time.Minute) // no delay
	addUnits(0, 42, 42)
	addUnits(1, 2, 4, 8, 16, 32, 64, 128) // one queue each
	addUnits(3, 7, 15, 31, 63, 127)       // each queue from some level down
	addUnits(5, 6, 33, 50, 85, 99, 100, 120)
	add(false, // rounded up
		20*time.Millisecond, 50*time.Millisecond, 333*time.Millisecond, 1234*time.Millisecond,
		2718281828*time.Nanosecond, 3141592653*time.Nanosecond, 7777*time.Millisecond)
	add(true, 1500*time.Millisecond, 6*time.Second, 10010*time.Millisecond)
	for i, m := range messages {
		m.id = fmt.Sprintf("%02d", i+1)
		var err error
		if m.route, err = l.Route(m.delay, destination); err != nil {
			return nil, err
		}
	}
	return messages, nil
}
