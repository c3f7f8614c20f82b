//! Words of a peer's certificate, fit to be shown and to be held against a pattern.

use std::fmt::Write;

/// Appends `text` with `special` characters behind a backslash, as RFC 4514 has it, and control characters as a backslash
/// and two hexadecimal digits a byte. So no two texts become the same, and none becomes two lines.
pub(crate) fn escape(text: &str, special: &[char], to: &mut String) {
    for (i, c) in text.char_indices() {
        if c.is_control() {
            let mut bytes = [0; 4];
            for byte in c.encode_utf8(&mut bytes).bytes() {
                // A String takes everything.
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
