//! Creates, watches, restores and removes the agent's nftables table.
//!
//! Some programs load a host's complete ruleset, which begins with `flush ruleset` and so removes the agent's table. The kernel
//! reports changes to a netlink group, so the agent need not poll the table.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::process::{Command, Output, Stdio};

use hotlift::error::error_line;
use hotlift_qmp::one_line;
use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};

use crate::config::{Config, LogLevel, Plaintext};
use crate::error::RulesError;
use crate::log::Log;
use crate::missed_packets::{self, MissedPackets, as_elements};
use crate::rules::{Rules, TABLE, mark, rules};

/// NFNLGRP_NFTABLES of linux/netfilter/nfnetlink.h, as a bit mask; groups count from 1.
const GROUP: u32 = 1 << (7 - 1);

/// Size of the receive buffer, in bytes. The kernel gathers changes in two pages of memory, and sends a larger change in up to
/// 64 KiB.
const ROOM: usize = 1 << 16;

/// The agent's installed nftables table. The drop removes it, unless the configuration refuses plaintext: then the table stays
/// for the next agent.
#[derive(Debug)]
pub struct Table {
    made: CreatedTable,
    log: Log,
}

/// The nftables table, as the agent created it.
#[derive(Debug)]
struct CreatedTable {
    text: String,
    /// Listing of the new table by nft; `None` if another program had already removed the table.
    listed: Option<String>,
    plaintext: Plaintext,
}

impl CreatedTable {
    fn new(config: &Config, log: &Log) -> Result<Self, RulesError> {
        let Rules {
            text,
            users,
            unknown_users,
        } = rules(config)?;
        let own = rustix::process::geteuid().as_raw();
        if let (true, Err(error)) = (users.contains(&own), try_mark()) {
            return Err(RulesError::NoMark(error));
        }
        make_counting(&text)?;
        if !unknown_users.is_empty() {
            let names = unknown_users.join(", ");
            let text = format!("not redirected, as this host lacks these users: {names}");
            log.write(LogLevel::Info, &text);
        }
        Ok(Self {
            text,
            listed: list()?,
            plaintext: config.plaintext,
        })
    }
}

impl Table {
    /// Creates the table for `config`; replaces an existing one.
    ///
    /// # Errors
    /// [`RulesError`] if nft fails, no user exists, or the rules would redirect the agent's own connections.
    pub fn new(config: &Config, log: &Log) -> Result<Self, RulesError> {
        let made = CreatedTable::new(config, log)?;
        let log = log.clone();
        Ok(Self { made, log })
    }

    /// Replaces the table by one for `config`; after an error the old table stays.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn change(&mut self, config: &Config) -> Result<(), RulesError> {
        self.made = CreatedTable::new(config, &self.log)?;
        Ok(())
    }

    /// Restores the table if another program changed or removed it; returns true if it was restored.
    pub(crate) fn restore(&mut self) -> Result<bool, RulesError> {
        let made = &mut self.made;
        if made.listed.is_some() && list()? == made.listed {
            return Ok(false);
        }
        make_counting(&made.text)?;
        made.listed = list()?;
        Ok(true)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        if self.made.plaintext == Plaintext::Refuse {
            let text = "the nftables table stays: no migration leaves this host until an agent runs, or until \
                        'hotlift agent rules --remove'";
            self.log.write(LogLevel::Warning, text);
        } else if let Err(error) = remove() {
            let text = format!("cannot remove the nftables table: {}", error_line(&error));
            self.log.write(LogLevel::Error, &text);
        }
    }
}

/// Creates the table for an agent that does not start because its configuration file is invalid. Otherwise migrations would
/// leave this host unencrypted after a boot. Does nothing if a table exists, or if `config` allows plaintext. `config` has the
/// valid keys of the file.
///
/// # Errors
/// As for [`Table::new`].
pub fn refuse_all(config: &Config, log: &Log) -> Result<(), RulesError> {
    let is_refused = config.redirect && config.plaintext == Plaintext::Refuse;
    match is_refused && list()?.is_none() {
        // The drop leaves the table, and logs this.
        true => Table::new(config, log).map(drop),
        false => Ok(()),
    }
}

/// Removes the agent's table if it exists.
///
/// # Errors
/// [`RulesError`] if nft fails.
pub fn remove() -> Result<(), RulesError> {
    make(&format!("table inet {TABLE}\ndelete table inet {TABLE}\n"))
}

/// Checks that this process may set a mark on a socket.
fn try_mark() -> io::Result<()> {
    mark(&std::net::UdpSocket::bind("127.0.0.1:0")?)
}

/// Creates the table with the rules `text`. Keeps the counts of an existing table unless nft rejects them.
fn make_counting(text: &str) -> Result<(), RulesError> {
    let elements = as_elements(&counts()?);
    let made = make(&format!("{text}{elements}"));
    if elements.is_empty() {
        made
    } else {
        made.or_else(|_| make(text))
    }
}

/// Returns the table's counts of packets that missed the redirect; an empty list without a table.
///
/// # Errors
/// If nft cannot be run.
pub fn counts() -> Result<Vec<MissedPackets>, RulesError> {
    let output = nft(&["-j", "list", "table", "inet", TABLE], "")?;
    Ok(missed_packets::counts(&String::from_utf8_lossy(
        &output.stdout,
    )))
}

/// Returns all nftables rules of this host, as nft lists them in JSON.
///
/// # Errors
/// [`RulesError`] if nft fails.
pub fn ruleset() -> Result<String, RulesError> {
    output_of(&["-j", "-n", "list", "ruleset"], "")
}

fn make(text: &str) -> Result<(), RulesError> {
    output_of(&["-f", "-"], text).map(drop)
}

/// Runs nft with `arguments` and the input `text`; returns its output, or an error if nft fails.
fn output_of(arguments: &[&str], text: &str) -> Result<String, RulesError> {
    let output = nft(arguments, text)?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(RulesError::Refused {
            message: one_line(&String::from_utf8_lossy(&output.stderr)),
        }),
    }
}

/// Returns nft's listing of the table, with numbers, but without counters and set elements; `None` if there is no table.
fn list() -> Result<Option<String>, RulesError> {
    let output = nft(&["-n", "-s", "-t", "list", "table", "inet", TABLE], "")?;
    let listed = || String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(output.status.success().then(listed))
}

fn nft(arguments: &[&str], text: &str) -> Result<Output, RulesError> {
    let run = |source| RulesError::Run {
        tool: "nft",
        package: "nftables",
        source,
    };
    let mut nft = Command::new("nft")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(run)?;
    if let Some(mut stdin) = nft.stdin.take() {
        // Write errors are ignored: if nft ends before it has read everything, its output has the reason.
        let _ = stdin.write_all(text.as_bytes());
    }
    nft.wait_with_output().map_err(run)
}

/// Netlink socket on which the kernel reports changes of this host's nftables.
#[derive(Debug)]
pub struct Changes(pub(crate) OwnedFd);

impl Changes {
    /// Subscribes to the kernel's reports.
    ///
    /// # Errors
    /// [`RulesError::Watch`] without `CAP_NET_ADMIN`.
    pub fn listen() -> Result<Self, RulesError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (family, protocol) = (AddressFamily::NETLINK, Some(netlink::NETFILTER));
        let socket = socket_with(family, SocketType::RAW, flags, protocol).and_then(|socket| {
            bind(&socket, &SocketAddrNetlink::new(0, GROUP))?;
            Ok(socket)
        });
        socket
            .map(Self)
            .map_err(|errno| RulesError::Watch(errno.into()))
    }

    /// Reads and discards all waiting reports; returns true if the agent's table may have changed.
    pub(crate) fn table_changed(&self) -> bool {
        let mut room = vec![0; ROOM];
        let mut concern = false;
        loop {
            match recv(&self.0, &mut *room, RecvFlags::empty()) {
                Ok((length, _)) => {
                    concern |= length == ROOM || names_table(&room[..length]);
                }
                Err(Errno::AGAIN) => return concern,
                Err(Errno::INTR) => {}
                // Some reports were lost.
                Err(Errno::NOBUFS) => concern = true,
                Err(_) => return true,
            }
        }
    }
}

/// Returns true if `messages` contain the name of the agent's table: each report names its table.
fn names_table(messages: &[u8]) -> bool {
    let name = TABLE.as_bytes();
    messages.windows(name.len()).any(|part| part == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_messages_that_name_the_table_concern_it() {
        assert!(names_table(b"\x01\x00hotlift_agent\0\x08\x00"));
        assert!(!names_table(b"\x01\x00filter\0hotlift\0_agent\0"));
        assert!(!names_table(b""));
    }
}
