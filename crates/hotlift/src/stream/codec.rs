//! Encoder and decoder of a multifd channel. Their errors name the channel, packet and RAM block.

use std::sync::Arc;

use hotlift_mem::{GuestRun, PAGE_SIZE};
use hotlift_methods::{
    Accelerator, Decode, Encode, EncoderSettings, Jobs, METHODS, MemoryLimit, MethodError,
    MethodInfo, RunsOn,
};
use hotlift_wire::multifd::Method;

use crate::accelerator_stats::{AcceleratorStats, ChannelStats};
use crate::error::{Channel, MigrationError};
use crate::options::StreamOptions;

/// Encoder of a channel with one method.
pub(crate) struct Encoder {
    encoder: Box<dyn Encode>,
    side: Side,
}

/// Encoders or decoders of one channel, by method. Each is created on first use.
pub(crate) struct ByMethod<C> {
    id: u8,
    made: Vec<(Method, C)>,
}

impl<C> ByMethod<C> {
    /// Creates the empty set of encoders or decoders of channel `id`.
    pub(crate) fn new(id: u8) -> Self {
        Self {
            id,
            made: Vec::new(),
        }
    }

    /// Returns the encoder or decoder of `method`. Calls `make` on the first use of the method.
    ///
    /// # Errors
    /// [`MigrationError::Protocol`] if this build does not support the method. Otherwise the error of `make`.
    pub(crate) fn get(
        &mut self,
        method: Method,
        make: impl FnOnce(&'static MethodInfo) -> Result<C, MigrationError>,
    ) -> Result<&mut C, MigrationError> {
        let index = match self.made.iter().position(|(one, _)| *one == method) {
            Some(index) => index,
            None => {
                let info = METHODS.iter().find(|info| info.flag == method.flag());
                let info = info.ok_or_else(|| MigrationError::Protocol {
                    channel: Channel::Multifd(self.id),
                    got: format!("method {}", method.name()),
                    doing: "encoding pages (this build does not have it)",
                })?;
                self.made.push((method, make(info)?));
                self.made.len() - 1
            }
        };
        Ok(&mut self.made[index].1)
    }

    /// Returns true if the encoder or decoder of `method` was already created.
    pub(crate) fn has(&self, method: Method) -> bool {
        self.made.iter().any(|(one, _)| *one == method)
    }

    /// Drops the encoder or decoder of `method`. The next use creates a new one.
    pub(crate) fn drop(&mut self, method: Method) {
        self.made.retain(|(one, _)| *one != method);
    }
}

/// Decoder of a channel with one method.
pub(crate) struct Decoder {
    decoder: Box<dyn Decode>,
    side: Side,
}

struct Side {
    id: u8,
    all: Arc<AcceleratorStats>,
    own: ChannelStats,
}

impl Encoder {
    /// Creates the encoder of channel `id`. Returns `None` for method none, whose pages are sent uncompressed.
    pub(crate) fn new(
        id: u8,
        options: &StreamOptions,
        to_hotlift: bool,
        stats: &Arc<AcceleratorStats>,
    ) -> Result<Option<Self>, MigrationError> {
        let method = options.multifd_compression;
        if method.flag == 0 {
            return Ok(None);
        }
        let settings = options.encoder_settings(to_hotlift);
        Self::of(method, id, &settings, stats).map(Some)
    }

    /// Creates the encoder of channel `id` for `method`.
    pub(crate) fn of(
        method: &MethodInfo,
        id: u8,
        settings: &EncoderSettings,
        stats: &Arc<AcceleratorStats>,
    ) -> Result<Self, MigrationError> {
        let mut side = Side::new(id, stats);
        let encoder = (method.encoder)(settings).map_err(|source| side.not_made(source))?;
        side.report(encoder.jobs(), encoder.runs_on());
        Ok(Self { encoder, side })
    }

    /// Makes each later packet decodable without earlier packets. Encodes and discards the header, which only a channel's first
    /// packet contains. A [`Decoder`] must call [`Decoder::read_header`] in its place. `level` is the compression level of the
    /// settings.
    pub(crate) fn write_alone(&mut self, level: u8) -> Result<(), MigrationError> {
        // zstd keeps a frame open across packets from level 4 on. Setting the level ends this frame.
        self.set_level(i8::try_from(level).unwrap_or(i8::MAX), 0, "")?;
        self.encode(0, "", &[0; PAGE_SIZE], &mut Vec::new())
    }

    /// Sets the compression level from packet `number` on.
    pub(crate) fn set_level(
        &mut self,
        level: i8,
        number: u64,
        block: &str,
    ) -> Result<(), MigrationError> {
        let set = self.encoder.set_level(level);
        set.map_err(|source| self.side.failed(number, block, source))
    }

    /// Compresses the pages of packet `number` into `out`. Replaces the content of `out`.
    pub(crate) fn encode(
        &mut self,
        number: u64,
        block: &str,
        pages: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), MigrationError> {
        let done = self.encoder.encode(pages, out);
        self.side
            .report(self.encoder.jobs(), self.encoder.runs_on());
        done.map_err(|source| self.side.failed(number, block, source))
    }
}

impl Decoder {
    /// Creates the decoder of channel `id` for `method`. Its payloads use at most `memory`.
    pub(crate) fn of(
        method: &MethodInfo,
        id: u8,
        accelerator: Accelerator,
        memory: &MemoryLimit,
        stats: &Arc<AcceleratorStats>,
    ) -> Result<Self, MigrationError> {
        let mut side = Side::new(id, stats);
        let mut decoder = (method.decoder)(accelerator).map_err(|source| side.not_made(source))?;
        decoder.limit_memory(memory);
        side.report(decoder.jobs(), decoder.runs_on());
        Ok(Self { decoder, side })
    }

    /// Prepares the decoder for packets of an encoder that has called [`Encoder::write_alone`]. Decodes a header that a local
    /// encoder creates, because the header is the same for every encoder of the method.
    pub(crate) fn read_header(&mut self, method: &MethodInfo) -> Result<(), MigrationError> {
        let settings = EncoderSettings::software(method.default_level);
        let mut packet = Vec::new();
        let encoded = (method.encoder)(&settings)
            .and_then(|mut encoder| encoder.encode(&[0; PAGE_SIZE], &mut packet));
        encoded.map_err(|source| self.side.not_made(source))?;
        let mut page = [0; PAGE_SIZE];
        self.decode(0, "", &packet, &[GuestRun::of_buffer(&mut page)])
    }

    /// Decompresses the payload of packet `number` into guest memory `pages`.
    pub(crate) fn decode(
        &mut self,
        number: u64,
        block: &str,
        payload: &[u8],
        pages: &[GuestRun<'_>],
    ) -> Result<(), MigrationError> {
        let done = self.decoder.decode(payload, pages);
        self.side
            .report(self.decoder.jobs(), self.decoder.runs_on());
        done.map_err(|source| self.side.failed(number, block, source))
    }
}

impl Side {
    fn new(id: u8, stats: &Arc<AcceleratorStats>) -> Self {
        Self {
            id,
            all: Arc::clone(stats),
            own: ChannelStats::default(),
        }
    }

    fn report(&mut self, jobs: Jobs, runs_on: RunsOn) {
        self.own.report(&self.all, jobs, runs_on);
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
