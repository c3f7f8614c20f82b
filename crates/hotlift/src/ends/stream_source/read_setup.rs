//! Reads a stream up to its first page, and answers its source.

use std::io::{self, Write};

use hotlift_net::transport::Stream;
use hotlift_wire::handshake::{Features, Offer};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::MigrationId;

use crate::error::{Channel, MigrationError};
use crate::pipe::session::WaitCheck;
use crate::stream::graceful_close;
use crate::stream::handshake;
pub(crate) use crate::stream::main_channel::Setup;
use crate::stream::main_channel::{Action, MainChannel, unexpected};
use crate::stream::main_recv::MainInput;
use crate::stream::return_path::encode;

/// Kind of the stream.
pub(crate) enum StreamSetup {
    /// Can be relayed page by page.
    PageByPage(Box<Setup>),
    /// Must be passed through: the reason, and true if the source reads answers.
    PassThrough(String, bool),
}

/// Reads the stream up to the last record of the START section of `ram`. If the source is a Hotlift, sends it the migration's
/// `id`.
pub(crate) fn read_setup(
    input: &mut MainInput<'_>,
    machine: &mut MainChannel,
    id: MigrationId,
    call: &WaitCheck<'_>,
) -> Result<StreamSetup, MigrationError> {
    let main = input.socket();
    loop {
        let read = input.step(machine, call, |action, _| {
            match action {
                Action::SetUp(setup) => return Ok(Some(StreamSetup::PageByPage(setup))),
                Action::PassThrough { why, is_answered } => {
                    return Ok(Some(StreamSetup::PassThrough(why, is_answered)));
                }
                Action::Greet { offer, takes } => answer_offer(main, offer, takes, id)?,
                Action::Pongs(values) => {
                    let pongs: Vec<_> = values.into_iter().map(ReturnMessage::Pong).collect();
                    answer(main, &encode(&pongs))?;
                }
                Action::Nothing => {}
                _ => return Err(unexpected("a RAM record before the start of RAM")),
            }
            Ok(None)
        })?;
        if let Some(Some(setup)) = read {
            return Ok(setup);
        }
    }
}

/// Checks whether a stream without multifd must be passed through, and returns the reason; `None` if it can be relayed page by
/// page. The reason is another device that sends state while the guest runs, or before RAM in an unknown layout. Adds device
/// sections of a known layout to `setup`.
pub(crate) fn other_devices(
    input: &mut MainInput<'_>,
    machine: &mut MainChannel,
    setup: &mut Setup,
    call: &WaitCheck<'_>,
) -> Result<Option<String>, MigrationError> {
    while machine.is_unopened() {
        let refused = input.step(machine, call, |action, _| {
            Ok(match action {
                Action::Early(section) => {
                    setup.early.push(section, true);
                    None
                }
                Action::PassThrough { why, .. } => Some(why),
                _ => None,
            })
        })?;
        if let Some(refused @ Some(_)) = refused {
            return Ok(refused);
        }
    }
    Ok(None)
}

/// Answers a Hotlift's offer. If the version is another one, or the stream is not accepted, the answer is a rejection, and the
/// result is an error.
fn answer_offer(
    main: &Stream,
    offer: Offer,
    takes: Features,
    id: MigrationId,
) -> Result<(), MigrationError> {
    answer(main, &encode(&handshake::answer(offer, takes, id)))?;
    handshake::check(offer, takes).inspect_err(|error| graceful_close::refuse(&[main], error))
}

fn answer(mut main: &Stream, bytes: &[u8]) -> Result<(), MigrationError> {
    main.write_all(bytes)
        .map_err(|source: io::Error| MigrationError::Connection {
            channel: Channel::Main,
            doing: "answering the source",
            source,
        })
}
