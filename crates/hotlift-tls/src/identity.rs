//! Names and times in a certificate.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, SystemTime};

use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};
use x509_parser::x509::X509Name;

use crate::printable::escape;

/// Limit of a certificate's names in a message; a peer's certificate may have thousands.
const SHOWN: usize = 8;

/// Characters that RFC 4514 escapes in a value, except spaces: they end no value.
const SPECIAL: [char; 7] = [',', '+', '"', '\\', '<', '>', ';'];

/// Error for bytes that are not an X.509 certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an X.509 certificate")]
pub struct NotACertificate;

/// Names and times of a certificate, as far as Hotlift uses them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Subject, written as in RFC 4514 but in the certificate's order: `C=DE,O=Example,CN=host-a`. Empty if there is no
    /// subject.
    pub subject: String,
    /// Subject in the opposite order, which other tools print.
    pub subject_reversed: String,
    /// Issuer, in the same format as the subject.
    pub issuer: String,
    /// DNS names in the extension subjectAltName.
    pub dns: Vec<String>,
    /// IP addresses in the extension subjectAltName.
    pub ip: Vec<IpAddr>,
    /// URIs in the extension subjectAltName, including SPIFFE identities.
    pub uri: Vec<String>,
    /// True if the certificate may sign other certificates.
    pub is_ca: bool,
    /// Beginning of the certificate's validity.
    pub begins: SystemTime,
    /// End of the certificate's validity.
    pub ends: SystemTime,
}

impl Identity {
    /// Returns true if both certificates have the same names, and so belong to one host. Times are not compared, since a
    /// renewed certificate has other times.
    #[must_use]
    pub fn is_of_the_host_of(&self, other: &Self) -> bool {
        let names = |of: &Self| {
            (
                of.subject.clone(),
                of.dns.clone(),
                of.ip.clone(),
                of.uri.clone(),
            )
        };
        names(self) == names(other)
    }

    /// Parses a certificate without verifying it.
    ///
    /// # Errors
    /// If the bytes are not a certificate.
    pub fn read(certificate: &CertificateDer<'_>) -> Result<Self, NotACertificate> {
        let (_, certificate) =
            X509Certificate::from_der(certificate).map_err(|_| NotACertificate)?;
        let mut identity = Self {
            subject: name(certificate.subject(), false),
            subject_reversed: name(certificate.subject(), true),
            issuer: name(certificate.issuer(), false),
            dns: Vec::new(),
            ip: Vec::new(),
            uri: Vec::new(),
            is_ca: certificate.is_ca(),
            begins: at(certificate.validity().not_before.timestamp()),
            ends: at(certificate.validity().not_after.timestamp()),
        };
        let names = certificate
            .subject_alternative_name()
            .map_err(|_| NotACertificate)?;
        for name in names.iter().flat_map(|names| &names.value.general_names) {
            match name {
                GeneralName::DNSName(name) => identity.dns.push(escaped(name)),
                GeneralName::URI(name) => identity.uri.push(escaped(name)),
                GeneralName::IPAddress(bytes) => identity.ip.extend(address(bytes)),
                _ => {}
            }
        }
        Ok(identity)
    }

    /// Returns the names of the certificate's host: DNS names, IP addresses, URIs.
    pub fn names(&self) -> impl Iterator<Item = String> + '_ {
        let dns = self.dns.iter().cloned();
        let ip = self.ip.iter().map(IpAddr::to_string);
        dns.chain(ip).chain(self.uri.iter().cloned())
    }
}

impl fmt::Display for Identity {
    /// Shows the subject and the first names of the certificate's host.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names: Vec<_> = self.names().take(SHOWN + 1).collect();
        if names.len() > SHOWN {
            names[SHOWN] = "…".to_owned();
        }
        match (self.subject.as_str(), names.as_slice()) {
            ("", []) => f.write_str("without a name"),
            ("", names) => f.write_str(&names.join(", ")),
            (subject, []) => f.write_str(subject),
            (subject, names) => write!(f, "{subject}: {}", names.join(", ")),
        }
    }
}

/// Returns the issuer of a list of revoked certificates, written as in [`Identity`]; `None` if it is not such a list.
pub(crate) fn issuer_of_list(list: &CertificateRevocationListDer<'_>) -> Option<String> {
    let (_, list) = CertificateRevocationList::from_der(list).ok()?;
    Some(name(list.issuer(), false))
}

fn escaped(text: &str) -> String {
    let mut out = String::new();
    escape(text, &[], &mut out);
    out
}

fn name(name: &X509Name<'_>, reversed: bool) -> String {
    let mut parts: Vec<String> = name
        .iter_rdn()
        .map(|rdn| {
            let attributes = rdn.iter().map(|attribute| {
                let kind = x509_parser::objects::oid2abbrev(
                    attribute.attr_type(),
                    x509_parser::objects::oid_registry(),
                );
                let kind =
                    kind.map_or_else(|_| attribute.attr_type().to_id_string(), str::to_owned);
                let mut text = format!("{kind}=");
                match attribute.as_str() {
                    Ok(value) => escape(value, &SPECIAL, &mut text),
                    Err(_) => text.push('?'),
                }
                text
            });
            attributes.collect::<Vec<_>>().join("+")
        })
        .collect();
    if reversed {
        parts.reverse();
    }
    parts.join(",")
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(bytes) = <[u8; 4]>::try_from(bytes) {
        return Some(Ipv4Addr::from(bytes).into());
    }
    let bytes = <[u8; 16]>::try_from(bytes).ok()?;
    Some(Ipv6Addr::from(bytes).into())
}

/// Converts seconds since 1970. Earlier times become 1970: a certificate that ends before 1970 has expired anyway.
pub(crate) fn at(seconds: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}
