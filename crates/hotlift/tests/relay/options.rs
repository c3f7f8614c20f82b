//! Tests the options of a relay that can change while the relay runs.

use std::thread;
use std::time::Duration;

use hotlift::Options;
use hotlift::options::StreamOptions;

use crate::log::Log;
use crate::recording::Recording;
use crate::rig::{Relay, destination, settings};
use crate::source::{Ending, play};

/// Longer than a relay without a rate limit takes.
const PAUSE: Duration = Duration::from_millis(200);

#[test]
fn a_raised_bandwidth_reaches_a_running_relay() {
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
            let early = relay.has_ended(PAUSE);
            assert!(early.is_none(), "it waits for its first bytes: {early:?}");
            control.change(&Options {
                stream: StreamOptions {
                    max_bandwidth: 0,
                    ..slow.outgoing.clone()
                },
                ..Options::default()
            });
            let outcome = relay.outcome("raised");
            assert!(outcome.is_ok(), "{outcome:?}");
            playing.join().unwrap();
            assert!(arriving.join().unwrap().eof);
        });
    }
}
