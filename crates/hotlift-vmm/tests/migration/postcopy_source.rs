//! Tests the source of a postcopy: the bytes that it sends, which side owns the guest after a failure, and the
//! recovery.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use hotlift::figures::SourceReport;
use hotlift::guest::{Guest, GuestError};
use hotlift::options::{PostcopyOptions, StreamOptions, SwitchoverOptions};
use hotlift::{Address, Control, MigrationError, Options, Status};
use hotlift_mem::PAGE_SIZE;
use hotlift_vmm::GuestKind;
use hotlift_wire::WireError;
use hotlift_wire::main_channel::postcopy::{
    PostcopyCommand, PreemptDecoder, PreemptRecord, put_bitmap,
};
use hotlift_wire::main_channel::{
    Command, DeviceLengths, MainDecoder, MainEvent, PageContent, Step,
};
use hotlift_wire::return_path::ReturnMessage;

use crate::probe::{Obeys, Probe, Quirks, let_write};
use crate::rig::{
    self, BOUND, Holder, destination, has_userfault, kinds, listen, reaches, settings,
};

fn options() -> Options {
    Options {
        stream: StreamOptions {
            multifd: Some(false),
            max_bandwidth: 0,
            ..StreamOptions::default()
        },
        postcopy: PostcopyOptions {
            ram: true,
            ..PostcopyOptions::default()
        },
        switchover: SwitchoverOptions {
            // Never enough for some dirty pages.
            downtime_limit: Duration::ZERO,
            ..SwitchoverOptions::default()
        },
        ..Options::default()
    }
}

/// Items that a destination reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    Discard,
    Ping(u32),
    Packaged,
    Run,
    Page,
    RecvBitmap(usize),
    Resume,
    Eof,
    Other,
    /// The source has closed the connection.
    Closed,
}

/// A destination controlled by a test, like QEMU: it has memory, but no guest.
struct Script {
    stream: TcpStream,
    decoder: MainDecoder,
    unread: Vec<u8>,
    blocks: Vec<String>,
    ram: Vec<Vec<Option<Vec<u8>>>>,
    advised: bool,
    discarded: usize,
    runs: bool,
}

impl Script {
    fn accept(listener: &TcpListener) -> Self {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(BOUND / 4)).unwrap();
        Self {
            stream,
            decoder: MainDecoder::new(DeviceLengths::LengthPrefixed).taking_postcopy(),
            unread: Vec::new(),
            blocks: Vec::new(),
            ram: Vec::new(),
            advised: false,
            discarded: 0,
            runs: false,
        }
    }

    /// Returns the same destination with another connection.
    fn reconnected(mut self, listener: &TcpListener) -> Self {
        self.decoder.reconnect();
        self.stream = listener.accept().unwrap().0;
        self.stream.set_read_timeout(Some(BOUND / 4)).unwrap();
        self.unread.clear();
        self
    }

    fn send(&mut self, message: ReturnMessage<'_>) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes).unwrap();
        self.stream.write_all(&bytes).unwrap();
    }

    /// Reads one item. Applies pages and discards.
    fn next(&mut self) -> Seen {
        loop {
            let step = self.decoder.next(&self.unread).unwrap();
            let Step::Event { event, consumed } = step else {
                let mut bytes = [0; 64 << 10];
                match self.stream.read(&mut bytes) {
                    Ok(0) | Err(_) => return Seen::Closed,
                    Ok(read) => self.unread.extend_from_slice(&bytes[..read]),
                }
                continue;
            };
            let seen = match event {
                MainEvent::Command(Command::Ping(value)) => Seen::Ping(value),
                MainEvent::Command(Command::PostcopyAdvise { page_sizes }) => {
                    assert_eq!(page_sizes, Some((4096, 4096)));
                    self.advised = true;
                    Seen::Other
                }
                MainEvent::RamBlocks(blocks) => {
                    assert!(self.advised, "ADVISE comes before RAM");
                    for block in &blocks {
                        let pages = usize::try_from(block.used_length).unwrap() / PAGE_SIZE;
                        self.ram.push(vec![None; pages]);
                        self.blocks.push(block.name.clone());
                    }
                    Seen::Other
                }
                MainEvent::RamPage {
                    block,
                    offset,
                    content,
                } => {
                    let page = usize::try_from(offset).unwrap() / PAGE_SIZE;
                    let place = &mut self.ram[block][page];
                    assert!(!self.runs || place.is_none(), "page {page} comes twice");
                    *place = Some(match content {
                        PageContent::Zero => vec![0; PAGE_SIZE],
                        PageContent::Normal(bytes) => bytes.to_vec(),
                        other => panic!("{other:?}"),
                    });
                    Seen::Page
                }
                MainEvent::Postcopy(command) => match command {
                    PostcopyCommand::Discard { block, ranges } => {
                        for (start, length) in ranges.iter() {
                            let first = usize::try_from(start).unwrap() / PAGE_SIZE;
                            let pages = usize::try_from(length).unwrap() / PAGE_SIZE;
                            self.ram[block][first..first + pages].fill(None);
                            self.discarded += pages;
                        }
                        Seen::Discard
                    }
                    PostcopyCommand::Packaged(_) => Seen::Packaged,
                    PostcopyCommand::Listen => {
                        assert!(self.discarded > 0, "a QEMU waits for ever");
                        Seen::Other
                    }
                    PostcopyCommand::Run => {
                        self.runs = true;
                        Seen::Run
                    }
                    PostcopyCommand::RecvBitmap(block) => Seen::RecvBitmap(block),
                    PostcopyCommand::Resume => Seen::Resume,
                },
                MainEvent::Eof => Seen::Eof,
                _ => Seen::Other,
            };
            self.unread.drain(..consumed);
            return seen;
        }
    }

    /// Answers PINGs until it reads `what`.
    fn until(&mut self, what: impl Fn(Seen) -> bool) -> Seen {
        loop {
            let seen = self.next();
            if what(seen) {
                return seen;
            }
            match seen {
                Seen::Closed => panic!("closed"),
                Seen::Ping(value) => self.send(ReturnMessage::Pong(value)),
                _ => {}
            }
        }
    }

    /// Reads up to RUN; does not answer the PING that asks for the loaded devices.
    fn up_to_run(&mut self) -> u32 {
        self.until(|seen| seen == Seen::Packaged);
        let Seen::Ping(loaded) = self.until(|seen| matches!(seen, Seen::Ping(_))) else {
            unreachable!("that is what was waited for")
        };
        self.until(|seen| seen == Seen::Run);
        loaded
    }

    fn missing(&self) -> Vec<(usize, usize)> {
        let blocks = self.ram.iter().enumerate();
        let pages = blocks.flat_map(|(block, ram)| (0..ram.len()).map(move |page| (block, page)));
        pages
            .filter(|(block, page)| self.ram[*block][*page].is_none())
            .collect()
    }

    fn ask_for(&mut self, (block, page): (usize, usize)) {
        let name = self.blocks[block].clone();
        self.send(ReturnMessage::ReqPagesId {
            start: (page * PAGE_SIZE) as u64,
            length: 4096,
            block: &name,
        });
    }

    /// Reports completion, once all pages are there, and compares them with the source's.
    fn completes(mut self, source: &Probe) {
        self.until(|seen| seen == Seen::Eof);
        self.send(ReturnMessage::Shut(0));
        assert_eq!(self.missing(), []);
        for (block, ram) in source.ram().iter().zip(&self.ram) {
            for (page, has) in ram.iter().enumerate() {
                let mut bytes = vec![0; PAGE_SIZE];
                block.read(page * PAGE_SIZE, &mut bytes).unwrap();
                assert!(*has == Some(bytes), "page {page}");
            }
        }
    }

    /// Sends the messages of a destination whose source has returned.
    fn send_received_bitmap(&mut self) {
        loop {
            match self.next() {
                Seen::RecvBitmap(block) => {
                    let name = self.blocks[block].clone();
                    self.send(ReturnMessage::RecvBitmap { block: &name });
                    let pages = &self.ram[block];
                    let word = |word: usize| {
                        let bits = pages[word * 64..].iter().take(64).enumerate();
                        bits.fold(0, |bits, (bit, page)| {
                            bits | u64::from(page.is_some()) << bit
                        })
                    };
                    let mut bitmap = Vec::new();
                    put_bitmap(pages.len(), word, &mut bitmap);
                    self.stream.write_all(&bitmap).unwrap();
                }
                Seen::Resume => {
                    self.send(ReturnMessage::ResumeAck(1));
                    return;
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// The connection for requested pages.
struct Preempt {
    stream: TcpStream,
    decoder: PreemptDecoder,
    unread: Vec<u8>,
}

impl Preempt {
    fn accept(listener: &TcpListener, source: &Probe) -> Self {
        let (stream, _) = listener.accept().expect("a second connection");
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(BOUND / 4)).unwrap();
        Self {
            stream,
            decoder: PreemptDecoder::new(rig::blocks(source)),
            unread: Vec::new(),
        }
    }

    /// Expects this page next, and stores it: main must not send it again.
    fn brings(&mut self, place: (usize, usize), script: &mut Script) {
        loop {
            match self.decoder.next(&self.unread) {
                Ok((
                    PreemptRecord::Page {
                        block,
                        offset,
                        content,
                    },
                    length,
                )) => {
                    let page = usize::try_from(offset).unwrap() / PAGE_SIZE;
                    assert_eq!((block, page), place);
                    let bytes = content.map_or(vec![0; PAGE_SIZE], |bytes| bytes.to_vec());
                    script.ram[block][page] = Some(bytes);
                    self.unread.drain(..length);
                    return;
                }
                Err(WireError::Truncated { .. }) => {}
                other => panic!("{other:?}"),
            }
            let mut bytes = [0; 8 << 10];
            let read = self.stream.read(&mut bytes).expect("a page");
            assert_ne!(read, 0, "it has ended");
            self.unread.extend_from_slice(&bytes[..read]);
        }
    }

    fn is_closed(&mut self) {
        let mut rest = Vec::new();
        let _ = self.stream.read_to_end(&mut rest);
        assert_eq!(rest, b"");
    }
}

fn port() -> (TcpListener, Address) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    (listener, address.parse().unwrap())
}

/// Starts a guest whose migration of `control` switches to postcopy after the first round.
fn leaves(kind: GuestKind, control: &Control) -> Probe {
    let control = control.clone();
    let quirks = Quirks {
        sync: Some(Box::new(move |guest, number, into| {
            if number == 1 {
                let_write(guest, 64).map_err(|reason| GuestError::new("write", reason))?;
                control.start_postcopy();
            }
            guest.sync_dirty_log(0, into)
        })),
        ..Quirks::default()
    };
    rig::source(kind, &settings(), quirks)
}

/// Migrates a guest of that kind to the destination `destination`; returns the guest and the outcome.
fn migrates(
    kind: GuestKind,
    options: &Options,
    destination: impl FnOnce(TcpListener, &Probe, &Control) + Send,
) -> (Probe, Result<SourceReport, MigrationError>) {
    let (listener, to) = port();
    let control = Control::new();
    let source = leaves(kind, &control);
    let outcome = thread::scope(|scope| {
        let there = scope.spawn(|| destination(listener, &source, &control));
        let outcome = hotlift::migrate(&source, &to, options, &control, &|_| {});
        there.join().unwrap();
        outcome
    });
    (source, outcome)
}

#[test]
fn requested_pages_arrive_while_devices_load_and_each_page_once() {
    for kind in kinds() {
        let (source, report) = migrates(kind, &options(), |listener, source, _| {
            let mut script = Script::accept(&listener);
            let loaded = script.up_to_run();
            let missing = script.missing();
            assert!(!missing.is_empty() && missing.len() < 2048, "{missing:?}");
            // The background transfer starts once the devices are loaded: these pages come because of the requests.
            for page in missing.iter().rev().take(3) {
                script.ask_for(*page);
                script.until(|seen| seen == Seen::Page);
                assert!(script.ram[page.0][page.1].is_some(), "{page:?}");
            }
            // The source must resend a page that the destination has: it was lost before it was placed.
            let there = (0, (0..2048).find(|page| script.ram[0][*page].is_some()));
            let there = (there.0, there.1.unwrap());
            if !missing.contains(&there) {
                script.ram[there.0][there.1] = None;
                script.ask_for(there);
                script.until(|seen| seen == Seen::Page);
            }
            script.send(ReturnMessage::Pong(loaded));
            script.completes(source);
        });
        let report = report.unwrap();
        assert!(!source.runs(), "it is elsewhere");
        assert!(report.postcopy_requests >= 3, "{report:?}");
        assert!(report.bytes.postcopy > 0, "{report:?}");
        assert_eq!(report.bytes.sum(), report.transferred_bytes);
    }
}

#[test]
fn requested_pages_use_the_preempt_channel_and_its_replacement() {
    // The background transfer is far from the requested pages.
    let slow = Options {
        postcopy: PostcopyOptions {
            preempt: true,
            max_bandwidth: 64 << 10,
            ..options().postcopy
        },
        ..options()
    };
    for kind in kinds() {
        let (source, report) = migrates(kind, &slow, |listener, source, control| {
            let mut script = Script::accept(&listener);
            script.up_to_run();
            let mut preempt = Preempt::accept(&listener, source);
            let missing = script.missing();
            let [.., before_last, last] = missing[..] else {
                panic!("{missing:?}");
            };
            script.ask_for(last);
            preempt.brings(last, &mut script);
            script.stream.shutdown(Shutdown::Both).unwrap();
            reaches(control, Status::PostcopyPaused);
            preempt.is_closed();
            let (again, to) = port();
            assert!(control.resume(&to));
            script = script.reconnected(&again);
            script.send_received_bitmap();
            // The new connection for requested pages exists before the source continues.
            again.set_nonblocking(true).unwrap();
            let mut preempt = Preempt::accept(&again, source);
            script.ask_for(before_last);
            preempt.brings(before_last, &mut script);
            control.change(&options());
            script.completes(source);
            preempt.is_closed();
        });
        let report = report.unwrap();
        assert!(!source.runs(), "it is elsewhere");
        assert!(report.postcopy_requests >= 2, "{report:?}");
    }
}

#[test]
fn a_destination_that_is_lost_before_the_package_leaves_the_guest_with_the_source() {
    for at in [Seen::Discard, Seen::Page] {
        let (source, outcome) = migrates(kinds()[0], &options(), |listener, _, _| {
            Script::accept(&listener).until(|seen| seen == at);
        });
        assert!(
            !matches!(outcome, Ok(_) | Err(MigrationError::InDoubt)),
            "{outcome:?}"
        );
        assert!(source.runs());
        source.let_write(50).unwrap();
        source.check().unwrap();
    }
}

#[test]
fn a_lost_connection_leaves_the_guest_at_the_destination_and_the_next_brings_the_rest() {
    for kind in kinds() {
        let (source, report) = migrates(kind, &options(), |listener, source, control| {
            let mut script = Script::accept(&listener);
            script.up_to_run();
            let page = script.missing()[0];
            script.ask_for(page);
            script.until(|seen| seen == Seen::Page);
            let (again, to) = port();
            // The connection is lost twice: the second one before any message.
            for lost in [true, false] {
                script.stream.shutdown(Shutdown::Both).unwrap();
                reaches(control, Status::PostcopyPaused);
                assert!(!source.runs(), "it is the destination's");
                assert!(control.resume(&to));
                script = script.reconnected(&again);
                if lost {
                    reaches(control, Status::PostcopyRecover);
                }
            }
            script.send_received_bitmap();
            reaches(control, Status::PostcopyActive);
            script.completes(source);
        });
        report.unwrap();
        assert!(!source.runs());
    }
}

#[test]
fn abandoning_a_paused_postcopy_leaves_the_guest_stopped() {
    for is_known_to_run in [false, true] {
        let (source, outcome) = migrates(kinds()[0], &options(), |listener, _, control| {
            let mut script = Script::accept(&listener);
            script.up_to_run();
            // A QEMU also reports this for a guest that has run.
            script.send(ReturnMessage::Shut(1));
            if is_known_to_run {
                drop(script.stream.shutdown(Shutdown::Both));
                reaches(control, Status::PostcopyPaused);
                let (again, to) = port();
                assert!(control.resume(&to));
                script = script.reconnected(&again);
                script.send_received_bitmap();
                reaches(control, Status::PostcopyActive);
            }
            drop(script);
            reaches(control, Status::PostcopyPaused);
            control.cancel();
        });
        let error = outcome.unwrap_err();
        assert_eq!(
            matches!(error, MigrationError::PagesMissing { .. }),
            is_known_to_run,
            "{error}"
        );
        let in_doubt = matches!(error, MigrationError::InDoubt);
        assert_eq!(in_doubt, !is_known_to_run, "{error}");
        assert!(!source.runs());
    }
}

#[test]
fn a_guest_runs_at_a_hotlift_destination_and_gets_its_pages() {
    if !has_userfault() {
        return;
    }
    for kind in kinds() {
        for (multifd, from_the_start, postcopy_preempt) in [
            (false, false, false),
            (false, true, true),
            (true, false, true),
            (true, true, false),
        ] {
            let what = format!(
                "{kind:?}, multifd {multifd}, from the start {from_the_start}, preempt {postcopy_preempt}"
            );
            let options = Options {
                stream: StreamOptions {
                    multifd: Some(multifd),
                    ..options().stream
                },
                postcopy: PostcopyOptions {
                    preempt: postcopy_preempt,
                    ..options().postcopy
                },
                ..options()
            };
            let target = destination(kind, &settings(), Quirks::default());
            let (listener, to) = listen();
            let controls = [Control::new(), Control::new()];
            let source = leaves(kind, &controls[0]);
            if from_the_start {
                controls[0].start_postcopy();
            }
            let ended = rig::run(
                &source,
                &target,
                listener,
                &to,
                [&options, &options],
                &controls,
                &|_| {},
            );
            let holder = ended.holder(&source, &target);
            assert_eq!(
                holder,
                Ok(Holder::Destination),
                "{what}: {:?}",
                ended.errors()
            );
            let report = ended.source.unwrap();
            assert!(report.bytes.postcopy > 0, "{what}: {report:?}");
        }
    }
}

#[test]
fn a_hotlift_that_cannot_load_the_guest_returns_it_after_the_commit() {
    if !has_userfault() {
        return;
    }
    let source = rig::source(kinds()[0], &settings(), Quirks::default());
    let quirks = Quirks {
        load: Obeys::No,
        ..Quirks::default()
    };
    let target = destination(kinds()[0], &settings(), quirks);
    let (listener, to) = listen();
    let controls = [Control::new(), Control::new()];
    controls[0].start_postcopy();
    let ended = rig::run(
        &source,
        &target,
        listener,
        &to,
        [&options(), &options()],
        &controls,
        &|_| {},
    );
    ended.stayed(&source, &target);
}
