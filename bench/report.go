package main

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// A section is the result of one scenario.
type section struct {
	title   string
	text    string // what was done, in Markdown
	tables  []table
	figures []figure
	targets []target
}

// A table has one row for each thing that was measured. The first column names it.
type table struct {
	caption string
	columns []string
	rows    [][]string
}

// A target is a figure that the project wants to reach.
type target struct {
	what   string
	got    float64
	want   float64
	atMost bool // want is an upper limit; else a lower one
}

func (t target) met() bool {
	if t.atMost {
		return t.got <= t.want
	}
	return t.got >= t.want
}

func (t target) String() string {
	limit, verdict := "at least", "met"
	if t.atMost {
		limit = "at most"
	}
	if !t.met() {
		verdict = "**missed**"
	}
	return fmt.Sprintf("%s: %s (%s %s): %s", t.what, number(t.got), limit, number(t.want), verdict)
}

// number formats a figure with three significant digits, or as a whole number where it has more.
func number(f float64) string {
	switch {
	case f >= 100 || f <= -100 || f == 0:
		return strconv.FormatFloat(f, 'f', 0, 64)
	case f >= 10:
		return strconv.FormatFloat(f, 'f', 1, 64)
	default:
		return strconv.FormatFloat(f, 'f', 2, 64)
	}
}

// write makes the report in a directory: report.md, results.csv and a picture for each figure.
func write(directory string, about []string, sections map[string]*section, order []string) error {
	if err := os.MkdirAll(directory, 0o755); err != nil { //nolint:gosec // documentation, for everyone to read
		return err
	}
	if err := writeFile(filepath.Join(directory, "report.md"), func(w io.Writer) error {
		return writeMarkdown(w, about, sections, order)
	}); err != nil {
		return err
	}
	if err := writeFile(filepath.Join(directory, "results.csv"), func(w io.Writer) error {
		return writeCSV(w, sections, order)
	}); err != nil {
		return err
	}
	for _, name := range order {
		for _, f := range sections[name].figures {
			if err := f.save(directory); err != nil {
				return fmt.Errorf("picture %s: %w", f.name, err)
			}
		}
	}
	return nil
}

func writeFile(name string, content func(io.Writer) error) error {
	file, err := os.Create(name) //nolint:gosec // the directory is the user's choice
	if err != nil {
		return err
	}
	return errors.Join(content(file), file.Close())
}

func writeMarkdown(w io.Writer, about []string, sections map[string]*section, order []string) error {
	var b strings.Builder
	b.WriteString("# Report of `make bench`\n\nWritten by the program in bench/; [README.md](README.md) says what it means.\n\n")
	for _, line := range about {
		b.WriteString("- " + line + "\n")
	}
	for _, name := range order {
		s := sections[name]
		fmt.Fprintf(&b, "\n## %s\n\n%s\n", s.title, s.text)
		for _, t := range s.tables {
			b.WriteString("\n")
			if t.caption != "" {
				b.WriteString(t.caption + ":\n\n")
			}
			writeRow(&b, t.columns)
			b.WriteString("|---" + strings.Repeat("|---:", len(t.columns)-1) + "|\n")
			for _, row := range t.rows {
				writeRow(&b, row)
			}
		}
		for _, f := range s.figures {
			fmt.Fprintf(&b, "\n![%s](%s)\n", f.title, f.file())
		}
		if len(s.targets) > 0 {
			b.WriteString("\nTargets:\n\n")
			for _, t := range s.targets {
				b.WriteString("- " + t.String() + "\n")
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func writeRow(b *strings.Builder, cells []string) {
	b.WriteString("| " + strings.Join(cells, " | ") + " |\n")
}

// writeCSV writes one line for each cell of each table.
func writeCSV(w io.Writer, sections map[string]*section, order []string) error {
	out := csv.NewWriter(w)
	if err := out.Write([]string{"scenario", "table", "row", "column", "value"}); err != nil {
		return err
	}
	for _, name := range order {
		for _, t := range sections[name].tables {
			for _, row := range t.rows {
				for i, cell := range row[1:] {
					if err := out.Write([]string{name, t.caption, row[0], t.columns[i+1], cell}); err != nil {
						return err
					}
				}
			}
		}
	}
	out.Flush()
	return out.Error()
}
