//! A Linux goes from QEMU to QEMU, and from there on.

use crate::guest::Guest;
use crate::route::{Multifd, RelayOptions, Route, Side};
use crate::vm::{Accelerator, Machine, PC_7, Release, Vm};
use crate::{alone, skip};

/// One machine for all of them: it takes 8 s to boot under TCG, the only accelerator that runs a stock
/// kernel everywhere, and what one migration breaks the next ones find.
#[test]
fn a_linux_moves_on_and_on_and_finds_its_memory_right() {
    let _alone = alone();
    use Multifd::{Channels, Off};
    use Release::{V7, V10};
    let guest = skip!(Guest::linux());
    let machine = Machine {
        name: PC_7,
        accelerator: Accelerator::Tcg,
        guest,
    };
    let mut here = skip!(Vm::running(V10, &machine));
    // A 7.2 that runs under TCG loses pages by itself (see `matrix::PAIRS`).
    for (to, live, source, method, destination) in [
        (V10, true, Channels(4), "zstd", Channels(4)),
        (V10, true, Off, "zlib", Off),
        (V10, true, Channels(1), "none", Channels(4)),
        (V7, true, Channels(4), "zlib", Off),
        (V7, false, Off, "zstd", Channels(4)),
        (V10, false, Channels(4), "none", Channels(1)),
    ] {
        let mut relays = RelayOptions::new(method, Channels(2), destination);
        relays.tell_uuid(source, Channels(2));
        let route = Route {
            source: Side::new(source).with("return-path"),
            destination: Side::new(destination),
            relays: Some(relays),
            live,
        };
        let moved = skip!(route.take(here, to));
        here = moved.there;
    }
}
