//! The limited link of flag `--link`: a rate, an optional delay, and later changes of the rate.

use std::str::FromStr;
use std::time::Duration;

use hotlift_terminal::progress::rounded;

use crate::stats::rate_text;

/// A link's rate and delay, and the times at which its rate changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    text: String,
    rate: Option<u64>,
    delay: Option<Duration>,
    changes: Vec<(Duration, u64)>,
}

impl FromStr for Link {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            "expected a rate, perhaps a delay, and perhaps other rates with the time from which they hold, as in \
             1gbit or 200mbit,2ms or 10gbit,500mbit@1s,10gbit@4s; or unlimited"
                .to_owned()
        };
        let mut parts = text.split(',').peekable();
        let first = parts.next().unwrap_or_default();
        let rate = match first {
            "unlimited" => None,
            rate => Some(bits(rate).ok_or_else(expected)?),
        };
        let delay = parts.next_if(|part| !part.contains('@'));
        let delay = delay.map(humantime::parse_duration).transpose();
        let mut changes: Vec<(Duration, u64)> = Vec::new();
        for part in parts {
            let change = part.split_once('@').and_then(|(rate, at)| {
                let at = humantime::parse_duration(at).ok()?;
                let is_later = changes.last().map_or(Duration::ZERO, |last| last.0) < at;
                Some((at, bits(rate)?)).filter(|_| is_later)
            });
            changes.push(change.ok_or_else(expected)?);
        }
        let link = Self {
            text: text.to_owned(),
            rate,
            delay: delay.map_err(|_| expected())?,
            changes,
        };
        // Delays and changes use a token bucket, which needs a rate.
        let is_shaped = link.delay.is_some() || !link.changes.is_empty();
        (rate.is_some() || !is_shaped)
            .then_some(link)
            .ok_or_else(expected)
    }
}

/// Parses a rate in the units of tc(8), and returns bits per second; `None` if the text is invalid.
fn bits(text: &str) -> Option<u64> {
    let units = [("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)];
    units.iter().find_map(|(unit, factor)| {
        let number = text.strip_suffix(unit)?;
        let digits = |byte: u8| byte.is_ascii_digit() || byte == b'.';
        let number: f64 = number.bytes().all(digits).then(|| number.parse().ok())??;
        // The limit is above the rate of any link, and far below tc's largest number.
        let bits = rounded(number * factor);
        (1..1_000_000_000_000_000).contains(&bits).then_some(bits)
    })
}

impl Link {
    /// Returns the text of the flag as typed.
    pub fn text(&self) -> String {
        self.text.clone()
    }

    /// Returns the rate at the start of a run, in bits per second; `None` without a limit.
    pub fn rate(&self) -> Option<u64> {
        self.rate
    }

    /// Returns the delay in each direction; `None` without a delay.
    pub fn delay(&self) -> Option<Duration> {
        self.delay
    }

    /// Returns the later rates, in order of time: the time after the request to migrate, and the rate in bits per
    /// second.
    pub fn changes(&self) -> &[(Duration, u64)] {
        &self.changes
    }

    /// Returns a description for reports: "10 Gbit/s, 500 Mbit/s from 1s".
    pub fn words(&self) -> String {
        let rate = |bits: u64| rate_text(Some(bits as f64 / 8.0));
        let mut words = vec![self.rate.map_or_else(|| rate_text(None), rate)];
        words.extend(
            self.changes.iter().map(|(at, bits)| {
                format!("{} from {}", rate(*bits), humantime::format_duration(*at))
            }),
        );
        words.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_has_a_rate_and_optionally_a_delay_and_changes() {
        let link: Link = "200mbit,2ms".parse().unwrap();
        assert_eq!(link.rate(), Some(200_000_000));
        assert_eq!(link.delay(), Some(Duration::from_millis(2)));
        assert_eq!(
            "2.5gbit".parse::<Link>().unwrap().rate(),
            Some(2_500_000_000)
        );
        assert_eq!("unlimited".parse::<Link>().unwrap().rate(), None);
        let link: Link = "1gbit,1ms,200mbit@500ms,1gbit@2s".parse().unwrap();
        assert_eq!(link.delay(), Some(Duration::from_millis(1)));
        let changes = [(500, 200_000_000), (2000, 1_000_000_000)];
        let changes = changes.map(|(at, rate)| (Duration::from_millis(at), rate));
        assert_eq!(link.changes(), changes);
        assert_eq!(
            link.words(),
            "1 Gbit/s, 200 Mbit/s from 500ms, 1 Gbit/s from 2s"
        );
        for bad in [
            "",
            "1",
            "0mbit",
            "1gbit,",
            "1gbit,fast",
            "mbit",
            "99999999999999gbit",
            "-1gbit",
            "1e3gbit",
            "infgbit",
            "unlimited,1ms",
            "unlimited,1gbit@1s",
            "1gbit,unlimited@1s",
            "1gbit,200mbit@2s,1gbit@2s",
            "1gbit,200mbit@0s",
            "1gbit,200mbit@1s,1ms",
            "1gbit,@1s",
        ] {
            assert!(bad.parse::<Link>().is_err(), "{bad}");
        }
    }
}
