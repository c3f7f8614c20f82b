//! Tests that a change of settings during a migration affects this migration.

use std::time::Duration;

use hotlift::options::{StreamOptions, SwitchoverOptions};
use hotlift::{Control, Options};

use crate::probe::Quirks;
use crate::rig::{self, settings};
use hotlift_testkit::alone;

/// Returns options without convergence: the guest dirties its MiB in each round, which never fits a downtime of 0 ms. At this
/// bandwidth the first round takes minutes.
fn endless() -> Options {
    Options {
        stream: StreamOptions {
            max_bandwidth: 32 << 10,
            ..StreamOptions::default()
        },
        switchover: SwitchoverOptions {
            downtime_limit: Duration::ZERO,
            ..SwitchoverOptions::default()
        },
        ..Options::default()
    }
}

fn completes_when(change: impl Fn(&mut Options, u64) + Sync, options: &Options) {
    let kind = rig::kinds()[0];
    let source = rig::source(kind, &settings(), Quirks::default());
    let destination = rig::destination(kind, &settings(), Quirks::default());
    let (listener, to) = rig::listen();
    let controls = [Control::new(), Control::new()];
    let ended = rig::run(
        &source,
        &destination,
        listener,
        &to,
        [options, options],
        &controls,
        &|progress| {
            let mut changed = options.clone();
            change(&mut changed, progress.round);
            controls[0].change(&changed);
        },
    );
    ended.arrived(&source, &destination, "it was changed");
}

#[test]
fn bandwidth_and_downtime_that_are_raised_let_an_endless_migration_complete() {
    alone!();
    for multifd in [true, false] {
        let options = Options {
            stream: StreamOptions {
                multifd: Some(multifd),
                ..endless().stream
            },
            ..endless()
        };
        completes_when(
            |options, round| {
                // Enough for the rounds, and only then for the switchover.
                options.stream.max_bandwidth = 32 << 20;
                if round > 2 {
                    options.switchover.downtime_limit = Duration::from_secs(10);
                }
            },
            &options,
        );
    }
}

#[test]
fn the_configured_available_bandwidth_decides_the_switchover() {
    alone!();
    let options = Options {
        stream: StreamOptions {
            max_bandwidth: 4 << 20,
            ..StreamOptions::default()
        },
        switchover: SwitchoverOptions {
            downtime_limit: Duration::from_millis(1),
            ..SwitchoverOptions::default()
        },
        ..Options::default()
    };
    completes_when(
        |options, round| {
            if round > 2 {
                options.switchover.avail_bandwidth = 1 << 40;
            }
        },
        &options,
    );
}

#[test]
fn only_live_parameters_change_during_a_migration() {
    alone!();
    let options = Options {
        stream: StreamOptions {
            multifd_channels: 2,
            ..endless().stream
        },
        ..endless()
    };
    completes_when(
        |options, _| {
            options.stream.multifd_channels = 7;
            options.switchover.pause_before = true;
            options.stream.max_bandwidth = 0;
            options.switchover.downtime_limit = Duration::from_secs(10);
        },
        &options,
    );
}
