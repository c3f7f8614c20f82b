//! Tests when the guest is stopped for the switchover.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hotlift::options::{StreamOptions, SwitchoverOptions};
use hotlift::{Control, Options};
use hotlift_testkit::proxy::units::{Action, Fault, Unit, Units};
use hotlift_testkit::proxy::{Proxy, Socket};

use crate::probe::Quirks;
use crate::rig::{self, settings};
use hotlift_testkit::alone;

/// Reports while the destination's answer is held; a source that does not wait for it makes none.
const REPORTS: u32 = 3;

#[test]
fn the_guest_is_not_paused_before_the_destination_received_all_sent_pages() {
    alone!();
    for multifd in [true, false] {
        let options = Options {
            stream: StreamOptions {
                multifd: Some(multifd),
                ..StreamOptions::default()
            },
            switchover: SwitchoverOptions {
                // The rest fits after the first round.
                downtime_limit: Duration::from_secs(1000),
                ..SwitchoverOptions::default()
            },
            ..Options::default()
        };
        let kind = rig::kinds()[0];
        let source = rig::source(kind, &settings(), Quirks::default());
        let destination = rig::destination(kind, &settings(), Quirks::default());
        let (listener, to) = rig::listen();
        // The first two answer the opening and the RAM blocks.
        let answer = Fault {
            unit: Unit {
                socket: Some(Socket::Main),
                back: true,
                name: "PONG #3".to_owned(),
            },
            action: Action::Hold,
        };
        let (proxy, to) = Proxy::loopback(&to, Units::new(Some(answer))).unwrap();
        let (reports, stopped) = (AtomicU32::new(0), AtomicU32::new(0));
        let ended = rig::run(
            &source,
            &destination,
            listener,
            &to,
            [&options, &options],
            &[Control::new(), Control::new()],
            &|_| {
                if !proxy.is_held() {
                    return;
                }
                let report = reports.fetch_add(1, Ordering::SeqCst);
                if report <= REPORTS && !source.runs() {
                    stopped.fetch_add(1, Ordering::SeqCst);
                }
                if report == REPORTS {
                    proxy.release();
                }
            },
        );
        ended.arrived(&source, &destination, "with an answer that came late");
        assert!(reports.into_inner() > REPORTS, "it did not wait");
        assert_eq!(stopped.into_inner(), 0, "it was paused too early");
        let _ = proxy.finish();
    }
}
