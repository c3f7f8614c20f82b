//! Tests a guest that runs at the destination before its pages arrive. The source is a save file, or code that the test
//! controls.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use hotlift::file::FileFormat;
use hotlift::guest::Guest;
use hotlift::options::{Limits, PostcopyOptions, StreamOptions};
use hotlift::relay::{Hooks, Incoming, Outgoing, RelaySettings, relay};
use hotlift::{Address, Control, MigrationError, MigrationEvent, Options, Status};
use hotlift_mem::{Backing, MemError, PAGE_SIZE};
use hotlift_vmm::GuestSettings;
use hotlift_wire::Reader;
use hotlift_wire::main_channel::{
    Command, Configuration, MainEncoder, postcopy, put_packaged_head,
};
use hotlift_wire::return_path::ReturnMessage;

use crate::probe::{Obeys, Probe, Quirks};
use crate::rig::{
    BOUND, blocks, destination, has_userfault, kinds, listen, reaches, settings, source,
};

fn options() -> Options {
    Options {
        stream: StreamOptions {
            multifd: Some(false),
            ..StreamOptions::default()
        },
        postcopy: PostcopyOptions {
            ram: true,
            ..PostcopyOptions::default()
        },
        limits: Limits {
            // A short timeout, so that a test's error is noticed soon.
            handshake_timeout: Duration::from_secs(20),
            ..Limits::default()
        },
        ..Options::default()
    }
}

/// Returns all pages of a guest.
fn pages(guest: &dyn Guest) -> Vec<(usize, usize)> {
    let blocks = guest.ram().iter().enumerate();
    blocks
        .flat_map(|(block, ram)| (0..ram.pages()).map(move |page| (block, page)))
        .collect()
}

/// Returns the nonzero pages of a guest.
fn filled(guest: &dyn Guest) -> Vec<(usize, usize)> {
    let mut all = pages(guest);
    all.retain(|(block, page)| !guest.ram()[*block].page_is_zero(*page));
    all
}

fn content(guest: &dyn Guest, block: usize, page: usize) -> [u8; PAGE_SIZE] {
    let mut bytes = [0; PAGE_SIZE];
    let ram = &guest.ram()[block];
    ram.read(page * PAGE_SIZE, &mut bytes).unwrap();
    bytes
}

/// Returns the FULL sections of a paused guest's devices.
fn devices(guest: &dyn Guest) -> Vec<u8> {
    let configuration = Configuration {
        machine: guest.machine().to_owned(),
        ..Configuration::default()
    };
    let mut skipped = Vec::new();
    let mut encoder = MainEncoder::new(&configuration, &mut skipped).unwrap();
    let ram = blocks(guest);
    encoder.ram_start(&ram, false, &mut skipped).unwrap();
    encoder.ram_end(&mut skipped).unwrap();
    encoder.ram_eos(&mut skipped).unwrap();
    let mut out = Vec::new();
    for device in guest.save_devices().unwrap() {
        let (id, version) = (device.instance_id, device.version_id);
        encoder
            .device(&device.idstr, id, version, &device.payload, &mut out)
            .unwrap();
    }
    out
}

/// Saves a guest to a file, over the channels of `options`.
fn save(guest: &Probe, options: &Options, folder: &Path) -> std::path::PathBuf {
    let saved = folder.join("saved");
    let outgoing = Outgoing::File {
        path: &saved,
        format: FileFormat::Hotlift,
    };
    let settings = RelaySettings {
        outgoing: StreamOptions {
            multifd_compression: hotlift_methods::method("zstd").unwrap(),
            max_bandwidth: 0,
            ..StreamOptions::default()
        },
        ..RelaySettings::default()
    };
    let (listener, address) = listen();
    let controls = [Control::new(), Control::new()];
    thread::scope(|scope| {
        let there = scope.spawn(|| {
            let from = Incoming::Listener(&listener);
            relay(from, &outgoing, &settings, &controls[1], Hooks::default())
        });
        let here = hotlift::migrate(guest, &address, options, &controls[0], &|_| {});
        let report = there.join().unwrap();
        let chain = |error: MigrationError| error.chain();
        let (sent, written) = (here.map_err(chain), report.map_err(chain));
        assert!(sent.is_ok() && written.is_ok(), "{sent:?} {written:?}");
    });
    assert!(!guest.runs(), "it is in the file");
    saved
}

/// Returns a control, and its events.
fn watched() -> (Control, Arc<Mutex<Vec<MigrationEvent>>>) {
    let events = Arc::new(Mutex::new(Vec::new()));
    let received = Arc::clone(&events);
    let control = Control::watched(Box::new(move |event| received.lock().unwrap().push(event)));
    (control, events)
}

/// A guest that arrives in a test that may fail: its vCPUs may then wait for pages forever, as would its drop.
struct Arriving(Option<Probe>);

impl Arriving {
    fn new(kind: hotlift_vmm::GuestKind, settings: &GuestSettings) -> Self {
        Self(Some(destination(kind, settings, Quirks::default())))
    }
}

impl Deref for Arriving {
    type Target = Probe;

    fn deref(&self) -> &Probe {
        self.0.as_ref().expect("until it is dropped")
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        if thread::panicking() {
            std::mem::forget(self.0.take());
        }
    }
}

/// Cancels a migration whose test has failed.
struct CancelsOnPanic<'a>(&'a Control);

impl Drop for CancelsOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.cancel();
        }
    }
}

/// A source controlled by a test.
struct Script<'a> {
    guest: &'a Probe,
    stream: TcpStream,
}

impl<'a> Script<'a> {
    fn connect(guest: &'a Probe, to: &Address) -> Self {
        let to = to.to_string();
        let stream = TcpStream::connect(to.trim_start_matches("tcp:")).unwrap();
        stream.set_read_timeout(Some(BOUND / 4)).unwrap();
        Self { guest, stream }
    }

    fn send(&self, bytes: &[u8]) {
        // A destination that has aborted may be gone.
        let _ = (&self.stream).write_all(bytes);
    }

    /// Returns the bytes up to the RAM blocks.
    fn opening(&self, advise: bool) -> Vec<u8> {
        let configuration = Configuration {
            machine: self.guest.machine().to_owned(),
            ..Configuration::default()
        };
        let mut out = Vec::new();
        let mut encoder = MainEncoder::new(&configuration, &mut out).unwrap();
        let page = PAGE_SIZE as u64;
        let advice = Command::PostcopyAdvise {
            page_sizes: Some((page, page)),
        };
        encoder.command(Command::OpenReturnPath, &mut out).unwrap();
        if advise {
            encoder.command(advice, &mut out).unwrap();
        }
        let blocks = blocks(self.guest);
        encoder.ram_start(&blocks, false, &mut out).unwrap();
        out
    }

    fn discards(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for block in self.guest.ram() {
            postcopy::put_discard(block.name(), 0, block.len() as u64, &mut out).unwrap();
        }
        out
    }

    /// Returns LISTEN, devices, a PING, RUN, after their length.
    fn package(&self) -> Vec<u8> {
        let mut package = Vec::new();
        postcopy::put_listen(&mut package);
        package.extend(devices(self.guest));
        Command::Ping(3).encode(&mut package);
        postcopy::put_run(&mut package);
        packaged(&package)
    }

    /// Sends everything up to the start of the guest.
    fn start(&self) {
        let parts = [self.opening(true), self.discards(), self.package()];
        self.send(&parts.concat());
    }

    /// Returns a section with one half of the nonzero pages.
    fn half(&self) -> Vec<u8> {
        let all = filled(self.guest);
        self.part(&all[..all.len() / 2])
    }

    /// Returns a section with these pages, without zero pages.
    fn part(&self, pages: &[(usize, usize)]) -> Vec<u8> {
        let mut out = vec![2, 0, 0, 0, 0];
        for (block, page) in pages {
            let bytes = content(self.guest, *block, *page);
            if bytes != [0; PAGE_SIZE] {
                out.extend(record(self.guest.ram()[*block].name(), *page, &bytes));
            }
        }
        out.extend(EOS);
        out
    }

    fn end(&self) {
        self.send(&the_end());
    }

    /// Reads the return path up to SHUT; returns its value, and the number of requested pages.
    fn shut(&self) -> (u32, usize) {
        let mut requests = 0;
        loop {
            match self.message() {
                Message::Shut(value) => return (value, requests),
                Message::Request(_) => requests += 1,
                Message::Other => {}
            }
        }
    }

    fn message(&self) -> Message {
        let mut bytes = vec![0; 4];
        let mut stream = &self.stream;
        stream.read_exact(&mut bytes).expect("a message");
        let length = usize::from(u16::from_be_bytes([bytes[2], bytes[3]]));
        bytes.resize(4 + length, 0);
        stream.read_exact(&mut bytes[4..]).expect("a message");
        match ReturnMessage::decode(&bytes).unwrap().0 {
            ReturnMessage::Shut(value) => Message::Shut(value),
            ReturnMessage::ReqPages { start, .. } | ReturnMessage::ReqPagesId { start, .. } => {
                Message::Request(usize::try_from(start).unwrap() / PAGE_SIZE)
            }
            _ => Message::Other,
        }
    }

    /// Reads up to a request; returns its page.
    fn request(&self) -> usize {
        loop {
            if let Message::Request(page) = self.message() {
                return page;
            }
        }
    }

    /// Returns the record of a page of the single RAM block.
    fn alone(&self, page: usize) -> Vec<u8> {
        record(
            self.guest.ram()[0].name(),
            page,
            &content(self.guest, 0, page),
        )
    }

    /// Asks for the received pages, and continues; returns the missing ones.
    fn resume(&self) -> Vec<(usize, usize)> {
        let missing = self.request_missing_pages();
        self.send_resume();
        missing
    }

    fn request_missing_pages(&self) -> Vec<(usize, usize)> {
        let mut missing = Vec::new();
        for (index, block) in self.guest.ram().iter().enumerate() {
            let mut request = Vec::new();
            postcopy::put_bitmap_request(block.name(), &mut request).unwrap();
            self.send(&request);
            assert!(matches!(self.message(), Message::Other));
            let mut bitmap = vec![0; 16 + postcopy::bitmap_len(block.pages())];
            (&self.stream).read_exact(&mut bitmap).unwrap();
            let mut reader = Reader::new(&bitmap);
            let bits = postcopy::read_bitmap(&mut reader, block.pages()).unwrap();
            let has_not_come = |page: &usize| bits[page / 8] >> (page % 8) & 1 == 0;
            missing.extend(
                (0..block.pages())
                    .filter(has_not_come)
                    .map(|page| (index, page)),
            );
        }
        missing
    }

    fn send_resume(&self) {
        let mut bytes = Vec::new();
        postcopy::put_resume(&mut bytes);
        self.send(&bytes);
        assert!(matches!(self.message(), Message::Other), "no RESUME_ACK");
    }
}

/// RAM_SAVE_FLAG_EOS and a footer.
const EOS: [u8; 13] = [0, 0, 0, 0, 0, 0, 0, 0x10, 0x7e, 0, 0, 0, 0];

/// Returns the last section of RAM, and EOF.
fn the_end() -> Vec<u8> {
    [&[3, 0, 0, 0, 0][..], &EOS, &[0]].concat()
}

enum Message {
    Shut(u32),
    /// A request for this page.
    Request(usize),
    Other,
}

fn record(block: &str, page: usize, bytes: &[u8]) -> Vec<u8> {
    let head = (page * PAGE_SIZE) as u64 | 8;
    let length = [u8::try_from(block.len()).unwrap()];
    [&head.to_be_bytes()[..], &length, block.as_bytes(), bytes].concat()
}

fn packaged(package: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    put_packaged_head(package.len() as u64, &mut out).unwrap();
    out.extend(package);
    out
}

/// Returns a paused guest.
fn paused(kind: hotlift_vmm::GuestKind, settings: &GuestSettings) -> Probe {
    let from = source(kind, settings, Quirks::default());
    from.let_write(50).unwrap();
    from.pause().unwrap();
    from
}

#[test]
fn a_guest_runs_from_a_save_file_before_its_pages_have_arrived() {
    if !has_userfault() {
        return;
    }
    for kind in kinds() {
        for backing in [Backing::Private, Backing::Shared] {
            let settings = GuestSettings {
                backing,
                ..settings()
            };
            let from = source(kind, &settings, Quirks::default());
            let folder = tempfile::tempdir().unwrap();
            let multifd = Options {
                stream: StreamOptions {
                    multifd: Some(backing == Backing::Shared),
                    max_bandwidth: 0,
                    ..StreamOptions::default()
                },
                ..Options::default()
            };
            let saved = save(&from, &multifd, folder.path());
            let to = Arriving::new(kind, &settings);
            let (listener, address) = listen();
            let (control, events) = watched();
            let options = options();
            let (sent, received) = thread::scope(|scope| {
                let there = scope.spawn(|| hotlift::receive(&*to, listener, &options, &control));
                let hooks = hotlift::lazy::Hooks::default();
                let here = Control::new();
                let sent = hotlift::lazy::restore(&saved, &address, false, &options, &here, hooks);
                (sent, there.join().unwrap())
            });
            let what = format!("{kind:?} {backing:?}");
            let chain = |error: MigrationError| format!("{what}: {}", error.chain());
            let (sent, received) = (
                sent.map_err(chain).unwrap(),
                received.map_err(chain).unwrap(),
            );
            let figures = received.postcopy.expect("a postcopy");
            assert_eq!(figures.pages, sent.normal_pages + sent.zero_pages, "{what}");
            println!(
                "{what}: {figures:?}, running after {} ms",
                received.total_ms
            );
            to.let_write(50).unwrap();
            to.check().unwrap_or_else(|error| panic!("{what}: {error}"));
            let expected = [
                MigrationEvent::Status(Status::Setup),
                MigrationEvent::Status(Status::Active),
                MigrationEvent::Resumed,
                MigrationEvent::Status(Status::PostcopyActive),
                MigrationEvent::Status(Status::Completed),
            ];
            assert_eq!(*events.lock().unwrap(), expected, "{what}");
        }
    }
}

#[test]
fn pages_received_before_postcopy_stay_unless_discarded() {
    if !has_userfault() {
        return;
    }
    for kind in kinds() {
        let from = paused(kind, &settings());
        let to = Arriving::new(kind, &settings());
        let (listener, address) = listen();
        let (options, control) = (options(), Control::new());
        thread::scope(|scope| {
            let there = scope.spawn(|| hotlift::receive(&*to, listener, &options, &control));
            let _ends = CancelsOnPanic(&control);
            let script = Script::connect(&from, &address);
            script.send(&script.opening(true));
            // Every second run of 16 pages is sent before; of each, the first half is out of date.
            let all = pages(&from);
            let (early, late): (Vec<_>, Vec<_>) = all
                .iter()
                .copied()
                .partition(|(_, page)| page / 16 % 2 == 0);
            let (stale, good): (Vec<_>, Vec<_>) =
                early.iter().copied().partition(|(_, page)| page % 16 < 8);
            let mut part = vec![2, 0, 0, 0, 0];
            for (block, page) in &early {
                let mut bytes = content(&from, *block, *page);
                if page % 16 < 8 {
                    bytes[9] ^= 0xff;
                }
                part.extend(record(from.ram()[*block].name(), *page, &bytes));
            }
            part.extend(EOS);
            script.send(&part);
            let mut discards = Vec::new();
            for (block, page) in all.iter().filter(|page| !good.contains(page)) {
                let start = (page * PAGE_SIZE) as u64;
                let name = from.ram()[*block].name();
                postcopy::put_discard(name, start, PAGE_SIZE as u64, &mut discards).unwrap();
            }
            script.send(&discards);
            script.send(&script.package());
            script.send(&script.part(&[stale, late].concat()));
            script.end();
            assert_eq!(script.shut().0, 0);
            script.stream.shutdown(Shutdown::Both).unwrap();
            there.join().unwrap().unwrap();
        });
        to.let_write(50).unwrap();
        to.check().unwrap();
    }
}

#[test]
fn blocktime_is_measured_per_vcpu_if_enabled() {
    if !has_userfault() {
        return;
    }
    for kind in kinds() {
        for counted in [true, false] {
            let from = paused(kind, &settings());
            let to = Arriving::new(kind, &settings());
            let (listener, address) = listen();
            let options = Options {
                postcopy: PostcopyOptions {
                    blocktime: counted,
                    ..options().postcopy
                },
                ..options()
            };
            let control = Control::new();
            let report = thread::scope(|scope| {
                let there = scope.spawn(|| hotlift::receive(&*to, listener, &options, &control));
                let _ends = CancelsOnPanic(&control);
                let script = Script::connect(&from, &address);
                script.start();
                // With one vCPU, the first request of the running guest is the vCPU's.
                reaches(&control, Status::PostcopyActive);
                script.request();
                script.send(&script.part(&pages(&from)));
                script.end();
                assert_eq!(script.shut().0, 0);
                there.join().unwrap().unwrap()
            });
            to.let_write(50).unwrap();
            to.check().unwrap();
            let postcopy = report.postcopy.expect("a postcopy");
            assert!(postcopy.requests > 0);
            let Some(blocktime) = postcopy.blocktime else {
                assert!(!counted, "{kind:?}");
                continue;
            };
            assert!(
                counted && blocktime.vcpu_waits > 0,
                "{kind:?}: {blocktime:?}"
            );
            assert_eq!(blocktime.vcpu_ms, [blocktime.all_ms], "it is the only one");
            let [median, one_in_100, longest] = blocktime.vcpu_wait_us;
            assert!(0.0 < median && median <= one_in_100 && one_in_100 <= longest);
            assert!(blocktime.by_time.iter().sum::<u64>() >= blocktime.vcpu_waits);
        }
    }
}

/// Sends the data of `script`, and closes; returns the destination's error. It must not have run the guest.
fn refused(options: &Options, quirks: Quirks, script: &dyn Fn(&Script<'_>)) -> MigrationError {
    let kind = hotlift_vmm::GuestKind::Threads;
    let from = paused(kind, &settings());
    let to = destination(kind, &settings(), quirks);
    let (listener, address) = listen();
    let (control, events) = watched();
    let error = thread::scope(|scope| {
        let there = scope.spawn(|| hotlift::receive(&to, listener, options, &control));
        let source = Script::connect(&from, &address);
        script(&source);
        source.stream.shutdown(Shutdown::Write).unwrap();
        there.join().unwrap().expect_err("it must be refused")
    });
    assert!(!to.runs(), "{}", error.chain());
    assert!(!events.lock().unwrap().contains(&MigrationEvent::Resumed));
    assert_eq!(control.status(), Status::Failed);
    error
}

#[test]
fn a_source_that_vanishes_before_run_keeps_its_guest() {
    if !has_userfault() {
        return;
    }
    let until = |parts: usize, cut: usize| {
        refused(&options(), Quirks::default(), &|script| {
            let all = [script.opening(true), script.discards(), script.package()];
            let bytes = all[..parts].concat();
            script.send(&bytes[..bytes.len() - cut]);
        })
    };
    for (parts, cut) in [(1, 0), (2, 0), (3, 1), (3, 300)] {
        let error = until(parts, cut);
        assert!(
            matches!(error, MigrationError::Closed { .. }),
            "{parts} {error}"
        );
    }
}

#[test]
fn a_guest_that_cannot_load_or_run_stays_with_its_source() {
    if !has_userfault() {
        return;
    }
    for (load, resume) in [(Obeys::No, Obeys::Yes), (Obeys::Yes, Obeys::No)] {
        let quirks = Quirks {
            load,
            resume,
            ..Quirks::default()
        };
        let error = refused(&options(), quirks, &|script| {
            script.start();
            // Until the destination has decided.
            let mut rest = Vec::new();
            let _ = (&script.stream).read_to_end(&mut rest);
        });
        assert!(
            error.chain().contains("configured to fail"),
            "{}",
            error.chain()
        );
    }
}

#[test]
fn commands_out_of_order_end_the_migration_before_the_guest_runs() {
    if !has_userfault() {
        return;
    }
    let command = |put: fn(&mut Vec<u8>)| {
        let mut out = Vec::new();
        put(&mut out);
        out
    };
    let (listen, run) = (command(postcopy::put_listen), command(postcopy::put_run));
    let resume = command(postcopy::put_resume);
    let outside = {
        let mut out = Vec::new();
        let name = "ram".repeat(3);
        postcopy::put_discard(&name, 0, PAGE_SIZE as u64, &mut out).unwrap();
        out
    };
    let huge = b"\x08\0\x07\0\x04\xff\xff\xff\xff".to_vec();
    type Bytes<'a> = &'a dyn Fn(&Script<'_>) -> Vec<u8>;
    let ready = |script: &Script<'_>| [script.opening(true), script.discards()].concat();
    let behind = |more: &[u8]| {
        let more = more.to_vec();
        move |script: &Script<'_>| [ready(script), more.clone()].concat()
    };
    let beyond = |script: &Script<'_>| {
        let mut out = script.opening(true);
        let ram = &script.guest.ram()[0];
        postcopy::put_discard(ram.name(), ram.len() as u64, PAGE_SIZE as u64, &mut out).unwrap();
        out
    };
    let cases: &[(&str, Bytes<'_>)] = &[
        ("without ADVISE", &|script| {
            [script.opening(false), script.discards()].concat()
        }),
        ("a package without ADVISE", &|script| {
            [script.opening(false), script.package()].concat()
        }),
        ("a package without DISCARD", &|script| {
            [script.opening(true), script.package()].concat()
        }),
        ("a range beyond the block", &beyond),
        ("an unknown block", &behind(&outside)),
        ("a package of 4 GiB", &behind(&huge)),
        ("LISTEN alone", &behind(&listen)),
        ("RUN alone", &behind(&run)),
        ("RESUME", &behind(&resume)),
        ("an empty package", &behind(&packaged(&[]))),
        ("RUN without LISTEN", &behind(&packaged(&run))),
        ("LISTEN without RUN", &behind(&packaged(&listen))),
        (
            "LISTEN twice",
            &behind(&packaged(&[&listen[..], &listen, &run].concat())),
        ),
        (
            "RUN twice",
            &behind(&packaged(&[&listen[..], &run, &run].concat())),
        ),
        (
            "half a command",
            &behind(&packaged(&[&listen[..], &run[..3]].concat())),
        ),
        (
            "a package in a package",
            &behind(&packaged(&[&listen[..], &packaged(&run)].concat())),
        ),
    ];
    for (what, bytes) in cases {
        let error = refused(&options(), Quirks::default(), &|script| {
            script.send(&bytes(script));
        });
        let named = matches!(
            error,
            MigrationError::Protocol { .. } | MigrationError::Wire { .. }
        );
        assert!(named, "{what}: {}", error.chain());
    }
}

#[test]
fn a_destination_without_postcopy_ram_refuses_with_its_name() {
    let options = Options {
        postcopy: PostcopyOptions {
            ram: false,
            ..options().postcopy
        },
        ..options()
    };
    let error = refused(&options, Quirks::default(), &|script| script.start());
    let words = error.chain();
    assert!(words.contains("postcopy-ram"), "{words}");
}

#[test]
fn a_guest_whose_memory_can_have_no_missing_pages_is_refused() {
    if !has_userfault() {
        return;
    }
    // Two are impossible: the first one's pages are registered already.
    let taken = destination(
        hotlift_vmm::GuestKind::Threads,
        &settings(),
        Quirks::default(),
    );
    let ram = taken.ram().to_vec();
    let missing = hotlift_mem::MissingPages::register(&ram).unwrap();
    let quirks = Quirks {
        ram: Some(ram),
        ..Quirks::default()
    };
    let error = refused(&options(), quirks, &|script| script.start());
    let is_named = matches!(&error, MigrationError::Memory(MemError::NotLazy { .. }));
    assert!(is_named, "{}", error.chain());
    missing.end();
}

/// Recovery attempts; the last one sends the rest.
const ATTEMPTS: usize = 4;

/// Starts a guest, breaks its connection by `broken`, and sends it the rest over the last of `attempts` new connections. If
/// `waited`, the guest waits for a page: the last connection must bring its request again.
fn recovers(waited: bool, attempts: usize, broken: &dyn Fn(&Script<'_>)) {
    if !has_userfault() {
        return;
    }
    for kind in kinds() {
        let from = paused(kind, &settings());
        let to = Arriving::new(kind, &settings());
        let (listener, address) = listen();
        let (control, events) = watched();
        let options = options();
        thread::scope(|scope| {
            let there = scope.spawn(|| hotlift::receive(&*to, listener, &options, &control));
            let _ends = CancelsOnPanic(&control);
            let script = Script::connect(&from, &address);
            script.start();
            reaches(&control, Status::PostcopyActive);
            let (again, _) = listen();
            control.recover(again).expect_err("nothing is lost");
            broken(&script);
            reaches(&control, Status::PostcopyPaused);
            assert!(to.runs());
            drop(script);
            let wait_again = || {
                let (listener, address) = listen();
                control.recover(listener).expect("it waits");
                address
            };
            let mut address = wait_again();
            // The first new connection sends nothing useful, and the second ends before it has its requests: both leave the
            // state as it was. The third resumes, and is cut.
            for attempt in ATTEMPTS - attempts..ATTEMPTS {
                let script = Script::connect(&from, &address);
                match attempt {
                    0 => script.send(b"\x08\0\x05\0\0"),
                    1 => script.send(b"\x08\0\x0a\0"),
                    2 => {
                        script.resume();
                    }
                    _ => {
                        let missing = script.resume();
                        assert!(missing.len() < pages(&from).len(), "some had come");
                        if waited {
                            script.request();
                        }
                        script.send(&script.part(&missing));
                        script.end();
                        assert_eq!(script.shut().0, 0);
                        break;
                    }
                }
                // The destination may have closed it by now.
                let _ = script.stream.shutdown(Shutdown::Write);
                // Until the destination has dropped it.
                let mut rest = Vec::new();
                let _ = (&script.stream).read_to_end(&mut rest);
                reaches(&control, Status::PostcopyPaused);
                if attempt == 2 {
                    address = wait_again();
                }
            }
            there.join().unwrap().unwrap();
        });
        to.let_write(50).unwrap();
        to.check().unwrap();
        let resumed = events.lock().unwrap();
        let resumed = resumed
            .iter()
            .filter(|event| **event == MigrationEvent::Resumed);
        assert_eq!(resumed.count(), 1, "it ran all the time");
    }
}

#[test]
fn a_source_that_vanishes_after_run_is_recovered_from() {
    recovers(false, ATTEMPTS, &|script| {
        let part = script.half();
        script.send(&part[..part.len() - 2000]);
        script.stream.shutdown(Shutdown::Write).unwrap();
    });
}

/// Runs `then` with a guest at a destination with `options` whose source has gone, then completes its recovery. `then` gets the
/// destination's control and the source's guest.
fn without_source(options: &Options, then: &dyn Fn(&Control, &Probe)) {
    if !has_userfault() {
        return;
    }
    let kind = hotlift_vmm::GuestKind::Threads;
    let from = paused(kind, &settings());
    let to = Arriving::new(kind, &settings());
    let (listener, address) = listen();
    let control = Control::new();
    thread::scope(|scope| {
        let there = scope.spawn(|| hotlift::receive(&*to, listener, options, &control));
        let _ends = CancelsOnPanic(&control);
        let script = Script::connect(&from, &address);
        script.start();
        reaches(&control, Status::PostcopyActive);
        drop(script);
        reaches(&control, Status::PostcopyPaused);
        then(&control, &from);
        // The next connection is complete.
        let (listener, address) = listen();
        control.recover(listener).expect("it waits");
        let script = Script::connect(&from, &address);
        let missing = script.resume();
        script.send(&script.part(&missing));
        script.end();
        assert_eq!(script.shut().0, 0);
        there.join().unwrap().unwrap();
    });
    to.let_write(50).unwrap();
    to.check().unwrap();
}

/// Requests bitmaps without end and reads none, until the destination's buffers are full.
fn fill_up(script: &Script<'_>) {
    let mut request = Vec::new();
    let name = script.guest.ram()[0].name();
    postcopy::put_bitmap_request(name, &mut request).unwrap();
    script.stream.set_write_timeout(Some(BOUND / 64)).unwrap();
    while (&script.stream).write_all(&request).is_ok() {}
}

#[test]
fn a_source_that_never_reads_the_answer_does_not_block_another() {
    without_source(&options(), &|control, from| {
        let (listener, address) = listen();
        control.recover(listener).expect("it waits");
        let script = Script::connect(from, &address);
        fill_up(&script);
        reaches(control, Status::PostcopyRecover);
        let (listener, address) = listen();
        control.recover(listener).expect("nothing is agreed yet");
        reaches(control, Status::PostcopyPaused);
        // The destination waits at the new address, and accepts a source there.
        let script = Script::connect(from, &address);
        script.request_missing_pages();
        drop(script);
    });
}

#[test]
fn a_source_that_never_resumes_times_out() {
    let options = Options {
        limits: Limits {
            handshake_timeout: Duration::from_millis(500),
            ..options().limits
        },
        ..options()
    };
    without_source(&options, &|control, from| {
        let (listener, address) = listen();
        control.recover(listener).expect("it waits");
        // It never reads an answer, and blocks the thread that writes them.
        let script = Script::connect(from, &address);
        fill_up(&script);
        reaches(control, Status::PostcopyPaused);
    });
}

#[test]
fn a_postcopy_paused_at_its_destination_can_be_resumed() {
    without_source(&options(), &|control, from| {
        assert!(!control.pause_postcopy(), "it is");
        let (listener, address) = listen();
        control.recover(listener).expect("it waits");
        let script = Script::connect(from, &address);
        script.resume();
        reaches(control, Status::PostcopyActive);
        assert!(control.pause_postcopy());
        reaches(control, Status::PostcopyPaused);
    });
}

#[test]
fn a_page_that_comes_twice_pauses_the_migration_and_not_the_guest() {
    recovers(true, 1, &|script| {
        let (block, page) = filled(script.guest)[0];
        let one = script.part(&[(block, page)]);
        let mut other = content(script.guest, block, page);
        other[5] ^= 1;
        let other = record(script.guest.ram()[block].name(), page, &other);
        script.send(&[&one[..], &[2, 0, 0, 0, 0], &other].concat());
    });
}

#[test]
fn pages_outside_the_blocks_pause_the_migration_and_not_the_guest() {
    for beyond in [0, 1 << 40] {
        recovers(false, 1, &|script| {
            script.send(&script.half());
            let ram = &script.guest.ram()[0];
            let page = record(ram.name(), ram.pages() + beyond, &[1; PAGE_SIZE]);
            script.send(&[&[2, 0, 0, 0, 0][..], &page].concat());
        });
    }
}

#[test]
fn requested_pages_use_the_preempt_channel_even_after_the_end_of_main() {
    if !has_userfault() {
        return;
    }
    let options = Options {
        postcopy: PostcopyOptions {
            preempt: true,
            ..options().postcopy
        },
        ..options()
    };
    for kind in kinds() {
        let from = paused(kind, &settings());
        let to = Arriving::new(kind, &settings());
        let (listener, address) = listen();
        let control = Control::new();
        thread::scope(|scope| {
            let there = scope.spawn(|| hotlift::receive(&*to, listener, &options, &control));
            let _ends = CancelsOnPanic(&control);
            let script = Script::connect(&from, &address);
            script.send(&script.opening(true));
            reaches(&control, Status::Active);
            let preempt = Script::connect(&from, &address).stream;
            script.send(&[script.discards(), script.package()].concat());
            let asked = script.request();
            (&preempt).write_all(&script.alone(asked)).unwrap();
            // The guest continues, to a page that then comes over another pair of connections.
            script.request();
            preempt.shutdown(Shutdown::Both).unwrap();
            reaches(&control, Status::PostcopyPaused);
            let (listener, address) = listen();
            control.recover(listener).expect("it waits");
            let script = Script::connect(&from, &address);
            let mut missing = script.request_missing_pages();
            let preempt = Script::connect(&from, &address).stream;
            script.send_resume();
            let asked = script.request();
            assert!(missing.contains(&(0, asked)), "{asked} is there");
            missing.retain(|(_, page)| *page != asked);
            let mut part = vec![2, 0, 0, 0, 0];
            missing
                .iter()
                .for_each(|(_, page)| part.extend(script.alone(*page)));
            part.extend(EOS);
            script.send(&part);
            // The end comes with a PING: its answer proves that both were read.
            let mut end = Vec::new();
            Command::Ping(9).encode(&mut end);
            end.extend(the_end());
            script.send(&end);
            while !matches!(script.message(), Message::Other) {}
            (&preempt).write_all(&script.alone(asked)).unwrap();
            assert_eq!(script.shut().0, 0);
            there.join().unwrap().unwrap();
        });
        to.let_write(50).unwrap();
        to.check().unwrap();
    }
}

#[test]
fn a_page_missing_after_the_end_of_main_pauses_the_migration() {
    if !has_userfault() {
        return;
    }
    let options = Options {
        postcopy: PostcopyOptions {
            preempt: true,
            ..options().postcopy
        },
        limits: Limits {
            handshake_timeout: Duration::from_secs(1),
            ..options().limits
        },
        ..options()
    };
    let kind = hotlift_vmm::GuestKind::Threads;
    let from = paused(kind, &settings());
    // Its threads wait for pages until this process ends.
    let to = Box::leak(Box::new(destination(kind, &settings(), Quirks::default())));
    let (listener, address) = listen();
    let control = Control::new();
    thread::scope(|scope| {
        let there = scope.spawn(|| hotlift::receive(to, listener, &options, &control));
        let _ends = CancelsOnPanic(&control);
        let script = Script::connect(&from, &address);
        script.send(&script.opening(true));
        reaches(&control, Status::Active);
        let _preempt = Script::connect(&from, &address);
        script.send(&[script.discards(), script.package()].concat());
        script.request();
        script.end();
        reaches(&control, Status::PostcopyPaused);
        // A source that resumes without that connection is dropped too.
        let (listener, address) = listen();
        control.recover(listener).expect("it waits");
        let script = Script::connect(&from, &address);
        script.request_missing_pages();
        let mut resume = Vec::new();
        postcopy::put_resume(&mut resume);
        script.send(&resume);
        reaches(&control, Status::PostcopyPaused);
        control.cancel();
        there.join().unwrap().unwrap_err();
    });
}

#[test]
fn a_source_without_the_agreed_preempt_channel_keeps_its_guest() {
    if !has_userfault() {
        return;
    }
    let options = Options {
        postcopy: PostcopyOptions {
            preempt: true,
            ..options().postcopy
        },
        limits: Limits {
            handshake_timeout: Duration::from_millis(500),
            ..options().limits
        },
        ..options()
    };
    let error = refused(&options, Quirks::default(), &|script| {
        script.start();
        let mut rest = Vec::new();
        let _ = (&script.stream).read_to_end(&mut rest);
    });
    let words = error.chain();
    assert!(words.contains("postcopy-preempt"), "{words}");
}

#[test]
fn a_cancel_while_the_guest_waits_for_pages_reports_missing_pages() {
    if !has_userfault() {
        return;
    }
    let kind = hotlift_vmm::GuestKind::Threads;
    let from = paused(kind, &settings());
    // Its threads wait for pages until this process ends.
    let to = Box::leak(Box::new(destination(kind, &settings(), Quirks::default())));
    let (listener, address) = listen();
    let (options, control) = (options(), Control::new());
    let error = thread::scope(|scope| {
        let there = scope.spawn(|| hotlift::receive(to, listener, &options, &control));
        let script = Script::connect(&from, &address);
        script.start();
        reaches(&control, Status::PostcopyActive);
        drop(script);
        reaches(&control, Status::PostcopyPaused);
        control.cancel();
        there.join().unwrap().unwrap_err()
    });
    assert!(
        matches!(error, MigrationError::PagesMissing { .. }),
        "{error}"
    );
    assert_eq!(control.status(), Status::PostcopyPaused);
}
