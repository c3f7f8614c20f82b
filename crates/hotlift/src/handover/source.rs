//! The source's side of the handover.

/// State of the source's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum SourceSide {
    /// The source owns the guest.
    #[default]
    Keeps,
    /// Relay only: its QEMU was informed that all is loaded, and may release the guest at any moment.
    Offered,
    /// Relay only: its QEMU has released the guest. The destination has not received the commit.
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
    /// The destination does not run the guest and never will, but the source has released it, or may have: it is paused at the
    /// source, complete.
    Refused,
    /// The destination may run the guest. The source keeps it, paused.
    Doubt,
    /// Postcopy only: the destination runs the guest, and will not receive its missing pages.
    PagesLost,
}

/// Report of the destination, after the commit, about its ownership of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum DestinationStatement {
    /// It has the guest.
    Runs,
    /// It does not run the guest, and never will.
    Never,
    /// Postcopy only: it has the guest, with all of its pages.
    HasAll,
}

impl DestinationStatement {
    /// Returns the statement of SHUT(`value`) after the commit. A Hotlift's refusal comes with its reason (`is_explained`): one
    /// damaged byte cannot turn one statement into the other. A QEMU sends no reasons.
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

    /// Passes the point of no return. The caller sends the commit to the destination only if this returns true.
    pub(crate) fn commit(&mut self) -> bool {
        self.step(&[Self::Keeps, Self::Released], Self::Committed)
    }

    /// Passes the point of no return of a postcopy, whose guest will run before it has all pages.
    pub(crate) fn serve(&mut self) -> bool {
        self.step(&[Self::Keeps], Self::Serving { runs: false })
    }

    /// Records that the destination of a postcopy has all pages. Until then the source's pages are needed.
    pub(crate) fn all_pages_arrived(&mut self) -> bool {
        let serving = [true, false].map(|runs| Self::Serving { runs });
        self.step(&serving, Self::Ended(SourceOutcome::Moved))
    }

    /// Records a failure, a lost connection, a cancel or a panic. Returns true if it ends the migration. After the commit it
    /// does not, and nothing may be done to the guest.
    pub(crate) fn fail(&mut self) -> bool {
        self.step(&[Self::Keeps], Self::Ended(SourceOutcome::Kept))
            || self.step(
                &[Self::Offered, Self::Released],
                Self::Ended(SourceOutcome::Refused),
            )
    }

    /// Takes a statement of the destination, which has no effect before the commit.
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

    /// Ends the wait: no statement came within the time limit or, in postcopy, the migration was cancelled.
    pub(crate) fn end_wait(&mut self) -> bool {
        let unsure = [Self::Committed, Self::Serving { runs: false }];
        self.step(&unsure, Self::Ended(SourceOutcome::Doubt))
            || self.step(
                &[Self::Serving { runs: true }],
                Self::Ended(SourceOutcome::PagesLost),
            )
    }

    /// Returns true if the source may have released the guest: a cancel comes too late.
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
