//! Connections between two hosts: sockets by address, the admission of clients that are not known yet, and conversations.
//!
//! Each module uses those above it.
//!
//! | module | subject |
//! |---|---|
//! | [`transport`] | sockets by address, TLS on them |
//! | [`admission`] | the one door: handshakes and connections by number and time, classified by their first bytes |
//! | [`conversation`] | two hosts agree on a migration: one hello, lines of JSON |
//!
//! What is *not* here: options, and the lifetime of a migration. A wait that a migration can end takes a descriptor for it
//! ([`transport::Stop`]); which connections belong to one migration is decided in the engine.
//!
//! # Example
//!
//! A listener on loopback admits a client, and classifies it by its first bytes.
//!
//! ```
//! use std::io::Write;
//! use std::time::{Duration, Instant};
//!
//! use hotlift_mem::wait_readable;
//! use hotlift_net::admission::limits::Limits;
//! use hotlift_net::admission::{Admission, Admitted, Head};
//! use hotlift_net::transport::Address;
//!
//! let patience = Duration::from_secs(10);
//! let listener = "tcp:127.0.0.1:0".parse::<Address>()?.listen()?;
//! let client = listener.address()?.connect(patience)?;
//! (&client).write_all(b"{")?; // a conversation: a line of JSON
//!
//! let mut admission = Admission::new(&listener, None, Limits { most: 64, patience })?;
//! let head = loop {
//!     let now = Instant::now();
//!     let until = now + admission.shortened(patience, now);
//!     wait_readable(&admission.polled(now).collect::<Vec<_>>(), Some(until));
//!     admission.accept(Instant::now(), |one| one)?;
//!     assert!(admission.room.take_late(Instant::now()).is_none());
//!     let news = admission.room.next_news();
//!     let head = news.and_then(|number| admission.room.get(number).map(Admitted::look));
//!     match head {
//!         None | Some(Head::Partial) => {}
//!         Some(head) => break head,
//!     }
//! };
//! assert_eq!(head, Head::Hello);
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

pub mod admission;
pub mod conversation;
pub mod transport;
