//! Splits a byte stream into JSON values. QMP does not require lines: a value ends with its last closing bracket, and white
//! space between values is optional.

use serde_json::Value;

use crate::http::is_http;

/// Maximum length of a request, in bytes. QEMU's limit is 64 MiB (`MAX_TOKEN_SIZE`). Real requests have at most some hundred
/// bytes. The limit is low because a parsed value takes up to 16 times the memory of its text, for each client.
pub const MAX_REQUEST: usize = 64 << 10;

/// Maximum nesting depth. QEMU's limit is 1024 (`MAX_NESTING`); 127 is the limit of `serde_json`.
pub const MAX_NESTING: usize = 127;

/// Splits the input of one client.
#[derive(Debug, Default)]
pub(super) struct Framing {
    buffer: Vec<u8>,
    /// Number of bytes of `buffer` that were examined.
    examined: usize,
    depth: usize,
    inside: Inside,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Inside {
    /// White space between two values.
    #[default]
    Nothing,
    /// Inside brackets, but not in a string.
    Brackets,
    String,
    /// Inside a string, directly after a backslash.
    Escape,
    /// In a number or keyword outside of brackets.
    Word,
}

/// Result of the search for a value.
#[derive(Debug, PartialEq)]
pub(super) enum Found {
    Value(Value),
    /// Invalid JSON, with the error message.
    Nonsense(String),
    /// The peer sends HTTP, as a browser does. The rest of the stream is ignored.
    Http,
    /// The input exceeds a limit, with the error message. The rest of the stream is ignored.
    TooMuch(&'static str),
}

impl Framing {
    /// Appends input.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next value in the input; `None` if no complete value has arrived.
    pub(super) fn next(&mut self) -> Option<Found> {
        while let Some(&byte) = self.buffer.get(self.examined) {
            if self.examined >= MAX_REQUEST {
                return Some(Found::TooMuch("JSON token size limit exceeded"));
            }
            self.examined += 1;
            match (self.inside, byte) {
                (Inside::Nothing, b' ' | b'\t' | b'\r' | b'\n') => self.take(0),
                (Inside::Escape, _) => self.inside = Inside::String,
                (Inside::String, b'\\') => self.inside = Inside::Escape,
                (Inside::String, b'"') if self.depth == 0 => return Some(self.found(0)),
                (Inside::String, b'"') => self.inside = Inside::Brackets,
                // A string must not contain control characters. So the input up to here is invalid, and a new value starts
                // after it. The client's next line is then valid again, even if a quote was missing.
                (Inside::String, ..0x20) => return Some(self.found(0)),
                (Inside::String, _) => {}
                (Inside::Word, b' ' | b'\t' | b'\r' | b'\n' | b'{' | b'[' | b'"') => {
                    return Some(self.found(1));
                }
                (Inside::Word, _) => {}
                (Inside::Nothing | Inside::Brackets, b'{' | b'[') => {
                    self.depth += 1;
                    self.inside = Inside::Brackets;
                    if self.depth > MAX_NESTING {
                        return Some(Found::TooMuch("JSON nesting depth limit exceeded"));
                    }
                }
                (Inside::Nothing | Inside::Brackets, b'"') => self.inside = Inside::String,
                (Inside::Brackets, b'}' | b']') => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Some(self.found(0));
                    }
                }
                (Inside::Brackets, _) => {}
                (Inside::Nothing, b'}' | b']' | b',' | b':') => return Some(self.found(0)),
                (Inside::Nothing, _) => self.inside = Inside::Word,
            }
        }
        None
    }

    /// Parses the examined bytes without the last `less`, and removes the parsed bytes from the buffer.
    fn found(&mut self, less: usize) -> Found {
        let found = parse(&self.buffer[..self.examined - less]);
        self.take(less);
        found
    }

    fn take(&mut self, less: usize) {
        self.buffer.drain(..self.examined - less);
        self.examined = 0;
        self.depth = 0;
        self.inside = Inside::Nothing;
    }
}

fn parse(bytes: &[u8]) -> Found {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return Found::Nonsense("JSON parse error, invalid UTF-8 sequence in string".to_owned());
    };
    match serde_json::from_str(text) {
        Ok(value) => Found::Value(value),
        Err(_) if is_http(bytes) => Found::Http,
        Err(error) => Found::Nonsense(format!("JSON parse error, {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn all(text: &[u8], step: usize) -> Vec<Found> {
        let mut framing = Framing::default();
        let mut found = Vec::new();
        for bytes in text.chunks(step) {
            framing.push(bytes);
            while let Some(one) = framing.next() {
                let is_end = matches!(one, Found::TooMuch(_));
                found.push(one);
                if is_end {
                    return found;
                }
            }
        }
        found
    }

    #[test]
    fn values_need_no_lines_and_may_come_byte_by_byte() {
        let text = b" {\"a\":\n\"}]\\\"\"}{\"b\":[{}]}\r\n\t[1] 12 true \"x y\"{} ";
        let values = [
            json!({ "a": "}]\"" }),
            json!({ "b": [{}] }),
            json!([1]),
            json!(12),
            json!(true),
            json!("x y"),
            json!({}),
        ]
        .map(Found::Value);
        for step in [1, 2, 7, text.len()] {
            assert_eq!(all(text, step), values, "{step}");
        }
    }

    #[test]
    fn invalid_input_is_reported_once_and_later_requests_work() {
        for nonsense in [
            &b"{\"execute\": }\n"[..],
            b"nope ",
            b"\xff\n",
            b"{\"x\":\"\xc3\"}",
            b"{\"x\":\"lost\n",
            b"]",
            b"{\"x\"]\n",
        ] {
            let text = [nonsense, b"{\"id\":1}"].concat();
            let found = all(&text, 3);
            let [Found::Nonsense(why), Found::Value(value)] = &found[..] else {
                panic!("{:?}: {found:?}", String::from_utf8_lossy(nonsense));
            };
            assert!(why.starts_with("JSON parse error, "), "{why}");
            assert_eq!(*value, json!({ "id": 1 }));
        }
    }

    #[test]
    fn a_request_has_a_limit_of_length_and_nesting() {
        let nested = |depth| [b"[".repeat(depth), b"]".repeat(depth)].concat();
        assert!(matches!(
            all(&nested(MAX_NESTING), 64)[..],
            [Found::Value(_)]
        ));
        assert_eq!(
            all(&nested(MAX_NESTING + 1), 64),
            [Found::TooMuch("JSON nesting depth limit exceeded")]
        );
        let long = |length| [&b"\""[..], &b"x".repeat(length - 2), b"\""].concat();
        assert!(matches!(
            all(&long(MAX_REQUEST), 4096)[..],
            [Found::Value(_)]
        ));
        assert_eq!(
            all(&long(MAX_REQUEST + 1), 4096),
            [Found::TooMuch("JSON token size limit exceeded")]
        );
    }
}
