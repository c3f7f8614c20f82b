//! Tests migrations to a libvirtd with a `qemu+ssh` URI, as operators use it.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use hotlift_testkit::libvirt::Hosts;
use hotlift_testkit::namespace::End;
use hotlift_testkit::process::Process;

use crate::agents::{both, end};
use crate::{DEADLINE, HOTLIFT, UNSAFE, domain, hosts, is_at};

/// SSH access to the destination: its sshd, and the URI of its libvirtd.
struct Ssh {
    _sshd: Process,
    uri: String,
}

impl Ssh {
    /// Creates separate keys for both sides. The user's SSH files are neither read nor written.
    fn new(hosts: &Hosts) -> Self {
        let there = &hosts.destination;
        let path = |name: &str| hosts.folder().join(name).display().to_string();
        let (key, host_key) = (path("key"), path("host-key"));
        for file in [&key, &host_key] {
            let line = ["-q", "-t", "ed25519", "-N", "", "-f", file];
            there.tool("ssh-keygen", &line).expect("a key");
        }
        let public = fs::read_to_string(path("host-key.pub")).expect("a public key");
        let name = there.name();
        let (known, config, command) = (path("known"), path("ssh.config"), path("ssh"));
        fs::write(&known, format!("{name} {public}")).expect("a known host");
        // The folder is open to all users, which sshd refuses. Bash reads the user's .bashrc when sshd runs it as the outermost
        // shell: one with pyenv waited up to 60 s for a lock there.
        let server = format!(
            "HostKey {host_key}\nAuthorizedKeysFile {key}.pub\nStrictModes no\nPidFile none\nSetEnv SHLVL=1\n"
        );
        fs::write(path("sshd.config"), server).expect("a configuration");
        let client = format!(
            "IdentityFile {key}\nUserKnownHostsFile {known}\nIdentitiesOnly yes\nBatchMode yes\n"
        );
        fs::write(&config, client).expect("a configuration");
        fs::write(
            &command,
            format!("#!/bin/sh\nexec ssh -F {config} \"$@\"\n"),
        )
        .expect("a script");
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&command, executable).expect("a script");
        there.tool("mkdir", &["/run/sshd"]).expect("a folder");
        let line = ["-D", "-e", "-f", &path("sshd.config")];
        let mut sshd = there.start("/usr/sbin/sshd", &line).expect("sshd starts");
        let listens = sshd.wait_for("Server listening on", DEADLINE);
        listens.expect("it listens");
        Self {
            _sshd: sshd,
            uri: format!("qemu+ssh://root@{name}/system?command={command}"),
        }
    }
}

#[test]
fn domains_move_to_a_host_that_is_named_by_ssh() {
    let Some(hosts) = hosts() else { return };
    let ssh = Ssh::new(&hosts);
    let agents = both(&hosts, "");
    let source = &hosts.source;

    let one = domain(&hosts, "web1");
    let line = ["migrate", "--live", UNSAFE, "--parallel", "web1", &ssh.uri];
    source.virsh(&line).expect("it moves");
    is_at(&hosts, End::Destination, &one);

    let two = domain(&hosts, "web2");
    let to = format!("--to={}", ssh.uri);
    let tls = format!("--tls={}", hosts.folder().join("a.hotlift").display());
    let line = [
        "migrate",
        "--domain=web2",
        &to,
        &tls,
        "--quiet",
        "--",
        UNSAFE,
    ];
    source.tool(HOTLIFT, &line).expect("it moves");
    is_at(&hosts, End::Destination, &two);

    let three = domain(&hosts, "web3");
    let line = ["drain", &to, "--quiet", "--", UNSAFE];
    source.tool(HOTLIFT, &line).expect("it moves");
    is_at(&hosts, End::Destination, &three);

    // The migration with `--domain` was announced only to the destination's agent.
    agents[0].has_carried(2);
    agents[1].has_carried(3);
    end(agents);
}
