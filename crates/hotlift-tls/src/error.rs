//! Errors of TLS, and the side at fault.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use rustls::AlertDescription;

use crate::identity::NotACertificate;
use hotlift_mem::FileError;

/// Errors of a folder of certificates.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialsError {
    /// No certificates in any of the folders.
    #[error("no certificates in {}", show(folders))]
    NoFolder {
        /// The folders, in the order of the search.
        folders: Vec<PathBuf>,
    },
    /// A folder without a CA.
    #[error("{} has no {} (nor {})", dir.display(), names[0], names[1])]
    NoCa {
        /// The folder.
        dir: PathBuf,
        /// Names of the CA's file, in either layout.
        names: [&'static str; 2],
    },
    /// A folder with credentials of QEMU that are not certificates.
    #[error("{} is for {object}, which is not supported; use certificates, as for tls-creds-x509", file.display())]
    OtherKind {
        /// A file of these credentials.
        file: PathBuf,
        /// QEMU's object type for these credentials.
        object: &'static str,
    },
    /// The certificate for a role is missing.
    #[error("{} is missing; a TLS {role} needs it", file.display())]
    NoCertificate {
        /// Path of the missing file.
        file: PathBuf,
        /// `server` (accepts connections) or `client` (makes them).
        role: &'static str,
    },
    /// A file that cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file that is too large.
    #[error("{} has more than {limit} bytes", file.display())]
    TooLarge {
        /// The file.
        file: PathBuf,
        /// The limit, in bytes.
        limit: u64,
    },
    /// A file without the expected PEM object.
    #[error("{} holds no {what} in PEM form", file.display())]
    NotPem {
        /// The file.
        file: PathBuf,
        /// Kind of the expected object, such as "private key".
        what: &'static str,
    },
    /// A PEM object that is not a certificate.
    #[error("invalid certificate in {}", file.display())]
    BadCertificate {
        /// The file.
        file: PathBuf,
        /// The parse error.
        #[source]
        source: NotACertificate,
    },
    /// An unusable CA certificate or list of revoked certificates.
    #[error("cannot use {}: {problem}", file.display())]
    Unusable {
        /// The file.
        file: PathBuf,
        /// rustls's message.
        problem: String,
    },
    /// The key does not match the certificate.
    #[error(
        "the first certificate in {} and the key in {} do not match; the key belongs to another certificate",
        certificate.display(),
        key.display()
    )]
    KeyMismatch {
        /// File of the certificate.
        certificate: PathBuf,
        /// File of the key.
        key: PathBuf,
    },
    /// The CA's certificate precedes the host's.
    #[error(
        "the first certificate in {} is that of a CA ({subject}); put the certificate of the host first, and those of CAs after it",
        file.display()
    )]
    CaFirst {
        /// The file.
        file: PathBuf,
        /// Subject of the CA.
        subject: String,
    },
    /// The key is encrypted.
    #[error(
        "the private key {0} is encrypted, and Hotlift has no passphrase for it; decrypt it by 'openssl pkey -in {0} -out {0}.new', \
         and put the new file in its place, with mode 0600",
        file.display()
    )]
    EncryptedKey {
        /// The file.
        file: PathBuf,
    },
    /// The key has an unsupported type or size.
    #[error(
        "cannot use the private key {}; use RSA of 2048 to 8192 bits, ECDSA (P-256, P-384, P-521) or Ed25519",
        file.display()
    )]
    UnsupportedKey {
        /// The file.
        file: PathBuf,
        /// rustls's error.
        #[source]
        source: rustls::Error,
    },
}

/// Fault of the peer's certificate.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Fault {
    /// The certificate has expired.
    Ended {
        /// End of the certificate's validity.
        at: SystemTime,
    },
    /// The certificate is not valid yet.
    NotYetValid {
        /// Beginning of the certificate's validity.
        from: SystemTime,
    },
    /// The certificate's CA is not trusted.
    UnknownCa {
        /// Name of the certificate's issuer.
        issuer: String,
    },
    /// The certificate is on the list of revoked certificates.
    Revoked,
    /// The list of revoked certificates has expired, so it is unknown if the certificate is revoked.
    RevocationListEnded {
        /// End of the list's validity.
        at: SystemTime,
    },
    /// The certificate is for another host.
    NameMismatch {
        /// Name of the host that this side expects.
        expected: String,
        /// Host names and addresses in the certificate.
        has: Vec<String>,
    },
    /// The certificate is not on the allow-list.
    NotAllowed {
        /// Patterns of the allow-list.
        list: String,
    },
    /// The certificate has no name of a host.
    NoName,
    /// The certificate is a CA's own certificate, not that of a host.
    OfCa,
    /// The list of revoked certificates cannot be used.
    BadRevocationList(rustls::Error),
    /// The certificate's extended key usage does not include the role of the peer.
    Purpose {
        /// Required role: `server` or `client`.
        needed: &'static str,
    },
    /// Another fault, as rustls reports it.
    Other(rustls::CertificateError),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended { at } => write!(f, "expired on {}", date(*at)),
            Self::NotYetValid { from } => write!(
                f,
                "is valid from {} on, which is later than the clock of this host",
                date(*from)
            ),
            Self::UnknownCa { issuer } => {
                write!(
                    f,
                    "is signed by a CA that this side does not trust ({issuer}), and no intermediate certificate in its chain leads to a trusted CA"
                )
            }
            Self::Revoked => f.write_str("is revoked"),
            Self::RevocationListEnded { at } => write!(
                f,
                "cannot be checked: the list of revoked certificates here expired on {}",
                date(*at)
            ),
            Self::NameMismatch { expected, has } if has.is_empty() => {
                write!(f, "is not for '{expected}': its subjectAltName has no name")
            }
            Self::NameMismatch { expected, has } => {
                write!(f, "is not for '{expected}' but for {}", has.join(", "))
            }
            Self::NotAllowed { list } => write!(f, "is not on the list of allowed names ({list})"),
            Self::NoName => f.write_str(
                "is for no host: it has no name in subjectAltName, and its common name (CN) is not used",
            ),
            Self::OfCa => f.write_str(
                "is that of a CA, not of a host: let the CA sign one for the host",
            ),
            Self::BadRevocationList(error) => write!(
                f,
                "cannot be checked: the list of revoked certificates here is unusable ({error})"
            ),
            Self::Purpose { needed } => {
                write!(f, "is not valid for a TLS {needed} (extended key usage)")
            }
            Self::Other(error) => write!(f, "is not accepted: {error}"),
        }
    }
}

/// Missing part of a handshake that timed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// A complete first message of the peer.
    Start,
    /// The peer's acknowledgement of sent bytes.
    Acknowledgement,
    /// An answer to bytes that the peer's kernel has received.
    Answer,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Start => "the other side sent nothing, or only a part of a message",
            Self::Acknowledgement => {
                "the other host does not acknowledge sent data; the path may drop full-size packets (check the MTU)"
            }
            Self::Answer => {
                "the other side does not answer; its process may be stopped, or the path may drop full-size packets (check \
                 the MTU)"
            }
        })
    }
}

/// Errors of a TLS handshake. Messages name the side at fault.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// The files of this side's certificates cannot be used.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// This side's certificate is not valid now, so the peer would reject it.
    #[error("this host's certificate {} is valid only from {} to {}", file.display(), date(*begins), date(*ends))]
    OursNotValid {
        /// File of the certificate.
        file: PathBuf,
        /// Beginning of the certificate's validity.
        begins: SystemTime,
        /// End of the certificate's validity.
        ends: SystemTime,
    },
    /// There is no host name to verify the server's certificate.
    #[error("no host name to check the other side's certificate; set tls-hostname")]
    NoHostname,
    /// The name is neither a DNS name nor an IP address.
    #[error("'{name}' is neither a DNS name nor an IP address, so no certificate can be for it")]
    BadHostname {
        /// The invalid name.
        name: String,
    },
    /// The peer's certificate has a fault.
    #[error("the other side's certificate ({subject}) {fault}")]
    Theirs {
        /// Subject of the certificate.
        subject: String,
        /// Fault of the certificate.
        fault: Fault,
    },
    /// The peer sent no certificate.
    #[error("the other side sent no certificate, or has none of a CA that this side trusts")]
    NoCertificate,
    /// The peer sent an alert.
    #[error("the other side {alert}")]
    Refused {
        /// The alert.
        alert: Alert,
    },
    /// The peer does not use TLS.
    #[error("the other side does not use TLS")]
    PlaintextPeer,
    /// The peer supports only older versions of TLS.
    #[error("the other side does not support TLS 1.3")]
    Version,
    /// The peer uses TLS with another protocol.
    #[error("the other side uses TLS, but is not a Hotlift (ALPN is not {expected})")]
    OtherProtocol {
        /// The expected protocol.
        expected: &'static str,
    },
    /// The connection ended during the handshake.
    #[error(
        "the other side closed the connection during the TLS handshake; it may not use TLS, it may have failed, or the path \
         may not carry packets of the MTU"
    )]
    Closed,
    /// The handshake timed out.
    #[error("the handshake did not complete within {after:?}; {missing}")]
    TimedOut {
        /// The timeout.
        after: Duration,
        /// The missing part.
        missing: Missing,
    },
    /// The peer sent more bytes than a handshake may have.
    #[error("the other side sent more than {limit} bytes in the TLS handshake")]
    TooMuch {
        /// The limit, in bytes.
        limit: usize,
    },
    /// The connection failed.
    #[error("the connection broke during the TLS handshake")]
    Io(#[source] io::Error),
    /// Another error of the handshake.
    #[error("the TLS handshake failed")]
    Handshake(#[source] rustls::Error),
    /// An error of a record that follows the handshake's messages.
    #[error("the TLS handshake failed")]
    Record(#[source] RecordError),
}

/// Errors of records. The connection is unusable afterwards.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The connection failed.
    #[error("the connection broke")]
    Io(#[source] io::Error),
    /// The connection ended without `close_notify`.
    #[error("the connection was cut (it ended without close_notify)")]
    Truncated,
    /// A record that differs from the one sent: changed, repeated, out of order, or after a lost one.
    #[error("a TLS record was changed, lost or repeated in transit")]
    Damaged,
    /// An unsealed record among sealed ones.
    #[error("received data is not an encrypted TLS record (type {kind})")]
    NotSealed {
        /// First byte of the received data.
        kind: u8,
    },
    /// An invalid length of a record.
    #[error("a TLS record has the invalid length of {length} bytes")]
    BadLength {
        /// The invalid length in bytes.
        length: usize,
    },
    /// A record without a content type: it contains only padding.
    #[error("a TLS record contains only padding")]
    NoType,
    /// An unexpected type of record or message.
    #[error("the other side sent an unexpected TLS {what} (type {kind})")]
    Unexpected {
        /// Kind of the unexpected object: `record` or `message`.
        what: &'static str,
        /// Type of the record or message.
        kind: u8,
    },
    /// A message that is too long or malformed.
    #[error("the other side sent an invalid TLS message (type {kind}, {length} bytes)")]
    BadMessage {
        /// Type of the message.
        kind: u8,
        /// Length of the message, in bytes.
        length: usize,
    },
    /// Too many consecutive records without data.
    #[error("the other side sent more than {limit} TLS records in a row without data")]
    Idle {
        /// Maximum number of consecutive records without data.
        limit: u32,
    },
    /// The peer sent an alert.
    #[error("the other side {alert}")]
    Alert {
        /// The alert.
        alert: Alert,
    },
    /// A send in a direction that has ended: by `close_notify`, an alert, or a failed send.
    #[error("this side has already closed the TLS connection")]
    Ended,
    /// An earlier error has made the connection unusable.
    #[error("the TLS connection has failed earlier")]
    Failed,
    /// Key derivation failed, which does not happen.
    #[error("cannot derive the keys of the TLS records")]
    Keys,
}

impl RecordError {
    /// Returns the alert to send to the peer with [`crate::RecordSealer::alert`]; `None` if the error needs no alert.
    #[must_use]
    pub fn answer(&self) -> Option<Alert> {
        let alert = match self {
            Self::Damaged => AlertDescription::BadRecordMac,
            Self::BadLength { .. } => AlertDescription::RecordOverflow,
            Self::BadMessage { .. } => AlertDescription::DecodeError,
            Self::NotSealed { .. } | Self::NoType | Self::Unexpected { .. } | Self::Idle { .. } => {
                AlertDescription::UnexpectedMessage
            }
            _ => return None,
        };
        Some(Alert(alert))
    }
}

impl From<RecordError> for io::Error {
    /// Returns the system's own error for [`RecordError::Io`]. The kind of other errors is `UnexpectedEof` if the connection
    /// was cut, and otherwise `InvalidData`.
    fn from(error: RecordError) -> Self {
        match error {
            RecordError::Io(error) => error,
            RecordError::Truncated => Self::new(io::ErrorKind::UnexpectedEof, error),
            error => Self::new(io::ErrorKind::InvalidData, error),
        }
    }
}

/// An alert (RFC 8446, section 6), with a readable message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alert(pub(crate) AlertDescription);

impl Alert {
    /// The sides have no ALPN protocol in common.
    pub(crate) const NO_PROTOCOL: Self = Self(AlertDescription::NoApplicationProtocol);

    /// Returns the alert with this number.
    pub(crate) fn new(number: u8) -> Self {
        Self(AlertDescription::from(number))
    }

    /// Returns the number of the alert.
    #[must_use]
    pub fn number(self) -> u8 {
        u8::from(self.0)
    }
}

impl fmt::Display for Alert {
    /// Writes the end of a sentence that begins with "the other side".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of_certificate = match self.0 {
            AlertDescription::BadCertificate => {
                "its name is not the expected one, or it cannot be read"
            }
            AlertDescription::UnsupportedCertificate => {
                "it is not valid for this side of a connection"
            }
            AlertDescription::CertificateRevoked => "it is revoked",
            AlertDescription::CertificateExpired => "it is not valid now by the clock of that host",
            AlertDescription::CertificateUnknown => "no reason is given",
            AlertDescription::UnknownCA => {
                "it does not trust our CA, or cannot check the revocation of our certificate"
            }
            AlertDescription::AccessDenied => "it is not on the list of allowed names of that side",
            AlertDescription::CertificateRequired => "we sent none",
            AlertDescription::DecryptError => "its signature is wrong",
            _ => {
                let text = match self.0 {
                    AlertDescription::ProtocolVersion => "does not support TLS 1.3",
                    AlertDescription::NoApplicationProtocol => "uses TLS, but is not a Hotlift",
                    AlertDescription::HandshakeFailure | AlertDescription::InsufficientSecurity => {
                        "has no cipher, group or signature in common with this one"
                    }
                    AlertDescription::UnrecognisedName => "has no host of that name",
                    AlertDescription::BadRecordMac => "received a damaged record",
                    AlertDescription::InternalError => "failed with an internal error",
                    AlertDescription::UserCanceled | AlertDescription::CloseNotify => {
                        "closed the connection"
                    }
                    other => return write!(f, "refused the connection: {other:?}"),
                };
                return f.write_str(text);
            }
        };
        write!(f, "does not accept our certificate: {of_certificate}")
    }
}

/// Formats a time to the second.
pub(crate) fn date(at: SystemTime) -> impl fmt::Display {
    humantime::format_rfc3339_seconds(at)
}

fn show(folders: &[PathBuf]) -> String {
    let folders: Vec<_> = folders
        .iter()
        .map(|dir| dir.display().to_string())
        .collect();
    folders.join(" or ")
}
