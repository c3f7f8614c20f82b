//! Splits a line of the human monitor into words, quoted strings and flags.

/// The unread rest of a line.
pub struct Words<'a>(&'a str);

impl<'a> Words<'a> {
    pub fn new(line: &'a str) -> Self {
        Self(line.trim())
    }

    /// Returns the next word; `None` at the end of the line. A word in double quotes may contain spaces and the escapes `\n`,
    /// `\r`, `\\`, `\"` and `\'`, as in QEMU.
    ///
    /// # Errors
    /// The error in a quoted word, as text.
    pub fn next(&mut self) -> Result<Option<String>, &'static str> {
        let Some(quoted) = self.0.strip_prefix('"') else {
            let end = self.0.find(char::is_whitespace).unwrap_or(self.0.len());
            let (word, rest) = self.0.split_at(end);
            self.0 = rest.trim_start();
            return Ok((!word.is_empty()).then(|| word.to_owned()));
        };
        let mut word = String::new();
        let mut chars = quoted.chars();
        loop {
            match chars.next() {
                None => return Err("unterminated string"),
                Some('"') => break,
                Some('\\') => word.push(match chars.next() {
                    Some('n') => '\n',
                    Some('r') => '\r',
                    Some(c @ ('\\' | '"' | '\'')) => c,
                    _ => return Err("unsupported escape code"),
                }),
                Some(c) => word.push(c),
            }
        }
        self.0 = chars.as_str().trim_start();
        Ok(Some(word))
    }

    /// Returns the letters of the flags that follow, as in `-d -r` and `-dr`.
    pub fn flags(&mut self) -> Vec<char> {
        let mut flags = Vec::new();
        while let Some(rest) = self.0.strip_prefix('-')
            && rest.starts_with(char::is_alphanumeric)
        {
            let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
            flags.extend(rest[..end].chars());
            self.0 = rest[end..].trim_start();
        }
        flags
    }

    /// Returns the rest of the line without splitting it.
    pub fn rest(&mut self) -> &'a str {
        std::mem::take(&mut self.0)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
