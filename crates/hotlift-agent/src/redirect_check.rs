//! Checks the redirect of a user's connections: the agent must accept a test connection; otherwise the kernel resets it.
//!
//! A thread with the user's id opens the socket. The socket's mark makes the nftables table reset the connection if it would
//! leave this host.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::thread;
use std::time::Duration;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::process::{RawUid, Uid, geteuid};
use rustix::thread::set_thread_uid;
use serde::{Deserialize, Serialize};

use crate::bypass::bypasses;
use crate::config::Config;
use crate::dial::{connect_within, ip_of};
use crate::error::RulesError;
use crate::missed_packets::MissedPackets;
use crate::rules::{CHECK_MARK, TABLE, mark_with, rules};
use crate::table;
use crate::values::Prefix;

/// Longest time for the agent on this host to accept a test connection.
const ACCEPT: Duration = Duration::from_secs(5);

/// Address outside of this host's networks, reached through its gateway (documentation range of RFC 5737).
const ELSEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 1));

/// Result of a check for connections that bypass the agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BypassReport {
    /// Reasons why migrations of this host do not reach the agent.
    pub problems: Vec<String>,
    /// Checks that were not possible, and counts of packets that missed the redirect.
    pub notes: Vec<String>,
}

/// Result and time of the last `agent check`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct LastCheck {
    /// Time of the check, as in RFC 3339.
    pub at: String,
    /// Result of the check.
    #[serde(flatten)]
    pub found: BypassReport,
}

/// Result of a test connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// The agent accepted the connection.
    Redirected,
    /// The kernel reset the connection: it was not redirected.
    NotRedirected,
}

/// Checks that no foreign rules keep this host's migrations from reaching the agent. If an agent runs here (`has_agent`), also
/// makes a test connection as each user: it must be redirected.
///
/// # Errors
/// If nft fails, or none of the users exists on this host.
pub fn check_redirect(config: &Config, has_agent: bool) -> Result<BypassReport, RulesError> {
    let mut found = BypassReport::default();
    let mut note = |text: String| found.notes.push(text);
    if !geteuid().is_root() {
        note(
            "not checked, as this needs root: rules of other programs, and the redirect of connections"
                .to_owned(),
        );
        return Ok(found);
    }
    let users = rules(config)?.users;
    let (has_table, problems) = bypasses(&table::ruleset()?, config, &users);
    for count in table::counts()? {
        let MissedPackets { to, packets, .. } = count;
        note(format!(
            "packets to {to} that bypassed the redirect since the table exists: {packets}"
        ));
    }
    if has_table && has_agent {
        prove(config, &users, &mut found);
    } else if has_agent && config.redirect {
        let text = format!("the agent runs, but table inet {TABLE} is missing");
        found.problems.push(text);
    } else {
        note(format!(
            "not checked, as this needs a running agent and the table inet {TABLE}: the redirect of connections"
        ));
    }
    found.problems.extend(problems);
    Ok(found)
}

fn prove(config: &Config, users: &[u32], found: &mut BypassReport) {
    let mut note = |text: String| found.notes.push(text);
    let places = addresses_to_check(config).unwrap_or_default();
    if places.is_empty() {
        note(
            "not checked, as no interface leads to another host: the redirect of connections"
                .to_owned(),
        );
    }
    for place in places {
        let mut not_redirected = Vec::new();
        for user in users {
            match connect(*user, place) {
                Ok(Outcome::Redirected) => {}
                Ok(Outcome::NotRedirected) => not_redirected.push(user.to_string()),
                Err(error) => note(format!(
                    "not checked: the redirect of connections of user {user} to {place}: {error}"
                )),
            }
        }
        if !not_redirected.is_empty() {
            let users = not_redirected.join(", ");
            found.problems.push(format!(
                "a test connection to {place} is not redirected (users: {users}); it did not leave this host"
            ));
        }
    }
}

/// Makes a test connection to `to` as `user`. No packet leaves this host while the agent's table is installed.
///
/// # Errors
/// The system's error if no connection could be tried: it needs root.
fn connect(user: RawUid, to: SocketAddr) -> io::Result<Outcome> {
    // Only this thread changes its user; it ends after it has opened the socket.
    let opened = thread::spawn(move || {
        set_thread_uid(Uid::from_raw(user))?;
        open(to)
    });
    let socket = opened
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))?;
    mark_with(&socket, CHECK_MARK)?;
    match connect_within(socket, to, ACCEPT) {
        Ok(_) => Ok(Outcome::Redirected),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(Outcome::NotRedirected),
        Err(error) => Err(error),
    }
}

fn open(to: SocketAddr) -> io::Result<OwnedFd> {
    let family = match to {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(family, SocketType::STREAM, flags, None)?)
}

/// Returns the destinations of test connections: the first and the last of `ports`, at one IPv4 and one IPv6 address. Chooses
/// addresses whose connections are redirected, and to which this host has a route. The addresses need not be in use.
///
/// # Errors
/// If the interfaces cannot be listed.
fn addresses_to_check(config: &Config) -> io::Result<Vec<SocketAddr>> {
    let own = own_networks()?;
    let mut addresses: Vec<IpAddr> = Vec::new();
    let neighbours = own
        .iter()
        .filter_map(|(address, mask)| neighbour_address(*address, *mask));
    let by_gateway = own.iter().any(|(address, _)| address.is_ipv4());
    let candidates: Vec<_> = match config.destinations.as_slice() {
        [] => neighbours.chain(by_gateway.then_some(ELSEWHERE)).collect(),
        these => {
            let is_there = |address: &IpAddr| these.iter().any(|one| one.contains(*address));
            let hosts = these.iter().map(Prefix::host);
            neighbours.filter(is_there).chain(hosts).collect()
        }
    };
    for candidate in candidates {
        let is_own = own.iter().any(|(address, _)| *address == candidate);
        let is_new = !addresses
            .iter()
            .any(|one| one.is_ipv4() == candidate.is_ipv4());
        if is_new && !is_own {
            addresses.push(candidate);
        }
    }
    let mut ports = vec![config.ports.first, config.ports.last];
    ports.dedup();
    let places = addresses
        .iter()
        .flat_map(|address| ports.iter().map(|port| SocketAddr::new(*address, *port)));
    Ok(places.collect())
}

/// Returns the addresses and masks of the interfaces that lead to other hosts.
fn own_networks() -> io::Result<Vec<(IpAddr, IpAddr)>> {
    let external = getifaddrs()?.filter(|interface| {
        interface.flags.contains(InterfaceFlags::IFF_UP)
            && !interface.flags.contains(InterfaceFlags::IFF_LOOPBACK)
    });
    Ok(external
        .filter_map(|interface| Some((ip_of(&interface.address?)?, ip_of(&interface.netmask?)?)))
        .collect())
}

/// Returns another address that a host in the network of `address` may have. Returns `None` if there is no other address, or if
/// `address` is link-local.
fn neighbour_address(address: IpAddr, mask: IpAddr) -> Option<IpAddr> {
    let others = |address: u128, mask: u128, width: u32| {
        let all = u128::MAX >> (128 - width);
        let of_hosts = !mask & all;
        let mut others = (1..=3).map(move |change| address ^ change);
        others.find(|other| {
            let host = other & of_hosts;
            other & mask == address & mask && host != 0 && host != of_hosts
        })
    };
    match (address, mask) {
        (IpAddr::V4(address), IpAddr::V4(mask)) if !address.is_link_local() => {
            let other = others(address.to_bits().into(), mask.to_bits().into(), 32)?;
            Some(Ipv4Addr::from_bits(u32::try_from(other).ok()?).into())
        }
        (IpAddr::V6(address), IpAddr::V6(mask)) if !address.is_unicast_link_local() => {
            let other = others(address.to_bits(), mask.to_bits(), 128)?;
            Some(Ipv6Addr::from_bits(other).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_next_to_an_own_one_may_belong_to_a_host() {
        for (address, mask, expected) in [
            ("192.0.2.1", "255.255.255.0", Some("192.0.2.3")),
            ("192.0.2.2", "255.255.255.0", Some("192.0.2.3")),
            ("192.0.2.254", "255.255.255.0", Some("192.0.2.252")),
            ("192.0.2.5", "255.255.255.252", Some("192.0.2.6")),
            ("192.0.2.5", "255.255.255.255", None),
            ("169.254.1.1", "255.255.0.0", None),
            ("2001:db8::1", "ffff:ffff:ffff:ffff::", Some("2001:db8::3")),
            ("fe80::1", "ffff:ffff:ffff:ffff::", None),
        ] {
            let found = neighbour_address(address.parse().unwrap(), mask.parse().unwrap());
            assert_eq!(found, expected.map(|it| it.parse().unwrap()), "{address}");
        }
    }
}
