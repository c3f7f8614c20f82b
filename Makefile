# make build   builds hotlift in target/release
# make dist    builds hotlift and hotlift-bench in target/dist (smaller, slower to build), and their manual pages and
#                completions in target/share
# make demo    builds target/debug/hotlift, and live-migrates the built-in guest with each method
# make test    installs the packages that tests need, and runs all tests except those of test-long
# make test-long  runs the long tests: random faults, fuzz targets, packages in a clean Debian 12, paths of QEMU's own test
# make deb, make rpm   build the packages hotlift and hotlift-bench in target/packages
# make test-package    installs the .debs, of an unoptimised build, in a clean Debian 12, upgrades and purges them (root; two
#                minutes the first time, then one; part of 'make test-long')
# make campaign  injects 2,000 random faults into real migrations and counts the outcomes (root; an hour; continues an
#                interrupted run)
# make qemu-matrix  migrates virtual machines between QEMU 7.2, 10.0 and 11.1 in every combination of settings;
#                'make test' runs some of them (hours)
# make qemu-suite  runs QEMU's own migration-test alone and through relays, and writes the table in
#                docs/qemu-compatibility.md (root; ten minutes to build at first, an hour and a half to run; JOBS=1 on a busy
#                machine; ONLY=REGEX for some paths, RUNS=NAME,... for some runs, which print the table)
# make test-libvirt  migrates libvirt domains through the agents of two hosts in every mode and with every fault, and
#                fifty times to and fro (root, KVM; ten minutes); 'make test' omits only the fifty
# make fuzz    runs each fuzz target for five minutes, two at a time (three quarters of an hour)
# make bench   compares with QEMU 10.0, and for 'compress' with 7.2 (root; 20 minutes)
# make bench-suites  runs all of 'hotlift-bench' for a machine: the published tables, compared with QEMU, by bandwidth
#                (root; three quarters of an hour)
# make bench-relay   measures QEMU to QEMU over limited links, directly and through relays (root; three quarters of an hour)
# make bench-auto    compares the method auto with the fixed ones: links that change, fills, neighbours, writing guests,
#                relays (root; seven hours, with REPEATS=1 a fifth of that)
# make bench-restore  measures the time until a saved VM runs, compared with QEMU's mapped-ram, exec:zstd and a raw file (root;
#                an hour; RAM=512M and REPEATS=1 for less)
# make bench-agent  measures libvirt's migrations with and without agents, and a drain (root, KVM; half an hour)
# make pictures  draws docs/pictures/*.svg from their sources; 'make fmt' checks that they are up to date
# make soak     migrates eight libvirt domains to and fro with faults, and watches the agents' resources (root, KVM; two
#                hours; HOURS=0.2 for less)

# A C compiler and binutils build the codecs and the guest program; ISA-L is the fastest deflate library, and is
# loaded at run time.
BUILD_PACKAGES = gcc libc6-dev binutils libisal2
# Tests run the guest program under Debian's QEMU, and compare the layout of ISA-L's structs with its header.
# libFuzzer is C++; a browser renders the report (115 MB, 40 seconds to install); setcap gives a copy of the
# command a capability; nftables drops packets; OpenSSL is the TLS peer; libvirt migrates domains.
LIBVIRT_PACKAGES = libvirt-daemon-system libvirt-clients
TEST_PACKAGES = $(BUILD_PACKAGES) libisal-dev qemu-system-x86 python3 g++ chromium libcap2-bin iproute2 nftables \
	openssl openssh-client openssh-server dpkg-dev debootstrap rpm systemd-container $(LIBVIRT_PACKAGES)
BENCH_PACKAGES = $(BUILD_PACKAGES) iproute2
# dpkg-shlibdeps lists the libraries that the command is linked with; a script collects licences.
PACKAGE_PACKAGES = $(BUILD_PACKAGES) dpkg-dev python3

# For each target; includes running its corpus.
TEST_FUZZ_SECONDS = 5

# Faults of 'make test', and of 'make test-long', which runs as many as fit into the time. Their seeds are fixed, so that
# failures can be reproduced; 'make campaign CAMPAIGN_SEED=N' uses others.
TEST_CAMPAIGN = --seed 1 --faults 50
TEST_LONG_CAMPAIGN = --seed 2 --seconds 120

# Paths of QEMU's test that take only seconds, through two relays with zstd.
TEST_SUITE = precopy/(tcp|unix)/plain$$|multifd/tcp/plain/(zlib|zstd)$$|postcopy/plain$$

# A seed determines the list of cases. Cases that are in the file are not run again. Three in four faults
# hit the intended moment, so 2,700 cases give at least 2,000 faults.
CAMPAIGN_SEED = 1
CAMPAIGN_FAULTS = 2700
CAMPAIGN_OUT = bench/results/$(shell date -u +%F)-campaign

# Raw result of the matrix of QEMUs. Completed migrations are not repeated, so that an interrupted run continues.
MATRIX_OUT = bench/results/$(shell date -u +%F)-qemu-matrix

# Number of paths of QEMU's test that 'make qemu-suite' runs in parallel.
JOBS = 2

.PHONY: demo build dist deb rpm test test-long test-package test-libvirt fmt lint unit campaign campaign-short qemu-matrix qemu-suite fuzz bench \
	bench-suites bench-relay bench-auto bench-restore bench-agent pictures soak

# Runs of each row in 'make bench-suites', and the content of memory: a folder or a memory image; a generated
# mix by default.
REPEATS = 3
FILL = $(or $(wildcard ../shared/silesia),generated)
OUT = bench/results/$(shell date -u +%F)-$(RESULTS)
BENCH = target/dist/hotlift-bench --out $(OUT) --fill $(FILL)
QEMU = $$(scripts/qemu-10.0)/qemu-system-x86_64
QEMU_7 = /usr/bin/qemu-system-x86_64

# The same work done by QEMU 10.0, without limit: methods, and zero pages never touched and written once.
define PAIRS
-$(BENCH) --method none,zlib,zstd --ram 2G --zero-share 0.1 --repeats 5 --with-qemu $(QEMU)
-$(BENCH) --method none --ram 4G --zero-share 1 --repeats 5 --with-qemu $(QEMU)
-$(BENCH) --method none --ram 4G --zero-share 1 --zero-touched --repeats 5 --with-qemu $(QEMU)
endef

# The build of the tests, which takes less time than 'make build', and a quarter of the default RAM. Its figures are lower.
demo:
	@scripts/install-packages $(BUILD_PACKAGES)
	cargo build --locked --package hotlift-cli
	target/debug/hotlift demo --ram 256M
	@echo "This is the build of the tests. The optimised one:"
	@echo "make build && target/release/hotlift demo"

build:
	@scripts/install-packages $(BUILD_PACKAGES)
	cargo build --release --locked --package hotlift-cli

dist:
	@scripts/install-packages $(BUILD_PACKAGES)
	cargo build --profile dist --locked --package hotlift-cli --package hotlift-bench
	target/dist/hotlift manual target/share
	target/dist/hotlift-bench --manual target/share

deb: dist
	@scripts/install-packages $(PACKAGE_PACKAGES)
	packaging/debian/build target/dist/hotlift
	packaging/debian/build target/dist/hotlift-bench

rpm: dist
	@scripts/install-packages $(PACKAGE_PACKAGES) rpm
	packaging/rpm/build target/dist/hotlift
	packaging/rpm/build target/dist/hotlift-bench

# If a fetch fails, the tests that need the file print "skip: KEY: REASON".
define FETCHED
scripts/linux-guest >/dev/null; \
HOTLIFT_QEMU10=$$(scripts/qemu-10.0); \
HOTLIFT_QEMU11=$$(scripts/qemu-11); \
HOTLIFT_VENDOR_LIBRARIES=$$(scripts/accelerator-libraries); \
HOTLIFT_QEMU_QMP=$$(scripts/qemu-qmp); \
HOTLIFT_PROMTOOL=$$(scripts/promtool); \
export HOTLIFT_PROMTOOL HOTLIFT_QEMU10 HOTLIFT_QEMU11 HOTLIFT_VENDOR_LIBRARIES HOTLIFT_QEMU_QMP;
endef

test:
	@scripts/install-packages $(TEST_PACKAGES)
	@$(FETCHED) $(MAKE) --no-print-directory fmt unit campaign-short
	packaging/test-files target/debug/hotlift

test-long:
	@scripts/install-packages $(TEST_PACKAGES)
	@$(FETCHED) $(MAKE) --no-print-directory campaign-short TEST_CAMPAIGN="$(TEST_LONG_CAMPAIGN)"
	@$(MAKE) --no-print-directory test-package
	scripts/fuzz $(TEST_FUZZ_SECONDS)
	scripts/qemu-suite/suite --hotlift target/debug/hotlift --jobs $(JOBS) --only '$(TEST_SUITE)' --runs alone,zstd

fmt:
	cargo fmt --all --check
	cargo fmt --manifest-path fuzz/Cargo.toml --check
	scripts/pictures --check

# The second build is an embedder's, without the features that the programs turn on.
lint:
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo clippy --package hotlift --package hotlift-example-vmm --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet

# Tests wait for QEMUs and for timeouts; lint uses the cores in the meantime.
unit:
	scripts/run-tests --beside "$(MAKE) --no-print-directory lint"

campaign:
	cargo build --release --locked --package hotlift-cli --package hotlift-testkit
	@scripts/install-packages $(TEST_PACKAGES)
	@mkdir -p $(CAMPAIGN_OUT)
	HOTLIFT_QEMU10=$$(scripts/qemu-10.0) HOTLIFT_QEMU11=$$(scripts/qemu-11) target/release/campaign --seed $(CAMPAIGN_SEED) \
		--faults $(CAMPAIGN_FAULTS) --jobs 6 --out $(CAMPAIGN_OUT)/cases.jsonl

# Both use the test profile, so that nothing is built twice.
test-package:
	@scripts/install-packages $(PACKAGE_PACKAGES) debootstrap rpm systemd-container
	@cargo test --workspace --locked --no-run --quiet
	packaging/test target/debug/hotlift

campaign-short:
	@cargo test --workspace --locked --no-run --quiet
	@if [ "$$(id -u)" = 0 ]; then target/debug/campaign --jobs 4 $(TEST_CAMPAIGN); \
	else echo "skip: root: network namespaces need it (campaign-short)" | tee -a $${HOTLIFT_SKIPS:-/dev/null}; fi

# One line for each combination: its time, "moved" or the reason of the failure.
qemu-matrix:
	@scripts/install-packages $(TEST_PACKAGES)
	@mkdir -p $(MATRIX_OUT)
	HOTLIFT_QEMU10=$$(scripts/qemu-10.0) HOTLIFT_QEMU11=$$(scripts/qemu-11) HOTLIFT_MATRIX_RESULT=$(abspath $(MATRIX_OUT)/combinations.txt) \
		cargo test --locked --package hotlift-cli --test qemu -- --ignored --exact --nocapture --test-threads 1 \
		device_matrix::devices_move_in_every_qemu_by_every_method \
		lazy_machines::guests_run_before_their_pages_in_every_combination_of_machines \
		matrix::machines_move_through_relays_in_every_combination_of_settings

# Prints "skip: qemu-suite: REASON" without QEMU's sources.
qemu-suite: build
	@scripts/install-packages python3
	scripts/qemu-suite/suite --jobs $(JOBS) $(if $(ONLY),--only '$(ONLY)') $(if $(RUNS),--runs $(RUNS))

# Two at a time: each test has its own pair of hosts, and its guests use cores.
test-libvirt:
	@scripts/install-packages $(TEST_PACKAGES)
	cargo test --locked --package hotlift-cli --test libvirt -- --include-ignored --test-threads 2

fuzz:
	@scripts/install-packages $(TEST_PACKAGES)
	scripts/fuzz 300

# A failed run only loses its own line. QEMU 10.0 has no 'compress': 7.2 has it.
bench: RESULTS = pair
bench: dist
	@scripts/install-packages $(BENCH_PACKAGES) qemu-system-x86
	$(PAIRS)
	-$(BENCH) --method compress --level 1 --ram 2G --zero-share 0.1 --repeats $(REPEATS) --with-qemu $(QEMU_7)
	-$(BENCH) --method qpl,uadk,qatzip,lz4 --ram 2G --zero-share 0.1 --repeats $(REPEATS)
	target/dist/hotlift-bench --kept $(OUT)/runs.jsonl

# 'compress' is in 7.2, and in 2.11 as it was before its rework.
bench-suites: RESULTS = suites
bench-suites: dist
	@scripts/install-packages $(BENCH_PACKAGES) qemu-system-x86
	-$(BENCH) --suite all --ram 1G --rate 2000 --repeats $(REPEATS) --with-qemu $(QEMU)
	-$(BENCH) --suite legacy-rework --ram 1G --rate 2000 --repeats 1 --with-qemu $(QEMU_7)
	-$(BENCH) --suite legacy-rework --ram 1G --rate 2000 --repeats 1 --with-qemu $$(scripts/qemu-2.11)/qemu-system-x86_64
	$(PAIRS)
	-$(BENCH) --method none,lz4,zstd,zlib,qatzip --max-bandwidth 25M,62M,125M,312M,625M,0 --ram 512M --zero-share 0.1 --repeats $(REPEATS)
	target/dist/hotlift-bench --kept $(OUT)/runs.jsonl

# Without a limit on the link, QEMU's default of 300 ms would let it pause the guest with some 400 MB left.
RELAYS = $(BENCH) --relays --ram 2G --zero-share 0.1 --repeats $(REPEATS) --with-qemu $(QEMU)
bench-relay: RESULTS = relay
bench-relay: dist
	@scripts/install-packages $(BENCH_PACKAGES)
	-$(RELAYS) --link 200mbit --method none,zlib,zstd
	-$(RELAYS) --link 1gbit --method none,zlib,zstd
	-$(RELAYS) --method none --with downtime-limit=10
	-$(RELAYS) --method none --with downtime-limit=10 --workload random --rate 1000 --working-set 64M
	target/dist/hotlift-bench --kept $(OUT)/runs.jsonl

# Without an image of a Linux guest its rows are omitted.
bench-auto: RESULTS = auto
bench-auto: REPEATS = 5
bench-auto: dist
	@scripts/install-packages $(BENCH_PACKAGES) qemu-system-x86 python3
	-$(BENCH),$$(scripts/linux-guest-ram || echo generated) --suite auto --repeats $(REPEATS)
	-$(RELAYS) --link 200mbit --method none,lz4,zlib,zstd,auto
	-$(RELAYS) --link 1gbit --method none,lz4,zlib,zstd,auto
	target/dist/hotlift-bench --kept $(OUT)/runs.jsonl

# RAM sizes; the saved VMs of one size take 2.7 times as much disk space.
RAM = 512M,2G,8G
bench-restore: RESULTS = restore
bench-restore: REPEATS = 10
bench-restore: FILES = .cache/bench-restore
bench-restore: dist
	@scripts/install-packages $(BENCH_PACKAGES) python3 zstd
	@mkdir -p $(FILES)
	-bench/restore.py --ram $(RAM) --repeats $(REPEATS) $(if $(filter generated,$(FILL)),,--fill $(FILL)) \
		--qemu $(QEMU) --newer-qemu $$(scripts/qemu-11)/qemu-system-x86_64 --files $(FILES) --out $(OUT)
	bench/restore.py --table $(OUT)/runs.jsonl

# RAM of the domain, and total RAM of the domains of the drain.
bench-agent: RESULTS = agent
bench-agent: RAM = 2G
bench-agent: dist
	@scripts/install-packages $(BENCH_PACKAGES) $(LIBVIRT_PACKAGES) qemu-system-x86 nftables python3 zstd
	-bench/agent.py --ram $(RAM) --repeats $(REPEATS) $(if $(filter generated,$(FILL)),,--fill $(FILL)) --out $(OUT)
	bench/agent.py --table $(OUT)/runs.jsonl

# Debian 12 has pikchr in fossil.
pictures:
	@scripts/install-packages fossil python3
	scripts/pictures

soak: RESULTS = soak
soak: HOURS = 2
soak: dist
	@scripts/install-packages $(BENCH_PACKAGES) $(LIBVIRT_PACKAGES) qemu-system-x86 nftables python3 zstd
	bench/soak.py --hours $(HOURS) $(if $(filter generated,$(FILL)),,--fill $(FILL)) --out $(OUT)
