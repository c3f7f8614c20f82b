//! A multifd channel's half of its method, with the names that its errors carry.

use hotlift_mem::GuestRun;
use hotlift_methods::{
    Accelerator, Decode, Encode, Jobs, MemoryLimit, MethodError, MethodInfo, RunsOn,
};

use crate::accelerator_stats::ChannelStats;
use crate::control::Control;
use crate::error::{Channel, MigrationError};
use crate::options::Options;

/// The sending half.
pub(crate) struct Encoder {
    encoder: Box<dyn Encode>,
    side: Side,
}

/// The receiving half.
pub(crate) struct Decoder {
    decoder: Box<dyn Decode>,
    side: Side,
}

struct Side {
    id: u8,
    control: Control,
    stats: ChannelStats,
}

impl Encoder {
    /// The half of channel `id`; `None` for method none, whose pages are sent as they are.
    pub(crate) fn new(
        id: u8,
        options: &Options,
        to_hotlift: bool,
        control: &Control,
    ) -> Result<Option<Self>, MigrationError> {
        let method = options.multifd_compression;
        if method.flag == 0 {
            return Ok(None);
        }
        let mut side = Side::new(id, control);
        let encoder = (method.encoder)(&options.encoder_settings(to_hotlift))
            .map_err(|source| side.not_made(source))?;
        side.tell(encoder.jobs(), encoder.runs_on());
        Ok(Some(Self { encoder, side }))
    }

    /// Compresses the pages of packet `number` to `out`, in place of what that holds.
    pub(crate) fn encode(
        &mut self,
        number: u64,
        block: &str,
        pages: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), MigrationError> {
        let done = self.encoder.encode(pages, out);
        self.side.tell(self.encoder.jobs(), self.encoder.runs_on());
        done.map_err(|source| self.side.failed(number, block, source))
    }
}

impl Decoder {
    /// The half of channel `id`, whose payloads take no more than `memory` has; `None` for method none.
    pub(crate) fn new(
        id: u8,
        method: &MethodInfo,
        accelerator: Accelerator,
        memory: &MemoryLimit,
        control: &Control,
    ) -> Result<Option<Self>, MigrationError> {
        if method.flag == 0 {
            return Ok(None);
        }
        let mut side = Side::new(id, control);
        let mut decoder = (method.decoder)(accelerator).map_err(|source| side.not_made(source))?;
        decoder.limit_memory(memory);
        side.tell(decoder.jobs(), decoder.runs_on());
        Ok(Some(Self { decoder, side }))
    }

    /// Decompresses the payload of packet `number` into `pages`.
    pub(crate) fn decode(
        &mut self,
        number: u64,
        block: &str,
        payload: &[u8],
        pages: &[GuestRun<'_>],
    ) -> Result<(), MigrationError> {
        let done = self.decoder.decode(payload, pages);
        self.side.tell(self.decoder.jobs(), self.decoder.runs_on());
        done.map_err(|source| self.side.failed(number, block, source))
    }
}

impl Side {
    fn new(id: u8, control: &Control) -> Self {
        Self {
            id,
            control: control.clone(),
            stats: ChannelStats::default(),
        }
    }

    fn tell(&mut self, jobs: Jobs, runs_on: RunsOn) {
        self.stats
            .tell(self.control.accelerator_stats(), jobs, runs_on);
    }

    fn not_made(&self, source: MethodError) -> MigrationError {
        MigrationError::MethodSetup {
            channel: Channel::Multifd(self.id),
            source,
        }
    }

    fn failed(&self, packet: u64, block: &str, source: MethodError) -> MigrationError {
        MigrationError::Method {
            channel: Channel::Multifd(self.id),
            packet,
            block: block.to_owned(),
            source,
        }
    }
}
