//! Tests `hotlift certs`: the files that it creates, and its output if files exist already.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use hotlift_tls::{Credentials, Profile, Settings, Tls};
use serde_json::Value;

use crate::hotlift::{Hotlift, errors};

/// Runs `hotlift certs`, and returns its exit code and output.
fn certs(arguments: &[&str]) -> (Option<i32>, Vec<String>) {
    let (status, output) = Hotlift::start(&[&["certs"], arguments].concat()).wait();
    (status.code(), output)
}

/// Runs `hotlift certs`, which must succeed.
fn made(arguments: &[&str]) -> String {
    let (code, output) = certs(arguments);
    assert_eq!(code, Some(0), "{arguments:?}: {output:#?}");
    output.join("\n")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a folder of ours")
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path)
        .expect("it was made")
        .permissions()
        .mode()
        & 0o7777
}

#[test]
fn three_commands_create_certificates_for_two_hosts() {
    let place = tempfile::tempdir().unwrap();
    let (a, b) = (place.path().join("pki/a"), place.path().join("b"));
    made(&["init", "--dir", text(&a)]);
    made(&["host", "a.example", "192.0.2.1", "--dir", text(&a)]);
    let output = made(&[
        "host",
        "b.example",
        "192.0.2.2",
        "--dir",
        text(&a),
        "--out",
        text(&b),
    ]);
    assert!(
        output.contains(&format!("tar cC {} . | ssh root@b.example ", b.display())),
        "{output}"
    );

    for dir in [&a, &b] {
        assert_eq!(mode(dir), 0o700);
        for role in ["server", "client"] {
            assert_eq!(mode(&dir.join(format!("{role}-key.pem"))), 0o600);
            assert_eq!(mode(&dir.join(format!("{role}-cert.pem"))), 0o644);
        }
    }
    assert_eq!(mode(&a.join("ca-key.pem")), 0o600);
    assert_ne!(
        mode(&place.path().join("pki")),
        0o700,
        "folders above are as ever"
    );
    assert!(!b.join("ca-key.pem").exists(), "the CA's key stays");

    let tls = |dir: &Path| {
        let credentials = Credentials::open(dir).expect("what was made can be used");
        Tls::new(Arc::new(credentials), Settings::new(Profile::Hotlift))
    };
    let (client, server) = (tls(&a), tls(&b));
    for host in ["b.example", "192.0.2.2"] {
        let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        thread::scope(|scope| {
            let accepted = scope.spawn(|| server.accept(&there));
            client
                .connect(&here, Some(host))
                .expect("they know each other");
            let session = accepted.join().unwrap().expect("they know each other");
            assert_eq!(session.peer.as_ref().unwrap().dns, ["a.example"]);
        });
    }
    assert!(client.warnings().is_empty() && server.warnings().is_empty());
}

#[test]
fn nothing_is_overwritten_without_force() {
    let place = tempfile::tempdir().unwrap();
    let dir = text(place.path());
    made(&["init", "--dir", dir]);
    made(&["host", "a", "--dir", dir]);
    let all = || {
        let names = [
            "ca-cert.pem",
            "ca-key.pem",
            "server-cert.pem",
            "server-key.pem",
            "client-cert.pem",
            "client-key.pem",
        ];
        names.map(|name| fs::read(place.path().join(name)).unwrap())
    };
    let before = all();
    for again in [&["init", "--dir", dir][..], &["host", "a", "--dir", dir]] {
        let (code, output) = certs(again);
        assert_eq!(code, Some(1), "{output:?}");
        assert!(
            errors(&output)[0].contains("already exists; --force replaces it"),
            "{output:?}"
        );
        assert_eq!(all(), before);
    }
    // One missing file of four suffices.
    for name in ["server-cert.pem", "server-key.pem", "client-cert.pem"] {
        fs::remove_file(place.path().join(name)).unwrap();
    }
    assert_eq!(certs(&["host", "a", "--dir", dir]).0, Some(1));
    assert!(!place.path().join("server-key.pem").exists());
    made(&["host", "a", "--dir", dir, "--force"]);
    let after = all();
    assert_eq!(after[..2], before[..2]);
    assert!(
        after[2..]
            .iter()
            .zip(&before[2..])
            .all(|(new, old)| new != old)
    );
}

#[test]
fn renew_makes_new_keys_for_the_same_names_when_due() {
    let place = tempfile::tempdir().unwrap();
    let (ca, host) = (place.path().join("ca"), place.path().join("host"));
    made(&["init", "--dir", text(&ca)]);
    made(&[
        "host",
        "a.example",
        "2001:db8::1",
        "--dir",
        text(&ca),
        "--out",
        text(&host),
        "--days",
        "20",
    ]);
    let show = || -> Value {
        let output = made(&["show", "--dir", text(&host), "--json"]);
        serde_json::from_str(&output).expect("JSON")
    };
    let key = || fs::read(host.join("server-key.pem")).unwrap();
    let (before, old_key) = (show(), key());
    let renew = |within| {
        let folders = ["--dir", text(&host), "--ca", text(&ca)];
        made(&[&["renew"][..], &folders, &["--within", within]].concat());
    };
    renew("10");
    assert_eq!(
        (show(), key()),
        (before.clone(), old_key.clone()),
        "it is not time"
    );
    renew("30");
    let after = show();
    assert_ne!(key(), old_key);
    for (new, old) in [1, 2].map(|at| (&after["certificates"][at], &before["certificates"][at])) {
        assert_eq!(new["names"], old["names"]);
        assert_eq!(
            new["names"],
            serde_json::json!(["a.example", "2001:db8::1"])
        );
        assert!(old["days-left"].as_i64().unwrap() <= 20, "{old}");
        assert!(new["days-left"].as_i64().unwrap() >= 364, "{new}");
    }
    let (code, output) = certs(&["renew", "--dir", text(&host)]);
    assert_eq!(code, Some(1));
    assert!(
        errors(&output)[0].contains("has no CA (ca-key.pem is missing)"),
        "{output:?}"
    );
    let (code, output) = certs(&["renew", "--dir", text(&ca)]);
    assert_eq!(code, Some(1));
    assert!(
        errors(&output)[0].contains("has no certificate to renew"),
        "{output:?}"
    );
}

#[test]
fn show_prints_names_expiry_and_problems_in_80_columns() {
    let place = tempfile::tempdir().unwrap();
    let dir = text(place.path());
    made(&["init", "--dir", dir, "--name", "Our CA"]);
    let names: Vec<_> = (0..12)
        .map(|n| format!("host-{n}.long-name.example"))
        .collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    made(&[&["host"], &names[..], &["--dir", dir, "--days", "10"]].concat());
    let output = made(&["show", "--dir", dir]);
    for words in [
        "ca-cert.pem (CA): CN=Our CA",
        "server-cert.pem (server)",
        names[0],
        "signed by CN=Our CA",
        "note: ",
    ] {
        assert!(output.contains(words), "{words}: {output}");
    }
    for line in output
        .lines()
        .filter(|line| line.split_whitespace().count() > 1)
    {
        assert!(line.chars().count() <= 80 || line.contains(dir), "{line}");
    }

    // A certificate of another CA.
    let other = tempfile::tempdir().unwrap();
    made(&["init", "--dir", text(other.path())]);
    fs::copy(
        other.path().join("ca-cert.pem"),
        place.path().join("ca-cert.pem"),
    )
    .unwrap();
    let (code, output) = certs(&["show", "--dir", dir]);
    assert_eq!(code, Some(1), "{output:?}");
    let problem = "    problem: it is signed by a CA that this side does not trust";
    assert_eq!(
        output
            .iter()
            .filter(|line| line.starts_with(problem))
            .count(),
        2,
        "{output:#?}"
    );
    let all = output.join("\n");
    assert!(
        all.contains("libvirt") && all.contains("cert-manager"),
        "{all}"
    );
    assert!(errors(&output)[0].contains("have a problem"), "{output:?}");

    // A host without a client certificate.
    fs::remove_file(place.path().join("client-cert.pem")).unwrap();
    fs::remove_file(place.path().join("client-key.pem")).unwrap();
    let (code, output) = certs(&["show", "--dir", dir, "--json"]);
    assert_eq!(code, Some(1));
    // The error's line is on the other stream: it may come before or within the JSON.
    let json: String = output
        .iter()
        .filter(|line| !line.starts_with("hotlift:"))
        .cloned()
        .collect();
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["usable"], false);
    let problem = json["problems"][0].as_str().unwrap();
    assert!(problem.contains("client-cert.pem is missing"), "{problem}");
}

#[test]
fn a_folder_without_certificates_and_a_bad_name_are_errors() {
    let place = tempfile::tempdir().unwrap();
    let dir = text(place.path());
    let (code, output) = certs(&["host", "a", "--dir", dir]);
    assert_eq!(code, Some(1));
    assert!(
        errors(&output)[0].contains("has no CA (ca-cert.pem is missing)"),
        "{output:?}"
    );
    assert!(
        errors(&output)[1].contains("make a CA with 'hotlift certs init'"),
        "{output:?}"
    );
    let (code, output) = certs(&["show", "--dir", dir]);
    assert_eq!(code, Some(1));
    assert!(
        output
            .iter()
            .any(|line| line.contains("has no ca-cert.pem (nor ca.crt)")),
        "{output:?}"
    );
    made(&["init", "--dir", dir]);
    for (name, words) in [
        ("*.example", "is a wildcard; name each host"),
        ("a b", "is neither a DNS name nor an IP address"),
    ] {
        let (code, output) = certs(&["host", name, "--dir", dir]);
        assert_eq!(code, Some(2), "{output:?}");
        assert!(errors(&output)[0].contains(words), "{output:?}");
    }
    assert!(!place.path().join("server-key.pem").exists());
}
