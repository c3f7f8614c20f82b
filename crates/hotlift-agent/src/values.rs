//! Types of the configuration's values, each parsed from a TOML string.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::time::Duration;

use hotlift::options::parse_size;
use serde::{Deserialize, Serialize};

/// Error of an invalid value, with the expected form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{got}' is not allowed; expected {expected}")]
pub struct BadValue {
    /// The invalid text.
    pub got: String,
    /// Expected form.
    pub expected: &'static str,
}

/// Implements conversions from and to `String`, which serde uses.
macro_rules! as_text {
    ($($name:ident),*) => {$(
        impl TryFrom<String> for $name {
            type Error = BadValue;

            fn try_from(text: String) -> Result<Self, BadValue> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> Self {
                value.to_string()
            }
        }
    )*};
}

as_text!(Ports, Prefix, Bandwidth, Time, HostPort);

fn bad(got: &str, expected: &'static str) -> BadValue {
    BadValue {
        got: got.to_owned(),
        expected,
    }
}

/// First unprivileged port. Migration ports start here: other agents may request connections to them, so no system service may
/// be among them.
const FIRST_FREE_PORT: u16 = 1024;

/// A range of TCP ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Ports {
    /// First port of the range.
    pub first: u16,
    /// Last port of the range (inclusive).
    pub last: u16,
}

impl Ports {
    /// Returns true if the range contains `port`.
    #[must_use]
    pub fn contains(self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }
}

impl FromStr for Ports {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        match (first.parse(), last.parse()) {
            (Ok(first), Ok(last)) if FIRST_FREE_PORT <= first && first <= last => {
                Ok(Self { first, last })
            }
            _ => Err(bad(text, "ports from 1024 on, as in \"49152-49215\"")),
        }
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// An address prefix: an IP address and a length, as in `192.0.2.0/24`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Prefix {
    address: IpAddr,
    /// Length of the prefix, in bits.
    bits: u8,
}

impl Prefix {
    /// Returns true if the prefix contains `address`.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        let differ = match (self.address, address.to_canonical()) {
            (IpAddr::V4(one), IpAddr::V4(other)) => {
                u128::from(one.to_bits() ^ other.to_bits()) << 96
            }
            (IpAddr::V6(one), IpAddr::V6(other)) => one.to_bits() ^ other.to_bits(),
            _ => return false,
        };
        differ.leading_zeros() >= u32::from(self.bits)
    }

    /// Returns true for an IPv4 prefix.
    #[must_use]
    pub fn is_ipv4(&self) -> bool {
        self.address.is_ipv4()
    }

    /// Returns an address in the prefix that a host may have.
    #[must_use]
    pub fn host(&self) -> IpAddr {
        match self.address {
            IpAddr::V4(address) if self.bits < 31 => {
                Ipv4Addr::from_bits(address.to_bits() | 1).into()
            }
            IpAddr::V6(address) if self.bits < 127 => {
                Ipv6Addr::from_bits(address.to_bits() | 1).into()
            }
            address => address,
        }
    }

    /// Returns the length of the prefix in bits; of all matching prefixes, the longest applies.
    #[must_use]
    pub fn length(&self) -> u8 {
        self.bits
    }
}

impl FromStr for Prefix {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let parse = || {
            let (address, bits) = match text.split_once('/') {
                Some((address, bits)) => (address, Some(bits.parse::<u8>().ok()?)),
                None => (text, None),
            };
            let address: IpAddr = address.parse().ok()?;
            let most = if address.is_ipv4() { 32 } else { 128 };
            let bits = bits.unwrap_or(most);
            (bits <= most).then_some(Self { address, bits })
        };
        parse().ok_or_else(|| {
            bad(
                text,
                "an address or a prefix as in \"192.0.2.0/24\" or \"2001:db8::1\"",
            )
        })
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

/// A bandwidth in bytes a second; 0 is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bandwidth(pub u64);

impl FromStr for Bandwidth {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let size = parse_size(text).map(Self);
        size.ok_or_else(|| bad(text, "bytes a second as in \"100M\"; \"0\" is unlimited"))
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A duration of the configuration, such as "30s".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Time(pub Duration);

impl FromStr for Time {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let time = humantime::parse_duration(text).map(Self);
        time.map_err(|_| bad(text, "a time as in \"30s\" or \"5min\""))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_duration(self.0).fmt(f)
    }
}

/// A host, and a port if it is not the default.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostPort {
    /// Name or address of the host.
    pub host: String,
    /// The port; `None` for the default.
    pub port: Option<u16>,
}

impl FromStr for HostPort {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let parse = || {
            if let Some(v6) = text.strip_prefix('[') {
                let (host, rest) = v6.split_once(']')?;
                let port = match rest {
                    "" => None,
                    rest => Some(rest.strip_prefix(':')?.parse().ok()?),
                };
                return Some((host, port));
            }
            match text.split_once(':') {
                // An IPv6 address without brackets, so without a port.
                Some((_, port)) if port.contains(':') => Some((text, None)),
                Some((host, port)) => Some((host, Some(port.parse().ok()?))),
                None => Some((text, None)),
            }
        };
        match parse() {
            Some((host, port)) if !host.is_empty() => Ok(Self {
                host: host.to_owned(),
                port,
            }),
            _ => Err(bad(text, "\"HOST\", \"HOST:PORT\" or \"[ADDRESS]:PORT\"")),
        }
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.port, self.host.contains(':')) {
            (Some(port), true) => write!(f, "[{}]:{port}", self.host),
            (Some(port), false) => write!(f, "{}:{port}", self.host),
            (None, _) => f.write_str(&self.host),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_contains_the_addresses_that_begin_with_it() {
        let contains = |prefix: &str, address: &str| {
            let prefix: Prefix = prefix.parse().unwrap();
            prefix.contains(address.parse().unwrap())
        };
        assert!(contains("192.0.2.0/24", "192.0.2.9"));
        assert!(contains("192.0.2.0/24", "::ffff:192.0.2.9"));
        assert!(!contains("192.0.2.0/24", "192.0.3.9"));
        assert!(contains("0.0.0.0/0", "198.51.100.1"));
        assert!(!contains("0.0.0.0/0", "2001:db8::1"));
        assert!(contains("2001:db8::/32", "2001:db8:1::1"));
        assert!(contains("2001:db8::1", "2001:db8::1"));
        assert!(!contains("2001:db8::1", "2001:db8::2"));
        for wrong in ["192.0.2.0/33", "host", "", "2001:db8::/129"] {
            assert!(wrong.parse::<Prefix>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn values_parse_from_their_own_output() {
        fn same<T: FromStr<Err = BadValue> + fmt::Display>(text: &str) {
            let value = text.parse::<T>().map(|value| value.to_string());
            assert_eq!(value.as_deref(), Ok(text));
        }
        same::<Ports>("49152-49215");
        same::<Time>("5m");
        for host in ["a.example", "a.example:1", "[2001:db8::1]:1", "2001:db8::1"] {
            same::<HostPort>(host);
        }
        for wrong in ["", ":1", "a:b", "[::1", "[::1]1"] {
            assert!(wrong.parse::<HostPort>().is_err(), "{wrong}");
        }
        for wrong in ["0-1", "22", "1023-49215", "3000-2000", "a", "1024-70000"] {
            assert!(wrong.parse::<Ports>().is_err(), "{wrong}");
        }
    }
}
