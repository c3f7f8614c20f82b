//! Tests a Linux that migrates through a sequence of QEMUs.

use crate::guest::Guest;
use crate::need;
use crate::route::{Multifd, RelayOptions, Route, Side};
use crate::vm::{Accelerator, Machine, Memory, PC_7, Release, Vm};

/// Release in which the Linux boots.
pub const STARTS_IN: Release = Release::V10;
const BETWEEN: Multifd = Multifd::Channels(2);

/// Steps: the next release, true if the guest runs during the move (a 7.2 under TCG then loses pages by itself: see
/// `matrix::PAIRS`), the source's multifd, the method between the relays, the destination's multifd.
pub const JOURNEY: [(Release, bool, Multifd, &str, Multifd); 6] = {
    use Multifd::{Channels, Off};
    use Release::{V7, V10};
    [
        (V10, true, Channels(4), "zstd", Channels(4)),
        (V10, true, Off, "zlib", Off),
        (V10, true, Channels(1), "none", Channels(4)),
        (V7, true, Channels(4), "zlib", Off),
        (V7, false, Off, "zstd", Channels(4)),
        (V10, false, Channels(4), "none", Channels(1)),
    ]
};

/// One machine for all steps: it takes 8 s to boot under TCG, the only accelerator that runs a stock kernel everywhere. Later
/// migrations also find damage from earlier ones.
#[test]
fn a_linux_moves_many_times_and_its_memory_stays_intact() {
    let guest = need!(Guest::linux());
    let machine = Machine {
        name: PC_7,
        accelerator: Accelerator::Tcg,
        memory: Memory::File,
        guest,
    };
    let mut here = need!(Vm::running(STARTS_IN, &machine));
    for (to, live, source, method, destination) in JOURNEY {
        let mut relays = RelayOptions::new(method, BETWEEN, destination);
        relays.configure_uuid(source, BETWEEN);
        let route = Route {
            source: Side::new(source).with("return-path"),
            destination: Side::new(destination),
            relays: Some(relays),
            live,
        };
        let moved = need!(route.take(here, to));
        here = moved.there;
    }
}
