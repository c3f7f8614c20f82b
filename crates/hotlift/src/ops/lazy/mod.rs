//! Restores a VM from a save file into a QEMU that runs the guest at once. The devices are sent first, then pages as the guest
//! requests them. All other pages are sent in the background.
//!
//! For QEMU this is a postcopy whose source has sent no page before the switch.
//!
//! ```text
//! opening  ADVISE  RAM blocks  early sections  DISCARD all  PACKAGED{LISTEN devices RUN}   the guest runs
//! requests: one page, then its block     background: pages written last, then RAM from the lowest page on
//! END  EOF                                                                 the guest has all pages
//! ```
//!
//! With [`Preempt`], requested pages have a separate connection, so that they need not wait for background pages.
//!
//! RAM that consists of huge pages in QEMU ([`Hooks::page_sizes`]) is sent in huge pages.
//!
//! Module `pages` finds the pages in the file. The engine's module `postcopy` does everything that does not depend on the file.
//!
//! Zero pages are sent only on request. After the end of the stream, QEMU treats every page that was not sent as zero.

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

/// Time limit for QEMU to open the stream, and then to load the devices. While QEMU loads, it can request pages.
const LOADING: Duration = Duration::from_secs(60);

/// Time limit for the attempts to reconnect to the file's server. After this time, an operator must resume the restore.
const RETRY_TIMEOUT: Duration = Duration::from_secs(600);

/// Time limit for QEMU to report over QMP why it has refused the devices. It starts with the refusal on the stream. It is short
/// because QEMU 11.1's main loop hangs while the connection is open. After a long hang it rarely reports anything.
const REASON: Duration = Duration::from_millis(100);

/// Interval at which QEMU is polled for the reason of its refusal.
const ASK_FOR_REASON: Duration = Duration::from_millis(20);

/// Interval at which QEMU is polled for its state while it loads the devices.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// Number of the PING after the start of the stream. QEMU uses the same number.
const OPENED: u32 = 1;

/// Time at which a QEMU with capability `postcopy-preempt` accepts the connection for requested pages. With the capability,
/// QEMU waits for this connection. Without the capability, QEMU accepts no such connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preempt {
    /// QEMU 7.2: directly after the main connection, before QEMU reads anything. A final message ends the connection.
    First,
    /// QEMU 8.0 and later: before the guest runs. QEMU ends the connection.
    BeforeRun,
}

/// Type of [`Hooks::on_loaded`].
pub type OnLoaded<'a> = &'a (dyn Fn(Instant) -> Result<(), MigrationError> + Sync);

/// State of a QEMU that should load the devices, as QEMU reports it over QMP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loading {
    /// The state does not show if QEMU loads the devices.
    Unknown,
    /// QEMU's main loop has processed the package of devices, but the guest does not run.
    Idle,
    /// QEMU has refused the devices.
    Refused,
}

/// Settings and callbacks of the caller of a lazy restore.
#[derive(Default, Clone, Copy)]
pub struct Hooks<'a> {
    /// Called with the progress, twice a second.
    pub on_progress: Option<&'a (dyn Fn(&LazyProgress) + Sync)>,
    /// Called once, before the first byte that allows the destination to run the guest.
    pub on_commit: Option<&'a (dyn Fn() + Sync)>,
    /// Id of the expected file, from [`crate::file::inspect`]. Any other file is refused.
    pub file: Option<u64>,
    /// If set, requested pages have a separate connection, which is made at this time.
    pub preempt: Option<Preempt>,
    /// Page sizes in bytes of RAM blocks whose pages in QEMU are larger than 4 KiB, by block name.
    pub page_sizes: &'a [(String, u64)],
    /// True if the guest gets a zero page in place of each damaged page. If false, a vCPU that needs a damaged page waits.
    pub salvage: bool,
    /// With `salvage`: called for each damaged part of the file, before any of its pages is sent as zero.
    pub on_lost: Option<&'a (dyn Fn(&LostPages) + Sync)>,
    /// Returns QEMU's state while QEMU loads the devices. Called twice a second; the restore waits for the result.
    pub loading: Option<&'a (dyn Fn() -> Loading + Sync)>,
    /// Called once QEMU has loaded the devices, to check that the guest runs. The argument is the time when the connection was
    /// made. Requested pages are sent while the callback runs. An error ends the restore.
    pub on_loaded: Option<OnLoaded<'a>>,
}

/// Progress of a lazy restore.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LazyProgress {
    /// Pages that the guest has: sent pages with content, and pages that the guest had before a resumed restore.
    pub pages: u64,
    /// Part of `pages` that the guest has requested.
    pub requested: u64,
    /// True while the connection to the file's server is lost and is being restored.
    pub is_lost: bool,
    /// True if a part of the file is damaged. A vCPU that needs a page of this part waits.
    pub is_damaged: bool,
}

/// Result of one lazy restore.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LazyReport {
    /// Time from the connection until QEMU has loaded the devices and runs the guest, in milliseconds.
    pub running_ms: f64,
    /// Time from the connection until the guest has all pages, in milliseconds.
    pub total_ms: f64,
    /// Pages that the guest had before a resumed restore.
    #[serde(default)]
    pub pages_before: u64,
    /// Count of pages with content that were sent.
    pub normal_pages: u64,
    /// Zero pages sent:
    ///
    /// - requested pages
    /// - zero pages within a huge page that has some content
    /// - one page at the end, if no page was requested
    pub zero_pages: u64,
    /// Bytes written to QEMU.
    pub sent_bytes: u64,
    /// Requests for pages that had not been sent yet. A huge page counts as one.
    pub requests: u64,
    /// Time from the receipt of a request until its page was written, in microseconds: median, 99th percentile, and maximum.
    pub request_us: [f64; 3],
    /// Machine type of the saved VM.
    pub machine: String,
    /// With [`Hooks::salvage`]: damaged pages, which are zero in the guest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<LostPages>,
}

/// Restores the VM in a save file into the QEMU that listens at `to` with capability `postcopy-ram`. The options
/// `max-bandwidth` and `cpu-limit` apply only to pages that the guest has not requested. With `resume`, the QEMU must already
/// have the guest and a part of its pages, and must wait for the other pages (`migrate-recover`).
///
/// # Errors
/// [`MigrationError::PagesMissing`] if the restore fails after the guest may have started. Any other error if it fails before.
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
            // The background has its own pacer.
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

/// Returns the file's RAM blocks, with the page sizes that the destination's QEMU uses. The source's page sizes do not matter.
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
    /// Makes the connection for requested pages. Returns `None` unless QEMU accepts this connection before the guest runs.
    connect_preempt: &'a (dyn Fn() -> Result<Option<Stream>, MigrationError> + Sync),
    control: &'a Control,
    begun: Instant,
    resume: bool,
    /// Pages that the guest had before a resumed restore.
    pages_before: u64,
    hooks: Hooks<'a>,
    /// True once the guest may run. From then on, a failure leaves the guest without some of its pages.
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
                    // Another thread has recorded the reason.
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

    /// Sends the start of the stream and the package that runs the guest, then waits until QEMU has loaded the devices.
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
        self.await_answers("QEMU's answer to the start of the stream (check that its machine is that of the file, and its \
                            capability postcopy-ram)")?;
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

    /// Waits until QEMU has loaded the devices. Also polls QEMU over QMP: after a failed load, QEMU may keep the connection
    /// open and send nothing.
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
            // A QEMU that loads the devices answers the PING before its main loop returns. Only this process's reader thread may
            // not have read the answer yet.
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

    /// Waits, for at most [`REASON`], until QEMU reports over QMP why it has refused the devices. The refusal on the stream
    /// comes earlier than this reason. Must run before the connection is closed, because QEMU 10 then exits.
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

    /// Reports progress to the caller's callback, twice a second. Returns at once if there is no callback.
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
