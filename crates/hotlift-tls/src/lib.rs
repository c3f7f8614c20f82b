//! TLS 1.3 for the connections of a migration: certificates on both sides, and records that separate threads seal and open.
//!
//! ```text
//! Credentials   a folder of certificates, laid out as for QEMU, libvirt or cert-manager; read again when it changes
//!      │
//!     Tls       rules for the peer: host name, allow-list, profile (another Hotlift, or a QEMU)
//!      │  connect, accept: a handshake within 10 s and 64 KiB of the peer's data
//!   Session     the peer's identity, the exporter, and one half for each direction
//!    ├─ RecordSealer   plaintext ─▶ records of 14.5 KiB, three to a system call
//!    └─ RecordOpener   records ─▶ plaintext, decrypted where they were read
//! ```
//!
//! rustls does the handshake, and keeps the key schedule. This crate seals and opens the records itself, because:
//! - a thread must be able to send while another thread is blocked in a read, and rustls has one object for both directions
//! - rustls copies sent data once more
//!
//! [`RecordSealer`] and [`RecordOpener`] share the key schedule and a flag. Only a KeyUpdate takes the lock of the key
//! schedule. The flag shows that the peer has requested new keys.
//!
//! A connection uses at most [`CONNECTION_MEMORY`] of buffers: 43.5 KiB for the first direction with bulk data, and one record
//! for the second direction. Buffers grow with the data sent and received: a quiet connection has about 2 KiB.
//!
//! The callers decide:
//! - which connections need TLS
//! - how many handshakes with unauthenticated peers may run
//! - if an end without `close_notify` is valid (QEMU's main channel)
//!
//! # Example
//!
//! ```no_run
//! use std::net::TcpStream;
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! use hotlift_tls::{Credentials, Profile, Settings, Tls};
//!
//! let credentials = Credentials::open(Path::new("/etc/pki/hotlift"))?;
//! let tls = Tls::new(Arc::new(credentials), Settings::new(Profile::Hotlift));
//! let mut socket = TcpStream::connect("b.example:4444")?;
//! let mut session = tls.connect(&socket, Some("b.example"))?;
//! let mut answer = [0; 5];
//! session.opener.read_exact(&mut socket, &mut answer)?;
//! session.sealer.close(&mut socket)?;
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod authority;
mod authz;
mod binding;
mod cipher;
mod credentials;
mod error;
#[doc(hidden)]
pub mod fixed;
mod handshake;
mod identity;
mod link;
mod listing;
mod measure;
mod printable;
mod provider;
mod record;
mod record_opener;
mod record_sealer;
mod sniff;
mod socket;
mod tls;
mod verify;

pub use authority::{Authority, AuthorityError, CA_DAYS, HOST_DAYS, Issued};
pub use authz::{Authz, AuthzError};
pub use binding::Exporter;
pub use credentials::{Credentials, ENDS_SOON, FOLDERS, Role, Warning, find_folder};
pub use error::{Alert, CredentialsError, Fault, Missing, RecordError, TlsError};
pub use identity::{Identity, NotACertificate};
pub use link::CONNECTION_MEMORY;
pub use listing::{File, Listing};
pub use measure::measure_cipher;
pub use record::{MAX_CIPHERTEXT, RECORD_PLAINTEXT, RECORDS_PER_KEY};
pub use record_opener::RecordOpener;
pub use record_sealer::{Plaintext, RecordSealer, Slices};
pub use sniff::{ALERT_BEGINS, HANDSHAKE_BEGINS, SNIFFED, is_tls};
pub use tls::{HANDSHAKE_BYTES, HANDSHAKE_TIMEOUT, Profile, Session, Settings, Tls};
