//! The relay: forwards a QEMU's migration stream. It extracts the pages from the stream, compresses them and distributes them
//! over channels, or does the reverse.
//!
//! ```text
//! stream_source   packets, records of main -> batches
//! file            a save file, or a mapped-ram file -> batches
//! pipe            a fixed number of batches between readers and writers
//! stream_sink     batches -> packets, sync points, device state
//! file            batches -> a save file, or a mapped-ram file
//! ```
//!
//! Input and output are QEMU's stream: main and multifd channels in any method, or main alone. The format of the incoming
//! stream is detected; the options define the format of the outgoing stream. So one engine covers three cases:
//!
//! - at the source: QEMU in, channels out
//! - at the destination: channels in, QEMU out
//! - with a QEMU that compresses by itself
//!
//! # Order
//!
//! Between two barriers a page is sent at most once, so batches may be written in any order. A sync point of the incoming
//! stream becomes a sync point of the outgoing stream. The main thread waits until all channels have reached their SYNC and
//! every batch is written. Then it writes SYNC on all channels, and the multifd flush. A source without multifd has no sync
//! points: there the relay makes a barrier when a page comes a second time.
//!
//! # Ownership of the guest
//!
//! A QEMU runs the guest when it has read EOF, and its source resumes the guest if the source then receives nothing. A relay
//! that is killed between these two events would cause two running guests. So the relay beside the source delays EOF until its
//! QEMU has released the guest. Module `handover` has the diagram.
//!
//! If the relay fails before it sends SHUT(0) to the source, the source keeps the guest, and the destination gets no EOF. If a
//! relay is killed in the milliseconds between SHUT(0) and EOF, no QEMU runs the guest. The guest is then complete and paused
//! at the source.

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
    /// Time from the source's first connection until the report that the destination has the guest, in milliseconds.
    pub total_ms: f64,
    /// Bytes read from all incoming channels.
    pub received_bytes: u64,
    /// Bytes written to all outgoing channels.
    pub sent_bytes: u64,
    /// Pages forwarded with their content.
    pub normal_pages: u64,
    /// Pages forwarded as zero.
    pub zero_pages: u64,
    /// Barriers of the outgoing stream.
    pub barriers: u64,
    /// Compression ratio: bytes of the normal pages, divided by `sent_bytes`.
    pub ratio: f64,
    /// Throughput in 10^6 bit/s: `sent_bytes` × 8 over `total_ms`.
    pub throughput_mbps: f64,
    /// Machine type of the source; empty if the stream was passed through unread.
    pub machine: String,
    /// Page compression method of the outgoing stream.
    pub method: String,
    /// Packets by method, if the method can differ between packets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<MethodFigures>,
    /// Reason why the stream was passed through byte for byte; `None` if it was relayed page by page.
    pub passed_through: Option<String>,
    /// With [`RelaySettings::salvage`]: damaged pages of the file, which are zero.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<LostPages>,
    /// Cost of this relay: CPU time and accelerator statistics.
    pub side: SideFigures,
}

/// Forwards one migration, from its first connection to its end.
///
/// # Errors
/// Any [`MigrationError`]. All connections are closed then. The source has kept the guest, except after these errors:
///
/// - [`MigrationError::InDoubt`], [`MigrationError::Released`] and [`MigrationError::PagesMissing`] state where the guest is.
/// - [`MigrationError::Destination`]: the destination refused the guest, but the source may already have released it.
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

/// Returns a random token that cannot be guessed, for [`RelaySettings::incoming_pass`].
///
/// # Errors
/// The system's error if the kernel cannot provide random bytes.
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
