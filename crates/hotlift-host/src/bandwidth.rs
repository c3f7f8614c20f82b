//! `--bandwidth`: as operators write it.

/// A link's rate in bytes a second: `10gbit`, `500mbit`, `100kbit` as `tc` has it, or bytes a second with a suffix K,
/// M, G or T as `max-bandwidth` takes it.
pub fn parse(text: &str) -> Result<f64, String> {
    let lower = text.to_ascii_lowercase();
    let bits = [("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)];
    for (unit, factor) in bits {
        if let Some(number) = lower.strip_suffix(unit)
            && let Ok(number) = number.trim_end().parse::<f64>()
            && number.is_finite()
            && number > 0.0
        {
            return Ok(number * factor / 8.0);
        }
    }
    match hotlift::options::parse_size(text) {
        Some(bytes) if bytes > 0 => Ok(bytes as f64),
        _ => Err("expected a rate as in 10gbit, 500mbit, or bytes a second as in 1G".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn rates_are_read_in_bits_and_in_bytes() {
        for (text, bytes) in [
            ("10gbit", 1.25e9),
            ("2.5Gbit", 312.5e6),
            ("100mbit", 12.5e6),
            ("8kbit", 1e3),
            ("1G", 1_073_741_824.0),
            ("125000000", 125e6),
        ] {
            let got = parse(text).unwrap();
            assert!((got - bytes).abs() < 1.0, "{text}: {got}");
        }
        for text in [
            "",
            "0",
            "gbit",
            "-1gbit",
            "infgbit",
            "nangbit",
            "10 parsecs",
            "0gbit",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
