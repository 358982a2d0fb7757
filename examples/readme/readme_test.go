// Package readme keeps the documents true: the README's code is compiled and run, its tables are computed, and the
// permissions that it names are tried on a broker.
package readme

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rabbitladder/ladder"
	"github.com/rabbitladder/ladder/internal/brokertest"
)

func TestMain(m *testing.M) { brokertest.Main(m) }

// The README's code is what stands between the marks below, without the first tab.

func publish(ctx context.Context, url string) error {
	// README: publish
	l, err := ladder.New(ladder.Config{}) // 20 levels, unit 1 s: delays up to 12 days
	if err != nil {
		return err
	}
	publisher, err := ladder.NewPublisher(ctx, l, ladder.PublisherConfig{URLs: []string{url}})
	if err != nil {
		return err
	}
	message := amqp.Publishing{Body: []byte("Welcome!")}
	if err := publisher.PublishDelayed(ctx, "email.delivery", 42*time.Second, message); err != nil {
		return err
	}
	return publisher.Close(ctx)
	// README: end
}

func consume(ctx context.Context, l *ladder.Ladder, url string, sendEmail func(context.Context, []byte) error) error {
	// README: consume
	consumer, err := ladder.NewConsumer(l, ladder.ConsumerConfig{
		URLs:         []string{url},
		Queue:        "mailer",
		Destinations: []string{"email.delivery"},
	})
	if err != nil {
		return err
	}
	return consumer.Run(ctx, func(ctx context.Context, d *ladder.Delivery) error {
		return sendEmail(ctx, d.Body) // nil acknowledges; after an error it comes again, later and later
	})
	// README: end
}

const root = "../.."

func read(t *testing.T, name string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(root, name))
	require.NoError(t, err)
	return string(content)
}

// TestCodeIsCompiled compares the code in a document with what is compiled here. What begins with a tab loses one.
func TestCodeIsCompiled(t *testing.T) {
	t.Parallel()
	for document, source := range map[string]string{"README.md": "readme_test.go", "docs/consuming.md": "consuming_test.go"} {
		name := strings.TrimSuffix(filepath.Base(document), ".md")
		var compiled []string
		for _, found := range regexp.MustCompile(`(?s)// `+name+`: \w+\n(.*?)\n+\t?// `+name+`: end\n`).FindAllStringSubmatch(read(t, "examples/readme/"+source), -1) {
			code := found[1] + "\n"
			if strings.HasPrefix(code, "\t") {
				code = regexp.MustCompile(`(?m)^\t`).ReplaceAllString(code, "")
			}
			compiled = append(compiled, code)
		}
		var shown []string
		for _, found := range regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(read(t, document), -1) {
			shown = append(shown, found[1])
		}
		assert.Equal(t, compiled, shown, document)
	}
}

func TestCodeWorks(t *testing.T) {
	t.Parallel()
	url := brokertest.VHost(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, publish(ctx, url))

	l, err := ladder.New(ladder.Config{})
	require.NoError(t, err)
	conn, err := amqp.Dial(url)
	require.NoError(t, err)
	defer conn.Close() //nolint:errcheck // only looks
	ch, err := conn.Channel()
	require.NoError(t, err)
	waiting, err := ch.QueueDeclarePassive(l.Level(5), true, false, false, false, nil)
	require.NoError(t, err)
	require.Equal(t, 1, waiting.Messages, "42 s begin with 32 s")

	publisher, err := ladder.NewPublisher(ctx, l, ladder.PublisherConfig{URLs: []string{url}})
	require.NoError(t, err)
	sent := make(chan string)
	consuming, stop := context.WithCancel(ctx)
	consumed := make(chan error)
	go func() {
		consumed <- consume(consuming, l, url, func(_ context.Context, body []byte) error {
			sent <- string(body)
			return nil
		})
	}()
	require.NoError(t, publisher.PublishDelayed(ctx, "email.delivery", 3*time.Second, amqp.Publishing{Body: []byte("Hello!")}))
	select {
	case body := <-sent:
		require.Equal(t, "Hello!", body)
	case <-ctx.Done():
		t.Fatal(ctx.Err())
	}
	stop()
	require.NoError(t, <-consumed)
	require.NoError(t, publisher.Close(ctx))
}

// The rows of "Choosing a unit and levels", computed from the ladders.
func TestChoosingTable(t *testing.T) {
	t.Parallel()
	var rows []string
	for _, c := range []ladder.Config{
		{Unit: time.Millisecond, Levels: 12},
		{Unit: time.Millisecond, Levels: 22},
		{Unit: 100 * time.Millisecond, Levels: 8},
		{Unit: 100 * time.Millisecond, Levels: 20},
		{Unit: 100 * time.Millisecond, Levels: 25},
		{Unit: time.Second, Levels: 12},
		{Unit: time.Second, Levels: 16},
		{Unit: time.Second, Levels: 20},
		{Unit: time.Second, Levels: 25},
		{Unit: time.Second, Levels: 28},
		{Unit: time.Minute, Levels: 16},
		{Unit: time.Minute, Levels: 20},
	} {
		l, err := ladder.New(c)
		require.NoError(t, err)
		c.Layout = ladder.Chain
		chain, err := ladder.New(c)
		require.NoError(t, err)
		horizon := l.Horizon().String()
		switch days := l.Horizon().Hours() / 24; {
		case days >= 500:
			horizon = fmt.Sprintf("%.1f years", days/365.25)
		case days >= 1:
			horizon = fmt.Sprintf("%.1f days", days)
		}
		unit := c.Unit.String()
		if c.Unit == time.Minute {
			unit = "1m"
		}
		rows = append(rows, fmt.Sprintf("| %s | %d | %s | %g | %d | %d | %d / %d | %d |", unit, c.Levels, horizon, float64(c.Levels)/2,
			len(l.Topology().Queues), len(l.Topology().Exchanges), len(l.Topology().Bindings), len(chain.Topology().Bindings), l.MaxDestination()))
	}
	assert.Contains(t, read(t, "README.md"), strings.Join(rows, "\n")+"\n", "the table should be\n%s", strings.Join(rows, "\n"))
}

// Half of the levels is the mean number of hops when all delays are equally likely.
func TestMeanHops(t *testing.T) {
	t.Parallel()
	const levels = 12
	l, err := ladder.New(ladder.Config{Levels: levels})
	require.NoError(t, err)
	hops := 0
	for units := range uint64(1 << levels) {
		for range l.Waits(units) {
			hops++
		}
	}
	require.Equal(t, levels<<levels/2, hops)
}

// TestPermissions tries the README's table, whose patterns are those of a ladder in its default shape.
func TestPermissions(t *testing.T) {
	t.Parallel()
	env := brokertest.For(t)
	vhost := strings.ToLower("permissions-" + rand.Text()[:8])
	require.NoError(t, env.Broker.CreateVHost(t.Context(), vhost))
	defer func() { require.NoError(t, env.Broker.DeleteVHost(context.Background(), vhost)) }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := ladder.New(ladder.Config{})
	require.NoError(t, err)
	readme := read(t, "README.md")
	user := func(role, configure, write, readable string) string {
		cell := func(pattern string) string {
			if pattern == "" {
				return "none"
			}
			return "`" + strings.ReplaceAll(pattern, "|", `\|`) + "`" // a bare | would end the cell
		}
		row := fmt.Sprintf("| %s | %s | %s | %s |\n", role, cell(configure), cell(write), cell(readable))
		assert.Contains(t, readme, row)
		name := strings.ToLower("reader-" + rand.Text()[:8])
		require.NoError(t, env.Broker.AddUser(ctx, name, "secret", vhost, configure, write, readable))
		t.Cleanup(func() { require.NoError(t, env.Broker.DeleteUser(context.WithoutCancel(ctx), name)) })
		return env.Broker.UserURL(name, "secret", vhost)
	}
	const (
		whole  = `^ladder\.20x1s\.`
		entry  = `^ladder\.20x1s\.(level-|delivery$)`
		queues = `^(ladder\.20x1s\.|mailer(\.failed)?$)`
		write  = `^(ladder\.20x1s\.|mailer$|amq\.default$)`
		queue  = `^(ladder\.20x1s\.|mailer$)`
		resend = `^(ladder\.20x1s\.(level-|delivery$)|amq\.default$)`
	)
	active := user("Publisher", whole, whole, whole)
	passive := user("Publisher, Passive", "", entry, "")
	activeConsumer := user("Consumer", queues, write, queue)
	passiveConsumer := user("Consumer, Passive", "", resend, `^mailer$`)

	// Each message is tried twice, and those without a delay fail then.
	consume := func(config ladder.ConsumerConfig) (got chan string, stop func()) {
		config.Retry = ladder.FixedSteps{time.Second}
		consumer, err := ladder.NewConsumer(l, config)
		require.NoError(t, err)
		got = make(chan string, 10)
		consuming, cancel := context.WithCancel(ctx)
		ended := make(chan error)
		go func() {
			ended <- consumer.Run(consuming, func(_ context.Context, d *ladder.Delivery) error {
				if d.Attempt == 1 {
					return errors.New("once more")
				}
				got <- string(d.Body)
				if strings.HasSuffix(string(d.Body), "at once") {
					return ladder.Permanent(errors.New("for the failed queue"))
				}
				return nil
			})
		}()
		select {
		case <-consumer.Ready():
		case err := <-ended:
			require.NoError(t, err)
		}
		return got, func() { cancel(); assert.NoError(t, <-ended) }
	}
	send := func(url, body string, config ladder.PublisherConfig) {
		config.URLs = []string{url}
		publisher, err := ladder.NewPublisher(ctx, l, config)
		require.NoError(t, err)
		require.NoError(t, publisher.PublishDelayed(ctx, "email.delivery", 2*time.Second, amqp.Publishing{Body: []byte(body)}))
		require.NoError(t, publisher.PublishDelayed(ctx, "email.delivery", 0, amqp.Publishing{Body: []byte(body + " at once")}))
		require.NoError(t, publisher.Close(ctx))
	}
	receive := func(got chan string, want ...string) {
		var bodies []string
		for range want {
			select {
			case body := <-got:
				bodies = append(bodies, body)
			case <-ctx.Done():
				require.NoError(t, ctx.Err())
			}
		}
		require.ElementsMatch(t, want, bodies)
	}

	got, stop := consume(ladder.ConsumerConfig{
		URLs: []string{activeConsumer}, Queue: "mailer", Destinations: []string{"email.delivery"},
	})
	send(active, "active", ladder.PublisherConfig{})
	receive(got, "active", "active at once")
	stop()

	got, stop = consume(ladder.ConsumerConfig{URLs: []string{passiveConsumer}, Queue: "mailer", Passive: true})
	send(passive, "passive", ladder.PublisherConfig{Passive: true})
	receive(got, "passive", "passive at once")
	stop()
	conn, err := amqp.Dial(env.Broker.URL(vhost))
	require.NoError(t, err)
	defer conn.Close() //nolint:errcheck // only looks
	ch, err := conn.Channel()
	require.NoError(t, err)
	for _, body := range []string{"active at once", "passive at once"} {
		d, found, err := ch.Get(ladder.FailedQueue("mailer"), true)
		require.NoError(t, err)
		require.True(t, found)
		assert.Equal(t, body, string(d.Body))
	}
}

// The documents name tests and files; each of them must be there.
func TestDocumentsNameWhatExists(t *testing.T) {
	t.Parallel()
	tests := map[string]bool{}
	require.NoError(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, "_test.go") {
			source, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			for _, found := range regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark|Example)\w*)\(`).FindAllStringSubmatch(string(source), -1) {
				tests[found[1]] = true
			}
		}
		return err
	}))
	documents, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	require.NoError(t, err)
	for _, document := range append(documents, filepath.Join(root, "README.md"), filepath.Join(root, "CONTRIBUTING.md")) {
		content, err := os.ReadFile(document)
		require.NoError(t, err)
		for _, found := range regexp.MustCompile("`((?:Test|Fuzz|Benchmark)[A-Z]\\w*)[`/]").FindAllStringSubmatch(string(content), -1) {
			assert.True(t, tests[found[1]], "%s names %s, which is not there", document, found[1])
		}
		for _, found := range regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`).FindAllStringSubmatch(string(content), -1) {
			assert.FileExists(t, filepath.Join(filepath.Dir(document), found[1]), document)
		}
	}
}
