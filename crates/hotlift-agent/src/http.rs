//! A small HTTP server on loopback, from which Prometheus reads the metrics.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotlift::admission::limits::METRICS;

use crate::agent::Agent;
use crate::metrics::{self, Format};

/// Size limit of a request, in bytes.
const REQUEST: usize = 4096;

/// Media type of answers without metrics.
const PLAIN: &str = "text/plain; charset=utf-8";

/// Answers HTTP requests on `listener`, one client at a time; never returns.
pub fn serve(agent: &Arc<Agent>, listener: &TcpListener) {
    for stream in listener.incoming() {
        match stream {
            // A disconnected client needs no answer.
            Ok(stream) => drop(answer(agent, stream)),
            Err(_) => std::thread::sleep(METRICS),
        }
    }
}

fn answer(agent: &Arc<Agent>, mut stream: TcpStream) -> std::io::Result<()> {
    let deadline = Instant::now() + METRICS;
    let left = || match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(std::io::Error::from(std::io::ErrorKind::TimedOut)),
        left => Ok(Some(left)),
    };
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        stream.set_read_timeout(left()?)?;
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            _ if request.len() > REQUEST => return Ok(()),
            read => request.extend_from_slice(&buffer[..read]),
        }
    }
    let answer = respond(&String::from_utf8_lossy(&request), &|format| {
        metrics::text(agent, format)
    });
    let mut rest = answer.as_bytes();
    while !rest.is_empty() {
        stream.set_write_timeout(left()?)?;
        match stream.write(rest)? {
            0 => return Ok(()),
            written => rest = &rest[written..],
        }
    }
    Ok(())
}

/// Returns the HTTP response to a request with the header `request`. `text` returns the metrics in a format.
fn respond(request: &str, text: &dyn Fn(Format) -> String) -> String {
    let mut lines = request.lines();
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (method, target) = (words.next(), words.next().unwrap_or_default());
    let path = target.split('?').next().unwrap_or_default();
    let is_asked_for = |media_type: &str| {
        let headers = lines.filter_map(|line| line.split_once(':'));
        let mut accepted = headers.filter(|(name, _)| name.eq_ignore_ascii_case("accept"));
        accepted.any(|(_, value)| value.to_ascii_lowercase().contains(media_type))
    };
    let mut more = "";
    let (status, kind, body) = match (method, path) {
        (Some("GET" | "HEAD"), "/metrics") => {
            let format = if is_asked_for(Format::OPEN_METRICS) {
                Format::OpenMetrics
            } else {
                Format::Text
            };
            ("200 OK", format.media_type(), text(format))
        }
        (_, "/metrics") => {
            more = "Allow: GET, HEAD\r\n";
            ("405 Method Not Allowed", PLAIN, "GET or HEAD\n".to_owned())
        }
        _ => ("404 Not Found", PLAIN, "GET /metrics\n".to_owned()),
    };
    let length = body.len();
    let body = match method {
        Some("HEAD") => "",
        _ => &body,
    };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{more}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::agent;

    #[test]
    fn a_client_that_sends_byte_by_byte_has_one_deadline_for_the_request() {
        let agent = agent("");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        std::thread::scope(|scope| {
            let served = scope.spawn(|| answer(&agent, accepted));
            // Each byte arrives before a timeout for a single read; the last byte arrives after the deadline for the request.
            for _ in 0..100 * METRICS.as_secs() {
                if served.is_finished() || slow.write_all(b"x").is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            assert!(served.is_finished(), "it still waits for the request's end");
            assert!(served.join().unwrap().is_err());
        });
    }

    /// Returns the status line, media type and body of the response to a request with `lines`.
    fn answered(lines: &[&str]) -> (String, String, String) {
        let request = format!("{}\r\n\r\n", lines.join("\r\n"));
        let answer = respond(&request, &|format| format!("{format:?}"));
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let mut head = head.lines();
        let status = head.next().unwrap().to_owned();
        let kind = head.find_map(|line| line.strip_prefix("Content-Type: "));
        (status, kind.unwrap().to_owned(), body.to_owned())
    }

    #[test]
    fn a_client_gets_the_format_that_it_accepts() {
        let prometheus = "accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3";
        for (line, body) in [
            ("Host: localhost", "Text"),
            ("Accept: text/plain", "Text"),
            ("Accept: */*", "Text"),
            (prometheus, "OpenMetrics"),
        ] {
            let (status, kind, answered) = answered(&["GET /metrics HTTP/1.1", line]);
            assert_eq!(status, "HTTP/1.1 200 OK", "{line}");
            assert_eq!(answered, body, "{line}");
            let is_open = kind.starts_with("application/openmetrics-text; version=1.0.0");
            assert_eq!(is_open, body == "OpenMetrics", "{line}: {kind}");
            assert_eq!(kind.starts_with("text/plain; version=0.0.4"), !is_open);
        }
    }

    #[test]
    fn only_get_and_head_requests_return_the_metrics() {
        for (line, status, body) in [
            ("GET /metrics?x=1 HTTP/1.1", "200 OK", "Text"),
            ("HEAD /metrics HTTP/1.1", "200 OK", ""),
            (
                "POST /metrics HTTP/1.1",
                "405 Method Not Allowed",
                "GET or HEAD\n",
            ),
            ("GET / HTTP/1.1", "404 Not Found", "GET /metrics\n"),
            ("HEAD / HTTP/1.1", "404 Not Found", ""),
            ("nonsense", "404 Not Found", "GET /metrics\n"),
        ] {
            let answered = answered(&[line]);
            assert_eq!(answered.0, format!("HTTP/1.1 {status}"), "{line}");
            assert_eq!(answered.2, body, "{line}");
        }
        let head = respond("HEAD /metrics HTTP/1.1\r\n\r\n", &|_| "four".to_owned());
        assert!(head.contains("Content-Length: 4\r\n"), "{head}");
        let post = respond("POST /metrics HTTP/1.1\r\n\r\n", &|_| String::new());
        assert!(post.contains("Allow: GET, HEAD\r\n"), "{post}");
    }
}
