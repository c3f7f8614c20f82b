//! Recorded streams, and a reader that decodes a complete main channel.
// Each test binary uses a different part of this module.
#![allow(dead_code, unused_imports, unused_macros)]

use std::fs;
use std::path::{Path, PathBuf};

use hotlift_wire::main_channel::{DeviceLengths, MainDecoder, MainEvent, Step, VmDescription};
use hotlift_wire::{RamBlockEntry, WireError};

/// Returns the names of all recorded streams.
pub fn recorded() -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(fixtures())
        .expect("fixtures are part of the repository")
        .map(|entry| entry.expect("fixtures can be listed"))
        .filter(|entry| entry.path().is_dir())
        .map(|entry| entry.file_name().into_string().expect("ASCII names"))
        .collect();
    names.sort();
    assert!(names.len() >= 12, "fixtures are missing: {names:?}");
    names
}

/// Returns the bytes of one connection of a recorded stream.
pub fn connection(name: &str, kind: &str) -> Vec<u8> {
    let path = fixtures().join(name).join(format!("{kind}.zst"));
    let packed = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    zstd::decode_all(packed.as_slice()).expect("fixtures are zstd files")
}

/// Returns the multifd channels of a recorded stream.
pub fn channels(name: &str) -> Vec<Vec<u8>> {
    (0..2)
        .map(|id| format!("channel-{id}"))
        .filter(|kind| fixtures().join(name).join(format!("{kind}.zst")).exists())
        .map(|kind| connection(name, &kind))
        .collect()
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// Creates a decoder for a recorded main channel, with device lengths from its description.
pub fn decoder_for(main: &[u8]) -> MainDecoder {
    let text = VmDescription::find(main).expect("a recorded stream ends in a description");
    let description = VmDescription::parse(text).expect("QEMU's own description");
    MainDecoder::new(DeviceLengths::Description(description))
}

/// Reads all of `main`: returns each event with its start position.
pub fn events<'a>(
    decoder: &mut MainDecoder,
    main: &'a [u8],
) -> Result<Vec<(usize, MainEvent<'a>)>, WireError> {
    let mut events = Vec::new();
    let mut position = 0;
    while let Step::Event { event, consumed } = decoder.next(&main[position..])? {
        events.push((position, event));
        position += consumed;
    }
    assert_eq!(position, main.len(), "the decoder stopped before the end");
    decoder.finish()?;
    Ok(events)
}

/// Returns the RAM blocks of a recorded stream.
pub fn blocks(main: &[u8]) -> Vec<RamBlockEntry> {
    let mut decoder = decoder_for(main);
    events(&mut decoder, main).expect("a recorded stream");
    decoder.blocks().to_vec()
}

/// Asserts that an error is the expected fault.
macro_rules! assert_fault {
    ($fault:expr, $pattern:pat $(if $guard:expr)?) => {
        let fault = $fault;
        assert!(matches!(&fault, $pattern $(if $guard)?), "{fault:?}");
    };
}
pub(crate) use assert_fault;
