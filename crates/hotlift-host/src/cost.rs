//! What work takes: seconds of a core for a GiB.

use serde::{Deserialize, Serialize};

/// Bytes of a GiB, the unit of all costs.
pub const GIB: f64 = (1_u64 << 30) as f64;

/// What one side of a method takes of a GiB of pages with content.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// Seconds of a core.
    pub cpu: f64,
    /// Seconds that the thread is held up: `cpu`, and waiting for a device.
    pub thread: f64,
}

impl Work {
    /// None.
    pub const NOTHING: Self = Self {
        cpu: 0.0,
        thread: 0.0,
    };

    /// Work of a core.
    pub fn of(seconds: f64) -> Self {
        Self {
            cpu: seconds,
            thread: seconds,
        }
    }

    /// Both, one after the other in one thread.
    pub fn then(self, other: Self) -> Self {
        Self {
            cpu: self.cpu + other.cpu,
            thread: self.thread + other.thread,
        }
    }

    /// Both, in threads of their own.
    pub fn beside(self, other: Self) -> Self {
        Self {
            cpu: self.cpu + other.cpu,
            thread: self.thread.max(other.thread),
        }
    }

    /// So many times.
    pub fn times(self, factor: f64) -> Self {
        Self {
            cpu: self.cpu * factor,
            thread: self.thread * factor,
        }
    }
}

/// What a method at a level makes of pages.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Codec {
    /// Encoding, with the private copy of the pages.
    pub encode: Work,
    /// Decoding into memory that exists.
    pub decode: Work,
    /// Bytes of the pages over bytes of the payload.
    pub ratio: f64,
}

impl Codec {
    /// Pages as they are.
    pub const NONE: Self = Self {
        encode: Work::NOTHING,
        decode: Work::NOTHING,
        ratio: 1.0,
    };

    /// As if threads never waited.
    pub fn by_cpu_alone(self) -> Self {
        Self {
            encode: Work::of(self.encode.cpu),
            decode: Work::of(self.decode.cpu),
            ..self
        }
    }
}

/// A method at a level, as measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Costs {
    /// It sends pages without a copy of its own; relays pass them on by reference.
    pub as_they_are: bool,
    /// Of the sample's pages with content.
    pub content: Codec,
    /// Of zero pages that nobody looks for.
    pub zeros: Codec,
}

/// The way of a GiB from QEMU to QEMU through two relays, in seconds of a core. What QEMU's own code takes beyond its
/// sockets is not measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Relays {
    /// QEMU sends to the relay of its host.
    pub send: f64,
    /// That relay passes on by reference.
    pub near: f64,
    /// So does the other.
    pub far: f64,
    /// QEMU receives from it, into memory that exists.
    pub receive: f64,
}
