//! Progress display: one line that is rewritten on a terminal, or one line per second in a log.

use std::cell::Cell;
use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use hotlift::Control;
use hotlift::figures::JobFigures;
use hotlift::progress::{Progress, Stall};

use crate::output::{self, warn};
use crate::width;

/// Progress of a migration as text. The most important part comes first, because a terminal cuts the line at its width.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// The line, without a line end.
    pub text: String,
    /// Remark that the operator must see completely; `None` if there is none. On a terminal it is shown once, in a line of its
    /// own.
    pub remark: Option<String>,
}

impl From<String> for Line {
    fn from(text: String) -> Self {
        Self { text, remark: None }
    }
}

/// Formats the line together with the remark, for a log.
impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)?;
        match &self.remark {
            Some(remark) => write!(f, "; {remark}"),
            None => Ok(()),
        }
    }
}

/// Returns text that replaces the previous line on the terminal of standard error by `line`.
pub fn rewritten(line: &str) -> String {
    /// Assumed number of columns if the terminal reports none.
    const COLUMNS: usize = 80;
    let columns = width::columns(rustix::stdio::stderr()).unwrap_or(COLUMNS);
    // Some terminals move to the next line when the last column is written.
    format!("{CLEAR}{}", width::cut(line, columns.saturating_sub(1)))
}

/// Clears the progress line of a display that was not ended.
pub fn clear() {
    if std::io::stderr().is_terminal() {
        output::progress(CLEAR);
        // Waits for the output, because the next output may go to the other stream of the same terminal.
        output::finish();
    }
}

/// Control characters that clear the line.
const CLEAR: &str = "\r\x1b[K";

/// Interval between progress lines in a log.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Progress display of a migration on standard error. Also warns about unused accelerators.
pub struct Display {
    label: String,
    control: Control,
    quiet: bool,
    state: Mutex<State>,
}

struct State {
    terminal: bool,
    last: Option<(Instant, u64)>,
    /// True if the current remark was already shown.
    is_remarked: bool,
    shown: Cell<bool>,
    warned: Cell<bool>,
    warned_of_zeros: Cell<bool>,
}

impl Display {
    /// Creates the display for the migration of `control`. The lines of the display begin with `label`. If `quiet` is true,
    /// only warnings are shown.
    pub fn new(label: &str, quiet: bool, control: &Control) -> Self {
        Self {
            label: label.to_owned(),
            control: control.clone(),
            quiet,
            state: Mutex::new(State {
                terminal: std::io::stderr().is_terminal(),
                last: None,
                is_remarked: false,
                shown: Cell::new(false),
                warned: Cell::new(false),
                warned_of_zeros: Cell::new(false),
            }),
        }
    }

    /// Shows the latest progress.
    pub fn show(&self, progress: &Progress) {
        self.show_line(progress.round, || {
            let mut line = line(&self.label, progress, self.control.stall());
            line.text.push_str(&jobs(&self.control.jobs()));
            line
        });
    }

    /// Shows the latest progress of a migration in round `round`. In a log a new line is shown each second and in each new
    /// round.
    pub fn show_line(&self, round: u64, line: impl FnOnce() -> Line) {
        let Ok(mut state) = self.state.lock() else {
            return;
        };
        self.warn(&state);
        if self.quiet {
            return;
        }
        let now = Instant::now();
        let due = state.last.is_none_or(|(shown, shown_round)| {
            state.terminal || shown_round != round || now - shown >= LOG_INTERVAL
        });
        if !due {
            return;
        }
        state.last = Some((now, round));
        state.shown.set(true);
        let line = line();
        if !state.terminal {
            output::progress(&format!("{line}\n"));
            return;
        }
        if let (Some(remark), false) = (&line.remark, state.is_remarked) {
            output::progress(&format!("{CLEAR}{}: {remark}\n", self.label));
        }
        state.is_remarked = line.remark.is_some();
        output::progress(&rewritten(&line.text));
    }

    /// Ends the display, and clears the progress line.
    pub fn finish(&self) {
        if let Ok(state) = self.state.lock() {
            state.clear_line();
            self.warn(&state);
        }
    }

    /// Warns once if the CPU does work that an accelerator should do: once for the method, and once for zero page detection.
    fn warn(&self, state: &State) {
        let of = [
            ("", self.control.jobs(), &state.warned),
            (
                " zero pages:",
                self.control.zero_jobs(),
                &state.warned_of_zeros,
            ),
        ];
        for (what, jobs, warned) in of {
            if !warned.get()
                && let Some(warning) = fallback_warning(&jobs)
            {
                warned.set(true);
                state.clear_line();
                warn!("{}:{what} {warning}", self.label);
            }
        }
    }
}

impl State {
    fn clear_line(&self) {
        if self.terminal && self.shown.get() {
            output::progress(CLEAR);
        }
    }
}

/// Returns a warning about jobs that the CPU processed instead of an accelerator; `None` if there are none.
pub fn fallback_warning(jobs: &JobFigures) -> Option<String> {
    let why = jobs.fallback.as_ref()?;
    Some(if jobs.hardware > 0 {
        format!("an accelerator failed and is not used for the rest: {why}")
    } else {
        format!("the CPU is used instead of an accelerator: {why} (see 'hotlift accel')")
    })
}

fn line(label: &str, progress: &Progress, stall: Option<Stall>) -> Line {
    let left = progress
        .time_left
        .map_or("unknown time".to_owned(), |left| {
            format!("{:.1} s", left.as_secs_f64())
        });
    let remark = progress.stall_reason();
    // The share and the reason of each method must fit into 80 columns.
    let (of, ends, methods) = match &progress.methods {
        Some(methods) => (String::new(), "left", format!("; {methods}; ")),
        None => {
            let of = format!(" of {}", bytes(progress.total_bytes));
            (of, "left in this round", ", ".to_owned())
        }
    };
    let text = format!(
        "{label} {status}{stalled}{stall}: round {round}, {remaining}{of} to go, {left} {ends}{methods}\
         {rate}/s on the wire, {pages:.0} pages/s, guest dirties {dirty:.0} pages/s{throttled}",
        status = progress.status.name(),
        stalled = stalled(remark.is_some()),
        stall = stall.map_or_else(String::new, |stall| format!(", {stall}")),
        round = progress.round,
        remaining = bytes(progress.remaining_bytes),
        rate = bytes(rounded(progress.bytes_per_second)),
        pages = progress.pages_per_second,
        dirty = progress.dirty_pages_per_second,
        throttled = throttled(progress.throttle_percent.into()),
    );
    Line {
        text,
        remark: remark.map(|reason| format!("not converging: {reason}")),
    }
}

/// Returns the text that is appended to the state of a migration that does not converge; empty if it converges.
pub fn stalled(is_stalled: bool) -> &'static str {
    match is_stalled {
        true => ", not converging",
        false => "",
    }
}

/// Returns the text about throttling by auto-converge, for the end of a line; empty if the guest is not throttled.
pub fn throttled(percent: u64) -> String {
    match percent {
        0 => String::new(),
        percent => format!(", throttled by {percent} %"),
    }
}

/// Returns the text about jobs of an accelerator, for the end of a line; empty if there are none.
pub fn jobs(jobs: &JobFigures) -> String {
    if jobs.hardware == 0 {
        return String::new();
    }
    format!(
        "; {} jobs in hardware, {} in software, {} retries",
        jobs.hardware, jobs.software, jobs.retries
    )
}

/// Rounds a rate to a whole number. A rate is never negative, and far below 2^63.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped"
)]
pub fn rounded(rate: f64) -> u64 {
    rate.clamp(0.0, 1e18) as u64
}

/// Formats a number of bytes with a binary unit, such as MiB.
pub fn bytes(count: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    for (unit, shift) in units {
        if count >= 1 << shift {
            let tenths = (u128::from(count) * 10) >> shift;
            return format!("{}.{} {unit}", tenths / 10, tenths % 10);
        }
    }
    format!("{count} B")
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotlift::Status;

    #[test]
    fn bytes_have_the_largest_unit_that_fits() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(5 << 20), "5.0 MiB");
        assert_eq!(bytes(3 << 30), "3.0 GiB");
        assert_eq!(bytes(u64::MAX), "17179869183.9 GiB");
    }

    fn moment() -> Progress {
        Progress {
            status: Status::Active,
            round: 7,
            total_bytes: 1 << 30,
            remaining_bytes: 1 << 29,
            transferred_bytes: 9 << 30,
            bytes_per_second: 128e6,
            pages_per_second: 30_000.0,
            dirty_pages_per_second: 40_000.0,
            elapsed: Duration::from_secs(70),
            time_left: Some(Duration::from_millis(4400)),
            dirty_syncs: 1,
            ..Progress::default()
        }
    }

    #[test]
    fn a_migration_that_does_not_converge_has_a_reason() {
        let mut progress = moment();
        let converging = line("zstd", &progress, None).to_string();
        assert!(
            converging.contains("round 7, 512.0 MiB of 1.0 GiB to go"),
            "{converging}"
        );
        assert!(converging.contains("4.4 s left"), "{converging}");
        assert!(!converging.contains("not converging"));
        assert!(!converging.contains("throttled"), "{converging}");
        progress.stalled = true;
        let stalled = line("zstd", &progress, None);
        for words in [
            "dirties 40000 pages/s and the channels settle 30000",
            "multifd-channels",
            "turn auto-converge on",
        ] {
            assert!(stalled.to_string().contains(words), "{stalled}");
        }
        // Even a narrow terminal shows the important parts.
        let narrow = width::cut(&stalled.text, 79);
        for words in ["not converging", "round 7", "512.0 MiB of 1.0 GiB to go"] {
            assert!(narrow.contains(words), "{narrow}");
        }
    }

    #[test]
    fn the_share_of_each_method_is_visible_on_80_columns() {
        let mut progress = moment();
        progress.methods = Some(hotlift::progress::MethodsNow {
            link_is_the_limit: true,
            shares: vec![("zstd 3".to_owned(), 0.62), ("none".to_owned(), 0.38)],
        });
        let narrow = width::cut(&line("auto", &progress, None).text, 79);
        for words in ["round 7", "4.4 s left", "link is the limit: 62 %"] {
            assert!(narrow.contains(words), "{narrow}");
        }
    }

    #[test]
    fn with_a_bandwidth_limit_the_hint_is_to_raise_it_not_the_channels() {
        let progress = Progress {
            stalled: true,
            bandwidth_limited: true,
            auto_converge: true,
            throttle_percent: 40,
            ..moment()
        };
        let line = line("none", &progress, None);
        assert!(line.text.ends_with(", throttled by 40 %"), "{line}");
        let output = line.to_string();
        assert!(
            output.contains("raise max-bandwidth or downtime-limit"),
            "{output}"
        );
        for wrong in ["channels", "auto-converge"] {
            assert!(!output.contains(wrong), "{output}");
        }
    }
}
