//! Authorization of peers with a certificate of the CA: QEMU's `tls-authz`, as a list of patterns.

use std::fmt;

use crate::identity::Identity;

/// An invalid list of patterns.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuthzError {
    /// The list has no pattern.
    #[error("the list of allowed names is empty, so no client can connect")]
    Empty,
    /// A pattern is empty.
    #[error("pattern {number} of the list of allowed names is empty")]
    EmptyPattern {
        /// Number of the pattern in the list, from 1.
        number: usize,
    },
}

/// An allow-list. A certificate is allowed if a pattern matches one of its names: a DNS name, an IP address or a URI of its
/// subjectAltName, or its whole distinguished name.
///
/// In a pattern, `*` matches any characters, including none, and `?` matches one. A pattern with `=` is for distinguished names
/// (`CN=host-a,O=Example`). It is compared with both orders of the name, since GnuTLS, OpenSSL and QEMU's manual use different
/// orders. DNS names and IP addresses are not case-sensitive; distinguished names and URIs are. A common name (CN) is compared
/// only as a part of the distinguished name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authz {
    patterns: Vec<String>,
}

impl Authz {
    /// Creates a list of `patterns`.
    ///
    /// # Errors
    /// If the list or a pattern is empty.
    pub fn new<T: AsRef<str>>(patterns: impl IntoIterator<Item = T>) -> Result<Self, AuthzError> {
        let patterns: Vec<String> = patterns
            .into_iter()
            .map(|pattern| pattern.as_ref().trim().to_owned())
            .collect();
        if patterns.is_empty() {
            return Err(AuthzError::Empty);
        }
        match patterns.iter().position(String::is_empty) {
            Some(at) => Err(AuthzError::EmptyPattern { number: at + 1 }),
            None => Ok(Self { patterns }),
        }
    }

    /// Returns true if `identity` is allowed.
    #[must_use]
    pub fn allows(&self, identity: &Identity) -> bool {
        self.patterns.iter().any(|pattern| {
            if pattern.contains("://") {
                return identity.uri.iter().any(|uri| fits(pattern, uri));
            }
            if pattern.contains('=') {
                let (pattern, subjects) = (
                    unescaped(pattern),
                    [&identity.subject, &identity.subject_reversed],
                );
                return subjects
                    .into_iter()
                    .any(|subject| fits(&pattern, &unescaped(subject)));
            }
            let pattern = pattern.to_ascii_lowercase();
            // Patterns match only names of their own kind: 192.0.2.* does not match 192.0.2.example.org.
            let is_ip = is_address(&pattern);
            let any = pattern.chars().all(|c| c == '*');
            let fits_dns = |name: &String| fits(&pattern, &name.to_ascii_lowercase());
            (any || !is_ip) && identity.dns.iter().any(fits_dns)
                || (any || is_ip) && identity.ip.iter().any(|ip| fits(&pattern, &ip.to_string()))
        })
    }
}

/// Returns true for a pattern of IP addresses: host names have no colon, and do not consist of digits and dots only.
fn is_address(pattern: &str) -> bool {
    let is_part = |c: char| c.is_ascii_digit() || ['.', '*', '?'].contains(&c);
    pattern.contains(':') || pattern.chars().all(is_part)
}

/// Replaces escaped commas in a distinguished name by another character. Otherwise a star before a comma could match the
/// backslash of an escaped comma.
fn unescaped(name: &str) -> String {
    name.replace("\\,", "\u{1}")
}

impl fmt::Display for Authz {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.patterns.join(" "))
    }
}

/// Returns true if `pattern` matches all of `text`. After a mismatch only the last star is retried, so the number of steps is
/// at most the product of the lengths.
fn fits(pattern: &str, text: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let text: Vec<char> = text.chars().collect();
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(&c) if c == '?' || c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => {
                let Some((at, taken)) = star else {
                    return false;
                };
                star = Some((at, taken + 1));
                (p, t) = (at + 1, taken + 1);
            }
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    fn identity() -> Identity {
        Identity {
            subject: "O=Example,CN=host-a".to_owned(),
            subject_reversed: "CN=host-a,O=Example".to_owned(),
            issuer: "CN=CA".to_owned(),
            dns: vec!["Host-A.example".to_owned()],
            ip: vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()],
            uri: vec!["spiffe://example/host?x=1".to_owned()],
            is_ca: false,
            begins: SystemTime::UNIX_EPOCH,
            ends: SystemTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn a_pattern_is_for_a_whole_name_of_any_kind() {
        for allowed in [
            "host-a.example",
            "HOST-?.*",
            "*",
            "192.0.2.*",
            "2001:db8::1",
            "CN=host-a,O=Example",
            "O=Example,CN=host-a",
            "CN=host-*",
            "spiffe://example/*",
            "spiffe://example/host?x=1",
        ] {
            let list = Authz::new([allowed]).unwrap();
            assert!(list.allows(&identity()), "{allowed}");
        }
        for other in [
            "host-a",
            "host-a.example.org",
            "a.example",
            "cn=host-a,O=Example",
            "CN=host-a",
            "O=Example",
            "192.0.2.10",
            "host-a.exampl",
            "?",
        ] {
            let list = Authz::new([other]).unwrap();
            assert!(!list.allows(&identity()), "{other}");
        }
        assert!(
            Authz::new(["x", "host-a.example"])
                .unwrap()
                .allows(&identity())
        );
    }

    #[test]
    fn a_name_of_one_kind_is_not_taken_for_one_of_another() {
        let identity = Identity {
            subject: "CN=x\\,CN=admin".to_owned(),
            subject_reversed: "CN=x\\,CN=admin".to_owned(),
            dns: vec!["192.0.2.evil.example".to_owned()],
            ip: Vec::new(),
            uri: vec!["spiffe://other/x.rack1.example".to_owned()],
            ..identity()
        };
        for pattern in ["192.0.2.*", "*.rack1.example", "*,CN=admin", "*=*://x"] {
            let list = Authz::new([pattern]).unwrap();
            assert!(!list.allows(&identity), "{pattern}");
        }
        assert!(Authz::new(["CN=x\\,CN=*"]).unwrap().allows(&identity));
    }

    #[test]
    fn an_empty_list_is_an_error_and_does_not_admit_all() {
        assert_eq!(Authz::new::<&str>([]), Err(AuthzError::Empty));
        assert_eq!(
            Authz::new(["a", " "]),
            Err(AuthzError::EmptyPattern { number: 2 })
        );
    }

    #[test]
    fn a_pattern_of_many_stars_matches_quickly() {
        let pattern = "*a".repeat(200) + "b";
        assert!(!fits(&pattern, &"a".repeat(2000)));
    }
}
