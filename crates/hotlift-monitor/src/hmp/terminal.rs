//! The human monitor on standard input and output: for an operator on a terminal, or for a script through a pipe. The monitor
//! has its own thread. If a write fails, only the monitor ends, not the process.

use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::time::Instant;

use hotlift_mem::wait_readable;
use hotlift_qmp::server::Commands;
use hotlift_terminal::progress;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::stdio::stdin;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use rustyline::completion::Completer;
use rustyline::config::{CompletionType, Config};
use rustyline::error::ReadlineError;
use rustyline::history::MemHistory;
use rustyline::{Context, Editor, Helper};
use serde_json::Value as Json;

use super::complete::complete;
use super::run::{Answer, run};
use super::session::{MAX_LINE, POLL_INTERVAL, PROMPT, greeting, wait};
use super::show;

/// Prompt on a terminal.
const TERMINAL_PROMPT: &str = "(hotlift) ";

/// Byte that a terminal sends for Ctrl-C if it does not turn Ctrl-C into a signal.
const CTRL_C: u8 = 3;

/// Saved settings of a terminal, which are restored on drop. The thread that edits a line changes the settings, and may not
/// restore them before the process ends.
pub struct TerminalSettings(Option<Termios>);

impl TerminalSettings {
    /// Saves the settings of standard input. Does nothing if standard input is not a terminal.
    pub fn keep() -> Self {
        Self(tcgetattr(stdin()).ok())
    }
}

impl Drop for TerminalSettings {
    fn drop(&mut self) {
        if let Some(settings) = &self.0 {
            let _ = tcsetattr(stdin(), OptionalActions::Now, settings);
        }
    }
}

/// Serves standard input and output until `quit`, or until the end of a pipe.
///
/// On a terminal, there are history and completion, and Ctrl-C cancels a migration for whose end the session waits. The session
/// ends when the terminal is closed. Ctrl-D does not end it, because the guest would continue without a monitor.
///
/// # Errors
/// I/O errors of the terminal.
pub fn serve_terminal(commands: &dyn Commands) -> io::Result<()> {
    if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
        return serve_pipe(commands, &mut io::stdin().lock(), &mut io::stdout().lock());
    }
    let config = Config::builder()
        .completion_type(CompletionType::List)
        .build();
    let history = MemHistory::with_config(&config);
    let mut editor = Editor::<Names, MemHistory>::with_history(config, history).map_err(other)?;
    editor.set_helper(Some(Names));
    writeln!(io::stdout(), "{}", greeting())?;
    loop {
        let line = match editor.readline(TERMINAL_PROMPT) {
            Ok(line) => line,
            Err(ReadlineError::Eof) if is_closed()? => return Ok(()),
            Err(ReadlineError::Interrupted | ReadlineError::Eof) => {
                writeln!(io::stdout(), "(quit ends)")?;
                continue;
            }
            Err(error) => return Err(other(error)),
        };
        editor.add_history_entry(&line).map_err(other)?;
        match run(commands, &line) {
            Answer::Text(text) => write!(io::stdout(), "{text}")?,
            Answer::Quit => return Ok(()),
            Answer::Started => write!(io::stdout(), "{}", wait_with_ctrl_c(commands)?)?,
        }
        io::stdout().flush()?;
    }
}

/// Returns true if the terminal was closed. A read cannot distinguish a closed terminal from Ctrl-D.
fn is_closed() -> io::Result<bool> {
    let mut input = [PollFd::from_borrowed_fd(stdin(), PollFlags::IN)];
    match poll(&mut input, Some(&Timespec::default())) {
        Ok(_) => Ok(input[0]
            .revents()
            .intersects(PollFlags::HUP | PollFlags::ERR)),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn other(error: ReadlineError) -> io::Error {
    match error {
        ReadlineError::Io(error) => error,
        error => io::Error::other(error),
    }
}

/// Waits for the end of a migration, and shows its progress in a line that is rewritten. Ctrl-C cancels the migration.
fn wait_with_ctrl_c(commands: &dyn Commands) -> io::Result<String> {
    let settings = TerminalSettings::keep();
    if let Some(before) = &settings.0 {
        // The terminal must not turn Ctrl-C into a signal, which would end the process.
        let mut keys = before.clone();
        keys.local_modes -= LocalModes::ISIG | LocalModes::ICANON | LocalModes::ECHO;
        tcsetattr(stdin(), OptionalActions::Now, &keys)?;
    }
    let end = wait(commands, &mut |info: &Json| {
        let line = progress::rewritten(&show::progress_line(info));
        write!(io::stdout(), "{line}")?;
        io::stdout().flush()?;
        if ctrl_c()? {
            // Fails if the migration has ended in the meantime. The next poll shows this.
            let _ = commands.execute("migrate_cancel", &Json::Null);
        }
        Ok(())
    });
    write!(io::stdout(), "\r\x1b[K")?;
    end
}

/// Waits for a key for up to [`POLL_INTERVAL`]. Returns true if the key was Ctrl-C.
fn ctrl_c() -> io::Result<bool> {
    if !wait_readable(&[stdin()], Some(Instant::now() + POLL_INTERVAL)) {
        return Ok(false);
    }
    let mut keys = [0; 64];
    let read = rustix::io::read(stdin(), &mut keys)?;
    if read == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(keys[..read].contains(&CTRL_C))
}

/// Serves a script that writes lines and reads the output through pipes.
pub(super) fn serve_pipe(
    commands: &dyn Commands,
    input: &mut dyn BufRead,
    output: &mut dyn Write,
) -> io::Result<()> {
    writeln!(output, "{}", greeting())?;
    loop {
        write!(output, "{PROMPT}")?;
        output.flush()?;
        let mut line = Vec::new();
        (&mut *input)
            .take(MAX_LINE as u64 + 1)
            .read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Ok(());
        }
        if line.len() > MAX_LINE && line.last() != Some(&b'\n') {
            return writeln!(output, "a line has at most {MAX_LINE} bytes");
        }
        match run(commands, &String::from_utf8_lossy(&line)) {
            Answer::Text(text) => output.write_all(text.as_bytes())?,
            Answer::Quit => return Ok(()),
            Answer::Started => {
                let end = wait(commands, &mut |_| {
                    std::thread::sleep(POLL_INTERVAL);
                    Ok(())
                })?;
                output.write_all(end.as_bytes())?;
            }
        }
    }
}

/// Completes names of commands, topics and options.
struct Names;

impl Completer for Names {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let (start, mut names) = complete(line.get(..position).unwrap_or(line));
        // A space follows a complete name, but not an address, which may continue after the colon.
        if let [name] = &mut names[..]
            && !name.ends_with(':')
        {
            name.push(' ');
        }
        Ok((start, names))
    }
}

impl rustyline::hint::Hinter for Names {
    type Hint = String;
}

impl rustyline::highlight::Highlighter for Names {}
impl rustyline::validate::Validator for Names {}
impl Helper for Names {}
