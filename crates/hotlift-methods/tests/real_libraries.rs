//! The vendors' own libraries, working in software: what we write they read, what they write we read,
//! and the calls that a device gets are those that they take.
//!
//! `HOTLIFT_VENDOR_LIBRARIES` names the directory that `scripts/accelerator-libraries` prints; without
//! it nothing is tried. libqpl wants a newer C library than Debian 12 has, so each test runs once more
//! under the loader of that directory.

mod support;

use std::path::PathBuf;
use std::process::Command;

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::{
    Accelerator, Decode, Encode, EncoderSettings, MethodError, RunsOn, method, qatzip, qpl,
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

/// A method on our CPU.
fn ours(name: &str) -> (Box<dyn Encode>, Box<dyn Decode>) {
    let method = method(name).expect("a method");
    let encoder = (method.encoder)(&EncoderSettings::software(method.default_level));
    let decoder = (method.decoder)(Accelerator::Off);
    (encoder.expect("ours"), decoder.expect("ours"))
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

#[test]
fn libqpl_and_our_pages() {
    beside_the_vendors("libqpl_and_our_pages", || {
        let pages: u64 = CONTENTS.len() as u64 * (1 + 2 + 17 + 128);
        let (mut encoder, mut decoder) = ours("qpl");
        let mut theirs = qpl::decoder_by(qpl::Path::Software).expect("libqpl");
        packets("ours to libqpl", &mut *encoder, &mut *theirs);
        let jobs = theirs.jobs();
        // Pages as they are no device is asked for.
        assert_eq!(jobs.hardware, pages - jobs.raw_pages);
        assert_eq!(jobs.software, jobs.raw_pages);

        // By the code that drives a device, in all but the path: fixed Huffman codes.
        let mut theirs = qpl::encoder_by(qpl::Path::Software).expect("libqpl");
        packets("libqpl to ours", &mut *theirs, &mut *decoder);
        assert_eq!((theirs.jobs().hardware, theirs.jobs().software), (pages, 0));
        let mut theirs = qpl::decoder_by(qpl::Path::Software).expect("libqpl");
        let mut encoder = qpl::encoder_by(qpl::Path::Software).expect("libqpl");
        packets("libqpl to libqpl", &mut *encoder, &mut *theirs);
    });
}

#[test]
fn pages_with_libqpls_dynamic_codes_are_read() {
    beside_the_vendors("pages_with_libqpls_dynamic_codes_are_read", || {
        let mut encoder = Dynamic::new();
        let (_, mut decoder) = ours("qpl");
        packets("libqpl, dynamic", &mut encoder, &mut *decoder);
        assert!(encoder.shrunk > 500, "{} pages", encoder.shrunk);
    });
}

/// `qpl` by libqpl's software with Huffman codes of each page, which no encoder of ours asks for.
struct Dynamic {
    _library: libloading::Library,
    execute: unsafe extern "C" fn(*mut u8) -> u32,
    job: Vec<u64>,
    /// Pages that were not sent as they are.
    shrunk: usize,
}

impl Dynamic {
    fn new() -> Self {
        const SOFTWARE: u32 = 2;
        // SAFETY: the library's constructors are sound; the types are those of its header.
        let (library, size, init, execute) = unsafe {
            let library = libloading::Library::new("libqpl.so.1").expect("libqpl");
            let size = *library
                .get::<unsafe extern "C" fn(u32, *mut u32) -> u32>(b"qpl_get_job_size\0")
                .expect("qpl_get_job_size");
            let init = *library
                .get::<unsafe extern "C" fn(u32, *mut u8) -> u32>(b"qpl_init_job\0")
                .expect("qpl_init_job");
            let execute = *library
                .get::<unsafe extern "C" fn(*mut u8) -> u32>(b"qpl_execute_job\0")
                .expect("qpl_execute_job");
            (library, size, init, execute)
        };
        let mut bytes = 0;
        // SAFETY: room for the size.
        assert_eq!(unsafe { size(SOFTWARE, &raw mut bytes) }, 0);
        let mut job = vec![0_u64; usize::try_from(bytes).expect("64 bits").div_ceil(8)];
        // SAFETY: zeroed memory of the size asked for.
        assert_eq!(unsafe { init(SOFTWARE, job.as_mut_ptr().cast()) }, 0);
        Self {
            _library: library,
            execute,
            job,
            shrunk: 0,
        }
    }

    /// The page's stream, if it is shorter than the page.
    fn page(&mut self, page: &[u8]) -> Option<Vec<u8>> {
        const COMPRESS: u32 = 1;
        /// First, last, dynamic Huffman codes, no verification.
        const FLAGS: u32 = 0x1 | 0x2 | 0x2000 | 0x4000;
        let mut out = vec![0; PAGE_SIZE - 1];
        let job: *mut u8 = self.job.as_mut_ptr().cast();
        let room = u32::try_from(out.len()).expect("a page");
        // SAFETY: offsets of the header, inside of the job; input and output live through the call.
        let (status, written) = unsafe {
            job.cast::<*const u8>().write(page.as_ptr());
            job.add(8).cast::<u32>().write(room + 1);
            job.add(16).cast::<*mut u8>().write(out.as_mut_ptr());
            job.add(24).cast::<u32>().write(room);
            job.add(32).cast::<u32>().write(COMPRESS);
            job.add(36).cast::<u32>().write(FLAGS);
            job.add(52).cast::<u32>().write(1);
            job.add(64).cast::<*mut u8>().write(std::ptr::null_mut());
            let status = (self.execute)(job);
            (status, job.add(28).cast::<u32>().read())
        };
        match status {
            0 => {
                out.truncate(usize::try_from(written).expect("64 bits"));
                self.shrunk += 1;
                Some(out)
            }
            // More output needed.
            2 => None,
            status => panic!("libqpl: status {status}"),
        }
    }
}

// SAFETY: the job is this value's alone.
unsafe impl Send for Dynamic {}

impl Encode for Dynamic {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError> {
        let streams: Vec<Vec<u8>> = pages
            .chunks(PAGE_SIZE)
            .map(|page| self.page(page).unwrap_or_else(|| page.to_vec()))
            .collect();
        out.clear();
        for stream in &streams {
            let length = u32::try_from(stream.len()).expect("a page");
            out.extend_from_slice(&length.to_be_bytes());
        }
        out.extend(streams.concat());
        Ok(())
    }
}
