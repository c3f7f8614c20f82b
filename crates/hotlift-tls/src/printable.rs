//! Makes strings of a peer's certificate safe to print and to match.

use std::fmt::Write;

/// Appends `text`. Escapes `special` characters with a backslash, as in RFC 4514, and control characters as a backslash and two
/// hexadecimal digits for each byte. So different texts stay different, and none has a second line.
pub(crate) fn escape(text: &str, special: &[char], to: &mut String) {
    for (i, c) in text.char_indices() {
        if c.is_control() {
            let mut bytes = [0; 4];
            for byte in c.encode_utf8(&mut bytes).bytes() {
                // Writing to a String cannot fail.
                let _ = write!(to, "\\{byte:02x}");
            }
        } else {
            if special.contains(&c) || (i == 0 && c == '#') {
                to.push('\\');
            }
            to.push(c);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_value_ends_it_or_the_line() {
        let mut out = String::new();
        escape("a,b=c\n\u{85}d", &[',', '+'], &mut out);
        assert_eq!(out, "a\\,b=c\\0a\\c2\\85d");
    }
}
