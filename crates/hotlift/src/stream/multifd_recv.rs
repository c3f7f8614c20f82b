//! A multifd channel that is read: packets are checked, and their pages put where a [`PageSink`] wants them.
//!
//! With method none the pages go from the socket straight to their place; other methods decode into it.

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

/// Whether a channel is read on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadOn {
    Yes,
    /// The migration has ended elsewhere, or the guest was taken over.
    No,
}

impl From<bool> for ReadOn {
    fn from(goes_on: bool) -> Self {
        match goes_on {
            true => Self::Yes,
            false => Self::No,
        }
    }
}

/// Where the pages of one channel go.
pub(crate) trait PageSink {
    /// Takes a packet's pages. `read` puts the pages with content, in the packet's order, into the memory that it
    /// is given; it is called once, and only for a packet that has such pages.
    fn put(
        &mut self,
        header: &PacketHeader,
        read: &mut dyn FnMut(&mut [GuestRun<'_>]) -> Result<(), MigrationError>,
    ) -> Result<ReadOn, MigrationError>;

    /// Passes an uncompressed packet on, whose pages are the next bytes of `from`, without reading them; false if
    /// that may not be done.
    fn forward(&mut self, header: &PacketHeader, from: &Stream) -> Result<bool, MigrationError> {
        let _ = (header, from);
        Ok(false)
    }

    /// How long pages have waited for room since this was asked last: the source is not what was waited for.
    fn held_back(&mut self) -> Duration {
        Duration::ZERO
    }

    /// Tells the source `message`, which is a message of the return path.
    fn tell(&mut self, message: &[u8]);

    /// The channel has reached its sync point.
    fn sync(&mut self) -> Result<ReadOn, MigrationError>;

    /// The channel has ended between packets.
    fn ended(&mut self) -> Result<(), MigrationError>;
}

/// What packets of a channel must be like.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChannelRules {
    /// The channel's number.
    pub id: u8,
    /// Size of its packets.
    pub layout: PacketLayout,
    /// Which methods its packets may have.
    pub methods: Methods,
    /// Whether packets without a checksum are refused.
    pub checksum_required: bool,
    /// Whether its method may use an accelerator.
    pub accelerator: Accelerator,
}

/// What bounds the reading of a migration's channels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChannelLimits<'a> {
    /// Compressed payloads, and what their decoders need.
    pub memory: &'a MemoryLimit,
    pub cpu: &'a CpuBudget,
    /// Counts what decodes.
    pub stats: &'a Arc<AcceleratorStats>,
    /// Ends the waits for CPU time.
    pub life: &'a Life,
}

/// Which methods the packets of a channel may have.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Methods {
    /// This one alone.
    One(&'static MethodInfo),
    /// That of the first packet with content, as QEMU has it.
    First,
    /// Each its own.
    Each,
}

/// Reads one channel.
pub(crate) struct MultifdReceiver<'a> {
    id: u8,
    channel: &'a Stream,
    packets: PacketReader<'a>,
    rules: PacketRules,
    /// The first packet's method is that of all.
    first_decides: bool,
    blocks: &'a [RamBlockEntry],
    header: PacketHeader,
    payload: Payload<'a>,
    counters: &'a Counters,
    /// Of a source that wants to know it.
    load: Option<ChannelLoad<'a>>,
    cpu: CpuShare<'a>,
}

/// What reads the pages of a packet.
struct Payload<'a> {
    cpu: &'a CpuBudget,
    life: &'a Life,
    id: u8,
    decoders: Decoders<'a>,
    buffer: CountedBuffer,
}

/// The channel's decoders, each made with the channel or when a packet first needs it.
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
    /// A reader of `channel`, for the calling thread. `load` is for a source that wants to know what the channels do.
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
                    // Which devices the source has is not this side's to require.
                    (Methods::Each, Accelerator::Required) => Accelerator::Auto,
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

    /// Reads until the channel ends, or need not be read on.
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
            if has_pages && self.pages(sink)? == ReadOn::No {
                return Ok(());
            }
            let slept = self.cpu.spend(self.payload.life) + sink.held_back();
            let pages = self.header.normal().len();
            if has_content
                && let Some(load) = &mut self.load
                && let Some(message) = load.settled(self.header.method(), pages, slept)
            {
                sink.tell(&message);
            }
            if self.header.sync() {
                if let Some(load) = &mut self.load {
                    load.pause();
                }
                if sink.sync()? == ReadOn::No {
                    return Ok(());
                }
            }
        }
    }

    fn pages(&mut self, sink: &mut dyn PageSink) -> Result<ReadOn, MigrationError> {
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
        // Pages of which a part was read ahead are in this process already.
        let is_whole = packets.has_nothing_ahead() || !has_content;
        if header.method() == Method::None
            && is_whole
            && channel.is_plain()
            && sink.forward(header, channel)?
        {
            if has_content {
                packets.payload_was_taken();
            }
            return Ok(ReadOn::Yes);
        }
        let block = &blocks[header.block()].name;
        sink.put(header, &mut |pages| {
            payload.read(packets, header, block, pages)
        })
    }
}

impl Payload<'_> {
    /// Puts the pages of the packet with this header into `pages`.
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
