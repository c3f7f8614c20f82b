//! Tests accepted and rejected handshakes, and the errors on both sides.

use std::fs;
use std::path::Path;
use std::time::SystemTime;

use hotlift_tls::{
    Authority, Identity, NotACertificate, Profile, Role, Settings, Slices, TlsError,
};
use rcgen::{
    CertificateRevocationListParams, Issuer, KeyIdMethod, KeyPair, RevokedCertParams, SerialNumber,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use time::OffsetDateTime;

use crate::support::{DAY, Pki, allow, connect_pair, connected, failure, hotlift, put, tls};

#[test]
fn two_hosts_of_one_ca_authenticate_each_other_and_export_the_same_secret() {
    let pki = Pki::new("CA");
    let client = tls(&pki.host(&["a.example", "192.0.2.1"]), hotlift());
    let server = tls(
        &pki.host(&["b.example", "192.0.2.2", "2001:db8::2"]),
        hotlift(),
    );
    for host in ["b.example", "192.0.2.2", "2001:db8::2", "B.Example"] {
        let (client, server) = connect_pair(&client, host, &server);
        let (client, server) = (client.unwrap(), server.unwrap());
        assert_eq!(client.peer.unwrap().dns, ["b.example"]);
        assert_eq!(server.peer.unwrap().subject, "CN=a.example");
        assert_eq!(client.cipher, server.cipher);
        let value = client.exporter.export("EXPORTER-test", b"context");
        assert_eq!(value, server.exporter.export("EXPORTER-test", b"context"));
        assert_ne!(value, client.exporter.export("EXPORTER-test", b"other"));
        assert_ne!(value, client.exporter.export("EXPORTER-other", b"context"));
    }
}

#[test]
fn a_binding_proof_ties_one_connection_to_one_conversation() {
    let (conversation, data, other) = (
        connected(&hotlift()),
        connected(&hotlift()),
        connected(&hotlift()),
    );
    let proof = conversation.0.1.exporter.proof(&data.0.1.exporter);
    let here = &conversation.1.1.exporter;
    assert_eq!(here.proof(&data.1.1.exporter), proof);
    let of_other = here.proof(&other.1.1.exporter);
    assert_ne!(of_other, proof, "another connection");
    let by_other = other.1.1.exporter.proof(&data.1.1.exporter);
    assert_ne!(by_other, proof, "another conversation");
}

#[test]
fn tls_hostname_replaces_the_name_of_the_address() {
    let pki = Pki::new("CA");
    let server = tls(&pki.host(&["b"]), hotlift());
    let named = Settings {
        hostname: Some("b".to_owned()),
        ..hotlift()
    };
    let dir = pki.host(&["a"]);
    let (client, _) = connect_pair(&tls(&dir, named), "192.0.2.9", &server);
    client.unwrap();
    let nameless = tls(&dir, hotlift());
    for (host, error) in [
        (None, "tls-hostname"),
        (Some(""), "tls-hostname"),
        (Some("a b"), "'a b'"),
    ] {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let output = failure(nameless.connect(&socket, host));
        assert!(output.contains(error), "{output}");
    }
}

/// Returns the errors of client and server if the server's certificate has a fault.
fn bad_server(dir: &Path, pki: &Pki, settings: Settings) -> (String, String) {
    let client = tls(&pki.host(&["a"]), settings);
    let (client, server) = connect_pair(&client, "b", &tls(dir, hotlift()));
    (failure(client), failure(server))
}

/// Does the same for a fault of the client's certificate.
fn bad_client(dir: &Path, pki: &Pki, settings: Settings) -> (String, String) {
    let server = tls(&pki.host(&["b"]), settings);
    let (client, server) = connect_pair(&tls(dir, hotlift()), "b", &server);
    (failure(client), failure(server))
}

fn assert_contains(output: &str, words: &[&str]) {
    for word in words {
        assert!(output.contains(word), "'{word}' in: {output}");
    }
}

#[test]
fn a_certificate_of_another_ca_is_refused_by_either_side() {
    // Also with the same name, so that only the keys differ.
    for name in ["Another CA", "CA"] {
        let (pki, other) = (Pki::new("CA"), Pki::new(name));
        // It trusts our CA, so that only its own certificate is at fault.
        let dir = other.host(&["b"]);
        fs::write(dir.join("ca-cert.pem"), &pki.ca().certificate).unwrap();
        let (client, server) = bad_server(&dir, &pki, hotlift());
        assert_contains(
            &client,
            &[
                "other side's certificate (CN=b: b)",
                "CA that this side does not trust",
            ],
        );
        assert_contains(&client, &[&format!("CN={name}")]);
        assert_contains(&server, &["does not accept our certificate", "CA"]);
        let (client, server) = bad_client(&dir, &pki, hotlift());
        assert_contains(
            &server,
            &[
                "other side's certificate",
                "CA that this side does not trust",
            ],
        );
        assert_contains(&client, &["does not accept our certificate"]);
    }
}

#[test]
fn a_certificate_that_is_not_for_the_host_names_those_that_it_is_for() {
    let pki = Pki::new("CA");
    let dir = pki.host(&["c.example", "192.0.2.3"]);
    let (client, server) = bad_server(&dir, &pki, hotlift());
    assert_contains(&client, &["is not for 'b' but for c.example, 192.0.2.3"]);
    assert_contains(&server, &["does not accept our certificate", "name"]);
}

#[test]
fn a_name_that_is_on_no_list_is_refused_by_either_side() {
    let pki = Pki::new("CA");
    let (dir_a, dir_b) = (pki.host(&["a"]), pki.host(&["b"]));
    let (client, server) = bad_client(&dir_a, &pki, allow(&["c", "d.*"]));
    assert_contains(
        &server,
        &["(CN=a: a)", "is not on the list of allowed names (c d.*)"],
    );
    assert_contains(
        &client,
        &["does not accept our certificate", "not on the list"],
    );
    let (client, server) = bad_server(&dir_b, &pki, allow(&["c"]));
    assert_contains(&client, &["is not on the list of allowed names"]);
    assert_contains(
        &server,
        &["does not accept our certificate", "not on the list"],
    );
    let server = tls(&dir_b, allow(&["CN=a"]));
    let (client, server) = connect_pair(&tls(&dir_a, allow(&["b"])), "b", &server);
    client.unwrap();
    server.unwrap();
}

/// Replaces the certificate in a folder for a role, also by one that this crate would neither make nor use.
fn certificate_at(pki: &Pki, dir: &Path, role: Role, at: SystemTime, days: u32) {
    pki.put(dir, role, &["b"], at, days);
}

#[test]
fn an_expired_or_future_certificate_is_named_with_its_dates_and_not_sent() {
    let pki = Pki::new("CA");
    let now = SystemTime::now();
    for (at, words) in [
        (now - 3 * DAY, "is valid only from"),
        (now + 3 * DAY, "is valid only from"),
    ] {
        let dir = pki.host(&["b"]);
        certificate_at(&pki, &dir, Role::Client, at, 1);
        certificate_at(&pki, &dir, Role::Server, at, 1);
        let (client, _) = connect_pair(
            &tls(&dir, hotlift()),
            "b",
            &tls(&pki.host(&["b"]), hotlift()),
        );
        assert_contains(
            &failure(client),
            &["this host's certificate", "client-cert.pem", words],
        );
        let (client, server) = connect_pair(
            &tls(&pki.host(&["a"]), hotlift()),
            "b",
            &tls(&dir, hotlift()),
        );
        assert_contains(
            &failure(server),
            &["this host's certificate", "server-cert.pem"],
        );
        assert_contains(&failure(client), &["closed the connection"]);
    }
}

#[test]
fn a_certificate_for_the_other_role_is_refused() {
    let pki = Pki::new("CA");
    let dir = pki.host(&["b"]);
    for (from, to) in [
        ("client-cert.pem", "server-cert.pem"),
        ("client-key.pem", "server-key.pem"),
    ] {
        fs::copy(dir.join(from), dir.join(to)).unwrap();
    }
    let (client, server) = bad_server(&dir, &pki, hotlift());
    assert_contains(&client, &["is not valid for a TLS server"]);
    assert_contains(
        &server,
        &["does not accept our certificate", "not valid for"],
    );
}

/// Returns a list that revokes the certificate in `file`, valid for `days` from `begins` on.
fn revoke(pki: &Pki, file: &Path, begins: SystemTime, days: u32) -> String {
    let certificate = CertificateDer::from_pem_file(file).unwrap();
    let (_, parsed) = x509_parser::parse_x509_certificate(&certificate).unwrap();
    let key = KeyPair::from_pem(&pki.ca().key).unwrap();
    let issuer = Issuer::from_ca_cert_pem(&pki.ca().certificate, key).unwrap();
    let at = OffsetDateTime::from(begins);
    let list = CertificateRevocationListParams {
        this_update: at,
        next_update: OffsetDateTime::from(begins + DAY * days),
        crl_number: SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: vec![RevokedCertParams {
            serial_number: SerialNumber::from_slice(parsed.raw_serial()),
            revocation_time: at,
            reason_code: None,
            invalidity_date: None,
        }],
        key_identifier_method: KeyIdMethod::Sha256,
    };
    list.signed_by(&issuer).unwrap().pem().unwrap()
}

#[test]
fn a_revoked_certificate_is_refused_by_either_side_and_others_are_not() {
    let pki = Pki::new("CA");
    let (a, b) = (pki.host(&["a"]), pki.host(&["b"]));
    let now = SystemTime::now() - DAY;
    fs::write(
        b.join("ca-crl.pem"),
        revoke(&pki, &a.join("client-cert.pem"), now, 9),
    )
    .unwrap();
    let (client, server) = connect_pair(&tls(&a, hotlift()), "b", &tls(&b, hotlift()));
    assert_contains(&failure(server), &["(CN=a: a)", "is revoked"]);
    assert_contains(
        &failure(client),
        &["does not accept our certificate: it is revoked"],
    );
    let other = pki.host(&["other"]);
    let (client, server) = connect_pair(&tls(&other, hotlift()), "b", &tls(&b, hotlift()));
    client.unwrap();
    server.unwrap();
    fs::write(
        a.join("ca-crl.pem"),
        revoke(&pki, &b.join("server-cert.pem"), now, 9),
    )
    .unwrap();
    fs::remove_file(b.join("ca-crl.pem")).unwrap();
    let (client, _) = connect_pair(&tls(&a, hotlift()), "b", &tls(&b, hotlift()));
    assert_contains(&failure(client), &["(CN=b: b)", "is revoked"]);
}

#[test]
fn an_expired_revocation_list_admits_no_peer() {
    let pki = Pki::new("CA");
    let (a, b) = (pki.host(&["a"]), pki.host(&["b"]));
    let list = revoke(
        &pki,
        &b.join("client-cert.pem"),
        SystemTime::now() - 3 * DAY,
        1,
    );
    fs::write(b.join("ca-crl.pem"), list).unwrap();
    let (_, server) = connect_pair(&tls(&a, hotlift()), "b", &tls(&b, hotlift()));
    assert_contains(
        &failure(server),
        &["list of revoked certificates here expired on"],
    );
}

#[test]
fn a_qemu_profile_has_no_alpn_and_a_hotlift_profile_requires_its_own() {
    let pki = Pki::new("CA");
    let dir = pki.host(&["b"]);
    let of = |profile| tls(&dir, Settings::new(profile));
    let (client, server) = connect_pair(&of(Profile::Qemu), "b", &of(Profile::Qemu));
    client.unwrap();
    server.unwrap();
    let (_, server) = connect_pair(&of(Profile::Qemu), "b", &of(Profile::Hotlift));
    assert_contains(&failure(server), &["is not a Hotlift", "hotlift/1"]);
    let (client, _) = connect_pair(&of(Profile::Hotlift), "b", &of(Profile::Qemu));
    assert_contains(&failure(client), &["is not a Hotlift"]);
}

#[test]
fn a_server_without_verify_peer_takes_a_client_without_a_certificate() {
    let pki = Pki::new("CA");
    let server = pki.host(&["b"]);
    let of_client = tempfile::tempdir().unwrap();
    fs::write(of_client.path().join("ca-cert.pem"), &pki.ca().certificate).unwrap();
    let of = |dir: &Path, verify_peer| {
        let settings = Settings {
            verify_peer,
            ..Settings::new(Profile::Qemu)
        };
        tls(dir, settings)
    };
    let anonymous = of(of_client.path(), false);
    let (client, session) = connect_pair(&anonymous, "b", &of(&server, false));
    assert_eq!(client.unwrap().peer.unwrap().dns, ["b"]);
    assert_eq!(session.unwrap().peer, None);
    // A server that requests one refuses; so does a client that needs one and has none.
    let (_, session) = connect_pair(&anonymous, "b", &of(&server, true));
    assert_contains(&failure(session), &["sent no certificate"]);
    let (client, _) = connect_pair(&of(of_client.path(), true), "b", &of(&server, false));
    assert_contains(&failure(client), &["client-cert.pem is missing"]);
    // A certificate that is not requested is not sent; the server's is verified nevertheless.
    let (_, session) = connect_pair(&of(&pki.host(&["a"]), true), "b", &of(&server, false));
    assert_eq!(session.unwrap().peer, None);
    let (client, _) = connect_pair(&anonymous, "c", &of(&server, false));
    assert_contains(&failure(client), &["is not for 'c' but for b"]);
    let other = Pki::new("other");
    let (client, _) = connect_pair(&anonymous, "b", &of(&other.host(&["b"]), false));
    assert_contains(&failure(client), &["does not trust"]);
}

#[test]
fn a_client_of_qemu_gets_a_refusal_at_its_first_read() {
    let pki = Pki::new("CA");
    let (a, b) = (pki.host(&["a"]), pki.host(&["b"]));
    let strict = Settings {
        profile: Profile::Qemu,
        ..allow(&["nobody"])
    };
    let (client, server) = (tls(&a, Settings::new(Profile::Qemu)), tls(&b, strict));
    let (mut here, there) = std::os::unix::net::UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(move || server.accept(&there));
        let mut session = client.connect(&here, Some("b")).unwrap();
        assert!(accepted.join().unwrap().is_err());
        let error = session.opener.plaintext(&mut here).unwrap_err();
        assert_contains(
            &error.to_string(),
            &["does not accept our certificate", "not on the list"],
        );
    });
}

#[test]
fn a_missing_file_of_a_folder_is_named() {
    let pki = Pki::new("CA");
    let dir = pki.host(&["b"]);
    let open = |dir: &Path| failure(hotlift_tls::Credentials::open(dir).map_err(TlsError::from));
    fs::remove_file(dir.join("server-cert.pem")).unwrap();
    assert_contains(
        &open(&dir),
        &["cannot read", "server-cert.pem", "No such file"],
    );
    fs::remove_file(dir.join("server-key.pem")).unwrap();
    let (_, server) = connect_pair(
        &tls(&pki.host(&["a"]), hotlift()),
        "b",
        &tls(&dir, hotlift()),
    );
    assert_contains(
        &failure(server),
        &["server-cert.pem is missing; a TLS server needs it"],
    );
    fs::copy(
        pki.host(&["c"]).join("client-key.pem"),
        dir.join("client-key.pem"),
    )
    .unwrap();
    assert_contains(
        &open(&dir),
        &["client-cert.pem and", "client-key.pem do not match"],
    );
    fs::write(dir.join("client-key.pem"), "no key").unwrap();
    assert_contains(&open(&dir), &["client-key.pem holds no private key in PEM"]);
    fs::remove_file(dir.join("ca-cert.pem")).unwrap();
    assert_contains(&open(&dir), &["has no ca-cert.pem (nor ca.crt)"]);
}

#[test]
fn a_secret_of_cert_manager_is_taken_as_it_is_mounted() {
    let pki = Pki::new("CA");
    let host = pki.host(&["b"]);
    let dir = tempfile::tempdir().unwrap();
    for (from, to) in [
        ("ca-cert.pem", "ca.crt"),
        ("client-cert.pem", "tls.crt"),
        ("client-key.pem", "tls.key"),
    ] {
        fs::copy(host.join(from), dir.path().join(to)).unwrap();
    }
    let (client, server) = connect_pair(&tls(dir.path(), hotlift()), "b", &tls(&host, hotlift()));
    client.unwrap();
    server.unwrap();
}

#[test]
fn a_ca_signs_only_with_its_own_key_and_not_beyond_its_end() {
    let pki = Pki::new("CA");
    let other = Pki::new("CA");
    let error = Authority::open(&pki.ca().certificate, &other.ca().key).unwrap_err();
    assert_contains(&error.to_string(), &["do not match"]);
    let now = SystemTime::now();
    let authority = Authority::open(&pki.ca().certificate, &pki.ca().key).unwrap();
    let host = authority.issue(&["b"], Role::Server, 365, now).unwrap();
    let error = Authority::open(&host.certificate, &host.key).unwrap_err();
    assert_contains(&error.to_string(), &["is not that of a CA"]);
    let dir = pki.host(&["b"]);
    put(&dir, Role::Server, &host);
    let read = hotlift_tls::Listing::read(&dir, now);
    let server = read
        .files
        .iter()
        .find(|file| file.role == Some(Role::Server))
        .unwrap();
    assert_eq!(server.identity.ends, authority.identity().ends);
    assert!(read.is_usable(), "{read:?}");
    for (bad, expected) in [
        ("*.example", "is a wildcard; name each host"),
        ("a b", "neither a DNS name nor an IP address"),
        ("", "neither a DNS name nor an IP address"),
        ("-", "neither a DNS name nor an IP address"),
    ] {
        let error = authority.issue(&[bad], Role::Server, 1, now).unwrap_err();
        assert_contains(&error.to_string(), &[expected]);
    }
    let over = authority
        .issue(&["b"], Role::Server, 1, now + 11 * DAY)
        .unwrap_err();
    assert_contains(&over.to_string(), &["has expired"]);
}

#[test]
fn data_right_after_a_handshake_is_not_lost() {
    let pki = Pki::new("CA");
    let dir = pki.host(&["b"]);
    let qemu = || tls(&dir, Settings::new(Profile::Qemu));
    let (mut here, mut there) = std::os::unix::net::UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut session = qemu().connect(&here, Some("b")).unwrap();
            session
                .sealer
                .send(&mut here, &mut Slices::new(&["at once"]))
                .unwrap();
        });
        let mut session = qemu().accept(&there).unwrap();
        let mut got = [0; 7];
        session.opener.read_exact(&mut there, &mut got).unwrap();
        assert_eq!(&got, b"at once");
    });
}

#[test]
fn a_certificate_with_any_bit_changed_or_cut_anywhere_is_read_or_refused() {
    let pki = Pki::new("CA");
    let dir = pki.host(&["b.example", "192.0.2.2", "2001:db8::2"]);
    let certificate = CertificateDer::from_pem_file(dir.join("server-cert.pem")).unwrap();
    let read = |bytes: Vec<u8>| Identity::read(&CertificateDer::from(bytes));
    for at in 0..certificate.len() {
        assert_eq!(read(certificate[..at].to_vec()), Err(NotACertificate));
        for bit in 0..8 {
            let mut bytes = certificate.to_vec();
            bytes[at] ^= 1 << bit;
            if let Ok(identity) = read(bytes) {
                let shown = identity.to_string();
                assert!(!shown.contains(char::is_control), "{shown:?}");
            }
        }
    }
}
