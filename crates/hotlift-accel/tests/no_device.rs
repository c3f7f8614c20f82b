//! Tests that all work runs on the CPU if the vendors' libraries are installed without a device. The report gives the
//! reason.

#[path = "support/simulated.rs"]
mod simulated;

use hotlift_accel::HARDWARE;
use hotlift_methods::{Accelerator, MethodError, RunsOn, method};
use simulated::Simulated;

#[test]
fn what_is_wanted_runs_on_the_cpu_and_what_is_required_is_an_error() {
    let simulated = Simulated::take();
    simulated.behave("absent=1");
    for hardware in &HARDWARE {
        let method = method(hardware.method).expect("a row of the table");
        let why = hardware.probe().expect_err("no device");
        let decoder = (method.decoder)(Accelerator::Auto(&HARDWARE)).expect(method.name);
        assert_eq!(decoder.runs_on(), RunsOn::Fallback(why.clone()));
        let Err(error) = (method.decoder)(Accelerator::Required(&HARDWARE)) else {
            panic!("{}: no error", method.name);
        };
        assert_eq!(
            error,
            MethodError::Unavailable {
                method: method.name,
                library: hardware.library,
                reason: why.to_string(),
            }
        );
    }
    let why = |name| {
        let accelerator = Accelerator::Auto(&HARDWARE);
        accelerator.probe(name).expect_err("no device")
    };
    assert_eq!(
        &*why("qpl"),
        "libqpl 1.9.0-simulated: no job: libaccel-config.so.1 is missing (code 501)"
    );
    assert_eq!(&*why("uadk"), "libwd_comp: no device for zlib");
}
