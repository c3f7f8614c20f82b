//! The list of all methods.

use std::ops::RangeInclusive;

use crate::{
    Accelerator, Decode, Encode, EncoderSettings, MethodError, lz4, none, qatzip, qpl, uadk, zlib,
    zstd,
};

/// Unit that an encoder compresses as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// All pages of a packet together.
    Packet,
    /// Each page separately.
    Page,
}

/// A page compression method.
#[derive(Debug)]
pub struct MethodInfo {
    /// Value of option `multifd-compression` that selects the method. QEMU has all methods except `lz4`.
    pub name: &'static str,
    /// Method bits in the flags of a multifd packet header (QEMU: `MULTIFD_FLAG_*`).
    pub flag: u32,
    /// Valid levels; `None` if the method has no levels.
    pub levels: Option<RangeInclusive<u8>>,
    /// Default level (QEMU's default); 0 for a method without levels.
    pub default_level: u8,
    /// Unit that the encoder compresses as a whole.
    pub unit: Unit,
    /// True if a channel's packets must all be decoded, and in order.
    pub stateful: bool,
    /// Device that serves the method, as in "Intel IAA"; `None` if no such device exists.
    pub hardware: Option<&'static str>,
    /// Other software that can send to Hotlift and receive from it by this method, as in "QEMU 4.0 and later".
    pub interoperates_with: &'static str,
    /// Creates a channel's encoder. A method without levels ignores the level.
    ///
    /// # Errors
    ///
    /// [`MethodError::Level`] for a level outside of `levels`; [`MethodError::Library`] if the library cannot be set up;
    /// [`MethodError::Unavailable`] if a required accelerator is missing.
    pub encoder: fn(&EncoderSettings) -> Result<Box<dyn Encode>, MethodError>,
    /// Creates a channel's decoder, which reads every level.
    ///
    /// # Errors
    ///
    /// [`MethodError::Library`] if the library cannot be set up; [`MethodError::Unavailable`] if a required accelerator is
    /// missing.
    pub decoder: fn(Accelerator) -> Result<Box<dyn Decode>, MethodError>,
    /// Returns name and version of the library in use.
    pub library: fn() -> String,
    /// One-line description for a list of methods.
    pub summary: &'static str,
}

impl MethodInfo {
    /// Returns true if this is [`AUTO`].
    #[must_use]
    pub fn is_auto(&self) -> bool {
        self.flag == AUTO.flag
    }
}

/// All methods, in the order of their flags.
pub static METHODS: &[MethodInfo] = &[
    MethodInfo {
        name: "none",
        flag: 0x00,
        levels: None,
        default_level: 0,
        unit: Unit::Page,
        stateful: false,
        hardware: None,
        interoperates_with: "QEMU 4.0 and later",
        encoder: none::encoder,
        decoder: none::decoder,
        library: || "none".to_owned(),
        summary: "uncompressed pages; the least CPU, the most bytes",
    },
    MethodInfo {
        name: "zlib",
        flag: 0x02,
        levels: Some(zlib::LEVELS),
        default_level: 1,
        unit: Unit::Packet,
        stateful: true,
        hardware: None,
        interoperates_with: "QEMU 5.0 and later",
        encoder: zlib::encoder,
        decoder: zlib::decoder,
        library: zlib::library,
        summary: "one zlib stream per channel, flushed after each packet",
    },
    MethodInfo {
        name: "zstd",
        flag: 0x04,
        levels: Some(zstd::LEVELS),
        default_level: 1,
        unit: Unit::Packet,
        stateful: true,
        hardware: None,
        interoperates_with: "QEMU 5.0 and later, if built with libzstd",
        encoder: zstd::encoder,
        decoder: zstd::decoder,
        library: zstd::library,
        summary: "zstd frames; fewer bytes and less CPU than zlib",
    },
    MethodInfo {
        name: "qpl",
        flag: 0x08,
        levels: None,
        default_level: 0,
        unit: Unit::Page,
        stateful: false,
        hardware: Some(qpl::DEVICE),
        interoperates_with: "QEMU 9.1 and later, if built with libqpl",
        encoder: qpl::encoder,
        decoder: qpl::decoder,
        library: qpl::library,
        summary: "raw deflate pages for Intel's IAA; the least CPU of the deflates",
    },
    MethodInfo {
        name: "uadk",
        flag: 0x10,
        levels: None,
        default_level: 0,
        unit: Unit::Page,
        stateful: false,
        hardware: Some(uadk::DEVICE),
        interoperates_with: "QEMU 9.1 and later, if built with libwd",
        encoder: uadk::encoder,
        decoder: uadk::decoder,
        library: uadk::library,
        summary: "zlib pages for HiSilicon's accelerator",
    },
    MethodInfo {
        name: "qatzip",
        flag: 0x20,
        levels: Some(qatzip::LEVELS),
        default_level: 1,
        unit: Unit::Packet,
        stateful: false,
        hardware: Some(qatzip::DEVICE),
        interoperates_with: "QEMU 9.2 and later, if built with libqatzip",
        encoder: qatzip::encoder,
        decoder: qatzip::decoder,
        library: qatzip::library,
        summary: "gzip members for Intel's QAT, with a checksum each",
    },
    MethodInfo {
        name: "lz4",
        flag: 0x80,
        levels: None,
        default_level: 0,
        unit: Unit::Packet,
        stateful: false,
        hardware: None,
        interoperates_with: "Hotlift only",
        encoder: lz4::encoder,
        decoder: lz4::decoder,
        library: lz4::library,
        summary: "LZ4 blocks, for links too fast for zstd; only between Hotlifts",
    },
];

/// Value `auto`: the sender chooses the method of each packet. Works only between two Hotlifts. It is selected like a method,
/// but has no encoder or decoder of its own.
pub static AUTO: MethodInfo = MethodInfo {
    name: "auto",
    // Outside the flags of a packet.
    flag: 1 << 31,
    levels: None,
    default_level: 0,
    unit: Unit::Packet,
    stateful: false,
    hardware: None,
    interoperates_with: "Hotlift only",
    encoder: |_| Err(no_method()),
    decoder: |_| Err(no_method()),
    library: || {
        let parts = ["lz4", "zstd"].into_iter().filter_map(method);
        parts
            .map(|part| (part.library)())
            .collect::<Vec<_>>()
            .join(", ")
    },
    summary: "the best method for link and cores, chosen for each packet",
};

fn no_method() -> MethodError {
    MethodError::Unavailable {
        method: AUTO.name,
        library: "the choice by packet",
        reason: "it has no format of its own".to_owned(),
    }
}

/// Returns all selectable values: each method, and [`AUTO`].
pub fn selections() -> impl Iterator<Item = &'static MethodInfo> {
    METHODS.iter().chain([&AUTO])
}

/// Returns the selectable value of that name; `None` if it is unknown.
pub fn selection(name: &str) -> Option<&'static MethodInfo> {
    selections().find(|method| method.name == name)
}

/// Returns the method of that name; `None` if it is unknown.
pub fn method(name: &str) -> Option<&'static MethodInfo> {
    METHODS.iter().find(|method| method.name == name)
}
