//! QMP server: serves many clients at once, over sockets that the caller has bound.
//!
//! | file | subject |
//! |---|---|
//! | `commands` | commands that a server executes for its clients |
//! | `clients` | accepts, counts and disconnects the clients of a socket |
//! | `framing` | splits a byte stream into JSON values, with limits |
//! | `session` | session of one client: greeting, negotiation, commands |
//! | `outbox` | queue of messages to a client; events never block |
//!
//! A client cannot block the program. Events go into a bounded queue, and a client whose queue is full is disconnected.

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
