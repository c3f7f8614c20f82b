//! Tests `hotlift drain`: the domain it selects, and its report of a failed move.

use crate::scripted_virsh::{HERE, Hosts};

const B: &str = "qemu+ssh://b/system";

#[test]
fn a_domain_named_like_the_id_of_another_is_moved_and_the_other_stays() {
    let hosts = Hosts::new(&[B]);
    hosts.domain(101, "other", "running");
    hosts.domain(7, "101", "running");
    let (code, output) = hosts.hotlift(&["drain", "--to=b", "--domain=101"]);
    assert_eq!(code, Some(0), "{output}");
    assert_eq!(hosts.names(B), ["101"], "{output}");
    assert_eq!(hosts.names(HERE), ["other"], "{output}");
}

#[test]
fn persistent_domains_stay_persistent_and_transient_ones_transient() {
    let hosts = Hosts::new(&[B]);
    hosts.domain(1, "defined", "running");
    hosts.define(1);
    hosts.domain(2, "transient", "running");
    hosts.on(HERE, "migrate", r#"echo "$flags" > "$dir/options""#);
    let (code, output) = hosts.hotlift(&["drain", "--to=b"]);
    assert_eq!(code, Some(0), "{output}");
    for (id, is_defined) in [(1, true), (2, false)] {
        let options = hosts.of(B, id, "options");
        for option in ["--persistent", "--undefinesource"] {
            assert_eq!(options.contains(option), is_defined, "{options}");
        }
    }
}

/// Drains one domain whose migration fails after `lines` of the shell.
fn failed(lines: &str) -> (Option<i32>, String) {
    let hosts = Hosts::new(&[B]);
    hosts.domain(1, "web1", "running");
    let lines = format!("{lines}\necho 'error: it failed' >&2\nexit 1");
    hosts.on(HERE, "migrate", &lines);
    hosts.hotlift(&["drain", "--to=b"])
}

#[test]
fn a_domain_that_runs_on_both_hosts_is_not_reported_as_stayed() {
    let (code, output) = failed(r#"cp -r "$dir" "$there""#);
    assert_eq!(code, Some(3), "{output}");
    assert!(output.contains("it runs on both hosts"), "{output}");
}

#[test]
fn a_domain_that_libvirt_does_not_list_is_not_taken_to_be_gone() {
    // A broken connection, or a domain without permission: virsh prints the same for both.
    let refuse = "echo \"error: failed to get domain '$domain'\" >&2; exit 1";
    let lines = format!(
        "cp -r \"$dir\" \"$there\"; echo '{refuse}' > \"$host/on-domstate\"",
        refuse = refuse.replace('\'', r"'\''")
    );
    let (code, output) = failed(&lines);
    assert_eq!(code, Some(3), "{output}");
    assert!(output.contains("here it is unknown"), "{output}");
}

#[test]
fn a_domain_that_ends_while_it_moves_is_reported_as_ended() {
    let (code, output) = failed(r#"rm -r "$dir""#);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("web1 to b: ended: it failed"), "{output}");
    assert!(output.contains("1 of 1 domains ended"), "{output}");
}

#[test]
fn a_domain_whose_guest_powers_off_while_it_moves_is_ended_once_its_qemu_exits() {
    for ending in ["in shutdown (user)", "paused (shutting down)"] {
        let hosts = Hosts::new(&[B]);
        hosts.domain(1, "web1", "running");
        hosts.define(1);
        let lines = format!(
            "echo '{ending}' > \"$dir/state\"; echo 'error: domain is not running' >&2; exit 1"
        );
        hosts.on(HERE, "migrate", &lines);
        // The first answer is that of a QEMU that has not ended.
        let ends = r#"cat "$dir/state"; echo "shut off (shutdown)" > "$dir/state"; exit"#;
        hosts.on(HERE, "domstate", ends);
        let (code, output) = hosts.hotlift(&["drain", "--to=b"]);
        assert_eq!(code, Some(1), "{ending}: {output}");
        let words = "web1 to b: ended: the guest powered off: domain is not running";
        assert!(output.contains(words), "{ending}: {output}");
        assert!(
            output.contains("1 of 1 domains ended"),
            "{ending}: {output}"
        );
    }
}

const C: &str = "qemu+ssh://c/system";

#[test]
fn a_domain_that_ends_during_planning_is_skipped_and_the_others_move() {
    let hosts = Hosts::new(&[B]);
    hosts.domain(1, "web1", "running");
    hosts.domain(2, "web2", "running");
    let ends = r#"[ "$(cat "$dir/name")" = web1 ] && rm -r "$dir" && exit 1"#;
    hosts.on(HERE, "domstats", ends);
    let (code, output) = hosts.hotlift(&["drain", "--to=b"]);
    assert_eq!(code, Some(0), "{output}");
    assert!(output.contains("skipped web1: it has ended"), "{output}");
    assert_eq!(hosts.names(B), ["web2"], "{output}");
}

#[test]
fn a_domain_that_libvirt_cannot_measure_stays_and_the_others_move() {
    let hosts = Hosts::new(&[B]);
    hosts.domain(1, "web1", "running");
    hosts.domain(2, "web2", "running");
    let refuses = r#"[ "$(cat "$dir/name")" = web1 ] && echo "error: timed out" >&2 && exit 1"#;
    hosts.on(HERE, "domstats", refuses);
    let (code, plan) = hosts.hotlift(&["drain", "--to=b", "--dry-run"]);
    assert_eq!(code, Some(0), "{plan}");
    let of_web2 = plan.lines().find(|line| line.contains("web2"));
    // The command waited for its sample.
    assert!(of_web2.is_some_and(|line| !line.contains('?')), "{plan}");
    let (code, output) = hosts.hotlift(&["drain", "--to=b"]);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("1 of 2 domains stayed"), "{output}");
    assert_eq!(hosts.names(B), ["web2"], "{output}");
}

#[test]
fn an_unreachable_destination_is_skipped_if_another_answers() {
    let hosts = Hosts::new(&[B]);
    hosts.domain(1, "web1", "running");
    let (code, output) = hosts.hotlift(&["drain", "--to=c,b"]);
    assert_eq!(code, Some(0), "{output}");
    assert!(output.contains("skipped c: "), "{output}");
    assert_eq!(hosts.names(B), ["web1"], "{output}");
    hosts.domain(1, "web1", "running");
    let (code, output) = hosts.hotlift(&["drain", "--to=c"]);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains(&format!("libvirt at {C}")), "{output}");
    let (code, output) = hosts.hotlift(&["drain", "--to=c,d"]);
    assert_eq!(code, Some(1), "{output}");
    for uri in [C, "qemu+ssh://d/system"] {
        assert!(output.contains(&format!("libvirt at {uri}: ")), "{output}");
    }
}

#[test]
fn a_missing_local_libvirt_is_named_and_no_destination_is_contacted() {
    let hosts = Hosts::new(&[B]);
    let here = "--connect=qemu:///missing";
    let (code, output) = hosts.hotlift(&["drain", "--to=c,b", here]);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("libvirt at qemu:///missing: "), "{output}");
    assert!(!output.contains("qemu+ssh"), "{output}");
}

#[test]
fn a_paused_domain_is_named_and_the_host_is_not_reported_empty() {
    let hosts = Hosts::new(&[B]);
    hosts.domain(1, "web1", "running");
    hosts.domain(2, "web2", "paused");
    let (code, output) = hosts.hotlift(&["drain", "--to=b"]);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("web2: it is paused here"), "{output}");
    assert_eq!(hosts.names(B), ["web1"], "{output}");
    assert_eq!(hosts.names(HERE), ["web2"], "{output}");
}

#[test]
fn names_are_literal_and_an_unknown_one_stops_the_drain_before_it_starts() {
    let hosts = Hosts::new(&[B]);
    for (id, name) in [(1, "web1"), (2, " a,b "), (3, "a"), (4, "off")] {
        hosts.domain(id, name, if name == "off" { "shut off" } else { "running" });
    }
    let (code, output) = hosts.hotlift(&["drain", "--to=b", "--domain= a,b ", "--domain=wbe1"]);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("no domain is named 'wbe1'"), "{output}");
    assert_eq!(hosts.names(HERE).len(), 4, "{output}");
    let line = ["drain", "--to=b", "--domain= a,b ", "--domain=off"];
    // The second run finds no domain left.
    for _ in 0..2 {
        let (code, output) = hosts.hotlift(&line);
        assert_eq!(code, Some(0), "{output}");
        assert_eq!(hosts.names(B), [" a,b "], "{output}");
    }
}
