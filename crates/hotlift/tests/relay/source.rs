//! A source that sends a recording as a QEMU would send it.

use std::io::Write;
use std::net::Shutdown;
use std::thread;
use std::time::Duration;

use hotlift::Address;
use hotlift::transport::Stream;
use hotlift_wire::return_path::ReturnMessage;

use super::log::{Event, Log};
use super::recording::Recording;

/// Behaviour of a source at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Sends everything, waits for SHUT (if it reads answers), and closes.
    LetsGo,
    /// Closes everything after this count of bytes of main.
    CancelsAt(usize),
    /// Ends this channel after this count of bytes, and waits.
    LosesChannel(usize, usize),
    /// Sends this count of bytes of main, and then nothing until the peer closes.
    FallsSilentAt(usize),
    /// Sends everything, and keeps its connections until [`Event::SourceMayClose`], whatever it receives.
    Keeps,
}

/// Messages that a source received.
#[derive(Debug, Default)]
pub struct ReceivedMessages {
    pub shut: Option<u32>,
    pub pongs: Vec<u32>,
}

/// Plays `recording` to the listener at `to`. Returns when its connections are closed.
pub fn play(recording: &Recording, to: &Address, ending: Ending, log: &Log) -> ReceivedMessages {
    let connect = || to.connect(Duration::from_secs(10)).unwrap();
    // Channels connect only after main, as required before QEMU 8.0.
    let main = connect();
    let channels: Vec<Stream> = recording.channels.iter().map(|_| connect()).collect();
    log.note(Event::SourceConnected);
    play_on(recording, (main, 0), &channels, ending, log)
}

/// Plays `recording` on existing connections; `output` bytes of main are already sent.
pub fn play_on(
    recording: &Recording,
    (main, output): (Stream, usize),
    channels: &[Stream],
    ending: Ending,
    log: &Log,
) -> ReceivedMessages {
    let close = || {
        for stream in std::iter::once(&main).chain(channels) {
            stream.shutdown(Shutdown::Both);
        }
    };
    thread::scope(|scope| {
        let mut writers = Vec::new();
        for (id, (stream, bytes)) in channels.iter().zip(&recording.channels).enumerate() {
            let lost = match ending {
                Ending::LosesChannel(which, length) if which == id => Some(length),
                _ => None,
            };
            writers.push(scope.spawn(move || {
                let mut out = stream;
                // A failed relay closes; this is detected on main.
                let _ = out.write_all(&bytes[..lost.unwrap_or(bytes.len())]);
                if lost.is_some() {
                    stream.shutdown(Shutdown::Both);
                }
            }));
        }
        let close = &close;
        let mut out = &main;
        scope.spawn(move || {
            let length = match ending {
                Ending::CancelsAt(length) | Ending::FallsSilentAt(length) => length,
                _ => recording.main.len(),
            };
            let sent = out.write_all(&recording.main[output..length]);
            let lets_go = ending == Ending::LetsGo && !recording.has_return_path();
            if sent.is_ok() && (lets_go || matches!(ending, Ending::CancelsAt(_))) {
                if lets_go {
                    writers
                        .into_iter()
                        .for_each(|writer| writer.join().unwrap());
                }
                log.note(Event::SourceCloses);
                close();
            }
        });
        let received = listen(&main, ending, log);
        close();
        received
    })
}

/// Reads answers until the connection ends or SHUT ends the migration.
fn listen(main: &Stream, ending: Ending, log: &Log) -> ReceivedMessages {
    let mut received = ReceivedMessages::default();
    let (mut pending, mut buffer) = (Vec::new(), [0; 512]);
    loop {
        let read = main.read_some(&mut buffer).unwrap_or(0);
        if read == 0 {
            return received;
        }
        pending.extend_from_slice(&buffer[..read]);
        while let Ok((message, length)) = ReturnMessage::decode(&pending) {
            match message {
                ReturnMessage::Pong(value) => received.pongs.push(value),
                ReturnMessage::Shut(value) => {
                    log.note(Event::SourceToldShut(value));
                    received.shut = Some(value);
                    let may_close = || log.has(Event::SourceMayClose);
                    while ending == Ending::Keeps && !may_close() && !is_closed(main) {
                        thread::sleep(Duration::from_millis(2));
                    }
                    log.note(Event::SourceCloses);
                    return received;
                }
                other => panic!("a QEMU source was sent {other:?}"),
            }
            pending.drain(..length);
        }
    }
}

fn is_closed(main: &Stream) -> bool {
    !matches!(main.peek(&mut [0]), Ok(None | Some(1..)))
}
