//! A real limit on one machine: source and destination in two network namespaces, joined by a veth pair
//! with a token bucket at each end.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::Duration;

use hotlift_console::error::ConsoleError;
use hotlift_console::pair::Place;

use crate::error::BenchError;

/// RFC 5737: addresses for examples, that no route leads to.
const ADDRESSES: [&str; 2] = ["192.0.2.1", "192.0.2.2"];

/// tc-tbf(8): the bucket must hold what the rate carries in one timer tick (HZ=100), and some more; and
/// a packet of 64 KiB before segmentation.
const BURST: Duration = Duration::from_millis(12);
const LEAST_BURST: u64 = 128 << 10;

/// Longest queue before the bucket, as a switch's port has it.
const QUEUE: &str = "20ms";

/// `--link`: a rate, and a delay where one is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    text: String,
    bits_per_second: u64,
    delay: Option<Duration>,
}

impl FromStr for Link {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected =
            || "expected a rate and perhaps a delay, as in 1gbit or 200mbit,2ms".to_owned();
        let (rate, delay) = match text.split_once(',') {
            Some((rate, delay)) => (rate, Some(delay)),
            None => (text, None),
        };
        let units = [
            ("kbit", 1_000),
            ("mbit", 1_000_000),
            ("gbit", 1_000_000_000),
        ];
        let bits = units.iter().find_map(|(unit, factor)| {
            let number: u64 = rate.strip_suffix(unit)?.parse().ok()?;
            number.checked_mul(*factor).filter(|&bits| bits > 0)
        });
        let delay = delay.map(humantime::parse_duration).transpose();
        Ok(Self {
            text: text.to_owned(),
            bits_per_second: bits.ok_or_else(expected)?,
            delay: delay.map_err(|_| expected())?,
        })
    }
}

/// The two namespaces; they have no name, and end with the processes that hold them.
#[derive(Debug)]
pub struct Joined {
    holders: [Holder; 2],
}

impl Link {
    /// As typed.
    pub fn text(&self) -> String {
        self.text.clone()
    }

    /// Makes it. Needs root.
    ///
    /// # Errors
    /// If namespaces or limits cannot be made; of the delay if this kernel has no netem.
    pub fn set_up(&self) -> Result<Joined, BenchError> {
        let holders = [Holder::start()?, Holder::start()?];
        let [first, second] = &holders;
        run(&[
            "ip",
            "link",
            "add",
            "name",
            "veth",
            "netns",
            &first.pid(),
            "type",
            "veth",
            "peer",
            "name",
            "veth",
            "netns",
            &second.pid(),
        ])?;
        for (holder, address) in holders.iter().zip(ADDRESSES) {
            holder.run(&["ip", "link", "set", "lo", "up"])?;
            holder.run(&[
                "ip",
                "address",
                "add",
                &format!("{address}/24"),
                "dev",
                "veth",
            ])?;
            holder.run(&["ip", "link", "set", "veth", "up"])?;
            let rate = format!("{}bit", self.bits_per_second);
            let burst = u128::from(self.bits_per_second / 8) * BURST.as_millis() / 1000;
            let burst = u64::try_from(burst).unwrap_or(u64::MAX).max(LEAST_BURST);
            holder.run(&[
                "tc",
                "qdisc",
                "add",
                "dev",
                "veth",
                "root",
                "handle",
                "1:",
                "tbf",
                "rate",
                &rate,
                "burst",
                &burst.to_string(),
                "latency",
                QUEUE,
            ])?;
            if let Some(delay) = self.delay {
                let delay = format!("{}us", delay.as_micros());
                let netem = [
                    "tc", "qdisc", "add", "dev", "veth", "parent", "1:", "handle", "10:", "netem",
                    "delay", &delay,
                ];
                holder.run(&netem).map_err(|error| BenchError::Link {
                    problem: format!(
                        "the delay of {delay} cannot be made, for this kernel has no netem \
                         (CONFIG_NET_SCH_NETEM): leave it out; {}",
                        error.line()
                    ),
                })?;
            }
        }
        Ok(Joined { holders })
    }
}

impl Joined {
    /// Where source and destination are to be started.
    pub fn place(&self) -> Place {
        let [source, destination] = &self.holders;
        Place {
            source_prefix: source.enter(),
            destination_prefix: destination.enter(),
            security: Vec::new(),
            address: Some(ADDRESSES[1].to_owned()),
        }
    }
}

/// A process that lives in a network namespace of its own, and thereby keeps it.
#[derive(Debug)]
struct Holder(Child);

impl Holder {
    fn start() -> Result<Self, BenchError> {
        let failed = |source| ConsoleError::Process {
            what: "setpriv … unshare --net",
            source,
        };
        // It ends with this process however that ends. The word comes from within: the namespace stands.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "unshare", "--net", "sh", "-c"])
            .arg("echo stands; exec sleep infinity")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let mut holder = Self(child);
        let mut word = [0; 6];
        let stands = holder
            .0
            .stdout
            .take()
            .is_some_and(|mut stdout| stdout.read_exact(&mut word).is_ok());
        if !stands {
            return Err(BenchError::Link {
                problem: "no network namespace can be made: --link needs root".to_owned(),
            });
        }
        Ok(holder)
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }

    fn enter(&self) -> Vec<String> {
        vec![
            "nsenter".to_owned(),
            format!("--net=/proc/{}/ns/net", self.pid()),
        ]
    }

    fn run(&self, words: &[&str]) -> Result<(), BenchError> {
        let enter = self.enter();
        let all: Vec<&str> = enter
            .iter()
            .map(String::as_str)
            .chain(words.iter().copied())
            .collect();
        run(&all)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run(words: &[&str]) -> Result<(), BenchError> {
    let problem = |why: &str| BenchError::Link {
        problem: format!("'{}' failed: {}", words.join(" "), why.trim()),
    };
    let (first, rest) = words.split_first().ok_or_else(|| problem("no words"))?;
    let output = Command::new(first)
        .args(rest)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| problem(&error.to_string()))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(problem(
            &String::from_utf8_lossy(&output.stderr).replace('\n', " "),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_has_a_rate_and_perhaps_a_delay() {
        let link: Link = "200mbit,2ms".parse().unwrap();
        assert_eq!(link.bits_per_second, 200_000_000);
        assert_eq!(link.delay, Some(Duration::from_millis(2)));
        assert_eq!("1gbit".parse::<Link>().unwrap().delay, None);
        for bad in [
            "",
            "1",
            "0mbit",
            "1gbit,",
            "1gbit,fast",
            "mbit",
            "99999999999999gbit",
        ] {
            assert!(bad.parse::<Link>().is_err(), "{bad}");
        }
    }
}
