"""CPU time of other processes, in nanoseconds, without help from them."""

import os
import threading
import time

# Often enough that a thread which ends is last seen close to its end, rarely enough that reading
# some twenty small files stays below 1 % of a core.
SAMPLE_PERIOD_S = 0.02


def process_cpu_s(pid):
    """CPU seconds of all threads of a process, ended ones included.

    The id is the kernel's "CPU clock of a process" (clock_getcpuclockid(3)): ~pid << 3 | CPUCLOCK_SCHED.
    """
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9


class _Thread:
    def __init__(self, pid, tid):
        task = f"/proc/{pid}/task/{tid}"
        self._schedstat = os.open(f"{task}/schedstat", os.O_RDONLY)
        try:
            self._comm = os.open(f"{task}/comm", os.O_RDONLY)
        except OSError:
            os.close(self._schedstat)
            raise
        self.name, self.cpu_ns = "", 0

    def sample(self):
        # The name is read each time: a thread names itself after it has started.
        self.cpu_ns = int(os.pread(self._schedstat, 64, 0).split()[0])
        self.name = os.pread(self._comm, 64, 0).decode(errors="replace").strip()

    def close(self):
        os.close(self._schedstat)
        os.close(self._comm)


class Meter:
    """CPU time of processes between start() and stop(): exact per process, sampled per thread.

    What a thread used between its last sample and its end is known only in the process's total; it
    is reported as the thread UNSEEN, so that the threads always add up to the process.
    """

    UNSEEN = "(between samples)"

    def __init__(self, pids):
        self._pids = list(pids)
        self._threads = {pid: {} for pid in self._pids}
        self._at_start = {}
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._run, daemon=True)

    def start(self):
        self._sample()
        for pid in self._pids:
            for thread in self._threads[pid].values():
                thread.at_start_ns = thread.cpu_ns
            self._at_start[pid] = process_cpu_s(pid)
        self._sampler.start()

    def stop(self):
        """One {"cpu_s", "threads": [{"name", "cpu_s"}]} per process, in the order given."""
        self._done.set()
        self._sampler.join()
        totals = [process_cpu_s(pid) - self._at_start[pid] for pid in self._pids]
        self._sample()
        return [self._report(pid, total) for pid, total in zip(self._pids, totals)]

    def _report(self, pid, total):
        threads, seen = [], 0.0
        for thread in self._threads[pid].values():
            cpu_s = (thread.cpu_ns - getattr(thread, "at_start_ns", 0)) / 1e9
            thread.close()
            seen += cpu_s
            if cpu_s >= 0.0005:
                threads.append({"name": thread.name, "cpu_s": round(cpu_s, 4)})
        threads.append({"name": self.UNSEEN, "cpu_s": round(total - seen, 4)})
        return {"cpu_s": round(total, 4), "threads": threads}

    def _run(self):
        while not self._done.wait(SAMPLE_PERIOD_S):
            self._sample()

    def _sample(self):
        for pid in self._pids:
            known = self._threads[pid]
            for tid in os.listdir(f"/proc/{pid}/task"):
                try:
                    if tid not in known:
                        known[tid] = _Thread(pid, tid)
                    known[tid].sample()
                except (OSError, IndexError):
                    pass  # the thread ended; its last sample stays
