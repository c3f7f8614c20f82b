//! A folder of certificates: the CA, the list of revoked certificates, and this host's own.

use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};

use crate::error::{CredentialsError, date};
use crate::identity::{Identity, issuer_of_list};
use crate::provider::provider;
use hotlift_mem::{FileError, error_line, lock};

/// Default folders, in order: Hotlift's own, then QEMU's, which libvirt fills.
pub const FOLDERS: [&str; 2] = ["/etc/pki/hotlift", "/etc/pki/qemu"];

/// Remaining lifetime at which a certificate causes a warning.
pub const ENDS_SOON: Duration = Duration::from_secs(14 * 24 * 3600);

/// Size limit of a file, in bytes. A bundle of all public CAs has 200 KiB.
const MAX_FILE: u64 = 4 << 20;

/// Role of a side of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Accepts connections: the destination of a migration.
    Server,
    /// Makes connections: the source.
    Client,
}

impl Role {
    pub(crate) const ALL: [Self; 2] = [Self::Server, Self::Client];

    /// Returns the role's name in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Client => "client",
        }
    }
}

/// Names of the files in a folder of certificates.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub(crate) ca: &'static str,
    pub(crate) revoked: &'static str,
    server: [&'static str; 2],
    client: [&'static str; 2],
}

impl Layout {
    /// Names of QEMU's `tls-creds-x509`, which libvirt fills.
    pub(crate) const QEMU: Self = Self {
        ca: "ca-cert.pem",
        revoked: "ca-crl.pem",
        server: ["server-cert.pem", "server-key.pem"],
        client: ["client-cert.pem", "client-key.pem"],
    };

    /// Names of a Kubernetes TLS secret, as cert-manager fills it: one certificate for both roles.
    const SECRET: Self = Self {
        ca: "ca.crt",
        revoked: "ca.crl",
        server: ["tls.crt", "tls.key"],
        client: ["tls.crt", "tls.key"],
    };

    const ALL: [Self; 2] = [Self::QEMU, Self::SECRET];

    /// Returns the layout of `dir`, identified by its CA.
    pub(crate) fn of(dir: &Path) -> Result<Self, CredentialsError> {
        let is_there = |layout: &Self| is_there(&dir.join(layout.ca));
        Self::ALL.into_iter().find(is_there).ok_or_else(|| {
            match OTHERS.iter().find(|(file, _)| dir.join(file).exists()) {
                Some(&(file, object)) => CredentialsError::OtherKind {
                    file: dir.join(file),
                    object,
                },
                None => CredentialsError::NoCa {
                    dir: dir.to_owned(),
                    names: Self::ALL.map(|layout| layout.ca),
                },
            }
        })
    }

    /// Returns the names of certificate and key for a role.
    pub(crate) fn pair(&self, role: Role) -> [&'static str; 2] {
        match role {
            Role::Server => self.server,
            Role::Client => self.client,
        }
    }
}

/// Files of QEMU's other kinds of credentials. Neither kind is supported: rustls has no external pre-shared keys for TLS 1.3,
/// and anonymous TLS does not protect against a man in the middle.
const OTHERS: [(&str, &str); 2] = [
    ("keys.psk", "tls-creds-psk"),
    ("dh-params.pem", "tls-creds-anon"),
];

/// Returns the first folder of [`FOLDERS`] that has a CA.
///
/// # Errors
/// If no folder has a CA.
pub fn find_folder() -> Result<PathBuf, CredentialsError> {
    first_of(&FOLDERS.map(PathBuf::from))
}

fn first_of(folders: &[PathBuf]) -> Result<PathBuf, CredentialsError> {
    let found = folders.iter().find(|dir| Layout::of(dir).is_ok());
    found.cloned().ok_or_else(|| CredentialsError::NoFolder {
        folders: folders.to_vec(),
    })
}

/// Warning about files that can be used, but need attention.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// A certificate ends within [`ENDS_SOON`], or has ended.
    Ends {
        /// The file.
        file: PathBuf,
        /// End of the certificate's validity.
        at: SystemTime,
        /// True if the certificate has ended.
        is_over: bool,
    },
    /// Other users may read a private key.
    ///
    /// Not an error: Kubernetes mounts secrets with mode 0644 into a container whose files are not visible to others, and QEMU
    /// accepts such keys.
    KeyIsReadable {
        /// The file.
        file: PathBuf,
        /// Mode of the file, such as 0644.
        mode: u32,
    },
    /// A list of revoked certificates is from a CA that is neither in the folder nor the issuer of this host's certificates.
    ListOfOtherCa {
        /// The file.
        file: PathBuf,
        /// Name of the CA.
        issuer: String,
    },
    /// The files have changed, and cannot be used now: a renewal may have written only the first of two files. The certificates
    /// that were read before stay in use, including the list of revoked certificates.
    NotTakenUp {
        /// Reason why the files cannot be used.
        problem: String,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ends { file, at, is_over } => {
                let ends = if *is_over { "ended" } else { "ends" };
                write!(f, "{} {ends} on {}", file.display(), date(*at))
            }
            Self::KeyIsReadable { file, mode } => write!(
                f,
                "other users can read the private key {} (mode {mode:04o}): run 'chmod o=' on it",
                file.display()
            ),
            Self::ListOfOtherCa { file, issuer } => write!(
                f,
                "{} has the list of revoked certificates of another CA ({issuer}): it does not apply to certificates of the \
                 CA here",
                file.display()
            ),
            Self::NotTakenUp { problem } => {
                write!(f, "changed certificates are not in use: {problem}")
            }
        }
    }
}

/// A certificate of this host with its key.
#[derive(Debug)]
pub(crate) struct OwnCertificate {
    pub(crate) file: PathBuf,
    pub(crate) identity: Identity,
    pub(crate) key: Arc<SingleCertAndKey>,
    /// Subjects of the CA certificates that follow this certificate in its file.
    authorities: Vec<String>,
}

/// Content of the files in a folder of certificates.
pub(crate) struct Material {
    dir: PathBuf,
    layout: Layout,
    pub(crate) server_verifier: Arc<WebPkiServerVerifier>,
    pub(crate) client_verifier: Arc<dyn ClientCertVerifier>,
    own: [Option<OwnCertificate>; 2],
    /// True if there is a list of revoked certificates.
    has_revoked: bool,
    /// Issuers for [`Warning::ListOfOtherCa`].
    other_lists: Vec<String>,
    /// Every certificate in the files, with its file.
    identities: Vec<(PathBuf, Identity)>,
}

impl Material {
    /// Returns the certificate for `role`.
    pub(crate) fn own(&self, role: Role) -> Result<&OwnCertificate, CredentialsError> {
        let own = match role {
            Role::Server => &self.own[0],
            Role::Client => &self.own[1],
        };
        own.as_ref().ok_or_else(|| CredentialsError::NoCertificate {
            file: self.dir.join(self.layout.pair(role)[0]),
            role: role.name(),
        })
    }

    pub(crate) fn read(dir: &Path) -> Result<Self, CredentialsError> {
        let layout = Layout::of(dir)?;
        let ca = dir.join(layout.ca);
        let revoked = dir.join(layout.revoked);
        let unusable = |file: &Path, problem: String| CredentialsError::Unusable {
            file: file.to_owned(),
            problem,
        };
        let mut roots = RootCertStore::empty();
        let mut identities = Vec::new();
        for certificate in certificates(&ca)? {
            identities.push((ca.clone(), identity(&ca, &certificate)?));
            let added = roots.add(certificate);
            added.map_err(|error| unusable(&ca, error.to_string()))?;
        }
        let roots = Arc::new(roots);
        let has_revoked = is_there(&revoked);
        let lists = match has_revoked {
            true => pem::<CertificateRevocationListDer<'static>>(
                &revoked,
                "list of revoked certificates",
            )?,
            false => Vec::new(),
        };
        let issuers: Vec<_> = lists.iter().filter_map(issuer_of_list).collect();
        // A CA without a list revokes nothing, as in QEMU. An expired list makes the verification fail, as in GnuTLS.
        let server_verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), provider())
                .with_crls(lists.clone())
                .allow_unknown_revocation_status()
                .enforce_revocation_expiration()
                .build()
                .map_err(|error| unusable(&revoked, error.to_string()))?;
        let client_verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
            .with_crls(lists)
            .allow_unknown_revocation_status()
            .enforce_revocation_expiration()
            .build()
            .map_err(|error| unusable(&revoked, error.to_string()))?;
        let [server, client] = Role::ALL.map(|role| own(dir, layout.pair(role)));
        let own = [server?, client?];
        for own in own.iter().flatten() {
            identities.push((own.file.clone(), own.identity.clone()));
        }
        identities.dedup();
        let is_known = |issuer: &String| {
            let mut own = own.iter().flatten();
            identities
                .iter()
                .any(|(_, it)| it.is_ca && it.subject == *issuer)
                || own.any(|own| own.identity.issuer == *issuer || own.authorities.contains(issuer))
        };
        let mut other_lists: Vec<_> = issuers.into_iter().filter(|it| !is_known(it)).collect();
        other_lists.dedup();
        Ok(Self {
            dir: dir.to_owned(),
            layout,
            server_verifier,
            client_verifier,
            own,
            has_revoked,
            other_lists,
            identities,
        })
    }
}

/// Returns true if the file exists, or if this cannot be checked: reading the file then reports the error. If a list of revoked
/// certificates or a layout's CA were skipped instead, other peers would be admitted.
fn is_there(path: &Path) -> bool {
    match path.symlink_metadata() {
        Ok(_) => true,
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

impl fmt::Debug for Material {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Material")
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

/// A folder of certificates. Before each connection, files that have changed are read again.
#[derive(Debug)]
pub struct Credentials {
    dir: PathBuf,
    loaded: Mutex<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    material: Arc<Material>,
    stamps: FileStamps,
    /// Reason why the current files are not in use; `None` if they are.
    problem: Option<String>,
}

impl Credentials {
    /// Reads the folder, which must have a CA. A role's certificate may be missing; a connection then reports it.
    ///
    /// # Errors
    /// If the folder has no CA, or a file in it cannot be used.
    pub fn open(dir: &Path) -> Result<Self, CredentialsError> {
        let stamps = FileStamps::of(dir);
        Ok(Self {
            dir: dir.to_owned(),
            loaded: Mutex::new(Loaded {
                material: Arc::new(Material::read(dir)?),
                stamps,
                problem: None,
            }),
        })
    }

    /// Returns the folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Checks that there is a certificate for `role`.
    ///
    /// # Errors
    /// [`CredentialsError::NoCertificate`] if the certificate is missing.
    pub fn check(&self, role: Role) -> Result<(), CredentialsError> {
        self.current().own(role).map(|_| ())
    }

    /// Returns the content of the folder for a new connection. Files that have changed are read again.
    pub(crate) fn current(&self) -> Arc<Material> {
        let mut loaded = lock(&self.loaded);
        let stamps = FileStamps::of(&self.dir);
        if stamps != loaded.stamps {
            match Material::read(&self.dir) {
                // The removal of a list is often the first half of its replacement, so the old list stays in use.
                Ok(material) if loaded.material.has_revoked && !material.has_revoked => {
                    let list = self.dir.join(material.layout.revoked);
                    let problem =
                        format!("{} is gone; after a restart it is not used", list.display());
                    loaded.problem = Some(problem);
                }
                Ok(material) => {
                    *loaded = Loaded {
                        material: Arc::new(material),
                        stamps,
                        problem: None,
                    };
                }
                // The stamps are not updated: the next connection tries again.
                Err(error) => loaded.problem = Some(error_line(&error)),
            }
        }
        Arc::clone(&loaded.material)
    }

    /// Returns the warnings at the time `now`.
    #[must_use]
    pub fn warnings(&self, now: SystemTime) -> Vec<Warning> {
        let material = self.current();
        let mut warnings = Vec::new();
        for (file, identity) in &material.identities {
            warnings.extend(ends(file, identity.ends, now));
        }
        let list = self.dir.join(material.layout.revoked);
        let others = material.other_lists.iter();
        warnings.extend(others.map(|issuer| Warning::ListOfOtherCa {
            file: list.clone(),
            issuer: issuer.clone(),
        }));
        let keys = Role::ALL.map(|role| self.dir.join(material.layout.pair(role)[1]));
        for key in keys {
            warnings.extend(key_is_readable(&key));
        }
        warnings.dedup();
        let loaded = lock(&self.loaded);
        warnings.extend(
            loaded
                .problem
                .clone()
                .map(|problem| Warning::NotTakenUp { problem }),
        );
        warnings
    }
}

/// Returns a warning if `at`, the end of the certificate in `file`, is past or within [`ENDS_SOON`]; otherwise `None`.
fn ends(file: &Path, at: SystemTime, now: SystemTime) -> Option<Warning> {
    (at < now + ENDS_SOON).then(|| Warning::Ends {
        file: file.to_owned(),
        at,
        is_over: at < now,
    })
}

fn key_is_readable(file: &Path) -> Option<Warning> {
    let mode = fs::metadata(file).ok()?.permissions().mode() & 0o7777;
    // The group may read: libvirt gives QEMU access to the key by a group.
    (mode & 0o007 != 0).then(|| Warning::KeyIsReadable {
        file: file.to_owned(),
        mode,
    })
}

/// Metadata that shows that a file was replaced. Symbolic links are followed: Kubernetes changes a link in the path of the
/// file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FileStamps(Vec<Option<[i128; 5]>>);

impl FileStamps {
    fn of(dir: &Path) -> Self {
        let names = Layout::ALL.into_iter().flat_map(|layout| {
            let pairs = layout.server.into_iter().chain(layout.client);
            pairs.chain([layout.ca, layout.revoked])
        });
        let stamp = |name: &str| {
            let file = fs::metadata(dir.join(name)).ok()?;
            let time = |seconds: i64, nanoseconds: i64| {
                i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds)
            };
            Some([
                file.dev().into(),
                file.ino().into(),
                file.size().into(),
                time(file.mtime(), file.mtime_nsec()),
                time(file.ctime(), file.ctime_nsec()),
            ])
        };
        Self(names.map(stamp).collect())
    }
}

/// Reads the certificate and key in the files with these names; returns `None` if both are missing.
fn own(
    dir: &Path,
    [certificate, key]: [&str; 2],
) -> Result<Option<OwnCertificate>, CredentialsError> {
    let [file, key] = [certificate, key].map(|name| dir.join(name));
    if !file.exists() && !key.exists() {
        return Ok(None);
    }
    let chain = certificates(&file)?;
    let (identity, rest) = match chain.split_first() {
        Some((first, rest)) => (identity(&file, first)?, rest),
        None => return Ok(None),
    };
    let authorities = rest.iter().filter_map(|it| Identity::read(it).ok());
    let authorities: Vec<_> = authorities.map(|it| it.subject).collect();
    let private = private_key(&key)?;
    let certified = CertifiedKey::from_der(chain, private, &provider());
    let certified = certified.map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) if identity.is_ca && !authorities.is_empty() => {
            CredentialsError::CaFirst {
                file: file.clone(),
                subject: identity.subject.clone(),
            }
        }
        rustls::Error::InconsistentKeys(_) => CredentialsError::KeyMismatch {
            certificate: file.clone(),
            key,
        },
        source => CredentialsError::UnsupportedKey { file: key, source },
    })?;
    Ok(Some(OwnCertificate {
        file,
        identity,
        key: Arc::new(SingleCertAndKey::from(certified)),
        authorities,
    }))
}

pub(crate) fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    pem(file, "certificate")
}

fn identity(file: &Path, certificate: &CertificateDer<'_>) -> Result<Identity, CredentialsError> {
    Identity::read(certificate).map_err(|source| CredentialsError::BadCertificate {
        file: file.to_owned(),
        source,
    })
}

/// Reads the first private key of a file.
fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, CredentialsError> {
    match pem(path, "private key") {
        Ok(mut keys) => Ok(keys.swap_remove(0)),
        Err(CredentialsError::NotPem { .. }) if is_encrypted(&contents(path)?) => {
            Err(CredentialsError::EncryptedKey {
                file: path.to_owned(),
            })
        }
        Err(error) => Err(error),
    }
}

/// Returns true if a PEM key is encrypted: by PKCS #8 (RFC 5958), or by the header of older tools (RFC 1421).
fn is_encrypted(text: &[u8]) -> bool {
    let text = String::from_utf8_lossy(text);
    let mut lines = text.lines().map(str::trim);
    lines.any(|line| {
        line == "-----BEGIN ENCRYPTED PRIVATE KEY-----" || line == "Proc-Type: 4,ENCRYPTED"
    })
}

/// Reads all PEM objects of one kind in a file; at least one.
fn pem<T: PemObject>(path: &Path, what: &'static str) -> Result<Vec<T>, CredentialsError> {
    let text = contents(path)?;
    let all: Result<Vec<T>, _> = T::pem_slice_iter(&text).collect();
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        _ => Err(CredentialsError::NotPem {
            file: path.to_owned(),
            what,
        }),
    }
}

fn contents(path: &Path) -> Result<Vec<u8>, CredentialsError> {
    let read = || -> io::Result<Vec<u8>> {
        let mut text = Vec::new();
        fs::File::open(path)?
            .take(MAX_FILE + 1)
            .read_to_end(&mut text)?;
        Ok(text)
    };
    let text = read().map_err(FileError::reading(path))?;
    if text.len() as u64 > MAX_FILE {
        return Err(CredentialsError::TooLarge {
            file: path.to_owned(),
            limit: MAX_FILE,
        });
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_for_keys_of_another_kind_is_refused_by_its_name() {
        let dir = tempfile::tempdir().unwrap();
        for (file, object) in OTHERS {
            let path = dir.path().join(file);
            fs::write(&path, "").unwrap();
            let error = Layout::of(dir.path()).err().unwrap().to_string();
            assert!(error.contains(file) && error.contains(object), "{error}");
            fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn the_first_folder_with_a_ca_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let folders = [dir.path().join("a"), dir.path().join("b")];
        let error = first_of(&folders).unwrap_err().to_string();
        for folder in &folders {
            assert!(error.contains(&folder.display().to_string()), "{error}");
        }
        fs::create_dir_all(&folders[1]).unwrap();
        fs::write(folders[1].join("ca.crt"), "").unwrap();
        assert_eq!(first_of(&folders).unwrap(), folders[1]);
        fs::create_dir_all(&folders[0]).unwrap();
        fs::write(folders[0].join("ca-cert.pem"), "").unwrap();
        assert_eq!(first_of(&folders).unwrap(), folders[0]);
    }
}
