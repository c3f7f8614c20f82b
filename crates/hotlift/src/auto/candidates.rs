//! Encodings of a packet: each is a method with a level.

use hotlift_methods::{Accelerator, METHODS, MethodInfo};
use hotlift_wire::multifd::Method;

/// An encoding that method `auto` may select: a method and its level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub method: Method,
    /// Compression level; 0 if the method has no levels, or for its default level.
    pub level: i8,
}

/// Program that reads the channels at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reader {
    /// A Hotlift, which reads any method in each packet.
    Hotlift,
    /// A QEMU, which reads one method.
    Qemu(Method),
}

/// Estimated cost of a candidate, used until this migration has measured the candidate. Origin: nine files of the Silesia
/// corpus, in packets of 512 KiB, on an AMD EPYC.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CostEstimate {
    /// Source's CPU time in ns to encode a byte. First value: incompressible content. Second value: content that lz4 compresses
    /// to 40 % of its size.
    encode: [f64; 2],
    /// Destination's CPU time in ns to decode a byte.
    pub decode: f64,
    /// Exponent: if lz4 compresses content to the fraction `s` of its size, this candidate compresses it to `s` to this power.
    power: f64,
}

impl CostEstimate {
    /// Returns the CPU time in ns to encode a byte. `left` is the compressed size with lz4, as a fraction of the original size.
    /// The time grows with `left`. Above 0.75 it approaches the time for incompressible content, which codecs abort early.
    pub(crate) fn encode(&self, left: f64) -> f64 {
        const ABORT_SHARE: f64 = 0.75;
        let [hopeless, usual] = self.encode;
        let search = |left: f64| usual * (0.5 + 1.25 * left);
        if left <= ABORT_SHARE {
            return search(left);
        }
        let beyond = ((left - ABORT_SHARE) / (1.0 - ABORT_SHARE)).min(1.0);
        search(ABORT_SHARE) + (hopeless - search(ABORT_SHARE)) * beyond
    }

    /// Returns this candidate's compressed size, as a fraction of the original size. `left` is the same fraction with lz4.
    pub(crate) fn left(&self, left: f64) -> f64 {
        left.clamp(0.01, 1.0).powf(self.power)
    }
}

const fn guess(encode: [f64; 2], decode: f64, power: f64) -> CostEstimate {
    CostEstimate {
        encode,
        decode,
        power,
    }
}

const fn zstd(level: i8) -> Candidate {
    Candidate {
        method: Method::Zstd,
        level,
    }
}

const fn zlib(level: i8) -> Candidate {
    Candidate {
        method: Method::Zlib,
        level,
    }
}

const fn device(method: Method) -> Candidate {
    Candidate { method, level: 0 }
}

/// The candidate that sends pages uncompressed.
pub(crate) const RAW: Candidate = Candidate {
    method: Method::None,
    level: 0,
};

const LZ4: Candidate = Candidate {
    method: Method::Lz4,
    level: 0,
};

/// All candidates with their estimates. Levels of zstd that are not listed cost and save about as much as a neighbour in the
/// list. Above level 9, each level takes twice the time of the previous level and saves 1 % of the bytes.
const TABLE: [(Candidate, CostEstimate); 18] = [
    (RAW, guess([0.0, 0.0], 0.3, 0.0)),
    (LZ4, guess([0.3, 2.0], 0.4, 1.0)),
    (zstd(-7), guess([0.3, 2.4], 0.8, 1.12)),
    (zstd(-4), guess([0.4, 2.7], 0.9, 1.27)),
    (zstd(-1), guess([0.5, 3.1], 1.0, 1.44)),
    (zstd(1), guess([1.0, 3.3], 1.2, 1.63)),
    (zstd(2), guess([1.5, 3.9], 1.3, 1.68)),
    (zstd(3), guess([3.0, 4.7], 1.4, 1.73)),
    (zstd(5), guess([8.0, 11.0], 1.5, 1.78)),
    (zstd(7), guess([12.0, 17.7], 1.5, 1.82)),
    (zstd(9), guess([15.0, 21.2], 1.5, 1.84)),
    // ISA-L encodes level 1. zlib-rs encodes the others at several times the cost of level 1: levels 2 and 3 are left out.
    (zlib(1), guess([3.0, 3.4], 2.1, 1.55)),
    (zlib(4), guess([10.0, 12.5], 1.9, 1.66)),
    (zlib(6), guess([14.0, 18.0], 1.9, 1.70)),
    (zlib(9), guess([20.0, 45.0], 1.9, 1.72)),
    // The time of a device is unknown in advance. The estimate is that of lz4, so the controller tries the device.
    (device(Method::Qpl), guess([1.0, 2.0], 1.7, 1.2)),
    (device(Method::Uadk), guess([1.0, 2.0], 1.7, 1.2)),
    (device(Method::Qatzip), guess([1.0, 2.0], 1.7, 1.5)),
];

impl Candidate {
    /// Returns the candidates that `reader` can decode.
    pub(crate) fn all_for(reader: Reader, accelerator: Accelerator) -> Vec<Self> {
        match reader {
            Reader::Hotlift => Self::of_hotlifts(accelerator),
            Reader::Qemu(Method::None) => vec![RAW],
            Reader::Qemu(method) => {
                let all = TABLE.iter().map(|(one, _)| *one);
                all.filter(|one| one.method == method).collect()
            }
        }
    }

    /// Returns the candidates between two Hotlifts: the methods of the CPU, and each available and permitted accelerator.
    ///
    /// Excludes two kinds of candidates:
    ///
    /// - zstd's levels below 1: they are best for no class of content. Per ns of CPU time at both ends, level 1 saves at least
    ///   as many bytes as lz4. Trying the lower levels took 5 % of the time at 2.5 Gbit/s.
    /// - zlib: zstd leaves fewer bytes in less time.
    pub(crate) fn of_hotlifts(accelerator: Accelerator) -> Vec<Self> {
        let all = TABLE.iter().map(|(one, _)| *one);
        all.filter(|one| match one.on_a_device() {
            Some(method) => accelerator.probe(method.name).is_ok(),
            None => one.level >= 0 && one.method != Method::Zlib,
        })
        .collect()
    }

    /// Returns the candidate's method if an accelerator encodes it; `None` if the CPU does.
    fn on_a_device(&self) -> Option<&'static MethodInfo> {
        let info = METHODS.iter().find(|info| info.flag == self.method.flag());
        info.filter(|info| info.hardware.is_some())
    }

    /// Returns true if an accelerator encodes the candidate.
    pub(crate) fn is_on_a_device(&self) -> bool {
        self.on_a_device().is_some()
    }

    /// Returns the estimated cost of the candidate.
    pub(crate) fn guess(&self) -> CostEstimate {
        let row = TABLE.iter().find(|(one, _)| one == self);
        row.map_or(TABLE[0].1, |(_, guess)| *guess)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qemu_gets_its_one_method_and_a_hotlift_no_zlib() {
        let of = |reader| Candidate::all_for(reader, Accelerator::Off);
        assert_eq!(of(Reader::Qemu(Method::None)), [RAW]);
        for method in [Method::Zlib, Method::Zstd] {
            let all = of(Reader::Qemu(method));
            assert!(
                all.len() > 3 && all.iter().all(|one| one.method == method),
                "{all:?}"
            );
        }
        let all = of(Reader::Hotlift);
        assert!(all.contains(&RAW) && all.contains(&LZ4) && all.contains(&zstd(1)));
        assert!(
            all.iter()
                .all(|one| one.method != Method::Zlib && one.level >= 0)
        );
    }
}
