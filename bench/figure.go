package main

import (
	"fmt"
	"image/color"
	"io"
	"path/filepath"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
)

// A figure is either bars or curves.
type figure struct {
	name   string // of the file, without its extension
	title  string
	x, y   string // what the axes show; of bars, x is what they measure
	bars   []bar
	curves []curve
	logX   bool
}

type bar struct {
	name  string
	value float64
	ours  bool // this library: drawn in the stronger colour
}

type curve struct {
	name   string
	points plotter.XYs
}

const (
	width  = 16 * vg.Centimeter
	height = 9 * vg.Centimeter
	margin = vg.Length(6)
	dpi    = 144
)

// A picture has its glyphs in it: what an SVG file looks like depends on the fonts of who looks at it.
func (f figure) file() string { return f.name + ".png" }

func (f figure) save(directory string) error {
	p := plot.New()
	for _, style := range []*text.Style{&p.Title.TextStyle, &p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label, &p.Legend.TextStyle} {
		style.Font.Variant = "Sans"
	}
	p.BackgroundColor = color.White
	p.Title.Text = f.title
	p.Title.Padding = vg.Points(8)
	p.X.Label.Text = f.x
	p.Y.Label.Text = f.y
	if f.logX {
		p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.TickerFunc(decades)
	}
	var err error
	if len(f.bars) > 0 {
		err = drawBars(p, f.bars)
	} else {
		err = drawCurves(p, f.curves)
	}
	if err != nil {
		return err
	}
	canvas := vgimg.PngCanvas{Canvas: vgimg.NewWith(vgimg.UseWH(width, height), vgimg.UseDPI(dpi))}
	p.Draw(draw.Crop(draw.New(canvas), margin, -margin, margin, -margin))
	return writeFile(filepath.Join(directory, f.file()), func(w io.Writer) error {
		_, err := canvas.WriteTo(w)
		return err
	})
}

// decades marks powers of ten, and what lies between without a label.
func decades(low, high float64) []plot.Tick {
	var ticks []plot.Tick
	for _, t := range (plot.LogTicks{}).Ticks(low, high) {
		if t.Label != "" {
			t.Label = strconv.FormatFloat(t.Value, 'f', -1, 64)
		}
		ticks = append(ticks, t)
	}
	return ticks
}

// drawBars draws them from top to bottom, each with its value behind it.
func drawBars(p *plot.Plot, bars []bar) error {
	ours, others := color.RGBA{R: 0x1b, G: 0x6c, B: 0xa8, A: 0xff}, color.RGBA{R: 0xb4, G: 0xb9, B: 0xbf, A: 0xff}
	names := make([]string, len(bars))
	labels := plotter.XYLabels{XYs: make(plotter.XYs, len(bars)), Labels: make([]string, len(bars))}
	var most float64
	for i, b := range bars {
		row := len(bars) - 1 - i
		names[row] = b.name
		labels.XYs[i] = plotter.XY{X: b.value, Y: float64(row)}
		labels.Labels[i] = " " + number(b.value)
		most = max(most, b.value)
		chart, err := plotter.NewBarChart(plotter.Values{b.value}, vg.Points(14))
		if err != nil {
			return err
		}
		chart.Horizontal, chart.XMin, chart.LineStyle.Width = true, float64(row), 0
		chart.Color = others
		if b.ours {
			chart.Color = ours
		}
		p.Add(chart)
	}
	values, err := plotter.NewLabels(labels)
	if err != nil {
		return err
	}
	for i := range values.TextStyle {
		values.TextStyle[i].YAlign = -0.4
		values.TextStyle[i].Font.Variant = "Sans"
	}
	p.Add(values)
	p.NominalY(names...)
	p.X.Min, p.X.Max = 0, most*1.15
	p.Y.Min, p.Y.Max = -0.6, float64(len(bars))-0.4
	return nil
}

func drawCurves(p *plot.Plot, curves []curve) error {
	p.Add(plotter.NewGrid())
	p.Legend.XOffs, p.Legend.YOffs, p.Legend.Padding = -vg.Points(8), vg.Points(8), vg.Points(2)
	for i, c := range curves {
		line, err := plotter.NewLine(c.points)
		if err != nil {
			return fmt.Errorf("curve %s: %w", c.name, err)
		}
		line.Color = plotutil.Color(i)
		line.Width = vg.Points(1.6)
		line.Dashes = plotutil.Dashes(i)
		p.Add(line)
		p.Legend.Add(c.name, line)
	}
	return nil
}
