//! The vendors' own libraries, working in software: what we write they read, what they write we read,
//! and the calls that a device gets are those that they take.
//!
//! `HOTLIFT_VENDOR_LIBRARIES` names the directory that `scripts/accelerator-libraries` prints; without
//! it nothing is tried. libqpl wants a newer C library than Debian 12 has, so each test runs once more
//! under the loader of that directory.

mod support;

use std::path::PathBuf;
use std::process::Command;

use hotlift_methods::{
    Accelerator, Decode, Encode, EncoderSettings, MethodError, RunsOn, method, qatzip,
};
use support::{CONTENTS, Layout, Place, contents};

const VARIABLE: &str = "HOTLIFT_VENDOR_LIBRARIES";
/// Set in a process that was started by the directory's loader.
const INSIDE: &str = "HOTLIFT_VENDOR_LOADER";

/// Runs `body` under the directory's loader, in a process of its own that runs the test of that name.
fn beside_the_vendors(name: &str, body: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        return body();
    }
    let Some(folder) = std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty()) else {
        eprintln!("skipped: {VARIABLE} is not set; scripts/accelerator-libraries prints it");
        return;
    };
    let folder = PathBuf::from(folder);
    let mut path = folder.clone().into_os_string();
    // ISA-L and the compiler's runtime.
    path.push(":/usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu");
    let output = Command::new(folder.join("ld-linux-x86-64.so.2"))
        .arg("--library-path")
        .arg(path)
        .arg(std::env::current_exe().expect("the test's own file"))
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .env_remove("HOTLIFT_LIBQPL")
        .env_remove("HOTLIFT_LIBQATZIP")
        .output()
        .expect("the vendors' loader");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{name} under the vendors' loader:\n{text}"
    );
}

/// Packets of every kind from one to the other.
fn packets(what: &str, encoder: &mut dyn Encode, decoder: &mut dyn Decode) {
    let mut payload = Vec::new();
    for kind in CONTENTS {
        for n in [1, 2, 17, 128] {
            let what = format!("{what}, {n} pages of {kind}");
            let pages = contents(kind, n, 7);
            encoder.encode(&pages, &mut payload).expect(&what);
            let place = Place::new(n, Layout::Scattered);
            decoder.decode(&payload, &place.runs()).expect(&what);
            assert!(place.pages() == pages, "{what}: pages differ");
            place.assert_rest_untouched(&what);
        }
    }
}

#[test]
fn libqatzip_and_our_members() {
    beside_the_vendors("libqatzip_and_our_members", || {
        let ours = method("qatzip").expect("qatzip");
        for level in [1, 5, 9] {
            let mut encoder = (ours.encoder)(&EncoderSettings::software(level)).expect("ours");
            let mut decoder = qatzip::library_decoder().expect("libqatzip");
            packets(&format!("ours {level}"), &mut *encoder, &mut *decoder);
            let (own, theirs) = (encoder.jobs(), decoder.jobs());
            assert_eq!((theirs.hardware, theirs.software), (own.software, 0));

            let mut encoder = qatzip::library_encoder(level).expect("libqatzip");
            let mut decoder = (ours.decoder)(Accelerator::Off).expect("ours");
            packets(&format!("libqatzip {level}"), &mut *encoder, &mut *decoder);
            // In software it makes one member of a packet.
            assert_eq!((encoder.jobs().hardware, encoder.jobs().software), (20, 0));
            assert_eq!(decoder.jobs().software, 20);
        }
    });
}

#[test]
fn libqatzip_without_a_device_is_left_for_our_software() {
    beside_the_vendors(
        "libqatzip_without_a_device_is_left_for_our_software",
        || {
            let ours = method("qatzip").expect("qatzip");
            let settings = |accelerator| EncoderSettings {
                accelerator,
                ..EncoderSettings::software(1)
            };
            let mut encoder = (ours.encoder)(&settings(Accelerator::Auto)).expect("in software");
            let RunsOn::Fallback(reason) = encoder.runs_on() else {
                eprintln!("skipped: {:?}", encoder.runs_on());
                return;
            };
            assert_eq!(&*reason, "qzInit: no hardware (-101)");
            let mut decoder = (ours.decoder)(Accelerator::Auto).expect("in software");
            packets("without a device", &mut *encoder, &mut *decoder);
            assert_eq!(encoder.jobs().hardware + decoder.jobs().hardware, 0);
            let refused = (ours.encoder)(&settings(Accelerator::Required)).err();
            assert!(matches!(refused, Some(MethodError::Unavailable { .. })));
        },
    );
}
