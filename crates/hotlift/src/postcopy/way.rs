//! Where pages of a postcopy go out, from a guest, a file or a relay.

use crate::error::MigrationError;
use crate::postcopy::turns::{Turn, Turns};
use crate::stream::main_send::{MainSend, PageRecords};
use crate::stream::preempt::PreemptOut;

/// A connection that takes pages.
pub(crate) enum Way<'w> {
    /// Main, in a turn of its own.
    Main(Turn<'w, MainSend>),
    /// The connection of pages that the guest waits for.
    Alone(&'w PreemptOut),
}

impl<'w> Way<'w> {
    /// Takes the way of a page that the guest waits for: the connection of such pages, or main before all others.
    pub(crate) fn urgent(main: &'w Turns<MainSend>, alone: Option<&'w PreemptOut>) -> Self {
        alone.map_or_else(|| Self::Main(main.take_urgently()), Self::Alone)
    }

    /// Sends pages of the RAM block called `name`, with no other between them, whatever the limit on bandwidth.
    pub(crate) fn send(
        &mut self,
        name: &str,
        pages: PageRecords<'_>,
    ) -> Result<(), MigrationError> {
        match self {
            Self::Main(main) => main.pages_at_once(pages),
            Self::Alone(channel) => channel.pages(name, &pages),
        }
    }
}
