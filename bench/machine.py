"""What the machine is, and bringing it into the same state before each run."""

import mmap
import os
import platform
import threading
from pathlib import Path

MADV_POPULATE_WRITE = 23  # linux/mman.h; not in the mmap module
HUGE_PAGE = 2 << 20
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


def busy_s():
    """Seconds that all CPUs together have worked since the machine was started, interrupts and other work included."""
    # user nice system idle iowait irq softirq; guest time is in user already (proc_stat(5)).
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class WarmMemory:
    """Memory that the host has already backed, handed to the destination as it needs it.

    On a virtual machine with free page reporting, the host takes back what lay free for two seconds
    (PAGE_REPORTING_DELAY), and the next first touch of it costs an exit: populating 2 GiB ran at 1
    to 2 GB/s instead of 5, and the destination of a 2 GiB migration spent up to 3.9 s of CPU instead
    of 1.0 s, three quarters of it in clear_page. So the memory is held here, and freed only a little
    ahead of its use.
    """

    AHEAD = 512 << 20
    PERIOD_S = 0.01

    def __init__(self, length):
        self._length = max(min(length, _meminfo("MemAvailable") - LEFT_FREE), mmap.PAGESIZE)
        self._length -= self._length % mmap.PAGESIZE
        self._memory = mmap.mmap(-1, self._length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory.madvise(MADV_POPULATE_WRITE)
        self._freed = 0
        self._end = threading.Event()
        self._follower = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._end.set()
        if self._follower:
            self._follower.join()
        self._memory.close()

    def follow(self, resident):
        """Frees AHEAD at once, then as much as `resident()`, a number of bytes, grows."""
        start = resident()
        self._free_up_to(self.AHEAD)

        def run():
            while self._freed < self._length and not self._end.wait(self.PERIOD_S):
                self._free_up_to(self.AHEAD + resident() - start)

        self._follower = threading.Thread(target=run, daemon=True)
        self._follower.start()

    def _free_up_to(self, length):
        length = min(length - length % HUGE_PAGE, self._length)
        if length > self._freed:
            self._memory.madvise(mmap.MADV_DONTNEED, self._freed, length - self._freed)
            self._freed = length


def resident(pid):
    """Bytes of a process that are in memory; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return 0


def descendants(pid):
    """A process and all that it started, directly or not."""
    found = [pid]
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += descendants(int(child))
    except OSError:
        pass  # ended meanwhile
    return found


def _meminfo(name):
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise SystemExit(f"no {name} in /proc/meminfo")
