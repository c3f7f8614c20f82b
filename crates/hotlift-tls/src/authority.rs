//! A small CA for `hotlift certs`.

use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, DnsName};
use time::OffsetDateTime;

use crate::credentials::Role;
use crate::identity::{Identity, NotACertificate};

/// Lifetime of a CA in days: ten years, because a new CA requires new certificates on every host.
pub const CA_DAYS: u32 = 3650;

/// Lifetime of a host's certificates in days: a year. It limits the use of a stolen key, since this CA keeps no list of revoked
/// certificates. `hotlift certs renew` is one line in a crontab.
pub const HOST_DAYS: u32 = 365;

/// Time from the start of a new certificate's validity to its creation: clocks of other hosts may be slow.
const EARLIER: Duration = Duration::from_secs(3600);

/// Longest common name, in characters (X.520's `ub-common-name`, which GnuTLS and OpenSSL enforce).
const MAX_COMMON_NAME: usize = 64;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Errors of the CA.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuthorityError {
    /// The name is not valid in a certificate.
    #[error("'{name}' is neither a DNS name nor an IP address")]
    BadName {
        /// The invalid name.
        name: String,
    },
    /// The name is a wildcard, and so valid for many hosts.
    #[error(
        "'{name}' is a wildcard; name each host, because a stolen key could impersonate all of them"
    )]
    Wildcard {
        /// The wildcard.
        name: String,
    },
    /// There is no name for the certificate.
    #[error("a host's certificate needs a name")]
    NoName,
    /// The CA's certificate cannot be parsed.
    #[error("the CA's certificate cannot be read")]
    NotACertificate(#[from] NotACertificate),
    /// The certificate is not that of a CA.
    #[error("the certificate ({subject}) is not that of a CA")]
    NotACa {
        /// Subject of the certificate.
        subject: String,
    },
    /// The CA's certificate and key do not match.
    #[error("the CA's certificate and key do not match")]
    Mismatch,
    /// The CA's certificate has expired.
    #[error("the CA's certificate has expired; make a new CA ('hotlift certs init --force')")]
    Ended,
    /// rcgen cannot make the certificate.
    #[error("cannot create a certificate")]
    Make(#[from] rcgen::Error),
}

/// A certificate with its key, both in PEM.
pub struct Issued {
    /// The certificate.
    pub certificate: String,
    /// Private key of the certificate (PKCS #8).
    pub key: String,
}

impl fmt::Debug for Issued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Issued")
            .field("certificate", &self.certificate)
            .finish_non_exhaustive()
    }
}

/// A CA with its key.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    identity: Identity,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority")
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}

impl Authority {
    /// Makes a CA with this name for `days`. All keys are P-256: every TLS library supports it, and it signs faster than RSA.
    /// Signing takes most of a handshake's time.
    ///
    /// # Errors
    /// [`AuthorityError::Make`] if rcgen fails.
    pub fn make(name: &str, days: u32, now: SystemTime) -> Result<Issued, AuthorityError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = params(name, now, now + DAY * days);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![
            KeyUsagePurpose::KeyCertSign,
            KeyUsagePurpose::CrlSign,
            KeyUsagePurpose::DigitalSignature,
        ];
        Ok(Issued {
            certificate: params.self_signed(&key)?.pem(),
            key: key.serialize_pem(),
        })
    }

    /// Opens an existing CA, made by Hotlift or by other tools.
    ///
    /// # Errors
    /// If certificate or key cannot be parsed, they do not match, or the certificate is not that of a CA.
    pub fn open(certificate: &str, key: &str) -> Result<Self, AuthorityError> {
        let der = CertificateDer::from_pem_slice(certificate.as_bytes());
        let der = der.map_err(|_| NotACertificate)?;
        let identity = Identity::read(&der)?;
        if !identity.is_ca {
            return Err(AuthorityError::NotACa {
                subject: identity.subject,
            });
        }
        let key = KeyPair::from_pem(key)?;
        // rcgen does not compare the key with the certificate.
        let (_, parsed) = x509_parser::parse_x509_certificate(&der).map_err(|_| NotACertificate)?;
        if parsed.public_key().subject_public_key.data != key.public_key_raw() {
            return Err(AuthorityError::Mismatch);
        }
        Ok(Self {
            issuer: Issuer::from_ca_cert_der(&der, key)?,
            identity,
        })
    }

    /// Returns names and times of the CA's own certificate.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Makes a certificate for a host with these `names`; the first name becomes the common name. The certificate ends no later
    /// than the CA's.
    ///
    /// # Errors
    /// If `names` is empty, a name is invalid, or the CA has expired.
    pub fn issue<T: AsRef<str>>(
        &self,
        names: &[T],
        role: Role,
        days: u32,
        now: SystemTime,
    ) -> Result<Issued, AuthorityError> {
        let first = names.first().ok_or(AuthorityError::NoName)?.as_ref();
        let ends = (now + DAY * days).min(self.identity.ends);
        if ends <= now {
            return Err(AuthorityError::Ended);
        }
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = params(first, now, ends);
        for name in names {
            params.subject_alt_names.push(alternative(name.as_ref())?);
        }
        params.use_authority_key_identifier_extension = true;
        // QEMU 10.0 rejects a certificate without the second usage, which has no meaning for a signing key.
        params.key_usages = vec![
            KeyUsagePurpose::DigitalSignature,
            KeyUsagePurpose::KeyEncipherment,
        ];
        params.extended_key_usages = vec![match role {
            Role::Server => ExtendedKeyUsagePurpose::ServerAuth,
            Role::Client => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        Ok(Issued {
            certificate: params.signed_by(&key, &self.issuer)?.pem(),
            key: key.serialize_pem(),
        })
    }
}

fn params(name: &str, now: SystemTime, ends: SystemTime) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    let name: String = name.chars().take(MAX_COMMON_NAME).collect();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = OffsetDateTime::from(now - EARLIER);
    params.not_after = OffsetDateTime::from(ends);
    params
}

/// Returns `name` as a subjectAltName. Rejects wildcards: one stolen key could impersonate every host.
fn alternative(name: &str) -> Result<SanType, AuthorityError> {
    let bad = || AuthorityError::BadName {
        name: name.to_owned(),
    };
    if let Ok(address) = name.parse::<IpAddr>() {
        return Ok(SanType::IpAddress(address));
    }
    if name.contains('*') {
        return Err(AuthorityError::Wildcard {
            name: name.to_owned(),
        });
    }
    DnsName::try_from(name).map_err(|_| bad())?;
    Ok(SanType::DnsName(name.try_into().map_err(|_| bad())?))
}
