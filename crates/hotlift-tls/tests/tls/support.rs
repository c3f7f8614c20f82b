//! Creates a CA, certificate folders, and the two ends of a TLS connection.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

use hotlift_tls::{
    Authority, Authz, Credentials, Issued, Profile, Role, Session, Settings, Tls, TlsError,
};
use tempfile::TempDir;

pub const DAY: Duration = Duration::from_secs(24 * 3600);

/// A CA, and a place for folders.
pub struct Pki {
    dir: TempDir,
    ca: Issued,
    authority: Authority,
}

impl Pki {
    pub fn new(name: &str) -> Self {
        let ca = Authority::make(name, 10, SystemTime::now()).unwrap();
        let authority = Authority::open(&ca.certificate, &ca.key).unwrap();
        Self {
            dir: tempfile::tempdir().unwrap(),
            ca,
            authority,
        }
    }

    pub fn ca(&self) -> &Issued {
        &self.ca
    }

    /// Makes a host's folder.
    pub fn host(&self, names: &[&str]) -> PathBuf {
        self.host_at(names, SystemTime::now(), 5)
    }

    /// Makes a host's folder with certificates of another time.
    pub fn host_at(&self, names: &[&str], at: SystemTime, days: u32) -> PathBuf {
        let dir = self.dir.path().join(format!("{:08x}", fastrand::u32(..)));
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("ca-cert.pem"), &self.ca.certificate).unwrap();
        for role in [Role::Server, Role::Client] {
            self.put(&dir, role, names, at, days);
        }
        dir
    }

    /// Puts a certificate into a folder.
    pub fn put(&self, dir: &Path, role: Role, names: &[&str], at: SystemTime, days: u32) {
        let issued = self.authority.issue(names, role, days, at).unwrap();
        put(dir, role, &issued);
    }
}

/// Puts a certificate into a folder.
pub fn put(dir: &Path, role: Role, issued: &Issued) {
    let file = |what: &str| dir.join(format!("{}-{what}.pem", role.name()));
    fs::write(file("key"), &issued.key).unwrap();
    fs::write(file("cert"), &issued.certificate).unwrap();
}

pub fn hotlift() -> Settings {
    Settings::new(Profile::Hotlift)
}

pub fn allow(patterns: &[&str]) -> Settings {
    Settings {
        authz: Some(Arc::new(Authz::new(patterns).unwrap())),
        ..hotlift()
    }
}

pub fn tls(dir: &Path, settings: Settings) -> Tls {
    Tls::new(Arc::new(Credentials::open(dir).unwrap()), settings)
}

/// Results of a connection at its client and its server.
pub type Outcome = (Result<Session, TlsError>, Result<Session, TlsError>);

/// Connects a client that expects `host` to a server.
pub fn connect_pair(client: &Tls, host: &str, server: &Tls) -> Outcome {
    let (here, there) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        let accepted = scope.spawn(move || server.accept(&there));
        let connected = client.connect(&here, Some(host));
        drop(here);
        (connected, accepted.join().unwrap())
    })
}

/// Does the same, and keeps the connection open.
pub fn connected(settings: &Settings) -> ((UnixStream, Session), (UnixStream, Session)) {
    let pki = Pki::new("CA");
    let [a, b] = [pki.host(&["a"]), pki.host(&["b"])];
    let (client, server) = (tls(&a, settings.clone()), tls(&b, settings.clone()));
    let (here, there) = UnixStream::pair().unwrap();
    let (ours, theirs) = thread::scope(|scope| {
        let accepted = scope.spawn(|| server.accept(&there).unwrap());
        let session = client.connect(&here, Some("b")).unwrap();
        (session, accepted.join().unwrap())
    });
    ((here, ours), (there, theirs))
}

/// Formats an error with its causes, as shown to users.
pub use hotlift_mem::error_line as line;

/// Formats the error of a failed handshake.
pub fn failure<T: std::fmt::Debug>(outcome: Result<T, TlsError>) -> String {
    line(&outcome.unwrap_err())
}
