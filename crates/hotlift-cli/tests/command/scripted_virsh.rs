//! A shell script that replaces `virsh`. A domain is a folder, a host is a folder of domains, and a migration moves a
//! domain's folder.
//!
//! Like virsh, the script finds domains by ID, then by UUID, then by name. Tests add other behaviour as lines of shell
//! code.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::hotlift::Hotlift;

/// libvirt of the host where the command runs.
pub const HERE: &str = "qemu:///system";

/// The command line is `--quiet --connect URI COMMAND...`, or several commands with `;` as one word; a host's folder has its URI as
/// a name.
const VIRSH: &str = r#"#!/bin/sh
of() { printf %s "$1" | tr -c A-Za-z0-9 _; }
hosts=$(dirname "$0")/hosts
host=$hosts/$(of "$3")
if [ ! -d "$host" ]; then
    echo "error: failed to connect to the hypervisor" >&2
    exit 1
fi
case $4 in
*\;*)
    echo "$4" | tr ';' '\n' | while read -r line; do "$0" "$1" "$2" "$3" $line; done
    exit ;;
esac
shift 3
verb=$1
shift
domain=
there=
flags=" $* "
while [ $# -gt 0 ]; do
    case $1 in
    --domain) domain=$2 ;;
    --desturi) there=$hosts/$(of "$2") ;;
    --downtime) downtime=$2 ;;
    esac
    last=$1
    shift
done
if [ -n "$domain" ]; then
    found=
    for key in id uuid name; do
        for dir in "$host"/*/; do
            [ -z "$found" ] && [ "$(cat "$dir$key" 2>&1)" = "$domain" ] && found=$dir
        done
    done
    if [ -z "$found" ]; then
        echo "error: failed to get domain '$domain'" >&2
        exit 1
    fi
    dir=$found
fi
[ "$verb" != domstats ] && [ -f "$host/on-$verb" ] && . "$host/on-$verb"
case $verb in
list)
    for dir in "$host"/*/; do
        [ -d "$dir" ] || continue
        state=$(cat "$dir/state")
        case $flags/$state in
        *\ --all\ */* | *\ --state-running\ */running | *\ --state-paused\ */paused) ;;
        *) continue ;;
        esac
        case $flags in *\ --persistent\ *) [ -f "$dir/persistent" ] || continue ;; esac
        echo "$(cat "$dir/uuid") $(cat "$dir/name")"
    done ;;
domstate) cat "$dir/state" ;;
domstats)
    found=
    for dir in "$host"/*/; do
        case $last/$(cat "$dir/state") in
        "$(cat "$dir/uuid")"/* | --list-active/running | --list-active/paused) found=1 ;;
        *) continue ;;
        esac
        [ -f "$host/on-domstats" ] && . "$host/on-domstats"
        printf "Domain: '%s'\n  balloon.current=1024\n" "$(cat "$dir/name")"
        # The first time it is being sampled.
        printf '  dirtyrate.calc_status=%s\n  dirtyrate.megabytes_per_second=0\n\n' $([ -f "$dir/asked" ] && echo 2 || echo 1)
        : >"$dir/asked"
    done
    if [ -z "$found" ] && [ "$last" != --list-active ]; then
        echo "error: failed to get domain '$last'" >&2
        exit 1
    fi ;;
nodememstats) echo "free   :  1048576 KiB" ;;
migrate) mv "$dir" "$there" ;;
domjobinfo) exit 1 ;;
migrate-getmaxdowntime) cat "$dir/downtime" ;;
migrate-setmaxdowntime) echo "$downtime" >"$dir/downtime" ;;
esac
exit 0
"#;

/// Hosts with scripted libvirts.
pub struct Hosts {
    folder: TempDir,
}

impl Hosts {
    /// Creates this host, and the hosts of the URIs.
    pub fn new(uris: &[&str]) -> Self {
        let folder = TempDir::new().expect("a folder");
        let this = Self { folder };
        for uri in uris.iter().chain([&HERE]) {
            fs::create_dir_all(this.host(uri)).expect("a host");
        }
        let script = this.folder.path().join("virsh");
        fs::write(&script, VIRSH).expect("a script");
        fs::set_permissions(&script, Permissions::from_mode(0o755)).expect("it can be run");
        this
    }

    fn host(&self, uri: &str) -> PathBuf {
        let is_word = |letter: char| letter.is_ascii_alphanumeric();
        let name: String = uri
            .chars()
            .map(|letter| if is_word(letter) { letter } else { '_' })
            .collect();
        self.folder.path().join("hosts").join(name)
    }

    /// Creates a domain here with an ID, a name, and a UUID that ends in the same number.
    pub fn domain(&self, id: u32, name: &str, state: &str) {
        let folder = self.host(HERE).join(id.to_string());
        fs::create_dir(&folder).expect("a domain");
        let uuid = format!("00000000-0000-4000-8000-{id:012}");
        for (key, value) in [("id", &*id.to_string()), ("uuid", &uuid)] {
            fs::write(folder.join(key), format!("{value}\n")).expect("a key");
        }
        fs::write(folder.join("name"), format!("{name}\n")).expect("its name");
        fs::write(folder.join("state"), format!("{state}\n")).expect("its state");
        fs::write(folder.join("downtime"), "300\n").expect("its limit");
    }

    /// Defines the domain with this ID here, too.
    pub fn define(&self, id: u32) {
        let path = self.host(HERE).join(id.to_string()).join("persistent");
        fs::write(path, "").expect("a definition");
    }

    /// Sets the shell lines that `virsh` runs at a host before a command: `$dir` is the folder of the domain, `$there` that of
    /// the other host. For `domstats`, they run before the output of each domain.
    pub fn on(&self, uri: &str, command: &str, lines: &str) {
        let path = self.host(uri).join(format!("on-{command}"));
        fs::write(path, lines).expect("a script");
    }

    /// Returns the content of a domain's file at a host.
    pub fn of(&self, uri: &str, id: u32, file: &str) -> String {
        let path = self.host(uri).join(id.to_string()).join(file);
        fs::read_to_string(path).expect("a file")
    }

    /// Returns true if a domain at a host has this file.
    pub fn has(&self, uri: &str, id: u32, file: &str) -> bool {
        self.host(uri).join(id.to_string()).join(file).exists()
    }

    /// Returns the names of a host's domains.
    pub fn names(&self, uri: &str) -> Vec<String> {
        let entries = fs::read_dir(self.host(uri)).expect("a host");
        let name = |path: &Path| fs::read_to_string(path.join("name")).ok();
        let names = entries.filter_map(|entry| name(&entry.expect("an entry").path()));
        let mut names: Vec<_> = names
            .map(|name| name.trim_end_matches('\n').to_owned())
            .collect();
        names.sort();
        names
    }

    /// Runs `hotlift` with this `virsh`; returns its exit code and all output.
    pub fn hotlift(&self, args: &[&str]) -> (Option<i32>, String) {
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("{}:{path}", self.folder.path().display());
        let (status, output) = Hotlift::start_with(args, &[("PATH", &path)]).wait();
        (status.code(), output.join("\n"))
    }
}
