//! Pages of a guest that already runs at the destination.
//!
//! A QEMU accepts these pages only as uncompressed records of main. A relay accepts requested pages on main, and background
//! pages in compressed packets of the channels, as in precopy.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hotlift_mem::PAGE_SIZE;
use hotlift_mem::zero::is_zero;
use hotlift_wire::handshake::{Features, PREEMPT};
use hotlift_wire::main_channel::{Command, put_packaged_head};

use crate::ends::stream_sink::host_pages::HostPages;
use crate::ends::stream_sink::page_writers::records;
use crate::ends::stream_sink::{READY, StreamSink};
use crate::error::MigrationError;
use crate::pipe::batch::{BATCH_PAGES, Batch};
use crate::pipe::sink::{Postcopy, WritePages};
use crate::postcopy::OutputPath;
use crate::stream::main_send::PageRecords;
use crate::stream::multifd_send::connect_with;
use crate::stream::preempt::PreemptOut;

/// Number of pages in one background write, 64 KiB. A page that the guest waits for is delayed by at most one such write.
const TURN: usize = 16;

impl StreamSink<'_> {
    /// Returns true once postcopy has begun.
    pub(super) fn is_switched(&self) -> bool {
        self.switched.load(Ordering::Acquire)
    }

    /// Returns the collector for this RAM block, if the peer needs complete host pages. Returns `None` for a relay, which
    /// accepts pages in any order, and for a block without huge pages.
    fn gathers(&self, block: usize) -> Option<&HostPages> {
        let are_gathered = !self.is_hotlift() && self.host_pages.are_huge(block);
        are_gathered.then_some(&self.host_pages)
    }

    /// Sends pages that the guest waits for.
    fn put_urgently(&self, pages: PageRecords<'_>) -> Result<(), MigrationError> {
        let alone = match self.preempt.get() {
            Some(channel) if channel.is_taken()? => Some(channel),
            _ => None,
        };
        OutputPath::urgent(&self.out.main, alone).send(self.block_name(pages.block), pages)
    }

    /// Returns true if all pages are records of main, which are in order.
    pub(super) fn pages_on_main(&self) -> bool {
        self.out.multifd.is_empty() || (self.is_switched() && !self.is_hotlift())
    }
}

impl Postcopy for StreamSink<'_> {
    fn await_ready(&self) -> Result<(), MigrationError> {
        self.asked_whether_loaded.store(true, Ordering::Release);
        self.ping()?;
        self.await_answer(self.settings.limits.handshake_timeout, READY)
    }

    fn guest_may_run(&self) {
        self.asked_whether_loaded.store(false, Ordering::Release);
    }

    fn begin(&self) {
        self.switched.store(true, Ordering::Release);
    }

    fn preempt(&self) -> Result<(), MigrationError> {
        if self.is_hotlift() {
            return self.lock_main().command(Command::Ping(PREEMPT));
        }
        let timeout = self.settings.limits.handshake_timeout;
        let pass = self.settings.outgoing_pass.as_ref();
        let stream = connect_with(pass, &self.out.to, timeout, &self.control.dialing())?;
        let counters = Arc::clone(&self.out.link.counters);
        let _ = self.preempt.set(PreemptOut::new(stream, counters));
        Ok(())
    }

    fn has_separate_connection(&self) -> bool {
        self.preempt.get().is_some() || !self.pages_on_main()
    }

    fn raw(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        self.lock_main().raw(bytes)
    }

    fn begin_package(&self, length: u32) -> Result<(), MigrationError> {
        let mut head = Vec::new();
        put_packaged_head(length.into(), &mut head).map_err(MigrationError::main_wire)?;
        self.lock_main().raw(&head)
    }

    fn end_package(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        {
            let mut main = self.lock_main();
            main.raw(bytes)?;
            // The checksum must be sent before the guest runs, and this is the last place for it.
            if self.out.answers.takes(Features::PACKAGE_CHECKED)
                && let Some(value) = main.crc()
            {
                main.command(Command::Ping(value))?;
            }
        }
        // The channels are other sockets: background pages on them must not overtake the package.
        match self.pages_on_main() {
            true => Ok(()),
            false => self.sync_point(),
        }
    }

    fn page(
        &self,
        block: usize,
        offset: u64,
        content: Option<&[u8; PAGE_SIZE]>,
    ) -> Result<(), MigrationError> {
        let content = content.filter(|page| !is_zero(*page));
        if let Some(host_pages) = self.gathers(block) {
            let whole = host_pages.add(block, offset, content)?;
            return whole.map_or(Ok(()), |whole| self.put_urgently(whole.pages()));
        }
        let (zero, normal): (&[_], &[_]) = match content {
            Some(_) => (&[], &[offset]),
            None => (&[offset], &[]),
        };
        self.put_urgently(PageRecords {
            block,
            zero,
            normal,
            content: content.map_or(&[], |page| page),
        })
    }
}

/// Writer of batches. Until the switch to postcopy it uses the previous writer, then the form that the peer accepts in
/// postcopy.
pub(super) struct Background<'s, 'a> {
    sink: &'s StreamSink<'a>,
    before: Box<dyn WritePages + 's>,
}

impl<'s, 'a> Background<'s, 'a> {
    pub(super) fn new(sink: &'s StreamSink<'a>, before: Box<dyn WritePages + 's>) -> Self {
        Self { sink, before }
    }
}

impl Background<'_, '_> {
    /// Writes pages to main. Waits for the bandwidth limit before main is locked, because an urgent page would have to wait
    /// too.
    fn put(&self, pages: PageRecords<'_>) -> Result<(), MigrationError> {
        let link = &self.sink.out.link;
        link.pacer.wait(pages.content.len(), &link.life);
        self.sink.out.main.take_after_urgent().pages_at_once(pages)
    }
}

impl WritePages for Background<'_, '_> {
    fn write(&mut self, batch: &mut Batch) -> Result<(), MigrationError> {
        if !self.sink.is_switched() || !self.sink.pages_on_main() {
            return self.before.write(batch);
        }
        if self.sink.detects_zeros() {
            batch.find_zero_pages();
        }
        let block = batch.block;
        if let Some(host_pages) = self.sink.gathers(block) {
            for (offset, content) in records(batch).each() {
                if let Some(whole) = host_pages.add(block, offset, content)? {
                    self.put(whole.pages())?;
                }
            }
            return Ok(());
        }
        for zero in batch.zero.chunks(BATCH_PAGES) {
            self.put(PageRecords {
                block,
                zero,
                normal: &[],
                content: &[],
            })?;
        }
        let contents = batch.pages().chunks(TURN * PAGE_SIZE);
        for (normal, content) in batch.normal.chunks(TURN).zip(contents) {
            self.put(PageRecords {
                block,
                zero: &[],
                normal,
                content,
            })?;
        }
        Ok(())
    }
}
