//! The source's side of the handover.

/// State of the source's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum SourceSide {
    /// The source owns the guest.
    #[default]
    Keeps,
    /// Relay only: the source's QEMU was informed that everything is loaded, and may release the guest at any moment.
    Offered,
    /// Relay only: the source's QEMU has released the guest. The destination has not received the commit.
    Released,
    /// The destination may have received the commit.
    Committed,
    /// Postcopy only: the destination may have received the commit, and needs pages that only the source has. `runs` is true
    /// once the destination has stated that it runs the guest.
    Serving { runs: bool },
    /// The outcome is known, or cannot be known.
    Ended(SourceOutcome),
}

/// Outcome of a handover for the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SourceOutcome {
    /// The source never released the guest.
    Kept,
    /// The destination has the guest.
    Moved,
    /// The destination does not run the guest, and never will. The source may have released the guest, and has it paused,
    /// without loss of data.
    Refused,
    /// The destination may run the guest. The source keeps the guest paused.
    Doubt,
    /// Postcopy only: the destination runs the guest, and will not receive its missing pages.
    PagesLost,
}

/// Report of the destination, after the commit, about its ownership of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum DestinationStatement {
    /// The destination has the guest.
    Runs,
    /// The destination does not run the guest, and never will.
    Never,
    /// Postcopy only: the destination has the guest, with all of its pages.
    HasAll,
}

impl DestinationStatement {
    /// Returns the statement that SHUT(`value`) makes after the commit; `None` if it makes none.
    ///
    /// A Hotlift sends an error text before a SHUT other than 0 (`is_explained`). So one damaged byte cannot turn a statement
    /// into the opposite statement. A QEMU sends no error text.
    pub(crate) fn of_shut(value: u32, is_explained: bool, is_hotlift: bool) -> Option<Self> {
        match value {
            0 if !is_explained => Some(Self::Runs),
            1.. if is_explained || !is_hotlift => Some(Self::Never),
            _ => None,
        }
    }
}

impl SourceSide {
    /// Records that a relay is about to inform its QEMU that all is loaded. Returns false if the migration has ended.
    pub(crate) fn offer(&mut self) -> bool {
        self.step(&[Self::Keeps], Self::Offered)
    }

    /// Records that the QEMU of a relay has released the guest.
    pub(crate) fn released(&mut self) -> bool {
        self.step(&[Self::Offered], Self::Released)
    }

    /// Records that the QEMU of a relay has taken the guest back.
    pub(crate) fn taken_back(&mut self) -> bool {
        self.step(&[Self::Offered], Self::Ended(SourceOutcome::Kept))
    }

    /// Records the commit. Returns false if the state does not permit a commit; the caller then must not send it to the
    /// destination.
    pub(crate) fn commit(&mut self) -> bool {
        self.step(&[Self::Keeps, Self::Released], Self::Committed)
    }

    /// Records the commit of a postcopy, whose guest will run before it has all pages. Returns false if the state does not
    /// permit it.
    pub(crate) fn serve(&mut self) -> bool {
        self.step(&[Self::Keeps], Self::Serving { runs: false })
    }

    /// Records that the destination of a postcopy has all pages. Until then the source must keep its pages.
    pub(crate) fn all_pages_arrived(&mut self) -> bool {
        let serving = [true, false].map(|runs| Self::Serving { runs });
        self.step(&serving, Self::Ended(SourceOutcome::Moved))
    }

    /// Records a failure, a lost connection, a cancel or a panic. Returns true if this ends the migration. Returns false after
    /// the commit: the guest must then stay paused.
    pub(crate) fn fail(&mut self) -> bool {
        self.step(&[Self::Keeps], Self::Ended(SourceOutcome::Kept))
            || self.step(
                &[Self::Offered, Self::Released],
                Self::Ended(SourceOutcome::Refused),
            )
    }

    /// Processes a statement of the destination. A statement before the commit has no effect.
    pub(crate) fn receive(&mut self, statement: DestinationStatement) -> bool {
        match statement {
            DestinationStatement::Runs => {
                self.step(&[Self::Committed], Self::Ended(SourceOutcome::Moved))
                    || self.step(
                        &[Self::Serving { runs: false }],
                        Self::Serving { runs: true },
                    )
            }
            DestinationStatement::HasAll => self.all_pages_arrived(),
            DestinationStatement::Never => self.step(
                &[Self::Committed, Self::Serving { runs: false }],
                Self::Ended(SourceOutcome::Refused),
            ),
        }
    }

    /// Ends the wait without a statement: the time limit is reached or, in postcopy, the migration was cancelled.
    pub(crate) fn end_wait(&mut self) -> bool {
        let unsure = [Self::Committed, Self::Serving { runs: false }];
        self.step(&unsure, Self::Ended(SourceOutcome::Doubt))
            || self.step(
                &[Self::Serving { runs: true }],
                Self::Ended(SourceOutcome::PagesLost),
            )
    }

    /// Returns true if the source may have released the guest. A cancel then has no effect.
    pub(crate) fn is_offered(self) -> bool {
        !matches!(self, Self::Keeps | Self::Ended(SourceOutcome::Kept))
    }

    /// Returns true if the destination may have received the commit, and has not refused the guest.
    pub(crate) fn is_committed(self) -> bool {
        matches!(
            self,
            Self::Committed
                | Self::Serving { .. }
                | Self::Ended(
                    SourceOutcome::Moved | SourceOutcome::Doubt | SourceOutcome::PagesLost
                )
        )
    }

    /// Returns the outcome, once there is one.
    pub(crate) fn outcome(self) -> Option<SourceOutcome> {
        match self {
            Self::Ended(outcome) => Some(outcome),
            _ => None,
        }
    }

    fn step(&mut self, from: &[Self], to: Self) -> bool {
        let may = from.contains(self);
        if may {
            *self = to;
        }
        may
    }
}
