//! Connection on which pages of a postcopy leave, for a guest, a file and a relay.

use crate::error::MigrationError;
use crate::postcopy::priority_lock::{PriorityLock, PriorityLockGuard};
use crate::stream::main_send::{MainSend, PageRecords};
use crate::stream::preempt::PreemptOut;

/// Connection that takes pages.
pub(crate) enum OutputPath<'w> {
    /// Main, locked.
    Main(PriorityLockGuard<'w, MainSend>),
    /// Connection for requested pages.
    Alone(&'w PreemptOut),
}

impl<'w> OutputPath<'w> {
    /// Returns the path of a requested page: the connection for such pages, or main before all other writers.
    pub(crate) fn urgent(main: &'w PriorityLock<MainSend>, alone: Option<&'w PreemptOut>) -> Self {
        alone.map_or_else(|| Self::Main(main.take_urgently()), Self::Alone)
    }

    /// Sends pages of RAM block `name` contiguously, without the bandwidth limit.
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
