//! Tests that every page is restored, whatever the accelerator does. Reports show the accelerator's work, and the CPU
//! repeats jobs that failed.

#[path = "support/simulated.rs"]
mod simulated;
#[path = "../../hotlift-methods/tests/support/packets.rs"]
mod support;

use hotlift_accel::HARDWARE;
use hotlift_mem::PAGE_SIZE;
use hotlift_methods::{
    Accelerator, Decode, Encode, EncoderSettings, Jobs, METHODS, MethodError, MethodInfo, RunsOn,
    Unit, method,
};
use simulated::Simulated;
use support::{CONTENTS, LAYOUTS, Layout, Noise, Place, contents};

/// Pages of a packet.
const FULL: usize = 128;

/// Devices of every kind, and true if they are still in service after many packets.
const BEHAVIOURS: [(&str, bool); 16] = [
    ("", true),
    ("latency=30", true),
    ("depth=1", true),
    ("depth=7,latency=20", true),
    ("busy=2", true),
    ("busy=3,depth=20,latency=5", true),
    ("fault=5", true),
    ("error=4", true),
    ("wrong=3", true),
    ("busy=2,fault=13,error=17,wrong=23,depth=9,latency=5", true),
    ("fault=1", false),
    ("error=1", false),
    ("wrong=1", false),
    ("die=1", false),
    ("die=8", false),
    ("absent=1", false),
];

/// Returns the methods that have an accelerator.
fn accelerated() -> impl Iterator<Item = &'static MethodInfo> {
    let methods = || METHODS.iter().filter(|method| method.hardware.is_some());
    assert!(methods().count() >= 2);
    methods()
}

fn settings(method: &MethodInfo, accelerator: Accelerator) -> EncoderSettings {
    EncoderSettings {
        accelerator,
        ..EncoderSettings::software(method.default_level)
    }
}

/// Returns both halves of a channel.
fn halves(
    method: &MethodInfo,
    sender: Accelerator,
    receiver: Accelerator,
) -> (Box<dyn Encode>, Box<dyn Decode>) {
    let encoder = (method.encoder)(&settings(method, sender)).expect(method.name);
    let decoder = (method.decoder)(receiver).expect(method.name);
    (encoder, decoder)
}

/// Returns the simulated accelerators, without faults, after a first use: a process decides once whether its accelerators work.
fn simulated() -> Simulated {
    let simulated = Simulated::take();
    for method in accelerated() {
        halves(
            method,
            Accelerator::Auto(&HARDWARE),
            Accelerator::Auto(&HARDWARE),
        );
    }
    simulated
}

/// Passes one packet through a channel.
fn packet(
    what: &str,
    kind: &str,
    pages: usize,
    layout: Layout,
    encoder: &mut dyn Encode,
    decoder: &mut dyn Decode,
) {
    let pages_in = contents(kind, pages, 3);
    let mut payload = Vec::new();
    encoder.encode(&pages_in, &mut payload).expect(what);
    let place = Place::new(pages, layout);
    decoder.decode(&payload, &place.runs()).expect(what);
    assert!(place.pages() == pages_in, "{what}: pages differ");
    place.assert_rest_untouched(what);
}

/// Checks that each page is a job where the accelerator works on pages.
fn assert_adds_up(what: &str, method: &MethodInfo, jobs: Jobs, pages: usize) {
    let all = jobs.hardware + jobs.software;
    match method.unit {
        Unit::Page => assert_eq!(all, u64::try_from(pages).expect("few"), "{what}: {jobs:?}"),
        Unit::Packet => assert!(all > 0, "{what}: {jobs:?}"),
    }
}

fn fallback(runs_on: &RunsOn) -> Option<&str> {
    match runs_on {
        RunsOn::Fallback(reason) => Some(reason),
        RunsOn::Software | RunsOn::Hardware(_) => None,
    }
}

#[test]
fn every_page_is_exact_whatever_the_device_does() {
    let simulated = simulated();
    let sides = [
        (Accelerator::Auto(&HARDWARE), Accelerator::Auto(&HARDWARE)),
        (Accelerator::Auto(&HARDWARE), Accelerator::Off),
        (Accelerator::Off, Accelerator::Auto(&HARDWARE)),
    ];
    for method in accelerated() {
        for (behaviour, stays) in BEHAVIOURS {
            for (sender, receiver) in sides {
                simulated.behave(behaviour);
                let (mut encoder, mut decoder) = halves(method, sender, receiver);
                let mut pages = 0;
                let what = format!("{}, {sender:?} to {receiver:?}, {behaviour}", method.name);
                for kind in CONTENTS {
                    for (n, layout) in [1, 2, FULL].into_iter().zip(LAYOUTS) {
                        let what = format!("{what}, {n} pages of {kind}");
                        packet(&what, kind, n, layout, &mut *encoder, &mut *decoder);
                        pages += n;
                    }
                }
                for (accelerator, jobs, runs_on) in [
                    (sender, encoder.jobs(), encoder.runs_on()),
                    (receiver, decoder.jobs(), decoder.runs_on()),
                ] {
                    assert_adds_up(&what, method, jobs, pages);
                    match (accelerator, &runs_on) {
                        (Accelerator::Off, RunsOn::Software) => {
                            assert_eq!((jobs.hardware, jobs.retries), (0, 0), "{what}");
                        }
                        (Accelerator::Auto(_), RunsOn::Hardware(_)) if stays => {
                            assert!(jobs.hardware > 0, "{what}: {jobs:?}");
                        }
                        (Accelerator::Auto(_), RunsOn::Fallback(_)) if !stays => {}
                        _ => panic!("{what}: {runs_on:?}, {jobs:?}"),
                    }
                }
            }
        }
    }
}

#[test]
fn a_device_that_works_does_every_job() {
    let simulated = simulated();
    for method in accelerated() {
        simulated.behave("latency=10");
        let (mut encoder, mut decoder) = halves(
            method,
            Accelerator::Required(&HARDWARE),
            Accelerator::Auto(&HARDWARE),
        );
        packet(
            method.name,
            "text",
            FULL,
            Layout::Scattered,
            &mut *encoder,
            &mut *decoder,
        );
        let device = method.hardware.expect("filtered");
        for (jobs, runs_on) in [
            (encoder.jobs(), encoder.runs_on()),
            (decoder.jobs(), decoder.runs_on()),
        ] {
            let only = Jobs {
                hardware: jobs.hardware,
                ..Jobs::default()
            };
            assert_eq!(jobs, only, "{}", method.name);
            assert_adds_up(method.name, method, jobs, FULL);
            assert!(
                matches!(&runs_on, RunsOn::Hardware(what) if what.starts_with(device)),
                "{}: {runs_on:?}",
                method.name
            );
        }
    }
}

#[test]
fn a_full_queue_is_tried_again_and_then_the_cpu_helps() {
    let simulated = simulated();
    for method in accelerated() {
        simulated.behave("busy=2");
        let (mut encoder, mut decoder) = halves(
            method,
            Accelerator::Auto(&HARDWARE),
            Accelerator::Auto(&HARDWARE),
        );
        let mut run = |what: &str, times: usize| {
            for _ in 0..times {
                packet(
                    &format!("{}, {what}", method.name),
                    "text",
                    FULL,
                    Layout::Whole,
                    &mut *encoder,
                    &mut *decoder,
                );
            }
            [
                (encoder.jobs(), encoder.runs_on()),
                (decoder.jobs(), decoder.runs_on()),
            ]
        };
        for (jobs, _) in run("every second is refused", 8) {
            assert!(jobs.retries > 0 && jobs.hardware > 0, "{jobs:?}");
        }
        simulated.behave("busy=1");
        for (jobs, runs_on) in run("all are refused", 2) {
            assert!(jobs.software > 0, "{jobs:?}");
            // The queue may have other users too.
            assert!(matches!(runs_on, RunsOn::Hardware(_)), "{runs_on:?}");
        }
        for (_, runs_on) in run("all are refused for long", 64) {
            assert!(fallback(&runs_on).is_some(), "{runs_on:?}");
        }
    }
}

#[test]
fn a_page_is_offered_four_times_and_then_the_cpus() {
    let simulated = simulated();
    for method in accelerated().filter(|method| method.unit == Unit::Page) {
        simulated.behave("");
        let (mut encoder, mut decoder) = halves(
            method,
            Accelerator::Auto(&HARDWARE),
            Accelerator::Auto(&HARDWARE),
        );
        simulated.behave("busy=1");
        packet(
            method.name,
            "text",
            1,
            Layout::Whole,
            &mut *encoder,
            &mut *decoder,
        );
        for jobs in [encoder.jobs(), decoder.jobs()] {
            let expected = Jobs {
                software: 1,
                retries: 3,
                ..Jobs::default()
            };
            assert_eq!(jobs, expected, "{}", method.name);
        }
    }
}

#[test]
fn a_device_that_dies_in_mid_packet_is_left_for_good_and_loses_no_page() {
    let simulated = simulated();
    for method in accelerated() {
        // The first packet is the device's; in the second it dies.
        simulated.behave("");
        let (mut encoder, mut decoder) =
            halves(method, Accelerator::Required(&HARDWARE), Accelerator::Off);
        let run = |encoder: &mut dyn Encode, decoder: &mut dyn Decode| {
            packet(method.name, "text", FULL, Layout::Whole, encoder, decoder);
        };
        run(&mut *encoder, &mut *decoder);
        let before = encoder.jobs();
        assert_eq!(before.software, 0);
        simulated.behave("die=3,latency=10");
        // A device with a packet per job needs some packets to fail as often.
        for _ in 0..16 {
            run(&mut *encoder, &mut *decoder);
        }
        let reason = encoder.runs_on();
        assert!(
            fallback(&reason).is_some_and(|reason| !reason.is_empty()),
            "{reason:?}"
        );
        let after = encoder.jobs();
        assert!(after.software > 0, "{after:?}");
        assert_adds_up(method.name, method, after, 17 * FULL);
        // It came back, but this channel does not use it any more, and reports the same reason.
        simulated.behave("");
        run(&mut *encoder, &mut *decoder);
        assert_eq!(simulated.jobs(), 0, "{}", method.name);
        assert_eq!(encoder.runs_on(), reason);
        assert_eq!(encoder.jobs().hardware, after.hardware);
    }
}

#[test]
fn a_job_that_never_ends_takes_the_device_out_of_service_and_keeps_its_memory() {
    let simulated = simulated();
    for method in accelerated() {
        for (sender, receiver) in [
            (Accelerator::Auto(&HARDWARE), Accelerator::Off),
            (Accelerator::Off, Accelerator::Auto(&HARDWARE)),
        ] {
            simulated.behave("hang=5");
            let (mut encoder, mut decoder) = halves(method, sender, receiver);
            for _ in 0..8 {
                packet(
                    method.name,
                    "binary",
                    FULL,
                    Layout::Adjacent,
                    &mut *encoder,
                    &mut *decoder,
                );
            }
            let runs_on = match sender {
                Accelerator::Off => decoder.runs_on(),
                _ => encoder.runs_on(),
            };
            assert!(fallback(&runs_on).is_some(), "{}: {runs_on:?}", method.name);
            // The simulated library ends the process if an unfinished job is released.
            drop((encoder, decoder));
        }
    }
}

#[test]
fn output_that_is_wrong_is_noticed_and_done_again() {
    let simulated = simulated();
    for method in accelerated() {
        for (sender, receiver) in [
            (Accelerator::Auto(&HARDWARE), Accelerator::Off),
            (Accelerator::Off, Accelerator::Auto(&HARDWARE)),
        ] {
            simulated.behave("wrong=2");
            let (mut encoder, mut decoder) = halves(method, sender, receiver);
            for _ in 0..4 {
                packet(
                    method.name,
                    "text",
                    FULL,
                    Layout::Whole,
                    &mut *encoder,
                    &mut *decoder,
                );
            }
            let jobs = match sender {
                Accelerator::Off => decoder.jobs(),
                _ => encoder.jobs(),
            };
            let what = format!("{}, {sender:?}: {jobs:?}", method.name);
            assert!(jobs.software > 0 && jobs.hardware > 0, "{what}");
        }
    }
}

#[test]
fn off_asks_no_device_and_says_so() {
    let simulated = simulated();
    for method in accelerated() {
        simulated.behave("");
        let (mut encoder, mut decoder) = halves(method, Accelerator::Off, Accelerator::Off);
        packet(
            method.name,
            "text",
            FULL,
            Layout::Whole,
            &mut *encoder,
            &mut *decoder,
        );
        assert_eq!(simulated.jobs(), 0, "{}", method.name);
        assert_eq!(encoder.runs_on(), RunsOn::Software);
        assert_eq!(decoder.runs_on(), RunsOn::Software);
        assert_adds_up(method.name, method, encoder.jobs(), FULL);
        assert_adds_up(method.name, method, decoder.jobs(), FULL);
    }
}

#[test]
fn a_required_device_that_is_gone_is_an_error() {
    let simulated = simulated();
    for method in accelerated() {
        // The probe, which runs once per process, finds a device.
        simulated.behave("");
        drop(halves(
            method,
            Accelerator::Required(&HARDWARE),
            Accelerator::Required(&HARDWARE),
        ));
        simulated.behave("absent=1");
        let errors = [
            (method.encoder)(&settings(method, Accelerator::Required(&HARDWARE))).err(),
            (method.decoder)(Accelerator::Required(&HARDWARE)).err(),
        ];
        for error in errors {
            assert!(
                matches!(&error, Some(MethodError::Unavailable { reason, .. }) if !reason.is_empty()),
                "{}: {error:?}",
                method.name
            );
        }
    }
}

#[test]
fn pages_as_they_are_are_counted() {
    let simulated = simulated();
    for method in accelerated().filter(|method| method.unit == Unit::Page) {
        for accelerator in [Accelerator::Auto(&HARDWARE), Accelerator::Off] {
            simulated.behave("");
            let (mut encoder, mut decoder) = halves(method, accelerator, accelerator);
            for kind in ["random", "text"] {
                packet(
                    method.name,
                    kind,
                    5,
                    Layout::Whole,
                    &mut *encoder,
                    &mut *decoder,
                );
            }
            for jobs in [encoder.jobs(), decoder.jobs()] {
                assert_eq!(jobs.raw_pages, 5, "{}, {accelerator:?}", method.name);
                assert_eq!(jobs.hardware + jobs.software, 10);
            }
        }
    }
}

#[test]
fn a_stream_is_at_most_a_byte_shorter_than_its_page() {
    let simulated = simulated();
    for method in accelerated().filter(|method| method.unit == Unit::Page) {
        simulated.behave("");
        let (mut encoder, mut by_device) = halves(
            method,
            Accelerator::Auto(&HARDWARE),
            Accelerator::Auto(&HARDWARE),
        );
        let mut by_cpu = (method.decoder)(Accelerator::Off).expect(method.name);
        let mut lengths = Vec::new();
        for seed in 0..3 {
            let noise = contents("random", 1, seed);
            for random in PAGE_SIZE - 480..PAGE_SIZE {
                let mut page = vec![0; PAGE_SIZE];
                page[..random].copy_from_slice(&noise[..random]);
                let mut payload = Vec::new();
                encoder.encode(&page, &mut payload).expect(method.name);
                lengths.push(payload.len() - 4);
                for decoder in [&mut by_device, &mut by_cpu] {
                    let place = Place::new(1, Layout::Whole);
                    decoder.decode(&payload, &place.runs()).expect(method.name);
                    assert!(place.pages() == page, "{}: {random}", method.name);
                }
            }
        }
        for length in [PAGE_SIZE - 2, PAGE_SIZE - 1, PAGE_SIZE] {
            assert!(
                lengths.contains(&length),
                "{}: no page of {length}",
                method.name
            );
        }
        assert!(lengths.iter().all(|&length| length <= PAGE_SIZE));
    }
}

#[test]
fn uadk_compresses_for_qemu_if_it_has_the_device() {
    let simulated = simulated();
    simulated.behave("error=3");
    let uadk = method("uadk").expect("uadk");
    let pages = contents("text", FULL, 1);
    for accelerator in [Accelerator::Auto(&HARDWARE), Accelerator::Off] {
        let mut encoder = (uadk.encoder)(&EncoderSettings {
            to_hotlift: false,
            ..settings(uadk, accelerator)
        })
        .expect("uadk");
        let mut payload = Vec::new();
        encoder.encode(&pages, &mut payload).expect("uadk");
        let raw = payload.len() == FULL * 4 + pages.len();
        assert_eq!(raw, matches!(accelerator, Accelerator::Off));
        if raw {
            assert!(payload[FULL * 4..] == pages);
        }
        let jobs = encoder.jobs();
        let raw_pages = if raw { FULL } else { 0 };
        assert_eq!(jobs.raw_pages, u64::try_from(raw_pages).expect("few"));
        assert_adds_up("uadk", uadk, jobs, FULL);
    }
}

#[test]
fn a_bad_page_is_the_peers_fault_even_while_other_pages_are_at_the_device() {
    let simulated = simulated();
    for method in accelerated().filter(|method| method.unit == Unit::Page) {
        simulated.behave("latency=2000,depth=8");
        let (mut encoder, mut decoder) =
            halves(method, Accelerator::Off, Accelerator::Auto(&HARDWARE));
        let mut payload = Vec::new();
        encoder
            .encode(&contents("text", FULL, 1), &mut payload)
            .expect(method.name);
        // The first page's stream, after the two bytes of zlib's header: an invalid block type.
        payload[FULL * 4 + 2] |= 7;
        if method.name == "qpl" {
            payload[FULL * 4] |= 7;
        }
        let place = Place::new(FULL, Layout::Whole);
        let result = decoder.decode(&payload, &place.runs());
        assert!(
            matches!(result, Err(MethodError::Damaged { .. })),
            "{}: {result:?}",
            method.name
        );
        place.assert_rest_untouched(method.name);
        let again = decoder.decode(&payload, &place.runs());
        assert!(matches!(again, Err(MethodError::Failed { .. })));
        // The simulated library ends the process if an unfinished job is released.
        drop(decoder);
    }
}

#[test]
fn damaged_payloads_are_judged_as_on_the_cpu() {
    let simulated = simulated();
    simulated.behave("");
    let mut noise = Noise::new(5);
    for method in accelerated().filter(|method| method.unit == Unit::Page) {
        let mut payload = Vec::new();
        (method.encoder)(&settings(method, Accelerator::Off))
            .expect(method.name)
            .encode(&contents("alternating", 9, 1), &mut payload)
            .expect(method.name);
        let mut refused = 0;
        for round in 0..400 {
            let mut payload = payload.clone();
            for _ in 0..=noise.below(2) {
                // Or in the first page's header, if it has one.
                let reach = if round % 4 == 0 {
                    2
                } else {
                    payload.len() - 9 * 4
                };
                payload[9 * 4 + noise.below(reach)] ^= 1 << noise.below(8);
            }
            let [hardware, software] =
                [Accelerator::Auto(&HARDWARE), Accelerator::Off].map(|accelerator| {
                    let mut decoder = (method.decoder)(accelerator).expect(method.name);
                    let place = Place::new(9, LAYOUTS[round % 3]);
                    let result = decoder.decode(&payload, &place.runs());
                    place.assert_rest_untouched(method.name);
                    result.map(|()| place.pages())
                });
            refused += usize::from(software.is_err());
            // A device does not report how much of a stream it read.
            let leftover = matches!(software, Err(MethodError::Leftover { .. }));
            assert!(
                hardware == software || leftover,
                "{}, round {round}: {:?} and {:?}",
                method.name,
                hardware.err(),
                software.err()
            );
        }
        assert!(refused > 50, "{}: only {refused} refused", method.name);
    }
}
