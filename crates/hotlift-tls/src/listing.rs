//! Listing of a folder of certificates, for users.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use hotlift_mem::error_line;
use rustls::pki_types::CertificateDer;

use crate::credentials::{Credentials, Layout, Material, Role, Warning, certificates};
use crate::error::Fault;
use crate::identity::Identity;
use crate::verify::own_fault;

/// Content of a folder, for users. Each readable file is listed, even if others are not usable.
#[derive(Debug)]
pub struct Listing {
    /// The folder.
    pub dir: PathBuf,
    /// Certificates in the folder.
    pub files: Vec<File>,
    /// Problems of the folder as a whole.
    pub problems: Vec<String>,
    /// Warnings about the folder.
    pub warnings: Vec<Warning>,
}

/// A certificate in a folder.
#[derive(Debug)]
pub struct File {
    /// Path of the file.
    pub path: PathBuf,
    /// Role in which this host uses it; `None` for a CA.
    pub role: Option<Role>,
    /// Names of the certificate; in a chain, of the first one.
    pub identity: Identity,
    /// Problems of the certificate.
    pub problems: Vec<String>,
}

impl Listing {
    /// Reads `dir` and checks it at the time `now`.
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
                        listing.problems.push(error_line(&error));
                    }
                }
            }
            Err(error) => listing.problems.push(error_line(&error)),
        }
        let Ok(layout) = Layout::of(dir) else {
            return listing;
        };
        let ca = dir.join(layout.ca);
        for certificate in certificates(&ca).unwrap_or_default() {
            listing.add(&ca, None, &certificate, now, |_| None);
        }
        let verifiers = Material::read(dir).ok();
        for role in Role::ALL {
            let path = dir.join(layout.pair(role)[0]);
            let chain = certificates(&path).unwrap_or_default();
            if let Some((first, rest)) = chain.split_first() {
                let verified = |identity: &Identity| {
                    own_fault(verifiers.as_ref()?, role, (first, rest), identity, now)
                };
                listing.add(&path, Some(role), first, now, verified);
            }
        }
        listing
    }

    /// Returns true if connections can be made and accepted with the folder.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.problems().next().is_none()
    }

    /// Returns all problems. The problem of a certificate begins with the path of its file.
    pub fn problems(&self) -> impl Iterator<Item = String> + '_ {
        let of_files = self.files.iter().flat_map(|file| {
            let problems = file.problems.iter();
            problems.map(|problem| format!("{}: {problem}", file.path.display()))
        });
        self.problems.iter().cloned().chain(of_files)
    }

    fn add(
        &mut self,
        path: &Path,
        role: Option<Role>,
        certificate: &CertificateDer<'_>,
        now: SystemTime,
        verified: impl FnOnce(&Identity) -> Option<Fault>,
    ) {
        let Ok(identity) = Identity::read(certificate) else {
            return;
        };
        // A handshake checks the times only of a host's certificate in a usable folder.
        let fault = if identity.ends < now {
            Some(Fault::Ended { at: identity.ends })
        } else if identity.begins > now {
            let from = identity.begins;
            Some(Fault::NotYetValid { from })
        } else {
            verified(&identity)
        };
        let problems = fault.iter().map(|fault| format!("it {fault}")).collect();
        self.files.push(File {
            path: path.to_owned(),
            role,
            identity,
            problems,
        });
    }
}
