//! The rules of the agent's own nftables table, which redirects this host's migrations to the agent. No other table is changed.
//!
//! The agent's own connections must not be redirected:
//!
//! - Connections to other agents use a port that is not redirected.
//! - Connections to this host's QEMUs use loopback.
//! - Connections to a host without an agent carry a mark on the socket.
//!
//! A user id instead of the mark would not distinguish the agent from a libvirtd that also runs as root. A control group would
//! need a mount. Setting the mark needs CAP_NET_ADMIN, as nft does. The rules read the mark of the socket, since foreign rules
//! may change the mark of the packet.
//!
//! The agent's redirect port carries the same mark. The port is unprivileged, and the table outlives a killed agent. If another
//! process then listens on the port, its connections are reset: only a privileged process can mark a socket.
//!
//! A redirect is network address translation (NAT). It misses three kinds of connections:
//!
//! - connections that conntrack does not track
//! - connections that another rule has translated before
//! - connections older than the table
//!
//! So further chains check outgoing packets after all other chains. With plaintext refused, an output chain resets connections
//! that missed the redirect. A postrouting chain drops packets that foreign rules changed after the output chain. Neither chain
//! exempts marked connections, since the agent then makes no connections to hosts without an agent. With plaintext allowed, the
//! output chain only counts the packets.
//!
//! These chains find connections to migration ports by their conntrack entries. They check the packet instead if it has no
//! entry, or if the other host opened the connection. A packet is caught if it begins a connection, or if it comes from a local
//! port that the kernel chose. The answers of a server must pass, even if the client's port is a migration port.
//!
//! A closed socket has no user, but the kernel still sends the queued bytes. This happens when QEMU closes all channels after
//! the reset of one: the bytes are guest pages. So the output chain also checks two kinds of packets without a user: untracked
//! packets, and packets to an address to which a user's packet was refused before. Packets of other programs pass, since the
//! table's NAT chain makes the kernel track them. The postrouting chain does not check packets without a user: forwarded
//! packets have no user either.

use std::fmt::Write as _;
use std::os::fd::AsFd;
use std::process::Command;

use nix::sys::socket::{setsockopt, sockopt};

use crate::config::{Config, Plaintext};
use crate::error::RulesError;
use crate::values::{Ports, Prefix};

/// Name of the agent's nftables table.
pub const TABLE: &str = "hotlift_agent";

/// Mark of connections that are not redirected, and of the port to which the other connections are redirected: "HL".
pub const MARK: u32 = 0x484c;

/// Mark of a test connection of `hotlift agent check`, which the rules keep on this host: "HM".
pub const CHECK_MARK: u32 = 0x484d;

/// Names of the sets (IPv4, IPv6) in which the table counts packets that missed the redirect, by destination address.
pub const COUNTED: [&str; 2] = ["plaintext4", "plaintext6"];

/// Group of nfnetlink_log in which the kernel reports packets that missed the redirect. The value is that of [`MARK`], which
/// other programs are unlikely to use.
pub const LOG_GROUP: u16 = 0x484c;

/// Priority of the last chains: after all foreign chains, but before `i32::MAX`, where conntrack confirms connections.
const LAST_PRIORITY: i32 = i32::MAX - 1;

/// Maximum of addresses in each set: more destinations than a host migrates to.
const MAX_COUNTED: u16 = 1024;

/// First local port that the kernel assigns to a connection (`ip_local_port_range` in Documentation/networking/ip-sysctl.rst).
const LOCAL_PORTS: u16 = 32768;

/// User id that the kernel uses for "no user" (setreuid(2)). Rules with `socket mark` must not see packets without a user in
/// the output chain: for these, kernels before 5.18 search the socket with a null interface.
const NO_USER: u32 = u32::MAX;

/// The rules as input of nft, and the users whom they concern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// Script for `nft -f -`, which replaces an existing table atomically.
    pub text: String,
    /// Ids of the configured `users` that exist on this host.
    pub users: Vec<u32>,
    /// Names of the configured `users` that do not exist on this host.
    pub unknown_users: Vec<String>,
}

/// Returns the nftables rules for `config`.
///
/// # Errors
/// If none of the configured users exists on this host, or `id` cannot be run.
pub fn rules(config: &Config) -> Result<Rules, RulesError> {
    let (mut users, mut unknown_users) = (Vec::new(), Vec::new());
    for user in &config.users {
        match user_id(user)? {
            Some(id) => users.push(id),
            None => unknown_users.push(user.clone()),
        }
    }
    if users.is_empty() {
        return Err(RulesError::NoUser {
            users: config.users.join(", "),
        });
    }
    let ids: Vec<_> = users.iter().map(u32::to_string).collect();
    let ids = ids.join(", ");
    let (ports, to) = (config.ports, config.redirect_port);
    let narrowed = destinations(&config.destinations);
    let redirected: String = narrowed
        .iter()
        .map(|to_these| {
            format!("\t\tmeta skuid {{ {ids} }} {to_these}tcp dport {ports} redirect to :{to}\n")
        })
        .collect();
    let sets: String = COUNTED
        .iter()
        .zip(["ipv4_addr", "ipv6_addr"])
        .map(|(name, of)| {
            format!("\tset {name} {{\n\t\ttype {of}; size {MAX_COUNTED}; flags dynamic;\n\t}}\n")
        })
        .collect();
    let [counted4, counted6] = COUNTED;
    let count = format!(
        "\t\tadd @{counted4} {{ ip daddr counter }}\n\
         \t\tadd @{counted6} {{ ip6 daddr counter }}\n\
         \t\tlimit rate 1/second log group {LOG_GROUP}\n"
    );
    let past = |then: &str| past_the_redirect(ports, &narrowed, then);
    let last = match config.plaintext {
        Plaintext::Refuse => format!(
            "\t\tmeta skuid {{ {ids} }} fib daddr type != local jump unredirected\n\
             \t\tmeta skuid < {NO_USER} accept\n\
             \t\tfib daddr type local accept\n\
             \t\tct state untracked jump unredirected\n\
             \t\tip daddr @{counted4} jump unredirected\n\
             \t\tip6 daddr @{counted6} jump unredirected\n\
             \t}}\n\
             \tchain left {{\n\
             \t\ttype filter hook postrouting priority {LAST_PRIORITY}; policy accept;\n\
             \t\tmeta skuid {{ {ids} }} oifname != \"lo\" jump changed\n\
             \t}}\n\
             \tchain unredirected {{\n{}\t}}\n\
             \tchain changed {{\n{}\t}}\n\
             \tchain refuse {{\n{count}\t\treject with tcp reset\n\t}}\n\
             \tchain discard {{\n{count}\t\tdrop\n\t}}\n",
            past("refuse"),
            past("discard")
        ),
        Plaintext::Allow => format!(
            "\t\tmeta skuid {{ {ids} }} socket mark {MARK:#x} accept\n\
             \t\tmeta skuid {{ {ids} }} fib daddr type != local jump unredirected\n\
             \t}}\n\
             \tchain unredirected {{\n{}\t}}\n\
             \tchain count {{\n{count}\t}}\n",
            past("count")
        ),
    };
    let mut text = format!("table inet {TABLE}\ndelete table inet {TABLE}\n");
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        "table inet {TABLE} {{\n\
         {sets}\
         \tchain output {{\n\
         \t\ttype nat hook output priority -100; policy accept;\n\
         \t\toifname \"lo\" accept\n\
         \t\tmeta skuid {{ {ids} }} socket mark {MARK:#x} accept\n\
         \t\ttcp flags & (syn | ack) != syn accept\n\
         {redirected}\
         \t}}\n\
         \tchain input {{\n\
         \t\ttype filter hook input priority 0; policy accept;\n\
         \t\tiifname \"lo\" tcp dport {to} socket mark != {MARK:#x} reject with tcp reset\n\
         \t}}\n\
         \tchain leaving {{\n\
         \t\ttype filter hook output priority {LAST_PRIORITY}; policy accept;\n\
         \t\tmeta skuid < {NO_USER} socket mark {CHECK_MARK:#x} fib daddr type != local reject with tcp reset\n\
         {last}\
         }}\n"
    );
    Ok(Rules {
        text,
        users,
        unknown_users,
    })
}

/// Returns the rules of a chain that jumps to the chain `then` for connections to migration ports that missed the redirect.
/// Other packets return to the calling chain.
fn past_the_redirect(ports: Ports, destinations: &[String], then: &str) -> String {
    let mut rules = String::new();
    for to_these in destinations {
        let originally = match to_these.as_str() {
            "" => String::new(),
            to_these => format!("ct original {to_these}"),
        };
        rules += &format!(
            "\t\tct direction original meta l4proto tcp {originally}ct original proto-dst {ports} goto {then}\n"
        );
    }
    rules += "\t\tct direction original return\n";
    for to_these in destinations {
        rules += &format!(
            "\t\t{to_these}tcp dport {ports} tcp flags & (syn | ack) == syn goto {then}\n\
             \t\t{to_these}tcp dport {ports} tcp sport >= {LOCAL_PORTS} tcp sport != {ports} goto {then}\n"
        );
    }
    rules
}

/// Returns one match condition for IPv4 and one for IPv6; a family without an address in `prefixes` is omitted. Without
/// prefixes, returns one empty condition.
fn destinations(prefixes: &[Prefix]) -> Vec<String> {
    if prefixes.is_empty() {
        return vec![String::new()];
    }
    let (v4, v6): (Vec<_>, Vec<_>) = prefixes.iter().partition(|prefix| prefix.is_ipv4());
    let families = [("ip", v4), ("ip6", v6)];
    let there = families.iter().filter(|(_, these)| !these.is_empty());
    let condition = |(family, these): &(&str, Vec<&Prefix>)| {
        let these: Vec<_> = these.iter().map(ToString::to_string).collect();
        format!("{family} daddr {{ {} }} ", these.join(", "))
    };
    there.map(condition).collect()
}

/// Sets the mark [`MARK`] on a socket.
///
/// # Errors
/// The system's error, without `CAP_NET_ADMIN`.
pub fn mark(socket: &impl AsFd) -> std::io::Result<()> {
    mark_with(socket, MARK)
}

/// Sets the mark `mark` on a socket.
///
/// # Errors
/// As for [`mark`].
pub(crate) fn mark_with(socket: &impl AsFd, mark: u32) -> std::io::Result<()> {
    Ok(setsockopt(socket, sockopt::Mark, &mark)?)
}

/// Returns the id of a user; `None` if the user does not exist on this host.
///
/// # Errors
/// If `id` cannot be run.
fn user_id(user: &str) -> Result<Option<u32>, RulesError> {
    if let Ok(id) = user.parse() {
        return Ok(Some(id));
    }
    // `id` reads all user databases that the host is configured for.
    let output = Command::new("id").args(["-u", "--", user]).output();
    let output = output.map_err(|source| RulesError::Run {
        tool: "id",
        package: "coreutils",
        source,
    })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let id = output.status.success().then(|| text.trim().parse().ok());
    Ok(id.flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_redirect_the_users_connections_to_the_ports_and_nothing_else() {
        let config = Config {
            users: vec![
                "root".to_owned(),
                "4711".to_owned(),
                "no-such-user".to_owned(),
            ],
            ..Config::default()
        };
        let Rules {
            text,
            users,
            unknown_users,
        } = rules(&config).unwrap();
        assert!(
            text.contains("meta skuid { 0, 4711 } tcp dport 49152-49215 redirect to :16521\n"),
            "{text}"
        );
        assert!(text.starts_with("table inet hotlift_agent\ndelete table inet hotlift_agent\n"));
        assert_eq!(users, [0, 4711]);
        assert_eq!(unknown_users, ["no-such-user"]);
    }

    #[test]
    fn rules_for_some_destinations_do_not_affect_others() {
        let of = |destinations: &[&str]| {
            let destinations = destinations.iter().map(|text| text.parse().unwrap());
            let config = Config {
                users: vec!["0".to_owned()],
                destinations: destinations.collect(),
                ..Config::default()
            };
            let text = rules(&config).unwrap().text;
            let redirects = text.lines().filter(|line| line.contains("redirect to"));
            redirects
                .map(|line| line.trim().to_owned())
                .collect::<Vec<_>>()
        };
        let line = |to_these: &str| {
            format!("meta skuid {{ 0 }} {to_these} tcp dport 49152-49215 redirect to :16521")
        };
        let (v4, v6) = (
            line("ip daddr { 192.0.2.0/24, 198.51.100.7/32 }"),
            line("ip6 daddr { 2001:db8::/32 }"),
        );
        assert_eq!(
            of(&["192.0.2.0/24", "198.51.100.7"]),
            std::slice::from_ref(&v4)
        );
        assert_eq!(
            of(&["2001:db8::/32", "192.0.2.0/24", "198.51.100.7"]),
            [v4, v6]
        );
    }

    #[test]
    fn rules_for_users_that_the_host_does_not_have_are_refused() {
        let config = Config {
            users: vec!["no-such-user".to_owned()],
            ..Config::default()
        };
        assert!(matches!(rules(&config), Err(RulesError::NoUser { .. })));
    }
}
