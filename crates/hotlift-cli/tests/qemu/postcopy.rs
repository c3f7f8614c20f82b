//! Tests postcopy through relays. Most pages are still at the source at the switchover. The guest requests each page
//! that it touches, and all other pages follow compressed.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use hotlift::Address;
use hotlift::options::{Limits, TlsOptions};
use hotlift::tls::{Profile, of_folder};
use hotlift::transport::Stream;
use rustix::process::Signal;
use serde_json::json;

use crate::guest::Guest;
use crate::need;
use crate::route::{Multifd, RelayOptions, Relays, Side};
use crate::tls::{Certificates, flag};
use crate::vm::{Accelerator, DEADLINE, Machine, Memory, Release, Vm, until};

/// Bytes a second at which precopy is far from its end at the switchover, and postcopy until the test raises the limit: each
/// sends 1 of 64 MiB a second. Requested pages come at once, but the guest never touches half of its RAM.
const SLOW: u64 = 1 << 20;
const FAST: u64 = 1 << 40;

/// Settings of a move.
#[derive(Debug)]
struct Way {
    /// Release of both QEMUs.
    release: Release,
    /// Memory of both VMs.
    memory: Memory,
    /// True if requested pages have a separate connection.
    preempt: bool,
    /// Multifd of both QEMUs: from 10.1 on it works with postcopy.
    multifd: Multifd,
    /// Method between the relays.
    method: &'static str,
    /// True if the source switches over before it has sent anything.
    at_once: bool,
    /// Certificates of this host, and of another one of the CA, for TLS between the relays.
    tls: Option<[PathBuf; 2]>,
}

impl Way {
    fn side(&self) -> Side {
        let mut side = Side::new(self.multifd)
            .with("return-path")
            .with("postcopy-ram")
            .parameters(
                json!({ "max-bandwidth": self.slow(), "max-postcopy-bandwidth": self.slow() }),
            );
        if self.preempt {
            side = side.with("postcopy-preempt");
        }
        side
    }

    /// Returns a higher rate for huge pages: QEMU 7.2 and 10.0 also limit requested pages.
    fn slow(&self) -> u64 {
        match self.memory {
            Memory::File => SLOW,
            Memory::HugePages => 8 * SLOW,
        }
    }

    /// Returns true for QEMU 7.2, which waits for its second connection before it reads the first.
    fn is_passed_through(&self) -> bool {
        self.preempt && self.release == Release::V7
    }

    fn relays(&self) -> RelayOptions {
        let mut options = RelayOptions::new(self.method, Multifd::Channels(2), self.multifd);
        for flags in [Some(&mut options.source), options.destination.as_mut()] {
            let flags = flags.expect("two relays");
            if let Some([host, _]) = &self.tls {
                flags.push(flag("tls", host));
            }
        }
        options
    }

    /// Starts a migration, up to precopy. `None`: it cannot be tested here.
    fn connect(&self) -> Option<(Vm, Vm, Relays)> {
        println!("{self:?}");
        let machine = Machine {
            name: self.release.machine(),
            accelerator: Accelerator::Kvm,
            memory: self.memory,
            guest: Guest::program(),
        };
        let mut here = Vm::running(self.release, &machine)?;
        let mut there = Vm::waiting(self.release, &machine)?;
        self.side().apply(&mut here);
        self.side().apply(&mut there);
        let incoming = there.uri("incoming");
        there
            .qmp
            .migrate_incoming(&incoming, true)
            .expect("migrate-incoming");
        let relays = Relays::start(&here, &incoming, &self.relays());
        here.qmp.migrate(relays.uri()).expect("migrate");
        if !self.at_once {
            here.reaches("active");
        }
        Some((here, there, relays))
    }

    /// Starts a move up to postcopy: the guest runs there, and most pages are here. `None`: it cannot be tested here.
    fn begin(&self) -> Option<OutgoingMigration> {
        let (mut here, mut there, relays) = self.connect()?;
        if let Some([_, other]) = &self.tls {
            // Not earlier: a relay would treat them as the late connection of a QEMU 10.0 for requested pages.
            there.reaches("active");
            is_rejected(relays.between(), None);
            is_rejected(relays.between(), Some(other));
        }
        // It precedes the source's own.
        let takes_strangers = self.tls.is_none() && !self.is_passed_through();
        let in_front = takes_strangers && self.preempt;
        let mut strangers = Vec::new();
        strangers.extend(in_front.then(|| silent(relays.uri())));
        let before = here.count().expect("the guest has counted");
        here.start_postcopy();
        there.wait_for_status("postcopy-active");
        // It runs there while its pages are here.
        there.continues_from(before);
        if takes_strangers {
            drop(silent(relays.uri()));
            strangers.push(silent(relays.uri()));
            // Once the source's own is connected, the relay ignores other clients.
            if !self.preempt {
                is_rejected(relays.uri(), None);
            }
        }
        Some(OutgoingMigration {
            here,
            there,
            relays,
            _strangers: strangers,
        })
    }

    /// Moves a guest, and verifies its arrival. `None`: it cannot be tested here.
    fn take(&self) -> Option<()> {
        let OutgoingMigration {
            mut here,
            mut there,
            relays,
            _strangers,
        } = self.begin()?;
        here.qmp
            .set_parameters(&json!({ "max-bandwidth": FAST, "max-postcopy-bandwidth": FAST }))
            .expect("parameters");
        here.reaches("completed");
        there.reaches("completed");
        assert!(!here.is_running(), "the source runs, too");
        let ended = relays.finish_with_output();
        for (report, _) in &ended {
            if self.is_passed_through() {
                let why = report["passed_through"].as_str().expect("a reason");
                assert!(why.contains("postcopy"), "{report}");
            } else {
                assert!(report["passed_through"].is_null(), "{report}");
                assert!(report["normal_pages"].as_u64() > Some(1000), "{report}");
            }
        }
        if self.tls.is_some() {
            let (_, output) = ended.last().expect("two relays");
            let other = match self.is_passed_through() {
                true => "another host",
                // It accepts none: requested pages arrive on main from the source's relay.
                false => "as a migration stream",
            };
            for why in ["does not use TLS", other] {
                assert!(output.contains(why), "{output}");
            }
        }
        passes_check_and_continues(&mut there);
        Some(())
    }
}

/// A guest during postcopy.
struct OutgoingMigration {
    here: Vm,
    there: Vm,
    relays: Relays,
    _strangers: Vec<Stream>,
}

/// Opens a silent connection to the relay at `to`.
fn silent(to: &str) -> Stream {
    let address: Address = to.parse().expect("an address");
    address.connect(DEADLINE).expect("it listens")
}

fn passes_check_and_continues(there: &mut Vm) {
    let proven = there.prove();
    there.qmp.cont().expect("cont");
    there.continues_from(proven);
}

/// Connects to the relay at `to` like the connection for requested pages, with the certificate in `folder` or without TLS.
/// Waits until the relay closes it.
fn is_rejected(to: &str, folder: Option<&Path>) {
    let address: Address = to.parse().expect("an address");
    let mut stream = address.connect(DEADLINE).expect("it listens");
    if let Some(folder) = folder {
        let (options, limits) = (TlsOptions::default(), Limits::default());
        let tls = of_folder(folder, Profile::Hotlift, &options, &limits).expect("certificates");
        stream = stream.secure(&tls, Some("localhost")).expect("of the CA");
    }
    // A record of a zero page in RAM that the guest never touches: a client that sends an awaited page counts as the source.
    let _ = (&stream).write_all(b"\0\0\0\0\x03\0\0\x02\x06pc.ram\0");
    stream.set_read_timeout(DEADLINE).expect("a time-out");
    let mut answer = [0; 64];
    loop {
        match (&stream).read(&mut answer) {
            Ok(1..) => {}
            Ok(0) => return,
            Err(error) => {
                let is_open = error.kind() == std::io::ErrorKind::WouldBlock;
                assert!(!is_open, "{folder:?} was let in");
                return;
            }
        }
    }
}

#[test]
fn a_guest_in_postcopy_fetches_its_pages_through_the_relays() {
    use Release::{V10, V11};
    let both = Multifd::Channels(2);
    for (release, preempt, multifd, method, at_once) in [
        (V10, false, Multifd::Off, "zstd", false),
        (V10, true, Multifd::Off, "auto", true),
        (V11, true, Multifd::Off, "lz4", true),
        // Packets that might be forwarded to channels which that QEMU no longer reads.
        (V11, false, both, "none", false),
        (V11, true, both, "zstd", false),
    ] {
        let way = Way {
            release,
            memory: Memory::File,
            preempt,
            multifd,
            method,
            at_once,
            tls: None,
        };
        need!(way.take());
    }
}

#[test]
fn a_guest_in_huge_pages_fetches_them_whole_through_the_relays() {
    use Release::{V7, V10, V11};
    for (release, preempt, multifd, method) in [
        (V7, false, Multifd::Off, "zstd"),
        (V10, true, Multifd::Off, "lz4"),
        (V11, false, Multifd::Channels(2), "none"),
        (V11, true, Multifd::Channels(2), "zstd"),
    ] {
        let way = Way {
            release,
            memory: Memory::HugePages,
            preempt,
            multifd,
            method,
            at_once: false,
            tls: None,
        };
        need!(way.take());
    }
}

#[test]
fn a_guest_whose_relay_is_killed_in_postcopy_waits_and_gets_its_pages_through_new_ones() {
    for (release, preempt, killed) in [
        (Release::V10, false, "source"),
        (Release::V10, true, "destination"),
        (Release::V7, false, "destination"),
        (Release::V11, true, "source"),
    ] {
        println!("{killed}");
        let way = Way {
            release,
            memory: Memory::File,
            preempt,
            multifd: Multifd::Off,
            method: "zstd",
            at_once: false,
            tls: None,
        };
        let OutgoingMigration {
            mut here,
            mut there,
            relays,
            _strangers,
        } = need!(way.begin());
        let output = relays.kill(killed);
        assert!(
            output.contains("some of its pages have not arrived"),
            "{output}"
        );
        here.wait_for_status("postcopy-paused");
        there.wait_for_status("postcopy-paused");
        assert!(!here.is_running(), "the source runs, too");

        let again = there.uri("again");
        let recover = json!({ "uri": again });
        let taken = there.qmp.client().execute("migrate-recover", &recover);
        taken.expect("migrate-recover");
        let relays = Relays::start(&here, &again, &way.relays());
        here.qmp
            .set_parameters(&json!({ "max-bandwidth": FAST, "max-postcopy-bandwidth": FAST }))
            .expect("parameters");
        let resume = json!({ "uri": relays.uri(), "resume": true });
        let resumed = here.qmp.client().execute("migrate", &resume);
        resumed.expect("migrate");
        here.reaches("completed");
        there.reaches("completed");
        assert!(!here.is_running(), "the source runs, too");
        relays.finish();
        passes_check_and_continues(&mut there);
    }
}

/// QEMU before 10.2 has no state for this, and its guest may then run nowhere.
#[test]
fn a_guest_whose_relay_is_killed_while_its_devices_load_runs_again_at_the_source() {
    for killed in ["source", "destination"] {
        let way = Way {
            release: Release::V11,
            memory: Memory::File,
            preempt: false,
            multifd: Multifd::Off,
            method: "zstd",
            at_once: false,
            tls: None,
        };
        let (mut here, there, relays) = need!(way.connect());
        // More than sockets hold: the destination has answered the opening and accepts pages.
        until(
            || "no pages move".to_owned(),
            || {
                let ram = here.migration().ram?;
                (ram.transferred > SLOW).then_some(())
            },
        );
        let before = here.count().expect("the guest has counted");
        // Its socket buffers the devices, and it loads none of them.
        there.signal(Signal::STOP);
        here.start_postcopy();
        here.wait_for_status("postcopy-device");
        let output = relays.kill(killed);
        // Even if the devices have reached the remaining relay, the guest runs nowhere else.
        assert!(
            !output.contains("some of its pages have not arrived"),
            "{output}"
        );
        here.wait_for_status("failed");
        assert!(here.is_running(), "the guest runs nowhere");
        here.continues_from(before);
    }
}

#[test]
fn a_guest_in_postcopy_gets_its_pages_over_tls_from_its_source_only() {
    use Release::{V7, V10, V11};
    let certificates = Certificates::make();
    let other = certificates.of_another_host("b.example");
    // A QEMU 7.2 connects for requested pages at the start.
    for (release, preempt, multifd) in [
        (V10, false, Multifd::Off),
        (V10, true, Multifd::Off),
        (V7, true, Multifd::Off),
        (V11, true, Multifd::Off),
        (V11, true, Multifd::Channels(2)),
    ] {
        let way = Way {
            release,
            memory: Memory::File,
            preempt,
            multifd,
            method: "zstd",
            at_once: false,
            tls: Some([certificates.dir(), other.clone()]),
        };
        need!(way.take());
    }
}
