//! Tests with whole streams, damaged and delayed at each byte, on a virtual clock.

use hotlift_mem::PAGE_SIZE;
use hotlift_wire::handshake::CONNECTED;
use hotlift_wire::main_channel::postcopy::{
    put_bitmap_request, put_discard, put_listen, put_package_end, put_resume,
};
use hotlift_wire::main_channel::{MainEncoder, put_device_part_head, put_packaged_head};
use hotlift_wire::multifd::{
    HEADER_LEN, INITIAL_PACKET_LEN, PacketHeader, PacketLayout, PacketRules,
};

use super::*;

/// Limit of the source's silence.
const LIMIT: Duration = Duration::from_secs(15);

/// Bit masks that damage a byte. The second mask turns a command's type into EOF.
const MASKS: [u8; 4] = [0x01, 0x08, 0x80, 0xff];

/// Actions of the machine, without large content, and without differences that depend on the size of the reads.
#[derive(Debug, Clone, PartialEq)]
enum Seen {
    Page(usize, u64, u32),
    /// Bytes for the peer. Consecutive bytes are joined.
    Bytes(&'static str, Vec<u8>),
    Other(String),
}

impl Seen {
    fn of(action: &Action<'_>) -> Self {
        match action {
            Action::Page {
                block,
                offset,
                content,
            } => Self::Page(
                *block,
                *offset,
                match content {
                    PageContent::Zero => 0,
                    PageContent::Normal(bytes) => crc32fast::hash(*bytes),
                    PageContent::Xbzrle(bytes) | PageContent::Compressed(bytes) => {
                        crc32fast::hash(bytes)
                    }
                },
            ),
            Action::Devices(bytes) => Self::Bytes("devices", bytes.to_vec()),
            Action::PackagePart(bytes) => Self::Bytes("package", bytes.to_vec()),
            Action::PackageEnd(bytes) => Self::Bytes("package's end", bytes.to_vec()),
            Action::End(bytes) => Self::Bytes("end", bytes.to_vec()),
            other => Self::Other(format!("{other:?}")),
        }
    }

    fn is(&self, kinds: &[&str]) -> bool {
        match self {
            Self::Other(action) => kinds.iter().any(|kind| action.starts_with(kind)),
            Self::Page(..) | Self::Bytes(..) => false,
        }
    }

    /// Returns true if `self` equals `other`, or has the first bytes of `other`.
    fn begins(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Bytes(what, some), Self::Bytes(kind, all)) => {
                what == kind && all.starts_with(some)
            }
            _ => self == other,
        }
    }
}

/// End of a stream.
#[derive(Debug, PartialEq)]
enum End {
    Whole,
    /// No end: the source may be silent without a limit.
    Waits,
    Refused(String),
}

/// Actions, each with the count of bytes that were consumed after it; and the end of the stream.
type Read = (Vec<(Seen, usize)>, End);

/// A stream and its consumer.
struct Case {
    name: &'static str,
    taker: StreamConsumer,
    multifd: bool,
    bytes: Vec<u8>,
    /// Offset in bytes. Damage before this offset must be found before any later commit.
    covered: usize,
}

impl Case {
    fn machine(&self) -> MainChannel {
        let silence = match self.taker {
            StreamConsumer::Relay { .. } => SilenceLimit::Always(LIMIT),
            StreamConsumer::Guest(_) => SilenceLimit::WithinRecords(LIMIT),
        };
        MainChannel::new(self.taker, silence)
    }

    /// Reads `bytes` in parts that end at the offsets `parts`, and then the end `how`.
    fn read(&self, bytes: &[u8], parts: &[usize], how: EndCause) -> Read {
        let mut machine = self.machine();
        let mut seen: Vec<(Seen, usize)> = Vec::new();
        let (mut taken, mut come) = (0, 0);
        let mut parts = parts.iter().copied().chain([bytes.len()]);
        let now = Instant::now();
        for _ in 0..4 * bytes.len() + 100 {
            let step = match machine.next(&bytes[taken..come]) {
                Ok(step) => step,
                Err(error) => return (seen, End::Refused(error.chain())),
            };
            match step {
                Step::Need(needed) => {
                    assert!(needed > 0, "{}: needs nothing", self.name);
                    match parts.next() {
                        Some(part) => come = part,
                        None if how == EndCause::Silent
                            && machine.deadline(now, come - taken).is_none() =>
                        {
                            return (seen, End::Waits);
                        }
                        None => machine.ended(how),
                    }
                }
                Step::Do(action, consumed) => {
                    taken += consumed;
                    let one = Seen::of(&action);
                    match (seen.last_mut(), one) {
                        (Some((Seen::Bytes(what, all), end)), Seen::Bytes(again, more))
                            if *what == again =>
                        {
                            all.extend_from_slice(&more);
                            *end = taken;
                        }
                        _ if action == Action::Nothing => {}
                        (_, one) => seen.push((one, taken)),
                    }
                    match action {
                        Action::SetUp(_) => machine.begin(self.multifd),
                        Action::Eof { .. } if machine.phase == Phase::Over => {
                            return (seen, End::Whole);
                        }
                        Action::Released | Action::End(_) | Action::PassThrough { .. } => {
                            return (seen, End::Whole);
                        }
                        _ => {}
                    }
                }
            }
        }
        panic!("{}: the machine makes no progress", self.name);
    }

    /// Iterates over byte offsets to damage: all offsets, but only a sample within page content.
    fn places(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.bytes.len()).filter(|at| {
            let near = at.saturating_sub(8)..(at + 8).min(self.bytes.len());
            let is_content = self.bytes[near].iter().all(|byte| *byte == self.bytes[*at]);
            !is_content || at % 13 == 0
        })
    }

    fn read_whole(&self) -> Read {
        let read = self.read(&self.bytes, &[], EndCause::Closed);
        assert_eq!(read.1, End::Whole, "{}: {:?}", self.name, read.0);
        read
    }

    /// Returns true if the action may start a guest, or permanently gives data to a QEMU. Damage must be found before such an
    /// action.
    fn commits(&self, one: &Seen) -> bool {
        match one {
            Seen::Bytes("devices", _) => {
                matches!(self.taker, StreamConsumer::Relay { into_stream: true })
            }
            Seen::Bytes(what, _) => *what != "package",
            other => other.is(&["Load(", "Run(", "Eof", "DevicesEnd", "Released"]),
        }
    }

    /// Asserts that `read` contains no commit after damage at `at`.
    fn check_damage(&self, (whole, _): &Read, (seen, end): &Read, at: usize, what: &str) {
        // A source whose offer is answered differently aborts.
        let greets = |read: &[(Seen, usize)]| {
            let greet = read.iter().find(|(one, _)| one.is(&["Greet"]));
            greet.map(|(one, _)| one.clone())
        };
        if greets(seen) != greets(whole) {
            return;
        }
        let behind = seen.iter().filter(|(_, taken)| *taken > at);
        let mut commits = behind.filter(|(one, _)| self.commits(one));
        let found = commits.next();
        assert!(
            at >= self.covered || found.is_none(),
            "{}: {what} at {at} of {}: {found:?}, {end:?}",
            self.name,
            self.covered
        );
    }
}

/// Writer of a Hotlift's stream.
struct Writer {
    encoder: MainEncoder,
    out: Vec<u8>,
}

const BLOCKS: [(&str, u64); 2] = [("ram", 8), ("rom", 2)];

impl Writer {
    fn new() -> Self {
        let mut out = Vec::new();
        let configuration = Configuration {
            machine: "machine".to_owned(),
            ..Configuration::default()
        };
        let encoder = MainEncoder::new(&configuration, &mut out).unwrap();
        let mut writer = Self { encoder, out };
        writer.command(Command::OpenReturnPath);
        writer
    }

    fn command(&mut self, command: Command) {
        self.encoder.command(command, &mut self.out).unwrap();
    }

    /// Writes a PING whose value is the checksum of everything before it.
    fn ping(&mut self) {
        self.command(Command::Ping(crc32fast::hash(&self.out)));
    }

    /// Writes the offer, optionally the postcopy advice, and the RAM blocks.
    fn open(&mut self, features: Features, postcopy: bool, flush: bool) {
        self.command(Command::Ping(Offer::new(features).ping()));
        if postcopy {
            let page_size = PAGE_SIZE as u64;
            let page_sizes = Some((page_size, page_size));
            self.command(Command::PostcopyAdvise { page_sizes });
        }
        let blocks = BLOCKS.map(|(name, pages)| RamBlockEntry::new(name, pages * 4096));
        self.encoder
            .ram_start(&blocks, flush, &mut self.out)
            .unwrap();
    }

    /// Writes a RAM section with pages. `last` is true for the last section.
    fn section(&mut self, first: u64, last: bool, flush: bool) {
        let Self { encoder, out } = self;
        match last {
            true => encoder.ram_end(out).unwrap(),
            false => encoder.ram_part(out).unwrap(),
        }
        let page = [u8::try_from(first).unwrap() + 1; PAGE_SIZE];
        encoder.normal_page(0, first * 4096, &page, out).unwrap();
        encoder.zero_page(0, (first + 1) * 4096, out).unwrap();
        encoder.zero_page(1, 4096, out).unwrap();
        if flush {
            encoder.multifd_flush(out).unwrap();
        }
        encoder.ram_eos(out).unwrap();
    }

    fn devices(&mut self) {
        for (name, payload) in [
            ("cpu", &b"registers"[..]),
            ("disk", b"queue"),
            ("none", b""),
        ] {
            let out = &mut self.out;
            self.encoder.device(name, 0, 1, payload, out).unwrap();
        }
    }

    fn end(&mut self) {
        self.encoder.eof(&mut self.out).unwrap();
        self.encoder.vm_description(&mut self.out).unwrap();
    }

    fn discard(&mut self) {
        put_discard("ram", 4096, 8192, &mut self.out).unwrap();
    }
}

fn guest(multifd: bool, postcopy_ram: bool) -> StreamConsumer {
    let mut takes = Features::empty();
    takes.set(Features::MULTIFD, multifd);
    StreamConsumer::Guest(GuestRules {
        takes,
        postcopy_ram,
        is_hotlift: multifd.then_some(true),
    })
}

const TO_QEMU: StreamConsumer = StreamConsumer::Relay { into_stream: true };

/// Builds a stream from a Hotlift's guest. Its reader is another guest, or a relay that saves it.
fn of_guest(name: &'static str, taker: StreamConsumer, multifd: bool) -> Case {
    let mut writer = Writer::new();
    let mut features = Features::empty();
    features.set(Features::MULTIFD, multifd);
    writer.open(features, false, multifd);
    writer.ping();
    writer.section(0, false, multifd);
    writer.ping();
    writer.section(2, true, multifd);
    writer.devices();
    writer.ping();
    let covered = writer.out.len();
    writer.end();
    Case {
        name,
        taker,
        multifd,
        bytes: writer.out,
        covered,
    }
}

/// Builds the postcopy stream of a Hotlift's guest.
fn of_running_guest() -> Case {
    let mut writer = Writer::new();
    writer.open(Features::empty(), true, false);
    writer.ping();
    writer.section(0, false, false);
    writer.ping();
    writer.discard();
    let mut package = Vec::new();
    put_listen(&mut package);
    writer.encoder.begin_package().unwrap();
    let mut devices = Vec::new();
    std::mem::swap(&mut writer.out, &mut devices);
    writer.devices();
    std::mem::swap(&mut writer.out, &mut devices);
    package.extend_from_slice(&devices);
    let end = 9 + 5;
    let length = (package.len() + end) as u64;
    put_packaged_head(length, &mut writer.out).unwrap();
    writer.out.extend_from_slice(&package);
    let sum = crc32fast::hash(&writer.out);
    let before = writer.out.len();
    put_package_end(sum, &mut writer.out);
    assert_eq!(writer.out.len() - before, end);
    writer.encoder.end_package().unwrap();
    // Only RUN follows the checksum; its bytes are as fixed as the package's length.
    let covered = writer.out.len();
    writer.section(1, false, false);
    writer.section(5, true, false);
    writer.encoder.eof(&mut writer.out).unwrap();
    Case {
        name: "postcopy of a guest",
        taker: guest(false, true),
        multifd: false,
        bytes: writer.out,
        covered,
    }
}

const RELAY: Features = Features::RELAYED
    .union(Features::PACKAGE_CHECKED)
    .union(Features::CONNECTED_PING);

/// Builds a relay's stream of a QEMU.
fn of_relay(name: &'static str, multifd: bool) -> Case {
    let mut writer = Writer::new();
    let mut features = RELAY;
    features.set(Features::MULTIFD, multifd);
    writer.open(features, false, multifd);
    writer.command(Command::Ping(CONNECTED));
    writer.section(0, false, multifd);
    writer.command(Command::SwitchoverStart);
    writer.section(2, true, multifd);
    for part in [&b"\x04the first devices"[..], b"\x04the last"] {
        put_device_part_head(part.len(), &mut writer.out).unwrap();
        writer.out.extend_from_slice(part);
        let sum = crc32fast::hash(&writer.out);
        writer.out.extend_from_slice(&sum.to_be_bytes());
    }
    writer.ping();
    let covered = writer.out.len();
    writer.end();
    Case {
        name,
        taker: TO_QEMU,
        multifd,
        bytes: writer.out,
        covered,
    }
}

/// Builds a relay's stream of a QEMU that switches to postcopy.
fn of_running_relay() -> Case {
    let mut writer = Writer::new();
    writer.open(RELAY, true, false);
    writer.section(0, false, false);
    writer.discard();
    let package = b"LISTEN, the devices, PING and RUN of a QEMU";
    put_packaged_head(package.len() as u64, &mut writer.out).unwrap();
    writer.out.extend_from_slice(package);
    writer.ping();
    let covered = writer.out.len();
    writer.section(1, false, false);
    writer.section(5, true, false);
    writer.encoder.eof(&mut writer.out).unwrap();
    Case {
        name: "postcopy of a relay",
        taker: TO_QEMU,
        multifd: false,
        bytes: writer.out,
        covered,
    }
}

/// Returns one stream of each kind that has checksums.
fn hotlifts() -> Vec<Case> {
    vec![
        of_guest("guest", guest(false, false), false),
        of_guest("guest with multifd", guest(true, false), true),
        of_guest(
            "saved guest",
            StreamConsumer::Relay { into_stream: false },
            false,
        ),
        of_running_guest(),
        of_relay("relay", false),
        of_relay("relay with multifd", true),
        of_running_relay(),
    ]
}

/// Returns the recorded bytes of a QEMU's connection.
fn recorded(name: &str, connection: &str) -> Vec<u8> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../hotlift-wire/fixtures");
    let file = std::fs::File::open(format!("{folder}/{name}/{connection}.zst")).unwrap();
    zstd::stream::decode_all(file).unwrap()
}

/// Returns the count of SYNCs on a recorded channel of a guest with the RAM blocks `blocks`.
fn syncs(name: &str, blocks: &[RamBlockEntry]) -> usize {
    let channel = recorded(name, "channel-0");
    let rules = PacketRules {
        layout: PacketLayout::QEMU,
        method: None,
        checksum_required: false,
    };
    let mut header = PacketHeader::new(PacketLayout::QEMU);
    let mut rest = &channel[INITIAL_PACKET_LEN..];
    let mut syncs = 0;
    while let Some((head, behind)) = rest.split_at_checked(HEADER_LEN) {
        header.decode(head, &rules, blocks).unwrap();
        syncs += usize::from(header.sync());
        rest = &behind[header.payload_len()..];
    }
    syncs
}

/// Returns the recorded streams of QEMUs.
fn qemus() -> Vec<Case> {
    let case = |name: &'static str, multifd| Case {
        name,
        taker: TO_QEMU,
        multifd,
        bytes: recorded(name, "main"),
        covered: 0,
    };
    vec![
        case("10.0-none", true),
        case("10.0-none-legacy", true),
        case("10.0-none-return-path", true),
        case("10.0-none-virtio-mem", true),
        case("11.1-none-virtio-mem", true),
        case("10.0-off", false),
        case("7.2-none", true),
        case("7.2-off", false),
        case("7.2-xbzrle", false),
        case("7.2-compress", false),
    ]
}

#[test]
fn a_stream_is_read_alike_in_any_fragments() {
    for case in hotlifts() {
        let whole = case.read_whole();
        for at in case.places().skip(1) {
            let read = case.read(&case.bytes, &[at], EndCause::Closed);
            assert!(read == whole, "{}: {read:?} by parts at {at}", case.name);
        }
        let each: Vec<usize> = (1..case.bytes.len()).collect();
        let read = case.read(&case.bytes, &each, EndCause::Silent);
        assert!(read == whole, "{}: {read:?} byte by byte", case.name);
    }
}

#[test]
fn no_damaged_byte_commits_anything() {
    let mut cases = 0;
    for case in hotlifts() {
        let whole = case.read_whole();
        let commits = whole.0.iter().filter(|(one, _)| case.commits(one));
        assert!(commits.count() > 1, "{}", case.name);
        for at in case.places() {
            let mut damaged = case.bytes.clone();
            for mask in MASKS {
                damaged[at] = case.bytes[at] ^ mask;
                for how in [EndCause::Closed, EndCause::Silent] {
                    let read = case.read(&damaged, &[], how);
                    case.check_damage(&whole, &read, at, &format!("mask {mask:#x}"));
                    cases += 1;
                }
            }
            damaged[at] = case.bytes[at];
            damaged.insert(at, case.bytes[at]);
            let read = case.read(&damaged, &[], EndCause::Closed);
            // A duplicated byte changes the stream only after the last byte of its run.
            let run = case.bytes[at..]
                .iter()
                .take_while(|&&byte| byte == case.bytes[at]);
            let at_last = at + run.count();
            if at_last < case.covered {
                case.check_damage(&whole, &read, at_last, "a doubled byte");
            }
            damaged.drain(at..at + 2);
            let read = case.read(&damaged, &[], EndCause::Closed);
            if at_last < case.covered {
                case.check_damage(&whole, &read, at_last, "a missing byte");
            }
            cases += 2;
        }
    }
    assert!(cases > 50_000, "{cases}");
}

#[test]
fn a_stream_is_complete_only_after_its_last_message() {
    for case in hotlifts() {
        let (whole, _) = case.read_whole();
        for length in case.places() {
            for how in [EndCause::Closed, EndCause::Silent] {
                let (seen, end) = case.read(&case.bytes[..length], &[], how);
                let is_whole = end == End::Whole;
                let mut cut = seen.iter().zip(&whole);
                // An end without a description is also one.
                let differs = cut.find(|(one, whole)| {
                    !one.0.begins(&whole.0) && !matches!(one.0, Seen::Bytes("end", _))
                });
                assert_eq!(differs, None, "{} {how:?} at {length}", case.name);
                // EOF is the last relevant byte.
                let has_eof = seen.iter().any(|(one, _)| one.is(&["Eof"]));
                assert!(
                    !has_eof || length > case.covered,
                    "{} at {length}",
                    case.name
                );
                assert_eq!(
                    is_whole, has_eof,
                    "{} {how:?} at {length}: {end:?}",
                    case.name
                );
            }
        }
    }
}

#[test]
fn recorded_streams_are_passed_on_unchanged() {
    for case in qemus() {
        let (seen, _) = case.read_whole();
        let last = seen.iter().rev();
        let devices = last.filter_map(|(one, end)| match one {
            Seen::Bytes("devices", bytes) => Some((bytes, *end)),
            _ => None,
        });
        let (devices, end) = devices.clone().next().unwrap();
        assert!(case.bytes[..end].ends_with(devices), "{}", case.name);
        // Each SYNC of a channel has a sync point on main: one in the set-up, and in machine types up to 8.0 each section's
        // end.
        if case.multifd {
            let kinds = ["SyncPoint", "RamEnd { is_sync_point: true"];
            let points = seen.iter().filter(|(one, _)| one.is(&kinds)).count();
            let blocks = brought(&case, case.bytes.len()).0.decoder.blocks().to_vec();
            assert_eq!(1 + points, syncs(case.name, &blocks), "{}", case.name);
        }
        // The stream shows the pause of the source's guest once, before the last pages.
        let shows = |kind| seen.iter().position(|(one, _)| one.is(&[kind]));
        let (pause, ram_end) = (shows("LastSection"), shows("RamEnd"));
        assert!(pause.is_some() && pause < ram_end, "{}", case.name);
        let pauses = seen.iter().filter(|(one, _)| one.is(&["LastSection"]));
        assert_eq!(pauses.count(), 1, "{}", case.name);
        // EOF and the description are left for the commit.
        assert_eq!(case.bytes[end..][..2], [EOF, 6], "{}", case.name);
        let each = |step: usize| (1..case.bytes.len()).step_by(step);
        for at in each(case.bytes.len() / 150) {
            let read = case.read(&case.bytes, &[at], EndCause::Closed).0;
            assert!(read == seen, "{}: parts at {at}", case.name);
        }
    }
}

#[test]
fn damage_of_a_recorded_stream_is_refused_or_read_without_panic() {
    let mut cases = 0;
    for case in qemus() {
        let (whole, _) = case.read_whole();
        for at in (0..case.bytes.len()).step_by(case.bytes.len() / 300) {
            for mask in MASKS {
                let mut damaged = case.bytes.clone();
                damaged[at] ^= mask;
                let (seen, _) = case.read(&damaged, &[], EndCause::Closed);
                // The actions before the damage are unchanged.
                let before = |read: &[(Seen, usize)]| {
                    let plain = read.iter().filter(|(one, end)| {
                        let is_end = one.is(&["DevicesEnd", "Released"]);
                        *end <= at && !is_end && !matches!(one, Seen::Bytes(..))
                    });
                    plain.cloned().collect::<Vec<_>>()
                };
                assert_eq!(before(&seen), before(&whole), "{} at {at}", case.name);
                cases += 1;
            }
            let cut = case.read(&case.bytes[..at], &[], EndCause::Closed);
            assert!(
                !cut.0.iter().any(|(one, _)| one.is(&["Released"])),
                "{} cut at {at}: {:?}",
                case.name,
                cut.1
            );
        }
    }
    assert!(cases > 10_000, "{cases}");
}

/// Without a VM description, only the close of the source's connection shows the end. A source with a return path would wait
/// for an answer before it closes.
#[test]
fn only_a_source_without_return_path_may_close_after_eof() {
    for case in qemus() {
        let (seen, _) = case.read_whole();
        let devices_end = seen.iter().find(|(one, _)| one.is(&["DevicesEnd"]));
        let eof = devices_end.unwrap().1;
        let takes_answers = case.name.ends_with("return-path");
        for how in [EndCause::Closed, EndCause::Silent] {
            let (seen, end) = case.read(&case.bytes[..=eof], &[], how);
            let is_offered = seen.iter().any(|(one, _)| one.is(&["DevicesEnd"]));
            let may = !takes_answers || how == EndCause::Silent;
            assert_eq!(is_offered, may, "{} {how:?}: {end:?}", case.name);
            // With one byte less nothing proves that the devices are complete.
            let (seen, end) = case.read(&case.bytes[..eof], &[], how);
            let is_offered = seen.iter().any(|(one, _)| one.is(&["DevicesEnd"]));
            assert!(!is_offered, "{} {how:?}: {end:?}", case.name);
        }
    }
}

/// Runs a machine with the first `length` bytes. Returns the machine, and the count of bytes that it has not consumed.
fn brought(case: &Case, length: usize) -> (MainChannel, usize) {
    let mut machine = case.machine();
    let mut taken = 0;
    loop {
        match machine.next(&case.bytes[taken..length]).unwrap() {
            Step::Need(_) => return (machine, length - taken),
            Step::Do(action, consumed) => {
                taken += consumed;
                if let Action::SetUp(_) = action {
                    machine.begin(case.multifd);
                }
            }
        }
    }
}

/// Asserts that after `length` bytes the source may be silent for exactly `limit`.
fn check_silence(case: &Case, length: usize, limit: Option<Duration>) {
    let (mut machine, come) = brought(case, length);
    let begins = Instant::now();
    let deadline = machine.deadline(begins, come);
    assert_eq!(
        deadline.map(|it| it - begins),
        limit,
        "{} behind {length}",
        case.name
    );
    let Some(limit) = limit else { return };
    // Reading the deadline does not restart the wait; more bytes do.
    let near = begins + limit - Duration::from_millis(1);
    assert!(machine.deadline(near, come).is_some_and(|it| near < it));
    let late = begins + limit + Duration::from_millis(1);
    assert!(machine.deadline(late, come).is_some_and(|it| late > it));
    let again = machine.deadline(near, come + 1);
    assert!(again.is_some_and(|it| late < it), "{}", case.name);
}

#[test]
fn each_wait_has_its_timeout_from_the_last_byte_on() {
    let cases = hotlifts();
    let named = |name: &str| cases.iter().find(|case| case.name == name).unwrap();
    let guest = named("guest");
    // A guest's source may pause between records, not within them.
    check_silence(guest, 0, None);
    check_silence(guest, 3, Some(LIMIT));
    let section = guest.bytes.len() / 3;
    check_silence(guest, section, Some(LIMIT));
    let relay = named("relay");
    check_silence(relay, 20, Some(LIMIT));
    // An open relay's source is limited only by the liveness check.
    check_silence(relay, relay.bytes.len() / 3, None);
    check_silence(relay, relay.covered + 1, Some(DESCRIPTION));
    let postcopy = named("postcopy of a relay");
    check_silence(postcopy, postcopy.covered - 20, Some(PACKAGE));
    // The limit of the package also covers the checksum after it.
    check_silence(postcopy, postcopy.covered - 1, Some(PACKAGE));
    let qemus = qemus();
    let qemu = &qemus[0];
    check_silence(qemu, qemu.bytes.len() - 1, Some(SILENCE));
    check_silence(qemu, qemu.bytes.len(), Some(RELEASE));
}

#[test]
fn the_error_of_a_timeout_depends_on_the_awaited_message() {
    let cases = hotlifts();
    let text = |case: &Case, length: usize| {
        let (mut machine, come) = brought(case, length);
        machine.ended(EndCause::Silent);
        let bytes = &case.bytes[length - come..length];
        machine.next(bytes).unwrap_err().chain()
    };
    let error = text(&cases[0], 3);
    assert!(error.contains("3 of 4 bytes arrived"), "{error}");
    let error = text(&cases[4], 20);
    assert!(error.contains("the rest of the source's set-up"), "{error}");
    let postcopy = cases.last().unwrap();
    let error = text(postcopy, postcopy.covered - 1);
    assert!(error.contains("closed"), "{error}");
    let qemus = qemus();
    let error = text(&qemus[0], qemus[0].bytes.len());
    assert!(error.contains("release the guest"), "{error}");
}

#[test]
fn an_interrupted_postcopy_synchronises_pages_before_it_resumes() {
    let case = of_running_guest();
    let (mut machine, _) = brought(&case, case.covered);
    machine.ended(EndCause::Closed);
    assert!(machine.next(&[]).is_err());
    machine.reconnect(LIMIT);
    let now = Instant::now();
    assert_eq!(machine.deadline(now, 0), Some(now + LIMIT));
    let mut bytes = Vec::new();
    put_bitmap_request("rom", &mut bytes).unwrap();
    let asks = bytes.len();
    put_resume(&mut bytes);
    assert_eq!(
        machine.next(&bytes).unwrap(),
        Step::Do(Action::Bitmap(1), asks)
    );
    let keep_waiting = machine.next(&bytes[asks..]).unwrap();
    assert_eq!(keep_waiting, Step::Do(Action::Resume, bytes.len() - asks));
    assert_eq!(machine.deadline(now, 0), None);
    assert_eq!(machine.deadline(now, 1), Some(now + LIMIT / 2));
    // The negotiation is over, and pages may come.
    assert!(machine.next(&bytes).is_err());
}
