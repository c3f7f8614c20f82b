//! Tables of numbers.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};

/// Creates an empty table with this header.
pub fn new_table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(header);
    table
}

/// Aligns numbers to the right, and the names in the first column to the left.
pub fn align(table: &mut Table) {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

/// Aligns as [`align`] does, except column `words` (counted from 0), which is aligned to the left.
pub fn align_with_words(table: &mut Table, words: usize) {
    align(table);
    if let Some(column) = table.column_mut(words) {
        column.set_cell_alignment(CellAlignment::Left);
    }
}
