//! Connection attempts to the addresses of a host: their order and times (RFC 8305), and their errors.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

/// Delay after which the next address is tried while the previous attempt is still pending (RFC 8305, section 5, recommended
/// value).
pub(super) const DELAY: Duration = Duration::from_millis(250);

/// Schedule of connection attempts to the addresses of one host.
#[derive(Debug)]
pub(super) struct Schedule {
    waiting: VecDeque<SocketAddr>,
    /// Time of the next attempt; `None` if it may begin at once.
    due: Option<Instant>,
}

impl Schedule {
    /// Creates the schedule from the addresses in the resolver's order. IPv4 and IPv6 addresses alternate: if one of the two
    /// has no route, this costs only one delay (RFC 8305, section 4).
    pub(super) fn new(addresses: impl IntoIterator<Item = SocketAddr>) -> Self {
        let mut first = VecDeque::from_iter(addresses);
        let is_v6 = first.front().is_some_and(SocketAddr::is_ipv6);
        let mut second = first.clone();
        first.retain(|address| address.is_ipv6() == is_v6);
        second.retain(|address| address.is_ipv6() != is_v6);
        let mut waiting = VecDeque::new();
        while !first.is_empty() || !second.is_empty() {
            waiting.extend(first.pop_front());
            waiting.extend(second.pop_front());
        }
        Self { waiting, due: None }
    }

    /// Returns the address to try at `now`; `None` if no address is left, or the next attempt is not due.
    pub(super) fn next(&mut self, now: Instant) -> Option<SocketAddr> {
        if self.due.is_some_and(|due| now < due) {
            return None;
        }
        let address = self.waiting.pop_front()?;
        self.due = Some(now + DELAY);
        Some(address)
    }

    /// Records a failed attempt: the next attempt may begin at once.
    pub(super) fn failed(&mut self) {
        self.due = None;
    }

    /// Returns the time until the next attempt; `None` if no address is left.
    pub(super) fn wait(&self, now: Instant) -> Option<Duration> {
        let left = || {
            self.due
                .map_or(Duration::ZERO, |due| due.saturating_duration_since(now))
        };
        (!self.waiting.is_empty()).then(left)
    }
}

/// Failed attempts to connect, each with its address and error.
#[derive(Debug, Default)]
pub(super) struct Failed(Vec<(SocketAddr, io::Error)>);

impl Failed {
    pub(super) fn add(&mut self, address: SocketAddr, error: io::Error) {
        self.0.push((address, error));
    }

    /// Combines the errors of all attempts into one, with the kind of the last error. The text names the addresses, unless
    /// `host` is an address itself.
    pub(super) fn into_error(mut self, host: &str) -> io::Error {
        let is_address = host.parse::<IpAddr>().is_ok();
        match (self.0.pop(), is_address && self.0.is_empty()) {
            (None, _) => io::ErrorKind::AddrNotAvailable.into(),
            (Some((_, error)), true) => error,
            (Some(last), false) => {
                let kind = last.1.kind();
                self.0.push(last);
                io::Error::new(kind, self)
            }
        }
    }
}

/// Lists each address with its error. Loopback addresses are marked, because the name of another host should not resolve to
/// one.
impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (address, error)) in self.0.iter().enumerate() {
            let before = if index == 0 { "" } else { "; " };
            let of = if address.ip().to_canonical().is_loopback() {
                " (this host)"
            } else {
                ""
            };
            write!(f, "{before}{address}{of}: {error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failed {}

/// A link-local address without its network interface.
#[derive(Debug, thiserror::Error)]
#[error("{0} is a link-local address; add the interface, as in [{0}%eth0]")]
pub(super) struct NoZone(pub Ipv6Addr);

/// Checks that a link-local address includes its network interface.
///
/// # Errors
/// [`NoZone`] if the interface is missing.
pub(super) fn check_zone(address: &SocketAddr) -> io::Result<()> {
    match address {
        SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0 => Err(
            io::Error::new(io::ErrorKind::InvalidInput, NoZone(*v6.ip())),
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn families_alternate_and_the_first_address_stays_the_first() {
        let six = ["[2001:db8::1]:1", "[2001:db8::2]:1", "[2001:db8::3]:1"].map(address);
        let four = ["192.0.2.1:1", "192.0.2.2:1"].map(address);
        let schedule = Schedule::new(six.into_iter().chain(four));
        assert_eq!(schedule.waiting, [six[0], four[0], six[1], four[1], six[2]]);
        let schedule = Schedule::new(four.into_iter().chain(six));
        assert_eq!(
            schedule.waiting.range(..3).copied().collect::<Vec<_>>(),
            [four[0], six[0], four[1]]
        );
    }

    #[test]
    fn the_next_address_waits_for_the_delay_or_for_a_failure() {
        let all = ["[2001:db8::1]:1", "192.0.2.1:1", "192.0.2.2:1"].map(address);
        let now = Instant::now();
        let mut schedule = Schedule::new(all);
        assert_eq!(schedule.next(now), Some(all[0]));
        let early = now + DELAY - Duration::from_millis(1);
        assert_eq!(schedule.next(early), None);
        assert_eq!(schedule.wait(early), Some(Duration::from_millis(1)));
        assert_eq!(schedule.next(now + DELAY), Some(all[1]));
        assert_eq!(schedule.next(now + DELAY), None);
        schedule.failed();
        assert_eq!(schedule.wait(now + DELAY), Some(Duration::ZERO));
        assert_eq!(schedule.next(now + DELAY), Some(all[2]));
        assert_eq!(schedule.wait(now + DELAY), None);
        assert_eq!(schedule.next(now + 9 * DELAY), None);
    }

    #[test]
    fn a_failure_names_the_addresses_that_a_name_resolved_to() {
        let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
        let mut failed = Failed::default();
        failed.add(address("127.0.1.1:4444"), refused());
        let error = failed.into_error("six.example");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(
            error.to_string(),
            "127.0.1.1:4444 (this host): connection refused"
        );
        let mut failed = Failed::default();
        failed.add(address("192.0.2.2:4444"), refused());
        failed.add(
            address("[2001:db8::2]:4444"),
            io::ErrorKind::TimedOut.into(),
        );
        let error = failed.into_error("six.example");
        assert_eq!(
            error.to_string(),
            "192.0.2.2:4444: connection refused; [2001:db8::2]:4444: timed out"
        );
        let mut failed = Failed::default();
        failed.add(address("192.0.2.2:4444"), refused());
        assert_eq!(
            failed.into_error("192.0.2.2").to_string(),
            "connection refused"
        );
    }

    #[test]
    fn a_link_local_address_needs_its_interface() {
        let error = check_zone(&address("[fe80::1]:4444")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "fe80::1 is a link-local address; add the interface, as in [fe80::1%eth0]"
        );
        check_zone(&address("[fe80::1%3]:4444")).unwrap();
        check_zone(&address("[2001:db8::1]:4444")).unwrap();
    }
}
