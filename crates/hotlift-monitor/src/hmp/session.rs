//! Session of one client on a socket: reads lines, executes one at a time, and writes the output as text.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use hotlift_qmp::server::Commands;
use hotlift_qmp::{HTTP, Line, Lines, Socket, is_http};
use serde_json::Value as Json;

use super::run::{Answer, run};
use super::show;

/// QEMU's prompt, which scripts wait for.
pub const PROMPT: &str = "(qemu) ";

/// Maximum length of a line, in bytes: QEMU's own limit (`READLINE_CMD_BUF_SIZE`).
pub const MAX_LINE: usize = 4095;

/// Interval between polls of a migration for whose end a client waits.
pub const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Interval between two lines of progress.
const PROGRESS: Duration = Duration::from_secs(1);

/// Timeout of a write to a client.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum time of one wait for a line, after which the wait is repeated: a silent client is never disconnected.
const SILENCE: Duration = Duration::from_secs(60);

/// Returns the first line of every session.
pub fn greeting() -> String {
    format!(
        "Hotlift {} monitor - type 'help' for more information",
        env!("CARGO_PKG_VERSION")
    )
}

/// Serves a client until it disconnects or sends `quit`.
///
/// # Errors
/// I/O errors of the connection; [`io::ErrorKind::InvalidData`] if the client sends HTTP, as a browser does.
pub fn serve_client(commands: &dyn Commands, socket: Socket) -> io::Result<()> {
    let mut client = Client(Lines::new(socket, MAX_LINE));
    client.write_line(&greeting())?;
    loop {
        client.write(PROMPT)?;
        let line = loop {
            match client.0.read(Instant::now() + SILENCE)? {
                Line::Whole(line) if line.len() <= MAX_LINE + 1 => break line,
                Line::Late => {}
                Line::Closed => return Ok(()),
                Line::Whole(_) | Line::TooLong => {
                    return client.write_line(&format!("a line has at most {MAX_LINE} bytes"));
                }
            }
        };
        if is_http(&line) {
            client.write_line(HTTP)?;
            return Err(io::Error::new(io::ErrorKind::InvalidData, HTTP));
        }
        match run(commands, &String::from_utf8_lossy(&line)) {
            Answer::Text(text) => client.write(&text)?,
            Answer::Quit => return Ok(()),
            Answer::Started => {
                let mut next = Instant::now() + PROGRESS;
                wait(commands, &mut |info| {
                    if Instant::now() >= next {
                        next = Instant::now() + PROGRESS;
                        client.write_line(&show::progress_line(info))?;
                    }
                    thread::sleep(POLL_INTERVAL);
                    Ok(())
                })
                .and_then(|end| client.write(&end))?;
            }
        }
    }
}

struct Client(Lines);

impl Client {
    fn write_line(&mut self, line: &str) -> io::Result<()> {
        self.write(&format!("{line}\n"))
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        let text = text.replace('\n', "\r\n");
        if self
            .0
            .write(text.as_bytes(), Instant::now() + WRITE_TIMEOUT)?
        {
            Ok(())
        } else {
            Err(io::ErrorKind::TimedOut.into())
        }
    }
}

/// Waits for the end of a migration, and returns the output to show then. Between two polls calls `between_polls`, which must
/// block for a while. An error of `between_polls` ends the wait.
///
/// # Errors
/// Errors of `between_polls`. The migration itself continues.
pub fn wait(
    commands: &dyn Commands,
    between_polls: &mut dyn FnMut(&Json) -> io::Result<()>,
) -> io::Result<String> {
    loop {
        let info = match commands.execute("query-migrate", &Json::Null) {
            Ok(info) => info,
            Err(refusal) => return Ok(format!("Error: {}\n", refusal.desc)),
        };
        if matches!(
            info["status"].as_str(),
            Some("completed" | "failed" | "cancelled")
        ) {
            return Ok(show::status_line(&info).unwrap_or_default());
        }
        between_polls(&info)?;
    }
}
