//! A real link limit on one machine. Source and destination run in two network namespaces, joined by a veth pair with a
//! token bucket at each end.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use hotlift_command::pair::ProcessPlace;
use hotlift_terminal::error::TerminalError;

use crate::child_process::ChildProcess;
use crate::error::BenchError;
use crate::link::Link;

/// Addresses of both ends: documentation addresses (RFC 5737), which are not routed.
const ADDRESSES: [&str; 2] = ["192.0.2.1", "192.0.2.2"];

/// Size of the token bucket, as time at the link's rate. tc-tbf(8): the bucket must hold more than the bytes of one
/// timer tick (10 ms with HZ=100), and at least a packet of 64 KiB before segmentation.
const BURST: Duration = Duration::from_millis(12);
const MIN_BURST: u64 = 128 << 10;

/// Limit of the queue in front of the token bucket, as time at the link's rate; similar to a switch port.
const QUEUE: &str = "20ms";

/// Command that selects TCP Reno as congestion control on both ends, independent of the host's setting. Measured with
/// 256 MiB over 5 Gbit/s: 440 ms with Reno; 440 to 760 ms and up to three times the CPU with BBR. Every kernel has
/// Reno, and every namespace allows it. With delays as short as these CUBIC, Linux' default, sends as Reno does (RFC
/// 9438, 4.3).
const CONGESTION_CONTROL: &str = "echo reno >/proc/sys/net/ipv4/tcp_congestion_control";

/// Two joined network namespaces. They are anonymous, and the kernel removes them when their processes end.
#[derive(Debug)]
pub struct NamespacePair {
    holders: [Holder; 2],
}

impl NamespacePair {
    /// Creates the namespaces, without a limit. Needs root.
    ///
    /// # Errors
    /// If the namespaces cannot be created.
    pub fn make() -> Result<Self, BenchError> {
        let holders = [Holder::start()?, Holder::start()?];
        let [first, second] = &holders;
        let (first, second) = (first.pid(), second.pid());
        run(&words(&format!(
            "ip link add name veth netns {first} type veth peer name veth netns {second}"
        )))?;
        for (holder, address) in holders.iter().zip(ADDRESSES) {
            for command in [
                "ip link set lo up",
                &format!("ip address add {address}/24 dev veth"),
                "ip link set veth up",
            ] {
                holder.end().run(command)?;
            }
            holder.end().run_words(&["sh", "-c", CONGESTION_CONTROL])?;
        }
        Ok(Self { holders })
    }

    /// Returns the namespaces as the place where both sides of a migration start `program`.
    pub fn place(&self, program: PathBuf) -> ProcessPlace {
        let [source, destination] = &self.holders;
        ProcessPlace {
            source_prefix: source.end().enter,
            destination_prefix: destination.end().enter,
            address: Some(ADDRESSES[1].to_owned()),
            ..ProcessPlace::new(program)
        }
    }

    /// Returns the two ends of the link between the namespaces.
    pub fn ends(&self) -> Ends {
        Ends(self.holders.each_ref().map(Holder::end))
    }
}

/// The two ends of a link; the rate and delay of each end can be limited.
#[derive(Debug, Clone)]
pub struct Ends([End; 2]);

impl Ends {
    /// Limits both ends to the start rate and delay of `link`, and replaces any earlier limit.
    ///
    /// # Errors
    /// If `tc` fails; for a delay, also if this kernel has no netem.
    pub fn shape(&self, link: &Link) -> Result<(), BenchError> {
        for end in &self.0 {
            // Fails on the first call, when there is no qdisc. On later calls it also drops packets that are still
            // queued.
            let _ = end.run("tc qdisc del dev veth root");
            let Some(rate) = link.rate() else { continue };
            end.run(&bucket("add", rate))?;
            if let Some(delay) = link.delay() {
                let delay = format!("{}us", delay.as_micros());
                let netem =
                    format!("tc qdisc add dev veth parent 1: handle 10: netem delay {delay}");
                end.run(&netem).map_err(|error| BenchError::Link {
                    problem: format!(
                        "the delay of {delay} cannot be made, for this kernel has no netem \
                         (CONFIG_NET_SCH_NETEM): leave it out; {}",
                        error.line()
                    ),
                })?;
            }
        }
        Ok(())
    }

    /// Changes the rate of both ends, in bits per second. Queued packets stay queued.
    ///
    /// # Errors
    /// If `tc` fails.
    pub fn change(&self, rate: u64) -> Result<(), BenchError> {
        self.0
            .iter()
            .try_for_each(|end| end.run(&bucket("change", rate)))
    }
}

/// Returns the command that adds or changes a token bucket, depending on `verb`.
fn bucket(verb: &str, rate: u64) -> String {
    let burst = u128::from(rate / 8) * BURST.as_millis() / 1000;
    let burst = u64::try_from(burst).unwrap_or(u64::MAX).max(MIN_BURST);
    format!(
        "tc qdisc {verb} dev veth root handle 1: tbf rate {rate}bit burst {burst} latency {QUEUE}"
    )
}

/// One end of the link: the command that enters its namespace.
#[derive(Debug, Clone)]
struct End {
    enter: Vec<String>,
}

impl End {
    fn run(&self, command: &str) -> Result<(), BenchError> {
        self.run_words(&words(command))
    }

    fn run_words(&self, words: &[&str]) -> Result<(), BenchError> {
        let enter = self.enter.iter().map(String::as_str);
        let all: Vec<&str> = enter.chain(words.iter().copied()).collect();
        run(&all)
    }
}

fn words(command: &str) -> Vec<&str> {
    command.split(' ').collect()
}

/// A process in a new network namespace, which exists as long as the process runs.
#[derive(Debug)]
struct Holder(ChildProcess);

impl Holder {
    fn start() -> Result<Self, BenchError> {
        let failed = TerminalError::process("setpriv … unshare --net");
        // The process prints from inside the namespace. When its output arrives, the namespace exists.
        let words = [
            "unshare",
            "--net",
            "sh",
            "-c",
            "echo stands; exec sleep infinity",
        ];
        let words = words.map(OsString::from);
        let holder = ChildProcess::start(&[], words, Stdio::piped(), Path::new("/dev/null"));
        let mut holder = holder.map_err(failed)?;
        let mut word = [0; 6];
        let stands = holder
            .child
            .stdout
            .take()
            .is_some_and(|mut stdout| stdout.read_exact(&mut word).is_ok());
        if !stands {
            return Err(BenchError::Link {
                problem: "no network namespace can be made: --link needs root".to_owned(),
            });
        }
        Ok(Self(holder))
    }

    fn pid(&self) -> String {
        self.0.child.id().to_string()
    }

    fn end(&self) -> End {
        End {
            enter: vec![
                "nsenter".to_owned(),
                format!("--net=/proc/{}/ns/net", self.pid()),
            ],
        }
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
    fn both_ends_have_the_latest_rate() {
        let Ok(joined) = NamespacePair::make() else {
            hotlift_testkit::skip!("root", "network namespaces need it");
            return;
        };
        let ends = joined.ends();
        let reno = [
            "grep",
            "-q",
            "reno",
            "/proc/sys/net/ipv4/tcp_congestion_control",
        ];
        assert!(ends.0.iter().all(|end| end.run_words(&reno).is_ok()));
        let has = |what: &str| {
            ends.0.iter().all(|end| {
                let (first, rest) = end.enter.split_first().unwrap();
                let show = ["tc", "qdisc", "show", "dev", "veth"];
                let output = Command::new(first).args(rest).args(show).output().unwrap();
                String::from_utf8_lossy(&output.stdout).contains(what)
            })
        };
        ends.shape(&"10gbit,500mbit@1s".parse().unwrap()).unwrap();
        assert!(has("tbf") && has("rate 10Gbit"));
        ends.change(500_000_000).unwrap();
        assert!(has("rate 500Mbit"));
        // The next run starts again with its own rate.
        ends.shape(&"2.5gbit".parse().unwrap()).unwrap();
        assert!(has("rate 2500Mbit"));
        ends.shape(&"unlimited".parse().unwrap()).unwrap();
        assert!(!has("tbf"));
    }
}
