//! Tests the output of commands on a terminal.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

/// Width of a narrow terminal.
const COLUMNS: u16 = 60;

/// Moves the cursor to the start of the line and clears it.
const CLEAR: &str = "\r\x1b[K";

/// Number of lines that a terminal reports if it does not know them.
const NO_LINES: u16 = 0;

/// Command with a terminal; killed on drop.
struct OnTerminal {
    child: Child,
    terminal: File,
    bytes_read: Vec<u8>,
}

impl OnTerminal {
    /// Starts a command whose standard error is the terminal.
    fn start(args: &[&str]) -> Self {
        Self::start_with(args, 24, |command, terminal| {
            command.stdout(Stdio::null()).stderr(terminal)
        })
    }

    fn start_with(
        args: &[&str],
        lines: u16,
        give: impl FnOnce(&mut Command, OwnedFd) -> &mut Command,
    ) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let terminal = openpt(flags).unwrap();
        grantpt(&terminal).unwrap();
        unlockpt(&terminal).unwrap();
        let of_command = ioctl_tiocgptpeer(&terminal, flags).unwrap();
        let size = Winsize {
            ws_row: lines,
            ws_col: COLUMNS,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&of_command, size).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_hotlift"));
        command.args(args).stdin(Stdio::null());
        let child = give(&mut command, of_command).spawn().unwrap();
        // Its copies of the terminal's descriptors would keep it open.
        drop(command);
        Self {
            child,
            terminal: terminal.into(),
            bytes_read: Vec::new(),
        }
    }

    /// Reads more output; returns false once the command has closed the terminal.
    fn read(&mut self) -> bool {
        let mut bytes = [0; 4096];
        // Reading a terminal that no process has open fails.
        let length = self.terminal.read(&mut bytes).unwrap_or(0);
        self.bytes_read.extend_from_slice(&bytes[..length]);
        length > 0
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes_read).into_owned()
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_line_of_progress_is_cut_to_the_terminal_and_never_scrolls() {
    // It does not end by itself.
    let slow = ["--ram=64M", "--method=none", "--max-bandwidth=2M"];
    let mut demo = OnTerminal::start(&[&["demo", "--guest=threads"][..], &slow].concat());
    while demo.text().matches("round 1").count() < 3 {
        assert!(demo.read(), "it has ended: {}", demo.text());
    }
    let pid = Pid::from_raw(demo.child.id().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    while demo.read() {}
    let output = demo.text();
    let lines: Vec<_> = output
        .split(CLEAR)
        .filter(|line| line.contains("round "))
        .collect();
    assert!(lines.len() >= 3, "{output:?}");
    for line in lines {
        assert!(line.ends_with('…'), "all of it fits: {line:?}");
        // The last column stays free, since some terminals wrap there.
        assert_eq!(line.chars().count(), usize::from(COLUMNS) - 1, "{line:?}");
    }
}

#[test]
fn help_fits_a_terminal_that_reports_only_its_columns() {
    let mut help = OnTerminal::start_with(&["demo", "--help"], NO_LINES, |command, terminal| {
        let command = command.env("NO_COLOR", "1");
        command.stdout(terminal).stderr(Stdio::null())
    });
    while help.read() {}
    let output = help.text();
    assert!(output.contains("--multifd-compression"), "{output}");
    // A word that cannot be broken stays whole.
    let is_long = |line: &&str| line.chars().count() > COLUMNS.into() && line.trim().contains(' ');
    let long: Vec<_> = output.lines().filter(is_long).collect();
    assert!(long.is_empty(), "{long:#?}");
}
