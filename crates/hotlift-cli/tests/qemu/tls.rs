//! Tests TLS between relays, between `migrate` and `serve`, and of QEMUs that use TLS themselves.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::guest::Guest;
use crate::hotlift::{Hotlift, errors};
use crate::need;
use crate::route::{Multifd, RelayOptions, Route, Side, failed, relay};
use crate::vm::{Accelerator, Machine, Memory, PC_7, Release, Vm};

/// A CA and the certificates of this host, created by the product's commands.
pub struct Certificates(TempDir);

impl Certificates {
    pub fn make() -> Self {
        let this = Self(tempfile::tempdir().expect("a folder"));
        this.certs(&["init"]);
        this.certs(&["host", "localhost", "127.0.0.1"]);
        this
    }

    pub fn dir(&self) -> PathBuf {
        self.0.path().join("pki")
    }

    /// Returns the folder of another host with this name.
    pub fn of_another_host(&self, name: &str) -> PathBuf {
        let folder = self.0.path().join(name);
        self.certs(&["host", name, &flag("out", &folder)]);
        folder
    }

    fn certs(&self, arguments: &[&str]) {
        let dir = flag("dir", &self.dir());
        let (status, output) = Hotlift::start(&[&["certs"], arguments, &[&dir]].concat()).wait();
        assert!(status.success(), "{}", output.join("\n"));
    }
}

pub fn flag(name: &str, dir: &Path) -> String {
    format!("--{name}={}", dir.display())
}

fn program() -> Machine {
    Machine {
        name: PC_7,
        accelerator: Accelerator::Kvm,
        memory: Memory::File,
        guest: Guest::program(),
    }
}

#[test]
fn qemus_with_tls_of_their_own_move_through_relays() {
    use Release::{V7, V10};
    let certificates = Certificates::make();
    let dir = certificates.dir();
    for (from, to, here, there, multifd, live) in [
        (V7, V10, true, true, Multifd::Channels(2), true),
        (V10, V7, true, false, Multifd::Channels(2), false),
        (V10, V10, false, true, Multifd::Channels(4), false),
        (V10, V10, true, true, Multifd::Off, true),
        (V7, V7, false, true, Multifd::Off, false),
        (V7, V7, false, false, Multifd::Channels(2), true),
    ] {
        let side = |tls: bool, endpoint| match tls {
            true => Side::new(multifd).tls(&dir, endpoint),
            false => Side::new(multifd),
        };
        let mut relays = RelayOptions::new("zstd", Multifd::Channels(2), multifd);
        relays.configure_uuid(multifd, Multifd::Channels(2));
        relays.source.push(flag("tls", &dir));
        relays.source.push("--tls-hostname=localhost".to_owned());
        relays.source.extend(here.then(|| flag("qemu-tls", &dir)));
        let destination = relays.destination.as_mut().expect("two relays");
        destination.push(flag("tls", &dir));
        destination.extend(there.then(|| flag("qemu-tls", &dir)));
        let route = Route {
            source: side(here, "client").with("return-path"),
            destination: side(there, "server"),
            relays: Some(relays),
            live,
        };
        println!("{from:?} to {to:?}, TLS of QEMU {here} {there}, multifd {multifd}");
        let vm = need!(Vm::running(from, &program()));
        need!(route.take(vm, to));
    }
}

#[test]
fn relays_follow_tls_hostname_and_verify_peer_of_their_qemus() {
    let certificates = Certificates::make();
    let of_server = certificates.of_another_host("qemu.example");
    // A QEMU without its own certificate verifies the other side by the CA.
    let of_the_ca = certificates.dir().join("anonymous");
    std::fs::create_dir(&of_the_ca).expect("a folder");
    let ca = "ca-cert.pem";
    std::fs::copy(certificates.dir().join(ca), of_the_ca.join(ca)).expect("a file");
    for multifd in [Multifd::Off, Multifd::Channels(2)] {
        let mut source = Side::new(multifd).tls(&of_the_ca, "client");
        source.parameters["tls-hostname"] = "qemu.example".into();
        let mut destination = Side::new(multifd).tls(&of_server, "server");
        destination.verify_peer = false;
        let mut relays = RelayOptions::new("zstd", Multifd::Channels(2), multifd);
        relays.configure_uuid(multifd, Multifd::Channels(2));
        let anonymous = || "--qemu-tls-verify-peer=off".to_owned();
        relays
            .source
            .extend([flag("qemu-tls", &of_server), anonymous()]);
        let name = "--qemu-tls-hostname=qemu.example".to_owned();
        let flags = [flag("qemu-tls", &of_the_ca), anonymous(), name];
        relays
            .destination
            .as_mut()
            .expect("two relays")
            .extend(flags);
        let route = Route {
            source: source.with("return-path"),
            destination: destination.with("return-path"),
            relays: Some(relays),
            live: false,
        };
        let vm = need!(Vm::running(Release::V10, &program()));
        need!(route.take(vm, Release::V10));
    }
}

#[test]
fn a_relay_with_foreign_or_missing_tls_is_refused_with_the_reason() {
    let (ours, other) = (Certificates::make(), Certificates::make());
    let mut here = need!(Vm::running(Release::V10, &program()));
    let behind = here.uri("nobody");
    for (source_flags, destination_flags, source_says, destination_says) in [
        (
            vec![flag("tls", &other.dir())],
            vec![flag("tls", &ours.dir())],
            "is signed by a CA that this side does not trust",
            "",
        ),
        (
            vec![],
            vec![flag("tls", &ours.dir())],
            "accepts only TLS",
            "does not use TLS",
        ),
        (
            vec![flag("tls", &ours.dir())],
            vec![],
            "may not use TLS",
            "a TLS handshake",
        ),
        (
            vec![
                flag("tls", &ours.dir()),
                "--tls-hostname=b.example".to_owned(),
            ],
            vec![flag("tls", &ours.dir())],
            "is not for 'b.example' but for",
            "",
        ),
        (
            vec![flag("tls", &ours.dir())],
            vec![
                flag("tls", &ours.dir()),
                "--tls-authz=*.example.org".to_owned(),
            ],
            "does not accept",
            "not on the list",
        ),
    ] {
        let (destination, uri) = relay(
            "destination",
            "tcp:127.0.0.1:0",
            &behind,
            &destination_flags,
        );
        let (source, to) = relay("source", &here.uri("relay.sock"), &uri, &source_flags);
        Side::new(Multifd::Channels(2)).apply(&mut here);
        here.qmp.migrate(&to).expect("migrate");
        let reason = failed("source", source);
        assert!(reason.contains(source_says), "{reason}");
        here.reaches("failed");
        assert!(here.is_running(), "the guest stays");
        destination.signal(rustix::process::Signal::INT);
        let (_, output) = destination.wait();
        assert!(output.join(" ").contains(destination_says), "{output:?}");
    }
}

#[test]
fn migrate_and_serve_use_tls_for_messages_and_pages() {
    let certificates = Certificates::make();
    let tls = flag("tls", &certificates.dir());
    let mut here = need!(Vm::running(Release::V10, &program()));
    let there = need!(Vm::waiting(Release::V10, &program()));
    let serve = |arguments: &[&str]| {
        let qmp = format!("--qmp={}", there.free_qmp());
        let all = [&["serve", "--listen=tcp:127.0.0.1:0", &qmp][..], arguments].concat();
        let mut serve = Hotlift::start(&all);
        let line = serve.wait_for("listening on ");
        (serve, line.rsplit(' ').next().expect("a word").to_owned())
    };
    let (serve, to) = serve(&[&tls]);
    let qmp = format!("--qmp={}", here.free_qmp());
    let to = format!("--to={to}");
    // Without TLS nothing starts.
    let (status, output) = Hotlift::start(&["migrate", &qmp, &to, "--quiet"]).wait();
    assert_eq!(status.code(), Some(1), "{output:?}");
    assert!(
        errors(&output)[0].contains("accepts only TLS"),
        "{output:?}"
    );
    let before = here.count();
    let (status, output) =
        Hotlift::start(&["migrate", &qmp, &to, &tls, "--method=zstd", "--quiet"]).wait();
    assert!(status.success(), "{output:?}");
    let (status, output) = serve.wait();
    assert!(status.success(), "{output:?}");
    there.continues_from(before.expect("it counts"));
    assert!(!here.is_running(), "the source runs, too");
}
