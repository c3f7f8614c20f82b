//! The relay: passes a QEMU's migration stream on, and on the way takes its pages out, compresses them
//! and spreads them over channels, or the other way round.
//!
//! ```text
//! source    receive     packets -> batches; main_reader, device_state: what is no page; accept, setup: how it opens
//!           file        a save file, played as a stream; restore: a mapped-ram file -> batches
//! flow      a fixed number of batches between readers and writers
//! sink      outgoing    batches -> packets, sync points, device state; answers: the return path
//!           file        a mapped-ram file
//! ```
//!
//! Both sides are QEMU's stream: main and multifd channels in any method, or main alone. What the
//! incoming stream has is found out from it; what the outgoing one is to have, the options say. So one
//! engine stands at the source (QEMU in, channels out), at the destination (channels in, QEMU out), and
//! serves a QEMU that compresses by itself.
//!
//! # Order
//!
//! Between two barriers a page is sent at most once, so that batches may overtake each other. A sync point of
//! the incoming stream is one of the outgoing: the main thread waits until all channels have come to
//! their SYNC and every batch is written, then writes SYNC on all channels and the multifd flush. A source
//! without multifd has no sync points; there a barrier is made when a page comes a second time.
//!
//! # Who has the guest
//!
//! A QEMU runs the guest when it has read EOF, and its source takes the guest back if it then hears
//! nothing. A relay that was killed in between would make two of it. So the relay beside the source
//! lets EOF wait until its QEMU has given the guest up; `handover` draws it.
//!
//! Before SHUT(0) to the source every failure leaves the guest with it, and the destination without EOF.
//! Between SHUT(0) and EOF, some milliseconds, a killed relay leaves the guest paused at the source, whole,
//! and nowhere twice.

mod accept;
mod batch;
mod device_state;
pub mod file;
mod main_pages;
mod main_reader;
mod migration;
mod outgoing;
mod page_set;
mod pass_through;
mod receive;
mod restore;
mod session;
mod setup;
mod sink;
mod source;
mod watch;

use std::path::Path;
use std::time::Duration;

use hotlift_wire::WireError;
use hotlift_wire::main_channel::MainEvent;
use serde::{Deserialize, Serialize};

use crate::control::Control;
use crate::error::{Channel, MigrationError};
use crate::figures::{SideFigures, ratio, to_f64};
use crate::options::{OPTIONS, OptionError, Options, Role, ZeroPageDetection};
use crate::threads::run_as;
use crate::transport::{Address, Listener, Stream};
use file::{FileFormat, SavedVm};
use session::Relayed;

/// What a relay passes over though it has no hand in it: `hotlift save` and `hotlift migrate` hand `downtime-limit` on to
/// the source's QEMU, and the others change nothing of what a relay does.
const PASSED_OVER: [&str; 3] = ["downtime-limit", "accel-path", "zero-copy-send"];

/// Where the stream comes from.
#[derive(Debug)]
pub enum Incoming<'a> {
    /// The source connects here.
    Listener(&'a Listener),
    /// Connections that are made already, in any order.
    Connections(Vec<Stream>),
    /// A VM that was saved: a file of Hotlift's or a `mapped-ram` file of QEMU's, which is found out.
    File {
        /// The file.
        path: &'a Path,
        /// Byte where its content starts, as in QEMU's `file:PATH,offset=N`; 0 for Hotlift's own.
        offset: u64,
    },
}

/// Where it goes.
#[derive(Debug)]
pub enum Outgoing<'a> {
    /// To a relay or QEMU that listens there.
    Address(&'a Address),
    /// Into a file, which appears under its name when it is whole and on disk.
    File {
        /// The file; one that has this name is replaced.
        path: &'a Path,
        /// How it is written.
        format: FileFormat,
    },
}

/// How to pass the stream on.
#[derive(Debug, Clone)]
pub struct RelaySettings {
    /// Multifd channels, method, level and bandwidth of the outgoing side.
    pub outgoing: Options,
    /// How zero pages are sent: in packets (`Multifd`), as records of main (`Legacy`), or as they
    /// came, without looking for them (`None`). Not given: looked for where the source has not, and
    /// sent as the other side can read them.
    pub zero_pages: Option<ZeroPageDetection>,
    /// The VM's UUID, where the incoming side has no multifd channels to say it.
    pub uuid: Option<[u8; 16]>,
    /// QEMU's property `multifd-flush-after-each-section` of the outgoing side. Not given: as the
    /// incoming side has it; if that has no multifd, on for machine types up to 8.0.
    pub flush_after_each_section: Option<bool>,
    /// What each incoming connection must begin with: given to the one source that may connect, over a
    /// conversation of its own. Not given: whoever speaks the format is taken in.
    pub incoming_token: Option<[u8; 16]>,
    /// What each outgoing connection begins with, as the destination has asked for.
    pub outgoing_token: Option<[u8; 16]>,
}

impl Default for RelaySettings {
    /// Options of the table, but for the bandwidth: the source paces itself.
    fn default() -> Self {
        Self {
            outgoing: Options {
                max_bandwidth: 0,
                ..Options::default()
            },
            zero_pages: None,
            uuid: None,
            flush_after_each_section: None,
            incoming_token: None,
            outgoing_token: None,
        }
    }
}

/// Who owns the guest, as the source tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership {
    /// The source has released it for good: the destination may run it.
    Released,
    /// The source has taken it back.
    Kept,
    /// Not known yet.
    Unknown,
}

/// What somebody who can ask the destination otherwise knows of the guest there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// The destination has the guest.
    Yes,
    /// It does not have it, and never will: it has failed, or its process has ended.
    Never,
    /// Not known (yet).
    Unknown,
}

/// What the caller wants to know, and knows better.
#[derive(Default, Clone, Copy)]
pub struct Hooks<'a> {
    /// Takes reports, twice a second.
    pub on_progress: Option<&'a (dyn Fn(&RelayProgress) + Sync)>,
    /// Asked every few milliseconds, once all is loaded. With it the source may be silent in its set-up for as long as
    /// it likes; whoever knows better cancels. Without it the source has released the guest when it
    /// closes its main channel, which a cancel in that moment looks like, too.
    pub ownership: Option<&'a (dyn Fn() -> Ownership + Sync)>,
    /// Called once, before the first byte goes out at which the destination may run the guest. Whoever
    /// could end the destination by accident makes sure here that it no longer does.
    pub on_commit: Option<&'a (dyn Fn() + Sync)>,
    /// Asked while the destination, told to run the guest, has not said on the stream what became of
    /// it. Without it only the stream tells.
    pub has_taken: Option<&'a (dyn Fn() -> Taken + Sync)>,
}

/// A moment of a relay.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RelayProgress {
    /// Since the source's first connection.
    pub elapsed: Duration,
    /// Bytes read from all incoming channels.
    pub received_bytes: u64,
    /// Bytes written to all outgoing channels.
    pub sent_bytes: u64,
    /// Pages passed on with their content.
    pub normal_pages: u64,
    /// Pages passed on as zero.
    pub zero_pages: u64,
    /// Bytes of the VM's RAM blocks; 0 before they are known.
    pub total_bytes: u64,
}

/// What one migration through a relay came to.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RelayReport {
    /// From the source's first connection until word that the destination has the guest, in
    /// milliseconds.
    pub total_ms: f64,
    /// Bytes read from all incoming channels.
    pub received_bytes: u64,
    /// Bytes written to all outgoing channels.
    pub sent_bytes: u64,
    /// Pages passed on with their content.
    pub normal_pages: u64,
    /// Pages passed on as zero.
    pub zero_pages: u64,
    /// Barriers passed on or made.
    pub barriers: u64,
    /// Bytes of normal pages over `sent_bytes`.
    pub ratio: f64,
    /// `sent_bytes` × 8 over `total_ms`, in 10^6 bit/s.
    pub throughput_mbps: f64,
    /// The source's machine; empty for a stream that was passed through unread.
    pub machine: String,
    /// Page compression method of the outgoing side.
    pub method: String,
    /// Why the stream was passed through byte for byte; `None` for one that was relayed page by page.
    pub passed_through: Option<String>,
    /// Cost of this relay.
    pub side: SideFigures,
}

/// Passes one migration on, from its first connection to its end.
///
/// # Errors
/// Any [`MigrationError`]; all connections are closed then. The source has kept the guest, unless it is
/// [`MigrationError::InDoubt`], or [`MigrationError::Released`], which say what is known, or
/// [`MigrationError::Destination`] from a destination that refused to run a guest that the source had
/// released.
pub fn relay(
    incoming: Incoming<'_>,
    outgoing: &Outgoing<'_>,
    settings: &RelaySettings,
    control: &Control,
    hooks: Hooks<'_>,
) -> Result<RelayReport, MigrationError> {
    check(&settings.outgoing)?;
    if let Outgoing::File { format, .. } = outgoing {
        format.check(&settings.outgoing)?;
    }
    run_as("relay/main", control, || {
        let run = |incoming| migration::run(incoming, outgoing, settings, control, hooks);
        let relayed = match incoming {
            Incoming::File { path, offset } => match SavedVm::open(path, offset)? {
                SavedVm::Container(file) => {
                    file::play(*file, |played| run(Incoming::Connections(played)))
                }
                SavedVm::MappedRam(file) => restore::run(&file, outgoing, settings, control, hooks),
            },
            connected => run(connected),
        }?;
        Ok(report(relayed, control))
    })
}

/// A token that nobody can guess, for [`RelaySettings::incoming_token`].
///
/// # Errors
/// The kernel gives no random bytes.
pub fn new_token() -> std::io::Result<[u8; 16]> {
    Ok(crate::hello::new_id()?.0)
}

/// Whether a relay can do what the options ask for.
///
/// # Errors
/// [`OptionError`], also for what only a guest's own migration can do.
pub fn check(outgoing: &Options) -> Result<(), OptionError> {
    outgoing.check()?;
    let defaults = Options::default();
    for info in OPTIONS {
        let value = info.read(outgoing).to_string();
        if PASSED_OVER.contains(&info.name) || value == info.read(&defaults).to_string() {
            continue;
        }
        let by_name = info.refusal(Role::Relay);
        if let Some(instead) = by_name.or_else(|| info.value_refusal(Role::Relay, &value)) {
            return Err(OptionError::NotForRelay {
                option: format!("{}={value}", info.name),
                instead,
            });
        }
    }
    Ok(())
}

fn report(relayed: Relayed, control: &Control) -> RelayReport {
    let Relayed {
        total,
        received_bytes,
        sent_bytes,
        pages,
        barriers,
        machine,
        method,
        passed_through,
        threads,
    } = relayed;
    RelayReport {
        total_ms: total.as_secs_f64() * 1e3,
        received_bytes,
        sent_bytes,
        normal_pages: pages.normal_pages,
        zero_pages: pages.zero_pages,
        barriers,
        ratio: ratio(to_f64(pages.normal_pages) * 4096.0, to_f64(sent_bytes)),
        throughput_mbps: ratio(to_f64(sent_bytes) * 8.0 / 1e6, total.as_secs_f64()),
        machine,
        method: method.to_owned(),
        passed_through,
        side: SideFigures::new(threads, total, pages.normal_pages, control.jobs()),
    }
}

fn closed() -> MigrationError {
    MigrationError::Closed {
        channel: Channel::Main,
    }
}

fn wire(source: WireError) -> MigrationError {
    MigrationError::Wire {
        channel: Channel::Main,
        source,
    }
}

/// An event's name, without what is in it.
fn name(event: &MainEvent<'_>) -> String {
    let text = format!("{event:?}");
    let end = text.find([' ', '(', '{']).unwrap_or(text.len());
    text[..end].to_owned()
}
