//! The nftables table in force: made, watched, put back, removed.
//!
//! Whatever loads a host's rules as a whole begins with `flush ruleset`, and takes the table with it. Nobody is told of that but
//! who listens to the kernel: it sends each change to a group of netlink. Between two changes there is nothing to do.

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
use crate::past::{self, Count, as_elements};
use crate::rules::{Rules, TABLE, mark, rules};

/// linux/netfilter/nfnetlink.h: NFNLGRP_NFTABLES, as a bit; groups count from 1.
const GROUP: u32 = 1 << (7 - 1);

/// Room for what the kernel sends at once: it gathers changes in two pages of memory, a single larger one in up to 64 KiB.
const ROOM: usize = 1 << 16;

/// The table of an agent. It goes with this, unless the configuration refuses plaintext: then it stays, for the next agent.
#[derive(Debug)]
pub struct Table {
    made: Made,
    log: Log,
}

/// What has been made.
#[derive(Debug)]
struct Made {
    text: String,
    /// What nft lists of it as it was made; `None` if it was gone by then.
    listed: Option<String>,
    plaintext: Plaintext,
}

impl Made {
    fn new(config: &Config, log: &Log) -> Result<Self, RulesError> {
        let Rules {
            text,
            users,
            passed_over,
        } = rules(config)?;
        let own = rustix::process::geteuid().as_raw();
        if let (true, Err(error)) = (users.contains(&own), try_mark()) {
            return Err(RulesError::NoMark(error));
        }
        make_counting(&text)?;
        if !passed_over.is_empty() {
            let names = passed_over.join(", ");
            let text = format!("not redirected, as this host has no such users: {names}");
            log.say(LogLevel::Info, &text);
        }
        Ok(Self {
            text,
            listed: list()?,
            plaintext: config.plaintext,
        })
    }
}

impl Table {
    /// Makes the table that `config` asks for, in place of one that is there.
    ///
    /// # Errors
    /// What nft says; that the agent's own connections would be redirected.
    pub fn new(config: &Config, log: &Log) -> Result<Self, RulesError> {
        let made = Made::new(config, log)?;
        let log = log.clone();
        Ok(Self { made, log })
    }

    /// Makes it what `config` asks for; after an error it is as it was.
    ///
    /// # Errors
    /// As of [`new`](Self::new).
    pub fn change(&mut self, config: &Config) -> Result<(), RulesError> {
        self.made = Made::new(config, &self.log)?;
        Ok(())
    }

    /// Puts it back if it is not as it was made; whether it was not.
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
            self.log.say(LogLevel::Warning, text);
        } else if let Err(error) = remove() {
            let text = format!("the nftables table is left: {}", error_line(&error));
            self.log.say(LogLevel::Error, &text);
        }
    }
}

/// Makes a table for an agent whose configuration file is bad, if there is none and plaintext is refused: after a boot migrations
/// would leave unencrypted. `config` is what can be used of the file.
///
/// # Errors
/// As of [`Table::new`].
pub fn refuse_all(config: &Config, log: &Log) -> Result<(), RulesError> {
    let is_refused = config.redirect && config.plaintext == Plaintext::Refuse;
    match is_refused && list()?.is_none() {
        // It says that it stays.
        true => Table::new(config, log).map(drop),
        false => Ok(()),
    }
}

/// Removes the table, if there is one.
///
/// # Errors
/// What nft says.
pub fn remove() -> Result<(), RulesError> {
    make(&format!("table inet {TABLE}\ndelete table inet {TABLE}\n"))
}

/// Whether a socket can be marked.
fn try_mark() -> io::Result<()> {
    mark(&std::net::UdpSocket::bind("127.0.0.1:0")?)
}

/// Makes the table, with the counts of the one that is there. If nft does not take the counts, the table is made without them.
fn make_counting(text: &str) -> Result<(), RulesError> {
    let elements = as_elements(&counts()?);
    let made = make(&format!("{text}{elements}"));
    if elements.is_empty() {
        made
    } else {
        made.or_else(|_| make(text))
    }
}

/// What has gone past the redirect, as the table has counted it; nothing if there is no table.
///
/// # Errors
/// nft cannot be run.
pub fn counts() -> Result<Vec<Count>, RulesError> {
    let output = nft(&["-j", "list", "table", "inet", TABLE], "")?;
    Ok(past::counts(&String::from_utf8_lossy(&output.stdout)))
}

/// All rules of this host, as nft lists them in JSON.
///
/// # Errors
/// What nft says.
pub fn ruleset() -> Result<String, RulesError> {
    output_of(&["-j", "-n", "list", "ruleset"], "")
}

fn make(text: &str) -> Result<(), RulesError> {
    output_of(&["-f", "-"], text).map(drop)
}

/// What nft says, if it does what it is told.
fn output_of(arguments: &[&str], text: &str) -> Result<String, RulesError> {
    let output = nft(arguments, text)?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(RulesError::Refused {
            said: one_line(&String::from_utf8_lossy(&output.stderr)),
        }),
    }
}

/// The table as nft lists it, by numbers, without counters and without what is counted; `None` if there is none.
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
        // One that ends before it has read all says why.
        let _ = stdin.write_all(text.as_bytes());
    }
    nft.wait_with_output().map_err(run)
}

/// The kernel's word of changes of this host's nftables.
#[derive(Debug)]
pub struct Changes(pub(crate) OwnedFd);

impl Changes {
    /// Listens from now on.
    ///
    /// # Errors
    /// It takes `CAP_NET_ADMIN`.
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

    /// Takes in what has come, and says whether the agent's table may have changed.
    pub(crate) fn concern_table(&self) -> bool {
        let mut room = vec![0; ROOM];
        let mut concern = false;
        loop {
            match recv(&self.0, &mut *room, RecvFlags::empty()) {
                Ok((length, _)) => {
                    concern |= length == ROOM || names_table(&room[..length]);
                }
                Err(Errno::AGAIN) => return concern,
                Err(Errno::INTR) => {}
                // Some were lost.
                Err(Errno::NOBUFS) => concern = true,
                Err(_) => return true,
            }
        }
    }
}

/// Whether messages are of the agent's table: each names the table that it is of.
fn names_table(messages: &[u8]) -> bool {
    let name = TABLE.as_bytes();
    messages.windows(name.len()).any(|part| part == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_messages_that_name_the_table_are_of_it() {
        assert!(names_table(b"\x01\x00hotlift_agent\0\x08\x00"));
        assert!(!names_table(b"\x01\x00filter\0hotlift\0_agent\0"));
        assert!(!names_table(b""));
    }
}
