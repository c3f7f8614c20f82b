//! `hotlift restore --lazy`: runs the guest first, and loads its pages when the guest needs them.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use comfy_table::Table;
use hotlift::file::{FileError, Location};
use hotlift::lazy::{self, Hooks, LazyProgress, LazyReport};
use hotlift::{Address, Control, MigrationError, Options};
use hotlift_qemu::destination::{Destination, Statement};
use hotlift_qemu::incoming;
use hotlift_qemu::run_state::state_clause;
use hotlift_qmp::ANSWER_TIMEOUT;
use hotlift_terminal::output::warn;
use hotlift_terminal::progress::{Display, bytes};
use hotlift_terminal::signals::Interrupt;
use hotlift_terminal::table::{align, new_table};

use super::{RestoreArgs, await_load, conclude, failed, print_lost_pages};
use crate::clock::GuestClock;
use crate::error::{CommandError, GUEST_UNCERTAIN, MissingPagesFrom};

/// Timeout for the statement about the guest of a QEMU whose connection was lost.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs the guest and loads its pages from `file`, whose id is `id`. The guest's QEMU listens on `socket`.
pub fn run(
    args: &RestoreArgs,
    (file, id): (&Location, u64),
    destination: Destination,
    (socket, clock): (&Path, GuestClock),
    options: &Options,
    interrupt: &Interrupt,
) -> Result<(), CommandError> {
    let settle_timeout = options.limits.settle_timeout;
    let page_sizes = incoming::page_sizes(&destination)?;
    let asked = Hooks {
        file: Some(id),
        preempt: incoming::preempt(&destination)?,
        page_sizes: &page_sizes,
        salvage: args.salvage,
        on_lost: Some(&print_lost_pages),
        ..Hooks::default()
    };
    let at = (&destination, &clock);
    let (restored, has_run) = restore(args, file, asked, at, options, socket, interrupt);
    let report = match restored {
        Ok(report) => report,
        Err(error) if args.resume || matches!(error, MigrationError::PagesMissing { .. }) => {
            interrupt.forget();
            return after_start(&error, args, file, (destination, clock), has_run);
        }
        Err(error) => return failed(&error, destination, clock, settle_timeout, interrupt),
    };
    interrupt.set_second_signal(None);
    await_load(destination, &clock, settle_timeout, interrupt)?;
    let printed = args.output.print(&report, || table(&report).to_string());
    clock.report();
    Ok(printed?)
}

/// Determines the result after an error, once the guest may run. QEMU's statement about the guest decides.
fn after_start(
    error: &MigrationError,
    args: &RestoreArgs,
    file: &Location,
    (destination, clock): (Destination, GuestClock),
    has_run: bool,
) -> Result<(), CommandError> {
    let cause = match error {
        MigrationError::PagesMissing { source } => source,
        other => other,
    };
    // QEMU answers on the stream before it runs the guest. If both connections close without an answer, the guest never ran.
    let is_broken = matches!(
        cause,
        MigrationError::Closed { .. }
            | MigrationError::Connection { .. }
            | MigrationError::Destination { .. }
    );
    let is_gone = || !has_run && is_broken && destination.is_gone_before_a_run();
    let is_over = || destination.waits_for_pages() || is_gone();
    let statement = destination.wait_for_statement(STATEMENT_TIMEOUT, &[], is_over);
    let is_gone = is_gone();
    let never = |_: Destination, reason: String| match has_run {
        true => CommandError::NotTaken { reason },
        // QEMU could not load the devices.
        false => CommandError::Restore {
            reasons: match cause {
                MigrationError::Destination { .. } => format!("QEMU: {reason}"),
                cause => format!("{}; QEMU: {reason}", cause.chain()),
            },
        },
    };
    let unknown = |destination: Destination, answers: bool, reason: String| {
        match is_gone {
        true => CommandError::Restore {
            reasons: "its QEMU ended while it loaded the devices, and never ran the guest; its log has the reason"
                .to_owned(),
        },
        false => {
            let rest = match cause {
                MigrationError::File(FileError::OtherFile { .. }) => MissingPagesFrom::OtherName,
                cause if cause.is_damage() => MissingPagesFrom::Copy,
                _ => MissingPagesFrom::There,
            };
            let name = match rest {
                MissingPagesFrom::There => file.to_string(),
                MissingPagesFrom::Copy | MissingPagesFrom::OtherName => "FILE".to_owned(),
            };
            let reasons = match answers {
                true => cause.chain(),
                false => format!("{}; QEMU: {reason}", cause.chain()),
            };
            CommandError::PagesMissing {
                reasons,
                resume: args.to_resume(&name, destination.later_qmp().as_ref()),
                qemu: destination.keep_running_unchanged(),
                answers,
                rest,
            }
        }
    }
    };
    let cause = cause.chain();
    let concluded = conclude(
        statement,
        (destination, &clock),
        Some(&cause),
        never,
        unknown,
    );
    clock.report();
    concluded
}

/// Runs the lazy restore. Returns its result, and true if the guest has run.
fn restore(
    args: &RestoreArgs,
    file: &Location,
    asked: Hooks<'_>,
    (destination, clock): (&Destination, &GuestClock),
    options: &Options,
    socket: &Path,
    interrupt: &Interrupt,
) -> (Result<LazyReport, MigrationError>, bool) {
    let has_run = AtomicBool::new(args.resume);
    let does = OnceLock::new();
    let control = Control::new();
    let display = Mutex::new(Display::new("restore", args.output.quiet, &control));
    let is_reported = AtomicBool::new(false);
    let was_lost = AtomicBool::new(false);
    let knows_damage = AtomicBool::new(false);
    let show = |progress: &LazyProgress| {
        if interrupt.is_raised() && !is_reported.swap(true, Ordering::Relaxed) {
            warn!(
                "the guest {}, and its remaining pages follow; Ctrl-C again stops them and leaves the guest waiting",
                does.get().map_or("is being loaded", String::as_str)
            );
        }
        if was_lost.swap(progress.is_lost, Ordering::Relaxed) != progress.is_lost
            && let Some(server) = file.server()
        {
            match progress.is_lost {
                true => warn!("lost {server}; trying again"),
                false => warn!("{server} is back"),
            }
        }
        if progress.is_damaged && !knows_damage.swap(true, Ordering::Relaxed) {
            warn!(
                "hotlift: a part of the file is damaged: a vCPU that needs one of its pages waits; all other pages follow"
            );
        }
        if let Ok(display) = display.lock() {
            display.show_line(0, || {
                let LazyProgress {
                    pages,
                    requested,
                    is_lost,
                    ..
                } = progress;
                let sent = bytes(pages * 4096);
                let state = match is_lost {
                    true => "no pages arrive",
                    false => "pages follow",
                };
                format!("{state}: {sent} arrived, {requested} requested").into()
            });
        }
    };
    let may_run = || {
        let resume = args.to_resume(&file.to_string(), destination.later_qmp().as_ref());
        let words = format!("the guest waits for the rest of its pages; to resume: {resume}");
        interrupt.set_second_signal(Some((GUEST_UNCERTAIN, words)));
    };
    if args.resume {
        may_run();
    }
    let on_commit = || {
        destination.custody().release();
        may_run();
    };
    let on_loaded = |connected: Instant| {
        if args.resume {
            warn!("the guest continues; the rest of its pages follows");
            return Ok(());
        }
        let place = destination.started();
        let place = place.map_or_else(String::new, |place| format!(": {place}"));
        match destination.wait_for_start(ANSWER_TIMEOUT) {
            Statement::Here { state } => {
                has_run.store(true, Ordering::Relaxed);
                let ms = connected.elapsed().as_secs_f64() * 1e3;
                let does = does.get_or_init(|| state_clause(&state));
                warn!("the guest {does} after {ms:.1} ms; its pages follow{place}");
                clock.is_here(&state);
            }
            Statement::Stopped {
                reason,
                can_run: true,
            } => warn!("hotlift: the guest does not run: {reason}; its pages follow"),
            // The connection breaks, which ends the restore; its error then contains how the guest ended.
            Statement::GuestEnded { .. } => has_run.store(true, Ordering::Relaxed),
            Statement::Stopped { reason, .. }
            | Statement::Ended { reason }
            | Statement::Never { reason } => return Err(MigrationError::Destination { reason }),
            Statement::Unknown { reason, .. } => {
                warn!(
                    "hotlift: cannot determine whether the guest runs: {reason}; its pages follow{place}"
                );
            }
        }
        Ok(())
    };
    let loading = || destination.loading();
    let hooks = Hooks {
        on_progress: Some(&show),
        on_commit: Some(&on_commit),
        loading: Some(&loading),
        on_loaded: Some(&on_loaded),
        ..asked
    };
    let to = Address::Unix {
        path: socket.to_owned(),
    };
    let restored = interrupt.cancelling(&control, || {
        lazy::restore(file, &to, args.resume, options, &control, hooks)
    });
    if let Ok(display) = display.lock() {
        display.finish();
    }
    (restored, has_run.into_inner())
}

fn table(report: &LazyReport) -> Table {
    let [half, hundredth, longest] = report.request_us;
    let mut table = new_table(&["lazy restore", ""]);
    if report.pages_before > 0 {
        table.add_row(["pages before".to_owned(), report.pages_before.to_string()]);
    }
    for (name, value) in [
        (
            "guest loaded",
            format!("{:.1} ms after the connection", report.running_ms),
        ),
        ("has all pages", format!("{:.0} ms", report.total_ms)),
        ("pages with content", report.normal_pages.to_string()),
        ("sent", bytes(report.sent_bytes)),
        ("requested pages", report.requests.to_string()),
        (
            "request to page",
            format!("p50 {half:.0} us, p99 {hundredth:.0} us, longest {longest:.0} us"),
        ),
    ] {
        table.add_row([name.to_owned(), value]);
    }
    if !report.lost.is_empty() {
        let pages: usize = report.lost.iter().map(|lost| lost.offsets.len()).sum();
        table.add_row([
            "lost, replaced by zero pages".to_owned(),
            format!("{pages} pages"),
        ]);
    }
    align(&mut table);
    table
}

/// Returns the options of a lazy restore: the limits `--max-bandwidth` and `--cpu-limit`, if given.
pub fn options(args: &RestoreArgs) -> Result<Options, CommandError> {
    let mut options = Options {
        limits: args.limits.limits.clone(),
        tls: args.limits.tls.clone(),
        ..Options::default()
    };
    options.stream.max_bandwidth = 0;
    let given = [
        ("max-bandwidth", &args.max_bandwidth),
        ("cpu-limit", &args.cpu_limit),
    ];
    for (name, value) in given {
        if let Some(value) = value {
            options.set(name, value)?;
        }
    }
    Ok(options)
}
