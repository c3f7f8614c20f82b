//! A CA, and the certificates of hosts.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use hotlift_tls::{Authority, Credentials, Issued, Profile, Role, Settings, Tls};
use tempfile::TempDir;

/// Validity of a host's certificate, in days.
const DAYS: u32 = 5;

/// A CA, and the folders of hosts, which are deleted with it.
pub struct Pki {
    folder: TempDir,
    ca: Issued,
    authority: Authority,
}

impl Pki {
    /// Creates a CA.
    ///
    /// # Panics
    /// If it cannot be created.
    #[must_use]
    pub fn new() -> Self {
        let ca = Authority::make("CA", 2 * DAYS, SystemTime::now()).expect("a CA");
        Self {
            folder: tempfile::tempdir().expect("a folder"),
            authority: Authority::open(&ca.certificate, &ca.key).expect("it was just made"),
            ca,
        }
    }

    /// Writes to `folder` the `tls-creds` certificates, as server and as client, of a host with these names.
    ///
    /// # Panics
    /// If that fails.
    pub fn host_in(&self, folder: &Path, names: &[&str]) {
        fs::create_dir_all(folder).expect("a folder");
        fs::write(folder.join("ca-cert.pem"), &self.ca.certificate).expect("a file");
        for role in [Role::Server, Role::Client] {
            let issued = self
                .authority
                .issue(names, role, DAYS, SystemTime::now())
                .expect("a certificate");
            let file = |what: &str| folder.join(format!("{}-{what}.pem", role.name()));
            fs::write(file("cert"), issued.certificate).expect("a file");
            fs::write(file("key"), issued.key).expect("a file");
        }
    }

    /// Creates a `tls-creds` folder with certificates, as server and as client, of a host with this name.
    ///
    /// # Panics
    /// If that fails, or the name exists.
    #[must_use]
    pub fn host(&self, name: &str) -> PathBuf {
        let folder = self.folder.path().join(name);
        fs::create_dir(&folder).expect("a name of its own");
        self.host_in(&folder, &[name]);
        folder
    }

    /// Returns TLS between two Hotlifts with the certificates of a host with this name.
    ///
    /// # Panics
    /// As [`Self::host`].
    #[must_use]
    pub fn tls(&self, name: &str) -> Arc<Tls> {
        let credentials = Credentials::open(&self.host(name)).expect("they were just made");
        let settings = Settings::new(Profile::Hotlift);
        Arc::new(Tls::new(Arc::new(credentials), settings))
    }
}

impl Default for Pki {
    fn default() -> Self {
        Self::new()
    }
}
