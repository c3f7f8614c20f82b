//! Codecs of the multifd channels beside those that QEMU uses: ratio, and CPU time for both ways.
//!
//! ```sh
//! cargo bench -p hotlift-methods --bench codecs -- [--levels] [--passes N] [FOLDER]
//! ```
//!
//! FOLDER (or `HOTLIFT_CORPUS`; else the Silesia corpus of the development machine) holds files,
//! `.zst` ones are unpacked. They are joined and cut into packets of 128 pages. Each packet goes
//! through every codec before the next one is looked at, so that a machine whose speed drifts drifts
//! for all; figures are thread CPU time, the median of the passes. The two references are zlib and
//! zstd at level 1, called page by page as QEMU calls them. `--levels` prints every zlib level, and
//! the zstd levels up to 9, each beside QEMU's way at the same level.

#[path = "../tests/support/qemu.rs"]
#[allow(dead_code)]
mod qemu;

use std::error::Error;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hotlift_mem::{Backing, GuestRun, PAGE_SIZE, RamBlock, thread_cpu_time};
use hotlift_methods::{Decode, Encode, METHODS, zlib};
use libz_sys::Z_SYNC_FLUSH;
use qemu::{PAYLOAD_LIMIT, ZlibReader, ZlibWriter, ZstdReader, ZstdWriter};
use zstd_sys::ZSTD_EndDirective::ZSTD_e_flush;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const PACKET: usize = 128 * PAGE_SIZE;

fn main() -> Result<()> {
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
    let mut results: Vec<Results> = rows.iter().map(|_| Results::default()).collect();
    for _ in 0..options.passes {
        let mut codecs = rows
            .iter()
            .map(|row| (row.make)())
            .collect::<Result<Vec<_>>>()?;
        let mut sums = vec![Sums::default(); rows.len()];
        for &packet in &packets {
            for (codec, sum) in codecs.iter_mut().zip(&mut sums) {
                sum.add(&mut **codec, packet)?;
            }
        }
        for (result, sum) in results.iter_mut().zip(sums) {
            result.0.push(sum);
        }
    }
    print(&rows, &results, packets.len() * PACKET);
    Ok(())
}

struct Options {
    folder: PathBuf,
    passes: usize,
    levels: bool,
}

impl Options {
    fn parse() -> Result<Self> {
        let folder = std::env::var_os("HOTLIFT_CORPUS");
        let mut options = Self {
            folder: folder.map_or_else(|| "/work/shared/silesia".into(), PathBuf::from),
            passes: 5,
            levels: false,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--bench" => {}
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
            // What a corpus brings beside its data.
            Some("md" | "zst-files") | None => {}
            _ => data.extend(std::fs::read(&file)?),
        }
    }
    Ok(data)
}

/// One codec, both ways.
trait Codec {
    /// The payload's bytes.
    fn encode(&mut self, packet: &[u8]) -> Result<usize>;
    fn decode(&mut self) -> Result<()>;
    fn check(&self, packet: &[u8]) -> bool;
}

struct Row {
    name: String,
    /// Row that this one is compared with.
    reference: usize,
    make: Box<dyn Fn() -> Result<Box<dyn Codec>>>,
}

impl Row {
    fn new<C: Codec + 'static>(
        name: impl Into<String>,
        reference: usize,
        make: impl Fn() -> Result<C> + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            reference,
            make: Box::new(move || Ok(Box::new(make()?))),
        }
    }

    fn ours(method: &'static str, level: u8, scattered: bool, reference: usize) -> Self {
        let pages = if scattered { ", scattered pages" } else { "" };
        Self::new(format!("{method} {level}{pages}"), reference, move || {
            let method = hotlift_methods::method(method).ok_or("no such method")?;
            Ours::new((method.encoder)(level)?, (method.decoder)()?, scattered)
        })
    }

    fn zlib_by(library: zlib::Library, level: u8, reference: usize) -> Self {
        let name = format!("zlib {level} by {library:?}");
        Self::new(name, reference, move || {
            let decoder = METHODS[1].decoder;
            Ours::new(zlib::encoder_by(library, level)?, decoder()?, false)
        })
    }

    fn qemu_zlib(level: u8, reference: usize) -> Self {
        Self::new(format!("QEMU's zlib {level}"), reference, move || {
            Ok(QemuZlib {
                writer: ZlibWriter::new(level, Z_SYNC_FLUSH),
                reader: ZlibReader::new(),
                buffers: Buffers::new(),
            })
        })
    }

    fn qemu_zstd(level: u8, reference: usize) -> Self {
        Self::new(format!("QEMU's zstd {level}"), reference, move || {
            Ok(QemuZstd {
                writer: ZstdWriter::new(level.into()),
                reader: ZstdReader::new(),
                buffers: Buffers::new(),
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
    rows
}

/// What one codec took and gave in one pass.
#[derive(Clone, Copy, Default)]
struct Sums {
    encode: Duration,
    decode: Duration,
    bytes: usize,
}

impl Sums {
    fn add(&mut self, codec: &mut dyn Codec, packet: &[u8]) -> Result<()> {
        let start = thread_cpu_time();
        self.bytes += black_box(codec.encode(black_box(packet))?);
        let between = thread_cpu_time();
        codec.decode()?;
        self.decode += thread_cpu_time() - between;
        self.encode += between - start;
        if !codec.check(packet) {
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

/// A method of the table, decoding to guest memory.
struct Ours {
    encoder: Box<dyn Encode>,
    decoder: Box<dyn Decode>,
    payload: Vec<u8>,
    /// Of a block that is leaked: a megabyte a codec and pass, for the life of the benchmark.
    runs: Vec<GuestRun<'static>>,
}

impl Ours {
    fn new(encoder: Box<dyn Encode>, decoder: Box<dyn Decode>, scattered: bool) -> Result<Self> {
        let block: &'static RamBlock = Box::leak(Box::new(RamBlock::new(
            "ram",
            2 * PACKET,
            Backing::Private,
        )?));
        let stride = if scattered { 2 } else { 1 };
        let runs = (0..128)
            .map(|page| block.run(page * stride * PAGE_SIZE, PAGE_SIZE))
            .collect::<std::result::Result<_, _>>()?;
        Ok(Self {
            encoder,
            decoder,
            payload: Vec::new(),
            runs,
        })
    }
}

impl Codec for Ours {
    fn encode(&mut self, packet: &[u8]) -> Result<usize> {
        self.encoder.encode(packet, &mut self.payload)?;
        Ok(self.payload.len())
    }

    fn decode(&mut self) -> Result<()> {
        Ok(self.decoder.decode(&self.payload, &self.runs)?)
    }

    fn check(&self, packet: &[u8]) -> bool {
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

struct Buffers {
    payload: Vec<u8>,
    len: usize,
    pages: Vec<u8>,
}

impl Buffers {
    fn new() -> Self {
        Self {
            payload: vec![0; PAYLOAD_LIMIT],
            len: 0,
            pages: vec![0; PACKET],
        }
    }
}

struct QemuZlib {
    writer: ZlibWriter,
    reader: ZlibReader,
    buffers: Buffers,
}

impl Codec for QemuZlib {
    fn encode(&mut self, packet: &[u8]) -> Result<usize> {
        let Self {
            writer, buffers, ..
        } = self;
        buffers.len = writer.write(packet, Z_SYNC_FLUSH, &mut buffers.payload);
        Ok(buffers.len)
    }

    fn decode(&mut self) -> Result<()> {
        let Self {
            reader, buffers, ..
        } = self;
        Ok(reader.read(&buffers.payload[..buffers.len], &mut buffers.pages)?)
    }

    fn check(&self, packet: &[u8]) -> bool {
        self.buffers.pages == packet
    }
}

struct QemuZstd {
    writer: ZstdWriter,
    reader: ZstdReader,
    buffers: Buffers,
}

impl Codec for QemuZstd {
    fn encode(&mut self, packet: &[u8]) -> Result<usize> {
        let Self {
            writer, buffers, ..
        } = self;
        buffers.len = writer.write(packet, ZSTD_e_flush, &mut buffers.payload);
        Ok(buffers.len)
    }

    fn decode(&mut self) -> Result<()> {
        let Self {
            reader, buffers, ..
        } = self;
        Ok(reader.read(&buffers.payload[..buffers.len], &mut buffers.pages)?)
    }

    fn check(&self, packet: &[u8]) -> bool {
        self.buffers.pages == packet
    }
}
