"""One migration between two paused QEMU processes, measured from outside."""

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from cpu import Meter
from machine import resident
from process import Process

PIECE = 4 << 20
# Above any link: QEMU's default of 128 MiB/s would be the only thing measured.
UNLIMITED = 10**12
DEADLINE_S = 600
# Nothing of the machine matters but its RAM; q35 or pc makes no difference.
MACHINE = ["-machine", "pc", "-nodefaults", "-display", "none", "-name", "bench,debug-threads=on"]
# The vCPUs wait for `cont`.
PAUSED = ["-S"]


def version(binary):
    out = subprocess.run([binary, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return out.splitlines()[0].removeprefix("QEMU emulator version ")


def qemu_10_0():
    script = Path(__file__).resolve().parent.parent / "scripts/qemu-10.0"
    folder = subprocess.run([script], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return f"{folder}/qemu-system-x86_64"


class Vm(Process):
    """A QEMU process with a QMP connection.

    `prefix` is a command that runs the command, such as one that enters a network namespace.
    """

    def __init__(self, binary, accel, ram_bytes, folder, name, extra=(), prefix=()):
        qmp = Path(folder) / f"{name}.qmp"
        self._ram_bytes = ram_bytes
        self.command = [binary, *MACHINE, "-accel", accel, "-m", f"{ram_bytes >> 20}M", *extra]
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(qmp))
        listener.listen(1)
        listener.settimeout(30)
        # QEMU connects to us, so there is no moment at which its socket may not exist yet.
        super().__init__([*prefix, *self.command, "-qmp", f"unix:{qmp}"], folder, name)
        try:
            self._socket, _ = listener.accept()
        except TimeoutError:
            self.close()
            raise SystemExit(f"{name}: QEMU did not start: {self.stderr()}") from None
        self._socket.settimeout(DEADLINE_S)
        self._lines = self._socket.makefile("rb")
        # Events not looked at yet, and those that were.
        self._events, self._past = [], []
        self._receive()  # greeting
        self.qmp("qmp_capabilities")

    def _receive(self):
        line = self._lines.readline()
        if not line:
            raise SystemExit(f"QEMU ended: {self.stderr()}")
        return json.loads(line)

    def qmp(self, command, **arguments):
        request = {"execute": command, "arguments": {k.replace("_", "-"): v for k, v in arguments.items()}}
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        while True:
            answer = self._receive()
            if "event" in answer:
                self._events.append(answer)
            elif "error" in answer:
                raise SystemExit(f"{command}: {answer['error']['desc']}")
            else:
                return answer["return"]

    def await_migration(self):
        """Blocks until this side reports `completed`; any other end is an error."""
        while True:
            event = self._events.pop(0) if self._events else self._receive()
            self._past.append(event)
            if event.get("event") != "MIGRATION":
                continue
            status = event["data"]["status"]
            if status == "completed":
                return
            if status in ("failed", "cancelled"):
                raise SystemExit(f"migration {status}: {self.qmp('query-migrate').get('error-desc')} {self.stderr()}")

    def event_s(self, name):
        """When the last event of this name was sent, in seconds of the wall clock; it must have come already."""
        self.qmp("query-status")  # events before its answer are read with it
        at = [event["timestamp"] for event in self._past + self._events if event["event"] == name][-1]
        return at["seconds"] + at["microseconds"] / 1e6

    def await_end_of_migration_threads(self):
        """QEMU reports `completed` before it has joined its channel threads; they still count."""
        # The last three are those of 7.2.
        ours = ("mig/", "multifd", "live_migration", "compress", "decompress")
        while any(name.startswith(ours) for name in self._thread_names()):
            time.sleep(0.001)

    def _thread_names(self):
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            try:
                yield (task / "comm").read_text()
            except OSError:
                pass

    def _ram_address(self):
        found = []
        for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines():
            span, mode, _, _, inode, *path = line.split()
            first, last = (int(end, 16) for end in span.split("-"))
            if last - first == self._ram_bytes and mode == "rw-p" and inode == "0" and not path:
                found.append(first)
        if len(found) != 1:
            raise SystemExit(f"{len(found)} mappings of {self._ram_bytes} bytes in QEMU, expected 1")
        return found[0]

    def write_ram(self, pieces):
        """Writes (offset, bytes) pieces into guest RAM; needs ptrace rights over QEMU (root)."""
        address = self._ram_address()
        with open(f"/proc/{self.pid}/mem", "r+b", buffering=0) as memory:
            for offset, data in pieces:
                if os.pwrite(memory.fileno(), data, address + offset) != len(data):
                    raise SystemExit(f"short write into guest RAM at {offset:#x}")

    def check_guest_sees(self, offset, data, folder):
        """Reads guest-physical memory through QEMU itself: proves that write_ram found the RAM."""
        dump = Path(folder) / "pmemsave"
        self.qmp("pmemsave", val=offset, size=len(data), filename=str(dump))
        if dump.read_bytes() != data:
            raise SystemExit(f"guest-physical {offset:#x} does not hold what was written")

    def ram_pieces(self, first=0):
        """Guest RAM from offset `first` on, as (offset, bytes) pieces."""
        address = self._ram_address()
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            for at in range(first, self._ram_bytes, PIECE):
                yield at, os.pread(memory.fileno(), PIECE, address + at)

    def ram_equals(self, pieces):
        address = self._ram_address()
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            return all(os.pread(memory.fileno(), len(data), address + offset) == data for offset, data in pieces)

    def huge_page_bytes(self):
        rollup = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        return int(rollup.split("AnonHugePages:")[1].split()[0]) << 10


def contents(case, image):
    """What guest RAM holds, as (offset, bytes) pieces."""
    if case.fill != "image":
        return ((at, bytes(PIECE)) for at in range(0, case.ram_bytes, PIECE))
    return file_pieces(image)


def file_pieces(image):
    """A file as (offset, bytes) pieces."""
    with open(image, "rb", buffering=0) as file:
        at = 0
        while data := file.read(PIECE):
            yield at, data
            at += len(data)


def _prepare(vm, case, image, folder):
    if case.fill == "untouched":
        return
    if case.fill == "touched":
        ones = b"\xff" * PIECE
        vm.write_ram((at, ones) for at in range(0, case.ram_bytes, PIECE))
        vm.check_guest_sees(1 << 20, ones, folder)
    vm.write_ram(contents(case, image))
    for offset, data in contents(case, image):
        # Below 1 MiB lies the video hole, above 3 GiB the PCI hole: one piece is proof enough.
        if offset == PIECE:
            vm.check_guest_sees(offset, data, folder)
            break


def _no_profiler(_source, _destination):
    return contextlib.nullcontext()


def run(case, image, binary, warm, accel="kvm", channels=2, during=_no_profiler):
    """One migration; returns a run in the shape of Hotlift's `--json`.

    `warm` (machine.WarmMemory) feeds the destination. `during(source_pid, destination_pid)` gives a context manager that is held over the measured time.
    """
    with tempfile.TemporaryDirectory(prefix="hotlift-bench-") as folder, \
            Vm(binary, accel, case.ram_bytes, folder, "source", PAUSED) as source, \
            Vm(binary, accel, case.ram_bytes, folder, "destination", [*PAUSED, "-incoming", "defer"]) as destination:
        _prepare(source, case, image, folder)
        for vm in (source, destination):
            kind = "compress" if case.method == "compress" else "multifd"
            vm.qmp("migrate-set-capabilities", capabilities=[
                {"capability": name, "state": True} for name in (kind, "events")])
            vm.qmp("migrate-set-parameters", max_bandwidth=UNLIMITED, **_parameters(case, channels))
        destination.qmp("migrate-incoming", uri="tcp:127.0.0.1:0")
        port = destination.qmp("query-migrate")["socket-address"][0]["port"]
        parameters = source.qmp("query-migrate-parameters")
        huge = source.huge_page_bytes()

        def migrate():
            meter = Meter([source.pid, destination.pid])
            meter.start()
            begin = time.monotonic()
            source.qmp("migrate", uri=f"tcp:127.0.0.1:{port}")
            source.await_migration()
            destination.await_migration()
            wall = time.monotonic() - begin
            for vm in (source, destination):
                vm.await_end_of_migration_threads()
            return wall, *meter.stop()

        with during(source.pid, destination.pid):
            warm.follow(lambda: resident(destination.pid))
            wall, source_cpu, destination_cpu = migrate()
        info = source.qmp("query-migrate")
        verified = destination.ram_equals(contents(case, image))
        command = source.command
    ram = info["ram"]
    return {
        "status": info["status"],
        "verified": verified,
        "method": case.method,
        "level": case.level,
        "channels": channels,
        "zero_page_detection": parameters.get("zero-page-detection"),
        "max_bandwidth": 0,
        "downtime_limit_ms": parameters["downtime-limit"],
        "ram_bytes": case.ram_bytes,
        "total_ms": info["total-time"],
        "setup_ms": info["setup-time"],
        "downtime_ms": info["downtime"],
        "wall_ms": round(wall * 1e3, 1),
        "rounds": ram["dirty-sync-count"],
        "transferred_bytes": ram["transferred"],
        # Pages of capability `compress` are counted apart.
        "normal_pages": ram["normal"] + info.get("compression", {}).get("pages", 0),
        "zero_pages": ram["duplicate"],
        "source": source_cpu,
        "destination": destination_cpu,
        "source_huge_page_bytes": huge,
        "command": command,
    }


def _parameters(case, channels):
    if case.method == "compress":
        # The threads are QEMU's default.
        return {"compress_level": case.level}
    level = {f"multifd_{case.method}_level": case.level} if case.level is not None else {}
    return {"multifd_channels": channels, "multifd_compression": case.method, **level}
