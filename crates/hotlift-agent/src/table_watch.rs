//! Puts the nftables table back when something has changed it, and logs what goes past the redirect.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use hotlift::error::error_line;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::agent::Agent;
use crate::config::{LogLevel, Plaintext};
use crate::past::{AGAIN, Logged, Packets};
use crate::table::{Changes, Table, counts};

/// Between two times that the table is put back: two that do not agree shall not keep the host busy.
const PAUSE: Duration = Duration::from_millis(100);

/// After the table could not be put back.
const RETRY: Duration = Duration::from_secs(1);

/// Puts the table back whenever something has changed it, and logs what goes past the redirect, until the agent ends.
pub fn keep(agent: &Agent, changes: &Changes) {
    let packets = Packets::listen().inspect_err(|error| {
        let text = format!(
            "what goes past the redirect is counted, and not logged, as the kernel does not report it: {error}"
        );
        agent.log.say(LogLevel::Warning, &text);
    });
    let packets = packets.ok();
    let mut logged = Logged::default();
    let later = |waits: bool| waits.then(|| Instant::now() + AGAIN);
    // While no agent ran.
    let mut next_log = later(log_past(agent, &mut logged));
    let mut is_due = false;
    while !agent.has_ended() {
        let time = if is_due {
            Some(RETRY)
        } else {
            next_log.map(|at| at.saturating_duration_since(Instant::now()))
        };
        let mut fds = vec![changes.0.as_fd(), agent.ended_fd()];
        fds.extend(packets.as_ref().map(AsFd::as_fd));
        wait(&fds, time);
        let came = packets.as_ref().is_some_and(Packets::have_come);
        if came || next_log.is_some_and(|at| Instant::now() >= at) {
            // The kernel limits the rate of its reports: a packet after the last one may have none.
            next_log = later(log_past(agent, &mut logged) || came);
        }
        if !changes.concern_table() && !is_due {
            continue;
        }
        let restored = agent.table().as_mut().map_or(Ok(false), Table::restore);
        is_due = restored.is_err();
        match restored {
            Ok(false) => continue,
            Ok(true) => {
                let text = "something has changed or removed the nftables table: it is back";
                agent.log.say(LogLevel::Warning, text);
            }
            Err(error) => {
                let text = format!("the nftables table is not back: {}", error_line(&error));
                agent.log.say(LogLevel::Error, &text);
            }
        }
        wait(&[agent.ended_fd()], Some(PAUSE));
    }
}

/// Logs what has gone past the redirect since the last time; whether something waits for its time.
fn log_past(agent: &Agent, logged: &mut Logged) -> bool {
    // What is wrong with nft shows elsewhere.
    let (news, waits) = logged.news(counts().unwrap_or_default(), Instant::now());
    let plaintext = agent.config().plaintext;
    for count in news {
        let line = count.line(plaintext);
        match plaintext {
            Plaintext::Refuse => agent.refuse(&line),
            Plaintext::Allow => agent.log.say(LogLevel::Warning, &line),
        }
    }
    waits
}

/// Waits until one of `fds` is readable, for up to `time`.
fn wait(fds: &[BorrowedFd<'_>], time: Option<Duration>) {
    let mut polled: Vec<_> = fds
        .iter()
        .map(|fd| PollFd::new(fd, PollFlags::IN))
        .collect();
    let time = time.and_then(|time| Timespec::try_from(time).ok());
    // A signal ends it early.
    let _ = poll(&mut polled, time.as_ref());
}
