//! Hotlift.
fn main() {}
