"""What the machine is, and bringing it into the same state before each run."""

import mmap
import os
import platform
from pathlib import Path

MADV_POPULATE_WRITE = 23  # linux/mman.h; not in the mmap module
# Other work on the machine must not run out of memory because of us.
LEFT_FREE = 4 << 30


def facts():
    cpus = Path("/proc/cpuinfo").read_text()
    model = next(line.split(":", 1)[1].strip() for line in cpus.splitlines() if line.startswith("model name"))
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "memory_bytes": _meminfo("MemTotal"),
        "kernel": platform.release(),
        "transparent_huge_pages": Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(),
    }


def load():
    """Load average of the last minute: work of others shows here."""
    return os.getloadavg()[0]


class WarmMemory:
    """Memory that the host has already backed, until the `with` block ends.

    On a virtual machine with free page reporting, the host takes back what lay free for two seconds
    (PAGE_REPORTING_DELAY), and the next first touch of it costs an exit: populating 2 GiB ran at 1
    to 2 GB/s instead of 5, and the destination of a 2 GiB migration spent up to 3.9 s of CPU instead
    of 1.0 s, three quarters of it in clear_page.
    """

    def __init__(self, length):
        length = max(min(length, _meminfo("MemAvailable") - LEFT_FREE), mmap.PAGESIZE)
        length -= length % mmap.PAGESIZE
        self._memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory.madvise(MADV_POPULATE_WRITE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._memory.close()


def _meminfo(name):
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise SystemExit(f"no {name} in /proc/meminfo")
