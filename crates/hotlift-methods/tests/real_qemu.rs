//! Tests with a running QEMU: it loads Hotlift's output, and Hotlift reads its output.
//!
//! The source is a recorded stream. Main is unchanged. The pages of the channels are encoded again, with Hotlift's
//! hello and checksums, which proves that QEMU ignores both.

mod support;

use std::path::{Path, PathBuf};

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::{Encode, EncoderSettings, MethodError, method};
use hotlift_testkit::qemu::Release;
use support::machine::{load, send};
use support::stream::{RAM_PAGES, Stream, ram_page};

/// Methods with the levels that differ in how their streams are made.
const WRITTEN: [(&str, &[u8]); 3] = [
    ("none", &[0]),
    ("zlib", &[0, 1, 6, 9]),
    ("zstd", &[1, 3, 10]),
];

fn encoder(name: &str, level: u8) -> Box<dyn Encode> {
    (method(name).expect(name).encoder)(&EncoderSettings::software(level)).expect(name)
}

/// Sends a recorded stream with new channels to a QEMU: its memory must be the source's.
fn plays(
    qemu: &Path,
    recorded: &str,
    name: &str,
    make: &dyn Fn() -> Box<dyn Encode>,
) -> Result<(), String> {
    let stream = Stream::recorded(recorded);
    let channels = stream.rewritten(name, make);
    let main = stream.main.clone();
    let loaded = load(qemu, &stream.machine, main, Some((name, channels)))?;
    let (ram, bios) = (stream.memory("pc.ram"), stream.memory("pc.bios"));
    assert_eq!(bios[0xfff0], 0xe9, "{recorded}: the reset vector");
    for number in 0..RAM_PAGES {
        let [sent, got] = [&ram, &loaded.ram].map(|ram| &ram[number * PAGE_SIZE..][..PAGE_SIZE]);
        let counted = if (1..16).contains(&number) { 2 } else { 0 };
        let as_filled = sent[counted..] == ram_page(number)[counted..];
        assert!(as_filled, "{recorded}: page {number}");
        if sent != got {
            return Err(format!("page {number} differs"));
        }
    }
    if bios != loaded.bios {
        return Err("the BIOS differs".to_owned());
    }
    Ok(())
}

/// Loads every method and level from each of the recordings: those in method none, and its own.
fn loads_all(qemu: Option<PathBuf>, recordings: &[&str]) {
    let Some(qemu) = qemu else { return };
    for recorded in recordings {
        for (name, levels) in WRITTEN {
            if !recorded.contains("none") && !recorded.ends_with(name) {
                continue;
            }
            for &level in levels {
                plays(&qemu, recorded, name, &|| encoder(name, level))
                    .unwrap_or_else(|error| panic!("{recorded} as {name} {level}: {error}"));
            }
        }
    }
}

#[test]
fn the_installed_qemu_loads_what_we_write() {
    loads_all(Release::V7.program(), &["7.2-none", "7.2-zlib", "7.2-zstd"]);
}

#[test]
fn qemu_10_0_loads_what_we_write() {
    loads_all(
        Release::V10.program(),
        &["10.0-none", "10.0-zlib", "10.0-zstd"],
    );
}

#[test]
fn qemu_10_0_loads_what_we_write_for_an_older_machine() {
    loads_all(Release::V10.program(), &["7.2-none", "10.0-none-legacy"]);
}

/// Reads pages of a paused guest, directly from a QEMU.
fn reads_all(qemu: Option<PathBuf>, machine: &str) {
    let Some(qemu) = qemu else { return };
    for (name, _) in WRITTEN {
        let what = method(name).expect(name);
        let stream = send(&qemu, machine, what).unwrap_or_else(|error| panic!("{name}: {error}"));
        let ram = stream.memory("pc.ram");
        for (number, page) in ram.chunks(PAGE_SIZE).enumerate() {
            assert!(
                page == ram_page(number),
                "{machine} as {name}: page {number} differs"
            );
        }
        assert!(
            stream.memory("pc.bios").iter().all(|&byte| byte == 0xf4),
            "{machine} as {name}"
        );
    }
}

#[test]
fn what_the_installed_qemu_sends_is_read() {
    reads_all(Release::V7.program(), "pc-i440fx-7.2");
}

#[test]
fn what_qemu_10_0_sends_is_read() {
    reads_all(Release::V10.program(), "pc-i440fx-10.0");
}

/// An encoder that damages one byte of each packet.
struct Wrong;

impl Encode for Wrong {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), MethodError> {
        encoder("none", 0).encode(pages, out)?;
        out[5] ^= 1;
        Ok(())
    }
}

#[test]
fn a_wrong_byte_does_not_pass_these_tests() {
    let Some(qemu) = Release::V7.program() else {
        return;
    };
    let error = plays(&qemu, "7.2-none", "none", &|| Box::new(Wrong)).unwrap_err();
    assert!(error.ends_with("differs"), "{error}");
}
