//! Tests outages of the link at every step of the handover. Afterwards exactly one guest runs, and its memory has every
//! write.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test prints its progress"
)]

use std::path::{Path, PathBuf};
use std::process::Command;

use hotlift_testkit::case::{BuiltIn, Case, Fault, Kind, Moment, Net, Pair};
use hotlift_testkit::namespace::{End, Message};

/// The steps at which packets are lost, and then the link.
const STEPS: [Moment; 5] = [
    Moment::Switchover,
    Moment::Lost(Message::Pong),
    Moment::Lost(Message::Commit),
    Moment::Lost(Message::RestOfCommit),
    Moment::Lost(Message::Shut),
];

/// Returns the `hotlift` of this build: it is made with the workspace, and by `cargo build -p hotlift-cli`.
fn hotlift() -> PathBuf {
    let folder = Path::new(env!("CARGO_BIN_EXE_campaign")).parent();
    folder.expect("a folder").join("hotlift")
}

/// Runs all cases concurrently, and fails with the problems of any.
fn run(cases: &[Case]) {
    if !rustix::process::geteuid().is_root() {
        hotlift_testkit::skip!("root", "network namespaces need it");
        return;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_campaign"));
    command.arg("--jobs=4").arg("--hotlift").arg(hotlift());
    for case in cases {
        command
            .arg("--case")
            .arg(serde_json::to_string(case).expect("JSON"));
    }
    let output = command.output().expect("it was built");
    let printed = String::from_utf8_lossy(&output.stdout);
    println!("{printed}");
    assert!(
        output.status.success(),
        "{}\n{printed}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Returns a guest over a link of small segments whose kernels drop a closed connection at once.
fn case(number: u64, guest: BuiltIn, vcpus: u8, faults: Vec<Fault>) -> Case {
    Case {
        number,
        seed: number,
        pair: Pair::BuiltIn {
            guest,
            vcpus,
            channels: 2,
            monitored: true,
        },
        net: Net {
            mtu: 540,
            orphan_retries: 1,
            proxy: None,
            slow: Some(8000),
            tls: false,
        },
        faults,
    }
}

fn outages(secs: u64, at: End) {
    let mut cases = Vec::new();
    for vcpus in [1, 8] {
        for moment in STEPS {
            let kind = Kind::LinkDown { secs, at };
            let number = cases.len() as u64;
            let fault = Fault {
                kind,
                moment,
                delay_ms: 0,
            };
            cases.push(case(number, BuiltIn::Threads, vcpus, vec![fault]));
        }
    }
    run(&cases);
}

#[test]
fn an_outage_of_a_second_at_any_step_of_the_handover_leaves_one_guest() {
    outages(1, End::Source);
}

#[test]
fn an_outage_of_three_seconds_at_any_step_of_the_handover_leaves_one_guest() {
    outages(3, End::Destination);
}

#[test]
fn a_process_stopped_around_the_commit_leaves_one_guest() {
    use hotlift_testkit::case::Party;
    let frozen = |number: u64, party| {
        let kind = Kind::Freeze { party, secs: 3 };
        let fault = Fault {
            kind,
            moment: Moment::Switchover,
            delay_ms: number * 20,
        };
        case(number, BuiltIn::Threads, 8, vec![fault])
    };
    let cases: Vec<Case> = (0..6)
        .map(|number| match number % 2 {
            0 => frozen(number, Party::SourceGuest),
            _ => frozen(number, Party::DestinationGuest),
        })
        .collect();
    run(&cases);
}
