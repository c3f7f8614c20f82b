//! Tests method qatzip on a simulated QAT device: special properties of libqatzip's sessions.

#[path = "support/simulated.rs"]
mod simulated;
#[path = "../../hotlift-methods/tests/support/packets.rs"]
mod support;

use hotlift_accel::HARDWARE;
use hotlift_mem::PAGE_SIZE;
use hotlift_methods::{
    Accelerator, Decode, Encode, EncoderSettings, Jobs, MethodError, RunsOn, method,
};
use simulated::Simulated;
use support::{CANARY, Layout, Place, contents, zlib_stream};

fn encoder() -> Box<dyn Encode> {
    let settings = EncoderSettings {
        accelerator: Accelerator::Required(&HARDWARE),
        ..EncoderSettings::software(1)
    };
    (method("qatzip").expect("qatzip").encoder)(&settings).expect("a device")
}

fn decoder() -> Box<dyn Decode> {
    (method("qatzip").expect("qatzip").decoder)(Accelerator::Required(&HARDWARE)).expect("a device")
}

/// Passes packets of 20 pages, which are two members, through a channel; returns the payloads.
fn send(packets: u64, encoder: &mut dyn Encode, decoder: &mut dyn Decode) -> Vec<Vec<u8>> {
    (0..packets)
        .map(|packet| {
            let pages = contents("alternating", 20, packet);
            let mut payload = Vec::new();
            encoder.encode(&pages, &mut payload).expect("encode");
            let place = Place::new(20, Layout::Scattered);
            decoder.decode(&payload, &place.runs()).expect("decode");
            assert!(place.pages() == pages, "packet {packet}: pages differ");
            place.assert_rest_untouched("the rest");
            payload
        })
        .collect()
}

fn hardware(jobs: u64) -> Jobs {
    Jobs {
        hardware: jobs,
        ..Jobs::default()
    }
}

fn device_name() -> String {
    format!("Intel QAT by {}", simulated::library().display())
}

fn reason(runs_on: &RunsOn) -> &str {
    match runs_on {
        RunsOn::Fallback(reason) => reason
            .strip_prefix(&format!("{}: ", device_name()))
            .expect("which device"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_packet_is_one_call_and_every_member_a_job() {
    let device = Simulated::take();
    let (mut encoder, mut decoder) = (encoder(), decoder());
    device.behave("");
    let payloads = send(5, &mut *encoder, &mut *decoder);
    assert_eq!(device.jobs(), 10);
    let works = RunsOn::Hardware(device_name().into());
    for (jobs, runs_on) in [
        (encoder.jobs(), encoder.runs_on()),
        (decoder.jobs(), decoder.runs_on()),
    ] {
        assert_eq!((jobs, runs_on), (hardware(10), works.clone()));
    }
    // The CPU reads them too.
    let mut software = (method("qatzip").expect("qatzip").decoder)(Accelerator::Off).expect("any");
    for (packet, payload) in payloads.iter().enumerate() {
        let place = Place::new(20, Layout::Whole);
        software.decode(payload, &place.runs()).expect("decode");
        assert!(place.pages() == contents("alternating", 20, packet as u64));
    }
    assert_eq!(software.jobs().software, 10);
    assert_eq!(software.runs_on(), RunsOn::Software);
}

#[test]
fn success_with_short_lengths_is_done_again_on_the_cpu() {
    let device = Simulated::take();
    let (mut encoder, mut decoder) = (encoder(), decoder());
    // Jobs alternate: the encoder's of every second packet, then the decoder's.
    device.behave("wrong=3");
    send(12, &mut *encoder, &mut *decoder);
    for jobs in [encoder.jobs(), decoder.jobs()] {
        assert_eq!((jobs.hardware, jobs.software), (16, 8));
    }
    assert!(matches!(encoder.runs_on(), RunsOn::Hardware(_)));
    assert!(matches!(decoder.runs_on(), RunsOn::Hardware(_)));
}

#[test]
fn a_damaged_page_under_success_reaches_no_page() {
    let device = Simulated::take();
    let pages = contents("text", 1, 1);
    let mut payload = Vec::new();
    encoder().encode(&pages, &mut payload).expect("encode");
    let mut decoder = decoder();
    device.behave("wrong=1");
    let place = Place::new(1, Layout::Whole);
    decoder.decode(&payload, &place.runs()).expect("decode");
    assert!(place.pages() == pages);
    assert_eq!(device.jobs(), 1);
    assert_eq!((decoder.jobs().hardware, decoder.jobs().software), (0, 1));
}

#[test]
fn a_session_that_failed_is_replaced_by_a_new_one() {
    // A session of the simulated device, like one of libqatzip, fails permanently after a failure.
    let device = Simulated::take();
    let (mut encoder, mut decoder) = (encoder(), decoder());
    device.behave("error=3");
    send(12, &mut *encoder, &mut *decoder);
    for jobs in [encoder.jobs(), decoder.jobs()] {
        assert_eq!((jobs.hardware, jobs.software), (16, 8));
    }
    assert!(matches!(decoder.runs_on(), RunsOn::Hardware(_)));
}

#[test]
fn three_failures_in_a_row_take_the_device_out_of_service_for_good() {
    let device = Simulated::take();
    let (mut encoder, mut decoder) = (encoder(), decoder());
    device.behave("error=1");
    send(4, &mut *encoder, &mut *decoder);
    assert_eq!(device.jobs(), 6);
    let left = "3 failures in a row, the last: qzCompress: the hardware failed (-2)";
    assert_eq!(reason(&encoder.runs_on()), left);
    assert!(reason(&decoder.runs_on()).starts_with("3 failures in a row, the last: qzDecompress"));
    device.behave("");
    send(4, &mut *encoder, &mut *decoder);
    assert_eq!(device.jobs(), 0);
    assert_eq!((encoder.jobs().hardware, encoder.jobs().software), (0, 16));
}

#[test]
fn a_device_that_dies_ends_in_software() {
    let device = Simulated::take();
    let (mut encoder, mut decoder) = (encoder(), decoder());
    device.behave("die=6");
    send(8, &mut *encoder, &mut *decoder);
    assert_eq!((encoder.jobs().hardware, encoder.jobs().software), (6, 10));
    for runs_on in [encoder.runs_on(), decoder.runs_on()] {
        let reason = reason(&runs_on).to_owned();
        assert!(reason.contains("no free instance"), "{reason}");
    }
}

#[test]
fn no_answer_in_time_takes_the_device_out_of_service_at_once() {
    let device = Simulated::take();
    let (mut encoder, mut decoder) = (encoder(), decoder());
    device.behave("hang=5 latency=100");
    send(5, &mut *encoder, &mut *decoder);
    assert_eq!(device.jobs(), 6);
    assert_eq!(reason(&encoder.runs_on()), "no answer in time");
    assert_eq!(reason(&decoder.runs_on()), "no answer in time");
    assert_eq!((decoder.jobs().hardware, decoder.jobs().software), (4, 6));
}

#[test]
fn a_device_that_is_taken_is_asked_again_a_limited_number_of_times() {
    let device = Simulated::take();
    let (mut encoder, mut decoder) = (encoder(), decoder());
    device.behave("busy=2");
    send(8, &mut *encoder, &mut *decoder);
    let jobs = encoder.jobs();
    assert_eq!((jobs.hardware, jobs.software), (16, 0));
    assert_eq!(jobs.retries + decoder.jobs().retries, 15);

    // Packets that find it busy are no failures, up to a limit.
    device.behave("busy=1");
    send(63, &mut *encoder, &mut *decoder);
    assert!(matches!(encoder.runs_on(), RunsOn::Hardware(_)));
    send(2, &mut *encoder, &mut *decoder);
    assert!(reason(&encoder.runs_on()).ends_with("for 64 packets in a row"));
    assert_eq!(encoder.jobs().software, 130);
    assert_eq!(encoder.jobs().retries, jobs.retries + 64 * 8);
}

#[test]
fn only_members_whose_structure_is_right_reach_the_device() {
    let device = Simulated::take();
    let pages = contents("text", 20, 1);
    let payload = send(1, &mut *encoder(), &mut *decoder()).remove(0);
    let good = {
        let mut payload = Vec::new();
        encoder().encode(&pages, &mut payload).expect("encode");
        payload
    };
    device.behave("");
    let mut plain = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    let stream = zlib_stream(&pages);
    plain.extend_from_slice(&stream[2..stream.len() - 4]);
    plain.extend_from_slice(&crc32fast::hash(&pages).to_le_bytes());
    plain.extend_from_slice(&u32::try_from(pages.len()).expect("short").to_le_bytes());
    // Payloads that no device receives are decoded anyway.
    let mut channel = decoder();
    let place = Place::new(20, Layout::Scattered);
    channel.decode(&plain, &place.runs()).expect("plain gzip");
    assert!(place.pages() == pages);
    assert_eq!(
        channel.jobs(),
        Jobs {
            software: 1,
            ..Jobs::default()
        }
    );

    let with = |at: usize, value: u8| {
        let mut payload = good.clone();
        payload[at] = value;
        payload
    };
    for (what, damaged) in [
        ("a member's size", with(17, 0xff)),
        ("a member's deflate size", with(20, !good[20])),
        ("the size in the trailer", with(good.len() - 3, 0xff)),
        ("a cut member", good[..good.len() - 1].to_vec()),
        ("a byte behind the last member", [&good[..], &[0]].concat()),
        ("other pages' members", [&good[..], &payload[..]].concat()),
        ("no members", Vec::new()),
    ] {
        let place = Place::new(20, Layout::Scattered);
        decoder().decode(&damaged, &place.runs()).expect_err(what);
        assert_eq!(device.jobs(), 0, "{what} reached the device");
    }
}

#[test]
fn what_the_device_calls_bad_is_judged_by_the_cpu() {
    let device = Simulated::take();
    let pages = contents("text", 16, 1);
    let mut good = Vec::new();
    encoder().encode(&pages, &mut good).expect("encode");

    // The device's fault: the CPU reads the stream.
    let mut channel = decoder();
    device.behave("error=1");
    let place = Place::new(16, Layout::Scattered);
    channel.decode(&good, &place.runs()).expect("a good stream");
    assert!(place.pages() == pages);

    // The peer's fault: no byte of a damaged member is written.
    device.behave("");
    for at in (24..good.len() - 4).step_by(good.len() / 50) {
        let mut damaged = good.clone();
        damaged[at] ^= 4;
        let place = Place::new(16, Layout::Scattered);
        let error = decoder().decode(&damaged, &place.runs()).expect_err("bad");
        assert!(!matches!(error, MethodError::Library { .. }), "{error}");
        assert_eq!(place.pages(), vec![CANARY; 16 * PAGE_SIZE], "byte {at}");
    }
    assert!(device.jobs() > 40);
}
