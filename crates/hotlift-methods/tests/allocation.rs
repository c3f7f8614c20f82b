//! Tests that a channel allocates no more memory once it has processed its largest packet, contiguous and scattered.
//!
//! The tests count allocations by Rust's allocator. The C libraries here allocate when a context is made or first used,
//! which the warm-up covers. zlib-rs allocates by Rust's allocator.

#[path = "../../hotlift-accel/tests/support/simulated.rs"]
mod simulated;
mod support;

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::cell::Cell;

use hotlift_accel::HARDWARE;
use hotlift_mem::{GuestRun, PAGE_SIZE};
use hotlift_methods::legacy::compress::{Deflater, Inflater, LEVELS};
use hotlift_methods::{Accelerator, EncoderSettings, METHODS, method};
use libz_sys::Z_SYNC_FLUSH;
use simulated::Simulated;
use support::qemu::{ZlibWriter, ZstdWriter};
use support::{LAYOUTS, Place, contents};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: passes every call on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Memory) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller guarantees System's conditions.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Memory) {
        // SAFETY: the caller guarantees System's conditions.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Memory, size: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller guarantees System's conditions.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn allocations_of(work: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

const KINDS: [&str; 4] = ["random", "alternating", "text", "zero"];

#[test]
fn no_packet_of_ours_allocates_after_the_warm_up() {
    for method in METHODS {
        for level in [method.default_level, 6] {
            let mut encoder =
                (method.encoder)(&EncoderSettings::software(level)).expect(method.name);
            let mut decoder = (method.decoder)(Accelerator::Off).expect(method.name);
            let mut payload = Vec::new();
            for packet in 0..12 {
                let n = [128, 128, 128, 128, 1, 77][packet % 6];
                let pages = contents(KINDS[packet % 4], n, packet as u64);
                let place = Place::new(n, LAYOUTS[(packet + 2) % 3]);
                let runs = place.runs();
                let count = allocations_of(|| {
                    encoder.encode(&pages, &mut payload).expect(method.name);
                    decoder.decode(&payload, &runs).expect(method.name);
                });
                assert!(place.pages() == pages);
                if packet > 2 {
                    assert_eq!(count, 0, "{} {level}, packet {packet}", method.name);
                }
            }
        }
    }
}

#[test]
fn no_page_of_compress_allocates_after_the_warm_up() {
    for level in LEVELS {
        let mut deflater = Deflater::new(level).expect("a level");
        let mut inflater = Inflater::new().expect("libdeflate");
        let mut out = Vec::new();
        let mut back = [0; PAGE_SIZE];
        for number in 0..12 {
            let page = contents(KINDS[number % 4], 1, number as u64);
            let page = page.as_slice().try_into().expect("a page");
            let count = allocations_of(|| {
                out.clear();
                if deflater.deflate(page, &mut out).expect("a page") {
                    let back = GuestRun::of_buffer(&mut back);
                    inflater.inflate(&out, back).expect("a page");
                }
            });
            if number > 0 {
                assert_eq!(count, 0, "level {level}, page {number}");
            }
        }
    }
}

#[test]
fn no_packet_on_a_device_allocates_after_the_warm_up() {
    let simulated = Simulated::take();
    for method in METHODS.iter().filter(|method| method.hardware.is_some()) {
        // The second device leaves many jobs to the CPU.
        for behaviour in ["", "busy=3,depth=20"] {
            simulated.behave(behaviour);
            let settings = EncoderSettings {
                accelerator: Accelerator::Required(&HARDWARE),
                ..EncoderSettings::software(method.default_level)
            };
            let mut encoder = (method.encoder)(&settings).expect(method.name);
            let mut decoder =
                (method.decoder)(Accelerator::Required(&HARDWARE)).expect(method.name);
            let mut payload = Vec::new();
            for packet in 0..12 {
                let n = [128, 128, 128, 128, 1, 77][packet % 6];
                let pages = contents(KINDS[packet % 4], n, packet as u64);
                let place = Place::new(n, LAYOUTS[(packet + 2) % 3]);
                let runs = place.runs();
                let count = allocations_of(|| {
                    encoder.encode(&pages, &mut payload).expect(method.name);
                    decoder.decode(&payload, &runs).expect(method.name);
                });
                assert!(place.pages() == pages);
                if packet > 2 {
                    assert_eq!(count, 0, "{}, {behaviour}, packet {packet}", method.name);
                }
            }
        }
    }
}

#[test]
fn no_packet_of_qemus_allocates_after_the_warm_up() {
    let mut zlib = ZlibWriter::new(1, Z_SYNC_FLUSH);
    let mut zstd = ZstdWriter::new(1);
    for name in ["zlib", "zstd"] {
        let method = method(name).expect(name);
        let mut decoder = (method.decoder)(Accelerator::Off).expect(method.name);
        for packet in 0..9 {
            let n = [128, 128, 128, 1, 77][packet % 5];
            let pages = contents(KINDS[packet % 4], n, 1);
            let payload = match method.name {
                "zlib" => zlib.packet(&pages),
                _ => zstd.packet(&pages),
            };
            let place = Place::new(n, LAYOUTS[packet % 3]);
            let runs = place.runs();
            let count = allocations_of(|| decoder.decode(&payload, &runs).expect(method.name));
            assert!(place.pages() == pages);
            if packet > 2 {
                assert_eq!(count, 0, "{}, packet {packet}", method.name);
            }
        }
    }
}
