//! What is in a folder of certificates, for people.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustls::CertificateError as E;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};

use crate::credentials::{Credentials, Layout, Material, Role, Warning, certificates, words};
use crate::error::date;
use crate::identity::Identity;

/// What is in a folder, for people: as far as each file can be read, whatever is wrong with others.
#[derive(Debug)]
pub struct Listing {
    /// The folder.
    pub dir: PathBuf,
    /// Its certificates.
    pub files: Vec<File>,
    /// What is wrong with the folder as a whole.
    pub problems: Vec<String>,
    /// What should be looked after.
    pub warnings: Vec<Warning>,
}

/// A certificate of a folder.
#[derive(Debug)]
pub struct File {
    /// Its path.
    pub path: PathBuf,
    /// What this host is with it; none for a CA.
    pub role: Option<Role>,
    /// Who it is; of a chain, the first.
    pub identity: Identity,
    /// What is wrong with it.
    pub problems: Vec<String>,
}

impl Listing {
    /// Looks at `dir`, at the time `now`.
    #[must_use]
    pub fn read(dir: &Path, now: SystemTime) -> Self {
        let mut listing = Self {
            dir: dir.to_owned(),
            files: Vec::new(),
            problems: Vec::new(),
            warnings: Vec::new(),
        };
        match Credentials::open(dir) {
            Ok(credentials) => {
                listing.warnings = credentials.warnings(now);
                let material = credentials.current();
                for role in Role::ALL {
                    if let Err(error) = material.own(role) {
                        listing.problems.push(words(&error));
                    }
                }
            }
            Err(error) => listing.problems.push(words(&error)),
        }
        let Ok(layout) = Layout::of(dir) else {
            return listing;
        };
        let ca = dir.join(layout.ca);
        for certificate in certificates(&ca).unwrap_or_default() {
            listing.add(&ca, None, &certificate, now, || None);
        }
        let verifiers = Material::read(dir).ok();
        for role in Role::ALL {
            let path = dir.join(layout.pair(role)[0]);
            let chain = certificates(&path).unwrap_or_default();
            if let Some((first, rest)) = chain.split_first() {
                let verified = || verify(verifiers.as_ref()?, role, first, rest);
                listing.add(&path, Some(role), first, now, verified);
            }
        }
        listing
    }

    /// Whether connections can be made and accepted with it.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.problems.is_empty() && self.files.iter().all(|file| file.problems.is_empty())
    }

    fn add(
        &mut self,
        path: &Path,
        role: Option<Role>,
        certificate: &CertificateDer<'_>,
        now: SystemTime,
        verified: impl FnOnce() -> Option<String>,
    ) {
        let Ok(identity) = Identity::read(certificate) else {
            return;
        };
        let mut problems = Vec::new();
        if identity.ends < now {
            problems.push("it has ended".to_owned());
        } else if identity.begins > now {
            problems.push(format!("it begins on {}", date(identity.begins)));
        } else {
            problems.extend(verified());
        }
        if role == Some(Role::Server) && identity.dns.is_empty() && identity.ip.is_empty() {
            problems.push("it has no name in subjectAltName, so it is for no host".to_owned());
        }
        self.files.push(File {
            path: path.to_owned(),
            role,
            identity,
            problems,
        });
    }
}

/// What the other side would find wrong with a certificate of ours, if it trusts the same CA.
fn verify(
    material: &Material,
    role: Role,
    certificate: &CertificateDer<'_>,
    chain: &[CertificateDer<'_>],
) -> Option<String> {
    let now = UnixTime::now();
    let verified = match role {
        Role::Client => {
            let verifier = &material.client_verifier;
            verifier
                .verify_client_cert(certificate, chain, now)
                .map(|_| ())
        }
        Role::Server => {
            // Any name: what it is for is shown.
            let name = ServerName::try_from("hotlift.invalid").ok()?;
            let verifier = &material.server_verifier;
            let verified = verifier.verify_server_cert(certificate, chain, &name, &[], now);
            verified.map(|_| ())
        }
    };
    match verified {
        Ok(())
        | Err(rustls::Error::InvalidCertificate(
            E::NotValidForName | E::NotValidForNameContext { .. },
        )) => None,
        Err(rustls::Error::InvalidCertificate(E::UnknownIssuer | E::BadSignature)) => {
            Some("it is not signed by this CA".to_owned())
        }
        Err(rustls::Error::InvalidCertificate(E::Revoked)) => Some("it is revoked".to_owned()),
        Err(rustls::Error::InvalidCertificate(
            E::InvalidPurpose | E::InvalidPurposeContext { .. },
        )) => Some(format!(
            "it is not made for a TLS {} (extended key usage)",
            role.name()
        )),
        Err(error) => Some(error.to_string()),
    }
}
