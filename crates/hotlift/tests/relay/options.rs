//! Options of a relay: those that may differ from the source's, and those that a relay cannot apply.

use std::thread;
use std::time::Duration;

use hotlift::Options;
use hotlift::relay::check;

use crate::log::Log;
use crate::recording::Recording;
use crate::rig::{Relay, destination, settings};
use crate::source::{Ending, play};

/// Longer than a relay without a rate limit takes.
const A_WHILE: Duration = Duration::from_millis(200);

#[test]
fn bandwidth_that_is_raised_reaches_a_relay_at_work() {
    let recording = Recording::small();
    // On main, and in packets. At this rate the stream takes days.
    for options in [
        &[("multifd", "off"), ("max-bandwidth", "1")][..],
        &[("multifd-channels", "2"), ("max-bandwidth", "1")],
    ] {
        let slow = settings(options);
        let log = Log::default();
        let channels = slow.outgoing.channels();
        let (_folder, destination) = destination(&recording, channels, None, &log);
        let relay = Relay::start(&destination.address, &slow, false);
        let control = relay.control.clone();
        let to = relay.address.clone();
        thread::scope(|scope| {
            let arriving = scope.spawn(|| destination.run());
            let playing = scope.spawn(|| play(&recording, &to, Ending::LetsGo, &log));
            let early = relay.has_ended(A_WHILE);
            assert!(early.is_none(), "it waits for its first bytes: {early:?}");
            control.change(&Options {
                max_bandwidth: 0,
                ..slow.outgoing.clone()
            });
            let outcome = relay.outcome("raised");
            assert!(outcome.is_ok(), "{outcome:?}");
            playing.join().unwrap();
            assert!(arriving.join().unwrap().eof);
        });
    }
}

#[test]
fn what_is_its_qemus_to_do_is_refused_by_name() {
    check(&settings(&[("multifd-channels", "4")]).outgoing).unwrap();
    // Options that only affect a relay's monitor and answers, or the source's QEMU, or that have no effect.
    for (name, value) in [
        ("events", "on"),
        ("return-path", "on"),
        ("downtime-limit", "20"),
        ("accel-path", "dsa:/dev/dsa/wq0.0"),
        ("zero-copy-send", "on"),
    ] {
        check(&settings(&[(name, value)]).outgoing).unwrap();
    }
    for (name, value, says) in [
        ("xbzrle", "on", "a relay keeps no earlier pages"),
        ("xbzrle-cache-size", "1048576", "a relay has no xbzrle"),
        ("auto-converge", "on", "source's QEMU"),
        ("throttle-trigger-threshold", "51", "source's QEMU"),
        ("cpu-throttle-initial", "21", "source's QEMU"),
        ("cpu-throttle-increment", "11", "source's QEMU"),
        ("cpu-throttle-tailslow", "on", "source's QEMU"),
        ("max-cpu-throttle", "98", "source's QEMU"),
        ("pause-before-switchover", "on", "source's QEMU"),
        ("postcopy-ram", "on", "QEMUs must agree on it"),
        ("avail-switchover-bandwidth", "1073741824", "source's QEMU"),
        ("announce-rounds", "7", "destination's QEMU"),
        ("announce-initial", "51", "destination's QEMU"),
        ("announce-step", "1", "destination's QEMU"),
        ("announce-max", "0", "destination's QEMU"),
        ("multifd-packet-size", "262144", "QEMU's packets"),
        ("multifd-normal-page-ratio", "1", "does not change the kind"),
        ("compress-wait-thread", "off", "always waits"),
        ("decompress-threads", "3", "as it reads"),
        ("mem-prealloc", "on", "destination's QEMU"),
    ] {
        let error = check(&settings(&[(name, value)]).outgoing).unwrap_err();
        let words = error.to_string();
        assert!(
            words.starts_with(&format!("{name}=")) && words.contains(says),
            "{words}"
        );
    }
    let devices = [
        ("accel-path", "dsa:/dev/dsa/wq0.0"),
        ("zero-page-detection", "dsa-accel"),
    ];
    let error = check(&settings(&devices).outgoing).unwrap_err();
    assert!(
        error.to_string().contains("detects zero pages itself"),
        "{error}"
    );
}
