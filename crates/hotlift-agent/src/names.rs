//! Checks that this host's certificate contains a name or an address of this host.

use std::net::{IpAddr, ToSocketAddrs};
use std::path::Path;

use hotlift::Address;
use hotlift::tls::Identity;
use nix::ifaddrs::getifaddrs;

use crate::dial::ip_of;

/// Most names of a certificate that are resolved: each may take the resolver's timeout.
const RESOLVED: usize = 4;

/// Most names of a certificate in the warning.
const SHOWN: usize = 8;

/// Names and addresses of this host.
#[derive(Debug, Default)]
pub struct OwnNames {
    names: Vec<String>,
    addresses: Vec<IpAddr>,
}

impl OwnNames {
    /// Reads the names and addresses of this host, and adds the host in `listen`.
    pub fn of_this_host(listen: &str) -> Self {
        let mut own = Self::default();
        // If the host name cannot be read, the addresses and `listen` decide.
        if let Ok(name) = std::fs::read_to_string("/proc/sys/kernel/hostname") {
            own.names.push(name.trim().to_owned());
        }
        if let Ok(Address::Tcp { host, .. }) = listen.parse() {
            match host.parse() {
                Ok(address) => own.addresses.push(address),
                Err(_) if !host.is_empty() => own.names.push(host),
                Err(_) => {}
            }
        }
        let interfaces = getifaddrs().into_iter().flatten();
        let addresses = interfaces.filter_map(|interface| ip_of(&interface.address?));
        own.addresses.extend(addresses);
        // Other hosts cannot use loopback and unspecified addresses.
        own.addresses
            .retain(|address| !address.is_loopback() && !address.is_unspecified());
        own
    }

    /// Returns true if `dns`, a name in a certificate, matches a name of this host. Three forms match: the same name, a short
    /// host name followed by a domain, and a wildcard for the host's domain.
    fn have(&self, dns: &str) -> bool {
        let dns = dns.to_ascii_lowercase();
        self.names.iter().any(|own| {
            let own = own.to_ascii_lowercase();
            let is_longer = dns
                .strip_prefix(&own)
                .is_some_and(|rest| rest.starts_with('.'));
            let domain = own.split_once('.').map(|(_, domain)| domain);
            let is_wild = dns.strip_prefix("*.").is_some_and(|it| Some(it) == domain);
            dns == own || is_longer || is_wild
        })
    }
}

/// Returns the addresses of a host name; none if the name is unknown.
pub fn resolve(name: &str) -> Vec<IpAddr> {
    let addresses = (name, 0).to_socket_addrs().into_iter().flatten();
    addresses.map(|address| address.ip()).collect()
}

/// Returns a warning if the certificate in `file` contains no name and no address of this host; `None` otherwise. `resolve`
/// returns the addresses of a name.
pub fn of_another_host(
    file: &Path,
    identity: &Identity,
    own: &OwnNames,
    resolve: &dyn Fn(&str) -> Vec<IpAddr>,
) -> Option<String> {
    let is_own = |address: &IpAddr| own.addresses.contains(address);
    let mut resolved = identity.dns.iter().take(RESOLVED);
    let has: Vec<_> = identity.names().take(SHOWN).collect();
    // A certificate without any name gets no warning here: the handshake refuses it.
    if has.is_empty()
        || identity.ip.iter().any(is_own)
        || identity.dns.iter().any(|dns| own.have(dns))
        || resolved.any(|dns| resolve(dns).iter().any(is_own))
    {
        return None;
    }
    Some(format!(
        "{} is for {}, which is neither a name nor an address of this host ({}): other agents reject it unless their \
         '[peers]' use that name for this host",
        file.display(),
        has.join(", "),
        own.names.join(", "),
    ))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn a_certificate_is_for_this_host_by_a_name_or_an_address_of_it() {
        let own = OwnNames {
            names: vec!["a".to_owned(), "web.example".to_owned()],
            addresses: vec!["192.0.2.1".parse().unwrap()],
        };
        let resolve = |name: &str| match name {
            "resolves.example" => vec!["192.0.2.1".parse().unwrap()],
            _ => Vec::new(),
        };
        for (name, is_of_another) in [
            ("192.0.2.1", false),
            ("192.0.2.2", true),
            ("A", false),
            ("a.example", false),
            ("aa.example", true),
            ("*.example", false),
            ("*.other", true),
            ("resolves.example", false),
            ("b.example", true),
        ] {
            let ip: Vec<IpAddr> = name.parse().into_iter().collect();
            let dns = if ip.is_empty() {
                vec![name.to_owned()]
            } else {
                Vec::new()
            };
            let identity = Identity {
                subject: String::new(),
                subject_reversed: String::new(),
                issuer: String::new(),
                dns,
                ip,
                uri: Vec::new(),
                is_ca: false,
                begins: SystemTime::UNIX_EPOCH,
                ends: SystemTime::UNIX_EPOCH,
            };
            let warning = of_another_host(Path::new("x.pem"), &identity, &own, &resolve);
            assert_eq!(warning.is_some(), is_of_another, "{name}: {warning:?}");
            if let Some(warning) = warning {
                assert!(
                    warning.contains(name) && warning.contains("[peers]"),
                    "{warning}"
                );
            }
        }
    }
}
