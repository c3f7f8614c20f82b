//! Parses the RAM blocks from the output of QEMU's human monitor: no stable QMP command reports them.

use serde::{Deserialize, Serialize};

/// A RAM block that a migration transfers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct RamBlock {
    /// Name in the stream.
    pub name: String,
    /// Page size of the host's memory for the block, in bytes.
    #[serde(skip, default)]
    pub page_size: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Maximum size in bytes to which the block can grow.
    pub max_bytes: u64,
}

/// Parses the answer to `info ramblock`:
///
/// ```text
///               Block Name    PSize              Offset               Used              Total
///                   pc.ram    2 MiB  0x0000000000000000 0x0000000008000000 0x0000000008000000
/// ```
///
/// QEMU 10.0 appends columns, which are ignored. Lines in another format are skipped. Blocks without a name are also skipped,
/// since they do not migrate.
pub(crate) fn parse(table: &str) -> Vec<RamBlock> {
    table.lines().filter_map(row).collect()
}

fn row(line: &str) -> Option<RamBlock> {
    let words: Vec<_> = line.split_whitespace().collect();
    let offset = words.iter().position(|word| word.starts_with("0x"))?;
    let (head, numbers) = words.split_at(offset);
    let [name @ .., number, unit] = head else {
        return None;
    };
    let [_offset, used, total, ..] = numbers else {
        return None;
    };
    let shift = match *unit {
        "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    let hex = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    let name = name.join(" ");
    (!name.is_empty()).then_some(RamBlock {
        name,
        page_size: number.parse::<u64>().ok()?.checked_mul(1 << shift)?,
        bytes: hex(used)?,
        max_bytes: hex(total)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_parsed_from_the_tables_of_old_and_new_qemus() {
        let old = "              Block Name    PSize              Offset               Used              Total\r\n\
            \x20                 pc.ram    2 MiB  0x0000000000000000 0x0000000008000000 0x0000000008000000\r\n\
            \x20   /rom@etc/acpi/tables    4 KiB  0x0000000008080000 0x0000000000020000 0x0000000000200000\r\n";
        let new = "              Block Name    PSize              Offset               Used              Total                HVA  RO\r\n\
            \x20                 pc.ram    1 GiB  0x0000000000000000 0x0000000008000000 0x0000000008000000 0x00007f3adfe00000  rw\r\n\
            \x20                 pc.bios    4 KiB  0x0000000008040000 0x0000000000020000 0x0000000000020000 0x00007f3adfc00000  ro\r\n";
        let block = |name: &str, page_size, bytes, max_bytes| RamBlock {
            name: name.to_owned(),
            page_size,
            bytes,
            max_bytes,
        };
        assert_eq!(
            parse(old),
            [
                block("pc.ram", 2 << 20, 128 << 20, 128 << 20),
                block("/rom@etc/acpi/tables", 4096, 128 << 10, 2 << 20)
            ]
        );
        assert_eq!(
            parse(new)[0],
            block("pc.ram", 1 << 30, 128 << 20, 128 << 20)
        );
        assert_eq!(parse("unknown command: 'info ramblock'\r\n"), []);
        assert_eq!(parse("  4 KiB  0x0 0x1000 0x1000\n"), []);
    }
}
