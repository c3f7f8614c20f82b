//! Receiving end of a multifd channel: checks packets and puts their pages where a [`PageSink`] directs them.
//!
//! With method none the pages go from the socket directly to their destination; other methods decode into it.

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
    /// The channel brings nothing more: the migration has ended, or the guest was taken over.
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

/// Destination of one channel's pages.
pub(crate) trait PageSink {
    /// Takes a packet's pages. `read` fills the given memory with the pages with content, in the packet's order; it is called
    /// once, and only if there are such pages.
    fn put(
        &mut self,
        header: &PacketHeader,
        read: &mut dyn FnMut(&mut [GuestRun<'_>]) -> Result<(), MigrationError>,
    ) -> Result<ReadDecision, MigrationError>;

    /// Forwards an uncompressed packet, whose pages are the next bytes of `from`, without reading them. Returns false if that
    /// is not possible.
    fn forward(&mut self, header: &PacketHeader, from: &Stream) -> Result<bool, MigrationError> {
        let _ = (header, from);
        Ok(false)
    }

    /// Returns for how long pages have waited for room since the last call. The source did not cause this wait.
    fn held_back(&mut self) -> Duration {
        Duration::ZERO
    }

    /// Sends `message`, a return path message, to the source.
    fn report(&mut self, message: &[u8]);

    /// Reports that the channel has reached its sync point.
    fn sync(&mut self) -> Result<ReadDecision, MigrationError>;

    /// Reports that the channel has ended between packets.
    fn ended(&mut self) -> Result<(), MigrationError>;
}

/// Requirements on the packets of a channel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChannelRules {
    /// The channel's number.
    pub id: u8,
    /// Packet size of the channel.
    pub layout: PacketLayout,
    /// Methods that its packets may use.
    pub methods: Methods,
    /// True if packets without a checksum are rejected.
    pub checksum_required: bool,
    /// Use of an accelerator by its method.
    pub accelerator: Accelerator,
}

/// Limits of reading a migration's channels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChannelLimits<'a> {
    /// Memory for compressed payloads and decoders.
    pub memory: &'a MemoryLimit,
    pub cpu: &'a CpuBudget,
    /// Statistics of the decoding devices.
    pub stats: &'a Arc<AcceleratorStats>,
    /// Lifetime whose end interrupts the waits for CPU time.
    pub life: &'a Life,
}

/// Methods that the packets of a channel may use.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Methods {
    /// Only this one.
    One(&'static MethodInfo),
    /// The method of the first packet with content, as in QEMU.
    First,
    /// Any method in each packet.
    Each,
}

/// Reader of one channel.
pub(crate) struct MultifdReceiver<'a> {
    id: u8,
    channel: &'a Stream,
    packets: PacketReader<'a>,
    rules: PacketRules,
    /// True if the first packet determines the method of all.
    first_decides: bool,
    blocks: &'a [RamBlockEntry],
    header: PacketHeader,
    payload: Payload<'a>,
    counters: &'a Counters,
    /// Load measurement, for a source that requests it.
    load: Option<ChannelLoad<'a>>,
    cpu: CpuShare<'a>,
}

/// Reader of a packet's pages.
struct Payload<'a> {
    cpu: &'a CpuBudget,
    life: &'a Life,
    id: u8,
    decoders: Decoders<'a>,
    buffer: CountedBuffer,
}

/// Decoders of the channel, created with it or on first use.
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
    /// Creates a reader of `channel` for the calling thread. `load` is given if the source requests load reports.
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
                    // The source selects the methods, so this side cannot require its own device.
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

    /// Reads until the channel ends or the sink stops it.
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
        // Pages that were partly read ahead are already in this process.
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
    /// Reads the pages of the packet with this header into `pages`.
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
