"""Two network namespaces joined by a veth pair that carries as much as a given link, and no more."""

import contextlib
import subprocess

# Children end with this process however it ends (SIGKILL included), and the namespaces and the veth
# pair, which have no name, end with the children that live in them. So nothing is ever left behind.
TIED = ("setpriv", "--pdeathsig", "KILL")
# RFC 5737: addresses for examples, that no route leads to.
ADDRESSES = ("192.0.2.1", "192.0.2.2")
LOOPBACK = "127.0.0.1"
# tc-tbf(8): the bucket must hold what the rate carries in one timer tick (at 1 Gbit/s and HZ=100
# 1.25 MB), and a packet of 64 KiB before segmentation.
BURST_S = 0.012
LEAST_BURST = 128 << 10
# The queue of a switch's port. TCP keeps its own share of it short (TSQ), so that nothing is dropped here.
LATENCY = "20ms"


class Link:
    """Where source and destination stand. `rate` is in bit/s; None: as fast as this machine.

    `prefixes` are the command prefixes that start a process at the source and at the destination, `address`
    is the destination's. With `joined=False` both ends share one namespace and its loopback device.
    """

    def __init__(self, rate=None, joined=True):
        self._rate, self._joined, self._holders = rate, joined, []

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            ends = [stack.enter_context(_holder()) for _ in range(2 if self._joined else 1)]
            self._pids = [ends[0].pid, ends[-1].pid]
            self.prefixes = [_enter(pid) for pid in self._pids]
            self.address = ADDRESSES[1] if self._joined else LOOPBACK
            for pid in set(self._pids):
                _run(*_enter(pid), "ip", "link", "set", "lo", "up")
            if self._joined:
                self._join()
            self._holders = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._holders.close()

    def _join(self):
        first, second = self._pids
        _run("ip", "link", "add", "name", "veth", "netns", str(first), "type", "veth",
             "peer", "name", "veth", "netns", str(second))
        for prefix, address in zip(self.prefixes, ADDRESSES):
            _run(*prefix, "ip", "address", "add", f"{address}/24", "dev", "veth")
            _run(*prefix, "ip", "link", "set", "veth", "up")
            if self._rate:
                burst = max(LEAST_BURST, int(self._rate / 8 * BURST_S))
                _run(*prefix, "tc", "qdisc", "add", "dev", "veth", "root", "tbf",
                     "rate", f"{self._rate}bit", "burst", str(burst), "latency", LATENCY)


@contextlib.contextmanager
def _holder():
    """A process that lives in a network namespace of its own, and thereby keeps it."""
    # The line comes from within the namespace: it stands.
    holder = subprocess.Popen([*TIED, "unshare", "--net", "sh", "-c", "echo stands; exec sleep infinity"],
                              stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    try:
        if not holder.stdout.readline():
            raise SystemExit("no network namespace: root is needed")
        yield holder
    finally:
        holder.kill()
        holder.wait()


def _enter(pid):
    return ["nsenter", f"--net=/proc/{pid}/ns/net"]


def _run(*command):
    subprocess.run(command, check=True)
