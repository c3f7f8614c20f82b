//! Median and range of a few numbers.
//!
//! The crate statrs would add distributions and number traits, only for the median of some five runs.

/// Median, lowest and highest of some numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// The median; for an even count, the mean of the two values in the middle.
    pub median: f64,
    /// The lowest value.
    pub lowest: f64,
    /// The highest value.
    pub highest: f64,
}

/// Returns the spread of `values`; `None` if there are no values, or one is not finite.
pub fn spread(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
    let mut values: Vec<f64> = values.into_iter().collect();
    if values.iter().any(|value| !value.is_finite()) {
        return None;
    }
    values.sort_by(f64::total_cmp);
    let (lowest, highest) = (*values.first()?, *values.last()?);
    let half = values.len() / 2;
    let median = if values.len().is_multiple_of(2) {
        f64::midpoint(values[half - 1], values[half])
    } else {
        values[half]
    };
    Some(Spread {
        median,
        lowest,
        highest,
    })
}

impl Spread {
    /// Returns "12.3 (11.0–14.1)": the median and the range. Omits the range if both of its ends round to the same
    /// text.
    pub fn text(&self) -> String {
        let (median, lowest, highest) = (
            number(self.median),
            number(self.lowest),
            number(self.highest),
        );
        if lowest == highest {
            return median;
        }
        format!("{median} ({lowest}–{highest})")
    }
}

/// Formats a number with about three digits.
pub fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Returns the spread of `values` as text; "-" if there are no values or one is not finite.
pub fn text(values: impl IntoIterator<Item = f64>) -> String {
    spread(values).map_or("-".to_owned(), |spread| spread.text())
}

/// Formats a rate in bytes per second as bits: "1 Gbit/s"; "no limit" for `None`.
pub fn rate_text(rate: Option<f64>) -> String {
    match rate.map(|bytes| bytes * 8.0) {
        None => "no limit".to_owned(),
        Some(bits) if bits >= 1e9 => format!("{} Gbit/s", short(bits / 1e9)),
        Some(bits) => format!("{} Mbit/s", short(bits / 1e6)),
    }
}

/// Formats a number with at most two decimals, without trailing zeros, and with none from 100 on.
pub fn short(value: f64) -> String {
    if value >= 100.0 {
        return format!("{value:.0}");
    }
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Formats a published figure in its published precision; "-" for `None`.
pub fn plain(figure: Option<f64>) -> String {
    match figure.filter(|figure| figure.is_finite()) {
        None => "-".to_owned(),
        Some(figure) => format!("{figure}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_value_and_an_empty_list_has_none() {
        let of = |values: &[f64]| spread(values.iter().copied());
        assert_eq!(of(&[3.0, 1.0, 2.0]).unwrap().median, 2.0);
        assert_eq!(of(&[4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[1.0, f64::NAN]), None);
        assert_eq!(text([5.0, 5.0]), "5.00");
        assert_eq!(text([1234.0, 1.0, 20.0]), "20.0 (1.00–1234)");
    }
}
