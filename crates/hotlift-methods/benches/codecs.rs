//! Codecs of the multifd channels compared with those of QEMU: ratio, and CPU time in both directions.
//!
//! ```sh
//! cargo bench -p hotlift-methods --bench codecs -- [--levels] [--only WORD] [--passes N] [FOLDER]
//! ```
//!
//! FOLDER (or `HOTLIFT_CORPUS`; else the Silesia corpus of the development machine) holds files; `.zst` ones are decompressed.
//! They are joined and cut into packets of 128 pages. Each packet passes through every codec before the next one, so that a
//! drift of the machine's speed affects all alike. The order changes each time, because a codec leaves caches, and perhaps the
//! clock of a core that used its widest vectors, changed for its successor. Figures are thread CPU time, the median of the
//! passes. `--levels` prints every zlib level, the zstd levels up to 9, each beside QEMU's way at the same level, and the
//! accelerations of liblz4. `--only` prints the codecs with WORD in their names, and their references.
//!
//! The references are zlib and zstd at level 1, called page by page as in QEMU, and liblz4 with its defaults, called packet by
//! packet. With `HOTLIFT_VENDOR_LIBRARIES` (the output of `scripts/accelerator-libraries`), the vendors' libraries in software
//! are added: libqpl's jobs page by page, at level 1 with fixed codes as in QEMU, and libqatzip's sessions with a call per
//! packet. The latter use our encoder and decoder, which copy payloads to and from the library's memory and check checksums
//! again: some 2 % of its time.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "its output is what it is for"
)]

#[path = "../tests/support/qemu.rs"]
#[allow(dead_code)]
mod qemu;
#[path = "../../hotlift-accel/tests/support/vendors.rs"]
mod vendors;

use std::error::Error;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hotlift_accel::VENDOR_SOFTWARE;
use hotlift_mem::{Backing, GuestRun, PAGE_SIZE, RamBlock, thread_cpu_time};
use hotlift_methods::{Accelerator, Decode, Encode, EncoderSettings, METHODS, zlib};
use libz_sys::Z_SYNC_FLUSH;
use qemu::{PAYLOAD_LIMIT, ZlibReader, ZlibWriter, ZstdReader, ZstdWriter};
use vendors::Qpl;
use zstd_sys::ZSTD_EndDirective::ZSTD_e_flush;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const PACKET: usize = 128 * PAGE_SIZE;

fn main() -> Result<()> {
    if !vendors::inside()
        && let Some(mut program) = vendors::this_program()
    {
        let status = program.args(std::env::args_os().skip(1)).status()?;
        return status
            .success()
            .then_some(())
            .ok_or_else(|| status.to_string().into());
    }
    let options = Options::parse()?;
    let data = read_folder(&options.folder)?;
    let packets: Vec<&[u8]> = data.chunks_exact(PACKET).collect();
    println!(
        "{}: {} packets of 512 KiB, {} passes; {}",
        options.folder.display(),
        packets.len(),
        options.passes,
        METHODS
            .iter()
            .map(|method| (method.library)())
            .collect::<Vec<_>>()
            .join("; ")
    );

    let rows = if options.levels {
        by_level()
    } else {
        standard()
    };
    let rows = only(rows, &options.only);
    let mut results: Vec<Results> = rows.iter().map(|_| Results::default()).collect();
    let memory: &'static Memory = Box::leak(Box::new(Memory::new(packets.len())?));
    let mut order: Vec<usize> = (0..rows.len()).collect();
    let mut noise = 1;
    for _ in 0..options.passes {
        let mut codecs = rows
            .iter()
            .map(|row| (row.make)(memory))
            .collect::<Result<Vec<_>>>()?;
        let mut sums = vec![Sums::default(); rows.len()];
        for (i, &packet) in packets.iter().enumerate() {
            shuffle(&mut order, &mut noise);
            for &k in &order {
                let place = i + k * packets.len() / rows.len();
                sums[k].add(&mut *codecs[k], packet, place)?;
            }
        }
        for (result, sum) in results.iter_mut().zip(sums) {
            result.0.push(sum);
        }
    }
    print(&rows, &results, packets.len() * PACKET);
    Ok(())
}

/// Fisher and Yates' shuffle by a xorshift64.
fn shuffle(order: &mut [usize], noise: &mut u64) {
    for i in (1..order.len()).rev() {
        *noise ^= *noise << 13;
        *noise ^= *noise >> 7;
        *noise ^= *noise << 17;
        let other = usize::try_from(*noise >> 33).unwrap_or(0) % (i + 1);
        order.swap(i, other);
    }
}

struct Options {
    folder: PathBuf,
    only: String,
    passes: usize,
    levels: bool,
}

impl Options {
    fn parse() -> Result<Self> {
        let folder = std::env::var_os("HOTLIFT_CORPUS");
        let mut options = Self {
            folder: folder.map_or_else(
                || concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/silesia").into(),
                PathBuf::from,
            ),
            only: String::new(),
            passes: 5,
            levels: false,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--bench" => {}
                "--only" => options.only = arguments.next().ok_or("--only wants a word")?,
                "--levels" => options.levels = true,
                "--passes" => {
                    options.passes = arguments.next().ok_or("--passes wants a number")?.parse()?;
                }
                folder => options.folder = folder.into(),
            }
        }
        Ok(options)
    }
}

fn read_folder(folder: &Path) -> Result<Vec<u8>> {
    let mut files = std::fs::read_dir(folder)
        .map_err(|error| format!("{}: {error}", folder.display()))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>>>()?;
    files.sort();
    let mut data = Vec::new();
    for file in files {
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("zst") => data.extend(zstd::decode_all(std::fs::File::open(&file)?)?),
            // Other files of a corpus.
            Some("md" | "zst-files") | None => {}
            _ => data.extend(std::fs::read(&file)?),
        }
    }
    Ok(data)
}

/// One codec, in both directions.
trait Codec {
    /// Encodes a packet; returns the payload's size.
    fn encode(&mut self, packet: &[u8]) -> Result<usize>;
    /// Prepares to decode to that place in the memory. Not timed: every method gets the list of a packet's pages from the
    /// packet's header.
    fn prepare(&mut self, _place: usize) -> Result<()> {
        Ok(())
    }
    /// Decodes the last payload to that place.
    fn decode(&mut self, place: usize) -> Result<()>;
    fn check(&mut self, packet: &[u8], place: usize) -> bool;
}

struct Row {
    name: String,
    /// Reference row.
    reference: usize,
    make: Box<dyn Fn(&'static Memory) -> Result<Box<dyn Codec>>>,
}

impl Row {
    fn new<C: Codec + 'static>(
        name: impl Into<String>,
        reference: usize,
        make: impl Fn(&'static Memory) -> Result<C> + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            reference,
            make: Box::new(move |memory| Ok(Box::new(make(memory)?))),
        }
    }

    fn ours(method: &'static str, level: u8, scattered: bool, reference: usize) -> Self {
        let pages = if scattered { ", scattered pages" } else { "" };
        Self::new(
            format!("{method} {level}{pages}"),
            reference,
            move |memory| {
                let method = hotlift_methods::method(method).ok_or("no such method")?;
                Ok(Ours {
                    encoder: (method.encoder)(&EncoderSettings::software(level))?,
                    decoder: (method.decoder)(Accelerator::Off)?,
                    payload: Vec::with_capacity(PAYLOAD_LIMIT),
                    memory,
                    stride: if scattered { 2 } else { 1 },
                    runs: Vec::new(),
                })
            },
        )
    }

    fn zlib_by(library: zlib::Library, level: u8, reference: usize) -> Self {
        let name = format!("zlib {level} by {library:?}");
        Self::new(name, reference, move |memory| {
            Ok(Ours {
                encoder: zlib::encoder_by(library, level)?,
                decoder: (METHODS[1].decoder)(Accelerator::Off)?,
                payload: Vec::with_capacity(PAYLOAD_LIMIT),
                memory,
                stride: 1,
                runs: Vec::new(),
            })
        })
    }

    fn liblz4(reference: usize) -> Self {
        let name = "liblz4, default";
        let default = Self::liblz4_at(1, reference);
        Self {
            name: name.to_owned(),
            ..default
        }
    }

    fn liblz4_at(acceleration: i32, reference: usize) -> Self {
        Self::new(
            format!("liblz4, acceleration {acceleration}"),
            reference,
            move |memory| {
                Ok(Lz4 {
                    payload: vec![0; PAYLOAD_LIMIT],
                    len: 0,
                    acceleration,
                    memory,
                })
            },
        )
    }

    fn libqpl(name: &str, flags: u32, reference: usize) -> Self {
        Self::new(format!("libqpl 1, {name}"), reference, move |memory| {
            Ok(Libqpl {
                job: Qpl::new(flags),
                payload: vec![0; PAYLOAD_LIMIT],
                lengths: Vec::new(),
                memory,
            })
        })
    }

    fn libqatzip(level: u8, reference: usize) -> Self {
        Self::new(format!("libqatzip {level}"), reference, move |memory| {
            let accelerator = Accelerator::Required(&VENDOR_SOFTWARE);
            let settings = EncoderSettings {
                accelerator,
                ..EncoderSettings::software(level)
            };
            let method = hotlift_methods::method("qatzip").ok_or("no such method")?;
            Ok(Ours {
                encoder: (method.encoder)(&settings)?,
                decoder: (method.decoder)(accelerator)?,
                payload: Vec::with_capacity(PAYLOAD_LIMIT),
                memory,
                stride: 1,
                runs: Vec::new(),
            })
        })
    }

    fn qemu_zlib(level: u8, reference: usize) -> Self {
        Self::new(format!("QEMU's zlib {level}"), reference, move |memory| {
            Ok(Qemu {
                writer: ZlibWriter::new(level, Z_SYNC_FLUSH),
                reader: ZlibReader::new(),
                payload: vec![0; PAYLOAD_LIMIT],
                len: 0,
                memory,
            })
        })
    }

    fn qemu_zstd(level: u8, reference: usize) -> Self {
        Self::new(format!("QEMU's zstd {level}"), reference, move |memory| {
            Ok(Qemu {
                writer: ZstdWriter::new(level.into()),
                reader: ZstdReader::new(),
                payload: vec![0; PAYLOAD_LIMIT],
                len: 0,
                memory,
            })
        })
    }
}

fn standard() -> Vec<Row> {
    let mut rows = vec![Row::qemu_zlib(1, 0), Row::qemu_zstd(1, 1)];
    rows.push(Row::ours("none", 0, false, 0));
    rows.push(Row::ours("zlib", 1, false, 0));
    rows.push(Row::ours("zlib", 1, true, 0));
    if zlib::library_for(1) == zlib::Library::Isal {
        rows.push(Row::zlib_by(zlib::Library::ZlibRs, 1, 0));
    }
    rows.push(Row::ours("zstd", 1, false, 1));
    rows.push(Row::ours("zstd", 1, true, 1));
    let liblz4 = rows.len();
    rows.push(Row::liblz4(liblz4));
    let (mut libqpl, mut libqatzip) = (0, 0);
    if vendors::inside() {
        libqpl = rows.len();
        rows.push(Row::libqpl("fixed codes", Qpl::FIXED, libqpl));
        rows.push(Row::libqpl("dynamic codes", Qpl::DYNAMIC, libqpl));
        libqatzip = rows.len();
        rows.push(Row::libqatzip(1, libqatzip));
    }
    for method in &METHODS[3..] {
        let reference = match method.name {
            "lz4" => liblz4,
            "qatzip" => libqatzip,
            "qpl" => libqpl,
            _ => 0,
        };
        for scattered in [false, true] {
            let level = method.default_level;
            rows.push(Row::ours(method.name, level, scattered, reference));
        }
    }
    rows
}

fn by_level() -> Vec<Row> {
    let mut rows = Vec::new();
    for level in zlib::LEVELS {
        let reference = rows.len();
        rows.push(Row::qemu_zlib(level, reference));
        rows.push(Row::ours("zlib", level, false, reference));
        if zlib::library_for(level) == zlib::Library::Isal {
            rows.push(Row::zlib_by(zlib::Library::ZlibRs, level, reference));
        }
    }
    for level in 1..=9 {
        let reference = rows.len();
        rows.push(Row::qemu_zstd(level, reference));
        rows.push(Row::ours("zstd", level, false, reference));
    }
    let liblz4 = rows.len();
    rows.push(Row::liblz4(liblz4));
    for acceleration in [2, 3, 4, 5, 6, 8] {
        rows.push(Row::liblz4_at(acceleration, liblz4));
    }
    rows.push(Row::ours("lz4", 0, false, liblz4));
    rows
}

/// Returns the rows with that word in their names, and their references.
fn only(rows: Vec<Row>, word: &str) -> Vec<Row> {
    let wanted: Vec<usize> = (0..rows.len())
        .filter(|&i| {
            let asks = |row: &Row| row.name.contains(word);
            asks(&rows[i]) || rows.iter().any(|row| asks(row) && row.reference == i)
        })
        .collect();
    let place = |old: usize| wanted.iter().position(|&i| i == old).unwrap_or(0);
    let mut kept = Vec::new();
    for (i, mut row) in rows.into_iter().enumerate() {
        if wanted.contains(&i) {
            row.reference = place(row.reference);
            kept.push(row);
        }
    }
    kept
}

/// Times and sizes of one codec in one pass.
#[derive(Clone, Copy, Default)]
struct Sums {
    encode: Duration,
    decode: Duration,
    bytes: usize,
}

impl Sums {
    fn add(&mut self, codec: &mut dyn Codec, packet: &[u8], place: usize) -> Result<()> {
        let start = thread_cpu_time();
        self.bytes += black_box(codec.encode(black_box(packet))?);
        self.encode += thread_cpu_time() - start;
        codec.prepare(place)?;
        let start = thread_cpu_time();
        codec.decode(place)?;
        self.decode += thread_cpu_time() - start;
        if !codec.check(packet, place) {
            return Err("a packet differs after decoding".into());
        }
        Ok(())
    }
}

/// The passes of one codec.
#[derive(Default)]
struct Results(Vec<Sums>);

impl Results {
    fn median(&self, of: impl Fn(usize) -> f64) -> f64 {
        let mut values: Vec<f64> = (0..self.0.len()).map(of).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

fn print(rows: &[Row], results: &[Results], bytes: usize) {
    println!(
        "{:26} {:>6} {:>12} {:>12}   {:>8} {:>8} {:>8}   of",
        "codec", "ratio", "encode MB/s", "decode MB/s", "ratio x", "encode x", "decode x"
    );
    let bytes = bytes as f64;
    for (row, result) in rows.iter().zip(results) {
        let reference = &results[row.reference];
        let (all, other) = (&result.0, &reference.0);
        let seconds = |time: Duration| time.as_secs_f64().max(1e-9);
        println!(
            "{:26} {:6.3} {:12.0} {:12.0}   {:8.3} {:8.3} {:8.3}   {}",
            row.name,
            result.median(|i| bytes / all[i].bytes as f64),
            result.median(|i| bytes / seconds(all[i].encode) / 1e6),
            result.median(|i| bytes / seconds(all[i].decode) / 1e6),
            result.median(|i| other[i].bytes as f64 / all[i].bytes as f64),
            result.median(|i| seconds(all[i].encode) / seconds(other[i].encode)),
            result.median(|i| seconds(all[i].decode) / seconds(other[i].decode)),
            rows[row.reference].name,
        );
    }
}

/// The destination's memory, room for every packet twice, shared by all codecs. Each codec decodes a packet to a different
/// place, so that pages are as cold as in a migration.
struct Memory {
    block: RamBlock,
    places: usize,
}

impl Memory {
    fn new(packets: usize) -> Result<Self> {
        let block = RamBlock::new("ram", packets * 2 * PACKET, Backing::Private)?;
        block.populate(0, block.len())?;
        Ok(Self {
            block,
            places: packets,
        })
    }

    fn runs<'a>(&'a self, place: usize, stride: usize, runs: &mut Vec<GuestRun<'a>>) -> Result<()> {
        runs.clear();
        for page in 0..128 {
            let offset = place % self.places * 2 * PACKET + page * stride * PAGE_SIZE;
            runs.push(self.block.run(offset, PAGE_SIZE)?);
        }
        Ok(())
    }

    /// Returns a packet's memory as a slice, for decoders that require one.
    ///
    /// # Safety
    ///
    /// The place must not be used otherwise while the slice lives.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slice(&self, place: usize) -> &mut [u8] {
        let at = self
            .block
            .host_addr()
            .wrapping_add(place % self.places * 2 * PACKET);
        // SAFETY: inside the block, mapped for its life; exclusive, guaranteed by the caller.
        unsafe { std::slice::from_raw_parts_mut(at, PACKET) }
    }
}

/// A method of the table.
struct Ours {
    encoder: Box<dyn Encode>,
    decoder: Box<dyn Decode>,
    payload: Vec<u8>,
    memory: &'static Memory,
    stride: usize,
    runs: Vec<GuestRun<'static>>,
}

impl Codec for Ours {
    fn encode(&mut self, packet: &[u8]) -> Result<usize> {
        self.encoder.encode(packet, &mut self.payload)?;
        Ok(self.payload.len())
    }

    fn prepare(&mut self, place: usize) -> Result<()> {
        self.memory.runs(place, self.stride, &mut self.runs)
    }

    fn decode(&mut self, _place: usize) -> Result<()> {
        Ok(self.decoder.decode(&self.payload, &self.runs)?)
    }

    fn check(&mut self, packet: &[u8], _place: usize) -> bool {
        let mut page = [0; PAGE_SIZE];
        self.runs
            .iter()
            .zip(packet.chunks(PAGE_SIZE))
            .all(|(run, expected)| {
                run.copy_to(&mut page);
                page == expected
            })
    }
}

/// zlib or zstd as QEMU calls it.
struct Qemu<W, R> {
    writer: W,
    reader: R,
    payload: Vec<u8>,
    len: usize,
    memory: &'static Memory,
}

impl<W: Writer, R: Reader> Codec for Qemu<W, R> {
    fn encode(&mut self, packet: &[u8]) -> Result<usize> {
        self.len = self.writer.write_packet(packet, &mut self.payload);
        Ok(self.len)
    }

    fn decode(&mut self, place: usize) -> Result<()> {
        // SAFETY: the benchmark has one thread, and no other slice lives.
        let pages = unsafe { self.memory.slice(place) };
        Ok(self.reader.read_packet(&self.payload[..self.len], pages)?)
    }

    fn check(&mut self, packet: &[u8], place: usize) -> bool {
        // SAFETY: as in `decode`.
        unsafe { self.memory.slice(place) == packet }
    }
}

/// liblz4, a block per packet.
struct Lz4 {
    payload: Vec<u8>,
    len: i32,
    acceleration: i32,
    memory: &'static Memory,
}

impl Codec for Lz4 {
    fn encode(&mut self, packet: &[u8]) -> Result<usize> {
        let (from, to) = (i32::try_from(packet.len())?, self.payload.len());
        // SAFETY: both are slices of the lengths given.
        self.len = unsafe {
            lz4_sys::LZ4_compress_fast(
                packet.as_ptr().cast(),
                self.payload.as_mut_ptr().cast(),
                from,
                i32::try_from(to)?,
                self.acceleration,
            )
        };
        Ok(usize::try_from(self.len)?)
    }

    fn decode(&mut self, place: usize) -> Result<()> {
        // SAFETY: the benchmark has one thread, and no other slice lives; the block is of `len`
        // bytes.
        let written = unsafe {
            let pages = self.memory.slice(place);
            lz4_sys::LZ4_decompress_safe(
                self.payload.as_ptr().cast(),
                pages.as_mut_ptr().cast(),
                self.len,
                i32::try_from(pages.len())?,
            )
        };
        if usize::try_from(written) != Ok(PACKET) {
            return Err("liblz4 does not read what it wrote".into());
        }
        Ok(())
    }

    fn check(&mut self, packet: &[u8], place: usize) -> bool {
        // SAFETY: as in `decode`.
        unsafe { self.memory.slice(place) == packet }
    }
}

/// libqpl's software, a job per page.
struct Libqpl {
    job: Qpl,
    payload: Vec<u8>,
    /// Lengths of the streams; the page size for a page that did not shrink.
    lengths: Vec<usize>,
    memory: &'static Memory,
}

impl Codec for Libqpl {
    fn encode(&mut self, packet: &[u8]) -> Result<usize> {
        self.lengths.clear();
        let mut at = 0;
        for page in packet.chunks(PAGE_SIZE) {
            let room = &mut self.payload[at..at + PAGE_SIZE];
            let length = self.job.compress(page, room).unwrap_or_else(|| {
                room.copy_from_slice(page);
                PAGE_SIZE
            });
            self.lengths.push(length);
            at += length;
        }
        // Includes the table that QEMU sends before the pages.
        Ok(at + 4 * self.lengths.len())
    }

    fn decode(&mut self, place: usize) -> Result<()> {
        // SAFETY: the benchmark has one thread, and no other slice lives.
        let pages = unsafe { self.memory.slice(place) };
        let mut rest = &self.payload[..];
        for (page, &length) in pages.chunks_mut(PAGE_SIZE).zip(&self.lengths) {
            let (stream, after) = rest.split_at(length);
            match length {
                PAGE_SIZE => page.copy_from_slice(stream),
                _ => self.job.decompress(stream, page),
            }
            rest = after;
        }
        Ok(())
    }

    fn check(&mut self, packet: &[u8], place: usize) -> bool {
        // SAFETY: as in `decode`.
        unsafe { self.memory.slice(place) == packet }
    }
}

trait Writer {
    fn write_packet(&mut self, packet: &[u8], out: &mut [u8]) -> usize;
}

trait Reader {
    fn read_packet(&mut self, payload: &[u8], pages: &mut [u8]) -> std::result::Result<(), String>;
}

impl Writer for ZlibWriter {
    fn write_packet(&mut self, packet: &[u8], out: &mut [u8]) -> usize {
        self.write(packet, Z_SYNC_FLUSH, out)
    }
}

impl Reader for ZlibReader {
    fn read_packet(&mut self, payload: &[u8], pages: &mut [u8]) -> std::result::Result<(), String> {
        self.read(payload, pages)
    }
}

impl Writer for ZstdWriter {
    fn write_packet(&mut self, packet: &[u8], out: &mut [u8]) -> usize {
        self.write(packet, ZSTD_e_flush, out)
    }
}

impl Reader for ZstdReader {
    fn read_packet(&mut self, payload: &[u8], pages: &mut [u8]) -> std::result::Result<(), String> {
        self.read(payload, pages)
    }
}
