//! What QEMU's human monitor says of RAM blocks, of which QMP has no stable command.

/// The page size of each RAM block by name, in bytes, out of what `info ramblock` answers:
///
/// ```text
///               Block Name    PSize              Offset               Used              Total
///                   pc.ram    2 MiB  0x0000000000000000 0x0000000008000000 0x0000000008000000
/// ```
///
/// QEMU 10.0 says more behind that. Lines of another kind are left out.
pub(crate) fn page_sizes(table: &str) -> Vec<(String, u64)> {
    table.lines().filter_map(page_size).collect()
}

fn page_size(line: &str) -> Option<(String, u64)> {
    let words: Vec<_> = line.split_whitespace().collect();
    let offset = words.iter().position(|word| word.starts_with("0x"))?;
    let [name @ .., number, unit] = &words[..offset] else {
        return None;
    };
    let shift = match *unit {
        "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    let size = number.parse::<u64>().ok()?.checked_mul(1 << shift)?;
    Some((name.join(" "), size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_sizes_are_read_as_old_and_new_qemus_say_them() {
        let old = "              Block Name    PSize              Offset               Used              Total\r\n\
            \x20                 pc.ram    2 MiB  0x0000000000000000 0x0000000008000000 0x0000000008000000\r\n\
            \x20   /rom@etc/acpi/tables    4 KiB  0x0000000008080000 0x0000000000020000 0x0000000000200000\r\n";
        let new = "              Block Name    PSize              Offset               Used              Total                HVA  RO\r\n\
            \x20                 pc.ram    1 GiB  0x0000000000000000 0x0000000008000000 0x0000000008000000 0x00007f3adfe00000  rw\r\n\
            \x20                 pc.bios    4 KiB  0x0000000008040000 0x0000000000020000 0x0000000000020000 0x00007f3adfc00000  ro\r\n";
        let block = |name: &str, size| (name.to_owned(), size);
        assert_eq!(
            page_sizes(old),
            [
                block("pc.ram", 2 << 20),
                block("/rom@etc/acpi/tables", 4096)
            ]
        );
        assert_eq!(page_sizes(new)[0], block("pc.ram", 1 << 30));
        assert_eq!(page_sizes("unknown command: 'info ramblock'\r\n"), []);
    }
}
