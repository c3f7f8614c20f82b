//! Tests the events of a migration for a monitor, which have the order of QEMU 10.0.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use hotlift::figures::SourceReport;
use hotlift::options::{AnnounceOptions, StreamOptions, SwitchoverOptions};
use hotlift::progress::Progress;
use hotlift::{Control, MigrationEvent, Options, Status};

use MigrationEvent::{Pass, Resumed, Status as State, Stopped};
use Status::{Active, Cancelled, Cancelling, Completed, Device, Failed, PreSwitchover, Setup};

use crate::probe::{Obeys, Probe, Quirks, three_rounds};
use crate::rig::{self, Ended, settings};
use hotlift_testkit::alone;

/// All events of one side.
#[derive(Clone, Default)]
pub struct ReceivedEvents(Arc<Mutex<Vec<MigrationEvent>>>);

impl ReceivedEvents {
    pub fn control(&self) -> Control {
        let received = self.clone();
        Control::watched(Box::new(move |event| {
            received.0.lock().unwrap().push(event)
        }))
    }

    pub fn read(&self) -> Vec<MigrationEvent> {
        self.0.lock().unwrap().clone()
    }
}

/// Runs one migration with three rounds; returns the events of each side.
fn run_with_events(
    source: &Probe,
    destination: &Probe,
    options: &Options,
    on_progress: &(dyn Fn(&[Control; 2], &Progress) + Sync),
) -> (Ended, [Vec<MigrationEvent>; 2]) {
    let (listener, to) = rig::listen();
    let received = [ReceivedEvents::default(), ReceivedEvents::default()];
    let controls = received.each_ref().map(ReceivedEvents::control);
    let ended = rig::run(
        source,
        destination,
        listener,
        &to,
        [options, options],
        &controls,
        &|progress| on_progress(&controls, progress),
    );
    (ended, received.map(|received| received.read()))
}

fn options(multifd: bool) -> Options {
    Options {
        stream: StreamOptions {
            multifd: Some(multifd),
            max_bandwidth: 0,
            ..StreamOptions::default()
        },
        switchover: SwitchoverOptions {
            downtime_limit: std::time::Duration::ZERO,
            ..SwitchoverOptions::default()
        },
        ..Options::default()
    }
}

fn guest() -> Probe {
    let quirks = Quirks {
        sync: Some(three_rounds()),
        ..Quirks::default()
    };
    rig::source(rig::kinds()[0], &settings(), quirks)
}

fn room(quirks: Quirks) -> Probe {
    rig::destination(rig::kinds()[0], &settings(), quirks)
}

/// A source's events up to the last sync, all of [`three_rounds`].
const TO_THE_LAST_ROUND: [MigrationEvent; 8] = [
    State(Setup),
    Pass(1),
    State(Active),
    Pass(2),
    Pass(3),
    Stopped,
    State(Device),
    Pass(4),
];

fn and_then(more: &[MigrationEvent]) -> Vec<MigrationEvent> {
    [&TO_THE_LAST_ROUND, more].concat()
}

fn consistent(report: &SourceReport, multifd: bool) {
    let bytes = report.bytes;
    assert_eq!(
        bytes.multifd + bytes.precopy + bytes.downtime,
        report.transferred_bytes
    );
    assert_eq!(bytes.multifd > 0, multifd, "{report:?}");
    assert!(bytes.precopy > 0 && bytes.downtime > 0, "{report:?}");
    assert_eq!(report.dirty_syncs, report.rounds + 1);
}

#[test]
fn a_migration_reports_the_same_events_as_qemu() {
    alone!();
    for multifd in [true, false] {
        let (source, destination) = (guest(), room(Quirks::default()));
        let (ended, [here, there]) =
            run_with_events(&source, &destination, &options(multifd), &|_, progress| {
                assert_eq!(progress.transferred_bytes, progress.bytes.sum());
            });
        assert_eq!(here, and_then(&[State(Completed)]));
        assert_eq!(
            there,
            [State(Setup), State(Active), Resumed, State(Completed)]
        );
        consistent(&ended.source.unwrap(), multifd);
    }
}

#[test]
fn the_event_of_a_resumed_guest_follows_that_of_the_failure() {
    alone!();
    for multifd in [true, false] {
        let fails_to_load = Quirks {
            load: Obeys::No,
            ..Quirks::default()
        };
        let (source, destination) = (guest(), room(fails_to_load));
        let (ended, [here, there]) =
            run_with_events(&source, &destination, &options(multifd), &|_, _| {});
        assert!(ended.source.is_err() && source.runs());
        assert_eq!(here, and_then(&[State(Failed), Resumed]));
        assert_eq!(there, [State(Setup), State(Active), State(Failed)]);
    }
}

#[test]
fn a_cancel_is_reported_before_and_after_it_takes_effect() {
    alone!();
    let slow = Options {
        stream: StreamOptions {
            max_bandwidth: 256 << 10,
            ..options(true).stream
        },
        ..options(true)
    };
    let (source, destination) = (guest(), room(Quirks::default()));
    let (_, [here, there]) =
        run_with_events(&source, &destination, &slow, &|controls, progress| {
            // A long setup is also reported.
            if progress.status == Setup {
                return;
            }
            assert_eq!(progress.dirty_syncs, 1);
            assert!(progress.setup.is_some_and(|setup| setup < progress.elapsed));
            controls[0].cancel();
            assert_eq!(controls[0].status(), Cancelling);
        });
    assert_eq!(
        here,
        [
            State(Setup),
            Pass(1),
            State(Active),
            State(Cancelling),
            State(Cancelled)
        ]
    );
    assert_eq!(there, [State(Setup), State(Active), State(Failed)]);

    // Before the start there are no other events.
    let received = ReceivedEvents::default();
    let control = received.control();
    control.cancel();
    let (listener, to) = rig::listen();
    let error = hotlift::migrate(&source, &to, &options(true), &control, &|_| {});
    assert!(error.is_err() && source.runs());
    drop(listener);
    assert_eq!(
        received.read(),
        [State(Setup), State(Cancelling), State(Cancelled)]
    );
}

#[test]
fn with_pause_before_switchover_the_guest_is_paused_until_continued() {
    alone!();
    let paused = Options {
        switchover: SwitchoverOptions {
            pause_before: true,
            ..options(true).switchover
        },
        ..options(true)
    };
    // Watchers receive it before `proceed` can have any effect.
    let to_the_pause = [&TO_THE_LAST_ROUND[..6], &[State(PreSwitchover)]].concat();
    let after = |more: &[MigrationEvent]| [&to_the_pause[..], more].concat();

    let (source, destination) = (guest(), room(Quirks::default()));
    let (ended, [here, _]) =
        run_with_events(&source, &destination, &paused, &|controls, progress| {
            controls[0].proceed();
            if progress.status == PreSwitchover {
                assert!(!source.runs() && !destination.runs());
            }
        });
    assert!(ended.source.is_ok() && destination.runs());
    assert_eq!(
        here,
        after(&[State(Device), Pass(4), State(Completed)]),
        "{:?}",
        ended.errors()
    );

    // Cancelled there, or left by the destination: the guest runs again.
    for (who, expected) in [
        (0, [State(Cancelling), Resumed, State(Cancelled)].as_slice()),
        (1, &[State(Failed), Resumed]),
    ] {
        let (source, destination) = (guest(), room(Quirks::default()));
        let (ended, [here, _]) =
            run_with_events(&source, &destination, &paused, &|controls, progress| {
                if progress.status == PreSwitchover {
                    controls[who].cancel();
                }
            });
        assert_eq!(
            ended.holder(&source, &destination),
            Ok(rig::Holder::Source),
            "{:?}",
            ended.errors()
        );
        assert_eq!(here, after(expected));
    }
}

#[test]
fn a_guest_is_announced_at_its_new_host_without_delaying_the_result() {
    alone!();
    let announced = |rounds, initial, destination_fails| {
        let (sender, announcements) = channel();
        let quirks = Quirks {
            announced: Some(sender),
            resume: if destination_fails {
                Obeys::No
            } else {
                Obeys::Yes
            },
            ..Quirks::default()
        };
        let options = Options {
            announce: AnnounceOptions {
                rounds,
                initial,
                step: 1,
                max: initial,
            },
            ..options(true)
        };
        let (source, destination) = (guest(), room(quirks));
        let (ended, _) = run_with_events(&source, &destination, &options, &|_, _| {});
        assert_eq!(ended.destination.is_err(), destination_fails);
        drop(destination);
        announcements
    };
    // The sender ends with the last announcement.
    assert_eq!(announced(3, 1, false).iter().count(), 3);
    assert_eq!(announced(0, 1, false).iter().count(), 0);
    assert_eq!(announced(3, 1, true).iter().count(), 0);
    // The second is due after the end of this process.
    assert!(announced(2, 100_000, false).recv().is_ok());
}
