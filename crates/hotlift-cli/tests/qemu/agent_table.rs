//! The nftables table of an agent: who gets what it redirects, and how long it is there.

use std::fs;
use std::io::{self, ErrorKind, Read};
use std::net::{TcpListener, TcpStream};

use hotlift_testkit::namespace::DESTINATION;
use rustix::process::Signal;

use crate::agent::{Host, Hosts, remove_table, table, text};
use crate::hotlift::Hotlift;
use crate::need;
use crate::vm::until;

/// One of the ports of migrations.
const PORT: u16 = 49152;

/// What the table redirects to, if nothing else is said.
const REDIRECT_PORT: u16 = 16521;

/// Connects from the source to a port of the destination, as a QEMU of root's does.
fn connect(hosts: &Hosts) -> io::Result<TcpStream> {
    let connect = || TcpStream::connect((DESTINATION, PORT));
    hosts.link.source.within(connect).expect("the host")
}

/// Runs `agent run` on the source, which must fail; what it says.
fn cannot_run(hosts: &Hosts, name: &str, config: &str) -> String {
    let file = hosts.folder.path().join(name);
    fs::write(&file, config).expect("a configuration");
    let flag = format!("--config={}", file.display());
    let run = || Hotlift::start(&["agent", "run", &flag]).wait();
    let (status, said) = hosts.link.source.within(run).expect("the host");
    assert!(!status.success(), "{said:?}");
    said.join("\n")
}

/// Gives the agent a new configuration.
fn reload(host: &mut Host<'_>, hosts: &Hosts, config: &str) {
    let file = host.folder.join("agent.toml");
    let text = text(&host.folder, &hosts.source_pki(), config);
    fs::write(&file, text).expect("a configuration");
    host.agent.signal(Signal::HUP);
}

#[test]
fn a_table_that_is_flushed_or_changed_is_put_back() {
    let hosts = need!(Hosts::new());
    let mut source = hosts.source("");
    let made = table(source.namespace).expect("a table");
    for change in [
        "flush ruleset",
        "flush table inet hotlift_agent",
        "delete table inet hotlift_agent",
        "insert rule inet hotlift_agent output accept",
        // As the configuration of Debian's nftables.service does.
        "flush ruleset\ntable inet filter {\n\tchain input {\n\t\ttype filter hook input priority 0\n\t}\n}",
    ] {
        let done = source.namespace.tool_with("nft", &["-f", "-"], change);
        done.expect("nft takes it");
        source.agent.wait_for("it is back");
        let now = table(source.namespace).expect("a table");
        assert_eq!(now, made, "{change}");
    }
    // What others do with tables of theirs is nothing to the agent, nor is a host that loads the same rules itself.
    let flag = format!("--config={}", source.folder.join("agent.toml").display());
    let (status, rules) = Hotlift::start(&["agent", "rules", &flag]).wait();
    assert!(status.success(), "{rules:?}");
    let own = format!("flush ruleset\n{}", rules.join("\n"));
    let others = ["add table inet others", "delete table inet others", &own];
    for change in others {
        let done = source.namespace.tool_with("nft", &["-f", "-"], change);
        done.expect("nft takes it");
    }
    let said = source.end();
    assert_eq!(said.matches("it is back").count(), 5, "{said}");
}

#[test]
fn who_takes_the_port_of_a_killed_agent_gets_no_connection() {
    let hosts = need!(Hosts::new());
    let served = || TcpListener::bind((DESTINATION, PORT)).expect("a port");
    let destination = hosts.link.destination.within(served).expect("the host");
    destination.set_nonblocking(true).expect("a listener");
    for address in ["127.0.0.1", "0.0.0.0", "::"] {
        let source = hosts.source("");
        source.agent.signal(Signal::KILL);
        source.agent.wait();
        // The kernel may close the agent's own socket a moment after its process has ended.
        let bind = || TcpListener::bind((address, REDIRECT_PORT));
        let bound = || hosts.link.source.within(bind).expect("the host").ok();
        let taken = until(|| "the port is free".to_owned(), bound);
        taken.set_nonblocking(true).expect("a listener");
        let error = connect(&hosts).expect_err("nobody answers");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
        for listener in [&taken, &destination] {
            let error = listener.accept().expect_err("no connection came");
            assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
        }
    }
    // The port of an agent is as good as ever.
    let source = hosts.source("");
    let mut stream = connect(&hosts).expect("the agent answers");
    drop(destination);
    let closed = stream.read(&mut [0]);
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    source.end();
}

#[test]
fn where_plaintext_is_refused_the_table_outlives_the_agent_and_a_start_that_fails() {
    let hosts = need!(Hosts::new());
    let host = &hosts.link.source;
    let served = || TcpListener::bind((DESTINATION, PORT)).expect("a port");
    let _destination = hosts.link.destination.within(served).expect("the host");
    for (policy, stays) in [("refuse", true), ("allow", false)] {
        let policy = format!("plaintext = \"{policy}\"\nusers = [\"root\"]\n");
        let failing = format!("{policy}tls = \"/nowhere\"\n");
        let said = cannot_run(&hosts, "failing.toml", &failing);
        assert_eq!(said.contains("the nftables table stays"), stays, "{said}");
        assert_eq!(table(host).is_some(), stays, "after a start that failed");
        assert_eq!(connect(&hosts).is_err(), stays, "no way past the agent");
        remove_table(host);
        let said = cannot_run(&hosts, "bad.toml", &format!("{policy}bandwidth = 1\n"));
        assert!(said.contains("bad configuration"), "{said}");
        assert_eq!(table(host).is_some(), stays, "without a configuration");
        assert_eq!(connect(&hosts).is_err(), stays, "no way past the agent");
        remove_table(host);
    }
    let source = hosts.source("");
    source.agent.signal(Signal::TERM);
    let (status, said) = source.agent.wait();
    assert!(status.success(), "{said:?}");
    assert!(connect(&hosts).is_err(), "no way past the agent");
    remove_table(host);
    assert!(connect(&hosts).is_ok(), "as without an agent");
    remove_table(host);
    // The one that runs has its table back when the next one fails.
    let mut source = hosts.source("");
    let made = table(host).expect("a table");
    let second =
        "plaintext = \"allow\"\nports = \"50000\"\nusers = [\"root\"]\ntls = \"/nowhere\"\n";
    cannot_run(&hosts, "second.toml", second);
    source.agent.wait_for("it is back");
    until(
        || "the table is the first one's".to_owned(),
        || (table(host)? == made).then_some(()),
    );
    source.end();
}

#[test]
fn a_reload_changes_rules_and_log_and_what_is_shown_is_in_force() {
    let hosts = need!(Hosts::new());
    let mut source = hosts.source("");
    let config = "log = \"debug\"\nlisten = \"tcp::17777\"\nports = \"49150-49199\"\n\
                  destinations = [\"192.0.2.0/24\", \"2001:db8::/32\"]";
    // What the file has is compared with what runs: the second time it is no other than the first.
    for _ in 0..2 {
        reload(&mut source, &hosts, config);
        source.agent.wait_for("'listen' needs a restart");
        source.agent.wait_for("was read again");
        assert_eq!(source.ask(&["status"])["listen"], "tcp::16520");
    }
    let made = table(source.namespace).expect("a table");
    for family in ["ip daddr 192.0.2.0/24", "ip6 daddr 2001:db8::/32"] {
        let rule = format!("{family} tcp dport 49150-49199 redirect to :{REDIRECT_PORT}");
        assert!(made.contains(&rule), "{made}");
    }
    drop(connect(&hosts).expect("the agent answers"));
    let line = format!("a connection to {DESTINATION}:{PORT}");
    source.agent.wait_for(&line);
    reload(&mut source, &hosts, "ports = \"16520\"");
    let refused = source.agent.wait_for("was not changed");
    assert!(refused.contains("'ports'"), "{refused}");
    assert_eq!(table(source.namespace), Some(made));
    source.end();
}

#[test]
fn users_are_looked_up_at_each_reload_and_those_that_are_missing_are_named() {
    let hosts = need!(Hosts::new());
    let mut source = hosts.source("");
    let file = source.folder.join("agent.toml");
    let text = text(&source.folder, &hosts.source_pki(), "");
    for (user, number) in [("nobody-of-that-name", None), ("nobody", Some("65534"))] {
        let users = format!("[\"root\", \"{user}\"]");
        fs::write(&file, text.replace("[\"root\"]", &users)).expect("a configuration");
        source.agent.signal(Signal::HUP);
        if number.is_none() {
            source.agent.wait_for("no such users: nobody-of-that-name");
        }
        source.agent.wait_for("was read again");
        let made = table(source.namespace).expect("a table");
        assert_eq!(made.contains("65534"), number.is_some(), "{made}");
    }
    source.end();
}
