//! A VM out of a save file into a QEMU that runs it at once: devices first, pages as the guest asks for them, and the others
//! behind.
//!
//! To QEMU this is a postcopy whose source has sent no page before the switch.
//!
//! ```text
//! opening  ADVISE  RAM blocks  DISCARD all  PACKAGED{LISTEN devices RUN}   the guest runs
//! requests: one page, then its block     background: what was written last, then RAM from the lowest page on
//! END  EOF                                                                 the guest has all pages
//! ```
//!
//! | file | what it does |
//! |---|---|
//! | `requests` | what the guest waits for, and for how long it did |
//! | `turns` | who writes next: an answer comes before the background |
//! | `pages` | sends each page once, to whoever asks for it first |
//!
//! Every page is sent at most once: QEMU ends a stream that has one twice. Zero pages are sent if they are asked for; the
//! others are zero once the stream has ended.

mod pages;
mod requests;
pub(crate) mod turns;

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::MemoryLimit;
use hotlift_wire::main_channel::{Command, postcopy, put_packaged_head};
use hotlift_wire::return_path::ReturnMessage;
use serde::{Deserialize, Serialize};

use crate::control::{Control, Status};
use crate::ends::file::{BlockFile, Location, Places, RemoteReader, SavedStream};
use crate::error::{Channel, MigrationError};
use crate::failure::Failure;
use crate::figures::Counters;
use crate::handover::Word;
use crate::ops::lazy::pages::Sender;
use crate::ops::lazy::requests::{Reading, Requests};
use crate::ops::lazy::turns::Turns;
use crate::options::Options;
use crate::pacing::Pacer;
use crate::stream::main_send::{MainLink, MainSend};
use crate::stream::return_path::{Answers, EndsAnswers, Messages};
use crate::threads::{OnPanic, run_as, spawn};
use crate::tls::Remote;
use crate::transport::{Address, Stream};

/// How long QEMU may take to open the stream, and to load the devices. Loading waits for pages that are sent meanwhile.
const LOADING: Duration = Duration::from_secs(60);

/// How long QEMU may take to say that it has everything, once the last page is sent.
const LAST_WORD: Duration = Duration::from_secs(60);

/// How long a lost server of the file is tried again. The guest waits beyond that, for somebody who resumes the restore.
const PATIENCE: Duration = Duration::from_secs(600);

/// Between two looks whether a wait was called off.
const TICK: Duration = Duration::from_millis(100);

/// PINGs: behind the opening, and behind the devices, as QEMU numbers them.
const OPENED: u32 = 1;
const LOADED: u32 = 3;

/// The last byte of a stream (`QEMU_VM_EOF`).
const EOF: u8 = 0;

/// Threads that send the background at most.
const THREADS: usize = 4;

/// What the caller of a lazy restore wants to know.
#[derive(Default, Clone, Copy)]
pub struct Hooks<'a> {
    /// Takes reports, twice a second.
    pub on_progress: Option<&'a (dyn Fn(&LazyProgress) + Sync)>,
    /// Called once, before the first byte goes out at which the destination may run the guest.
    pub on_commit: Option<&'a (dyn Fn() + Sync)>,
    /// Called once the guest runs.
    pub on_running: Option<&'a (dyn Fn(Duration) + Sync)>,
}

/// A moment of a lazy restore.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LazyProgress {
    /// Pages with content that the guest has.
    pub pages: u64,
    /// Of which it has asked for.
    pub requested: u64,
    /// The file's server is lost, and tried again.
    pub is_lost: bool,
}

/// What one lazy restore came to.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LazyReport {
    /// From the connection until QEMU has loaded the devices and runs the guest, in milliseconds.
    pub running_ms: f64,
    /// Until it has all pages.
    pub total_ms: f64,
    /// Pages with content that were sent.
    pub normal_pages: u64,
    /// Zero pages that were asked for.
    pub zero_pages: u64,
    /// Bytes written to QEMU.
    pub sent_bytes: u64,
    /// Pages that the guest has asked for, and that were not on their way.
    pub requests: u64,
    /// From the moment when a request was read until its page was written, in microseconds: the median, one in a hundred,
    /// and the longest.
    pub request_us: [f64; 3],
    /// The source's machine.
    pub machine: String,
}

/// What all threads of one restore share.
pub(super) struct Shared<'a> {
    file: &'a BlockFile,
    stream: &'a SavedStream,
    main: Turns<MainSend>,
    link: Arc<MainLink>,
    requests: Requests,
    sender: Sender,
    answers: Answers,
    failure: Failure,
    /// Nothing more is to be sent.
    over: AtomicBool,
    control: &'a Control,
    /// Of the background's limits: a cancel that comes too late does not end them.
    sleeps: Control,
    options: &'a Options,
    memory: MemoryLimit,
    /// The first part of the file that could not be used; the rest is sent all the same.
    damaged: Failure,
    /// Of the background.
    pace: Arc<Pacer>,
}

impl Shared<'_> {
    /// Keeps the first error, and ends every wait.
    fn fail(&self, error: MigrationError) {
        self.failure.keep(error);
        self.over.store(true, Ordering::Release);
        self.requests.abandon();
        self.sleeps.stop();
        if let Some(remote) = self.file.remote() {
            remote.give_up();
        }
        self.answers.abort();
        self.link.transport.shutdown(std::net::Shutdown::Both);
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }
}

/// Restores the VM in a save file into the QEMU that listens at `to` with capability `postcopy-ram`.
/// `max-bandwidth` and `cpu-limit` of the options hold for what the guest has not asked for. With `resume` that QEMU has the
/// guest already, with a part of its pages, and waits for the others (`migrate-recover`).
///
/// # Errors
/// [`MigrationError::PagesMissing`] once the guest may run; any other before.
pub fn restore(
    from: impl Into<Location>,
    to: &Address,
    resume: bool,
    options: &Options,
    control: &Control,
    hooks: Hooks<'_>,
) -> Result<LazyReport, MigrationError> {
    options.check()?;
    let from = from.into();
    run_as("lazy/main", control, || {
        let file = BlockFile::open_at(&from, control)?;
        file.persist(PATIENCE);
        let begun = Instant::now();
        let to = Remote::new(to, None);
        let connection = to.connect_for(control, options.handshake_timeout)?;
        let link = Arc::new(MainLink {
            transport: connection,
            counters: Counters::default(),
            // The background has a pace of its own.
            pacer: Arc::new(Pacer::new(0)),
            control: control.clone(),
        });
        let stream = file.stream();
        let sender = Sender::new(&file);
        let mut messages = Messages::new(Channel::Main);
        let main = match resume {
            false => MainSend::new(Arc::clone(&link), &stream.configuration)?,
            true => {
                let behind = ask_what_is_there(&file, &link, &sender, control)?;
                messages.begin_with(behind);
                let (id, blocks) = (stream.ram.section_id, &stream.ram.blocks);
                MainSend::resume(Arc::clone(&link), &stream.configuration, id, blocks)?
            }
        };
        let shared = Shared {
            file: &file,
            stream,
            main: Turns::new(main),
            link,
            requests: Requests::default(),
            sender,
            answers: Answers::default(),
            failure: Failure::default(),
            over: AtomicBool::new(false),
            control,
            sleeps: Control::new(),
            options,
            memory: options.memory(0),
            damaged: Failure::default(),
            pace: control.pacer(options),
        };
        let restore = Restore {
            shared: &shared,
            begun,
            resume,
            hooks,
            may_run: AtomicBool::new(resume),
            running: OnceLock::new(),
        };
        restore.run(messages)
    })
}

/// Learns which pages a guest has that waits for the others, and has it go on. What QEMU has said since.
fn ask_what_is_there(
    file: &BlockFile,
    link: &MainLink,
    sender: &Sender,
    control: &Control,
) -> Result<Vec<u8>, MigrationError> {
    let mut main = &link.transport;
    let mut answers = Reading::new(main, control);
    for (index, block) in file.stream().ram.blocks.iter().enumerate() {
        let mut request = Vec::new();
        postcopy::put_bitmap_request(&block.name, &mut request)
            .map_err(MigrationError::main_wire)?;
        main.write_all(&request).map_err(MigrationError::opening)?;
        sender.has(index, &answers.bitmap(&block.name, file.pages(index))?);
    }
    let mut go_on = Vec::new();
    postcopy::put_resume(&mut go_on);
    main.write_all(&go_on).map_err(MigrationError::opening)?;
    answers.resumed()?;
    Ok(answers.rest())
}

struct Restore<'a> {
    shared: &'a Shared<'a>,
    begun: Instant,
    resume: bool,
    hooks: Hooks<'a>,
    /// The guest may run: what fails from here on leaves it without some pages.
    may_run: AtomicBool,
    running: OnceLock<Duration>,
}

impl Restore<'_> {
    fn run(&self, messages: Messages) -> Result<LazyReport, MigrationError> {
        let shared = self.shared;
        let aborting = || shared.fail(MigrationError::panicked_here());
        thread::scope(|scope| {
            let outcome = (|| {
                spawn(scope, "lazy/return".to_owned(), || {
                    let _panics = OnPanic(&aborting);
                    let _ends = EndsAnswers(&shared.answers);
                    if let Err(error) = self.listen(&shared.link.transport, messages) {
                        shared.fail(error);
                    }
                    shared.requests.end();
                })?;
                // Loading the devices may need pages.
                spawn(scope, "lazy/answer".to_owned(), || {
                    let _panics = OnPanic(&aborting);
                    if let Err(error) = shared.answer_requests() {
                        shared.fail(error);
                    }
                })?;
                match self.resume {
                    true => shared.control.set_too_late(true),
                    false => self.open()?,
                }
                let running = self.begun.elapsed();
                let _ = self.running.set(running);
                shared.control.set_status(Status::Active);
                if let Some(on_running) = self.hooks.on_running {
                    on_running(running);
                }
                spawn(scope, "lazy/watch".to_owned(), || self.watch())?;
                self.send_background(scope)?;
                self.end()
            })();
            if let Err(error) = outcome {
                shared.fail(error);
            }
            shared.over.store(true, Ordering::Release);
            shared.requests.end();
            shared.link.transport.shutdown(std::net::Shutdown::Both);
        });
        match shared.failure.take() {
            None => Ok(self.report()),
            Some(error) if self.may_run.load(Ordering::Acquire) => {
                Err(MigrationError::PagesMissing {
                    source: Box::new(error),
                })
            }
            Some(error) => Err(error),
        }
    }

    /// Everything up to the moment when the guest runs.
    fn open(&self) -> Result<(), MigrationError> {
        let shared = self.shared;
        let (stream, blocks) = (shared.stream, &shared.stream.ram.blocks);
        let page = PAGE_SIZE as u64;
        {
            let mut main = shared.main.take();
            main.drop_checksum();
            shared.answers.ask(OPENED);
            for command in [
                Command::OpenReturnPath,
                Command::Ping(OPENED),
                Command::PostcopyAdvise {
                    page_sizes: Some((page, page)),
                },
            ] {
                main.command(command)?;
            }
            main.ram_start(Some(stream.ram.section_id), blocks, false)?;
        }
        self.await_answers("QEMU's answer to the opening (is its machine the file's, with capability postcopy-ram on?)")?;
        let mut bytes = Vec::new();
        for block in blocks {
            postcopy::put_discard(&block.name, 0, block.used_length, &mut bytes)
                .map_err(MigrationError::main_wire)?;
        }
        let mut package = Vec::new();
        postcopy::put_listen(&mut package);
        package.extend_from_slice(stream.devices().0);
        Command::Ping(LOADED).encode(&mut package);
        postcopy::put_run(&mut package);
        put_packaged_head(package.len(), &mut bytes).map_err(MigrationError::main_wire)?;
        bytes.append(&mut package);
        if shared.control.is_cancelled() {
            return Err(MigrationError::Cancelled);
        }
        shared.control.set_too_late(true);
        shared.control.set_status(Status::Device);
        if let Some(on_commit) = self.hooks.on_commit {
            on_commit();
        }
        self.may_run.store(true, Ordering::Release);
        shared.answers.ask(LOADED);
        shared.answers.commit();
        shared.main.take().raw(&bytes)?;
        self.await_answers("QEMU to load the devices")
    }

    fn await_answers(&self, waiting_for: &str) -> Result<(), MigrationError> {
        let control = self.shared.control;
        let limit = Some((LOADING, waiting_for));
        let may_run = self.may_run.load(Ordering::Acquire);
        self.shared.answers.await_answers(limit, TICK, || {
            match control.is_cancelled() && !may_run {
                true => Err(MigrationError::Cancelled),
                false => Ok(()),
            }
        })
    }

    /// Sends what the guest has not asked for.
    fn send_background<'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
    ) -> Result<(), MigrationError> {
        let shared = self.shared;
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let mut threads = Vec::new();
        for number in 0..cores.min(THREADS) {
            threads.push(spawn(scope, format!("lazy/send_{number}"), || {
                shared.send_the_rest()
            })?);
        }
        let mut outcome = Ok(());
        for thread in threads {
            let ended = thread.join().and_then(|ended| ended);
            if ended.is_err() {
                // The others stop, too.
                shared.over.store(true, Ordering::Release);
                outcome = outcome.and(ended);
            }
        }
        outcome?;
        if let Some(error) = shared.damaged.take() {
            return Err(error);
        }
        match shared.is_over() {
            // Somebody else has said why.
            true => Err(MigrationError::Cancelled),
            false => Ok(()),
        }
    }

    /// Tells QEMU that it has everything, and waits for its word.
    fn end(&self) -> Result<(), MigrationError> {
        let shared = self.shared;
        // An answer that is being written comes before; what is asked for from here on is zero, which the end says.
        shared.requests.end_and_drain();
        if self.resume {
            shared.answers.commit();
        }
        {
            let mut main = shared.main.take();
            main.complete();
            main.end_section(false)?;
            main.raw(&[EOF])?;
        }
        match shared.answers.wait_word(LAST_WORD) {
            Some(Word::Runs) => Ok(()),
            Some(Word::Never) => Err(shared.answers.refusal()),
            None => Err(MigrationError::Timeout {
                waiting_for: "QEMU's word that it has all pages".to_owned(),
                waited: LAST_WORD,
            }),
        }
    }

    /// Takes requests and answers until the connection ends.
    fn listen(&self, main: &Stream, mut messages: Messages) -> Result<(), MigrationError> {
        let shared = self.shared;
        let mut current = None;
        loop {
            let read = messages.read(main, &shared.answers, |message, _| {
                let (start, length) = match message {
                    ReturnMessage::ReqPagesId {
                        start,
                        length,
                        block,
                    } => {
                        let blocks = &mut shared.stream.ram.blocks.iter();
                        current = blocks.position(|one| one.name == block);
                        (start, length)
                    }
                    ReturnMessage::ReqPages { start, length } => (start, length),
                    _ => return Ok(()),
                };
                let block = current.ok_or_else(|| MigrationError::Protocol {
                    channel: Channel::Main,
                    got: "a request for pages of a RAM block that the VM does not have".to_owned(),
                    doing: "listening to the destination",
                })?;
                for page in start / PAGE_SIZE as u64
                    ..start
                        .saturating_add(length.into())
                        .div_ceil(PAGE_SIZE as u64)
                {
                    let number = usize::try_from(page).unwrap_or(usize::MAX);
                    if number >= shared.file.pages(block) {
                        break;
                    }
                    // Each page waits once, however often it is asked for.
                    if shared.sender.is_asked_for(block, number) {
                        shared.requests.add(block, number);
                    }
                }
                Ok(())
            })?;
            if !read {
                return shared.answers.ended(MigrationError::main_closed());
            }
        }
    }

    fn watch(&self) {
        const EVERY: Duration = Duration::from_millis(500);
        let Some(on_progress) = self.hooks.on_progress else {
            return;
        };
        while !self.shared.requests.wait_for_end(EVERY) {
            on_progress(&LazyProgress {
                pages: self.shared.sender.counts().0,
                requested: self.shared.requests.served(),
                is_lost: self.shared.file.remote().is_some_and(RemoteReader::is_lost),
            });
        }
    }

    fn report(&self) -> LazyReport {
        let shared = self.shared;
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let (normal_pages, zero_pages) = shared.sender.counts();
        LazyReport {
            running_ms: ms(self.running.get().copied().unwrap_or_default()),
            total_ms: ms(self.begun.elapsed()),
            normal_pages,
            zero_pages,
            sent_bytes: shared.link.counters.read().transferred_bytes,
            requests: shared.requests.served(),
            request_us: shared.requests.latencies(),
            machine: shared.stream.configuration.machine.clone(),
        }
    }
}
