//! Receiving end of a multifd channel. It checks packets, and writes their pages to the memory that a [`PageSink`] selects.
//!
//! With method none, pages are read from the socket directly into this memory. With other methods, they are decoded into it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hotlift_mem::GuestRun;
use hotlift_methods::{Accelerator, MemoryLimit, MethodInfo};
use hotlift_net::transport::Stream;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::multifd::{Method, PacketHeader, PacketLayout, PacketRules};

use crate::accelerator_stats::AcceleratorStats;
use crate::cpu_limit::{CpuBudget, CpuShare};
use crate::error::{Channel, MigrationError};
use crate::figures::Counters;
use crate::life::Life;
use crate::stream::codec::{ByMethod, Decoder};
use crate::stream::counted_buffer::CountedBuffer;
use crate::stream::load::{ChannelLoad, ReceiverLoad};
use crate::stream::packet_reader::PacketReader;

/// Decision to continue reading a channel, or to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadDecision {
    Yes,
    /// Stop: the migration has ended, or the guest was taken over, so no more pages are expected.
    No,
}

impl From<bool> for ReadDecision {
    fn from(keep_waiting: bool) -> Self {
        match keep_waiting {
            true => Self::Yes,
            false => Self::No,
        }
    }
}

/// Consumer of one channel's pages. It selects the memory for each page.
pub(crate) trait PageSink {
    /// Accepts a packet. If the packet has pages with content, must call `read` once, with memory for these pages in the
    /// packet's order; `read` fills this memory.
    fn put(
        &mut self,
        header: &PacketHeader,
        read: &mut dyn FnMut(&mut [GuestRun<'_>]) -> Result<(), MigrationError>,
    ) -> Result<ReadDecision, MigrationError>;

    /// Forwards an uncompressed packet without reading its pages, which are the next bytes of `from`. Returns false if the
    /// packet cannot be forwarded.
    fn forward(&mut self, header: &PacketHeader, from: &Stream) -> Result<bool, MigrationError> {
        let _ = (header, from);
        Ok(false)
    }

    /// Returns the time since the last call in which pages have waited for room in this process. The source did not cause this
    /// wait.
    fn held_back(&mut self) -> Duration {
        Duration::ZERO
    }

    /// Sends `message` to the source. It must be a return path message.
    fn report(&mut self, message: &[u8]);

    /// Called when the channel has reached a sync point. Waits at the barrier.
    fn sync(&mut self) -> Result<ReadDecision, MigrationError>;

    /// Called when the channel has ended between two packets.
    fn ended(&mut self) -> Result<(), MigrationError>;
}

/// Requirements on the packets of a channel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChannelRules {
    /// The channel's number.
    pub id: u8,
    /// Layout of the channel's packets.
    pub layout: PacketLayout,
    /// Methods that the channel's packets may have.
    pub methods: Methods,
    /// True if packets without a checksum are rejected.
    pub checksum_required: bool,
    /// Use of an accelerator to decode the channel: automatic, required, or off.
    pub accelerator: Accelerator,
}

/// Limits that all channels of a migration share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChannelLimits<'a> {
    /// Limit of the memory for compressed payloads and decoders.
    pub memory: &'a MemoryLimit,
    pub cpu: &'a CpuBudget,
    /// Statistics of the accelerators that decode.
    pub stats: &'a Arc<AcceleratorStats>,
    /// Lifetime of the migration. Its end interrupts the waits for CPU time.
    pub life: &'a Life,
}

/// Methods that the packets of a channel may have.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Methods {
    /// Only this method.
    One(&'static MethodInfo),
    /// The method of the first packet with content determines the method of all packets, as in QEMU.
    First,
    /// Each packet may have another method.
    Each,
}

/// Reads one multifd channel.
pub(crate) struct MultifdReceiver<'a> {
    id: u8,
    channel: &'a Stream,
    packets: PacketReader<'a>,
    rules: PacketRules,
    /// True if the first packet with content determines the method of all packets.
    first_decides: bool,
    blocks: &'a [RamBlockEntry],
    header: PacketHeader,
    payload: Payload<'a>,
    counters: &'a Counters,
    /// Load measurement of this thread; `None` if the source does not request load reports.
    load: Option<ChannelLoad<'a>>,
    cpu: CpuShare<'a>,
}

/// Reads the pages of packets, and decodes them.
struct Payload<'a> {
    cpu: &'a CpuBudget,
    life: &'a Life,
    id: u8,
    decoders: Decoders<'a>,
    buffer: CountedBuffer,
}

/// Decoders of the channel by method. Each is created with the channel or on first use.
struct Decoders<'a> {
    id: u8,
    accelerator: Accelerator,
    memory: &'a MemoryLimit,
    stats: &'a Arc<AcceleratorStats>,
    made: ByMethod<Decoder>,
}

impl Decoders<'_> {
    fn get(&mut self, method: Method) -> Result<&mut Decoder, MigrationError> {
        self.made.get(method, |info| {
            Decoder::of(info, self.id, self.accelerator, self.memory, self.stats)
        })
    }
}

impl<'a> MultifdReceiver<'a> {
    /// Creates a reader of `channel` for the calling thread. `load` is `None` if the source does not request load reports.
    pub(crate) fn new(
        rules: ChannelRules,
        channel: &'a Stream,
        blocks: &'a [RamBlockEntry],
        limits: ChannelLimits<'a>,
        load: Option<&'a ReceiverLoad>,
        counters: &'a Counters,
    ) -> Result<Self, MigrationError> {
        let memory = limits.memory;
        let mut payload = Payload {
            cpu: limits.cpu,
            life: limits.life,
            id: rules.id,
            decoders: Decoders {
                id: rules.id,
                accelerator: match (rules.methods, rules.accelerator) {
                    // The source selects the methods, so the destination cannot require its own accelerator.
                    (Methods::Each, Accelerator::Required(all)) => Accelerator::Auto(all),
                    (_, accelerator) => accelerator,
                },
                memory,
                stats: limits.stats,
                made: ByMethod::new(rules.id),
            },
            buffer: CountedBuffer::new(memory),
        };
        let method = match rules.methods {
            Methods::One(info) => Method::from_flag(info.flag),
            Methods::First | Methods::Each => None,
        };
        if let Some(method) = method.filter(|method| *method != Method::None) {
            payload.decoders.get(method)?;
        }
        Ok(Self {
            id: rules.id,
            channel,
            packets: PacketReader::new(channel, rules.layout.header_len()),
            rules: PacketRules {
                layout: rules.layout,
                method,
                checksum_required: rules.checksum_required,
            },
            first_decides: matches!(rules.methods, Methods::First),
            blocks,
            header: PacketHeader::new(rules.layout),
            payload,
            counters,
            load: load.map(ChannelLoad::new),
            cpu: CpuShare::new(limits.cpu),
        })
    }

    /// Reads packets until the channel ends, or `sink` stops it.
    pub(crate) fn run(mut self, sink: &mut dyn PageSink) -> Result<(), MigrationError> {
        loop {
            let id = self.id;
            let header = self.packets.header();
            let Some(bytes) =
                header.map_err(|source| broken(id, "reading a packet header", source))?
            else {
                return sink.ended();
            };
            self.counters.add_bytes(bytes.len());
            self.header
                .decode(bytes, &self.rules, self.blocks)
                .map_err(|source| MigrationError::Wire {
                    channel: Channel::Multifd(id),
                    source,
                })?;
            let has_content = !self.header.normal().is_empty();
            if has_content && let Some(load) = &mut self.load {
                load.begins();
            }
            let has_pages = !self.header.normal().is_empty() || !self.header.zero().is_empty();
            if has_pages && self.pages(sink)? == ReadDecision::No {
                return Ok(());
            }
            let slept = self.cpu.spend(self.payload.life) + sink.held_back();
            let pages = self.header.normal().len();
            if has_content
                && let Some(load) = &mut self.load
                && let Some(message) = load.settled(self.header.method(), pages, slept)
            {
                sink.report(&message);
            }
            if self.header.sync() {
                if let Some(load) = &mut self.load {
                    load.pause();
                }
                if sink.sync()? == ReadDecision::No {
                    return Ok(());
                }
            }
        }
    }

    fn pages(&mut self, sink: &mut dyn PageSink) -> Result<ReadDecision, MigrationError> {
        let Self {
            packets,
            rules,
            header,
            payload,
            channel,
            blocks,
            first_decides,
            ..
        } = self;
        let has_content = !header.normal().is_empty();
        if has_content {
            if *first_decides {
                rules.method.get_or_insert(header.method());
            }
            self.counters.add_bytes(header.payload_len());
        }
        // If pages were partly read ahead, they cannot be forwarded from the socket.
        let is_whole = packets.has_nothing_ahead() || !has_content;
        if header.method() == Method::None
            && is_whole
            && channel.is_plain()
            && sink.forward(header, channel)?
        {
            if has_content {
                packets.payload_was_taken();
            }
            return Ok(ReadDecision::Yes);
        }
        let block = &blocks[header.block()].name;
        sink.put(header, &mut |pages| {
            payload.read(packets, header, block, pages)
        })
    }
}

impl Payload<'_> {
    /// Reads the pages of the packet with header `header` into guest memory `pages`.
    fn read(
        &mut self,
        packets: &mut PacketReader<'_>,
        header: &PacketHeader,
        block: &str,
        pages: &mut [GuestRun<'_>],
    ) -> Result<(), MigrationError> {
        let id = self.id;
        if header.method() == Method::None {
            let read = packets.pages(pages);
            return read.map_err(|source| broken(id, "reading pages", source));
        }
        let decoder = self.decoders.get(header.method())?;
        let length = header.payload_len();
        let grown = self.buffer.grow_to(length);
        grown.map_err(|source| MigrationError::memory(Channel::Multifd(id), source))?;
        let bytes = &mut self.buffer.as_mut()[..length];
        packets
            .payload(bytes)
            .map_err(|source| broken(id, "reading a payload", source))?;
        header
            .check_payload(bytes)
            .map_err(|source| MigrationError::Wire {
                channel: Channel::Multifd(id),
                source,
            })?;
        let _at_work = self.cpu.at_work();
        decoder.decode(header.packet_num(), block, bytes, pages)
    }
}

fn broken(id: u8, doing: &'static str, source: io::Error) -> MigrationError {
    MigrationError::Connection {
        channel: Channel::Multifd(id),
        doing,
        source,
    }
}
