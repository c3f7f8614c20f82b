/*
 * The only program of the Linux guest. Writes whole pages at a given rate, and checks all of them again
 * and again; what every page must hold follows from one number, the count of writes so far:
 *
 *   write n goes to page n * STEP % PAGES, and STEP and PAGES have no common divisor, so each page is
 *   written once in PAGES writes; its content is a function of the page and of how often it was written.
 *
 * So a page that a migration lost holds the content of an earlier write, and is found. One content in
 * four is a page of zeros: pages become zero again while the guest runs, which a destination must not
 * take for pages that it never got.
 *
 * Says "linux writes=N checks=C bad=B disk=D" on the serial port about four times a second of its own time, and
 * answers whatever line comes on the second one. On a virtio disk, if it has one, it writes a page with each report,
 * past its own cache, and reads an older one: D pages were read, and were what was written.
 *
 * With plugged=MIB it begins once the kernel has so much memory from a virtio-mem device, and writes every page once
 * before the first report. Each report then ends with "plugged=P": P of its pages lie in such memory.
 * Settings are `name=number` words of the kernel's command line, which the kernel hands to init.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
#define WORDS (PAGE / 8)
#define STEP 1237 /* a prime */
#define TICK_US 5000
#define TICKS_A_REPORT 50
#define DISK_PAGES 16
#define MIB (1UL << 20)
#define ABOVE_4_GIB (1UL << 20) /* the first frame; the machine's own RAM is below it, a device's memory is not */

static uint64_t pages = 4096; /* of 4 KiB, no multiple of STEP */
static uint64_t rate = 1000;  /* pages a second */
static uint64_t plugged = 0;  /* MiB of memory of virtio-mem */

/* Splitmix64's finaliser. */
static uint64_t mix(uint64_t z)
{
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return z ^ z >> 31;
}

/* What page `page` holds after it was written `version` times. */
static void content(uint64_t *out, uint64_t page, uint64_t version)
{
	uint64_t seed = page << 32 | version;

	switch (version ? mix(seed) & 3 : 0) {
	case 0: /* zeros, also if never written */
		memset(out, 0, PAGE);
		return;
	case 1: /* one word again and again */
		for (int i = 0; i < WORDS; i++)
			out[i] = mix(seed);
		return;
	case 2: /* compresses to a half */
		for (int i = 0; i < WORDS; i++)
			out[i] = mix(seed + i) & 0xffffffff;
		return;
	default: /* does not compress */
		for (int i = 0; i < WORDS; i++)
			out[i] = mix(seed + i);
	}
}

/* How often page `page` is among writes 1 to n. The inverse of STEP says which write is its first. */
static uint64_t versions(uint64_t page, uint64_t n, uint64_t inverse)
{
	uint64_t first = page * inverse % pages;

	if (first == 0)
		first = pages;
	return n < first ? 0 : (n - first) / pages + 1;
}

/* Has the kernel find virtio disks and virtio-mem. Each module needs those before it. */
static void load_modules(void)
{
	static const char *const modules[] = {
		"/virtio.ko", "/virtio_ring.ko", "/virtio_pci_legacy_dev.ko", "/virtio_pci_modern_dev.ko",
		"/virtio_pci.ko", "/virtio_mem.ko", "/virtio_blk.ko",
	};

	for (size_t i = 0; i < sizeof modules / sizeof *modules; i++) {
		int module = open(modules[i], O_RDONLY);

		if (module >= 0) {
			syscall(SYS_finit_module, module, "", 0);
			close(module);
		}
	}
}

/* Memory that the kernel uses. */
static uint64_t total_mib(void)
{
	struct sysinfo info;

	return sysinfo(&info) ? 0 : info.totalram * info.mem_unit / MIB;
}

/* How many pages of `memory` lie in memory of a device (Linux: Documentation/admin-guide/mm/pagemap.rst). */
static uint64_t plugged_pages(int pagemap, const uint64_t *memory)
{
	static uint64_t entries[WORDS];
	uint64_t count = 0;

	for (uint64_t first = 0; first < pages; first += WORDS) {
		uint64_t some = pages - first < WORDS ? pages - first : WORDS;

		if (pread(pagemap, entries, some * 8, ((uintptr_t)memory / PAGE + first) * 8) != (ssize_t)some * 8)
			return 0;
		for (uint64_t i = 0; i < some; i++)
			count += entries[i] >> 63 && (entries[i] & ((1UL << 55) - 1)) >= ABOVE_4_GIB;
	}
	return count;
}

/* Writes page `count` of the disk's, and reads the one that was written half of a round before; true if that is right. */
static int is_disk_right(int disk, uint64_t count)
{
	static uint64_t buffer[WORDS] __attribute__((aligned(PAGE)));
	uint64_t expected[WORDS], older = count - DISK_PAGES / 2;

	content(buffer, pages + count % DISK_PAGES, count);
	if (pwrite(disk, buffer, PAGE, count % DISK_PAGES * PAGE) != PAGE)
		return 0;
	if (count <= DISK_PAGES / 2)
		return 1;
	content(expected, pages + older % DISK_PAGES, older);
	return pread(disk, buffer, PAGE, older % DISK_PAGES * PAGE) == PAGE && !memcmp(expected, buffer, PAGE);
}

int main(void)
{
	const char *value;
	uint64_t inverse = 1, due = 0, checks = 0, bad = 0, disk_pages = 0;
	/* In memory, not in a register: it must come along with the pages it speaks of. */
	volatile uint64_t writes = 0;
	uint64_t *memory, expected[WORDS];

	if ((value = getenv("pages")))
		pages = strtoull(value, NULL, 10);
	if ((value = getenv("rate")))
		rate = strtoull(value, NULL, 10);
	if ((value = getenv("plugged")))
		plugged = strtoull(value, NULL, 10);
	mkdir("/dev", 0755);
	mkdir("/proc", 0755);
	mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
	mount("proc", "/proc", "proc", 0, NULL);
	int console = open("/dev/ttyS0", O_WRONLY | O_NOCTTY);
	if (console < 0)
		return 1;
	uint64_t boot_mib = total_mib();
	load_modules();
	/* The driver plugs in a thread of its own. */
	while (total_mib() < boot_mib + plugged)
		usleep(TICK_US);
	int disk = open("/dev/vda", O_RDWR | O_DIRECT);
	/* One that is not there gives errors. */
	int talk = open("/dev/ttyS1", O_RDWR | O_NONBLOCK | O_NOCTTY);
	int pagemap = open("/proc/self/pagemap", O_RDONLY);
	memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED || pages % STEP == 0) {
		dprintf(console, "linux BAD settings\n");
		return 1;
	}
	while (inverse * STEP % pages != 1)
		inverse++;

	due = plugged ? pages * 1000000 : 0;

	struct timespec next;
	clock_gettime(CLOCK_MONOTONIC, &next);
	for (uint64_t tick = 0;; tick++) {
		due += rate * TICK_US;
		for (; due >= 1000000; due -= 1000000) {
			uint64_t n = writes + 1, page = n * STEP % pages;

			content(memory + page * WORDS, page, versions(page, n, inverse));
			writes = n;
		}
		if (tick % TICKS_A_REPORT == 0) {
			for (uint64_t page = 0; page < pages; page++) {
				content(expected, page, versions(page, writes, inverse));
				if (memcmp(expected, memory + page * WORDS, PAGE)) {
					if (bad++ == 0)
						dprintf(console, "linux BAD page=%lu writes=%lu expected=%lx got=%lx\n",
							page, writes, expected[0], memory[page * WORDS]);
				}
				checks++;
			}
			if (disk >= 0 && !is_disk_right(disk, ++disk_pages)) {
				bad++;
				dprintf(console, "linux BAD disk page=%lu\n", disk_pages);
			}
			dprintf(console, "linux writes=%lu checks=%lu bad=%lu disk=%lu", writes, checks, bad, disk_pages);
			if (plugged)
				dprintf(console, " plugged=%lu", plugged_pages(pagemap, memory));
			dprintf(console, "\n");
		}
		char line[64];
		ssize_t length = read(talk, line, sizeof line - 1);
		if (length > 0)
			dprintf(talk, "heard %.*s", (int)length, line);
		next.tv_nsec += TICK_US * 1000;
		if (next.tv_nsec >= 1000000000) {
			next.tv_nsec -= 1000000000;
			next.tv_sec++;
		}
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
	}
}
