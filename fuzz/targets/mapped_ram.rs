#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| hotlift_fuzz::run("mapped_ram", data));
