//! The source's side of the hand-over.

/// How far the source's side has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum SourceSide {
    /// The guest is the source's.
    #[default]
    Keeps,
    /// Of a relay: its QEMU was told that all is loaded, and may give the guest up at any moment.
    Offered,
    /// Of a relay: its QEMU has given the guest up. The destination has not been told to run it.
    Released,
    /// The destination may have been told to run the guest.
    Committed,
    /// Of postcopy: the same, and pages that the guest needs there are here alone. With `runs` the destination has said
    /// that it runs.
    Serving { runs: bool },
    /// It is known what became of the guest, or that nobody can tell.
    Ended(Verdict),
}

/// How a hand-over has ended for the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Verdict {
    /// The source never gave the guest up.
    Kept,
    /// The destination has the guest.
    Moved,
    /// The destination does not run the guest and never will, but the source had given it up, or may
    /// have: it stands still there, whole.
    Refused,
    /// The destination may run the guest. The source keeps it, paused.
    Doubt,
    /// Of postcopy: the destination runs the guest, and will not get the pages that it lacks.
    Torn,
}

/// A statement of the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Word {
    /// It has the guest.
    Runs,
    /// It does not run the guest, and never will.
    Never,
    /// Of postcopy: it has the guest, and all of its pages.
    HasAll,
}

impl Word {
    /// Of SHUT(`value`) after the commit. A refusal of a Hotlift comes with its reason (`is_explained`): one byte
    /// that changed on the way makes no word of the other. A QEMU has no reasons.
    pub(crate) fn of_shut(value: u32, is_explained: bool, is_hotlift: bool) -> Option<Self> {
        match value {
            0 if !is_explained => Some(Self::Runs),
            1.. if is_explained || !is_hotlift => Some(Self::Never),
            _ => None,
        }
    }
}

impl SourceSide {
    /// A relay is about to tell its QEMU that all is loaded. False if the migration has ended.
    pub(crate) fn offer(&mut self) -> bool {
        self.step(&[Self::Keeps], Self::Offered)
    }

    /// The QEMU of a relay has given the guest up.
    pub(crate) fn released(&mut self) -> bool {
        self.step(&[Self::Offered], Self::Released)
    }

    /// The QEMU of a relay has taken the guest back.
    pub(crate) fn taken_back(&mut self) -> bool {
        self.step(&[Self::Offered], Self::Ended(Verdict::Kept))
    }

    /// The point of no return: the caller is about to tell the destination to run the guest, and does so
    /// only if this is true.
    pub(crate) fn commit(&mut self) -> bool {
        self.step(&[Self::Keeps, Self::Released], Self::Committed)
    }

    /// The point of no return of a postcopy: the same, and the guest is to run before it has all pages.
    pub(crate) fn serve(&mut self) -> bool {
        self.step(&[Self::Keeps], Self::Serving { runs: false })
    }

    /// Of postcopy: the destination has all pages. Only then is nothing here needed any more.
    pub(crate) fn has_all(&mut self) -> bool {
        let serving = [true, false].map(|runs| Self::Serving { runs });
        self.step(&serving, Self::Ended(Verdict::Moved))
    }

    /// Something failed, a connection was lost, a cancel or a panic came. True if that ends the
    /// migration; after the commit it does not, and nothing may be done to the guest.
    pub(crate) fn fail(&mut self) -> bool {
        self.step(&[Self::Keeps], Self::Ended(Verdict::Kept))
            || self.step(
                &[Self::Offered, Self::Released],
                Self::Ended(Verdict::Refused),
            )
    }

    /// The destination has said what became of the guest. Before the commit it can know of nothing.
    pub(crate) fn hear(&mut self, word: Word) -> bool {
        match word {
            Word::Runs => {
                self.step(&[Self::Committed], Self::Ended(Verdict::Moved))
                    || self.step(
                        &[Self::Serving { runs: false }],
                        Self::Serving { runs: true },
                    )
            }
            Word::HasAll => self.has_all(),
            Word::Never => self.step(
                &[Self::Committed, Self::Serving { runs: false }],
                Self::Ended(Verdict::Refused),
            ),
        }
    }

    /// Nothing was heard for as long as is asked; or, of postcopy, nobody goes on with it.
    pub(crate) fn give_up(&mut self) -> bool {
        let unsure = [Self::Committed, Self::Serving { runs: false }];
        self.step(&unsure, Self::Ended(Verdict::Doubt))
            || self.step(&[Self::Serving { runs: true }], Self::Ended(Verdict::Torn))
    }

    /// Whether the source may have given the guest up: a cancel comes too late.
    pub(crate) fn is_offered(self) -> bool {
        !matches!(self, Self::Keeps | Self::Ended(Verdict::Kept))
    }

    /// Whether the destination may have been told to run the guest.
    pub(crate) fn is_committed(self) -> bool {
        matches!(
            self,
            Self::Committed
                | Self::Serving { .. }
                | Self::Ended(Verdict::Moved | Verdict::Doubt | Verdict::Torn)
        )
    }

    /// How it has ended, if it has.
    pub(crate) fn verdict(self) -> Option<Verdict> {
        match self {
            Self::Ended(verdict) => Some(verdict),
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
