//! Elements of pictures: bars in a table, lines in inline SVG.
//!
//! Colours are custom CSS properties of the page, and change with light and dark mode. No meaning depends on colour
//! alone. A bar has its name and value next to it. A line has its own marker, in the picture and in the legend. Text is
//! HTML where possible, because the browser wraps HTML text and knows its width.

use maud::{Markup, html};

use crate::stats::{number, short};

/// Number of colours in the style sheet.
const COLOURS: usize = 8;

/// Returns the CSS value of colour `number`.
fn colour(number: usize) -> String {
    format!("var(--c{})", number % COLOURS)
}

/// A segment of a bar.
pub struct Part {
    /// Name of the segment, shown as a tooltip.
    pub name: String,
    pub value: f64,
    pub colour: usize,
}

/// A horizontal bar of stacked segments.
pub struct Bar {
    pub name: String,
    pub parts: Vec<Part>,
    /// Lowest and highest length of the bar over several runs.
    pub spread: Option<(f64, f64)>,
}

impl Bar {
    fn sum(&self) -> f64 {
        self.parts.iter().map(|part| part.value).sum()
    }
}

/// Draws bars with their names and values. `title` names the quantity; `unit` is its unit.
pub fn bars(title: &str, unit: &str, bars: &[Bar]) -> Markup {
    let end = |bar: &Bar| {
        bar.spread
            .map_or(0.0, |(_, highest)| highest)
            .max(bar.sum())
    };
    let most = bars.iter().map(end).fold(f64::MIN_POSITIVE, f64::max);
    let share = |value: f64| format!("{:.2}%", value / most * 100.0);
    html! {
        table.bars {
            caption { (title) }
            @for bar in bars {
                tr {
                    th scope="row" { (bar.name) }
                    td {
                        div.track {
                            @for part in &bar.parts {
                                span.bar style={ "width:" (share(part.value)) ";background:" (colour(part.colour)) }
                                    title={ (part.name) ": " (number(part.value)) " " (unit) } {}
                            }
                            @if let Some((lowest, highest)) = bar.spread.filter(|(lowest, highest)| lowest < highest) {
                                span.spread style={ "left:" (share(lowest)) ";width:" (share(highest - lowest)) } {}
                            }
                        }
                    }
                    td { (number(bar.sum())) " " (unit) }
                }
            }
        }
    }
}

/// Draws the legend of the bars' colours.
pub fn legend(names: &[(&str, usize)]) -> Markup {
    html! {
        ul.legend {
            @for (name, number) in names {
                li { span.key style={ "background:" (colour(*number)) } {} (name) }
            }
        }
    }
}

/// A line through points, with a name for the legend.
pub struct Line {
    pub name: String,
    pub colour: usize,
    pub dashed: bool,
    /// True for the line that all others are compared with; it is drawn bold.
    pub bold: bool,
    pub points: Vec<(f64, f64)>,
}

/// The area between two lines over the same positions.
pub struct Area {
    pub name: String,
    pub colour: usize,
    /// Points of the area: x position, lower end, upper end.
    pub points: Vec<(f64, f64, f64)>,
}

/// Axis of a picture: title, marks and scale.
pub struct Axis {
    /// Title: the quantity and its unit.
    pub title: String,
    /// Positions and labels of the marks. The first and the last mark are the ends of the axis.
    pub ticks: Vec<(f64, String)>,
    logarithmic: bool,
}

impl Axis {
    /// Creates an axis from 0 to above the highest value, with marks at 1, 2, 5 times 10^n. A logarithmic axis begins
    /// below the lowest value instead.
    pub fn new(title: &str, values: impl Iterator<Item = f64>, logarithmic: bool) -> Self {
        let values = values.filter(|value| value.is_finite() && *value > 0.0);
        let ends = values.fold((f64::INFINITY, 1e-3_f64), |(least, most), value| {
            (least.min(value), most.max(value))
        });
        let (least, most) = (ends.0.min(ends.1), ends.1);
        let marks: Vec<f64> = match logarithmic {
            true => {
                let (low, high) = (least.log10().floor(), most.log10().ceil());
                let decades = (0..).map(|i| low + f64::from(i));
                let steps = |decade: f64| [1.0, 2.0, 5.0].map(|step| step * 10_f64.powf(decade));
                let decades = decades.take_while(|decade| *decade <= high);
                let all: Vec<f64> = decades.flat_map(steps).collect();
                let from = all.iter().rposition(|mark| *mark <= least).unwrap_or(0);
                let to = all.iter().position(|mark| *mark >= most);
                all[from..=to.unwrap_or(all.len() - 1)].to_vec()
            }
            false => {
                let step = nice_step(most / 5.0);
                let marks = (0..).map(|i| f64::from(i) * step);
                marks.take_while(|mark| *mark < most + step).collect()
            }
        };
        Self {
            title: title.to_owned(),
            ticks: marks.into_iter().map(|mark| (mark, short(mark))).collect(),
            logarithmic,
        }
    }

    /// Returns the position of `value` on the axis: 0 at the first mark, 1 at the last.
    fn place(&self, value: f64) -> f64 {
        let map = |value: f64| match self.logarithmic {
            true => value.max(1e-9).ln(),
            false => value,
        };
        let ends = self.ticks.first().zip(self.ticks.last());
        let (from, to) = ends.map_or((0.0, 1.0), |(first, last)| (map(first.0), map(last.0)));
        match to > from {
            true => (map(value) - from) / (to - from),
            false => 0.5,
        }
    }
}

/// Returns the smallest number of the form 1, 2 or 5 times a power of ten that is at least `least`.
fn nice_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.max(1e-9).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    steps
        .into_iter()
        .find(|step| *step >= least)
        .unwrap_or(10.0 * power)
}

/// A picture of lines.
pub struct Plot<'a> {
    /// HTML ID of the picture, unique in the page.
    pub id: &'a str,
    /// Description of the picture for screen readers.
    pub title: &'a str,
    pub x: Axis,
    pub y: Axis,
    /// Areas drawn below the lines.
    pub areas: &'a [Area],
    pub lines: &'a [Line],
    /// True if the points have markers.
    pub markers: bool,
}

/// Width of a picture, in SVG units; a text line is 16 units high.
const WIDTH: f64 = 640.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = WIDTH - 32.0;
const TOP: f64 = 28.0;
const BOTTOM: f64 = 300.0;

/// Draws the picture. The legend has the order of the lines' right ends.
pub fn lines(plot: &Plot<'_>) -> Markup {
    let across = |x: f64| LEFT + plot.x.place(x) * (RIGHT - LEFT);
    let up = |y: f64| BOTTOM - plot.y.place(y) * (BOTTOM - TOP);
    let path = |line: &Line| {
        let points = line.points.iter().enumerate();
        let step = |(i, (x, y)): (usize, &(f64, f64))| {
            format!(
                "{}{:.1} {:.1}",
                if i == 0 { 'M' } else { 'L' },
                across(*x),
                up(*y)
            )
        };
        points.map(step).collect::<String>()
    };
    let outline = |area: &Area| {
        let lower = area.points.iter().map(|(x, low, _)| (*x, *low));
        let upper = area.points.iter().rev().map(|(x, _, high)| (*x, *high));
        let corner = |(x, y)| format!("{:.1} {:.1}", across(x), up(y));
        let corners: Vec<String> = lower.chain(upper).map(corner).collect();
        format!("M{}z", corners.join("L"))
    };
    let words = |line: &Line| {
        let values: Vec<String> = line.points.iter().map(|point| number(point.1)).collect();
        format!("{}: {}", line.name, values.join(", "))
    };
    let description: Vec<String> = plot.lines.iter().map(words).collect();
    let end = |line: &Line| line.points.last().map_or(0.0, |point| point.1);
    let mut legend: Vec<&Line> = plot.lines.iter().collect();
    legend.sort_by(|a, b| end(b).total_cmp(&end(a)));
    html! {
        div.plot {
            svg.lines viewBox={ "0 0 " (WIDTH) " " (BOTTOM + 46.0) } role="img" aria-labelledby={ (plot.id) "-t " (plot.id) "-d" } {
                title id={ (plot.id) "-t" } { (plot.title) }
                desc id={ (plot.id) "-d" } { (description.join("; ")) }
                @for (value, text) in &plot.y.ticks {
                    path.grid d=(format!("M{LEFT} {:.1}H{RIGHT}", up(*value))) {}
                    text.soft x=(LEFT - 8.0) y=(format!("{:.1}", up(*value) + 4.0)) text-anchor="end" { (text) }
                }
                text.soft x="0" y="14" { (plot.y.title) }
                @for (value, text) in &plot.x.ticks {
                    path.grid d=(format!("M{:.1} {BOTTOM}v5", across(*value))) {}
                    text.soft x=(format!("{:.1}", across(*value))) y=(BOTTOM + 19.0) text-anchor="middle" { (text) }
                }
                text.soft x=(RIGHT) y=(BOTTOM + 39.0) text-anchor="end" { (plot.x.title) }
                @for area in plot.areas {
                    path.area d=(outline(area)) fill=(colour(area.colour)) { title { (area.name) } }
                }
                @for line in plot.lines {
                    path.line d=(path(line)) fill="none" stroke=(colour(line.colour)) stroke-width=(width(line))
                        stroke-dasharray=[line.dashed.then_some("7 4")] {}
                    @if plot.markers {
                        @for point in &line.points {
                            (marker(line, (across(point.0), up(point.1)), &format!("{}: {}", line.name, number(point.1))))
                        }
                    }
                }
            }
            ul.legend {
                @for line in legend {
                    li {
                        svg viewBox="0 0 36 14" aria-hidden="true" {
                            path d="M0 7H36" stroke=(colour(line.colour)) stroke-width=(width(line))
                                stroke-dasharray=[line.dashed.then_some("7 4")] {}
                            @if plot.markers { (marker(line, (18.0, 7.0), "")) }
                        }
                        (line.name)
                    }
                }
                // The areas are listed in stacking order, the highest first.
                @for area in plot.areas.iter().rev() {
                    li { span.key style={ "background:" (colour(area.colour)) } {} (area.name) }
                }
            }
        }
    }
}

fn width(line: &Line) -> &'static str {
    match line.bold {
        true => "4.5",
        false => "2.25",
    }
}

/// Draws the marker of a point: circle, square, triangle or diamond, hollow on a dashed line.
fn marker(line: &Line, (x, y): (f64, f64), title: &str) -> Markup {
    let shape = match line.colour % 4 {
        0 => format!(
            "M{:.1} {y:.1}a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0",
            x - 4.5
        ),
        1 => format!("M{:.1} {:.1}h9v9h-9z", x - 4.5, y - 4.5),
        2 => format!("M{x:.1} {:.1}l5.5 9.5h-11z", y - 6.0),
        _ => format!("M{x:.1} {:.1}l6 6l-6 6l-6 -6z", y - 6.0),
    };
    let colour = colour(line.colour);
    let fill = if line.dashed { "var(--bg)" } else { &colour };
    html! {
        path.marker d=(shape) fill=(fill) stroke=(colour) stroke-width="1.5" { title { (title) } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_enclose_the_values() {
        for (values, logarithmic) in [
            (vec![0.3, 7.0], true),
            (vec![3.0], false),
            (vec![1000.0, 1000.0], true),
            (vec![0.07, 12_345.0], true),
            (vec![], true),
        ] {
            let axis = Axis::new("t", values.clone().into_iter(), logarithmic);
            assert!(!axis.ticks.is_empty());
            for value in values {
                let place = axis.place(value);
                assert!(
                    (-1e-9..=1.0 + 1e-9).contains(&place),
                    "{value} {:?}",
                    axis.ticks
                );
            }
        }
    }

    #[test]
    fn the_longest_bar_or_its_spread_takes_the_whole_track() {
        let bar = |value, spread| Bar {
            name: "a".to_owned(),
            parts: vec![Part {
                name: "p".to_owned(),
                value,
                colour: 0,
            }],
            spread,
        };
        let text = bars("t", "s", &[bar(5.0, Some((4.0, 10.0))), bar(2.5, None)]).into_string();
        for words in [
            "width:50.00%",
            "left:40.00%;width:60.00%",
            "width:25.00%",
            "2.50 s",
        ] {
            assert!(text.contains(words), "no {words} in {text}");
        }
        assert!(
            bars("t", "s", &[bar(0.0, None)])
                .into_string()
                .contains("width:0.00%")
        );
    }

    #[test]
    fn the_legend_is_in_the_order_of_the_ends_of_the_lines() {
        let line = |name: &str, end| Line {
            name: name.to_owned(),
            colour: 0,
            dashed: false,
            bold: false,
            points: vec![(1.0, 1.0), (2.0, end)],
        };
        let all = [line("lower", 2.0), line("upper", 9.0)];
        let axis = |values: [f64; 2]| Axis::new("s", values.into_iter(), false);
        let text = lines(&Plot {
            id: "p",
            title: "t",
            x: axis([1.0, 2.0]),
            y: axis([1.0, 9.0]),
            areas: &[],
            lines: &all,
            markers: false,
        });
        let text = text.into_string();
        let legend = text.split("<ul").nth(1).expect("a legend");
        assert!(legend.find("upper") < legend.find("lower"), "{legend}");
    }
}
