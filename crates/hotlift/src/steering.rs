//! Settings that can change during a migration: rate limits, CPU limit, and the goal of method auto.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::auto::Auto;
use crate::cpu_limit::CpuBudget;
use crate::lock::lock;
use crate::options::{Options, PostcopyOptions, StreamOptions};
use crate::pacing::{Pacer, Phase, SharedRate};

/// The settings of one migration in this process that [`Steering::change`] can change.
#[derive(Default)]
pub(crate) struct Steering {
    /// Selects the rates that limit the migration, by the state of its guest.
    phase: Phase,
    live: Mutex<Live>,
}

#[derive(Default)]
struct Live {
    /// Options of the latest call of [`Steering::change`]; `None` before the first call.
    changed: Option<Options>,
    /// Rate limit that this migration shares with other migrations.
    shared: Option<SharedRate>,
    /// Rate limiter of the migration's channels.
    pacer: Option<Arc<Pacer>>,
    /// Rate limiter of the background pages of a postcopy.
    postcopy_pacer: Option<Arc<Pacer>>,
    /// CPU limit of the channel threads.
    cpu: Option<Arc<CpuBudget>>,
    /// State of method auto.
    auto: Option<Arc<Auto>>,
}

impl Live {
    /// Returns the latest changed stream options; `options` if nothing was changed.
    fn stream<'a>(&'a self, options: &'a StreamOptions) -> &'a StreamOptions {
        let changed = self.changed.as_ref();
        changed.map_or(options, |changed| &changed.stream)
    }
}

impl Steering {
    /// Applies those of `options` that can change during a migration (`live` in the table of options). Ignores all other
    /// options.
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

    /// Adds the shared rate limit `rate` to all pacers that are created afterwards.
    pub(crate) fn share_rate(&self, rate: &SharedRate) {
        lock(&self.live).shared = Some(rate.clone());
    }

    /// Returns the phase, which selects the rates for all pacers of this migration.
    pub(crate) fn phase(&self) -> &Phase {
        &self.phase
    }

    /// Returns a copy of `options` with the changes of [`Steering::change`].
    pub(crate) fn latest(&self, options: &Options) -> Options {
        let mut latest = options.clone();
        if let Some(changed) = &lock(&self.live).changed {
            latest.copy_live(changed);
        }
        latest
    }

    /// Creates the pacer (rate limiter) of all channels of the migration.
    pub(crate) fn pacer(&self, options: &StreamOptions) -> Arc<Pacer> {
        let mut live = lock(&self.live);
        let rate = live.stream(options).max_bandwidth;
        let shared = live.shared.clone();
        let pacer = Pacer::new(rate).under(shared).in_phase(&self.phase);
        let pacer = Arc::new(pacer);
        live.pacer = Some(Arc::clone(&pacer));
        pacer
    }

    /// Creates the pacer (rate limiter) of the background pages of a postcopy.
    pub(crate) fn postcopy_pacer(&self, options: &PostcopyOptions) -> Arc<Pacer> {
        let mut live = lock(&self.live);
        let changed = live.changed.as_ref();
        let latest = changed.map_or(options, |changed| &changed.postcopy);
        let pacer = Pacer::new(latest.max_bandwidth).in_phase(&self.phase);
        let pacer = Arc::new(pacer);
        live.postcopy_pacer = Some(Arc::clone(&pacer));
        pacer
    }

    /// Returns the CPU limit of this process's channel threads. The first call creates it.
    pub(crate) fn cpu_budget(&self, options: &StreamOptions) -> Arc<CpuBudget> {
        let mut live = lock(&self.live);
        let limit = live.stream(options).cpu_limit;
        let budget = live
            .cpu
            .get_or_insert_with(|| Arc::new(CpuBudget::new(limit.into())));
        Arc::clone(budget)
    }

    /// Returns the CPU time used so far, by name of channel thread.
    pub(crate) fn cpu_used(&self) -> Vec<(String, Duration)> {
        let live = lock(&self.live);
        live.cpu.as_ref().map(|cpu| cpu.used()).unwrap_or_default()
    }

    /// Creates the state of method auto. Returns `None` if the options select another method.
    pub(crate) fn make_auto(&self, options: &StreamOptions) -> Option<Arc<Auto>> {
        let mut live = lock(&self.live);
        let goal = live.stream(options).goal;
        live.auto = Auto::of(options, goal).map(Arc::new);
        live.auto.clone()
    }

    /// Returns the state of method auto; `None` if [`Steering::make_auto`] was not called or returned `None`.
    pub(crate) fn auto(&self) -> Option<Arc<Auto>> {
        lock(&self.live).auto.clone()
    }
}
