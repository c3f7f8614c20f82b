//! Connection on which postcopy pages are sent. Used for a guest, a save file and a relay.

use crate::error::MigrationError;
use crate::postcopy::priority_lock::{PriorityLock, PriorityLockGuard};
use crate::stream::main_send::{MainSend, PageRecords};
use crate::stream::preempt::PreemptOut;

/// Connection on which pages are sent.
pub(crate) enum OutputPath<'w> {
    /// The main channel. The guard has its lock.
    Main(PriorityLockGuard<'w, MainSend>),
    /// The separate connection for requested pages.
    Alone(&'w PreemptOut),
}

impl<'w> OutputPath<'w> {
    /// Returns the connection for a requested page: the separate connection if there is one, otherwise main with priority over
    /// other writers.
    pub(crate) fn urgent(main: &'w PriorityLock<MainSend>, alone: Option<&'w PreemptOut>) -> Self {
        alone.map_or_else(|| Self::Main(main.take_urgently()), Self::Alone)
    }

    /// Sends pages of RAM block `name` one after another, without the bandwidth limit.
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
