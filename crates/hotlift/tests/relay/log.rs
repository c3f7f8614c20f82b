//! Records the events on both sides of a migration, in one order.

use std::sync::{Arc, Mutex, PoisonError};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The source has made all its connections.
    SourceConnected,
    /// The source has received SHUT with this value.
    SourceToldShut(u32),
    /// The source closes its connections.
    SourceCloses,
    /// The destination has read EOF, at which QEMU runs the guest.
    DestinationReadsEof,
    /// A source that keeps its connections may close them.
    SourceMayClose,
    /// All relays have ended: no further connection comes.
    RelaysEnded,
    /// The destination's connection ended before EOF.
    DestinationEndsWithoutEof,
}

#[derive(Debug, Clone, Default)]
pub struct Log(Arc<Mutex<Vec<Event>>>);

impl Log {
    pub fn note(&self, event: Event) {
        let mut events = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        events.push(event);
    }

    pub fn events(&self) -> Vec<Event> {
        let events = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        events.clone()
    }

    pub fn has(&self, event: Event) -> bool {
        self.events().contains(&event)
    }
}
