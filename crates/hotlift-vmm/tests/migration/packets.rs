//! Tests `multifd-packet-size` and `multifd-normal-page-ratio`:
//!
//! - packets of any size arrive intact,
//! - no page is counted twice,
//! - a peer that cannot read the packets reports it before any page is sent.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;

use hotlift::options::StreamOptions;
use hotlift::options::ZERO_PAGE_DETECTION;
use hotlift::{Address, Options};
use hotlift_methods::selections;
use hotlift_testkit::alone;
use hotlift_vmm::GuestSettings;

use crate::probe::Quirks;
use crate::rig::{self, settings};

fn options(given: &[(&str, &str)]) -> Options {
    let mut options = Options {
        stream: StreamOptions {
            max_bandwidth: 0,
            ..StreamOptions::default()
        },
        ..Options::default()
    };
    for (name, value) in given {
        options.set(name, value).unwrap();
    }
    options
}

#[test]
fn packets_of_any_size_arrive_intact_in_every_method() {
    alone!();
    let kind = rig::kinds()[0];
    let settings = GuestSettings {
        ram_bytes: 16 << 20,
        ..settings()
    };
    for method in selections() {
        for (size, detection) in [
            ("4K", "multifd"),
            ("28K", "dsa-accel"),
            ("516K", "dsa-accel"),
            ("8M", "multifd"),
            ("8M", "legacy"),
        ] {
            let mut options = options(&[
                ("multifd-compression", method.name),
                ("multifd-packet-size", size),
                ("zero-page-detection", detection),
            ]);
            if options.zero_pages.devices {
                options.set("accel-path", "dsa-model:").unwrap();
            }
            let what = format!("{} {size} {detection}", method.name);
            let source = rig::source(kind, &settings, Quirks::default());
            let destination = rig::destination(kind, &settings, Quirks::default());
            let (listener, to) = rig::listen();
            let ended = rig::migrate(&source, &destination, listener, &to, &options);
            let (sent, _) = ended.arrived(&source, &destination, &what);
            // A packet of one page costs a header of 1344 bytes per page.
            if (method.name, size) == ("none", "4K") {
                let least = sent.normal_pages * (4096 + 1344);
                assert!(sent.transferred_bytes > least, "{what}: {sent:?}");
            }
        }
    }
}

#[test]
fn the_share_of_zero_pages_that_was_asked_for_is_sent_as_normal_pages() {
    alone!();
    let kind = rig::kinds()[0];
    // Pages that the guest may or may not have written by the time of the check.
    let settings = GuestSettings {
        working_set: Some(64 << 10),
        ..settings()
    };
    let written = 16;
    for (detection, _, devices) in ZERO_PAGE_DETECTION {
        let zero_pages = |ratio: u64| {
            let mut options = options(&[
                ("zero-page-detection", detection),
                ("multifd-normal-page-ratio", &ratio.to_string()),
            ]);
            if *devices {
                let path = "dsa-model:fault=50:full=50";
                options.set("accel-path", path).unwrap();
            }
            let source = rig::source(kind, &settings, Quirks::default());
            let destination = rig::destination(kind, &settings, Quirks::default());
            let (listener, to) = rig::listen();
            let ended = rig::migrate(&source, &destination, listener, &to, &options);
            let (sent, _) = ended.arrived(&source, &destination, detection);
            assert!(sent.normal_pages + sent.zero_pages >= settings.ram_bytes / 4096);
            assert!(sent.transferred_bytes > sent.normal_pages * 4096);
            sent.zero_pages
        };
        let all = zero_pages(0);
        assert_eq!(*detection == "none", all == 0);
        let half = zero_pages(50);
        assert!(
            half.abs_diff(all / 2) <= written,
            "{detection}: {half} of {all}"
        );
        assert_eq!(zero_pages(100), 0, "{detection}");
    }
}

/// Answers as a QEMU destination does, without Hotlift's message; returns the bytes received on all its connections.
fn qemu(listener: &TcpListener, connections: usize) -> usize {
    let ping = [8, 0, 2, 0, 4];
    let mut streams = (0..connections).map(|_| listener.accept().unwrap().0);
    let mut main = streams.next().unwrap();
    let channels: Vec<_> = streams.collect();
    let mut seen = Vec::new();
    let mut answered = 0;
    let mut some = [0; 4096];
    while let Ok(read @ 1..) = main.read(&mut some) {
        seen.extend_from_slice(&some[..read]);
        while let Some(at) = seen[answered..].windows(5).position(|w| w == ping)
            && seen.len() >= answered + at + 9
        {
            let value = answered + at + 5;
            let mut pong = vec![0, 2, 0, 4];
            pong.extend_from_slice(&seen[value..value + 4]);
            answered = value + 4;
            main.write_all(&pong).unwrap();
        }
    }
    let mut rest = Vec::new();
    for mut channel in channels {
        let _ = channel.read_to_end(&mut rest);
    }
    rest.len()
}

#[test]
fn a_qemu_is_sent_no_packet_that_it_cannot_read() {
    alone!();
    let kind = rig::kinds()[0];
    let source = rig::source(kind, &settings(), Quirks::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to: Address = format!("tcp:{}", listener.local_addr().unwrap())
        .parse()
        .unwrap();
    let options = options(&[("multifd-packet-size", "1M")]);
    let control = hotlift::Control::new();
    let (outcome, on_channels) = thread::scope(|scope| {
        let qemu = scope.spawn(|| qemu(&listener, 3));
        let outcome = hotlift::migrate(&source, &to, &options, &control, &|_| {});
        (outcome, qemu.join().unwrap())
    });
    let error = outcome.unwrap_err().chain();
    for word in ["multifd-packet-size", "1048576", "524288", "QEMU"] {
        assert!(error.contains(word), "{word} is not in: {error}");
    }
    // The openings of two channels.
    assert_eq!(on_channels, 2 * 64);
    assert!(source.runs());
}
