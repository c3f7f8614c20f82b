//! The connections of a source on another host, and the answers to it.

use std::io::{self, Write};
use std::net::Shutdown;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use hotlift_net::transport::Stream;
use hotlift_wire::RamBlockEntry;
use hotlift_wire::multifd::{Hello, PacketLayout};

use crate::error::MigrationError;
use crate::lock::lock;
use crate::pipe::session::Session;
use crate::stream::load::ReceiverLoad;
use crate::stream::multifd_recv::{
    ChannelLimits, ChannelRules, Methods, MultifdReceiver, PageSink,
};

/// A main channel and the multifd channels.
pub(crate) struct StreamIn {
    pub main: Stream,
    /// By channel id.
    pub multifd: Vec<Stream>,
    /// Size of the packets.
    pub layout: PacketLayout,
    methods: Methods,
    /// The source chooses the method of each packet, and wants to know what the channels do.
    by_packet: bool,
    load: ReceiverLoad,
    /// The source is a Hotlift: a relay, or a guest.
    is_hotlift: AtomicBool,
    /// Keeps answers of different threads apart.
    answering: Mutex<()>,
}

impl StreamIn {
    /// The connections of a source, a Hotlift or not. `hello` is what that has shown on its channels, whose packets have
    /// these methods.
    pub(crate) fn new(
        main: Stream,
        multifd: Vec<Stream>,
        is_hotlift: bool,
        hello: Option<Hello>,
        methods: Methods,
    ) -> Self {
        Self {
            main,
            multifd,
            layout: hello.map_or(PacketLayout::QEMU, |hello| hello.layout),
            methods,
            by_packet: hello.is_some_and(|hello| hello.method.is_none()),
            load: ReceiverLoad::default(),
            is_hotlift: AtomicBool::new(is_hotlift),
            answering: Mutex::default(),
        }
    }

    /// Whether the source is a Hotlift.
    pub(crate) fn is_hotlift(&self) -> bool {
        self.is_hotlift.load(Ordering::Acquire)
    }

    /// A source without multifd channels has shown that it is a Hotlift.
    pub(crate) fn set_is_hotlift(&self) {
        self.is_hotlift.store(true, Ordering::Release);
    }

    /// All connections, the main channel first.
    pub(crate) fn streams(&self) -> impl Iterator<Item = &Stream> {
        std::iter::once(&self.main).chain(&self.multifd)
    }

    /// Sends `bytes` to the source on main, whole messages of the return path.
    pub(crate) fn answer(&self, bytes: &[u8]) -> io::Result<()> {
        let _one = lock(&self.answering);
        (&self.main).write_all(bytes)
    }

    /// The same, and closes main where that fails: a part of a message may be on its way, which nothing can follow.
    pub(crate) fn answer_or_cut(&self, bytes: &[u8]) -> io::Result<()> {
        let _one = lock(&self.answering);
        let answered = (&self.main).write_all(bytes);
        answered.inspect_err(|_| self.main.cut())
    }

    /// Reads channel `id` into `pages` until it ends, or need not be read on.
    ///
    /// # Errors
    /// What is wrong with the channel, and what `pages` returns.
    pub(crate) fn read_channel(
        &self,
        session: &Session<'_>,
        id: u8,
        blocks: &[RamBlockEntry],
        pages: &mut dyn PageSink,
    ) -> Result<(), MigrationError> {
        let limits = ChannelLimits {
            memory: &session.memory,
            cpu: &session.cpu,
            stats: session.control.accelerator_stats(),
            life: session.control.life(),
        };
        let counters = &session.received[usize::from(id)];
        let rules = ChannelRules {
            id,
            layout: self.layout,
            methods: self.methods,
            checksum_required: self.is_hotlift(),
            accelerator: session.accelerator,
        };
        let channel = &self.multifd[usize::from(id)];
        let load = self.by_packet.then_some(&self.load);
        MultifdReceiver::new(rules, channel, blocks, limits, load, counters)?.run(pages)
    }

    /// Closes the multifd channels in both directions.
    pub(crate) fn shut_channels(&self) {
        for channel in &self.multifd {
            channel.shutdown(Shutdown::Both);
        }
    }
}
