//! Connections between two hosts: sockets by address, admission of unauthenticated clients, and conversations.
//!
//! Each module uses only the modules above it.
//!
//! | module | subject |
//! |---|---|
//! | [`transport`] | sockets by address, TLS on them |
//! | [`admission`] | accepts connections: limits handshakes and pending connections, classifies by the first bytes |
//! | [`conversation`] | negotiation of a migration: a hello message, then lines of JSON |
//!
//! This crate does not know the options and the lifetime of a migration. A wait that a migration can interrupt takes a
//! [`transport::Stop`]. The engine decides which connections belong to one migration.
//!
//! # Example
//!
//! A listener on loopback admits a client, and classifies the client's connection by its first bytes.
//!
//! ```
//! use std::io::Write;
//! use std::time::{Duration, Instant};
//!
//! use hotlift_mem::wait_readable;
//! use hotlift_net::admission::limits::Limits;
//! use hotlift_net::admission::{Admission, Admitted, ConnectionClass};
//! use hotlift_net::transport::Address;
//!
//! let max_wait = Duration::from_secs(10);
//! let listener = "tcp:127.0.0.1:0".parse::<Address>()?.listen()?;
//! let client = listener.address()?.connect(max_wait)?;
//! (&client).write_all(b"{")?; // a conversation: a line of JSON
//!
//! let mut admission = Admission::new(&listener, None, Limits { most: 64, max_wait })?;
//! let class = loop {
//!     let now = Instant::now();
//!     let until = now + admission.shortened(max_wait, now);
//!     wait_readable(&admission.polled(now).collect::<Vec<_>>(), Some(until));
//!     admission.accept(Instant::now(), |one| one)?;
//!     assert!(admission.pending.take_late(Instant::now()).is_none());
//!     let ready = admission.pending.next_ready();
//!     let class = ready.and_then(|number| admission.pending.get(number).map(Admitted::classify));
//!     match class {
//!         None | Some(ConnectionClass::Partial) => {}
//!         Some(class) => break class,
//!     }
//! };
//! assert_eq!(class, ConnectionClass::Hello);
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

pub mod admission;
pub mod conversation;
pub mod transport;
