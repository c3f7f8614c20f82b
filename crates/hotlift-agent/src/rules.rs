//! The nftables table that sends this host's migrations to the agent: its own, and nothing else is touched.
//!
//! The agent's own connections must pass. Those to agents go to a port that is not redirected, and those to this host's
//! QEMUs over loopback. What is left, to a host without an agent, carries a mark: unlike the user it tells the agent from a
//! libvirtd that runs as root, too; unlike a control group it needs no mount; and setting it needs CAP_NET_ADMIN, which
//! nft needs anyway.

use std::fmt::Write as _;
use std::io::Write;
use std::process::{Command, Stdio};

use hotlift_qmp::one_line;
use nix::sys::socket::{setsockopt, sockopt};

use crate::config::Config;
use crate::error::RulesError;

/// The name of the table.
pub const TABLE: &str = "hotlift_agent";

/// The mark of connections that pass: "HL".
pub const MARK: u32 = 0x484c;

/// The rules, for `nft -f -`: a table that is there is replaced, in one step.
///
/// # Errors
/// If none of the users is known here.
pub fn rules(config: &Config) -> Result<String, RulesError> {
    let ids: Vec<_> = config
        .users
        .iter()
        .filter_map(|user| user_id(user))
        .collect();
    if ids.is_empty() {
        return Err(RulesError::NoUser {
            users: config.users.join(", "),
        });
    }
    let ids = ids
        .iter()
        .map(u32::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    let (ports, to) = (config.ports, config.redirect_port);
    let mut text = format!("table inet {TABLE}\ndelete table inet {TABLE}\n");
    // Writing to a string does not fail.
    let _ = write!(
        text,
        "table inet {TABLE} {{\n\
         \tchain output {{\n\
         \t\ttype nat hook output priority -100; policy accept;\n\
         \t\toifname \"lo\" accept\n\
         \t\tmeta mark {MARK:#x} accept\n\
         \t\tmeta skuid {{ {ids} }} tcp dport {ports} redirect to :{to}\n\
         \t}}\n\
         }}\n"
    );
    Ok(text)
}

/// The rules in force, until this goes out of scope.
#[derive(Debug)]
pub struct Installed(());

impl Installed {
    /// Puts the rules of `config` into force.
    ///
    /// # Errors
    /// What nft says; that the agent's own connections would be redirected.
    pub fn new(config: &Config) -> Result<Self, RulesError> {
        let own = rustix::process::geteuid().as_raw();
        let is_redirected = config.users.iter().any(|user| user_id(user) == Some(own));
        if let (true, Err(error)) = (is_redirected, try_mark()) {
            return Err(RulesError::NoMark(error));
        }
        nft(&rules(config)?)?;
        Ok(Self(()))
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        // One that somebody has removed meanwhile is as gone as it is to be.
        let _ = nft(&format!("delete table inet {TABLE}\n"));
    }
}

/// Whether a socket can be marked.
fn try_mark() -> std::io::Result<()> {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0")?;
    setsockopt(&socket, sockopt::Mark, &MARK)?;
    Ok(())
}

/// The number of a user; `None` if this host has no such.
fn user_id(user: &str) -> Option<u32> {
    if let Ok(id) = user.parse() {
        return Some(id);
    }
    // It asks whatever the host asks for its users.
    let output = Command::new("id").args(["-u", "--", user]).output().ok()?;
    let said = String::from_utf8_lossy(&output.stdout);
    output.status.success().then(|| said.trim().parse().ok())?
}

fn nft(text: &str) -> Result<(), RulesError> {
    let run = |source| RulesError::Run {
        tool: "nft",
        source,
    };
    let mut nft = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(run)?;
    if let Some(mut stdin) = nft.stdin.take() {
        // One that ends before it has read all says why.
        let _ = stdin.write_all(text.as_bytes());
    }
    let output = nft.wait_with_output().map_err(run)?;
    match output.status.success() {
        true => Ok(()),
        false => Err(RulesError::Refused {
            said: one_line(&String::from_utf8_lossy(&output.stderr)),
        }),
    }
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
        let rules = rules(&config).unwrap();
        assert!(
            rules.contains("meta skuid { 0, 4711 } tcp dport 49152-49215 redirect to :16521\n"),
            "{rules}"
        );
        assert!(rules.starts_with("table inet hotlift_agent\ndelete table inet hotlift_agent\n"));
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
