//! Tests the vendors' own libraries, which do the work in software. The libraries read Hotlift's output, and Hotlift
//! reads theirs. They also accept the calls that Hotlift makes for a device.
//!
//! `HOTLIFT_VENDOR_LIBRARIES` names the directory that `scripts/accelerator-libraries` prints. Without the variable,
//! the tests do nothing.

#[path = "../../hotlift-methods/tests/support/packets.rs"]
mod support;
#[path = "support/vendors.rs"]
mod vendors;

use hotlift_accel::{HARDWARE, VENDOR_SOFTWARE};
use hotlift_mem::PAGE_SIZE;
use hotlift_methods::{Accelerator, Decode, Encode, EncoderSettings, MethodError, RunsOn, method};
use support::{CONTENTS, Layout, Place, contents};
use vendors::Qpl;

/// Runs `body` under the directory's loader, in a process of its own that runs the test of that name.
fn beside_the_vendors(name: &str, body: impl FnOnce()) {
    if vendors::inside() {
        return body();
    }
    let Some(mut program) = vendors::this_program() else {
        hotlift_testkit::skip!(
            "vendor-libraries",
            "{} is not set; scripts/accelerator-libraries prints it",
            vendors::VARIABLE
        );
        return;
    };
    let output = program
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .output()
        .expect("the vendors' loader");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{name} under the vendors' loader:\n{text}"
    );
}

/// Returns a method on our CPU.
fn ours(name: &str) -> (Box<dyn Encode>, Box<dyn Decode>) {
    let method = method(name).expect("a method");
    let encoder = (method.encoder)(&EncoderSettings::software(method.default_level));
    let decoder = (method.decoder)(Accelerator::Off);
    (encoder.expect("ours"), decoder.expect("ours"))
}

/// Returns a method by the vendor's library, with the code for a device.
fn theirs(name: &str, level: u8) -> (Box<dyn Encode>, Box<dyn Decode>) {
    let method = method(name).expect("a method");
    let accelerator = Accelerator::Required(&VENDOR_SOFTWARE);
    let settings = EncoderSettings {
        accelerator,
        ..EncoderSettings::software(level)
    };
    let encoder = (method.encoder)(&settings);
    let decoder = (method.decoder)(accelerator);
    (encoder.expect("theirs"), decoder.expect("theirs"))
}

/// Passes packets of every kind from encoder to decoder.
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
            let (_, mut decoder) = theirs("qatzip", level);
            packets(&format!("ours {level}"), &mut *encoder, &mut *decoder);
            let (own, other) = (encoder.jobs(), decoder.jobs());
            assert_eq!((other.hardware, other.software), (own.software, 0));

            let (mut encoder, _) = theirs("qatzip", level);
            let mut decoder = (ours.decoder)(Accelerator::Off).expect("ours");
            packets(&format!("libqatzip {level}"), &mut *encoder, &mut *decoder);
            // In software it makes one member per packet.
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
            let mut encoder =
                (ours.encoder)(&settings(Accelerator::Auto(&HARDWARE))).expect("in software");
            let RunsOn::Fallback(reason) = encoder.runs_on() else {
                hotlift_testkit::skip!("qat", "there is a device: {:?}", encoder.runs_on());
                return;
            };
            assert_eq!(&*reason, "qzInit: no hardware (-101)");
            let mut decoder = (ours.decoder)(Accelerator::Auto(&HARDWARE)).expect("in software");
            packets("without a device", &mut *encoder, &mut *decoder);
            assert_eq!(encoder.jobs().hardware + decoder.jobs().hardware, 0);
            let refused = (ours.encoder)(&settings(Accelerator::Required(&HARDWARE))).err();
            assert!(matches!(refused, Some(MethodError::Unavailable { .. })));
        },
    );
}

#[test]
fn libqpl_and_our_pages() {
    beside_the_vendors("libqpl_and_our_pages", || {
        let pages: u64 = CONTENTS.len() as u64 * (1 + 2 + 17 + 128);
        let (mut encoder, mut decoder) = ours("qpl");
        let (mut their_encoder, mut their_decoder) = theirs("qpl", 1);
        packets("ours to libqpl", &mut *encoder, &mut *their_decoder);
        let jobs = their_decoder.jobs();
        // Uncompressed pages are not submitted to a device.
        assert_eq!(jobs.hardware, pages - jobs.raw_pages);
        assert_eq!(jobs.software, jobs.raw_pages);

        // By the code for a device, except for the path: fixed Huffman codes.
        packets("libqpl to ours", &mut *their_encoder, &mut *decoder);
        let jobs = their_encoder.jobs();
        assert_eq!((jobs.hardware, jobs.software), (pages, 0));
        packets("libqpl to libqpl", &mut *their_encoder, &mut *their_decoder);
    });
}

#[test]
fn pages_with_libqpls_dynamic_codes_are_read() {
    beside_the_vendors("pages_with_libqpls_dynamic_codes_are_read", || {
        let mut encoder = Dynamic {
            job: Qpl::new(Qpl::DYNAMIC),
            shrunk: 0,
        };
        let (_, mut decoder) = ours("qpl");
        packets("libqpl, dynamic", &mut encoder, &mut *decoder);
        assert!(encoder.shrunk > 500, "{} pages", encoder.shrunk);
    });
}

/// `qpl` by libqpl's software with Huffman codes per page, which our encoders never request.
struct Dynamic {
    job: Qpl,
    /// Pages not sent uncompressed.
    shrunk: usize,
}

impl Encode for Dynamic {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError> {
        let mut room = [0; PAGE_SIZE];
        let mut streams = Vec::new();
        for page in pages.chunks(PAGE_SIZE) {
            let shrunk = self.job.compress(page, &mut room);
            self.shrunk += usize::from(shrunk.is_some());
            streams.push(shrunk.map_or(page, |written| &room[..written]).to_vec());
        }
        out.clear();
        for stream in &streams {
            let length = u32::try_from(stream.len()).expect("a page");
            out.extend_from_slice(&length.to_be_bytes());
        }
        out.extend(streams.concat());
        Ok(())
    }
}
