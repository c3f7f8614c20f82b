//! Packets that missed the redirect: the nftables table counts them, also without a running agent; the agent logs them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use hotlift_terminal::progress::bytes;
use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::Plaintext;
use crate::rules::{COUNTED, LOG_GROUP, TABLE};

/// Shortest interval between two log lines about one address.
pub const REPEAT_INTERVAL: Duration = Duration::from_secs(60);

/// linux/netlink.h: `NLMSG_ERROR`, the type of the kernel's answer to a request.
const ANSWER: u16 = 2;

/// Most messages that are read while the kernel's answer is awaited.
const MAX_BEFORE_ANSWER: usize = 64;

/// Count of packets to one address that missed the redirect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MissedPackets {
    /// Destination address.
    pub to: IpAddr,
    /// Number of packets.
    pub packets: u64,
    /// Number of bytes in these packets, with headers.
    pub bytes: u64,
}

impl MissedPackets {
    /// Returns the log line for this count. `plaintext` decides if the line reports refused or unencrypted packets.
    #[must_use]
    pub fn line(&self, plaintext: Plaintext) -> String {
        let Self { to, packets, .. } = self;
        let bytes = bytes(self.bytes);
        let what = match plaintext {
            Plaintext::Refuse => "the kernel refused connections to ports of migrations",
            Plaintext::Allow => "connections to ports of migrations leave unencrypted",
        };
        format!(
            "to={to} packets={packets} bytes=\"{bytes}\" error=\"{what}, as they are not redirected: they are older than the \
             table, or a rule of this host prevents the redirect ('hotlift agent check' names it)\""
        )
    }
}

/// Reads the counts in `listed`, the output of `nft -j list table`. Returns an empty list if `listed` is not such output.
#[must_use]
pub fn counts(listed: &str) -> Vec<MissedPackets> {
    let listed: Value = serde_json::from_str(listed).unwrap_or_default();
    let objects = listed["nftables"].as_array().into_iter().flatten();
    let sets = objects.filter_map(|object| {
        let set = &object["set"];
        let name = set["name"].as_str()?;
        (set["table"] == TABLE && COUNTED.contains(&name)).then(|| set["elem"].as_array())?
    });
    let counts = sets.flatten().filter_map(|element| {
        let element = &element["elem"];
        let counter = &element["counter"];
        Some(MissedPackets {
            to: element["val"].as_str()?.parse().ok()?,
            packets: counter["packets"].as_u64()?,
            bytes: counter["bytes"].as_u64()?,
        })
    });
    counts.collect()
}

/// Returns nft commands that add `counts` to the sets of a new table.
#[must_use]
pub fn as_elements(counts: &[MissedPackets]) -> String {
    let mut text = String::new();
    for MissedPackets { to, packets, bytes } in counts {
        let [v4, v6] = COUNTED;
        let set = if to.is_ipv4() { v4 } else { v6 };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "add element inet {TABLE} {set} {{ {to} counter packets {packets} bytes {bytes} }}"
        );
    }
    text
}

/// For each address: the number of packets in the last log line, and the time of this line.
#[derive(Debug, Default)]
pub struct LoggedMisses(BTreeMap<IpAddr, (u64, Instant)>);

impl LoggedMisses {
    /// Returns those of `counts` to log at `now`. Also returns true if another count must wait for [`REPEAT_INTERVAL`].
    pub fn due_for_log(
        &mut self,
        counts: Vec<MissedPackets>,
        now: Instant,
    ) -> (Vec<MissedPackets>, bool) {
        let mut waits = false;
        // Forgets addresses that the table does not list: a new table counts from zero.
        self.0
            .retain(|to, _| counts.iter().any(|count| count.to == *to));
        let mut new_counts = counts;
        new_counts.retain(|count| match self.0.get_mut(&count.to) {
            Some((packets, _)) if count.packets <= *packets => {
                *packets = count.packets;
                false
            }
            Some((_, at)) if now.saturating_duration_since(*at) < REPEAT_INTERVAL => {
                waits = true;
                false
            }
            _ => {
                self.0.insert(count.to, (count.packets, now));
                true
            }
        });
        (new_counts, waits)
    }
}

/// Netlink socket on which the kernel reports packets that miss the redirect, without their content.
#[derive(Debug)]
pub struct MissReports(OwnedFd);

impl MissReports {
    /// Subscribes to the kernel's reports.
    ///
    /// # Errors
    /// The system's error, without `CAP_NET_ADMIN` or if another program uses the group.
    pub fn listen() -> std::io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (family, protocol) = (AddressFamily::NETLINK, Some(netlink::NETFILTER));
        let socket = socket_with(family, SocketType::RAW, flags, protocol)?;
        bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        send(&socket, &bind_to_group(), SendFlags::empty())?;
        let mut room = [0; 4096];
        // When `send` returns, the kernel has queued its answer. Reports of packets may precede the answer.
        for _ in 0..=MAX_BEFORE_ANSWER {
            let (length, _) = recv(&socket, &mut room, RecvFlags::empty())?;
            let message = &room[..length];
            if is_answer(message) {
                return match error_of(message) {
                    0 => Ok(Self(socket)),
                    number => Err(std::io::Error::from_raw_os_error(number)),
                };
            }
        }
        Err(std::io::ErrorKind::InvalidData.into())
    }

    /// Reads and discards all waiting reports; returns true if there was at least one.
    pub fn drain(&self) -> bool {
        let mut room = [0; 4096];
        let mut something = false;
        loop {
            match recv(&self.0, &mut room, RecvFlags::TRUNC) {
                Ok(_) | Err(Errno::NOBUFS) => something = true,
                Err(Errno::INTR) => {}
                Err(_) => return something,
            }
        }
    }
}

impl AsFd for MissReports {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns the netlink message that binds a socket to the log group. Formats: linux/netlink.h, linux/netfilter/nfnetlink.h and
/// `nfnetlink_log.h`.
fn bind_to_group() -> Vec<u8> {
    // NFNL_SUBSYS_ULOG << 8 | NFULNL_MSG_CONFIG; NLM_F_REQUEST | NLM_F_ACK.
    const CONFIG: u16 = 4 << 8 | 1;
    const FLAGS: u16 = 1 | 4;
    // nfgenmsg: AF_UNSPEC, NFNETLINK_V0, the group.
    let mut body = vec![0, 0];
    body.extend(LOG_GROUP.to_be_bytes());
    let attributes: [(u16, &[u8]); 3] = [
        // NFULA_CFG_CMD: NFULNL_CFG_CMD_BIND.
        (1, &[1]),
        // NFULA_CFG_MODE: no bytes of a packet, NFULNL_COPY_META.
        (2, &[0, 0, 0, 0, 1, 0]),
        // NFULA_CFG_QTHRESH: each packet immediately.
        (5, &[0, 0, 0, 1]),
    ];
    for (kind, value) in attributes {
        let length = u16::try_from(4 + value.len()).unwrap_or_default();
        body.extend(length.to_ne_bytes());
        body.extend(kind.to_ne_bytes());
        body.extend(value);
        body.resize(body.len().next_multiple_of(4), 0);
    }
    let length = u32::try_from(16 + body.len()).unwrap_or_default();
    let mut message = Vec::from(length.to_ne_bytes());
    message.extend(CONFIG.to_ne_bytes());
    message.extend(FLAGS.to_ne_bytes());
    // Sequence number and port id: the kernel needs neither.
    message.extend([0; 8]);
    message.extend(body);
    message
}

/// Returns true if the header of a netlink message has the type [`ANSWER`].
fn is_answer(message: &[u8]) -> bool {
    message
        .get(4..6)
        .is_some_and(|kind| kind == ANSWER.to_ne_bytes())
}

/// Returns the error number in `answer`, a netlink message of type [`ANSWER`]; 0 for success.
fn error_of(answer: &[u8]) -> i32 {
    // `struct nlmsgerr` follows the header of 16 bytes.
    let error = answer.get(16..20).and_then(|bytes| bytes.try_into().ok());
    error.map_or(Errno::INVAL.raw_os_error(), |bytes| {
        i32::from_ne_bytes(bytes).saturating_neg()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(to: &str, packets: u64) -> MissedPackets {
        MissedPackets {
            to: to.parse().unwrap(),
            packets,
            bytes: 60 * packets,
        }
    }

    #[test]
    fn counts_read_from_nft_are_carried_over_to_the_next_table() {
        // Output of nft 1.0.6, shortened.
        let listed = r#"{"nftables": [{"metainfo": {"version": "1.0.6"}},
            {"set": {"name": "plaintext4", "table": "hotlift_agent", "elem": [
                {"elem": {"val": "192.0.2.2", "counter": {"packets": 4, "bytes": 240}}}, "odd"]}},
            {"set": {"name": "plaintext6", "table": "hotlift_agent"}},
            {"set": {"name": "plaintext4", "table": "other", "elem": [
                {"elem": {"val": "192.0.2.3", "counter": {"packets": 1, "bytes": 60}}}]}}]}"#;
        let there = counts(listed);
        assert_eq!(there, [count("192.0.2.2", 4)]);
        let both = [&there[..], &[count("2001:db8::2", 1)]].concat();
        assert_eq!(
            as_elements(&both),
            "add element inet hotlift_agent plaintext4 { 192.0.2.2 counter packets 4 bytes 240 }\n\
             add element inet hotlift_agent plaintext6 { 2001:db8::2 counter packets 1 bytes 60 }\n"
        );
        for odd in [
            "",
            "[]",
            "{\"nftables\": 1}",
            "{\"nftables\": [{\"set\": 1}]}",
        ] {
            assert_eq!(counts(odd), [], "{odd}");
        }
    }

    #[test]
    fn an_address_is_logged_at_once_and_its_growth_once_a_minute() {
        let mut logged = LoggedMisses::default();
        let begun = Instant::now();
        let mut at = |second, counts: &[MissedPackets]| {
            logged.due_for_log(counts.to_vec(), begun + Duration::from_secs(second))
        };
        let (first, second) = (count("192.0.2.2", 1), count("192.0.2.3", 1));
        assert_eq!(at(0, std::slice::from_ref(&first)), (vec![first], false));
        let grown = count("192.0.2.2", 5);
        let both = [grown.clone(), second.clone()];
        assert_eq!(at(1, &both), (vec![second.clone()], true));
        assert_eq!(at(60, &both), (vec![grown], false));
        assert_eq!(at(200, &both), (vec![], false));
        // The table was flushed.
        assert_eq!(at(201, &[]), (vec![], false));
        assert_eq!(
            at(202, std::slice::from_ref(&second)),
            (vec![second], false)
        );
    }
}
