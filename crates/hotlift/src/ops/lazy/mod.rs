//! Restores a VM from a save file into a QEMU that runs it at once: devices first, then pages as the guest requests them, and
//! the others in the background.
//!
//! For QEMU this is a postcopy whose source has sent no page before the switch.
//!
//! ```text
//! opening  ADVISE  RAM blocks  early sections  DISCARD all  PACKAGED{LISTEN devices RUN}   the guest runs
//! requests: one page, then its block     background: pages written last, then RAM from the lowest page on
//! END  EOF                                                                 the guest has all pages
//! ```
//!
//! With [`Preempt`], requested pages use a connection of their own, on which nothing precedes them.
//!
//! RAM that QEMU has in huge pages ([`Hooks::page_sizes`]) is sent in huge pages.
//!
//! `pages` finds the pages in the file; module `postcopy` of the engine does everything that does not depend on the file.
//!
//! Zero pages are sent only on request; pages that were never sent are zero once the stream has ended.

mod pages;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use hotlift_mem::PAGE_SIZE;
use hotlift_net::transport::{Address, Stream};
use hotlift_wire::RamBlockEntry;
use hotlift_wire::main_channel::{Command, postcopy, put_packaged_head};
use serde::{Deserialize, Serialize};

use crate::control::Control;
use crate::control::run_as;
use crate::ends::file::{BlockFile, FileError, Location, LostPages, PageMap, SavedStream};
use crate::error::{Channel, MigrationError};
use crate::life::LONG;
use crate::life::threads::spawn;
use crate::ops::lazy::pages::FilePages;
use crate::options::Options;
use crate::pacing::Pacer;
use crate::postcopy::priority_lock::PriorityLock;
use crate::postcopy::{Connection, LARGEST_PAGE, Ledger, resume_postcopy};
use crate::remote::Remote;
use crate::status::Status;
use crate::stream::main_send::{LOADED, MainLink, MainSend};
use crate::stream::return_path::{Answers, Messages};

/// Time limit for QEMU to open the stream, and to load the devices. Loading waits for pages, which are sent in the meantime.
const LOADING: Duration = Duration::from_secs(60);

/// Time limit of the retries after the file's server is lost. Then the guest waits for an operator who resumes the restore.
const RETRY_TIMEOUT: Duration = Duration::from_secs(600);

/// Time limit for QEMU to report why it has refused the devices, after its refusal on the stream. Short, because the main loop
/// of QEMU 11.1 hangs while the connection is open, and rarely reports anything after a long hang.
const REASON: Duration = Duration::from_millis(100);

/// Interval at which QEMU is asked for that reason.
const ASK_FOR_REASON: Duration = Duration::from_millis(20);

/// Interval at which QEMU is asked whether it loads the devices.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// Number of the PING after the opening, as QEMU counts.
const OPENED: u32 = 1;

/// Moment at which a QEMU with capability `postcopy-preempt` takes the connection for requested pages. With the capability it
/// waits for this connection; without the capability it takes none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preempt {
    /// QEMU 7.2: after main, before anything is read; a final message ends it.
    First,
    /// QEMU 8.0 and later: before the guest runs; QEMU ends it.
    BeforeRun,
}

/// See [`Hooks::on_loaded`].
pub type OnLoaded<'a> = &'a (dyn Fn(Instant) -> Result<(), MigrationError> + Sync);

/// State of a QEMU that should load the devices, as it reports outside the stream (over QMP).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loading {
    /// Nothing decisive.
    Unknown,
    /// Its main loop has finished the package, and the guest does not run.
    Idle,
    /// It has refused the devices.
    Refused,
}

/// Settings and callbacks of the caller of a lazy restore.
#[derive(Default, Clone, Copy)]
pub struct Hooks<'a> {
    /// Receives reports, twice a second.
    pub on_progress: Option<&'a (dyn Fn(&LazyProgress) + Sync)>,
    /// Called once, before the first byte is sent that lets the destination run the guest.
    pub on_commit: Option<&'a (dyn Fn() + Sync)>,
    /// Id of the expected file ([`crate::file::inspect`]): another file is refused.
    pub file: Option<u64>,
    /// If set, requested pages have a connection of their own, made at this moment.
    pub preempt: Option<Preempt>,
    /// RAM blocks whose pages in QEMU are not 4 KiB, by name, with the size of these pages in bytes.
    pub page_sizes: &'a [(String, u64)],
    /// True if damaged pages become zero in the guest. Otherwise the guest waits for them.
    pub salvage: bool,
    /// With `salvage`, called for each damaged part of the file, before a page of it is sent as zero.
    pub on_lost: Option<&'a (dyn Fn(&LostPages) + Sync)>,
    /// Asks QEMU whether it loads the devices. Called twice a second until they are loaded; the restore waits for the answer.
    pub loading: Option<&'a (dyn Fn() -> Loading + Sync)>,
    /// Called once QEMU has loaded the devices, with the time of the connection, to check that the guest runs. Pages that the
    /// guest requests are sent in the meantime; an error ends the restore.
    pub on_loaded: Option<OnLoaded<'a>>,
}

/// A moment of a lazy restore.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LazyProgress {
    /// Pages that the guest has: those with content that were sent, and those that it had before a resumed restore.
    pub pages: u64,
    /// Number of these pages that the guest has requested.
    pub requested: u64,
    /// True while the connection to the file's server is lost, and retried.
    pub is_lost: bool,
    /// True if a part of the file is damaged: a vCPU that needs it waits.
    pub is_damaged: bool,
}

/// Result of one lazy restore.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LazyReport {
    /// From the connection until QEMU has loaded the devices and runs the guest, in milliseconds.
    pub running_ms: f64,
    /// From the connection until the guest has all pages, in milliseconds.
    pub total_ms: f64,
    /// Pages that the guest had before a resumed restore.
    #[serde(default)]
    pub pages_before: u64,
    /// Pages with content that were sent.
    pub normal_pages: u64,
    /// Zero pages sent: requested ones, those of huge pages with some content, and one at the end if no page was requested.
    pub zero_pages: u64,
    /// Bytes written to QEMU.
    pub sent_bytes: u64,
    /// Pages that the guest has requested, and that were not already sent; a huge page counts as one.
    pub requests: u64,
    /// Time from the moment when a request was read until its page was written, in microseconds: the median, the 99th
    /// percentile, and the longest.
    pub request_us: [f64; 3],
    /// The source's machine.
    pub machine: String,
    /// With [`Hooks::salvage`]: damaged pages, which are zero.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<LostPages>,
}

/// Restores the VM in a save file into the QEMU that listens at `to` with capability `postcopy-ram`. `max-bandwidth` and
/// `cpu-limit` of the options limit the pages that the guest has not requested. With `resume`, that QEMU already has the guest
/// and a part of its pages, and waits for the others (`migrate-recover`).
///
/// # Errors
/// [`MigrationError::PagesMissing`] once the guest may run; any other error before.
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
        let mut file = BlockFile::open_at(&from, control)?;
        if hooks.salvage {
            file.salvage();
        }
        if hooks.file.is_some_and(|id| id != file.info().id) {
            let file = from.to_string();
            return Err(FileError::OtherFile { file }.into());
        }
        let blocks = blocks_of(file.stream(), hooks.page_sizes)?;
        file.persist(RETRY_TIMEOUT);
        let begun = Instant::now();
        let to = Remote::new(to, None);
        let connect = || to.connect_for(&control.dialing(), options.limits.handshake_timeout);
        let connect_at = |moment| match hooks.preempt == Some(moment) {
            true => connect().map(Some),
            false => Ok(None),
        };
        let transport = connect()?;
        let mut preempt = connect_at(Preempt::First)?;
        let link = Arc::new(MainLink {
            transport,
            counters: Arc::default(),
            // The background has a pacer of its own.
            pacer: Arc::new(Pacer::new(0)),
            life: control.life().clone(),
        });
        let stream = file.stream();
        let ledger = Arc::new(Ledger::new(&blocks));
        let mut messages = Messages::new(Channel::Main);
        let main = PriorityLock::new(match resume {
            false => MainSend::new(Arc::clone(&link), &stream.configuration)?,
            true => {
                let rest = resume_postcopy(&link.transport, &ledger, control.life(), || {
                    preempt = preempt.take().or(connect_at(Preempt::BeforeRun)?);
                    Ok(())
                });
                messages.begin_with(rest?);
                let id = stream.ram.section_id;
                MainSend::resume(Arc::clone(&link), &stream.configuration, Some(id), &blocks)?
            }
        });
        let pages_before = ledger.sent();
        let answers = Answers::new(control.life());
        let pages = FilePages::new(&file, options, control, hooks.on_lost);
        let connection = Connection::new(
            (&pages, ledger),
            (&main, link),
            &answers,
            (
                control.steering().pacer(&options.stream),
                control.steering().cpu_budget(&options.stream),
            ),
        );
        if let Some(stream) = preempt {
            connection.answer_on(stream, hooks.preempt == Some(Preempt::First));
        }
        let restore = Restore {
            file: &file,
            connection,
            connect_preempt: &|| connect_at(Preempt::BeforeRun),
            control,
            begun,
            resume,
            pages_before,
            hooks,
            may_run: AtomicBool::new(resume),
            running: OnceLock::new(),
        };
        restore.run(messages)
    })
}

/// Returns the RAM blocks of a file, with the page sizes of the destination's QEMU. The source's page sizes do not matter.
fn blocks_of(
    stream: &SavedStream,
    page_sizes: &[(String, u64)],
) -> Result<Vec<RamBlockEntry>, MigrationError> {
    let with_size = |block: &RamBlockEntry| {
        let size = page_sizes.iter().find(|(name, _)| *name == block.name);
        let page_size = size.map_or(PAGE_SIZE as u64, |(_, size)| *size);
        if !page_size.is_power_of_two()
            || !(PAGE_SIZE as u64..=LARGEST_PAGE as u64).contains(&page_size)
        {
            return Err(MigrationError::PageSize {
                block: block.name.clone(),
                size: page_size,
            });
        }
        Ok(RamBlockEntry {
            page_size,
            ..block.clone()
        })
    };
    stream.ram.blocks.iter().map(with_size).collect()
}

struct Restore<'a> {
    file: &'a BlockFile,
    connection: Connection<'a, FilePages<'a>>,
    /// Connects for requested pages, if QEMU takes that connection before the guest runs.
    connect_preempt: &'a (dyn Fn() -> Result<Option<Stream>, MigrationError> + Sync),
    control: &'a Control,
    begun: Instant,
    resume: bool,
    /// Pages that the guest had before a resumed restore.
    pages_before: u64,
    hooks: Hooks<'a>,
    /// True once the guest may run: a failure after that leaves it without some pages.
    may_run: AtomicBool,
    running: OnceLock<Duration>,
}

impl Restore<'_> {
    fn run(&self, messages: Messages) -> Result<LazyReport, MigrationError> {
        let connection = &self.connection;
        thread::scope(|scope| {
            let outcome = (|| {
                spawn(scope, "lazy/return".to_owned(), || {
                    connection.receive(messages);
                })?;
                spawn(scope, "lazy/answer".to_owned(), || connection.answer_all())?;
                match self.resume {
                    true => self.control.set_too_late(true),
                    false => self.open()?,
                }
                if let Some(on_loaded) = self.hooks.on_loaded {
                    on_loaded(self.begun)?;
                }
                let _ = self.running.set(self.begun.elapsed());
                self.control.set_status(Status::Active);
                spawn(scope, "lazy/watch".to_owned(), || self.watch())?;
                let is_whole = connection.send_background(scope, "lazy/send_", usize::MAX)?;
                if let Some(error) = connection.pages.damaged.take() {
                    return Err(error);
                }
                if !is_whole {
                    // Another thread has kept the reason.
                    return Err(MigrationError::Cancelled);
                }
                connection.wait_for_reader()?;
                if self.resume {
                    connection.answers.commit();
                }
                connection.end()
            })();
            match outcome {
                Err(error) => connection.fail(error),
                Ok(()) => connection.close(),
            }
        });
        match connection.take_failure() {
            None => Ok(self.report()),
            Some(error) if self.may_run.load(Ordering::Acquire) => {
                Err(MigrationError::PagesMissing {
                    source: Box::new(error),
                })
            }
            Some(error) => Err(error),
        }
    }

    /// Sends everything up to the package that runs the guest, and waits until the devices are loaded.
    fn open(&self) -> Result<(), MigrationError> {
        let stream = self.file.stream();
        let Connection { main, answers, .. } = &self.connection;
        let blocks = self.connection.ledger.blocks();
        // QEMU compares these bits with its own page sizes.
        let page_sizes = blocks
            .iter()
            .fold(0, |sizes, block| sizes | block.page_size);
        {
            let mut main = main.take();
            main.drop_checksum();
            answers.ask(OPENED);
            for command in [
                Command::OpenReturnPath,
                Command::Ping(OPENED),
                Command::PostcopyAdvise {
                    page_sizes: Some((page_sizes, PAGE_SIZE as u64)),
                },
            ] {
                main.command(command)?;
            }
            for section in &stream.early.before_ram {
                main.raw(&section.bytes)?;
            }
            main.ram_start(Some(stream.ram.section_id), blocks, false)?;
            for section in &stream.early.behind_start {
                main.raw(&section.bytes)?;
            }
        }
        self.await_answers("QEMU's answer to the opening (check that its machine is that of the file, and its capability \
                            postcopy-ram)")?;
        if let Some(stream) = (self.connect_preempt)()? {
            self.connection.answer_on(stream, false);
        }
        let mut bytes = Vec::new();
        for block in blocks {
            postcopy::put_discard(&block.name, 0, block.used_length, &mut bytes)
                .map_err(MigrationError::main_wire)?;
        }
        let mut listen = Vec::new();
        postcopy::put_listen(&mut listen);
        let mut end = Vec::new();
        postcopy::put_package_end(LOADED, &mut end);
        let length = (listen.len() + end.len()) as u64 + stream.device_bytes();
        put_packaged_head(length, &mut bytes).map_err(MigrationError::main_wire)?;
        bytes.append(&mut listen);
        self.control.set_status(Status::Device);
        main.take().raw(&bytes)?;
        // A cancel within the package is safe: QEMU uses nothing of an incomplete one.
        self.file.devices(&mut |part| {
            if self.control.is_cancelled() {
                return Err(MigrationError::Cancelled);
            }
            main.take().raw(part)
        })?;
        if self.control.is_cancelled() {
            return Err(MigrationError::Cancelled);
        }
        self.control.set_too_late(true);
        if let Some(on_commit) = self.hooks.on_commit {
            on_commit();
        }
        self.may_run.store(true, Ordering::Release);
        answers.ask(LOADED);
        answers.commit();
        main.take().raw(&end)?;
        self.await_devices()
    }

    /// Waits until QEMU has loaded the devices. A QEMU that could not load them may keep the connection open and send nothing.
    fn await_devices(&self) -> Result<(), MigrationError> {
        let Connection { answers, link, .. } = &self.connection;
        let limit = Some((LOADING, "QEMU to load the devices"));
        let mut asked = Instant::now();
        let mut was_idle = false;
        let every = self.hooks.loading.map_or(LONG, |_| ASK_AGAIN);
        let outcome = answers.await_answers(limit, every, || {
            let Some(loading) = self.hooks.loading else {
                return Ok(());
            };
            if asked.elapsed() < ASK_AGAIN {
                return Ok(());
            }
            let loading = loading();
            asked = Instant::now();
            let is_idle = loading == Loading::Idle;
            let is_idle_again = std::mem::replace(&mut was_idle, is_idle) && is_idle;
            // A QEMU that loads them answers the PING before its main loop returns; only the reader's thread may be late.
            let is_answered = || {
                answers.next_pong().is_none()
                    || link.transport.wait_readable(Duration::ZERO).unwrap_or(true)
            };
            match loading == Loading::Refused || (is_idle_again && !is_answered()) {
                true => Err(answers.refusal()),
                false => Ok(()),
            }
        });
        if matches!(outcome, Err(MigrationError::Destination { .. })) {
            self.await_reason();
        }
        outcome
    }

    /// Waits until QEMU reports over QMP why it has refused the devices. Its message on the stream comes before that, and QEMU
    /// 10 ends once the connection is closed.
    fn await_reason(&self) {
        let until = Instant::now() + REASON;
        while let Some(loading) = self.hooks.loading
            && loading() != Loading::Refused
            && Instant::now() < until
        {
            thread::sleep(ASK_FOR_REASON);
        }
    }

    fn await_answers(&self, waiting_for: &str) -> Result<(), MigrationError> {
        let answers = &self.connection.answers;
        let limit = Some((LOADING, waiting_for));
        answers.await_answers(limit, LONG, || self.control.life().check())
    }

    /// Reports progress to the caller's callback, if there is one.
    fn watch(&self) {
        const EVERY: Duration = Duration::from_millis(500);
        let Some(on_progress) = self.hooks.on_progress else {
            return;
        };
        while !self.connection.ledger.wait_for_end(EVERY) {
            let requested = self.connection.ledger.order.lock().served;
            on_progress(&LazyProgress {
                pages: self.pages_before + self.connection.link.counters.read().normal_pages,
                requested,
                is_lost: self.connection.pages.is_lost(),
                is_damaged: self.connection.pages.damaged.is_set(),
            });
        }
    }

    fn report(&self) -> LazyReport {
        let connection = &self.connection;
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let counts = connection.link.counters.read();
        let order = connection.ledger.order.lock();
        LazyReport {
            running_ms: ms(self.running.get().copied().unwrap_or_default()),
            total_ms: ms(self.begun.elapsed()),
            pages_before: self.pages_before,
            normal_pages: counts.normal_pages,
            zero_pages: counts.zero_pages,
            sent_bytes: counts.transferred_bytes,
            requests: order.served,
            request_us: order.latencies(),
            machine: self.file.stream().configuration.machine.clone(),
            lost: connection.pages.lost(),
        }
    }
}
