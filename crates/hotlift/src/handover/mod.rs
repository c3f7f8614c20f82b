//! Ownership of the guest: the state machines of the handover, without I/O and without clocks.
//!
//! The source's side ([`SourceSide`]) belongs to a guest's own migration, or to the relay beside the source's QEMU. The
//! destination's side ([`DestinationSide`]) belongs to an arriving guest, or to the relay beside the destination's QEMU. Each
//! side takes events, and returns the actions that are allowed now. A migration's threads share the sides through
//! [`SourceHandover`] and [`DestinationHandover`].
//!
//! ```text
//!  source's side                                              destination's side
//!  KEEPS      stops the guest, sends the rest
//!             PING                                     ---->  LOADING  loads everything
//!                                                      <----  LOADED   PONG
//!  (relay: OFFERED  SHUT(0) to its QEMU;  RELEASED  the QEMU has released the guest)
//!  COMMITTED  EOF on main, SYNC on every channel       ---->  STARTING the first of them starts the guest
//!                                                      <----  TAKEN    SHUT(0) on every socket
//!  MOVED      confirmation                             ---->
//! ```
//!
//! Before COMMITTED, every failure leaves the guest with the source. The destination has received no commit, and never runs the
//! guest. From COMMITTED on, only a statement of the destination decides: SHUT(0), a SHUT with an error message, or the answer
//! to an outcome query. A FIN, a reset and silence prove nothing, because proxies and kernels turn each into another. A source
//! without a statement connects again to the destination's listener and asks:
//!
//! ```text
//!  COMMITTED  "outcome of migration M?"                ---->  LOADING, LOADED: becomes NEVER first
//!                                                      <----  TAKEN: "runs"; NEVER: "never"; STARTING: "ask again"
//!  MOVED, or REFUSED: the guest continues at the source
//! ```
//!
//! The source asks until `settle-timeout` ends. Then its state is DOUBT, and it keeps the guest paused. The destination answers
//! until it receives the confirmation, or until no source can ask any more.
//!
//! A QEMU at the destination may have loaded the guest without running it, because it cannot lock a disk. A `cont` can start
//! the guest later, at any moment. The destination's side sees this over QMP:
//!
//! ```text
//!  STARTING   SHUT(0) of its QEMU; QMP: runs                   TAKEN
//!             QMP: does not run a guest that ran; this process started that QEMU, ends it,
//!             and sees that it has ended and never ran the guest                    NEVER
//!             the same, of a QEMU of another process           TAKEN: an operator decides, and both commands exit with 3
//! ```
//!
//! The statement includes the QMP result: the guest runs, does not run as expected, or does not run although it ran before. A
//! QEMU that sends SHUT(0), and does not answer over QMP, has the guest: TAKEN. Later QMP results are sent on other connections
//! than the stream. If the destination ended that QEMU before the guest ran, the source changes from MOVED back to owning the
//! guest.
//!
//! So the source takes the guest back only after the destination has seen that QEMU end. If a `cont` made the QEMU run the
//! guest before its end, the guest has changed the disks. Then the destination's side is UNSURE, and the source's is DOUBT.
//!
//! The commit of a postcopy is earlier, and its end is later:
//!
//! ```text
//!  KEEPS      stops the guest, sends the list of pages to discard
//!             PING                                     ---->  LOADING  discards them
//!                                                      <----           PONG
//!  SERVING    PACKAGED{devices, RUN}                   ---->  STARTING, TAKEN: the guest runs
//!             pages                                    <--->  requests pages
//!             END, EOF                                 ---->
//!  MOVED                                               <----  SHUT(0): it has all pages
//!             confirmation                             ---->
//! ```
//!
//! Before SERVING the source owns the guest. After that the guest never runs at the source again, unless the destination states
//! that the guest never ran there. The source keeps its pages until the destination has all of them. A lost connection leaves
//! the migration `postcopy-paused` until one of these events:
//!
//! - another connection replaces the lost one
//! - an answer states that all pages have arrived
//! - the operator cancels; if the guest is known to run at the destination, the migration ends with PAGES LOST
//!
//! A QEMU answers no outcome query, and may send SHUT(1) for a guest that has run.
//!
//! The tests explore every order of messages, losses, cuts, kills and cancels with exactly this code (`tests/model.rs`).

mod destination;
mod outcome_query;
mod ownership;
pub(crate) mod settle;
mod source;
mod source_handover;

pub(crate) use destination::{DestinationHandover, DestinationSide};
pub(crate) use outcome_query::{
    await_statement, confirm_outcome, notify_not_committed, query_once,
};
pub(crate) use ownership::OwnershipWait;
pub use ownership::QemuGuestState;
pub(crate) use source::{DestinationStatement, SourceOutcome};
pub(crate) use source_handover::SourceHandover;

#[cfg(test)]
mod tests {
    mod model;
}
