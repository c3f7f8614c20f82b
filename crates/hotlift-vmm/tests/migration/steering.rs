//! Changes during a migration take effect in it.

use std::time::Duration;

use hotlift::{Control, Options};

use crate::probe::Quirks;
use crate::rig::{self, settings};
use hotlift_testkit::alone;

/// Returns options without convergence: the guest dirties its MiB in each round, which never fits a downtime of 0 ms. At this
/// bandwidth the first round takes minutes.
fn endless() -> Options {
    Options {
        max_bandwidth: 32 << 10,
        downtime_limit: Duration::ZERO,
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
            multifd: Some(multifd),
            ..endless()
        };
        completes_when(
            |options, round| {
                // Enough for the rounds, and only then for the switchover.
                options.max_bandwidth = 32 << 20;
                if round > 2 {
                    options.downtime_limit = Duration::from_secs(10);
                }
            },
            &options,
        );
    }
}

#[test]
fn the_bandwidth_that_is_said_to_be_there_decides_about_the_switchover() {
    alone!();
    let options = Options {
        max_bandwidth: 4 << 20,
        downtime_limit: Duration::from_millis(1),
        ..Options::default()
    };
    completes_when(
        |options, round| {
            if round > 2 {
                options.avail_switchover_bandwidth = 1 << 40;
            }
        },
        &options,
    );
}

#[test]
fn only_what_may_change_does() {
    alone!();
    let options = Options {
        multifd_channels: 2,
        ..endless()
    };
    completes_when(
        |options, _| {
            options.multifd_channels = 7;
            options.pause_before_switchover = true;
            options.max_bandwidth = 0;
            options.downtime_limit = Duration::from_secs(10);
        },
        &options,
    );
}
