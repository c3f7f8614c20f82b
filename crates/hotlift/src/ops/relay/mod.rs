//! The relay: passes a QEMU's migration stream on. It takes the pages out of the stream, compresses them and spreads them over
//! channels, or does the reverse.
//!
//! ```text
//! stream_source   packets, records of main -> batches
//! file            a save file, or a mapped-ram file -> batches
//! pipe            a fixed number of batches between readers and writers
//! stream_sink     batches -> packets, sync points, device state
//! file            batches -> a save file, or a mapped-ram file
//! ```
//!
//! Both sides are QEMU's stream: main and multifd channels in any method, or main alone. The format of the incoming stream is
//! detected, and the options define that of the outgoing one. So one engine works at the source (QEMU in, channels out), at the
//! destination (channels in, QEMU out), and with a QEMU that compresses by itself.
//!
//! # Order
//!
//! Between two barriers a page is sent at most once, so that batches may overtake each other. A sync point of the incoming
//! stream becomes one of the outgoing stream. The main thread waits until all channels have reached their SYNC and every batch
//! is written. Then it writes SYNC on all channels, and the multifd flush. A source without multifd has no sync points; there a
//! barrier is made when a page comes a second time.
//!
//! # Ownership of the guest
//!
//! A QEMU runs the guest when it has read EOF, and its source takes the guest back if it then receives nothing. A relay that
//! was killed in between would make two guests of it. So the relay beside the source holds EOF back until its QEMU has released
//! the guest; `handover` has the diagram.
//!
//! Before SHUT(0) to the source, every failure leaves the guest with the source, and the destination without EOF. If a relay is
//! killed in the milliseconds between SHUT(0) and EOF, the guest is complete and paused at the source, and runs nowhere.

mod pass_on;
mod restore;

use serde::{Deserialize, Serialize};

use crate::ends::request::Request;
pub use crate::ends::request::{Incoming, Outgoing};
pub use crate::handover::QemuGuestState;
pub use crate::pipe::hooks::{HasTaken, Hooks, Ownership, RelayProgress, SourceStream};
pub use crate::pipe::settings::{RelaySettings, UnusedRam};

pub use hotlift_net::admission::ConnectionToken;
pub use hotlift_wire::settle::GuestActivity;

use crate::control::Control;
use crate::control::run_as;
use crate::ends::file::{LostPages, SavedVm};
use crate::error::MigrationError;
use crate::figures::{MethodFigures, SideFigures, ratio, to_f64};
use crate::pipe::session::Relayed;

/// Result of one migration through a relay.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RelayReport {
    /// From the source's first connection until the report that the destination has the guest, in milliseconds.
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
    /// Packets by method, if each packet has its own method.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<MethodFigures>,
    /// Reason why the stream was passed through byte for byte; `None` for one that was relayed page by page.
    pub passed_through: Option<String>,
    /// With [`RelaySettings::salvage`]: damaged pages of the file, which are zero.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<LostPages>,
    /// Cost of this relay.
    pub side: SideFigures,
}

/// Passes one migration on, from its first connection to its end.
///
/// # Errors
/// Any [`MigrationError`]; all connections are closed then. The source has kept the guest, with four exceptions:
/// [`MigrationError::InDoubt`], [`MigrationError::Released`] and [`MigrationError::PagesMissing`] state where the guest is. In
/// the case of [`MigrationError::Destination`], the source may already have released the guest that the destination refused.
pub fn relay(
    incoming: Incoming<'_>,
    outgoing: &Outgoing<'_>,
    settings: &RelaySettings,
    control: &Control,
    hooks: Hooks<'_>,
) -> Result<RelayReport, MigrationError> {
    settings.outgoing.check()?;
    if let Outgoing::File { format, .. } = outgoing {
        format.check(&settings.outgoing)?;
    }
    let request = Request {
        outgoing,
        settings,
        control,
        hooks,
    };
    run_as("relay/main", control, || {
        let salvage = settings.salvage;
        let vm = match incoming {
            Incoming::Listener(listener) => {
                return Ok(report(pass_on::run(listener, request)?, control));
            }
            Incoming::File { path, offset } => SavedVm::open(path, offset, salvage)?,
            Incoming::Remote(file) => SavedVm::open_remote(file, control, salvage)?,
        };
        let relayed = restore::from(&vm, request)?;
        Ok(RelayReport {
            lost: vm.lost(),
            ..report(relayed, control)
        })
    })
}

/// Returns a token that cannot be guessed, for [`RelaySettings::incoming_pass`].
///
/// # Errors
/// The system's error if the kernel has no random bytes.
pub fn new_token() -> std::io::Result<[u8; 16]> {
    Ok(crate::stream::handshake::new_id()?.0)
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
        methods,
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
        methods,
        passed_through,
        lost: Vec::new(),
        side: SideFigures::new(threads, total, pages.normal_pages, control.jobs()),
    }
}
