//! What is wrong, and whose it is.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use rustls::AlertDescription;

use crate::identity::NotACertificate;
use hotlift_mem::FileError;

/// Why a folder of certificates cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialsError {
    /// No certificates anywhere.
    #[error("no certificates in {}", show(folders))]
    NoFolder {
        /// Where they were looked for.
        folders: Vec<PathBuf>,
    },
    /// A folder without a CA.
    #[error("{} has no {} (nor {})", dir.display(), names[0], names[1])]
    NoCa {
        /// The folder.
        dir: PathBuf,
        /// What it is called, in either layout.
        names: [&'static str; 2],
    },
    /// A folder for credentials of QEMU that are not certificates.
    #[error("{} is for {object}, which is not supported: use certificates, as for tls-creds-x509", file.display())]
    OtherKind {
        /// A file of them.
        file: PathBuf,
        /// QEMU's object.
        object: &'static str,
    },
    /// A certificate for what is to be done is missing.
    #[error("{} is missing: a TLS {role} needs it", file.display())]
    NoCertificate {
        /// The missing file.
        file: PathBuf,
        /// `server` (accepts connections) or `client` (makes them).
        role: &'static str,
    },
    /// A file that cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file that is larger than any such file.
    #[error("{} has more than {limit} bytes", file.display())]
    TooLarge {
        /// The file.
        file: PathBuf,
        /// The most that is read, in bytes.
        limit: u64,
    },
    /// A file that does not hold what it should in PEM.
    #[error("{} holds no {what} in PEM form", file.display())]
    NotPem {
        /// The file.
        file: PathBuf,
        /// What was looked for.
        what: &'static str,
    },
    /// PEM, but not of a certificate.
    #[error("bad certificate in {}", file.display())]
    BadCertificate {
        /// The file.
        file: PathBuf,
        /// Why.
        #[source]
        source: NotACertificate,
    },
    /// A CA that cannot be one, or a list of revoked certificates that is none.
    #[error("cannot use {}: {problem}", file.display())]
    Unusable {
        /// The file.
        file: PathBuf,
        /// rustls's words.
        problem: String,
    },
    /// The key is not that of the certificate.
    #[error(
        "{} and {} do not go together: the key belongs to another certificate than the first one in that file",
        certificate.display(),
        key.display()
    )]
    KeyMismatch {
        /// The certificate.
        certificate: PathBuf,
        /// The key.
        key: PathBuf,
    },
    /// The certificate of a CA comes before that of the host.
    #[error(
        "the first certificate in {} is that of a CA ({subject}): put the certificate of the host first, and those of CAs after it",
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
        "the private key {0} is encrypted, and Hotlift has no passphrase for it: decrypt it by 'openssl pkey -in {0} -out {0}.new', \
         and put the new file in its place, with mode 0600",
        file.display()
    )]
    EncryptedKey {
        /// The file.
        file: PathBuf,
    },
    /// The key is of a kind or size that is not supported.
    #[error(
        "cannot use the private key {}: use RSA of 2048 to 8192 bits, ECDSA (P-256, P-384, P-521) or Ed25519",
        file.display()
    )]
    UnsupportedKey {
        /// The file.
        file: PathBuf,
        /// rustls's reason.
        #[source]
        source: rustls::Error,
    },
}

/// What is wrong with the certificate of the other side.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Fault {
    /// It has ended.
    Ended {
        /// When.
        at: SystemTime,
    },
    /// It begins later.
    NotYetValid {
        /// When.
        from: SystemTime,
    },
    /// Its CA is not ours.
    UnknownCa {
        /// Its issuer's name.
        issuer: String,
    },
    /// It is on the list of revoked certificates.
    Revoked,
    /// That list has ended, so that nobody knows.
    RevocationListEnded {
        /// When.
        at: SystemTime,
    },
    /// It is another host's.
    NameMismatch {
        /// The name that was asked for.
        expected: String,
        /// The names it has.
        has: Vec<String>,
    },
    /// It is not on the allow-list.
    NotAllowed {
        /// The list.
        list: String,
    },
    /// No name by which a host is reached.
    NoName,
    /// A CA's own certificate.
    OfCa,
    /// The list of revoked certificates cannot be used.
    BadRevocationList(rustls::Error),
    /// It is not made for this side of a connection.
    Purpose {
        /// `server` or `client`, what it would have to be for.
        needed: &'static str,
    },
    /// Something else.
    Other(rustls::CertificateError),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended { at } => write!(f, "ended on {}", date(*at)),
            Self::NotYetValid { from } => write!(
                f,
                "begins on {}, which is later than the clock of this host",
                date(*from)
            ),
            Self::UnknownCa { issuer } => {
                write!(
                    f,
                    "is signed by a CA that this side does not trust ({issuer}), and comes with no intermediate certificate that leads to one"
                )
            }
            Self::Revoked => f.write_str("is revoked"),
            Self::RevocationListEnded { at } => write!(
                f,
                "cannot be judged: the list of revoked certificates here ended on {}",
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
                "is for no host: it has no name in subjectAltName, and a common name (CN) alone is no name",
            ),
            Self::OfCa => f.write_str(
                "is that of a CA, which is no certificate of a host: let the CA sign one for the host",
            ),
            Self::BadRevocationList(error) => write!(
                f,
                "cannot be judged: the list of revoked certificates here is not usable ({error})"
            ),
            Self::Purpose { needed } => {
                write!(f, "is not made for a TLS {needed} (extended key usage)")
            }
            Self::Other(error) => write!(f, "is not accepted: {error}"),
        }
    }
}

/// Missing part of a handshake whose time is up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// A first message of the other side.
    Start,
    /// The acknowledgement of bytes that were sent.
    Acknowledgement,
    /// An answer to bytes that the other side's kernel has.
    Answer,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Start => "the other side has sent nothing, or a part of a message",
            Self::Acknowledgement => {
                "the other host does not acknowledge what was sent; the path may drop packets of the full size (check the MTU)"
            }
            Self::Answer => {
                "the other side does not answer; its process may be stopped, or the path may drop packets of the full size \
                 (check the MTU)"
            }
        })
    }
}

/// Why a connection has no TLS. Messages say whose fault it is.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// Our files.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// Our certificate is not valid now, and no other side would take it.
    #[error("our certificate {} is valid from {} to {} only", file.display(), date(*begins), date(*ends))]
    OursNotValid {
        /// The certificate.
        file: PathBuf,
        /// Its first moment.
        begins: SystemTime,
        /// Its last moment.
        ends: SystemTime,
    },
    /// There is no name that the server's certificate could be for.
    #[error("no host name to hold the other side's certificate against: tls-hostname gives it")]
    NoHostname,
    /// The name is neither a DNS name nor an IP address.
    #[error("'{name}' is neither a DNS name nor an IP address, so no certificate can be for it")]
    BadHostname {
        /// The name.
        name: String,
    },
    /// Their certificate.
    #[error("the other side's certificate ({subject}) {fault}")]
    Theirs {
        /// Whose it says that it is.
        subject: String,
        /// What is wrong.
        fault: Fault,
    },
    /// They sent none.
    #[error("the other side has shown no certificate, or has none of a CA that this side trusts")]
    NoCertificate,
    /// They sent an alert.
    #[error("the other side {alert}")]
    Refused {
        /// Which.
        alert: Alert,
    },
    /// Not TLS at all.
    #[error("the other side speaks without TLS")]
    PlaintextPeer,
    /// TLS, but an older one only.
    #[error("the other side does not speak TLS 1.3")]
    Version,
    /// TLS, but for another protocol.
    #[error("the other side speaks TLS, but is no Hotlift (ALPN is not {expected})")]
    OtherProtocol {
        /// The protocol that was looked for.
        expected: &'static str,
    },
    /// An end in the middle of the handshake.
    #[error(
        "the other side closed the connection during the TLS handshake: it may speak without TLS, it may have \
         failed, or the path does not carry packets of the MTU"
    )]
    Closed,
    /// Too slow.
    #[error("the TLS handshake was not done within {after:?}: {missing}")]
    TimedOut {
        /// How long it was waited.
        after: Duration,
        /// What was waited for.
        missing: Missing,
    },
    /// Too much.
    #[error("the other side sent more than {limit} bytes in the TLS handshake")]
    TooMuch {
        /// The most that is taken.
        limit: usize,
    },
    /// The connection.
    #[error("the connection broke during the TLS handshake")]
    Io(#[source] io::Error),
    /// Anything else that a peer can do wrong.
    #[error("the TLS handshake failed")]
    Handshake(#[source] rustls::Error),
    /// A record after the handshake's.
    #[error("the TLS handshake failed")]
    Record(#[source] RecordError),
}

/// Why no more can be sent or received. The connection is of no use then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The connection.
    #[error("the connection broke")]
    Io(#[source] io::Error),
    /// FIN, but no word of the other side that this is the end.
    #[error("the connection was cut: it ended without close_notify")]
    Truncated,
    /// A record that is not what the other side has sent: changed, lost before, doubled, or in another order.
    #[error("a TLS record was changed, lost or repeated on its way")]
    Damaged,
    /// Something that is not sealed among records that are.
    #[error("what came is no sealed TLS record (type {kind})")]
    NotSealed {
        /// Its first byte.
        kind: u8,
    },
    /// A record's length is not one that there can be.
    #[error("a TLS record of {length} bytes")]
    BadLength {
        /// The length.
        length: usize,
    },
    /// A record without a type.
    #[error("a TLS record of nothing but padding")]
    NoType,
    /// A record or message of a kind that has no place there.
    #[error("an unexpected TLS {what} ({kind})")]
    Unexpected {
        /// `record` or `message`.
        what: &'static str,
        /// Its type.
        kind: u8,
    },
    /// Too long a message, or one that is not as it must be.
    #[error("a bad TLS message (type {kind}, {length} bytes)")]
    BadMessage {
        /// Its type.
        kind: u8,
        /// Its length.
        length: usize,
    },
    /// Records that say nothing, one after the other.
    #[error("more than {limit} TLS records in a row without data")]
    Idle {
        /// How many are taken.
        limit: u32,
    },
    /// The other side gave up.
    #[error("the other side {alert}")]
    Alert {
        /// Why.
        alert: Alert,
    },
    /// Something was to be sent behind `close_notify`.
    #[error("this side has ended the TLS connection already")]
    Ended,
    /// It has failed before.
    #[error("the TLS connection has failed before")]
    Failed,
    /// No keys could be made. Does not happen.
    #[error("no keys for TLS records")]
    Keys,
}

impl RecordError {
    /// What to tell the other side, by [`crate::RecordWriter::alert`], where that is of use.
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
    /// The system's own error; of others the kind `UnexpectedEof` if the connection was cut, else `InvalidData`.
    fn from(error: RecordError) -> Self {
        match error {
            RecordError::Io(error) => error,
            RecordError::Truncated => Self::new(io::ErrorKind::UnexpectedEof, error),
            error => Self::new(io::ErrorKind::InvalidData, error),
        }
    }
}

/// An alert (RFC 8446, section 6), translated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alert(pub(crate) AlertDescription);

impl Alert {
    /// ALPN has no protocol in common.
    pub(crate) const NO_PROTOCOL: Self = Self(AlertDescription::NoApplicationProtocol);

    /// The alert of this number.
    pub(crate) fn new(number: u8) -> Self {
        Self(AlertDescription::from(number))
    }

    /// Its number.
    #[must_use]
    pub fn number(self) -> u8 {
        u8::from(self.0)
    }
}

impl fmt::Display for Alert {
    /// Goes on after "the other side".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of_certificate = match self.0 {
            AlertDescription::BadCertificate => {
                "its name is not the expected one, or it cannot be read"
            }
            AlertDescription::UnsupportedCertificate => {
                "it is not made for this side of a connection"
            }
            AlertDescription::CertificateRevoked => "it is revoked",
            AlertDescription::CertificateExpired => {
                "it is not valid at this time by the clock over there"
            }
            AlertDescription::CertificateUnknown => "no reason is given",
            AlertDescription::UnknownCA => {
                "it does not trust our CA, or cannot tell whether ours is revoked"
            }
            AlertDescription::AccessDenied => "it is not on the list of allowed names over there",
            AlertDescription::CertificateRequired => "we have sent none",
            AlertDescription::DecryptError => "its signature is wrong",
            _ => {
                let text = match self.0 {
                    AlertDescription::ProtocolVersion => "does not speak TLS 1.3",
                    AlertDescription::NoApplicationProtocol => "speaks TLS, but is no Hotlift",
                    AlertDescription::HandshakeFailure | AlertDescription::InsufficientSecurity => {
                        "has no cipher, group or signature in common with this one"
                    }
                    AlertDescription::UnrecognisedName => "knows no host of that name",
                    AlertDescription::BadRecordMac => "has received a damaged record",
                    AlertDescription::InternalError => "has failed by itself",
                    AlertDescription::UserCanceled | AlertDescription::CloseNotify => {
                        "has ended the connection"
                    }
                    other => return write!(f, "has refused the connection: {other:?}"),
                };
                return f.write_str(text);
            }
        };
        write!(f, "does not accept our certificate: {of_certificate}")
    }
}

/// A moment, to the second.
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
