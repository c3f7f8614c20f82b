//! With the vendors' libraries but no device everything runs on the CPU, with the reason.

#[path = "support/simulated.rs"]
mod simulated;

use hotlift_methods::{Accelerator, METHODS, MethodError, RunsOn};
use simulated::Simulated;

#[test]
fn what_is_wanted_runs_on_the_cpu_and_what_is_required_is_an_error() {
    let simulated = Simulated::take();
    simulated.behave("absent=1");
    for method in METHODS.iter().filter(|method| method.hardware.is_some()) {
        let hardware = method.hardware.expect("filtered");
        let why = hardware.probe().expect_err("no device");
        let decoder = (method.decoder)(Accelerator::Auto).expect(method.name);
        assert_eq!(decoder.runs_on(), RunsOn::Fallback(why.clone()));
        let Err(error) = (method.decoder)(Accelerator::Required) else {
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
        let hardware = hotlift_methods::method(name).and_then(|method| method.hardware);
        hardware.expect(name).probe().expect_err("no device")
    };
    assert_eq!(
        &*why("qpl"),
        "libqpl 1.9.0-simulated: no job: libaccel-config.so.1 is missing (code 501)"
    );
    assert_eq!(&*why("uadk"), "libwd_comp: no device for zlib");
}
