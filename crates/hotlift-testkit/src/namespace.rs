//! Two network namespaces joined by a veth pair, and outages of the link between them.
//!
//! The namespaces have no names, and exist only while a process has a descriptor of them. So a killed test leaves no
//! namespace and no veth pair.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::{Deserialize, Serialize};

use crate::error::KitError;

/// Address of the source host: an address for examples (RFC 5737), without routes.
pub const SOURCE: &str = "192.0.2.1";
/// Address on which the destination listens.
pub const DESTINATION: &str = "192.0.2.2";
/// Address on which a proxy before the destination listens. The port is the same as the destination's.
pub const PROXY: &str = "192.0.2.3";

/// A network namespace, which exists at least as long as this descriptor.
#[derive(Debug)]
pub struct Namespace(File);

impl Namespace {
    /// Creates a network namespace and enables its loopback interface. Needs root.
    ///
    /// # Errors
    /// If the namespace cannot be created.
    pub fn new() -> Result<Self, KitError> {
        let mut holder = Command::new("unshare")
            .args(["--net", "sh", "-c", "echo stands; read end"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(KitError::system("run 'unshare --net'"))?;
        let mut word = [0; 6];
        let mut stdout = holder.stdout.take();
        let stands = stdout
            .as_mut()
            .is_some_and(|stdout| stdout.read_exact(&mut word).is_ok());
        let opened = File::open(format!("/proc/{}/ns/net", holder.id()));
        // The process ends when its standard input is closed.
        drop(holder.stdin.take());
        let _ = holder.wait();
        if !stands {
            return Err(KitError::Tool {
                command: "unshare --net".to_owned(),
                output: "no namespace can be made; that needs root".to_owned(),
            });
        }
        let this = Self(opened.map_err(KitError::system("open a network namespace"))?);
        this.tool("ip", &["link", "set", "lo", "up"])?;
        Ok(this)
    }

    /// Runs `work` on this thread inside the namespace. Sockets and processes that `work` creates belong to the
    /// namespace.
    ///
    /// # Errors
    /// If the namespace cannot be entered.
    ///
    /// # Panics
    /// If the thread cannot return to its own namespace; otherwise its later actions would use the wrong network.
    pub fn within<T>(&self, work: impl FnOnce() -> T) -> Result<T, KitError> {
        let home = File::open("/proc/thread-self/ns/net")
            .map_err(KitError::system("open the thread's network namespace"))?;
        let enter = |namespace: &File| {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        };
        enter(&self.0).map_err(|error| KitError::System {
            what: "enter a network namespace".to_owned(),
            source: error.into(),
        })?;
        let done = work();
        enter(&home).expect("the namespace that the thread came from");
        Ok(done)
    }

    /// Returns a second descriptor of the same namespace.
    ///
    /// # Errors
    /// If the process has reached its limit of open files.
    pub fn again(&self) -> Result<Self, KitError> {
        let copy = self.0.try_clone();
        copy.map(Self)
            .map_err(KitError::system("copy a descriptor"))
    }

    /// Runs a system tool in the namespace, and returns the tool's output.
    ///
    /// # Errors
    /// If the tool cannot be run, or fails.
    pub fn tool(&self, program: &str, arguments: &[&str]) -> Result<String, KitError> {
        self.tool_with(program, arguments, "")
    }

    /// Runs a system tool in the namespace with `input` on standard input, and returns the tool's output.
    ///
    /// # Errors
    /// If the tool cannot be run, or fails.
    pub fn tool_with(
        &self,
        program: &str,
        arguments: &[&str],
        input: &str,
    ) -> Result<String, KitError> {
        let spawned = self.within(|| {
            Command::new(program)
                .args(arguments)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
        })?;
        let failed = || KitError::system(format!("run '{program}'"));
        let mut child = spawned.map_err(failed())?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(input.as_bytes()).map_err(failed())?;
        }
        let output = child.wait_with_output().map_err(failed())?;
        if !output.status.success() {
            return Err(KitError::Tool {
                command: format!("{program} {}", arguments.join(" ")),
                output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            });
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// A side of a migration: source or destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The host that the guest leaves.
    Source,
    /// The host that the guest moves to.
    Destination,
}

/// A handover message between two Hotlifts. In the tests, the message is at the start of a TCP segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Message {
    /// The destination's message that the guest is loaded.
    Pong,
    /// The source's message after PONG: the commit, which releases the guest.
    Commit,
    /// All segments of the commit except the first.
    RestOfCommit,
    /// The destination's message SHUT that the guest runs.
    Shut,
}

/// The hosts of source and destination, and the link between them.
#[derive(Debug)]
pub struct Link {
    /// Network namespace of the source.
    pub source: Namespace,
    /// Network namespace of the destination.
    pub destination: Namespace,
}

impl Link {
    /// Creates both hosts, and a link with `mtu` in bytes. `orphan_retries` is the value of
    /// `net.ipv4.tcp_orphan_retries`. Needs root.
    ///
    /// # Errors
    /// If a system tool fails.
    pub fn new(mtu: u16, orphan_retries: u8) -> Result<Self, KitError> {
        let link = Self {
            source: Namespace::new()?,
            destination: Namespace::new()?,
        };
        // ip(8) accepts a path in place of a namespace name.
        let other = format!("/proc/{}/fd/{}", std::process::id(), {
            use std::os::fd::AsRawFd;
            link.destination.0.as_raw_fd()
        });
        let pair = format!("link add name veth type veth peer name veth netns {other}\n");
        link.source.tool_with("ip", &["-batch", "-"], &pair)?;
        for (end, addresses) in [
            (End::Source, &[SOURCE][..]),
            (End::Destination, &[DESTINATION, PROXY]),
        ] {
            let mut batch = format!("link set dev veth mtu {mtu}\nlink set dev veth up\n");
            for address in addresses {
                batch += &format!("address add {address}/24 dev veth\n");
            }
            let host = link.host(end);
            host.tool_with("ip", &["-batch", "-"], &batch)?;
            // Every Linux has this congestion control. The host's default is not under test.
            for (name, value) in [
                ("tcp_orphan_retries", orphan_retries.to_string()),
                ("tcp_congestion_control", "reno".to_owned()),
            ] {
                let path = format!("/proc/sys/net/ipv4/{name}");
                host.within(|| std::fs::write(path, value))?
                    .map_err(KitError::system(format!("set {name}")))?;
            }
        }
        Ok(link)
    }

    /// Returns the network namespace of the given side.
    #[must_use]
    pub fn host(&self, end: End) -> &Namespace {
        match end {
            End::Source => &self.source,
            End::Destination => &self.destination,
        }
    }

    /// Takes the link down at the given end.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn down(&self, end: End) -> Result<(), KitError> {
        let host = self.host(end);
        host.tool("ip", &["link", "set", "dev", "veth", "down"])
            .map(drop)
    }

    /// Takes the link up at the given end.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn up(&self, end: End) -> Result<(), KitError> {
        let host = self.host(end);
        host.tool("ip", &["link", "set", "dev", "veth", "up"])
            .map(drop)
    }

    /// Drops all packets of a host from now on, in both directions. The peers receive neither answers nor errors.
    ///
    /// # Errors
    /// If `nft` fails.
    pub fn lose_power(&self, end: End) -> Result<(), KitError> {
        const TABLE: &str = "table netdev power {\n\
             chain in { type filter hook ingress device veth priority 0; counter drop; }\n}\n\
             table inet power {\n\
             chain out { type filter hook postrouting priority 300; oifname veth counter drop; }\n}\n";
        let host = self.host(end);
        host.tool_with("nft", &["-f", "-"], TABLE).map(drop)
    }

    /// Undoes [`Link::lose_power`].
    ///
    /// # Errors
    /// If `nft` fails.
    pub fn restore_power(&self, end: End) -> Result<(), KitError> {
        let tables = "delete table netdev power\ndelete table inet power\n";
        let host = self.host(end);
        host.tool_with("nft", &["-f", "-"], tables).map(drop)
    }

    /// Starts to count TCP segments with data that the destination receives. Connections to the destination's port
    /// `encrypted` are excluded. [`Link::plaintext`] returns the count.
    ///
    /// # Errors
    /// If `nft` fails.
    pub fn watch_plaintext(&self, encrypted: u16) -> Result<(), KitError> {
        // A segment without data has at most 80 bytes: the IPv4 header and the longest TCP header.
        let table = format!(
            "table ip watch {{\ncounter plaintext {{ }}\n\
             chain in {{ type filter hook prerouting priority -400; \
             iifname veth ip protocol tcp tcp dport != {encrypted} ip length > 80 counter name plaintext; }}\n}}\n"
        );
        self.destination
            .tool_with("nft", &["-f", "-"], &table)
            .map(drop)
    }

    /// Returns the number of segments that [`Link::watch_plaintext`] has counted.
    ///
    /// # Errors
    /// If `nft` fails, or prints no number.
    pub fn plaintext(&self) -> Result<u64, KitError> {
        let printed = self
            .destination
            .tool("nft", &["list", "counter", "ip", "watch", "plaintext"])?;
        let mut words = printed.split_whitespace();
        let packets = words.find(|word| *word == "packets").and(words.next());
        let count = packets.and_then(|count| count.parse().ok());
        count.ok_or_else(|| KitError::Tool {
            command: "nft list counter".to_owned(),
            output: printed.clone(),
        })
    }

    /// Limits the link's rate in both directions to `kbits` kbit/s from now on. The token bucket spreads the steps of a
    /// handover in time; without the bucket, the steps are some hundred microseconds apart.
    ///
    /// # Errors
    /// If `tc` fails.
    pub fn limit(&self, kbits: u32) -> Result<(), KitError> {
        for host in [&self.source, &self.destination] {
            let rate = format!("{kbits}kbit");
            // tc-tbf(8): the bucket must hold at least one segment. The queue must hold a maximum TCP window.
            let bucket = [
                "qdisc", "replace", "dev", "veth", "root", "tbf", "rate", &rate, "burst", "16k",
                "limit", "1m",
            ];
            host.tool("tc", &bucket)?;
        }
        Ok(())
    }

    /// Drops packets that begin with `message` from now on, on the destination's host. For [`Message::Commit`], drops
    /// all packets from the source after [`Message::Pong`]. [`Link::has_lost`] returns true after the first dropped
    /// packet.
    ///
    /// The rules match the message in QEMU's format of the return path (type, length, value, big-endian). The message
    /// follows a TCP header with timestamps, 32 bytes.
    ///
    /// # Errors
    /// If `nft` fails.
    pub fn lose(&self, message: Message) -> Result<(), KitError> {
        const SHUT: &str = "@th,256,64 0x0001000400000000";
        const PONG: &str = "@th,256,32 0x00020004";
        let rules = match message {
            Message::Shut | Message::Pong => {
                let what = if message == Message::Shut { SHUT } else { PONG };
                format!(
                    "chain out {{ type filter hook output priority 0; \
                     oifname veth ip protocol tcp {what} counter name lost drop; }}"
                )
            }
            Message::Commit | Message::RestOfCommit => {
                // The mark is kept for longer than any outage lasts.
                let set = "{ type ipv4_addr; flags dynamic,timeout; timeout 10m; }";
                // A segment with timestamps and no data has 52 bytes.
                let (from, passes) = match message {
                    Message::Commit => ("latched", ""),
                    _ => (
                        "begun",
                        "ip saddr @latched ip length > 52 add @begun { ip saddr }; ",
                    ),
                };
                format!(
                    "set latched {set}\nset begun {set}\n\
                     chain out {{ type filter hook output priority 0; \
                     oifname veth ip protocol tcp {PONG} add @latched {{ ip daddr }}; }}\n\
                     chain in {{ type filter hook input priority 0; \
                     iifname veth ip saddr @{from} counter name lost drop; {passes}}}"
                )
            }
        };
        let table = format!("table ip lose {{\ncounter lost {{ }}\n{rules}\n}}\n");
        self.destination
            .tool_with("nft", &["-f", "-"], &table)
            .map(drop)
    }

    /// Returns true if [`Link::lose`] dropped a packet.
    ///
    /// # Errors
    /// If `nft` fails.
    pub fn has_lost(&self) -> Result<bool, KitError> {
        let listed = self
            .destination
            .tool("nft", &["list", "counter", "ip", "lose", "lost"])?;
        Ok(!listed.contains("packets 0 "))
    }

    /// Undoes [`Link::lose`].
    ///
    /// # Errors
    /// If `nft` fails.
    pub fn stop_losing(&self) -> Result<(), KitError> {
        self.destination
            .tool("nft", &["delete", "table", "ip", "lose"])
            .map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;

    fn link() -> Option<Link> {
        if !rustix::process::geteuid().is_root() {
            crate::skip!("root", "network namespaces need it");
            return None;
        }
        Some(Link::new(540, 1).expect("a link"))
    }

    fn connection(link: &Link) -> (TcpStream, TcpStream) {
        let listener = link
            .destination
            .within(|| TcpListener::bind((DESTINATION, 7000)));
        let listener = listener.unwrap().unwrap();
        let near = link
            .source
            .within(|| TcpStream::connect((DESTINATION, 7000)));
        (near.unwrap().unwrap(), listener.accept().unwrap().0)
    }

    #[test]
    fn a_link_that_is_down_delivers_nothing_until_it_is_up() {
        let Some(link) = link() else { return };
        for end in [End::Source, End::Destination] {
            let (mut near, mut far) = connection(&link);
            link.down(end).unwrap();
            near.write_all(b"word").unwrap();
            far.set_read_timeout(Some(Duration::from_millis(300)))
                .unwrap();
            assert!(far.read(&mut [0; 4]).is_err(), "{end:?}");
            link.up(end).unwrap();
            far.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let mut word = [0; 4];
            far.read_exact(&mut word).unwrap();
            assert_eq!(&word, b"word");
        }
    }

    #[test]
    fn a_host_without_power_neither_sends_nor_receives_until_it_has_power_again() {
        let Some(link) = link() else { return };
        for end in [End::Source, End::Destination] {
            let (mut near, mut far) = connection(&link);
            link.lose_power(end).unwrap();
            near.write_all(b"word").unwrap();
            far.write_all(b"back").unwrap();
            for socket in [&mut near, &mut far] {
                let moment = Some(Duration::from_millis(300));
                socket.set_read_timeout(moment).unwrap();
                assert!(socket.read(&mut [0; 4]).is_err(), "{end:?}");
            }
            link.restore_power(end).unwrap();
            for (socket, expected) in [(&mut near, b"back"), (&mut far, b"word")] {
                socket
                    .set_read_timeout(Some(Duration::from_secs(60)))
                    .unwrap();
                let mut word = [0; 4];
                socket.read_exact(&mut word).unwrap();
                assert_eq!(&word, expected);
            }
        }
    }

    #[test]
    fn data_to_another_port_than_the_encrypted_one_is_counted_as_plaintext() {
        let Some(link) = link() else { return };
        for (encrypted, is_plain) in [(7000, false), (7001, true)] {
            let (mut near, mut far) = connection(&link);
            link.watch_plaintext(encrypted).unwrap();
            near.write_all(&[7; 200]).unwrap();
            far.read_exact(&mut [0; 200]).unwrap();
            assert_eq!(link.plaintext().unwrap() > 0, is_plain, "{encrypted}");
            let table = ["delete", "table", "ip", "watch"];
            link.destination.tool("nft", &table).unwrap();
        }
    }

    #[test]
    fn a_message_is_dropped_until_the_rule_is_removed() {
        let Some(link) = link() else { return };
        let (mut near, mut far) = connection(&link);
        link.lose(Message::Shut).unwrap();
        far.write_all(&[0, 2, 0, 4, 0, 0, 0, 1]).unwrap();
        let mut word = [0; 8];
        near.read_exact(&mut word).unwrap();
        assert!(!link.has_lost().unwrap());
        far.write_all(&[0, 1, 0, 4, 0, 0, 0, 0]).unwrap();
        near.set_read_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        assert!(near.read(&mut word).is_err());
        assert!(link.has_lost().unwrap());
        link.stop_losing().unwrap();
        near.set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        near.read_exact(&mut word).unwrap();
        assert_eq!(word[1], 1);
    }

    #[test]
    fn the_rest_of_a_commit_is_lost_and_its_first_segment_arrives() {
        let Some(link) = link() else { return };
        for (message, first) in [(Message::Commit, false), (Message::RestOfCommit, true)] {
            let (mut near, mut far) = connection(&link);
            link.lose(message).unwrap();
            far.write_all(&[0, 2, 0, 4, 0, 0, 0, 1]).unwrap();
            near.read_exact(&mut [0; 8]).unwrap();
            near.set_nodelay(true).unwrap();
            near.write_all(b"first").unwrap();
            far.set_read_timeout(Some(Duration::from_millis(500)))
                .unwrap();
            assert_eq!(far.read(&mut [0; 5]).is_ok(), first, "{message:?}");
            near.write_all(b"then").unwrap();
            assert!(far.read(&mut [0; 4]).is_err(), "{message:?}");
            assert!(link.has_lost().unwrap());
            link.stop_losing().unwrap();
        }
    }
}
