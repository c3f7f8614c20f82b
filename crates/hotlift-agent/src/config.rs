//! The agent's configuration: one TOML file. Every key is a field of [`Config`], and every field a key.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hotlift::Address;
use hotlift::options::{Limits, MAX_SILENCE_TIMEOUT, OptionError, Options, StreamOptions};
use hotlift_mem::FileError;
use serde::{Deserialize, Serialize};

use crate::values::{Bandwidth, HostPort, Ports, Prefix, Time};

/// Default configuration file.
pub const CONFIG_FILE: &str = "/etc/hotlift/agent.toml";

/// Default port of agents: near libvirt's 16509 and 16514, and outside of the range of migration ports.
pub const AGENT_PORT: u16 = 16520;

/// Size limit of the configuration file, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Errors of the configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is too large.
    #[error("{} has more than {MAX_FILE} bytes", file.display())]
    TooLong {
        /// The file.
        file: PathBuf,
    },
    /// An invalid key or value.
    #[error("{} line {line}, {key}: {problem}", file.display())]
    Key {
        /// The file.
        file: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The key, or other text found at its position.
        key: String,
        /// The problem, and the allowed values.
        problem: String,
    },
    /// Values of several keys that contradict each other.
    #[error("{}: {key}: {problem}", file.display())]
    Together {
        /// The file.
        file: PathBuf,
        /// One of the keys that contradict each other.
        key: &'static str,
        /// The problem, and the allowed values.
        problem: String,
    },
}

impl ConfigError {
    /// Returns true if the file does not exist.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::File(file) if file.is_missing())
    }
}

/// Treatment of connections to a host without an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Plaintext {
    /// The agent forwards these connections unencrypted.
    Allow,
    /// The agent closes these connections.
    Refuse,
}

/// Log level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogLevel {
    /// Errors.
    Error,
    /// Errors and warnings.
    Warning,
    /// Also each state of each migration.
    Info,
    /// Also each connection.
    Debug,
}

/// The configuration keys.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// Listening address for other agents: `tcp:HOST:PORT`; an empty HOST means all addresses.
    pub listen: String,
    /// Port at which the agents of other hosts listen.
    pub agent_port: u16,
    /// Agents that do not listen at the destination's own address: address or prefix of the destination = `"HOST[:PORT]"`.
    pub peers: BTreeMap<Prefix, HostPort>,
    /// Timeout for connecting to another agent; after it, the other host counts as one without an agent.
    pub agent_timeout: Time,
    /// Treatment of connections to a host without an agent: "refuse" or "allow".
    pub plaintext: Plaintext,
    /// True if the agent redirects this host's migrations to itself with its own nftables table.
    pub redirect: bool,
    /// Loopback port to which migrations are redirected.
    pub redirect_port: u16,
    /// Migration ports: connections to them are redirected, and another agent may request connections to them.
    pub ports: Ports,
    /// Users whose connections are redirected, by name or number. Names unknown on the host are skipped.
    pub users: Vec<String>,
    /// Addresses and prefixes to which connections are redirected; empty means all.
    pub destinations: Vec<Prefix>,
    /// Certificate folder; empty means the first default folder that has certificates.
    pub tls: PathBuf,
    /// Patterns for the certificate names of other agents, as in `tls-authz`; empty allows every certificate of the CA.
    pub authz: Vec<String>,
    /// Longest silence of another host before the switchover, and of either end of a tunnel. Zero means the kernel's own limit.
    pub silence_timeout: Time,
    /// Compression method of pages: "auto", or a method from `hotlift methods`.
    pub method: String,
    /// Connections of a migration between two agents, 1 to 255.
    pub channels: u8,
    /// Bytes a second that the agent may send from this host, including tunnels, as in "100M"; "0" is unlimited.
    pub max_bandwidth: Bandwidth,
    /// Cores that all outgoing migrations together may use for compression; 0 is unlimited.
    pub cpu_limit: f64,
    /// Limit of concurrent outgoing migrations; 0 is unlimited. More migrations must wait.
    pub migrations: u32,
    /// Weights for the shares of bandwidth and cores, by destination: address or prefix = 1 to 1000; the default is 100.
    pub weights: BTreeMap<Prefix, u32>,
    /// Longest time that running migrations may continue after a signal to end the agent; then they are cancelled.
    pub drain_limit: Time,
    /// Path of the agent's control socket.
    pub control: PathBuf,
    /// Loopback address and port of the metrics for Prometheus; empty for none.
    pub metrics: String,
    /// Log level: "error", "warning", "info" or "debug".
    pub log: LogLevel,
}

/// Limit of channels that a relay accepts from a QEMU or from another agent. This is the maximum of the key `channels`, and of
/// libvirt's `--parallel-connections`.
pub const MAX_CHANNELS: u8 = u8::MAX;

/// Default weight of a migration.
pub const WEIGHT: u32 = 100;

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: format!("tcp::{AGENT_PORT}"),
            agent_port: AGENT_PORT,
            peers: BTreeMap::new(),
            agent_timeout: Time(Duration::from_secs(5)),
            plaintext: Plaintext::Refuse,
            redirect: true,
            redirect_port: AGENT_PORT + 1,
            // libvirt's migration_port_min and migration_port_max.
            ports: Ports {
                first: 49152,
                last: 49215,
            },
            // QEMU's user on Debian and on Fedora. Also root: without multifd, libvirtd makes the connection for QEMU.
            users: ["libvirt-qemu", "qemu", "root"].map(str::to_owned).to_vec(),
            destinations: Vec::new(),
            tls: PathBuf::new(),
            authz: Vec::new(),
            silence_timeout: Time(Limits::default().silence_timeout),
            method: "auto".to_owned(),
            channels: 4,
            max_bandwidth: Bandwidth(0),
            cpu_limit: 0.0,
            migrations: 8,
            weights: BTreeMap::new(),
            drain_limit: Time(Duration::from_secs(300)),
            control: PathBuf::from("/run/hotlift/agent.sock"),
            metrics: "127.0.0.1:16522".to_owned(),
            log: LogLevel::Info,
        }
    }
}

/// Returns the content of `file`; an error if `file` exceeds [`MAX_FILE`].
fn text_of(file: &Path) -> Result<String, ConfigError> {
    let read = FileError::reading(file);
    if std::fs::metadata(file).map_err(read)?.len() > MAX_FILE {
        return Err(ConfigError::TooLong {
            file: file.to_owned(),
        });
    }
    Ok(std::fs::read_to_string(file).map_err(read)?)
}

impl Config {
    /// Reads and checks the configuration in `file`.
    ///
    /// # Errors
    /// [`ConfigError`] if `file` cannot be read, is too large, or has an invalid key or value.
    pub fn read(file: &Path) -> Result<Self, ConfigError> {
        Self::of_text(file, &text_of(file)?)
    }

    /// Parses and checks `text`, the content of `file`.
    ///
    /// # Errors
    /// [`ConfigError`] for the first invalid key or value, with its line if `text` contains the key.
    pub fn of_text(file: &Path, text: &str) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let place = error.span().map_or(0, |span| span.start.min(text.len()));
            let (line, key) = place_of(text, place);
            ConfigError::Key {
                file: file.to_owned(),
                line,
                key,
                problem: without_rust_types(
                    &error.message().lines().collect::<Vec<_>>().join("; "),
                ),
            }
        })?;
        config.check(file, text)?;
        Ok(config)
    }

    /// Reads `file` again for an agent that runs with the configuration `running`. Keys that need a restart keep their values
    /// of `running`. Also returns the names of these keys if `file` changes their values.
    ///
    /// # Errors
    /// [`ConfigError`] if `file` is invalid, or if its new values contradict the kept values.
    pub fn read_again(
        file: &Path,
        running: &Self,
    ) -> Result<(Self, Vec<&'static str>), ConfigError> {
        let mut config = Self::read(file)?;
        let kept = config.keep_fixed(running);
        config.check(file, "")?;
        Ok((config, kept))
    }

    /// Reads an invalid configuration file: takes its valid keys, and defaults for all other keys.
    #[must_use]
    pub fn of_good_keys(file: &Path) -> Self {
        let text = text_of(file).unwrap_or_default();
        let keys: toml::Table = toml::from_str(&text).unwrap_or_default();
        let (mut good, mut config) = (toml::Table::new(), Self::default());
        for (key, value) in keys {
            let mut more = good.clone();
            more.insert(key, value);
            match more.clone().try_into::<Self>() {
                Ok(read) if read.problem().is_none() => (good, config) = (more, read),
                _ => {}
            }
        }
        config
    }

    fn check(&self, file: &Path, text: &str) -> Result<(), ConfigError> {
        let Some((key, problem)) = self.problem() else {
            return Ok(());
        };
        Err(match line_of(text, key) {
            Some(line) => ConfigError::Key {
                file: file.to_owned(),
                line,
                key: key.to_owned(),
                problem,
            },
            None => ConfigError::Together {
                file: file.to_owned(),
                key,
                problem,
            },
        })
    }

    /// Returns the first invalid key and the problem; `None` if all are valid. A key can also be invalid together with other
    /// keys.
    fn problem(&self) -> Option<(&'static str, String)> {
        let wrong = |key, problem: &str| Some((key, problem.to_owned()));
        let port = match self.listen.parse::<Address>() {
            Ok(Address::Tcp { port, .. }) => port,
            _ => return wrong("listen", "expected \"tcp:HOST:PORT\""),
        };
        let (first, last) = (self.ports.first, self.ports.last);
        for (key, port) in [
            ("listen", port),
            ("agent-port", self.agent_port),
            ("redirect-port", self.redirect_port),
        ] {
            if self.ports.contains(port) {
                let problem =
                    format!("port {port} is in the range of migrations, {first}-{last} ('ports')");
                return Some((key, problem));
            }
        }
        let ports = self.peers.values().filter_map(|peer| peer.port);
        if let Some(port) = ports.into_iter().find(|port| self.ports.contains(*port)) {
            let problem =
                format!("port {port} is in the range of migrations, {first}-{last} ('ports')");
            return Some(("peers", problem));
        }
        if self.redirect_port == port {
            return wrong("redirect-port", "'listen' has the same port");
        }
        if self.redirect && self.users.is_empty() {
            return wrong(
                "users",
                "no user's connections are redirected: name a user, or set redirect = false",
            );
        }
        if !self.metrics.is_empty() {
            match self.metrics.parse::<SocketAddr>() {
                Ok(address) if address.ip().is_loopback() => {}
                _ => {
                    return wrong(
                        "metrics",
                        "expected a loopback address as in \"127.0.0.1:16522\", or \"\"",
                    );
                }
            }
        }
        if !(0.0..=4096.0).contains(&self.cpu_limit) {
            return wrong("cpu-limit", "expected cores, 0 to 4096");
        }
        if self
            .weights
            .values()
            .any(|weight| !(1..=1000).contains(weight))
        {
            return wrong("weights", "expected 1 to 1000");
        }
        if self.silence_timeout.0 > MAX_SILENCE_TIMEOUT {
            return wrong("silence-timeout", "expected \"0s\" to \"24h\"");
        }
        if self.channels == 0 {
            return wrong("channels", "expected 1 to 255");
        }
        match self.options() {
            Ok(_) => None,
            Err(error) => Some(("method", hotlift::error::error_line(&error))),
        }
    }

    /// Returns the stream options of outgoing migrations.
    ///
    /// # Errors
    /// If the compression method is unknown.
    pub fn options(&self) -> Result<StreamOptions, OptionError> {
        let options = stream(self.channels, &self.method)?;
        options.check()?;
        Ok(options)
    }

    /// Returns the limits of all relays of the agent, incoming and outgoing.
    pub(crate) fn limits(&self) -> Limits {
        Limits {
            max_channels: MAX_CHANNELS,
            silence_timeout: self.silence_timeout.0,
            ..Limits::default()
        }
    }

    /// Returns the address at which the agent of the host `address` listens: from `peers`, or else `address` itself.
    #[must_use]
    pub fn agent_of(&self, address: IpAddr) -> Address {
        let peer = longest(&self.peers, address);
        Address::Tcp {
            host: peer.map_or_else(|| address.to_string(), |peer| peer.host.clone()),
            port: peer.and_then(|peer| peer.port).unwrap_or(self.agent_port),
        }
    }

    /// Returns the address at which the agent of `host` (a name or an address) listens. The key `peers` has precedence; the
    /// default is `host` itself.
    #[must_use]
    pub fn agent_of_host(&self, host: &str) -> Address {
        // If the name is unknown, the later connect fails with an error.
        let addresses = (host, self.agent_port).to_socket_addrs();
        let mut addresses = addresses.into_iter().flatten().map(|address| address.ip());
        let named = addresses.find(|address| self.names_agent_of(*address));
        named.map_or_else(
            || Address::Tcp {
                host: host.to_owned(),
                port: self.agent_port,
            },
            |address| self.agent_of(address),
        )
    }

    /// Returns true if the key `peers` names an agent for the host `address`.
    #[must_use]
    pub fn names_agent_of(&self, address: IpAddr) -> bool {
        longest(&self.peers, address).is_some()
    }

    /// Returns the weight of a migration to `address`.
    #[must_use]
    pub fn weight_of(&self, address: IpAddr) -> u32 {
        longest(&self.weights, address).copied().unwrap_or(WEIGHT)
    }

    /// Sets the keys that need a restart to the values of `running`. Returns the names of the keys that differed.
    pub fn keep_fixed(&mut self, running: &Self) -> Vec<&'static str> {
        fn keep<T: Clone + PartialEq>(value: &mut T, running: &T) -> bool {
            let differs = value != running;
            value.clone_from(running);
            differs
        }
        let changed = [
            ("listen", keep(&mut self.listen, &running.listen)),
            ("redirect", keep(&mut self.redirect, &running.redirect)),
            (
                "redirect-port",
                keep(&mut self.redirect_port, &running.redirect_port),
            ),
            ("tls", keep(&mut self.tls, &running.tls)),
            ("authz", keep(&mut self.authz, &running.authz)),
            ("control", keep(&mut self.control, &running.control)),
            ("metrics", keep(&mut self.metrics, &running.metrics)),
        ];
        let changed = changed.into_iter().filter(|(_, changed)| *changed);
        changed.map(|(key, _)| key).collect()
    }
}

/// Returns the value of the longest prefix in `of` that contains `address`; `None` if no prefix does.
fn longest<T>(of: &BTreeMap<Prefix, T>, address: IpAddr) -> Option<&T> {
    let contain = of.iter().filter(|(prefix, _)| prefix.contains(address));
    let longest = contain.max_by_key(|(prefix, _)| prefix.length());
    longest.map(|(_, value)| value)
}

/// Returns `message`, an error message of serde, with the names of Rust's types replaced.
fn without_rust_types(message: &str) -> String {
    const WORDS: [(&str, &str); 10] = [
        ("expected u8", "expected a whole number from 0 to 255"),
        ("expected u16", "expected a whole number from 0 to 65535"),
        (
            "expected u32",
            "expected a whole number from 0 to 4294967295",
        ),
        ("expected f64", "expected a number"),
        ("expected a boolean", "expected true or false"),
        (
            "expected a sequence",
            "expected a list, as in [\"a\", \"b\"]",
        ),
        ("expected a map", "expected a table, as [peers]"),
        ("floating point", "number"),
        ("unknown field", "unknown key"),
        ("unknown variant", "unknown value"),
    ];
    // Replaces whole names only: "u8" may also begin a longer name.
    let mut text = message.to_owned();
    for (name, words) in WORDS {
        let is_whole = |at: usize| !text[at + name.len()..].starts_with(char::is_alphanumeric);
        if let Some(at) = text.find(name).filter(|at| is_whole(*at)) {
            text.replace_range(at..at + name.len(), words);
        }
    }
    text
}

/// Returns the number (from 1) of the line at byte `place` of `text`, and the key in this line.
fn place_of(text: &str, place: usize) -> (usize, String) {
    let before = text.get(..place).unwrap_or(text);
    let number = before.matches('\n').count() + 1;
    let line = text.lines().nth(number - 1).unwrap_or_default();
    let key = line.split('=').next().unwrap_or_default();
    (number, key.trim().to_owned())
}

/// Returns the number (from 1) of the line of `text` that sets `key` or begins the table `[key]`; `None` if there is none.
fn line_of(text: &str, key: &str) -> Option<usize> {
    let table = format!("[{key}]");
    let sets = |line: &str| line.split('=').next().is_some_and(|it| it.trim() == key);
    let mut lines = text.lines();
    let place = lines.position(|line| sets(line) || line.trim() == table)?;
    Some(place + 1)
}

/// Returns the options of a relay's outgoing stream, with `channels` channels and compression method `method`. The options do
/// not limit the bandwidth.
///
/// # Errors
/// If the method is unknown.
pub(crate) fn stream(channels: u8, method: &str) -> Result<StreamOptions, OptionError> {
    let mut options = Options::default();
    options.set("multifd-compression", method)?;
    Ok(StreamOptions {
        multifd: Some(channels > 0),
        multifd_channels: channels.max(1),
        max_bandwidth: 0,
        ..options.stream
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Config, String> {
        let config = Config::of_text(Path::new("agent.toml"), text);
        config.map_err(|error| hotlift::error::error_line(&error))
    }

    #[test]
    fn an_empty_file_means_the_defaults() {
        assert_eq!(of(""), Ok(Config::default()));
    }

    #[test]
    fn a_wrong_key_or_value_is_named_with_its_line_and_what_is_allowed() {
        for (text, line, words) in [
            (
                "log = \"info\"\nbandwidth = 1\n",
                2,
                "unknown key `bandwidth`",
            ),
            ("\nplaintext = \"maybe\"\n", 2, "`allow` or `refuse`"),
            ("ports = \"1-\"\n", 1, "49152-49215"),
            ("max-bandwidth = \"fast\"\n", 1, "bytes a second"),
            ("max-bandwidth = 5\n", 1, "expected a string"),
            ("channels = 300\n", 1, "from 0 to 255"),
            ("channels = -1\n", 1, "from 0 to 255"),
            ("agent-port = 70000\n", 1, "from 0 to 65535"),
            ("migrations = -1\n", 1, "from 0 to 4294967295"),
            ("cpu-limit = \"2\"\n", 1, "expected a number"),
            ("redirect = 1\n", 1, "true or false"),
            ("users = \"root\"\n", 1, "expected a list, as in"),
            ("peers = 5\n", 1, "expected a table"),
            ("ports = \"22\"\n", 1, "from 1024 on"),
            ("ports = \"22-49215\"\n", 1, "from 1024 on"),
            ("method = \"gzip\"\n", 1, "zstd"),
            ("channels = 0\n", 1, "1 to 255"),
            ("silence-timeout = \"2days\"\n", 1, "\"0s\" to \"24h\""),
            ("metrics = \"192.0.2.1:1\"\n", 1, "loopback"),
            ("listen = \"unix:/x\"\n", 1, "tcp:HOST:PORT"),
            ("agent-port = 49160\n", 1, "'ports'"),
            ("[peers]\n\"192.0.2.300\" = \"a\"\n", 2, "prefix"),
            ("[peers]\n\"192.0.2.3\" = \"a:49160\"\n", 1, "'ports'"),
            ("[weights]\n\"192.0.2.3\" = 0\n", 1, "1 to 1000"),
            ("destinations = [\"b.example\"]\n", 1, "prefix"),
            ("users = []\n", 1, "redirect = false"),
            ("log = \n", 1, "log"),
        ] {
            let error = of(text).expect_err(text);
            assert!(
                error.starts_with(&format!("agent.toml line {line}, ")),
                "{text}: {error}"
            );
            assert!(error.contains(words), "{text}: {error}");
            assert!(!error.contains('\n'), "{text}: {error}");
            let types = [
                "u8", "u16", "u32", "f64", "sequence", "map,", "variant", "field",
            ];
            let is_type = |word: &str| types.contains(&word);
            assert!(!error.split([' ', ',']).any(is_type), "{text}: {error}");
        }
    }

    #[test]
    fn good_keys_of_a_bad_file_are_applied() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("agent.toml");
        let of = |text: &str| {
            std::fs::write(&file, text).unwrap();
            Config::of_good_keys(&file)
        };
        let config = of("plaintext = \"allow\"\nports = \"50000\"\nbandwidth = 1\nchannels = 0\n");
        let expected = Config {
            plaintext: Plaintext::Allow,
            ports: "50000".parse().unwrap(),
            ..Config::default()
        };
        assert_eq!(config, expected);
        assert_eq!(of("plaintext = "), Config::default());
        std::fs::remove_file(&file).unwrap();
        assert_eq!(Config::of_good_keys(&file), Config::default());
    }

    #[test]
    fn the_longest_prefix_selects_the_agent_and_the_weight() {
        let config = of("agent-port = 5\n[peers]\n\"192.0.2.0/24\" = \"a:7\"\n\"192.0.2.9\" = \"b\"\n[weights]\n\
                         \"192.0.2.0/24\" = 50\n")
        .unwrap();
        let agent = |address: &str| config.agent_of(address.parse().unwrap()).to_string();
        assert_eq!(agent("192.0.2.1"), "tcp:a:7");
        assert_eq!(agent("192.0.2.9"), "tcp:b:5");
        assert_eq!(agent("198.51.100.1"), "tcp:198.51.100.1:5");
        assert_eq!(agent("2001:db8::1"), "tcp:[2001:db8::1]:5");
        let of_host = |host: &str| config.agent_of_host(host).to_string();
        assert_eq!(of_host("192.0.2.9"), "tcp:b:5");
        assert_eq!(of_host("localhost"), "tcp:localhost:5", "its name stays");
        assert_eq!(
            of_host("no-such-host.invalid"),
            "tcp:no-such-host.invalid:5"
        );
        assert_eq!(config.weight_of("192.0.2.1".parse().unwrap()), 50);
        assert_eq!(config.weight_of("198.51.100.1".parse().unwrap()), WEIGHT);
    }

    #[test]
    fn the_silence_timeout_defaults_to_that_of_the_commands() {
        let timeout = |text: &str| of(text).unwrap().limits().silence_timeout;
        assert_eq!(timeout(""), Limits::default().silence_timeout);
        let minutes = Duration::from_secs(300);
        assert_eq!(timeout("silence-timeout = \"5m\""), minutes);
        assert_eq!(timeout("silence-timeout = \"0s\""), Duration::ZERO);
    }

    #[test]
    fn keys_that_need_a_restart_are_named() {
        let mut new = of("control = \"/x\"\nchannels = 2\n").unwrap();
        assert_eq!(new.keep_fixed(&Config::default()), ["control"]);
        assert_eq!(new, of("channels = 2\n").unwrap());
    }

    #[test]
    fn a_reload_refuses_a_value_that_conflicts_with_one_in_force() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("agent.toml");
        // Valid by itself, since 'listen' moves its port, too.
        std::fs::write(
            &file,
            "listen = \"tcp::5\"\nagent-port = 5\nports = \"16520\"\n",
        )
        .unwrap();
        Config::read(&file).unwrap();
        let error = Config::read_again(&file, &Config::default()).unwrap_err();
        let error = hotlift::error::error_line(&error);
        assert!(
            error.contains("listen: port 16520 is in the range of migrations"),
            "{error}"
        );
    }
}
