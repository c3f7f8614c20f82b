//! Who has the guest: the one state machine of the hand-over, without I/O and without clocks.
//!
//! The source's side ([`SourceSide`]) is a guest's own migration or the relay beside the source's QEMU;
//! the destination's side ([`DestinationSide`]) is a guest that arrives or the relay beside the
//! destination's QEMU. Both are only told what happened, and say what may be done now. What a migration's threads share
//! of them are [`Giving`] and [`Taking`].
//!
//! ```text
//!  source's side                                              destination's side
//!  KEEPS      stops the guest, sends the rest
//!             PING                                     ---->  LOADING  loads everything
//!                                                      <----  LOADED   PONG
//!  (relay: OFFERED  SHUT(0) to its QEMU;  RELEASED  the QEMU has given the guest up)
//!  COMMITTED  EOF on main, SYNC on every channel       ---->  TAKING   the first of them makes it run the guest
//!                                                      <----  TAKEN    SHUT(0) on every socket
//!  MOVED      "heard"                                  ---->
//! ```
//!
//! Up to COMMITTED every failure leaves the guest with the source, and the destination, which has heard
//! of no commit, never runs it. From COMMITTED on only a statement of the destination decides: SHUT(0), a
//! refusal in words, or the answer to a question. A FIN, a reset and silence say nothing: proxies and
//! kernels turn each into another. A source without a statement connects once more to where the
//! destination listens and asks:
//!
//! ```text
//!  COMMITTED  "what became of migration M?"            ---->  LOADING, LOADED: becomes NEVER first
//!                                                      <----  TAKEN: "runs"; NEVER: "never"; TAKING: "ask again"
//!  MOVED, or REFUSED: the guest goes on at the source
//! ```
//!
//! It asks until `settle-timeout` is over, and only then is in DOUBT: the guest is kept, paused. The
//! destination answers until it has read "heard", or until no source can ask any more.
//!
//! A QEMU at the destination may have the guest and not run it, since it cannot lock a disk; a `cont` runs it later, at any
//! moment. QMP shows it to the destination's side:
//!
//! ```text
//!  TAKING     SHUT(0) of its QEMU; QMP: runs                   TAKEN
//!             QMP: does not run what ran; this process started that QEMU, ends it,
//!             and sees that it has ended and never ran the guest                    NEVER
//!             the same of a QEMU of somebody else              TAKEN: an operator decides, and both commands end with 3
//! ```
//!
//! The statement carries what QMP shows: the guest runs, does not run as expected, or does not run though it ran. A QEMU that
//! sends SHUT(0) and does not answer over QMP has the guest: TAKEN. What it shows later travels beside the stream, and
//! the source takes the guest back out of MOVED if that QEMU was ended here and never ran it.
//!
//! So the source takes the guest back only after that QEMU was seen to end. One that was continued before its end has
//! changed the disks: the destination's side is unsure of it, and the source in doubt.
//!
//! A postcopy commits earlier, and ends later:
//!
//! ```text
//!  KEEPS      stops the guest, tells what is to be thrown away
//!             PING                                     ---->  LOADING  does so
//!                                                      <----           PONG
//!  SERVING    PACKAGED{devices, RUN}                   ---->  TAKING, TAKEN: the guest runs
//!             pages                                    <--->  asks for pages
//!             END, EOF                                 ---->
//!  MOVED                                               <----  SHUT(0): it has all
//!             "heard"                                  ---->
//! ```
//!
//! Up to SERVING the guest is the source's as ever. From then on it never runs here again, unless the destination says
//! that it never ran there, and it is not let go of before the destination has all of its pages: a lost connection leaves
//! it `postcopy-paused`, until another takes its place, an answer says that all is there, or the operator gives it up. Who
//! does that with a guest that is known
//! to run there leaves it TORN. A QEMU answers no question, and its SHUT(1) may come of a guest that has run.
//!
//! The tests explore every order of messages, losses, cuts, kills and cancels on exactly this code
//! (`tests/model.rs`).

mod ask;
mod destination;
mod giving;
mod ownership;
pub(crate) mod settle;
mod source;

pub(crate) use ask::{ask_once, await_word, say_farewell, say_heard};
pub(crate) use destination::{DestinationSide, Taking};
pub(crate) use giving::Giving;
pub use ownership::Taken;
pub(crate) use ownership::TakenByQemu;
pub(crate) use source::{Verdict, Word};

#[cfg(test)]
mod tests {
    mod model;
}
