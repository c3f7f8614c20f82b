//! What a packet can be sent as.

use hotlift_wire::multifd::Method;

/// A method, and its level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub method: Method,
    /// 0 for a method without levels.
    pub level: i8,
}

/// What a candidate may cost, until this migration knows. Orders of magnitude of nine Silesia files in packets of
/// 512 KiB on cores of about 2.5 GHz; measured figures take their place after the first packets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Guess {
    /// CPU time to encode a byte that does not shrink at all, and one of content that shrinks to half, in ns.
    encode: [f64; 2],
    /// CPU time of the destination for a byte, in ns.
    pub decode: f64,
    /// Of content that a fast codec leaves `s` of, this one leaves `s` to this power.
    power: f64,
}

impl Guess {
    /// CPU time to encode a byte of content of which a fast codec leaves that share, in ns.
    pub(crate) fn encode(&self, left: f64) -> f64 {
        let [hopeless, usual] = self.encode;
        hopeless + (usual - hopeless) * ((1.0 - left) * 2.0).min(1.0)
    }

    /// The share that this one leaves.
    pub(crate) fn left(&self, left: f64) -> f64 {
        left.clamp(0.01, 1.0).powf(self.power)
    }
}

const fn guess(encode: [f64; 2], decode: f64, power: f64) -> Guess {
    Guess {
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

/// Pages as they are.
pub(crate) const RAW: Candidate = Candidate {
    method: Method::None,
    level: 0,
};

const LZ4: Candidate = Candidate {
    method: Method::Lz4,
    level: 0,
};

/// All candidates, and the guess of each. zstd's levels between those here cost and save what their neighbours do; above 9
/// each takes twice the time of the one before for 1 % of the bytes.
const TABLE: [(Candidate, Guess); 11] = [
    (RAW, guess([0.0, 0.0], 0.3, 0.0)),
    (LZ4, guess([0.1, 1.6], 0.5, 1.0)),
    (zstd(-7), guess([0.15, 1.9], 0.7, 1.05)),
    (zstd(-4), guess([0.15, 2.2], 0.8, 1.2)),
    (zstd(-1), guess([0.2, 2.6], 0.9, 1.38)),
    (zstd(1), guess([0.3, 3.3], 1.2, 1.62)),
    (zstd(2), guess([0.35, 4.2], 1.3, 1.68)),
    (zstd(3), guess([0.5, 6.5], 1.5, 1.76)),
    (zstd(5), guess([1.5, 13.0], 1.6, 1.85)),
    (zstd(7), guess([2.5, 20.0], 1.6, 1.9)),
    (zstd(9), guess([4.0, 33.0], 1.6, 1.95)),
];

impl Candidate {
    /// Between two Hotlifts: all of them.
    pub(crate) fn of_hotlifts() -> Vec<Self> {
        TABLE.iter().map(|(one, _)| *one).collect()
    }

    /// Towards who reads zstd alone.
    pub(crate) fn of_zstd() -> Vec<Self> {
        let mut all = Self::of_hotlifts();
        all.retain(|one| one.method == Method::Zstd);
        all
    }

    /// What it may cost.
    pub(crate) fn guess(&self) -> Guess {
        let row = TABLE.iter().find(|(one, _)| one == self);
        row.map_or(TABLE[0].1, |(_, guess)| *guess)
    }
}
