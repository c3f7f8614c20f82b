//! Tests a save of a complete stream from the source's connections to a file. A file that lacks a page never gets the
//! name of a complete save file.

use std::fs;
use std::path::Path;
use std::thread;

use hotlift::file::{FileError, FileFormat};
use hotlift::relay::{Hooks, Incoming, Outgoing, RelayReport, relay};
use hotlift::{Control, MigrationError};

use super::log::Log;
use super::recording::Recording;
use super::rig::{listen, settings};
use super::source::{Ending, play};

/// Saves the stream of a source that plays `recording`.
fn save(
    recording: &Recording,
    to: &Path,
    format: FileFormat,
) -> Result<RelayReport, MigrationError> {
    let (_folder, listener, address) = listen(false);
    let settings = settings(&[("multifd-compression", "none"), ("multifd-channels", "2")]);
    thread::scope(|scope| {
        scope.spawn(|| play(recording, &address, Ending::LetsGo, &Log::default()));
        relay(
            Incoming::Listener(&listener),
            &Outgoing::File { path: to, format },
            &settings,
            &Control::new(),
            Hooks::default(),
        )
    })
}

#[test]
fn a_stream_that_lacks_a_page_is_not_saved() {
    // A page of small_multifd.
    const PAGE: u64 = 37;
    let mut pairs: Vec<_> = ["7.2-off", "10.0-off"]
        .into_iter()
        .map(|name| {
            let whole = Recording::load(name);
            (whole.clone(), whole.without_a_page())
        })
        .collect();
    let multifd = Recording::small_multifd_of(2, |page| page != PAGE);
    pairs.push((Recording::small_multifd(2), (multifd, PAGE * 4096)));
    for (whole, (lacks, lost)) in pairs {
        for format in [FileFormat::Hotlift, FileFormat::MappedRam] {
            let what = format!("{} into {format:?}", whole.name);
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("vm");
            let saved = save(&whole, &file, format);
            assert!(saved.is_ok(), "{what}: {saved:?}");
            fs::remove_file(&file).unwrap();
            match save(&lacks, &file, format) {
                Err(MigrationError::File(FileError::Incomplete {
                    missing, offset, ..
                })) => assert_eq!((missing, offset), (4096, lost), "{what}"),
                other => panic!("{what}: {other:?}"),
            }
            let left = fs::read_dir(folder.path()).unwrap().count();
            assert_eq!(left, 0, "{what}: something is left");
        }
    }
}
