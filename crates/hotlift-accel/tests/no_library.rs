//! Tests that all work runs on the CPU if the vendors' libraries are missing. The report gives the reason.

#[path = "support/simulated.rs"]
mod simulated;
#[path = "../../hotlift-methods/tests/support/packets.rs"]
mod support;

use hotlift_accel::HARDWARE;
use hotlift_methods::{Accelerator, EncoderSettings, METHODS, MethodError, RunsOn, method};
use support::{Layout, Place, contents};

fn without_libraries() {
    for variable in simulated::VARIABLES {
        // SAFETY: tests of this file set the same, and their harness reads no variable by C while tests run.
        unsafe { std::env::set_var(variable, "/nonexistent/library.so") };
    }
}

fn settings(accelerator: Accelerator, to_hotlift: bool) -> EncoderSettings {
    EncoderSettings {
        accelerator,
        to_hotlift,
        ..EncoderSettings::software(1)
    }
}

#[test]
fn what_is_wanted_runs_on_the_cpu_with_the_loaders_reason() {
    without_libraries();
    for method in METHODS.iter().filter(|method| method.hardware.is_some()) {
        let mut encoder =
            (method.encoder)(&settings(Accelerator::Auto(&HARDWARE), true)).expect(method.name);
        let mut decoder = (method.decoder)(Accelerator::Auto(&HARDWARE)).expect(method.name);
        for runs_on in [encoder.runs_on(), decoder.runs_on()] {
            assert!(
                matches!(&runs_on, RunsOn::Fallback(reason) if reason.contains("/nonexistent/")),
                "{}: {runs_on:?}",
                method.name
            );
        }
        let pages = contents("alternating", 9, 1);
        let mut payload = Vec::new();
        encoder.encode(&pages, &mut payload).expect(method.name);
        let place = Place::new(9, Layout::Scattered);
        decoder.decode(&payload, &place.runs()).expect(method.name);
        assert!(place.pages() == pages, "{}", method.name);
        for jobs in [encoder.jobs(), decoder.jobs()] {
            assert!(jobs.software > 0 && jobs.hardware == 0, "{jobs:?}");
        }
    }
}

#[test]
fn what_is_required_is_an_error_with_the_loaders_reason() {
    without_libraries();
    for method in METHODS.iter().filter(|method| method.hardware.is_some()) {
        for error in [
            (method.encoder)(&settings(Accelerator::Required(&HARDWARE), true)).err(),
            (method.decoder)(Accelerator::Required(&HARDWARE)).err(),
        ] {
            let Some(MethodError::Unavailable { reason, .. }) = &error else {
                panic!("{}: {error:?}", method.name);
            };
            assert!(reason.contains("/nonexistent/"), "{reason}");
        }
    }
}

#[test]
fn uadk_sends_qemu_pages_as_they_are() {
    without_libraries();
    let uadk = method("uadk").expect("uadk");
    let pages = contents("text", 3, 1);
    let mut payload = Vec::new();
    let mut encoder = (uadk.encoder)(&settings(Accelerator::Auto(&HARDWARE), false)).expect("uadk");
    encoder.encode(&pages, &mut payload).expect("uadk");
    assert!(payload[3 * 4..] == pages);
    assert_eq!(encoder.jobs().raw_pages, 3);
}
