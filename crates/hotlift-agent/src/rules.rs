//! The rules of the nftables table that sends this host's migrations to the agent: a table of its own, and nothing else is
//! touched.
//!
//! The agent's own connections must pass. Those to agents go to a port that is not redirected, and those to this host's
//! QEMUs over loopback. What is left, to a host without an agent, carries a mark: unlike the user it tells the agent from a
//! libvirtd that runs as root, too; unlike a control group it needs no mount; and setting it needs CAP_NET_ADMIN, which
//! nft needs anyway.
//!
//! The port of the agent carries the mark, too. It is no privileged one, and the table outlives an agent that is killed:
//! connections to whoever has taken the port since are reset, as that takes a privilege to mark a socket.

use std::fmt::Write as _;
use std::os::fd::AsFd;
use std::process::Command;

use nix::sys::socket::{setsockopt, sockopt};

use crate::config::Config;
use crate::error::RulesError;
use crate::values::Prefix;

/// The name of the table.
pub const TABLE: &str = "hotlift_agent";

/// The mark of connections that pass, and of the port that they are redirected to: "HL".
pub const MARK: u32 = 0x484c;

/// What nft is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// For `nft -f -`: a table that is there is replaced, in one step.
    pub text: String,
    /// The numbers of those of `users` that this host has.
    pub users: Vec<u32>,
    /// Those of `users` that this host does not have.
    pub passed_over: Vec<String>,
}

/// The rules that `config` asks for.
///
/// # Errors
/// If none of the users is known here, or nobody can be asked.
pub fn rules(config: &Config) -> Result<Rules, RulesError> {
    let (mut users, mut passed_over) = (Vec::new(), Vec::new());
    for user in &config.users {
        match user_id(user)? {
            Some(id) => users.push(id),
            None => passed_over.push(user.clone()),
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
    let redirected: String = destinations(&config.destinations)
        .iter()
        .map(|to_these| {
            format!("\t\tmeta skuid {{ {ids} }} {to_these}tcp dport {ports} redirect to :{to}\n")
        })
        .collect();
    let mut text = format!("table inet {TABLE}\ndelete table inet {TABLE}\n");
    // Writing to a string does not fail.
    let _ = write!(
        text,
        "table inet {TABLE} {{\n\
         \tchain output {{\n\
         \t\ttype nat hook output priority -100; policy accept;\n\
         \t\toifname \"lo\" accept\n\
         \t\tmeta mark {MARK:#x} accept\n\
         {redirected}\
         \t}}\n\
         \tchain input {{\n\
         \t\ttype filter hook input priority 0; policy accept;\n\
         \t\tiifname \"lo\" tcp dport {to} socket mark != {MARK:#x} reject with tcp reset\n\
         \t}}\n\
         }}\n"
    );
    Ok(Rules {
        text,
        users,
        passed_over,
    })
}

/// What connections to `prefixes` have in common: one condition for each family that is among them.
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

/// Marks a socket.
///
/// # Errors
/// It takes `CAP_NET_ADMIN`.
pub fn mark(socket: &impl AsFd) -> std::io::Result<()> {
    Ok(setsockopt(socket, sockopt::Mark, &MARK)?)
}

/// The number of a user; `None` if this host has no such.
///
/// # Errors
/// Nobody can be asked.
fn user_id(user: &str) -> Result<Option<u32>, RulesError> {
    if let Ok(id) = user.parse() {
        return Ok(Some(id));
    }
    // It asks whatever the host asks for its users.
    let output = Command::new("id").args(["-u", "--", user]).output();
    let output = output.map_err(|source| RulesError::Run {
        tool: "id",
        package: "coreutils",
        source,
    })?;
    let said = String::from_utf8_lossy(&output.stdout);
    let id = output.status.success().then(|| said.trim().parse().ok());
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
                "nobody-of-that-name".to_owned(),
            ],
            ..Config::default()
        };
        let Rules {
            text,
            users,
            passed_over,
        } = rules(&config).unwrap();
        assert!(
            text.contains("meta skuid { 0, 4711 } tcp dport 49152-49215 redirect to :16521\n"),
            "{text}"
        );
        assert!(text.starts_with("table inet hotlift_agent\ndelete table inet hotlift_agent\n"));
        assert_eq!(users, [0, 4711]);
        assert_eq!(passed_over, ["nobody-of-that-name"]);
    }

    #[test]
    fn rules_for_some_destinations_leave_all_others_alone() {
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
            users: vec!["nobody-of-that-name".to_owned()],
            ..Config::default()
        };
        assert!(matches!(rules(&config), Err(RulesError::NoUser { .. })));
    }
}
