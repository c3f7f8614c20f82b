//! Connections from a source on another host, and the answers to that source.

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
use crate::stream::graceful_close;
use crate::stream::load::ReceiverLoad;
use crate::stream::multifd_recv::{
    ChannelLimits, ChannelRules, Methods, MultifdReceiver, PageSink,
};

/// Main channel and multifd channels from a source.
pub(crate) struct StreamIn {
    pub main: Stream,
    /// Multifd channels, in the order of their ids.
    pub multifd: Vec<Stream>,
    /// Layout of the source's packets.
    pub layout: PacketLayout,
    methods: Methods,
    /// True if the method can differ between packets. Such a source needs load reports.
    by_packet: bool,
    load: ReceiverLoad,
    /// True if the source is a Hotlift: a relay, or a guest in a Hotlift.
    is_hotlift: AtomicBool,
    /// Lock for writing an answer: several threads send answers.
    answering: Mutex<()>,
}

impl StreamIn {
    /// Creates the connections from a source. `hello` is the source's identification as a Hotlift on its channels, if it has
    /// sent one. `methods` are the methods of its packets.
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

    /// Returns true if the source is a Hotlift.
    pub(crate) fn is_hotlift(&self) -> bool {
        self.is_hotlift.load(Ordering::Acquire)
    }

    /// Records that the source is a Hotlift. Needed for a source without multifd channels, which identifies itself later.
    pub(crate) fn set_is_hotlift(&self) {
        self.is_hotlift.store(true, Ordering::Release);
    }

    /// Iterates over all connections, the main channel first.
    pub(crate) fn streams(&self) -> impl Iterator<Item = &Stream> {
        std::iter::once(&self.main).chain(&self.multifd)
    }

    /// Sends `bytes` to the source on main. `bytes` must be complete return path messages.
    pub(crate) fn answer(&self, bytes: &[u8]) -> io::Result<()> {
        let _one = lock(&self.answering);
        (&self.main).write_all(bytes)
    }

    /// Sends `bytes` like [`StreamIn::answer`]. On an error, closes main, because no message can follow a partial message.
    pub(crate) fn answer_or_cut(&self, bytes: &[u8]) -> io::Result<()> {
        let _one = lock(&self.answering);
        let answered = (&self.main).write_all(bytes);
        answered.inspect_err(|_| self.main.cut())
    }

    /// Reads channel `id` until it ends. Calls `pages` with the packets; `pages` can stop the read.
    ///
    /// # Errors
    /// An error of the channel, or the error that `pages` returned.
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

    /// Returns true if the multifd channels of a failed migration must stay open until the source closes them (see
    /// [`graceful_close::leave_qemu`]). Applies only to a QEMU as the source, before postcopy.
    fn keeps_channels(&self, session: &Session<'_>) -> bool {
        let has_failed = session.source_handover.failure.is_set();
        has_failed && !self.is_hotlift() && !session.is_switched() && !self.multifd.is_empty()
    }

    /// After a failure, closes the multifd channels, which ends their readers' waits. If the source must close them first,
    /// [`StreamIn::leave`] ends the waits instead.
    pub(crate) fn free_readers(&self, session: &Session<'_>) {
        if !self.keeps_channels(session) {
            self.shut_channels();
        }
    }

    /// After a failed migration, waits until a QEMU has closed its channels. The caller must close all connections next.
    pub(crate) fn leave(&self, session: &Session<'_>) {
        if self.keeps_channels(session) {
            graceful_close::leave_qemu(&self.main, &self.multifd);
        }
    }

    pub(crate) fn shut_channels(&self) {
        for channel in &self.multifd {
            channel.shutdown(Shutdown::Both);
        }
    }
}
