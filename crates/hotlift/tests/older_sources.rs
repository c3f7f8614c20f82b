//! Tests that a destination accepts page records of older sources (XBZRLE deltas and `compress` pages), and rejects the
//! channels of another version of Hotlift.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use hotlift::guest::{DeviceState, Guest, GuestError};
use hotlift::options::{Limits, StreamOptions};
use hotlift::receive;
use hotlift::transport::Address;
use hotlift::{Control, MigrationError, Options};
use hotlift_mem::{Backing, DirtyBitmap, PAGE_SIZE, RamBlock};
use hotlift_methods::legacy::xbzrle;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::main_channel::{Configuration, MainEncoder};

#[path = "relay/recording.rs"]
#[allow(dead_code, reason = "most of it is for relays")]
mod recording;

const PAGES: usize = 8;
const MACHINE: &str = "older-1.0";

/// Time limit of a step; longer than any step takes on any machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// RAM of a destination that waits for a migration.
struct Waiting {
    ram: Vec<Arc<RamBlock>>,
    runs: AtomicBool,
}

impl Waiting {
    fn new() -> Self {
        let ram = RamBlock::new("ram0", PAGES * PAGE_SIZE, Backing::Private).expect("RAM");
        Self {
            ram: vec![Arc::new(ram)],
            runs: AtomicBool::new(false),
        }
    }

    fn page(&self, number: usize) -> Vec<u8> {
        let mut page = vec![0; PAGE_SIZE];
        self.ram[0]
            .read(number * PAGE_SIZE, &mut page)
            .expect("read");
        page
    }
}

impl Guest for Waiting {
    fn machine(&self) -> &str {
        MACHINE
    }

    fn uuid(&self) -> [u8; 16] {
        [0; 16]
    }

    fn ram(&self) -> &[Arc<RamBlock>] {
        &self.ram
    }

    fn ram_is_fresh(&self) -> bool {
        true
    }

    fn start_dirty_log(&self) -> Result<(), GuestError> {
        Ok(())
    }

    fn stop_dirty_log(&self) -> Result<(), GuestError> {
        Ok(())
    }

    fn sync_dirty_log(&self, _: usize, _: &DirtyBitmap) -> Result<u64, GuestError> {
        Ok(0)
    }

    fn clear_dirty_log(&self, _: usize, _: usize, _: usize) -> Result<(), GuestError> {
        Ok(())
    }

    fn pause(&self) -> Result<(), GuestError> {
        Ok(())
    }

    fn resume(&self) -> Result<(), GuestError> {
        self.runs.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn save_devices(&self) -> Result<Vec<DeviceState>, GuestError> {
        Ok(Vec::new())
    }

    fn load_devices(&self, _: Vec<DeviceState>) -> Result<(), GuestError> {
        Ok(())
    }
}

/// Returns a page of text.
fn page(seed: u8) -> [u8; PAGE_SIZE] {
    std::array::from_fn(|at| seed.wrapping_add(at.to_le_bytes()[at % 2]))
}

/// Returns a zlib stream with the bytes in one stored block.
fn compressed(bytes: &[u8]) -> Vec<u8> {
    let length = u16::try_from(bytes.len()).expect("a page");
    let (mut a, mut b) = (1, 0);
    for &byte in bytes {
        a = (a + u32::from(byte)) % 65521;
        b = (b + a) % 65521;
    }
    let mut stream = vec![0x78, 0x01, 0x01];
    stream.extend_from_slice(&length.to_le_bytes());
    stream.extend_from_slice(&(!length).to_le_bytes());
    stream.extend_from_slice(bytes);
    stream.extend_from_slice(&(b << 16 | a).to_be_bytes());
    stream
}

/// Returns options of destinations with no decompression threads, with one, and with many.
fn destinations() -> [Options; 3] {
    [None, Some(1), Some(8)].map(|threads| Options {
        stream: StreamOptions {
            multifd: Some(false),
            compress: threads.is_some(),
            ..StreamOptions::default()
        },
        limits: Limits {
            handshake_timeout: Duration::from_secs(10),
            ..Limits::default()
        },
        decompress_threads: threads.unwrap_or(2),
        ..Options::default()
    })
}

/// Sends a stream with these records to a new destination.
fn receive_records(
    options: &Options,
    records: impl FnOnce(&mut MainEncoder, &mut Vec<u8>),
) -> (Waiting, Result<(), MigrationError>) {
    let mut stream = Vec::new();
    let configuration = Configuration {
        machine: MACHINE.to_owned(),
        ..Configuration::default()
    };
    let mut encoder = MainEncoder::new(&configuration, &mut stream).expect("encode");
    let entries = [RamBlockEntry::new("ram0", (PAGES * PAGE_SIZE) as u64)];
    encoder
        .ram_start(&entries, false, &mut stream)
        .expect("encode");
    encoder.ram_end(&mut stream).expect("encode");
    records(&mut encoder, &mut stream);
    encoder.ram_eos(&mut stream).expect("encode");
    encoder.eof(&mut stream).expect("encode");
    receive_bytes(options, &stream)
}

/// Sends these bytes on one connection to a new destination.
fn receive_bytes(options: &Options, stream: &[u8]) -> (Waiting, Result<(), MigrationError>) {
    let guest = Waiting::new();
    let address: Address = "tcp:127.0.0.1:0".parse().expect("an address");
    let listener = address.listen().expect("it listens");
    let to = listener.address().expect("an address");
    let (control, (done, ended)) = (Control::default(), channel());
    let outcome = std::thread::scope(|scope| {
        let (guest, of_thread) = (&guest, &control);
        let receiving = scope.spawn(move || {
            let outcome = receive(guest, listener, options, of_thread);
            let _ = done.send(());
            outcome
        });
        let source = to.connect(Duration::from_secs(10)).expect("connect");
        // A destination that has rejected the stream reads no more.
        let _ = (&source).write_all(stream);
        // A destination that keeps waiting for a source would block the test forever.
        if ended.recv_timeout(DEADLINE).is_err() {
            control.cancel();
        }
        receiving.join().expect("no panic")
    });
    (guest, outcome.map(drop))
}

#[test]
fn deltas_and_compressed_pages_become_pages() {
    for options in destinations() {
        let (old, new, packed) = (page(1), page(7), page(200));
        let (guest, outcome) = receive_records(&options, |encoder, out| {
            encoder.normal_page(0, 0, &old, out).expect("encode");
            // A delta to a page that was sent, one to a page that was not, and one that undoes the first.
            let mut delta = Vec::new();
            let mut half = old;
            half[1000..2000].copy_from_slice(&new[1000..2000]);
            xbzrle::encode(&old, &half, PAGE_SIZE, &mut delta);
            encoder.xbzrle_page(0, 0, &delta, out).expect("encode");
            let fresh = [0x10, 0x02, 0xaa, 0xbb];
            encoder.xbzrle_page(0, 4096, &fresh, out).expect("encode");
            delta.clear();
            xbzrle::encode(&half, &old, PAGE_SIZE, &mut delta);
            encoder.xbzrle_page(0, 0, &delta, out).expect("encode");
            let packed = compressed(&packed);
            encoder
                .compressed_page(0, 8192, &packed, out)
                .expect("encode");
        });
        outcome.unwrap_or_else(|error| panic!("{}", error.chain()));
        assert!(guest.runs.load(Ordering::SeqCst));
        assert!(guest.page(0) == old, "two deltas that undo each other");
        let mut fresh = vec![0; PAGE_SIZE];
        fresh[0x10..0x12].copy_from_slice(&[0xaa, 0xbb]);
        assert!(guest.page(1) == fresh, "a delta to a page of zeros");
        assert!(guest.page(2) == packed, "a compressed page");
    }
}

/// Threads work in parallel, and a stream may send a page any number of times.
#[test]
fn the_last_version_of_a_page_in_a_section_counts_in_any_encoding() {
    for options in destinations() {
        let mut expected = vec![[0; PAGE_SIZE]; PAGES];
        let (guest, outcome) = receive_records(&options, |encoder, out| {
            for step in 0..400_u64 {
                // Pages repeat after every distance from 1 to 8.
                let number = usize::try_from(step * step % 8 + step % 3).expect("small") % PAGES;
                let offset = (number * PAGE_SIZE) as u64;
                let new = page(step.to_le_bytes()[0]);
                let kept = &mut expected[number];
                match step % 5 {
                    0 => {
                        encoder.zero_page(0, offset, out).expect("encode");
                        kept.fill(0);
                    }
                    1 => {
                        encoder.normal_page(0, offset, &new, out).expect("encode");
                        *kept = new;
                    }
                    2 => {
                        let mut changed = *kept;
                        changed[7] ^= 0x5a;
                        let mut delta = Vec::new();
                        xbzrle::encode(kept, &changed, PAGE_SIZE, &mut delta);
                        encoder.xbzrle_page(0, offset, &delta, out).expect("encode");
                        *kept = changed;
                    }
                    _ => {
                        let stream = compressed(&new);
                        let record = encoder.compressed_page(0, offset, &stream, out);
                        record.expect("encode");
                        *kept = new;
                    }
                }
            }
        });
        outcome.unwrap_or_else(|error| panic!("{}", error.chain()));
        for (number, expected) in expected.iter().enumerate() {
            assert!(guest.page(number) == expected, "page {number}");
        }
    }
}

#[test]
fn a_record_that_does_not_decode_is_refused_with_its_page() {
    for options in destinations() {
        let bad_delta = receive_records(&options, |encoder, out| {
            let delta = [0xff, 0x1f, 2, 9, 9];
            encoder.xbzrle_page(0, 4096, &delta, out).expect("encode");
        });
        let short_page = receive_records(&options, |encoder, out| {
            encoder.zero_page(0, 0, out).expect("encode");
            let short = compressed(&[1; PAGE_SIZE - 1]);
            encoder
                .compressed_page(0, 4096, &short, out)
                .expect("encode");
            // The good pages after it must not hide the bad one.
            for _ in 0..500 {
                let good = compressed(&page(1));
                encoder
                    .compressed_page(0, 8192, &good, out)
                    .expect("encode");
            }
        });
        for (guest, outcome) in [bad_delta, short_page] {
            let error = outcome.expect_err("a bad record");
            assert!(
                matches!(&error, MigrationError::Page { block, offset: 4096, .. } if block == "ram0"),
                "{}",
                error.chain()
            );
            assert!(!guest.runs.load(Ordering::SeqCst));
        }
    }
}

#[test]
fn a_channel_of_another_version_is_refused_with_both_values() {
    let bytes = recording::opening_of_another_version();
    let (guest, outcome) = receive_bytes(&Options::default(), &bytes);
    let output = outcome.expect_err("another version").chain();
    assert!(
        output.contains("the source has 255, the destination has "),
        "{output}"
    );
    assert!(!guest.runs.load(Ordering::SeqCst));
}
