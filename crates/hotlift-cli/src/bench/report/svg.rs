//! Pictures as inline SVG: bars and lines, with titles for those who do not see them.
//!
//! Colours are custom properties of the page, so that they follow light and dark. No colour stands alone: bars and
//! lines have their names beside them, and lines have dashes and markers of their own.

use std::fmt::Write;

use crate::bench::stats::number;

/// Width of all pictures, in their own units.
pub const WIDTH: f64 = 960.0;

/// Lines that can be told apart.
const DASHES: [&str; 4] = ["", "7 4", "2 4", "10 4 2 4"];

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
fn frame(kind: &str, id: &str, title: &str, description: &str, height: f64, inner: &str) -> String {
    let (title, description) = (escape(title), escape(description));
    format!(
        "<div class=\"wide\"><svg class=\"{kind}\" viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" \
         aria-labelledby=\"{id}-t {id}-d\"><title id=\"{id}-t\">{title}</title><desc id=\"{id}-d\">{description}</desc>\
         {inner}</svg></div>"
    )
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

/// Horizontal bars with their values.
pub fn bars(id: &str, title: &str, unit: &str, bars: &[Bar]) -> String {
    const ROW: f64 = 27.0;
    const LEFT: f64 = 210.0;
    const RIGHT: f64 = 150.0;
    let most = bars
        .iter()
        .map(Bar::end)
        .fold(0.0, f64::max)
        .max(f64::MIN_POSITIVE);
    let scale = |value: f64| value / most * (WIDTH - LEFT - RIGHT);
    let mut inner = String::new();
    let mut words = Vec::new();
    for (i, bar) in bars.iter().enumerate() {
        let y = f64::from(u32::try_from(i).unwrap_or(0)) * ROW + 4.0;
        let middle = y + ROW / 2.0;
        let _ = write!(
            inner,
            "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 10.0,
            middle + 2.0,
            escape(&bar.name)
        );
        let mut x = LEFT;
        for part in &bar.parts {
            let width = scale(part.value).max(0.5);
            let _ = write!(
                inner,
                "<rect class=\"bar\" x=\"{x:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{:.1}\" fill=\"{}\"><title>{}: {} {}</title></rect>",
                y + 4.0,
                ROW - 10.0,
                colour(part.colour),
                escape(&part.name),
                number(part.value),
                escape(unit)
            );
            x += width;
        }
        if let Some((lowest, highest)) = bar.spread.filter(|(lowest, highest)| lowest < highest) {
            let (from, to) = (LEFT + scale(lowest), LEFT + scale(highest));
            let _ = write!(
                inner,
                "<path class=\"spread\" fill=\"none\" d=\"M{from:.1} {a:.1}V{b:.1}M{from:.1} {c:.1}H{to:.1}M{to:.1} {a:.1}V{b:.1}\"/>",
                a = middle - 5.0,
                b = middle + 3.0,
                c = middle - 1.0
            );
        }
        let value = format!("{} {unit}", number(bar.sum()));
        let _ = write!(
            inner,
            "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            LEFT + scale(bar.end()) + 8.0,
            middle + 2.0,
            escape(&value)
        );
        words.push(format!("{}: {value}", bar.name));
    }
    let height = ROW * f64::from(u32::try_from(bars.len()).unwrap_or(0)) + 8.0;
    frame("bars", id, title, &words.join("; "), height, &inner)
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
    pub points: Vec<(f64, f64)>,
}

/// How an axis is divided.
pub struct Axis {
    pub title: String,
    /// Where it has marks, and what stands there.
    pub ticks: Vec<(f64, String)>,
    pub logarithmic: bool,
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
            ticks: ticks
                .into_iter()
                .map(|mark| (mark, super::group::short(mark)))
                .collect(),
            logarithmic,
        }
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
        let (from, to) = ends.map_or((0.0, 1.0), |(first, last)| (map(first.0), map(last.0)));
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
const RIGHT: f64 = 150.0;

/// Lines with their names at their ends; `marks` are drawn at points, `extra` is drawn behind.
pub fn lines(
    id: &str,
    title: &str,
    x: &Axis,
    y: &Axis,
    lines: &[Line],
    marks: bool,
    extra: &str,
) -> String {
    let at = |(px, py): (f64, f64)| {
        (
            LEFT + x.place(px) * (WIDTH - LEFT - RIGHT),
            BOTTOM - y.place(py) * (BOTTOM - TOP),
        )
    };
    let mut inner = extra.to_owned();
    for (value, text) in &y.ticks {
        let (_, py) = at((x.ticks.first().map_or(0.0, |tick| tick.0), *value));
        let _ = write!(
            inner,
            "<path class=\"grid\" d=\"M{LEFT} {py:.1}H{:.0}\"/><text class=\"soft\" x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 8.0,
            py + 4.0,
            escape(text)
        );
    }
    for (value, text) in &x.ticks {
        let (px, _) = at((*value, y.ticks.first().map_or(0.0, |tick| tick.0)));
        let _ = write!(
            inner,
            "<path class=\"grid\" d=\"M{px:.1} {BOTTOM}v5\"/><text class=\"soft\" x=\"{px:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{}</text>",
            BOTTOM + 20.0,
            escape(text)
        );
    }
    let _ = write!(
        inner,
        "<text class=\"soft\" x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{}</text><text class=\"soft\" transform=\"translate(14 {:.0}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        WIDTH - RIGHT,
        BOTTOM + 42.0,
        escape(&x.title),
        (TOP + BOTTOM) / 2.0,
        escape(&y.title)
    );
    let mut words = Vec::new();
    let mut ends = Vec::new();
    for (i, line) in lines.iter().enumerate() {
        let mut path = String::new();
        let mut markers = String::new();
        for (k, point) in line.points.iter().enumerate() {
            let (px, py) = at(*point);
            let _ = write!(path, "{}{px:.1} {py:.1}", if k == 0 { 'M' } else { 'L' });
            if marks {
                markers.push_str(&marker(
                    i,
                    px,
                    py,
                    &format!("{}: {}", line.name, number(point.1)),
                ));
            }
        }
        let _ = write!(
            inner,
            "<path class=\"line\" d=\"{path}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2.25\" stroke-dasharray=\"{}\"/>{markers}",
            colour(i),
            DASHES[i / COLOURS.min(4) % DASHES.len()]
        );
        if let Some(last) = line.points.last() {
            ends.push((i, at(*last)));
        }
        let values: Vec<String> = line.points.iter().map(|point| number(point.1)).collect();
        words.push(format!("{}: {}", line.name, values.join(", ")));
    }
    for (i, x, y) in apart(ends) {
        let _ = write!(
            inner,
            "<text x=\"{:.1}\" y=\"{:.1}\" style=\"fill:{}\">{}</text>",
            x + 10.0,
            y + 4.0,
            colour(i),
            escape(&lines[i].name)
        );
    }
    frame("lines", id, title, &words.join("; "), BOTTOM + 52.0, &inner)
}

/// Names at the ends of lines, moved until none lies on another.
fn apart(mut ends: Vec<(usize, (f64, f64))>) -> Vec<(usize, f64, f64)> {
    const LINE: f64 = 16.0;
    ends.sort_by(|a, b| a.1.1.total_cmp(&b.1.1));
    let mut places: Vec<f64> = ends.iter().map(|end| end.1.1).collect();
    for i in 1..places.len() {
        places[i] = places[i].max(places[i - 1] + LINE);
    }
    let lowest = BOTTOM.max(LINE * f64::from(u32::try_from(places.len()).unwrap_or(0)));
    let mut limit = lowest;
    for place in places.iter_mut().rev() {
        *place = place.min(limit);
        limit = *place - LINE;
    }
    ends.into_iter()
        .zip(places)
        .map(|((i, (x, _)), y)| (i, x, y))
        .collect()
}

/// A circle, square, triangle or diamond.
fn marker(kind: usize, x: f64, y: f64, title: &str) -> String {
    const R: f64 = 4.5;
    let shape = match kind % 4 {
        0 => format!("M{:.1} {y:.1}a{R} {R} 0 1 0 9 0a{R} {R} 0 1 0 -9 0", x - R),
        1 => format!("M{:.1} {:.1}h9v9h-9z", x - R, y - R),
        2 => format!("M{x:.1} {:.1}l5.5 9.5h-11z", y - 6.0),
        _ => format!("M{x:.1} {:.1}l6 6l-6 6l-6 -6z", y - 6.0),
    };
    format!(
        "<path class=\"marker\" d=\"{shape}\" fill=\"{}\"><title>{}</title></path>",
        colour(kind),
        escape(title)
    )
}

/// Bands of the time axis, as of rounds: from, to, and a name for each.
pub fn bands(x: &Axis, bands: &[(f64, f64, String)]) -> String {
    let mut text = String::new();
    for (i, (from, to, name)) in bands.iter().enumerate() {
        let at = |value: f64| LEFT + x.place(value) * (WIDTH - LEFT - RIGHT);
        let (from, to) = (at(*from), at(*to));
        let _ = write!(
            text,
            "<rect class=\"band\" x=\"{from:.1}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{:.0}\" fill=\"{}\" opacity=\"{}\"/>",
            (to - from).max(0.5),
            BOTTOM - TOP,
            colour(6),
            if i % 2 == 0 { "0.12" } else { "0.03" }
        );
        // A name that does not fit its band would lie on the next one's.
        if to - from > 8.0 * f64::from(u32::try_from(name.len()).unwrap_or(0)) {
            let _ = write!(
                text,
                "<text class=\"soft\" x=\"{:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{}</text>",
                f64::midpoint(from, to),
                TOP + 16.0,
                escape(name)
            );
        }
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
        let places = apart((0..6).map(|i| (i, (0.0, 330.0))).collect());
        for pair in places.windows(2) {
            assert!(pair[1].2 - pair[0].2 >= 15.9, "{places:?}");
        }
        assert!(places.iter().all(|place| place.2 <= BOTTOM), "{places:?}");
    }
}
