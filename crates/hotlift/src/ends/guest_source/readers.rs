//! Work of the threads of an outgoing migration on its guest.

use std::time::{Duration, Instant};

use hotlift_wire::return_path::ReturnMessage;

use crate::ends::guest_source::channel::ChannelSender;
use crate::ends::guest_source::source::GuestSource;
use crate::error::{Channel, MigrationError};
use crate::lock::lock;
use crate::pipe::session::Session;
use crate::pipe::source::Source;
use crate::status::Status;

/// Interval between two samples of the sent bytes while the guest is paused.
const STANDSTILL_SAMPLE: Duration = Duration::from_millis(100);

impl GuestSource<'_> {
    /// Returns the id of the channel that thread `number` sends; `None` for the thread that polls devices.
    fn channel(&self, number: usize) -> Option<u8> {
        let id = u8::try_from(number).ok()?;
        (number < self.out.multifd.len()).then_some(id)
    }
}

impl Source for GuestSource<'_> {
    fn readers(&self) -> usize {
        self.out.multifd.len() + usize::from(self.zero_devices.is_some())
    }

    fn thread_name(&self, reader: usize) -> String {
        match self.channel(reader) {
            Some(id) => self.name(&format!("send_{id}")),
            // The name in QEMU's patch series.
            None => "dsa_completion".to_owned(),
        }
    }

    fn name(&self, thread: &str) -> String {
        format!("mig/src/{thread}")
    }

    fn worker_name(&self, worker: usize) -> String {
        format!("compress_{worker}")
    }

    fn read(&self, _: &Session<'_>, reader: usize) -> Result<(), MigrationError> {
        match (self.channel(reader), &self.zero_devices) {
            (Some(id), _) => ChannelSender::new(self, id)?.run()?,
            (None, Some(devices)) => devices.finder.listen(),
            (None, None) => {}
        }
        Ok(())
    }

    fn answer(
        &self,
        session: &Session<'_>,
        channel: Channel,
        message: &ReturnMessage<'_>,
        _: &[u8],
    ) -> Result<(), MigrationError> {
        if let (Channel::Main, Some(ledger)) = (channel, self.ledger.get()) {
            ledger.record(&mut lock(&self.asked_block), message, Instant::now())?;
        }
        if session.source_handover.is_committed() {
            // The destination's statement may follow this message.
            return Ok(());
        }
        Err(match (message, self.out.answers.next_pong()) {
            (ReturnMessage::Pong(pong), Some(ping)) => MigrationError::Mismatch {
                what: "the value of PING and PONG".to_owned(),
                source_has: format!("{ping:#x}"),
                destination_has: format!("{pong:#x}"),
            },
            (other, _) => MigrationError::Protocol {
                channel,
                got: format!("{other:?}"),
                doing: "a precopy migration",
            },
        })
    }

    fn lost(&self, session: &Session<'_>, channel: Channel, error: MigrationError) {
        match self.ledger.get() {
            // Requests arrive only on main.
            Some(_) if channel == Channel::Main => self.lose(session, error),
            // Before the commit, this is a failure. After it, the destination's statement may still arrive on another
            // connection.
            _ => session.fail(error),
        }
    }

    /// Detects a stall that no other thread can end: while the guest is paused, a write is blocked because the destination
    /// reads nothing.
    fn poll(&self, session: &Session<'_>, now: Instant) -> Option<Instant> {
        if !self.is_guest_stopped() {
            return None;
        }
        let transferred = self.out.counts().transferred_bytes;
        let mut last_progress = lock(&self.last_progress);
        if transferred != last_progress.0 || self.control.status() != Status::Device {
            *last_progress = (transferred, now);
        }
        let limit = self.options.limits.handshake_timeout;
        if now.saturating_duration_since(last_progress.1) > limit {
            session.fail(MigrationError::Timeout {
                waiting_for: "progress while the guest is paused".to_owned(),
                waited: limit,
            });
        }
        Some(now + STANDSTILL_SAMPLE)
    }

    fn over(&self, _: &Session<'_>) {
        self.shut_down();
    }

    fn shut_down(&self) {
        self.rounds.end();
        // Wakes threads that wait for a chunk: they then see that the migration has ended.
        self.ram.release_all();
        if let Some(devices) = &self.zero_devices {
            devices.finder.close();
        }
    }
}
