//! Sending end of the multifd channels: packets of pages, and sync points.
//!
//! ```text
//! method none     header + pages directly from guest memory, or from the batch, to the socket
//! other methods   private pages -> encode -> header + payload to the socket
//! forwarded       header, and the pages from socket to socket
//! auto            each packet as one of these, depending on the link and the CPUs
//! ```
//!
//! Guest memory is copied before it is encoded, because a codec whose input changes may write a stream that cannot be decoded.
//! With method none, the kernel reads guest memory during the write. With `zero-copy-send`, the kernel reads it later, when the
//! destination reads the socket. A page that the guest writes during that time is dirty again, and is sent once more. At the
//! handover no data is left in a socket, because the destination has acknowledged all of it.

use std::io::Write;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hotlift_mem::sock::IoScratch;
use hotlift_mem::{Forwarder, Splicer};
use hotlift_mem::{GuestRun, PAGE_SIZE, thread_cpu_time};
use hotlift_net::admission::ConnectionToken;
use hotlift_net::transport::Stream;
use hotlift_wire::multifd::{
    Hello, InitialPacket, Method, PacketFields, PacketLayout, PacketWriter,
};
use hotlift_wire::settle;

use crate::accelerator_stats::AcceleratorStats;
use crate::auto::{Auto, Reader};
use crate::cpu_limit::{CpuBudget, CpuShare};
use crate::error::{Channel, MigrationError};
use crate::figures::{Counters, Counts};
use crate::life::Life;
use crate::lock::lock;
use crate::options::StreamOptions;
use crate::pacing::Pacer;
use crate::remote::{Dialing, Remote};
use crate::stream::auto_encoder::AutoEncoder;
use crate::stream::channel_out::{send, send_guest_memory};
use crate::stream::codec::Encoder;
use crate::stream::pages::Pages;
use crate::stream::return_path::{Answers, Messages};

/// Maximum bytes of headers without payload (only zero pages) that are collected before a write. One system call per header
/// would cost more than the scan of its pages.
const GATHERED_HEADERS: usize = 48 << 10;

/// Time to wait for the destination's reason, after the destination has closed a connection.
const REASON_WAIT: Duration = Duration::from_millis(200);

/// Content of the opening packet that each multifd channel begins with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChannelOpening {
    /// UUID of the VM; all zero if it has none.
    pub uuid: [u8; 16],
    /// Description of the migration for a Hotlift; a QEMU ignores it.
    pub hello: Hello,
}

impl ChannelOpening {
    /// Sends the opening packet of channel `id`.
    pub(crate) fn send(&self, transport: &Stream, id: u8) -> Result<(), MigrationError> {
        let packet = InitialPacket {
            uuid: self.uuid,
            id,
            hello: Some(self.hello),
        };
        let parts: [&[u8]; 1] = [&packet.encode()];
        send(
            transport,
            Channel::Multifd(id),
            &parts,
            &mut IoScratch::new(),
        )
    }
}

/// Connects once to the address `to`. Sends the token `pass`, if there is one.
pub(crate) fn connect_with(
    pass: Option<&ConnectionToken>,
    to: &Remote,
    timeout: Duration,
    dialing: &Dialing,
) -> Result<Stream, MigrationError> {
    let stream = to.connect_for(dialing, timeout)?;
    if let Some(pass) = pass {
        let shown = (&stream).write_all(&settle::token(pass.token_on(&stream)));
        shown.map_err(MigrationError::opening)?;
    }
    Ok(stream)
}

/// Connects main and the multifd channels to the address `to`, and sends the channels' opening packets. Main is first, because
/// a QEMU before 8.0 uses the first connection as main. Every connection begins with the token `pass`, if there is one.
pub(crate) fn connect(
    to: &Remote,
    pass: Option<&ConnectionToken>,
    opening: &ChannelOpening,
    timeout: Duration,
    dialing: &Dialing,
) -> Result<(Stream, Vec<Stream>), MigrationError> {
    let connect = || connect_with(pass, to, timeout, dialing);
    let main = connect()?;
    let mut multifd = Vec::new();
    for id in 0..opening.hello.channels {
        let opened = connect().and_then(|stream| opening.send(&stream, id).map(|()| stream));
        match opened {
            Ok(channel) => multifd.push(channel),
            Err(MigrationError::Cancelled) => return Err(MigrationError::Cancelled),
            Err(error) => {
                let reason = reason_on(std::iter::once(&main).chain(&multifd));
                return Err(reason.unwrap_or_else(|| MigrationError::Opening {
                    channel: Channel::Multifd(id),
                    source: Box::new(error),
                }));
            }
        }
    }
    Ok((main, multifd))
}

/// Returns the destination's reason for a failure, if the destination has sent one on any of `streams`. A Hotlift that rejects
/// a channel's opening packet accepts no more channels.
fn reason_on<'s>(streams: impl Iterator<Item = &'s Stream>) -> Option<MigrationError> {
    let deadline = Instant::now() + REASON_WAIT;
    let left = || deadline.saturating_duration_since(Instant::now());
    for stream in streams {
        let (answers, mut messages) =
            (Answers::new(&Life::default()), Messages::new(Channel::Main));
        // Each stream is also checked after the deadline: a silent stream may come before a stream with a reason.
        while matches!(stream.wait_readable(left()), Ok(true)) {
            match messages.read(stream, &answers, |_, _| Ok(())) {
                Err(reason @ MigrationError::Destination { .. }) => return Some(reason),
                Ok(true) if !left().is_zero() => {}
                Ok(_) | Err(_) => break,
            }
        }
    }
    None
}

/// All multifd channels of one migration.
#[derive(Debug)]
pub(crate) struct MultifdSend {
    channels: Vec<OutChannel>,
    layout: PacketLayout,
    /// Method of all packets; `None` with method auto, which selects the method of each packet.
    method: Option<Method>,
    /// Count of the packets of all channels, including SYNC packets: QEMU's `packet_num`.
    packet_num: AtomicU64,
    with: Sending,
}

/// State that the channels share with the rest of the migration.
#[derive(Debug)]
pub(crate) struct Sending {
    /// State of method auto; `None` with any other method.
    pub auto: Option<Arc<Auto>>,
    pub pacer: Arc<Pacer>,
    pub cpu: Arc<CpuBudget>,
    /// Statistics of the accelerators that encode.
    pub stats: Arc<AcceleratorStats>,
    pub life: Life,
}

#[derive(Debug)]
struct OutChannel {
    transport: Stream,
    /// Lock for writing to the channel: a worker and a thread that forwards packets may use the same channel.
    turn: Mutex<()>,
    counters: Counters,
}

impl MultifdSend {
    /// Creates the state from `channels`, whose opening packets contained `hello`.
    pub(crate) fn new(channels: Vec<Stream>, hello: &Hello, with: Sending) -> Self {
        let counters = Counters::of_channels(channels.len());
        let channels = channels.into_iter().zip(counters);
        Self {
            channels: channels
                .map(|(transport, counters)| OutChannel {
                    transport,
                    turn: Mutex::new(()),
                    counters,
                })
                .collect(),
            layout: hello.layout,
            method: hello.method,
            packet_num: AtomicU64::new(0),
            with,
        }
    }

    /// Returns the count of channels.
    pub(crate) fn len(&self) -> usize {
        self.channels.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.channels.is_empty()
    }

    /// Returns the state of method auto; `None` with any other method.
    pub(crate) fn auto(&self) -> Option<&Auto> {
        self.with.auto.as_deref()
    }

    /// Sets the program that reads the channels. Must be called before the first packet.
    ///
    /// # Errors
    /// [`MigrationError::Mismatch`] if the reader does not support the channels' method.
    pub(crate) fn reader_is(&self, reader: Reader) -> Result<(), MigrationError> {
        let only_ours = self.method.filter(|method| !method.is_qemus());
        if let (Reader::Qemu(_), Some(method)) = (reader, only_ours) {
            return Err(MigrationError::not_qemus(method));
        }
        if let Some(auto) = &self.with.auto {
            auto.reader_is(reader);
        }
        Ok(())
    }

    /// Returns a channel whose connection the peer has closed; `None` if all are open.
    pub(crate) fn lost_channel(&self) -> Option<Channel> {
        let lost = self.sockets().position(Stream::is_hung_up)?;
        Some(Channel::Multifd(u8::try_from(lost).unwrap_or(u8::MAX)))
    }

    /// Iterates over the sockets of the channels.
    pub(crate) fn sockets(&self) -> impl Iterator<Item = &Stream> {
        self.channels.iter().map(|channel| &channel.transport)
    }

    /// Returns the time per byte that the rate limit `max-bandwidth` enforces, in ns; 0 without a limit.
    pub(crate) fn paced_nanos_per_byte(&self) -> f64 {
        self.with.pacer.nanos_per_byte()
    }

    /// Returns the counts of pages and bytes sent so far on all channels.
    pub(crate) fn counts(&self) -> Counts {
        self.channels
            .iter()
            .map(|channel| channel.counters.read())
            .sum()
    }

    /// Shuts down all channels in both directions.
    pub(crate) fn shut_down(&self) {
        for channel in &self.channels {
            channel.transport.shutdown(Shutdown::Both);
        }
    }

    /// Sends a SYNC packet on every channel. If a channel fails, continues with the others and returns the first error.
    pub(crate) fn sync(&self) -> Result<(), MigrationError> {
        let mut writer = self.writer();
        let mut scratch = IoScratch::new();
        let mut outcome = Ok(());
        for id in (0..=u8::MAX).take(self.len()) {
            let header = self.frame(&mut writer, id, &self.sync_fields())?;
            let written = self.write(id, header.len(), |transport| {
                send(transport, Channel::Multifd(id), &[header], &mut scratch)
            });
            outcome = outcome.and(written.map(drop));
        }
        outcome
    }

    fn writer(&self) -> PacketWriter {
        PacketWriter::new(self.layout, self.method.unwrap_or(Method::None), true)
    }

    fn sync_fields(&self) -> PacketFields<'static> {
        PacketFields {
            sync: true,
            packet_num: self.next_packet(),
            ..PacketFields::default()
        }
    }

    fn next_packet(&self) -> u64 {
        self.packet_num.fetch_add(1, Ordering::Relaxed)
    }

    fn frame<'w>(
        &self,
        writer: &'w mut PacketWriter,
        id: u8,
        fields: &PacketFields<'_>,
    ) -> Result<&'w [u8], MigrationError> {
        let header = writer.header(fields);
        header.map_err(|source| MigrationError::Wire {
            channel: Channel::Multifd(id),
            source,
        })
    }

    /// Writes `bytes` bytes to a channel: waits for the pacer (rate limiter), then for the channel's lock, and counts the
    /// bytes. Returns the delay that the pacer has caused.
    fn write(
        &self,
        id: u8,
        bytes: usize,
        write: impl FnOnce(&Stream) -> Result<(), MigrationError>,
    ) -> Result<Duration, MigrationError> {
        let channel = &self.channels[usize::from(id)];
        let held_back = self.with.pacer.wait(bytes, &self.with.life);
        let _turn = lock(&channel.turn);
        write(&channel.transport)?;
        channel.counters.add_bytes(bytes);
        Ok(held_back)
    }

    /// Returns the count of bytes in a channel's socket that wait for the wire; `None` if unknown.
    fn queued(&self, id: u8, auto: &Auto) -> Option<u32> {
        if self.with.pacer.is_limited() {
            // With `max-bandwidth`, packets wait in the pacer, not in the socket. If less was sent than the limit allows, this
            // packet is sent at once, as with an empty queue.
            return self.with.pacer.is_behind().then_some(0);
        }
        let socket = &self.channels[usize::from(id)].transport;
        Some(auto.waiting(socket.unacknowledged()?))
    }
}

/// Sends packets on one channel, in one thread. Its buffers are reused for each packet.
pub(crate) struct PacketSender<'a> {
    multifd: &'a MultifdSend,
    id: u8,
    writer: PacketWriter,
    coding: Coding<'a>,
    cpu: CpuShare<'a>,
    /// Copy of the packet's pages, which the guest cannot change.
    copy: Vec<u8>,
    payload: Vec<u8>,
    /// Collected headers to write. Only the last header may have a payload.
    headers: Vec<u8>,
    /// Maximum size of the collected headers in bytes.
    gathered: usize,
    scratch: IoScratch,
    /// Sends guest pages by reference. Set only with method none and `zero-copy-send`.
    splicer: Option<Splicer>,
}

/// Encoding of the packets that a thread sends.
enum Coding<'a> {
    /// No encoding: all packets are uncompressed.
    Raw,
    /// The same method for all packets.
    One(Encoder),
    /// Method auto: selects the method of each packet.
    Auto(AutoEncoder<'a>),
}

impl<'a> PacketSender<'a> {
    /// Creates the sender of channel `id`. With `gathers`, headers of packets without content are collected. They are written
    /// with the next packet that has content, or by [`PacketSender::sync`].
    pub(crate) fn new(
        multifd: &'a MultifdSend,
        id: u8,
        options: &StreamOptions,
        to_hotlift: bool,
        gathers: bool,
    ) -> Result<Self, MigrationError> {
        let coding = match &multifd.with.auto {
            Some(auto) => Coding::Auto(AutoEncoder::new(
                auto,
                id,
                options.accelerator,
                &multifd.with.stats,
            )),
            None => match Encoder::new(id, options, to_hotlift, &multifd.with.stats)? {
                Some(encoder) => Coding::One(encoder),
                None => Coding::Raw,
            },
        };
        let socket = &multifd.channels[usize::from(id)].transport;
        let by_reference = !matches!(coding, Coding::One(_)) && socket.is_plain();
        // The system may refuse a pipe (`pipe-user-pages-soft`). Copying always works.
        let splicer = (by_reference && options.zero_copy_send)
            .then(|| Splicer::new().ok())
            .flatten();
        let gathered = if gathers { GATHERED_HEADERS } else { 0 };
        Ok(Self {
            multifd,
            id,
            writer: multifd.writer(),
            coding,
            cpu: CpuShare::new(&multifd.with.cpu),
            copy: Vec::new(),
            payload: Vec::new(),
            headers: Vec::with_capacity(gathered + multifd.layout.header_len()),
            gathered,
            scratch: IoScratch::new(),
            splicer,
        })
    }

    /// Starts the clock of method auto, after a wait for pages to send.
    pub(crate) fn begin(&mut self) {
        if let Coding::Auto(auto) = &mut self.coding {
            auto.begin();
        }
    }

    /// Sends a packet of pages of RAM block `block`.
    pub(crate) fn send(
        &mut self,
        block: &str,
        normal: &[u64],
        zero: &[u64],
        pages: Pages<'_, '_>,
    ) -> Result<(), MigrationError> {
        let multifd = self.multifd;
        let channel = &multifd.channels[usize::from(self.id)];
        let packet_num = multifd.next_packet();
        let bytes_in = normal.len() * PAGE_SIZE;
        let mut decided = match &mut self.coding {
            Coding::Auto(auto) if bytes_in > 0 => {
                let queued = multifd.queued(self.id, auto.shared());
                Some(auto.decide(pages, queued))
            }
            _ => None,
        };
        let method = match (&self.coding, &decided) {
            (Coding::Auto(auto), Some(decided)) => auto.method(decided),
            (Coding::Auto(_), None) => Method::None,
            _ => multifd.method.unwrap_or(Method::None),
        };
        let mut payload = match pages {
            Pages::Guest(runs) if method != Method::None => {
                copy(runs, bytes_in, &mut self.copy);
                Pages::Private(&self.copy[..bytes_in])
            }
            as_they_are => as_they_are,
        };
        let mut payload_len = bytes_in;
        let mut payload_crc = 0;
        let mut sent_as = multifd.auto().map(Auto::unencoded_method);
        if let Pages::Private(private) = payload
            && method != Method::None
            && bytes_in > 0
        {
            self.payload.clear();
            let out = &mut self.payload;
            let at_work = multifd.with.cpu.at_work();
            if let (Coding::Auto(auto), Some(at_work)) = (&mut self.coding, &at_work) {
                auto.slept(at_work.waited);
            }
            let is_encoded = match (&mut self.coding, &mut decided) {
                (Coding::One(encoder), _) => {
                    encoder.encode(packet_num, block, private, out)?;
                    true
                }
                (Coding::Auto(auto), Some(decided)) => {
                    auto.encode(decided, packet_num, block, private, out)?
                }
                (Coding::Raw | Coding::Auto(_), _) => false,
            };
            if is_encoded {
                sent_as = sent_as.map(|_| method);
                payload_crc = crc32fast::hash(&self.payload);
                payload_len = self.payload.len();
                payload = Pages::Private(&self.payload);
            }
        }
        if let Some(method) = sent_as {
            self.writer.set_method(method);
        }
        let fields = PacketFields {
            sync: false,
            packet_num,
            block,
            normal,
            zero,
            payload_len: u32::try_from(payload_len).unwrap_or(u32::MAX),
            payload_crc,
        };
        let header = multifd.frame(&mut self.writer, self.id, &fields)?;
        self.headers.extend_from_slice(header);
        if payload_len > 0 || self.headers.len() >= self.gathered {
            let before = decided.map(|_| thread_cpu_time());
            let held_back = write(
                multifd,
                self.id,
                &mut self.headers,
                payload_len,
                payload,
                self.splicer.as_mut(),
                &mut self.scratch,
            )?;
            if let (Coding::Auto(auto), Some(decided), Some(before)) =
                (&mut self.coding, decided, before)
            {
                let send = thread_cpu_time().saturating_sub(before);
                let bytes = (bytes_in, payload_len);
                auto.sent(
                    &decided,
                    bytes,
                    (send, held_back),
                    multifd.sockets(),
                    multifd.paced_nanos_per_byte(),
                );
            } else if let Coding::Auto(auto) = &mut self.coding {
                auto.paced(held_back);
            }
        }
        let slept = self.cpu.spend(&multifd.with.life);
        if let Coding::Auto(auto) = &mut self.coding {
            auto.slept(slept);
        }
        channel.counters.add_pages(normal.len(), zero.len());
        Ok(())
    }

    /// Sends a SYNC packet on this channel. The destination processes all earlier packets before it passes the barrier.
    pub(crate) fn sync(&mut self) -> Result<(), MigrationError> {
        let multifd = self.multifd;
        if let Coding::Auto(auto) = &mut self.coding {
            auto.pause();
        }
        let fields = multifd.sync_fields();
        let header = multifd.frame(&mut self.writer, self.id, &fields)?;
        self.headers.extend_from_slice(header);
        write(
            multifd,
            self.id,
            &mut self.headers,
            0,
            Pages::Private(&[]),
            None,
            &mut self.scratch,
        )?;
        Ok(())
    }
}

/// Writes the collected headers, and the payload of the last header. Returns the delay that the pacer (rate limiter) has
/// caused.
fn write(
    multifd: &MultifdSend,
    id: u8,
    headers: &mut Vec<u8>,
    payload_len: usize,
    payload: Pages<'_, '_>,
    splicer: Option<&mut Splicer>,
    scratch: &mut IoScratch,
) -> Result<Duration, MigrationError> {
    let channel = Channel::Multifd(id);
    let held_back = multifd.write(id, headers.len() + payload_len, |transport| match payload {
        Pages::Guest(runs) => {
            send_guest_memory(transport, channel, headers, runs, splicer, scratch)
        }
        Pages::Private(bytes) => send(transport, channel, &[headers, bytes], scratch),
    })?;
    headers.clear();
    Ok(held_back)
}

fn copy(runs: &[GuestRun<'_>], length: usize, into: &mut Vec<u8>) {
    if into.len() < length {
        into.resize(length, 0);
    }
    let mut filled = 0;
    for run in runs {
        run.copy_to(&mut into[filled..filled + run.len()]);
        filled += run.len();
    }
}

/// Forwards packets of method none from socket to socket, without reading their pages.
pub(crate) struct PacketForwarder<'a> {
    multifd: &'a MultifdSend,
    id: u8,
    writer: PacketWriter,
    forwarder: Forwarder,
}

impl<'a> PacketForwarder<'a> {
    /// Creates the forwarder for the incoming channel `channel`. Returns `None` if pages cannot be forwarded unchanged.
    pub(crate) fn new(multifd: &'a MultifdSend, channel: u8) -> Option<Self> {
        let id = usize::from(channel).checked_rem(multifd.len())?;
        let socket = &multifd.channels[id].transport;
        if multifd.method != Some(Method::None) || !socket.is_plain() {
            return None;
        }
        Some(Self {
            multifd,
            id: u8::try_from(id).ok()?,
            writer: multifd.writer(),
            // The system may refuse a pipe (`pipe-user-pages-soft`). Copying always works.
            forwarder: Forwarder::new().ok()?,
        })
    }

    /// Forwards one packet. The content of its pages `normal` is the next bytes of `from`.
    pub(crate) fn forward(
        &mut self,
        from: &Stream,
        block: &str,
        normal: &[u64],
        zero: &[u64],
    ) -> Result<(), MigrationError> {
        let length = normal.len() * PAGE_SIZE;
        let fields = PacketFields {
            packet_num: self.multifd.next_packet(),
            block,
            normal,
            zero,
            payload_len: u32::try_from(length).unwrap_or(u32::MAX),
            ..PacketFields::default()
        };
        let header = self.multifd.frame(&mut self.writer, self.id, &fields)?;
        let bytes = header.len() + length;
        let forwarder = &mut self.forwarder;
        let written = self.multifd.write(self.id, bytes, |transport| {
            forwarder
                .forward(from.as_fd(), transport.as_fd(), header, length)
                .map_err(|source| MigrationError::Connection {
                    channel: Channel::Multifd(self.id),
                    doing: "forwarding pages",
                    source,
                })
        });
        written.map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use hotlift_wire::multifd::ZeroPageDetection;

    use super::*;

    #[test]
    fn a_failed_channel_does_not_block_a_sync_of_later_ones() {
        let (first, _far_first) = Stream::pair().unwrap();
        let (second, far_second) = Stream::pair().unwrap();
        first.shutdown(Shutdown::Both);
        let hello = Hello {
            channels: 2,
            method: Some(Method::None),
            layout: PacketLayout::QEMU,
            zero_page_detection: ZeroPageDetection::Multifd,
        };
        let with = Sending {
            auto: None,
            pacer: Arc::new(Pacer::new(0)),
            cpu: Arc::new(CpuBudget::new(0)),
            stats: Arc::default(),
            life: Life::default(),
        };
        let multifd = MultifdSend::new(vec![first, second], &hello, with);
        assert!(multifd.sync().is_err());
        assert!(far_second.wait_readable(Duration::ZERO).unwrap());
    }
}
