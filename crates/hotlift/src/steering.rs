//! Settings that may change while a migration runs: its rates, its cores, and the goal of method auto.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::auto::Auto;
use crate::cpu_limit::CpuBudget;
use crate::lock::lock;
use crate::options::{Options, PostcopyOptions, StreamOptions};
use crate::pacing::{Pacer, Phase, SharedRate};

/// Parts of one side of a migration that follow [`Steering::change`].
#[derive(Default)]
pub(crate) struct Steering {
    /// State of the guest, for pacing.
    phase: Phase,
    live: Mutex<Live>,
}

#[derive(Default)]
struct Live {
    /// The latest options of [`Steering::change`].
    changed: Option<Options>,
    /// Rate that this migration shares with others.
    shared: Option<SharedRate>,
    /// Paces this migration.
    pacer: Option<Arc<Pacer>>,
    /// Paces the background pages of a postcopy.
    postcopy_pacer: Option<Arc<Pacer>>,
    /// Limits its CPU time.
    cpu: Option<Arc<CpuBudget>>,
    /// Chooses the method of its packets.
    auto: Option<Arc<Auto>>,
}

impl Live {
    /// Returns the changed options of the stream; `options` if there was no change.
    fn stream<'a>(&'a self, options: &'a StreamOptions) -> &'a StreamOptions {
        let changed = self.changed.as_ref();
        changed.map_or(options, |changed| &changed.stream)
    }
}

impl Steering {
    /// Applies the options that may change while a migration runs (`live` in the table of options). Ignores the others.
    pub(crate) fn change(&self, options: &Options) {
        let mut live = lock(&self.live);
        live.changed = Some(options.clone());
        if let Some(pacer) = &live.pacer {
            pacer.set_rate(options.stream.max_bandwidth);
        }
        if let Some(pacer) = &live.postcopy_pacer {
            pacer.set_rate(options.postcopy.max_bandwidth);
        }
        if let Some(cpu) = &live.cpu {
            cpu.set_limit(options.stream.cpu_limit.into());
        }
        if let Some(auto) = &live.auto {
            auto.set_goal(options.stream.goal);
        }
    }

    /// Makes the pacers created from here on keep `rate`, too.
    pub(crate) fn share_rate(&self, rate: &SharedRate) {
        lock(&self.live).shared = Some(rate.clone());
    }

    /// Returns the state of the guest, which all pacers of this migration read.
    pub(crate) fn phase(&self) -> &Phase {
        &self.phase
    }

    /// Returns `options` with the changes of [`Steering::change`].
    pub(crate) fn latest(&self, options: &Options) -> Options {
        let mut latest = options.clone();
        if let Some(changed) = &lock(&self.live).changed {
            latest.take_live(changed);
        }
        latest
    }

    /// Creates the pacer of all channels of the migration.
    pub(crate) fn pacer(&self, options: &StreamOptions) -> Arc<Pacer> {
        let mut live = lock(&self.live);
        let rate = live.stream(options).max_bandwidth;
        let shared = live.shared.clone();
        let pacer = Pacer::new(rate).under(shared).in_phase(&self.phase);
        let pacer = Arc::new(pacer);
        live.pacer = Some(Arc::clone(&pacer));
        pacer
    }

    /// Creates the pacer of the background pages of a postcopy.
    pub(crate) fn postcopy_pacer(&self, options: &PostcopyOptions) -> Arc<Pacer> {
        let mut live = lock(&self.live);
        let changed = live.changed.as_ref();
        let latest = changed.map_or(options, |changed| &changed.postcopy);
        let pacer = Pacer::new(latest.max_bandwidth).in_phase(&self.phase);
        let pacer = Arc::new(pacer);
        live.postcopy_pacer = Some(Arc::clone(&pacer));
        pacer
    }

    /// Returns the budget of CPU time of this side's channel threads.
    pub(crate) fn cpu_budget(&self, options: &StreamOptions) -> Arc<CpuBudget> {
        let mut live = lock(&self.live);
        let limit = live.stream(options).cpu_limit;
        let budget = live
            .cpu
            .get_or_insert_with(|| Arc::new(CpuBudget::new(limit.into())));
        Arc::clone(budget)
    }

    /// Returns the CPU time that each channel thread of this side has used.
    pub(crate) fn cpu_used(&self) -> Vec<(String, Duration)> {
        let live = lock(&self.live);
        live.cpu.as_ref().map(|cpu| cpu.used()).unwrap_or_default()
    }

    /// Creates the state that chooses each packet's method; `None` if the options do not request it.
    pub(crate) fn make_auto(&self, options: &StreamOptions) -> Option<Arc<Auto>> {
        let mut live = lock(&self.live);
        let goal = live.stream(options).goal;
        live.auto = Auto::of(options, goal).map(Arc::new);
        live.auto.clone()
    }

    /// Returns the latest result of [`Steering::make_auto`].
    pub(crate) fn auto(&self) -> Option<Arc<Auto>> {
        lock(&self.live).auto.clone()
    }
}
