//! Tests certificates that change while they are used.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::Arc;
use std::time::SystemTime;

use hotlift_tls::{Credentials, Role, Tls, Warning};

use crate::support::{DAY, Pki, connect_pair, failure, hotlift, tls};

#[test]
fn the_next_connection_has_the_renewed_certificate() {
    let pki = Pki::new("CA");
    let dir = pki.host(&["old"]);
    let client = tls(&pki.host(&["a"]), hotlift());
    let credentials = Arc::new(Credentials::open(&dir).unwrap());
    let server = Tls::new(Arc::clone(&credentials), hotlift());
    connect_pair(&client, "old", &server).0.unwrap();
    pki.put(&dir, Role::Server, &["new"], SystemTime::now(), 5);
    let (client_said, _) = connect_pair(&client, "new", &server);
    assert_eq!(client_said.unwrap().peer.unwrap().dns, ["new"]);
    // Another CA from now on.
    let other = Pki::new("other");
    fs::write(dir.join("ca-cert.pem"), &other.ca().certificate).unwrap();
    let (_, server_said) = connect_pair(&client, "new", &server);
    assert!(failure(server_said).contains("CA that this side does not trust"));
}

#[test]
fn a_partial_renewal_keeps_the_old_certificates_and_is_reported() {
    let pki = Pki::new("CA");
    let dir = pki.host(&["b"]);
    let client = tls(&pki.host(&["a"]), hotlift());
    let credentials = Arc::new(Credentials::open(&dir).unwrap());
    let server = Tls::new(Arc::clone(&credentials), hotlift());
    let new = pki.host(&["new"]);
    fs::copy(new.join("server-key.pem"), dir.join("server-key.pem")).unwrap();
    connect_pair(&client, "b", &server).0.unwrap();
    let warnings = server.warnings();
    assert!(
        matches!(warnings.last(), Some(Warning::NotTakenUp { problem }) if problem.contains("do not match")),
        "{warnings:?}"
    );
    fs::copy(new.join("server-cert.pem"), dir.join("server-cert.pem")).unwrap();
    connect_pair(&client, "new", &server).0.unwrap();
    let is_late = |warning: &Warning| matches!(warning, Warning::NotTakenUp { .. });
    assert!(!server.warnings().iter().any(is_late));
}

#[test]
fn a_secret_that_kubernetes_replaces_by_a_link_is_reloaded() {
    let pki = Pki::new("CA");
    let place = tempfile::tempdir().unwrap();
    let mount = place.path().join("mount");
    fs::create_dir(&mount).unwrap();
    for (version, name) in [("1", "old"), ("2", "new")] {
        let host = pki.host(&[name]);
        let dir = place.path().join(version);
        fs::create_dir(&dir).unwrap();
        for (from, to) in [
            ("ca-cert.pem", "ca.crt"),
            ("server-cert.pem", "tls.crt"),
            ("server-key.pem", "tls.key"),
        ] {
            fs::copy(host.join(from), dir.join(to)).unwrap();
        }
    }
    symlink(place.path().join("1"), mount.join("..data")).unwrap();
    for name in ["ca.crt", "tls.crt", "tls.key"] {
        symlink(format!("..data/{name}"), mount.join(name)).unwrap();
    }
    let client = tls(&pki.host(&["a"]), hotlift());
    let server = tls(&mount, hotlift());
    connect_pair(&client, "old", &server).0.unwrap();
    symlink(place.path().join("2"), mount.join("..tmp")).unwrap();
    fs::rename(mount.join("..tmp"), mount.join("..data")).unwrap();
    connect_pair(&client, "new", &server).0.unwrap();
}

#[test]
fn expiry_within_14_days_and_readable_keys_are_warned_of() {
    let pki = Pki::new("CA");
    let now = SystemTime::now();
    let dir = pki.host(&["b"]);
    let credentials = Credentials::open(&dir).unwrap();
    for key in ["server-key.pem", "client-key.pem"] {
        fs::set_permissions(dir.join(key), fs::Permissions::from_mode(0o640)).unwrap();
    }
    // All of them: the CA has 10 days, the others 5.
    let ends = |now| {
        let warnings = credentials.warnings(now);
        let over = |warning: &Warning| match warning {
            Warning::Ends { is_over, .. } => *is_over,
            other => panic!("{other}"),
        };
        warnings.iter().map(over).collect::<Vec<_>>()
    };
    assert_eq!(ends(now), [false, false, false]);
    assert_eq!(ends(now + 6 * DAY), [false, true, true]);
    assert_eq!(ends(now - 15 * DAY), [false; 0]);
    fs::set_permissions(
        dir.join("client-key.pem"),
        fs::Permissions::from_mode(0o644),
    )
    .unwrap();
    let warnings = credentials.warnings(now - 15 * DAY);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let line = warnings[0].to_string();
    assert!(
        line.contains("client-key.pem") && line.contains("0644"),
        "{line}"
    );
}
