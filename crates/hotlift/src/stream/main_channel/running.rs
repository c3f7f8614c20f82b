//! Pages of a guest that already runs, and the negotiation on a connection that replaces a lost one.

use hotlift_wire::main_channel::postcopy::PostcopyCommand;
use hotlift_wire::main_channel::{Command, MainEvent, PageContent, SectionKind};

use super::{Action, MainChannel, Phase, SilenceLimit, event_name, protocol};
use crate::error::MigrationError;

impl MainChannel {
    /// Handles a record after the package that starts the guest.
    pub(super) fn running<'a>(
        &mut self,
        event: MainEvent<'a>,
    ) -> Result<Action<'a>, MigrationError> {
        match event {
            MainEvent::RamPage {
                block,
                offset,
                content: content @ (PageContent::Zero | PageContent::Normal(_)),
            } => Ok(Action::Page {
                block,
                offset,
                content,
            }),
            MainEvent::RamPage { .. } => Err(out_of_place("a compressed page")),
            MainEvent::Command(Command::Ping(value)) => Ok(Action::Pong(value)),
            MainEvent::SectionStart {
                kind: SectionKind::Part | SectionKind::End,
                ..
            }
            | MainEvent::RamEos
            | MainEvent::SectionFooter => Ok(Action::Nothing),
            MainEvent::Eof => {
                self.phase = Phase::Over;
                Ok(Action::Eof { unasked: false })
            }
            other => Err(out_of_place(&event_name(&other))),
        }
    }

    /// Handles a record from a source that resumes an interrupted postcopy.
    pub(super) fn agree<'a>(&mut self, event: MainEvent<'a>) -> Result<Action<'a>, MigrationError> {
        match event {
            MainEvent::Postcopy(PostcopyCommand::RecvBitmap(block)) => Ok(Action::Bitmap(block)),
            MainEvent::Postcopy(PostcopyCommand::Resume) => {
                self.phase = Phase::Pages;
                if let SilenceLimit::Always(limit) = self.silence {
                    self.silence = SilenceLimit::WithinRecords(limit / 2);
                }
                Ok(Action::Resume)
            }
            other => Err(out_of_place(&event_name(&other))),
        }
    }
}

fn out_of_place(got: &str) -> MigrationError {
    protocol(got, "receiving pages of a running guest")
}
