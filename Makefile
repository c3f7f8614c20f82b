# make build   builds target/release/hotlift, and in target/share its manual pages and shell completions
# make demo    builds, and live-migrates the built-in guest with each method
# make test    installs what the tests need, and runs all of them
# make fuzz    runs each fuzz target for five minutes, two at a time (three quarters of an hour)
# make bench   measures beside QEMU 10.0 (root; some minutes)
# make bench-suites  the published tables and a matrix by 'hotlift bench', beside QEMU 10.0 (root; half an hour)
# make bench-relay   measures QEMU to QEMU over limited links, straight and through the relay (root; an hour)

# A C compiler and binutils build the codecs and the guest program; ISA-L is the fastest deflate, and is
# opened at run time.
BUILD_PACKAGES = gcc libc6-dev binutils libisal2
# The guest program is tried under Debian's QEMU, and the layout of ISA-L's structs against its header;
# libFuzzer is C++; the report is shown by a browser (115 MB, 40 seconds to install).
TEST_PACKAGES = $(BUILD_PACKAGES) libisal-dev qemu-system-x86 python3 g++ chromium
BENCH_PACKAGES = $(BUILD_PACKAGES) python3 zstd iproute2

# Enough for each target's corpus and some new inputs.
TEST_FUZZ_SECONDS = 2

.PHONY: demo build test fmt lint unit fuzz bench bench-suites bench-relay

# How often 'make bench-suites' runs each row, and what it fills memory with: a folder or a memory image; a generated
# mix if there is none.
REPEATS = 3
FILL = $(or $(wildcard ../shared/silesia),generated)
SUITES = target/release/hotlift bench --out bench/results/suites --ram 1G --fill $(FILL)

demo: build
	target/release/hotlift demo

build:
	@scripts/install-packages $(BUILD_PACKAGES)
	cargo build --release --locked
	target/release/hotlift manual target/share

test:
	@scripts/install-packages $(TEST_PACKAGES)
	@scripts/linux-guest >/dev/null || echo "test: the tests with a Linux guest are skipped"
	@HOTLIFT_QEMU10=$$(scripts/qemu-10.0) || echo "test: the tests with QEMU 10.0 are skipped"; \
	HOTLIFT_VENDOR_LIBRARIES=$$(scripts/accelerator-libraries) || \
		echo "test: the tests with the accelerators' own libraries are skipped"; \
	HOTLIFT_QEMU_QMP=$$(scripts/qemu-qmp) || echo "test: the test with Python's qemu.qmp is skipped"; \
	export HOTLIFT_QEMU10 HOTLIFT_VENDOR_LIBRARIES HOTLIFT_QEMU_QMP; $(MAKE) --no-print-directory fmt lint unit
	scripts/fuzz $(TEST_FUZZ_SECONDS)

fmt:
	cargo fmt --all --check
	cargo fmt --manifest-path fuzz/Cargo.toml --check

lint:
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet

unit:
	cargo test --workspace --locked

fuzz:
	@scripts/install-packages $(TEST_PACKAGES)
	scripts/fuzz 300

bench: build
	@scripts/install-packages $(BENCH_PACKAGES)
	python3 bench/pair.py

bench-suites: build
	@scripts/install-packages $(BENCH_PACKAGES)
	qemu=$$(scripts/qemu-10.0)/qemu-system-x86_64 && \
	$(SUITES) --suite all --rate 2000 --repeats $(REPEATS) --with-qemu $$qemu && \
	$(SUITES) --max-bandwidth 25M,125M,0 --workload random --rate 1000 --repeats 2 --with-qemu $$qemu
	target/release/hotlift bench --kept bench/results/suites/runs.jsonl

bench-relay: build
	@scripts/install-packages $(BENCH_PACKAGES)
	python3 bench/relay.py
