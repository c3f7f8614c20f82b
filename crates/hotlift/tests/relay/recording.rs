//! Streams of sources: recorded from real QEMUs, or small artificial streams.

use std::fs;
use std::path::{Path, PathBuf};

use hotlift_wire::main_channel::{
    Command, Configuration, DeviceLengths, MainDecoder, MainEncoder, MainEvent, Step, VmDescription,
};
use hotlift_wire::multifd::{
    Hello, INITIAL_PACKET_LEN, InitialPacket, Method, PacketFields, PacketLayout, PacketWriter,
    ZeroPageDetection,
};
use hotlift_wire::{PAGE_SIZE, RamBlockEntry};

/// UUID of every VM in these tests.
pub const UUID: [u8; 16] = *b"Hotlift fixtures";

/// QEMU's `RAM_SAVE_FLAG_CONTINUE`, in the last byte of a page's first word: the page is in the previous page's block.
const RAM_CONTINUES: u8 = 0x20;

/// Bytes of one source, by connection.
#[derive(Debug, Clone)]
pub struct Recording {
    pub name: String,
    pub main: Vec<u8>,
    pub channels: Vec<Vec<u8>>,
}

/// Names of the recorded streams: all that QEMU 7.2 and 10.0 can send, and those that 11.1 sends in another order.
pub const RECORDED: [&str; 14] = [
    "7.2-off",
    "7.2-none",
    "7.2-zlib",
    "7.2-zstd",
    "7.2-compress",
    "7.2-xbzrle",
    "10.0-off",
    "10.0-none",
    "10.0-zlib",
    "10.0-zstd",
    "10.0-none-legacy",
    "10.0-none-return-path",
    "10.0-none-virtio-mem",
    "11.1-none-virtio-mem",
];

impl Recording {
    /// Loads a recorded stream.
    pub fn load(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../hotlift-wire/fixtures");
        let folder = folder.join(name);
        let connection = |kind: &str| -> Option<Vec<u8>> {
            let packed = fs::read(PathBuf::from(&folder).join(format!("{kind}.zst"))).ok()?;
            Some(zstd::decode_all(packed.as_slice()).unwrap())
        };
        Self {
            name: name.to_owned(),
            main: connection("main").unwrap(),
            channels: ["channel-0", "channel-1"]
                .into_iter()
                .filter_map(connection)
                .collect(),
        }
    }

    /// Converts it to a source that reads answers and waits for SHUT, as with `return-path`.
    pub fn with_return_path(mut self) -> Self {
        if !self.has_return_path() {
            let configured = self.boundaries()[2];
            let mut command = Vec::new();
            Command::OpenReturnPath.encode(&mut command);
            self.main.splice(configured..configured, command);
        }
        self
    }

    /// Converts it to a source that reads no answers.
    pub fn without_return_path(mut self) -> Self {
        let wanted = MainEvent::Command(Command::OpenReturnPath);
        let at = self.position(|event| *event == wanted);
        let mut command = Vec::new();
        Command::OpenReturnPath.encode(&mut command);
        self.main.drain(at..at + command.len());
        self
    }

    /// Renames the machine type.
    pub fn renamed(mut self, machine: &str) -> Self {
        let events = self.events();
        let (MainEvent::Configuration(configuration), from, to) =
            (events[1].1.clone(), events[1].0, events[2].0)
        else {
            panic!("{} does not begin with a configuration", self.name);
        };
        let mut renamed = Vec::new();
        let configuration = Configuration {
            machine: machine.to_owned(),
            ..configuration
        };
        configuration.encode(&mut renamed).unwrap();
        self.main.splice(from..to, renamed);
        self.name = format!("{} as {machine}", self.name);
        self
    }

    /// Converts it to a source with the capability `postcopy-ram`.
    pub fn with_postcopy_advise(mut self) -> Self {
        let at = self.position(|event| matches!(event, MainEvent::SectionStart { .. }));
        let mut advise = Vec::new();
        Command::PostcopyAdvise { page_sizes: None }.encode(&mut advise);
        self.main.splice(at..at, advise);
        self
    }

    /// Converts it to a source with return path and a `postcopy-ram` that a relay supports: the relay answers the PING once it
    /// has read main up to there.
    pub fn with_carried_postcopy_advise(mut self) -> Self {
        let at = self.position(|event| matches!(event, MainEvent::SectionStart { .. }));
        let page = PAGE_SIZE as u64;
        let mut advise = Vec::new();
        for command in [
            Command::OpenReturnPath,
            Command::Ping(1),
            Command::PostcopyAdvise {
                page_sizes: Some((page, page)),
            },
        ] {
            command.encode(&mut advise);
        }
        self.main.splice(at..at, advise);
        self
    }

    pub fn has_return_path(&self) -> bool {
        let wanted = MainEvent::Command(Command::OpenReturnPath);
        self.events().iter().any(|(_, event)| *event == wanted)
    }

    /// Returns the description of the devices that the destination's machine has.
    pub fn description(&self) -> VmDescription {
        let text = VmDescription::find(&self.main).expect("a stream ends in a description");
        VmDescription::parse(text).unwrap()
    }

    /// Returns every event of main, with the position of its first byte.
    pub fn events(&self) -> Vec<(usize, MainEvent<'_>)> {
        let mut decoder = MainDecoder::new(DeviceLengths::Description(self.description()));
        let (mut events, mut at) = (Vec::new(), 0);
        while let Step::Event { event, consumed } = decoder.next(&self.main[at..]).unwrap() {
            events.push((at, event));
            at += consumed;
        }
        assert_eq!(at, self.main.len(), "{}", self.name);
        events
    }

    /// Removes one page of main that is sent once, and also returns the page's byte offset in its RAM block.
    pub fn without_a_page(mut self) -> (Self, u64) {
        let events = self.events();
        let pages = || {
            events
                .windows(2)
                .filter_map(|pair| match (&pair[0], &pair[1]) {
                    ((at, MainEvent::RamPage { block, offset, .. }), (end, _)) => {
                        Some((*at..*end, (*block, *offset)))
                    }
                    _ => None,
                })
        };
        let is_sent_once = |place| pages().filter(|(_, other)| *other == place).count() == 1;
        let (bytes, (_, offset)) = pages()
            // The first page of a block carries the name that later ones need.
            .find(|(bytes, place)| {
                self.main[bytes.start + 7] & RAM_CONTINUES != 0 && is_sent_once(*place)
            })
            .expect("a page that is sent once");
        drop(events);
        self.main.drain(bytes);
        (self, offset)
    }

    /// Returns the positions in main between records.
    pub fn boundaries(&self) -> Vec<usize> {
        self.events().iter().map(|(at, _)| *at).collect()
    }

    /// Returns the position of the first record that `is` accepts.
    pub fn position(&self, is: impl Fn(&MainEvent<'_>) -> bool) -> usize {
        let events = self.events();
        events.iter().find(|(_, event)| is(event)).unwrap().0
    }

    /// Creates a VM of 64 pages in two blocks and two devices, with some pages sent twice, without multifd. It is small, so
    /// that hundreds of migrations are fast.
    pub fn small() -> Self {
        let blocks = [
            RamBlockEntry::new("pc.ram", 48 * PAGE_SIZE as u64),
            RamBlockEntry::new("pc.rom", 16 * PAGE_SIZE as u64),
        ];
        Self::small_of(&configuration(), &blocks)
    }

    /// Creates the VM of [`Recording::small`] with a machine type up to 2.3, which sends neither a configuration nor footers.
    pub fn small_without_configuration() -> Self {
        let blocks = [
            RamBlockEntry::new("pc.ram", 48 * PAGE_SIZE as u64),
            RamBlockEntry::new("pc.rom", 16 * PAGE_SIZE as u64),
        ];
        Self::small_of(&Configuration::default(), &blocks)
    }

    fn small_of(configuration: &Configuration, blocks: &[RamBlockEntry]) -> Self {
        let (mut encoder, mut main) = small_start(configuration, blocks, false);
        for round in 0..2_u8 {
            encoder.ram_part(&mut main).unwrap();
            for number in (0..64_u64).filter(|number| round == 0 || number % 3 == 0) {
                let (block, number) = if number < 48 {
                    (0, number)
                } else {
                    (1, number - 48)
                };
                let at = number * PAGE_SIZE as u64;
                if number % 4 == 3 {
                    encoder.zero_page(block, at, &mut main).unwrap();
                } else {
                    let page = page_of(block, number, round);
                    encoder.normal_page(block, at, &page, &mut main).unwrap();
                }
            }
            encoder.ram_eos(&mut main).unwrap();
        }
        small_end(encoder, main, "small", Vec::new(), &[])
    }

    /// Creates the same VM from a source with `count` multifd channels of method none.
    pub fn small_multifd(count: u8) -> Self {
        Self::small_multifd_of(count, |_| true)
    }

    /// Creates the same recording with only those of its 64 pages that `has` accepts.
    pub fn small_multifd_of(count: u8, has: impl Fn(u64) -> bool) -> Self {
        let blocks = [RamBlockEntry::new("pc.ram", 64 * PAGE_SIZE as u64)];
        let (mut encoder, mut main) = small_start(&configuration(), &blocks, true);
        let mut channels = Vec::new();
        for id in 0..count {
            let uuid = UUID;
            let opening = InitialPacket {
                uuid,
                id,
                hello: None,
            };
            let mut bytes = opening.encode().to_vec();
            let mut writer = PacketWriter::new(PacketLayout::QEMU, Method::None, false);
            put_sync(&mut writer, &mut bytes);
            let normal: Vec<u64> = (0..64)
                .filter(|page| page % u64::from(count) == u64::from(id) && has(*page))
                .map(|page| page * PAGE_SIZE as u64)
                .collect();
            let fields = PacketFields {
                block: "pc.ram",
                normal: &normal,
                payload_len: u32::try_from(normal.len() * PAGE_SIZE).unwrap(),
                ..PacketFields::default()
            };
            bytes.extend_from_slice(writer.header(&fields).unwrap());
            for at in &normal {
                bytes.extend_from_slice(&page_of(0, at / PAGE_SIZE as u64, id));
            }
            for _ in 0..2 {
                put_sync(&mut writer, &mut bytes);
            }
            channels.push(bytes);
        }
        encoder.ram_part(&mut main).unwrap();
        encoder.multifd_flush(&mut main).unwrap();
        encoder.ram_eos(&mut main).unwrap();
        small_end(encoder, main, "small multifd", channels, &[])
    }

    /// Creates a VM of 8 pages with five devices of 13 MiB of state each, which contains an apparent end of the stream.
    pub fn large_devices() -> Self {
        let blocks = [RamBlockEntry::new("pc.ram", 8 * PAGE_SIZE as u64)];
        let (mut encoder, mut main) = small_start(&configuration(), &blocks, false);
        encoder.ram_part(&mut main).unwrap();
        for number in 0..8 {
            let (at, page) = (number * PAGE_SIZE as u64, page_of(0, number, 1));
            encoder.normal_page(0, at, &page, &mut main).unwrap();
        }
        encoder.ram_eos(&mut main).unwrap();
        let displays = (0..5_u8).map(|display| {
            let mut state = Vec::with_capacity(13 << 20);
            while state.len() < 13 << 20 {
                state.extend_from_slice(&page_of(1, state.len() as u64, display));
                state.extend_from_slice(
                    b"\0\x06\0\0\0\x02{}\0\x06\0\0\x10\0{\"devices\"\x7e\0\0\0\x01\0",
                );
            }
            state
        });
        let displays: Vec<_> = displays.collect();
        small_end(encoder, main, "large devices", Vec::new(), &displays)
    }
}

/// Writes a SYNC packet.
pub fn put_sync(writer: &mut PacketWriter, out: &mut Vec<u8>) {
    let fields = PacketFields {
        sync: true,
        ..PacketFields::default()
    };
    out.extend_from_slice(writer.header(&fields).unwrap());
}

/// Returns a page that compresses a little and differs from every other page.
pub fn page_of(block: usize, number: u64, round: u8) -> [u8; PAGE_SIZE] {
    let mut page = [round + 1; PAGE_SIZE];
    let mut state = number * 64 + u64::try_from(block).unwrap() + 1;
    for byte in page.iter_mut().step_by(3) {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        *byte = state.to_be_bytes()[0];
    }
    page
}

/// Returns the configuration of the synthetic VMs.
pub fn configuration() -> Configuration {
    Configuration {
        machine: "pc-i440fx-10.0".to_owned(),
        uuid: Some(UUID),
        ..Configuration::default()
    }
}

fn small_start(
    configuration: &Configuration,
    blocks: &[RamBlockEntry],
    flush: bool,
) -> (MainEncoder, Vec<u8>) {
    let mut main = Vec::new();
    let mut encoder = MainEncoder::new(configuration, &mut main).unwrap();
    for command in [Command::OpenReturnPath, Command::Ping(1)] {
        encoder.command(command, &mut main).unwrap();
    }
    encoder.ram_start(blocks, flush, &mut main).unwrap();
    (encoder, main)
}

fn small_end(
    mut encoder: MainEncoder,
    mut main: Vec<u8>,
    name: &str,
    channels: Vec<Vec<u8>>,
    displays: &[Vec<u8>],
) -> Recording {
    encoder
        .command(Command::SwitchoverStart, &mut main)
        .unwrap();
    encoder.ram_end(&mut main).unwrap();
    if !channels.is_empty() {
        encoder.multifd_flush(&mut main).unwrap();
    }
    encoder.ram_eos(&mut main).unwrap();
    // Zero bytes at the ends of fields: a truncated stream may seem to end in EOF.
    encoder
        .device("timer", 0, 2, &[0, 0, 7, 0, 0], &mut main)
        .unwrap();
    encoder
        .device("cpu", 0, 1, b"registers\0\0", &mut main)
        .unwrap();
    for (instance, state) in (0..).zip(displays) {
        encoder
            .device("display", instance, 1, state, &mut main)
            .unwrap();
    }
    encoder.eof(&mut main).unwrap();
    encoder.vm_description(&mut main).unwrap();
    Recording {
        name: name.to_owned(),
        main,
        channels,
    }
}

/// Returns the opening packet of a Hotlift with protocol version 255.
pub fn opening_of_another_version() -> [u8; INITIAL_PACKET_LEN] {
    let opening = InitialPacket {
        uuid: UUID,
        id: 0,
        hello: Some(Hello {
            channels: 1,
            method: Some(Method::None),
            layout: PacketLayout::QEMU,
            zero_page_detection: ZeroPageDetection::Multifd,
        }),
    };
    let mut bytes = opening.encode();
    // The version is between the hello's magic and checksum.
    bytes[36..38].copy_from_slice(&255_u16.to_be_bytes());
    let sum = crc32fast::hash(&bytes[32..60]);
    bytes[60..].copy_from_slice(&sum.to_be_bytes());
    bytes
}
