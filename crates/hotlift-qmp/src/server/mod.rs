//! The other end of the protocol: serves QMP to many clients at once, over sockets that the caller has
//! bound.
//!
//! | file | what |
//! |---|---|
//! | `commands` | what a server runs for its clients |
//! | `clients` | accepts, counts and ends the clients of a socket |
//! | `framing` | JSON values out of a stream of bytes, with limits |
//! | `session` | one client: greeting, negotiation, commands |
//! | `outbox` | what is on its way to a client; events that never wait for one |
//!
//! Nothing that a client does waits in the program that is served: an event goes into a queue with a
//! limit, and a client that lets it fill up is dropped.

mod clients;
mod commands;
mod framing;
mod outbox;
mod session;

pub use clients::{BoundSocket, Clients, MAX_CLIENTS};
pub use commands::{Commands, Refusal};
pub use framing::{MAX_NESTING, MAX_REQUEST};
pub use outbox::{Events, MAX_EVENTS_WAITING};
pub use session::{TOO_MANY_CLIENTS, serve_client};
