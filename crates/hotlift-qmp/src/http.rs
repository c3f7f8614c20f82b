//! Detects HTTP on a monitor's socket, so that a web page cannot send commands.
//!
//! A page of any site can make a browser on this host send an HTTP request to a local port. The request may have an arbitrary
//! body (`Content-Type: text/plain` needs no permission). A monitor that skips invalid lines would reach the body and execute
//! it. No client of a monitor begins a line with a word of HTTP, so such a word ends the connection.

/// Words that start a request: the methods of RFC 9110, PATCH, and the preface of HTTP/2.
const METHODS: [&[u8]; 10] = [
    b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"CONNECT", b"OPTIONS", b"TRACE", b"PATCH", b"PRI",
];

/// Message to a browser, which is also logged.
pub const HTTP: &str = "this is HTTP, which a monitor does not support: the connection is closed";

/// Returns true if the first word of `bytes` belongs to HTTP: a method, a version, or the header that every request has.
#[must_use]
pub fn is_http(bytes: &[u8]) -> bool {
    let word = bytes.trim_ascii_start();
    let word = word
        .split(|byte| byte.is_ascii_whitespace())
        .next()
        .unwrap_or_default();
    let begins = |with: &[u8]| {
        let head = word.get(..with.len());
        head.is_some_and(|head| head.eq_ignore_ascii_case(with))
    };
    METHODS.contains(&word) || begins(b"HTTP/") || begins(b"Host:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http_requests_are_recognised_and_qmp_commands_are_not() {
        for http in [
            &b"POST / HTTP/1.1"[..],
            b"GET",
            b" OPTIONS * HTTP/1.1\r",
            b"host: 127.0.0.1:4444",
            b"Host:127.0.0.1",
            b"HTTP/1.1 200 OK",
            b"PRI * HTTP/2.0",
        ] {
            assert!(is_http(http), "{}", String::from_utf8_lossy(http));
        }
        for client in [
            &b"{\"execute\":\"GET\"}"[..],
            b"info migrate",
            b"migrate tcp:HTTP:1",
            b"",
            b"get",
            b"POSTER",
            b"hostname",
        ] {
            assert!(!is_http(client), "{}", String::from_utf8_lossy(client));
        }
    }
}
