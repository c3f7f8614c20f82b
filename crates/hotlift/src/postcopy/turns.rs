//! Who writes next: an answer that somebody waits for comes before the background.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, PoisonError};

use crate::lock::lock;

/// Something that one thread at a time has.
pub(crate) struct Turns<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T> {
    /// It, while nobody has it.
    free: Option<T>,
    /// How many urgent ones wait.
    urgent: usize,
}

/// A turn; it is over when this is dropped.
pub(crate) struct Turn<'a, T> {
    turns: &'a Turns<T>,
    held: Option<T>,
}

impl<T> Turns<T> {
    pub(crate) fn new(it: T) -> Self {
        Self {
            state: Mutex::new(State {
                free: Some(it),
                urgent: 0,
            }),
            changed: Condvar::new(),
        }
    }

    /// The next turn.
    pub(crate) fn take(&self) -> Turn<'_, T> {
        let state = lock(&self.state);
        self.wait(state, |_| false)
    }

    /// A turn, if it can begin now.
    pub(crate) fn try_take(&self) -> Option<Turn<'_, T>> {
        let mut state = lock(&self.state);
        if state.urgent > 0 {
            return None;
        }
        let held = state.free.take()?;
        Some(Turn {
            turns: self,
            held: Some(held),
        })
    }

    /// The next turn that nobody urgent waits for.
    pub(crate) fn take_after_urgent(&self) -> Turn<'_, T> {
        let state = lock(&self.state);
        self.wait(state, |state| state.urgent > 0)
    }

    /// The next turn, before all others.
    pub(crate) fn take_urgently(&self) -> Turn<'_, T> {
        let mut state = lock(&self.state);
        state.urgent += 1;
        let turn = self.wait(state, |_| false);
        lock(&self.state).urgent -= 1;
        turn
    }

    fn wait<'a>(
        &'a self,
        state: std::sync::MutexGuard<'a, State<T>>,
        lets_others: impl Fn(&State<T>) -> bool,
    ) -> Turn<'a, T> {
        let waits = |state: &mut State<T>| state.free.is_none() || lets_others(state);
        let mut state = self
            .changed
            .wait_while(state, waits)
            .unwrap_or_else(PoisonError::into_inner);
        Turn {
            turns: self,
            held: state.free.take(),
        }
    }
}

impl<T> Deref for Turn<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.held {
            Some(held) => held,
            None => unreachable!("it is given back at the end"),
        }
    }
}

impl<T> DerefMut for Turn<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match &mut self.held {
            Some(held) => held,
            None => unreachable!("it is given back at the end"),
        }
    }
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        lock(&self.turns.state).free = self.held.take();
        self.turns.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    #[test]
    fn who_is_urgent_comes_before_those_that_waited_longer() {
        let turns = Turns::new(Vec::new());
        let (started, starts) = mpsc::channel();
        thread::scope(|scope| {
            let mut first = turns.take();
            first.push("first");
            for _ in 0..3 {
                let (turns, started) = (&turns, started.clone());
                scope.spawn(move || {
                    started.send(()).unwrap();
                    turns.take_after_urgent().push("background");
                });
            }
            (0..3).for_each(|_| starts.recv().unwrap());
            scope.spawn(|| turns.take_urgently().push("urgent"));
            while lock(&turns.state).urgent == 0 {
                thread::yield_now();
            }
            assert!(turns.try_take().is_none());
            drop(first);
        });
        assert_eq!(turns.try_take().unwrap()[..2], ["first", "urgent"]);
        assert_eq!(turns.take().len(), 5);
    }
}
