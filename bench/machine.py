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


def warm_memory(length):
    """Touches and frees `length` bytes, so that the runs get memory the host has already backed.

    On a virtual machine with free page reporting, memory that lay free for some seconds is taken
    back by the host, and its next first touch costs an exit: the destination of a 2 GiB migration
    then spent 3.9 s of CPU instead of 1.0 s, three quarters of it in clear_page.
    """
    length = min(length, _meminfo("MemAvailable") - LEFT_FREE)
    if length <= 0:
        return
    with mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(MADV_POPULATE_WRITE)


def _meminfo(name):
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise SystemExit(f"no {name} in /proc/meminfo")
