//! TLS handshakes of both sides.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::client::{ClientConfig, Resumption, UnbufferedClientConnection};
use rustls::pki_types::ServerName;
use rustls::server::{NoServerSessionStorage, ServerConfig, UnbufferedServerConnection};
use rustls::version::TLS13;
use rustls::{CipherSuite, Error, PeerIncompatible};

use crate::authz::Authz;
use crate::binding::{Exporter, ExporterSecret};
use crate::cipher::Cipher;
use crate::credentials::{Credentials, OwnCertificate, Role, Warning};
use crate::error::{Alert, RecordError, TlsError};
use crate::handshake::{Connection, drive};
use crate::identity::Identity;
use crate::link::Link;
use crate::listing::Listing;
use crate::provider::provider;
use crate::record::RECORDS_PER_KEY;
use crate::record_opener::RecordOpener;
use crate::record_sealer::RecordSealer;
use crate::socket::BoundedSocket;
use crate::verify::{Seen, Verifier, fault};

/// Timeout of a handshake, from the first byte to the last.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Limit of bytes from a peer until the handshake is done. A certificate chain has some kilobytes.
pub const HANDSHAKE_BYTES: usize = 64 << 10;

/// Protocol name in ALPN, by which two Hotlifts recognize each other.
const ALPN: &str = "hotlift/1";

/// Kind of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// Another Hotlift. Both sides use ALPN, and the server's first record confirms that it accepts the client. A TLS 1.3
    /// client finishes its handshake before the server has verified the client's certificate. With the confirmation, the client
    /// receives a rejection while it connects, not while it sends.
    Hotlift,
    /// A QEMU with `tls-creds-x509`: no ALPN. The client receives a rejection only with its first read.
    Qemu,
}

/// Settings of TLS connections.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Type of the peer.
    pub profile: Profile,
    /// QEMU's `tls-hostname`: the required name in a server's certificate, if it is not that of its address.
    pub hostname: Option<String>,
    /// QEMU's `tls-authz`: allow-list of peers, in addition to a certificate of the CA.
    pub authz: Option<Arc<Authz>>,
    /// QEMU's `verify-peer` at the server. If false, the server requests no certificate, and a client sends none. A client
    /// always verifies its server.
    pub verify_peer: bool,
    /// Timeout of a handshake.
    pub handshake_timeout: Duration,
    /// Number of records that this side sends with one key before it changes the key.
    pub records_per_key: u64,
}

impl Settings {
    /// Returns the default settings.
    #[must_use]
    pub fn new(profile: Profile) -> Self {
        Self {
            profile,
            hostname: None,
            authz: None,
            verify_peer: true,
            handshake_timeout: HANDSHAKE_TIMEOUT,
            records_per_key: RECORDS_PER_KEY,
        }
    }
}

/// TLS with given credentials and settings, for any number of connections.
#[derive(Debug)]
pub struct Tls {
    credentials: Arc<Credentials>,
    settings: Settings,
}

/// A connection after its handshake. One thread may use `opener` while another uses `sealer`, with the same socket.
#[derive(Debug)]
pub struct Session {
    /// The peer's verified certificate; a client without [`Settings::verify_peer`] has none.
    pub peer: Option<Identity>,
    /// Name of the cipher, such as `TLS13_AES_128_GCM_SHA256`.
    pub cipher: String,
    /// Computes values that only the two ends know.
    pub exporter: Exporter,
    /// Opens received records.
    pub opener: RecordOpener,
    /// Seals records to send.
    pub sealer: RecordSealer,
}

impl Tls {
    /// Creates a value with `credentials`, which several values can share.
    #[must_use]
    pub fn new(credentials: Arc<Credentials>, settings: Settings) -> Self {
        // The first random bytes of a process take 20 to 25 ms. They are made now, before the first handshake.
        let _ = aws_lc_rs::rand::fill(&mut [0]);
        Self {
            credentials,
            settings,
        }
    }

    /// Returns a copy with the handshake timeout `timeout`, if that is shorter.
    #[must_use]
    pub fn within(&self, timeout: Duration) -> Self {
        let settings = self.settings.clone();
        let handshake_timeout = timeout.min(settings.handshake_timeout);
        Self {
            credentials: Arc::clone(&self.credentials),
            settings: Settings {
                handshake_timeout,
                ..settings
            },
        }
    }

    /// Returns the type of the peer.
    #[must_use]
    pub fn profile(&self) -> Profile {
        self.settings.profile
    }

    /// Returns warnings about certificates that can still be used.
    #[must_use]
    pub fn warnings(&self) -> Vec<Warning> {
        self.credentials.warnings(SystemTime::now())
    }

    /// Lists the folder of certificates, with the problems that a handshake would find.
    #[must_use]
    pub fn listing(&self) -> Listing {
        Listing::read(self.credentials.dir(), SystemTime::now())
    }

    /// Does the client's handshake on `socket`, connected to the host name or IP address `host`. The socket must be blocking,
    /// and no data may have been sent or received. After an error it should be closed.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn connect(&self, socket: impl AsFd, host: Option<&str>) -> Result<Session, TlsError> {
        self.connect_unless(socket, host, None, &|| false)
    }

    /// Does the same as [`Self::connect`], but fails once `is_cancelled` returns true. `wake_fd` must become readable when the
    /// result of `is_cancelled` may have changed; `is_cancelled` must read and discard the data in `wake_fd`.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn connect_unless(
        &self,
        socket: impl AsFd,
        host: Option<&str>,
        wake_fd: Option<BorrowedFd<'_>>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Session, TlsError> {
        let name = self.settings.hostname.as_deref().or(host);
        let name = name
            .filter(|name| !name.is_empty())
            .ok_or(TlsError::NoHostname)?;
        let server = ServerName::try_from(name.to_owned()).map_err(|_| TlsError::BadHostname {
            name: name.to_owned(),
        })?;
        let material = self.credentials.current();
        let shown = match self.settings.verify_peer {
            true => Some(material.own(Role::Client)?),
            false => None,
        };
        shown.map_or(Ok(()), is_valid_now)?;

        let handshake = Handshake::new(self);
        let verifier = Verifier {
            chain: Arc::clone(&material.server_verifier),
            authz: self.settings.authz.clone(),
            seen: handshake.seen.clone(),
        };
        let builder = ClientConfig::builder_with_provider(provider());
        let builder = builder
            .with_protocol_versions(&[&TLS13])
            .map_err(TlsError::Handshake)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier));
        let mut config = match shown {
            Some(own) => builder.with_client_cert_resolver(Arc::clone(&own.key) as _),
            None => builder.with_no_client_auth(),
        };
        config.resumption = Resumption::disabled();
        // The server name would be sent in the clear, and no Hotlift or QEMU serves several names.
        config.enable_sni = false;
        config.enable_secret_extraction = true;
        config.alpn_protocols = self.alpn();
        config.key_log = Arc::clone(&handshake.secret) as _;
        let connection = UnbufferedClientConnection::new(Arc::new(config), server);
        handshake.run(
            connection.map_err(TlsError::Handshake)?,
            &socket,
            Role::Server,
            wake_fd,
            is_cancelled,
        )
    }

    /// Does the server's handshake on `socket`, an accepted connection. Otherwise as [`Self::connect`].
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn accept(&self, socket: impl AsFd) -> Result<Session, TlsError> {
        let material = self.credentials.current();
        let own = material.own(Role::Server)?;
        is_valid_now(own)?;

        let handshake = Handshake::new(self);
        let verifier = Verifier {
            chain: Arc::clone(&material.client_verifier),
            authz: self.settings.authz.clone(),
            seen: handshake.seen.clone(),
        };
        let builder = ServerConfig::builder_with_provider(provider());
        let builder = builder
            .with_protocol_versions(&[&TLS13])
            .map_err(TlsError::Handshake)?;
        let builder = match self.settings.verify_peer {
            true => builder.with_client_cert_verifier(Arc::new(verifier)),
            false => builder.with_no_client_auth(),
        };
        let mut config = builder.with_cert_resolver(Arc::clone(&own.key) as _);
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        // QEMU's clients prefer AES-256, which takes a sixth more time than AES-128.
        config.ignore_client_order = true;
        config.enable_secret_extraction = true;
        config.alpn_protocols = self.alpn();
        config.key_log = Arc::clone(&handshake.secret) as _;
        let connection = UnbufferedServerConnection::new(Arc::new(config));
        handshake.run(
            connection.map_err(TlsError::Handshake)?,
            &socket,
            Role::Client,
            None,
            &|| false,
        )
    }

    fn alpn(&self) -> Vec<Vec<u8>> {
        match self.settings.profile {
            Profile::Hotlift => vec![ALPN.as_bytes().to_vec()],
            Profile::Qemu => Vec::new(),
        }
    }
}

/// Returns an error if this side's certificate is not valid now, since the peer would reject it.
fn is_valid_now(own: &OwnCertificate) -> Result<(), TlsError> {
    let now = SystemTime::now();
    if own.identity.begins <= now && now <= own.identity.ends {
        return Ok(());
    }
    Err(TlsError::OursNotValid {
        file: own.file.clone(),
        begins: own.identity.begins,
        ends: own.identity.ends,
    })
}

/// One handshake and its results.
struct Handshake<'a> {
    settings: &'a Settings,
    seen: Seen,
    secret: Arc<ExporterSecret>,
}

impl<'a> Handshake<'a> {
    fn new(tls: &'a Tls) -> Self {
        Self {
            settings: &tls.settings,
            seen: Seen::default(),
            secret: Arc::default(),
        }
    }

    /// Runs the handshake; the peer has the role `peer`.
    fn run(
        &self,
        mut connection: impl Connection,
        socket: &impl AsFd,
        peer: Role,
        wake_fd: Option<BorrowedFd<'_>>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Session, TlsError> {
        let time = self.settings.handshake_timeout;
        let socket = socket.as_fd();
        let socket = &mut BoundedSocket::new(socket, time, HANDSHAKE_BYTES, wake_fd, is_cancelled);
        drive(&mut connection, socket).map_err(|error| self.explain(error, peer))?;
        let is_hotlift = connection.common().alpn_protocol() == Some(ALPN.as_bytes());
        let suite = connection.common().negotiated_cipher_suite();
        let suite = suite
            .and_then(|suite| suite.tls13())
            .ok_or(TlsError::Version)?;
        let (secrets, keys) = connection.into_secrets().map_err(TlsError::Handshake)?;
        let link = Arc::new(Link::new(keys));
        let reading = Cipher::new(secrets.rx).map_err(TlsError::Record)?;
        let writing = Cipher::new(secrets.tx).map_err(TlsError::Record)?;
        let is_client = peer == Role::Server;
        let mut opener = RecordOpener::new(reading, Arc::clone(&link), is_client);
        let mut sealer = RecordSealer::new(writing, link, self.settings.records_per_key);
        if self.settings.profile == Profile::Hotlift {
            if !is_hotlift {
                let _ = sealer.alert(socket, Alert::NO_PROTOCOL);
                return Err(TlsError::OtherProtocol { expected: ALPN });
            }
            let confirmed = match peer {
                Role::Client => sealer.send_nothing(socket),
                Role::Server => opener.wait_for_first(socket),
            };
            confirmed.map_err(|error| match error {
                RecordError::Io(error) => socket.explain(error),
                RecordError::Truncated => TlsError::Closed,
                RecordError::Alert { alert } => TlsError::Refused { alert },
                error => TlsError::Record(error),
            })?;
        }
        let cipher: CipherSuite = suite.common.suite;
        let identity = self.seen.take();
        let must_show = peer == Role::Server || self.settings.verify_peer;
        if must_show && identity.is_none() {
            return Err(TlsError::NoCertificate);
        }
        Ok(Session {
            peer: identity,
            cipher: format!("{cipher:?}"),
            exporter: self.secret.exporter(suite).ok_or(TlsError::Version)?,
            opener,
            sealer,
        })
    }

    /// Converts an error of rustls into one that names the side at fault.
    fn explain(&self, error: TlsError, peer: Role) -> TlsError {
        let error = match error {
            TlsError::Handshake(error) => error,
            error => return error,
        };
        match (error, self.seen.take()) {
            (
                error @ (Error::InvalidCertificate(_) | Error::InvalidCertRevocationList(_)),
                Some(identity),
            ) => fault(
                error,
                &identity,
                peer.name(),
                self.settings.authz.as_deref(),
            ),
            (Error::NoCertificatesPresented, _) => TlsError::NoCertificate,
            (Error::AlertReceived(alert), _) => TlsError::Refused {
                alert: Alert(alert),
            },
            (Error::NoApplicationProtocol, _) => TlsError::OtherProtocol { expected: ALPN },
            (
                Error::PeerIncompatible(
                    PeerIncompatible::SupportedVersionsExtensionRequired
                    | PeerIncompatible::SignatureAlgorithmsExtensionRequired
                    | PeerIncompatible::Tls12NotOffered
                    | PeerIncompatible::Tls12NotOfferedOrEnabled
                    | PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig
                    | PeerIncompatible::ServerDoesNotSupportTls12Or13,
                ),
                _,
            ) => TlsError::Version,
            (error, _) => TlsError::Handshake(error),
        }
    }
}
