//! Pictures as inline SVG: bars and lines, with titles for those who do not see them.
//!
//! Colours are custom properties of the page, so that they follow light and dark. No colour stands alone: bars and
//! lines have their names beside them, and lines have dashes and markers of their own.

use std::fmt::Write;

use crate::stats::number;

/// Width of a picture, in its own units: those of the text, which has 13 to a line.
pub const WIDTH: f64 = 960.0;

/// Width of a picture of which two stand side by side.
pub const HALF: f64 = 470.0;

/// Width of a character: names in DejaVu Sans, the widest of the fonts, have 7.9 on average at most.
const CHARACTER: f64 = 8.2;

/// Height of a line of text.
const TEXT: f64 = 16.0;

/// Colours of the style.
const COLOURS: usize = 8;

/// Text that may be anything, for HTML and SVG.
pub fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            // Neither may stand in a document of XML or HTML.
            c if c.is_control() && !c.is_whitespace() => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

/// The colour with that number.
pub fn colour(number: usize) -> String {
    format!("var(--c{})", number % COLOURS)
}

/// A picture's frame: what it shows in a line, and at more length.
fn frame(
    kind: &str,
    id: &str,
    title: &str,
    description: &str,
    (width, height): (f64, f64),
    inner: &str,
) -> String {
    let (title, description) = (escape(title), escape(description));
    format!(
        "<div class=\"wide\"><svg class=\"{kind}\" viewBox=\"0 0 {width} {height:.0}\" style=\"min-width:{:.0}px\" \
         role=\"img\" aria-labelledby=\"{id}-t {id}-d\"><title id=\"{id}-t\">{title}</title><desc id=\"{id}-d\">{description}</desc>\
         {inner}</svg></div>",
        width * 0.6
    )
}

/// Width that the longest of `names` takes, but not more than `most`.
fn room<'a>(names: impl Iterator<Item = &'a str>, most: f64) -> f64 {
    let longest = names.map(|name| name.chars().count()).max().unwrap_or(0);
    (float(longest) * CHARACTER).min(most)
}

/// `text` in lines that fit into `width`: between words, and in them where a word is longer.
fn wrap(text: &str, width: f64) -> Vec<String> {
    let fits = |characters: usize| float(characters) * CHARACTER <= width + 0.01;
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last().map_or(0, |line| line.chars().count());
        if line > 0 && !fits(line + 1 + word.chars().count()) {
            lines.push(String::new());
        }
        for (i, c) in word.chars().enumerate() {
            let Some(line) = lines.last_mut() else {
                break;
            };
            if i == 0 && !line.is_empty() {
                line.push(' ');
            }
            match line.is_empty() || fits(line.chars().count() + 1) {
                true => line.push(c),
                false => lines.push(c.to_string()),
            }
        }
    }
    lines
}

/// Lines of text around the height `middle`.
fn label(x: f64, middle: f64, attributes: &str, lines: &[String]) -> String {
    let first = middle + 4.0 - TEXT * float(lines.len().saturating_sub(1)) / 2.0;
    let mut text = String::new();
    for (i, line) in lines.iter().enumerate() {
        let _ = write!(
            text,
            "<text x=\"{x:.1}\" y=\"{:.1}\" {attributes}>{}</text>",
            first + TEXT * float(i),
            escape(line)
        );
    }
    text
}

fn float(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

/// A part of a bar.
pub struct Part {
    /// What it is, for a tooltip.
    pub name: String,
    pub value: f64,
    pub colour: usize,
}

/// A horizontal bar.
pub struct Bar {
    pub name: String,
    pub parts: Vec<Part>,
    /// Lowest and highest of the sum, of several runs.
    pub spread: Option<(f64, f64)>,
}

impl Bar {
    fn sum(&self) -> f64 {
        self.parts.iter().map(|part| part.value).sum()
    }

    fn end(&self) -> f64 {
        self.spread
            .map_or(self.sum(), |(_, highest)| highest.max(self.sum()))
    }
}

/// Horizontal bars with their values, in a picture of that width.
pub fn bars(id: &str, title: &str, unit: &str, bars: &[Bar], width: f64) -> String {
    const ROW: f64 = 27.0;
    let left = room(bars.iter().map(|bar| bar.name.as_str()), width * 0.4) + 10.0;
    let value = |bar: &Bar| format!("{} {unit}", number(bar.sum()));
    let values: Vec<String> = bars.iter().map(value).collect();
    let right = room(values.iter().map(String::as_str), width * 0.3) + 10.0;
    let most = bars
        .iter()
        .map(Bar::end)
        .fold(0.0, f64::max)
        .max(f64::MIN_POSITIVE);
    let scale = |value: f64| value / most * (width - left - right);
    let mut inner = String::new();
    let mut words = Vec::new();
    let mut top = 4.0;
    for (bar, value) in bars.iter().zip(&values) {
        let name = wrap(&bar.name, left - 10.0);
        let height = ROW.max(TEXT * float(name.len()) + 10.0);
        let middle = top + height / 2.0;
        inner.push_str(&label(left - 10.0, middle, "text-anchor=\"end\"", &name));
        let mut x = left;
        for part in &bar.parts {
            let width = scale(part.value).max(0.5);
            let _ = write!(
                inner,
                "<rect class=\"bar\" x=\"{x:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{:.1}\" fill=\"{}\"><title>{}: {} {}</title></rect>",
                middle - ROW / 2.0 + 5.0,
                ROW - 10.0,
                colour(part.colour),
                escape(&part.name),
                number(part.value),
                escape(unit)
            );
            x += width;
        }
        if let Some((lowest, highest)) = bar.spread.filter(|(lowest, highest)| lowest < highest) {
            let (from, to) = (left + scale(lowest), left + scale(highest));
            // The first one keeps the second apart from a dark bar.
            for class in ["halo", "spread"] {
                let _ = write!(
                    inner,
                    "<path class=\"{class}\" fill=\"none\" d=\"M{from:.1} {a:.1}V{b:.1}M{from:.1} {c:.1}H{to:.1}M{to:.1} {a:.1}V{b:.1}\"/>",
                    a = middle - 4.0,
                    b = middle + 4.0,
                    c = middle
                );
            }
        }
        let value_at = left + scale(bar.end()) + 8.0;
        inner.push_str(&label(value_at, middle, "", std::slice::from_ref(value)));
        words.push(format!("{}: {value}", bar.name));
        top += height;
    }
    frame(
        "bars",
        id,
        title,
        &words.join("; "),
        (width, top + 4.0),
        &inner,
    )
}

/// Which parts of bars mean what.
pub fn legend(names: &[(&str, usize)]) -> String {
    let mut text = "<ul class=\"legend\">".to_owned();
    for (name, number) in names {
        let _ = write!(
            text,
            "<li><svg viewBox=\"0 0 28 12\" aria-hidden=\"true\"><rect width=\"28\" height=\"12\" fill=\"{}\"/></svg>{}</li>",
            colour(*number),
            escape(name)
        );
    }
    text + "</ul>"
}

/// A line through points.
pub struct Line {
    pub name: String,
    pub colour: usize,
    pub dashed: bool,
    pub points: Vec<(f64, f64)>,
}

/// How an axis is divided.
pub struct Axis {
    pub title: String,
    /// Where it has marks, and what stands there.
    pub ticks: Vec<(f64, String)>,
    pub logarithmic: bool,
    end: Option<f64>,
}

impl Axis {
    /// From 0 (or the lowest, if logarithmic) to `most`, with about five marks.
    pub fn new(title: &str, values: impl Iterator<Item = f64>, logarithmic: bool) -> Self {
        let values: Vec<f64> = values
            .filter(|value| value.is_finite() && *value > 0.0)
            .collect();
        let most = values.iter().copied().fold(0.0, f64::max).max(1e-3);
        let least = values
            .iter()
            .copied()
            .fold(f64::INFINITY, f64::min)
            .min(most);
        let ticks: Vec<f64> = if logarithmic {
            let (low, high) = (least.log10().floor(), most.log10().ceil());
            let mut marks = Vec::new();
            let mut decade = low;
            while decade <= high {
                marks.extend([1.0, 2.0, 5.0].map(|step| step * 10_f64.powf(decade)));
                decade += 1.0;
            }
            // One mark below all values, and one above.
            let from = marks.iter().rposition(|mark| *mark <= least).unwrap_or(0);
            let to = marks
                .iter()
                .position(|mark| *mark >= most)
                .unwrap_or(marks.len() - 1);
            marks[from..=to.max(from)].to_vec()
        } else {
            let step = nice_step(most / 5.0);
            (0..)
                .map(|i| f64::from(i) * step)
                .take_while(|mark| *mark < most + step)
                .collect()
        };
        Self {
            title: title.to_owned(),
            end: None,
            ticks: ticks
                .into_iter()
                .map(|mark| (mark, super::group::short(mark)))
                .collect(),
            logarithmic,
        }
    }

    /// Ends it at `end` instead of the mark behind it.
    pub fn ends_at(&mut self, end: f64) {
        self.ticks.retain(|(mark, _)| *mark <= end);
        self.end = Some(end);
    }

    fn place(&self, value: f64) -> f64 {
        let map = |value: f64| {
            if self.logarithmic {
                value.max(1e-9).ln()
            } else {
                value
            }
        };
        let ends = self.ticks.first().zip(self.ticks.last());
        let (from, to) = ends.map_or((0.0, 1.0), |(first, last)| (first.0, last.0));
        let (from, to) = (map(from), map(self.end.unwrap_or(to)));
        if to > from {
            (map(value) - from) / (to - from)
        } else {
            0.5
        }
    }
}

/// 1, 2 or 5 times a power of ten, not below `least`.
fn nice_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.max(1e-9).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0];
    let step = steps.into_iter().find(|step| step * power >= least);
    step.unwrap_or(10.0) * power
}

const TOP: f64 = 14.0;
const BOTTOM: f64 = 340.0;
const LEFT: f64 = 64.0;

/// Lines with their names at their ends; `marks` are drawn at points, `bands` of the axis behind: from, to, name.
pub fn lines(
    id: &str,
    title: &str,
    x: &Axis,
    y: &Axis,
    lines: &[Line],
    marks: bool,
    bands: &[(f64, f64, String)],
) -> String {
    let right = room(lines.iter().map(|line| line.name.as_str()), WIDTH * 0.3) + 14.0;
    let end = WIDTH - right;
    let across = |px: f64| LEFT + x.place(px) * (end - LEFT);
    let at = |(px, py): (f64, f64)| (across(px), BOTTOM - y.place(py) * (BOTTOM - TOP));
    let mut inner = String::new();
    for (i, (from, to, name)) in bands.iter().enumerate() {
        inner.push_str(&band(across(*from), across(*to), name, i % 2 == 0));
    }
    for (value, text) in &y.ticks {
        let (_, py) = at((0.0, *value));
        let _ = write!(
            inner,
            "<path class=\"grid\" d=\"M{LEFT} {py:.1}H{end:.0}\"/><text class=\"soft\" x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            py + 4.0,
            escape(text)
        );
    }
    for (value, text) in &x.ticks {
        let px = across(*value);
        let _ = write!(
            inner,
            "<path class=\"grid\" d=\"M{px:.1} {BOTTOM}v5\"/><text class=\"soft\" x=\"{px:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{}</text>",
            BOTTOM + 20.0,
            escape(text)
        );
    }
    let _ = write!(
        inner,
        "<text class=\"soft\" x=\"{end:.0}\" y=\"{:.0}\" text-anchor=\"end\">{}</text>",
        BOTTOM + 42.0,
        escape(&x.title),
    );
    let mut words = Vec::new();
    let mut ends = Vec::new();
    for line in lines {
        let mut path = String::new();
        let mut markers = String::new();
        for (k, point) in line.points.iter().enumerate() {
            let (px, py) = at(*point);
            let _ = write!(path, "{}{px:.1} {py:.1}", if k == 0 { 'M' } else { 'L' });
            if marks {
                let title = format!("{}: {}", line.name, number(point.1));
                markers.push_str(&marker(line, px, py, &title));
            }
        }
        let _ = write!(
            inner,
            "<path class=\"line\" d=\"{path}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2.25\"{}/>{markers}",
            colour(line.colour),
            if line.dashed {
                " stroke-dasharray=\"7 4\""
            } else {
                ""
            }
        );
        if let Some(last) = line.points.last() {
            ends.push((line, wrap(&line.name, right - 14.0), at(*last).1));
        }
        let values: Vec<String> = line.points.iter().map(|point| number(point.1)).collect();
        words.push(format!("{}: {}", line.name, values.join(", ")));
    }
    for ((line, name), middle) in apart(ends) {
        let style = format!("style=\"fill:{}\"", colour(line.colour));
        inner.push_str(&label(end + 10.0, middle, &style, &name));
    }
    // A legend with more lines than the picture is high makes it higher.
    let names: usize = lines
        .iter()
        .map(|line| wrap(&line.name, right - 14.0).len())
        .sum();
    let height = (BOTTOM + 52.0).max(TOP + TEXT * float(names) + 8.0);
    frame(
        "lines",
        id,
        title,
        &words.join("; "),
        (WIDTH, height),
        &inner,
    )
}

/// Names beside the ends of lines, moved until none lies on another: each with the height of its middle.
fn apart<T>(mut ends: Vec<(T, Vec<String>, f64)>) -> Vec<((T, Vec<String>), f64)> {
    ends.sort_by(|a, b| a.2.total_cmp(&b.2));
    let heights: Vec<f64> = ends.iter().map(|end| TEXT * float(end.1.len())).collect();
    let mut places: Vec<f64> = ends.iter().map(|end| end.2).collect();
    let between = |i: usize| f64::midpoint(heights[i], heights[i + 1]);
    let mut least = TOP;
    for i in 0..places.len() {
        places[i] = places[i].max(least);
        least = if i + 1 < places.len() {
            places[i] + between(i)
        } else {
            least
        };
    }
    let lowest = BOTTOM.max(TOP + heights.iter().sum::<f64>());
    let mut most = lowest;
    for i in (0..places.len()).rev() {
        places[i] = places[i].min(most);
        most = if i > 0 {
            places[i] - between(i - 1)
        } else {
            most
        };
    }
    let ends = ends.into_iter().map(|(line, name, _)| (line, name));
    ends.zip(places).collect()
}

/// A circle, square, triangle or diamond; hollow on a dashed line.
fn marker(line: &Line, x: f64, y: f64, title: &str) -> String {
    const R: f64 = 4.5;
    let shape = match line.colour % 4 {
        0 => format!("M{:.1} {y:.1}a{R} {R} 0 1 0 9 0a{R} {R} 0 1 0 -9 0", x - R),
        1 => format!("M{:.1} {:.1}h9v9h-9z", x - R, y - R),
        2 => format!("M{x:.1} {:.1}l5.5 9.5h-11z", y - 6.0),
        _ => format!("M{x:.1} {:.1}l6 6l-6 6l-6 -6z", y - 6.0),
    };
    let colour = colour(line.colour);
    let fill = if line.dashed { "var(--bg)" } else { &colour };
    format!(
        "<path class=\"marker\" d=\"{shape}\" fill=\"{fill}\" stroke=\"{colour}\" stroke-width=\"1.5\"><title>{}</title></path>",
        escape(title)
    )
}

/// A band of the time axis, as of a round.
fn band(from: f64, to: f64, name: &str, dark: bool) -> String {
    let mut text = format!(
        "<rect class=\"band\" x=\"{from:.1}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{:.0}\" fill=\"{}\" opacity=\"{}\"/>",
        (to - from).max(0.5),
        BOTTOM - TOP,
        colour(6),
        if dark { "0.12" } else { "0.03" }
    );
    // A name that does not fit its band would lie on the next one's.
    if to - from > CHARACTER * float(name.chars().count()) {
        let attributes = "class=\"soft\" text-anchor=\"middle\"";
        let middle = f64::midpoint(from, to);
        text.push_str(&label(middle, TOP + 12.0, attributes, &[name.to_owned()]));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_of_a_run_becomes_markup() {
        assert_eq!(
            escape("<a href=\"x\" b='y'>&"),
            "&lt;a href=&quot;x&quot; b=&#39;y&#39;&gt;&amp;"
        );
        assert_eq!(escape("\u{0}\u{1b}[1m é"), "\u{fffd}\u{fffd}[1m é");
    }

    #[test]
    fn marks_enclose_the_values() {
        for (values, logarithmic) in [
            (vec![0.3, 7.0], true),
            (vec![3.0], false),
            (vec![1000.0, 1000.0], true),
            (vec![], true),
        ] {
            let axis = Axis::new("t", values.clone().into_iter(), logarithmic);
            assert!(!axis.ticks.is_empty());
            for value in values {
                assert!(
                    (-1e-9..=1.0 + 1e-9).contains(&axis.place(value)),
                    "{value} {:?}",
                    axis.ticks
                );
            }
        }
    }

    #[test]
    fn names_of_lines_do_not_lie_on_each_other() {
        let name = vec!["two".to_owned(), "lines".to_owned()];
        for height in [330.0, 150.0, TOP] {
            let ends = (0..6).map(|i| (i, name.clone(), height)).collect();
            let places = apart(ends);
            for pair in places.windows(2) {
                assert!(pair[1].1 - pair[0].1 >= 2.0 * TEXT - 0.1, "{places:?}");
            }
            let inside = |place: &&(_, f64)| (TOP..=BOTTOM).contains(&place.1);
            assert_eq!(places.iter().filter(inside).count(), 6, "{places:?}");
        }
    }

    #[test]
    fn names_of_any_length_stay_in_the_picture() {
        let long =
            "QEMU compress 9, no multifd, zero pages: dsa-accel, accel-path=dsa:/dev/dsa/wq0.0";
        for name in [long, &"x".repeat(200), "a", ""] {
            let bar = Bar {
                name: name.to_owned(),
                parts: Vec::new(),
                spread: None,
            };
            for width in [WIDTH, HALF] {
                let picture = bars("b", "t", "s", std::slice::from_ref(&bar), width);
                let texts = picture.split("<text x=\"").skip(1);
                let texts = texts.filter(|text| text.contains("text-anchor=\"end\""));
                let mut said = String::new();
                for text in texts {
                    let end: f64 = text.split('"').next().unwrap().parse().unwrap();
                    let line = text.split(['>', '<']).nth(1).unwrap();
                    assert!(
                        line.chars().count() as f64 * CHARACTER <= end,
                        "{line} to {end}"
                    );
                    said.push_str(line);
                }
                let squeezed = |text: &str| text.split_whitespace().collect::<String>();
                assert_eq!(squeezed(&said), squeezed(name));
            }
        }
    }
}
