//! Tests `hotlift migrate --domain`. It uses only the destination's agent, and no firewall rule.

use hotlift_testkit::libvirt::{Domain, Host, Hosts};
use hotlift_testkit::namespace::End;
use hotlift_testkit::pki::Pki;
use hotlift_testkit::process::Process;
use rustix::process::Signal;

use crate::agents::{Agent, carries, end};
use crate::{
    DEADLINE, HOTLIFT, MEDIUM_MBITS, MOST, SLOW_MBITS, UNSAFE, domain, downtime_limit, hosts,
    is_at, is_low, other, until,
};

/// Configuration of an agent that redirects nothing.
const BARE: &str = "redirect = false";

/// Starts `hotlift migrate --domain` from a host; a host's certificates are created with its agent.
fn migrate(hosts: &Hosts, from: &Host, to: &Host, domain: &Domain, flags: &[&str]) -> Process {
    let tls = hosts.folder().join(format!("{}.hotlift", from.name()));
    let (name, to) = (
        format!("--domain={}", domain.name),
        format!("--to={}", to.uri()),
    );
    let tls = format!("--tls={}", tls.display());
    let mut line = vec!["migrate", &name, &to, &tls];
    line.extend(flags);
    line.extend(["--", UNSAFE]);
    from.start(HOTLIFT, &line).expect("hotlift starts")
}

/// Returns the exit code and all output of a command.
fn ended(mut command: Process) -> (Option<i32>, String) {
    command.wait(DEADLINE).expect("it ends");
    command.read_last_output();
    (command.exit_code(), command.output_lines().join("\n"))
}

fn agents<'a>(hosts: &'a Hosts) -> [Agent<'a>; 2] {
    agents_with(hosts, BARE)
}

fn agents_with<'a>(hosts: &'a Hosts, config: &str) -> [Agent<'a>; 2] {
    let pki = Pki::new();
    [&hosts.source, &hosts.destination].map(|host| Agent::start(hosts, host, &pki, config))
}

#[test]
fn a_domain_moves_by_the_ports_that_the_agents_allow() {
    let Some(hosts) = hosts() else { return };
    let agents = agents_with(&hosts, &format!("{BARE}\nports = \"50000-50063\""));
    let one = domain(&hosts, "web1");
    let (source, destination) = (&hosts.source, &hosts.destination);
    let (code, output) = ended(migrate(&hosts, source, destination, &one, &[]));
    assert_eq!(code, Some(1), "{output}");
    assert!(
        output.contains("its port is none of 50000-50063"),
        "{output}"
    );
    let flags = ["--ports=50010-50040"];
    let (code, output) = ended(migrate(&hosts, source, destination, &one, &flags));
    assert_eq!(code, Some(0), "{output}");
    is_at(&hosts, End::Destination, &one);
    end(agents);
}

#[test]
fn a_domain_moves_by_loopback_and_the_agent_there_and_back() {
    let Some(hosts) = hosts() else { return };
    let agents = agents(&hosts);
    let one = domain(&hosts, "web1");
    let ways: [&[&str]; 2] = [&["--json"], &["--parallel=3", "--method=zstd", "--json"]];
    let mut from = End::Source;
    for flags in ways {
        let (here, there) = (hosts.host(from), hosts.host(other(from)));
        let (code, output) = ended(migrate(&hosts, here, there, &one, flags));
        assert_eq!(code, Some(0), "{output}");
        assert!(output.contains(r#""normal_pages":"#), "{output}");
        assert!(output.contains(r#""total-ms":"#), "{output}");
        from = other(from);
        is_at(&hosts, from, &one);
    }
    for agent in &agents {
        agent.has_carried(1);
    }
    end(agents);
}

#[test]
fn a_domain_stays_when_its_migration_is_interrupted() {
    let Some(hosts) = hosts() else { return };
    let agents = agents(&hosts);
    let one = domain(&hosts, "web1");
    hosts.limit(SLOW_MBITS).expect("a slow link");
    let flags = ["--parallel=2"];
    let (source, destination) = (&hosts.source, &hosts.destination);
    let command = migrate(&hosts, source, destination, &one, &flags);
    carries(&agents[1]);
    source.signal(&command, Signal::INT).expect("it runs");
    let (code, output) = ended(command);
    assert_eq!(code, Some(130), "{output}");
    is_at(&hosts, End::Source, &one);
    end(agents);
}

#[test]
fn a_domain_stays_when_the_agent_is_killed_or_missing() {
    let Some(hosts) = hosts() else { return };
    let [at_source, at_destination] = agents(&hosts);
    let one = domain(&hosts, "web1");
    hosts.limit(SLOW_MBITS).expect("a slow link");
    let (source, destination) = (&hosts.source, &hosts.destination);
    // Without multifd: QEMU 7.2 may fail an assertion when its channels break early (docs/libvirt.md).
    let command = migrate(&hosts, source, destination, &one, &[]);
    carries(&at_destination);
    at_destination.kill();
    let (code, output) = ended(command);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("the domain stayed here: "), "{output}");
    until("the guest is at the source alone", || {
        matches!(hosts.guest_location(&one), Ok(End::Source)).then_some(())
    });
    is_at(&hosts, End::Source, &one);
    let command = migrate(&hosts, source, destination, &one, &[]);
    let (code, output) = ended(command);
    assert_eq!(code, Some(1), "{output}");
    assert!(
        output.contains("cannot reach the agent at tcp:b:16520"),
        "{output}"
    );
    is_at(&hosts, End::Source, &one);
    at_source.end();
}

#[test]
fn the_downtime_limit_is_low_and_libvirt_restores_it_when_the_command_is_killed() {
    let Some(hosts) = hosts() else { return };
    let agents = agents(&hosts);
    let one = domain(&hosts, "web1");
    hosts.limit(SLOW_MBITS).expect("a slow link");
    let (source, destination) = (&hosts.source, &hosts.destination);
    let flags = ["--method=none"];
    let command = migrate(&hosts, source, destination, &one, &flags);
    is_low(&hosts, &one);
    source.signal(&command, Signal::KILL).expect("it runs");
    until("the limit is the domain's", || {
        (downtime_limit(source, &one) == MOST).then_some(())
    });
    is_at(&hosts, End::Source, &one);
    hosts.limit(MEDIUM_MBITS).expect("a faster link");
    let flags = ["--method=none", "--downtime-limit=150", "--json"];
    let command = migrate(&hosts, source, destination, &one, &flags);
    let (code, output) = ended(command);
    assert_eq!(code, Some(0), "{output}");
    println!("{output}");
    assert!(output.contains(r#""most_ms":150,"#), "{output}");
    assert!(output.contains(", downtime-limit 4 of 150 ms"), "{output}");
    is_at(&hosts, End::Destination, &one);
    assert_eq!(downtime_limit(destination, &one), MOST);
    end(agents);
}
