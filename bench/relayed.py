"""One migration from QEMU to QEMU over a link, straight or through a pair of relays, measured from outside."""

import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

import machine
from cpu import Meter
from network import TIED
from process import Process
from qemu import PAUSED, UNLIMITED, Vm, file_pieces
from ways import RELAY_CHANNELS

RAM_BYTES = 2 << 30
# Below lie the guest program, its table and its working set: it must find there what it wrote.
LIVE_FIRST = 128 << 20
LIVE_GUEST = "workload=random rate=1000 ws=67108864 tsc_khz=2500000"
# The guest says a line a second.
GUEST_LINE_S = 120


class Relay(Process):
    """A `hotlift relay` process."""

    def __init__(self, binary, side, listen, connect, channels, method, prefix, folder):
        self.command = [binary, "relay", side, "--listen", listen, "--connect", connect, "--json",
                        "--multifd-channels", str(channels), "--multifd-compression", method]
        command = [*TIED, *prefix, *self.command]
        super().__init__(command, folder, f"relay-{side}", stdout=subprocess.PIPE, text=True)
        found = re.fullmatch(r"listening on (\S+)\n", self._process.stdout.readline())
        if not found:
            self.close()
            raise SystemExit(f"relay {side} did not start: {self.stderr()}")
        self.address = found[1]

    def await_end(self):
        """Blocks until the process has ended, and leaves it unreaped: its CPU clock can still be read."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def report(self):
        """What it prints at its end."""
        output = self._process.stdout.read()
        if self._process.wait() != 0:
            raise SystemExit(f"{' '.join(self.command)} ended with {self._process.returncode}: {self.stderr()}")
        return json.loads(output.splitlines()[-1])


def run(way, road, link, image, settings, warm):
    """One migration; returns a run, to be kept as a line of JSON.

    `settings` has `qemu` and `hotlift` (binaries), `accel`, and `guest` (the guest program's ELF, for live
    roads). `warm` (machine.WarmMemory) feeds the destination.
    """
    first = LIVE_FIRST if road.live else 0
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hotlift-bench-"))
        source, destination = (stack.enter_context(_vm(settings, road, prefix, folder, name))
                               for name, prefix in zip(("source", "destination"), link.prefixes))
        source.write_ram(piece for piece in file_pieces(image) if piece[0] >= first)
        if road.live:
            source.qmp("cont")
            _await_guest(folder, "source")
        parameters = _set_up(source, destination, way, road)
        relays = _relays(stack, settings, way, link, folder)
        if relays:
            destination.qmp("migrate-incoming", uri=f"unix:{folder}/destination.sock")
            uri = f"unix:{folder}/source.sock"
        else:
            destination.qmp("migrate-incoming", uri=f"tcp:{link.address}:0")
            uri = f"tcp:{link.address}:{destination.qmp('query-migrate')['socket-address'][0]['port']}"

        processes = {"source": source, **relays, "destination": destination}
        meter = Meter([process.pid for process in processes.values()])
        warm.follow(lambda: machine.resident(destination.pid))
        on_the_wire, busy = link.sent_bytes(), machine.busy_s()
        meter.start()
        begin = time.monotonic()
        source.qmp("migrate", uri=uri)
        try:
            source.await_migration()
            destination.await_migration()
        except SystemExit as error:
            said = "; ".join(f"{name}: {relay.stderr()}" for name, relay in relays.items())
            raise SystemExit(f"{error} {said}") from None
        wall = time.monotonic() - begin
        for vm in (source, destination):
            vm.await_end_of_migration_threads()
        for relay in relays.values():
            relay.await_end()
        cpu = dict(zip(processes, meter.stop()))
        busy = machine.busy_s() - busy
        on_the_wire = link.sent_bytes() - on_the_wire

        info = source.qmp("query-migrate")
        stopped = None
        if road.live:
            stopped = round((destination.event_s("RESUME") - source.event_s("STOP")) * 1e3, 1)
            _await_guest(folder, "destination")
            destination.qmp("stop")
        return {
            "status": info["status"],
            "verified": destination.ram_equals(source.ram_pieces(first)),
            "channels": way.channels,
            "method": way.method,
            "relay_channels": RELAY_CHANNELS if relays else None,
            "relay_method": way.relay,
            "link_bit_s": road.rate,
            "downtime_limit_ms": parameters["downtime-limit"],
            "zero_page_detection": parameters["zero-page-detection"],
            "live": road.live,
            "ram_bytes": RAM_BYTES,
            "total_ms": info["total-time"],
            "downtime_ms": info["downtime"],
            "stopped_ms": stopped,
            "wall_ms": round(wall * 1e3, 1),
            "rounds": info["ram"]["dirty-sync-count"],
            "normal_pages": info["ram"]["normal"],
            "zero_pages": info["ram"]["duplicate"],
            "wire_bytes": on_the_wire,
            "cpu": cpu,
            "machine_busy_s": round(busy, 3),
            "relays": {name: relay.report() for name, relay in relays.items()},
            "commands": {name: process.command for name, process in processes.items()},
        }


def _vm(settings, road, prefix, folder, name):
    extra = ["-incoming", "defer"] if name == "destination" else []
    # A source waits until its RAM is filled; a destination of a guest that runs goes on by itself.
    if name == "source" or not road.live:
        extra += PAUSED
    if road.live:
        extra += ["-kernel", settings.guest, "-append", LIVE_GUEST, "-serial", f"file:{folder}/{name}.serial"]
    return Vm(settings.qemu, settings.accel, RAM_BYTES, folder, name, extra, [*TIED, *prefix])


def _set_up(source, destination, way, road):
    """As libvirt sets up every migration, but for the limit of bandwidth; returns the parameters."""
    for vm in (source, destination):
        vm.qmp("migrate-set-capabilities", capabilities=[
            {"capability": "events", "state": True},
            {"capability": "return-path", "state": True},
            {"capability": "multifd", "state": way.channels > 0}])
        vm.qmp("migrate-set-parameters", max_bandwidth=UNLIMITED, downtime_limit=road.downtime_limit_ms,
               multifd_channels=max(way.channels, 1), multifd_compression=way.method)
    return source.qmp("query-migrate-parameters")


def _relays(stack, settings, way, link, folder):
    """The two relays by name; none if the way has none."""
    if way.relay is None:
        return {}
    far = stack.enter_context(Relay(
        settings.hotlift, "destination", f"tcp:{link.address}:0", f"unix:{folder}/destination.sock",
        max(way.channels, 1), "none", link.prefixes[1], folder))
    near = stack.enter_context(Relay(
        settings.hotlift, "source", f"unix:{folder}/source.sock", far.address,
        RELAY_CHANNELS, way.relay, link.prefixes[0], folder))
    return {"relay_source": near, "relay_destination": far}


def _await_guest(folder, name):
    """Blocks until the guest has counted on, and says that it found all that it wrote."""
    deadline = time.monotonic() + GUEST_LINE_S
    while time.monotonic() < deadline:
        lines = re.findall(r"writes=([1-9]\d*) errors=(\d+)\n", Path(folder, f"{name}.serial").read_text())
        if lines:
            if lines[-1][1] != "0":
                raise SystemExit(f"the guest at the {name} lost {lines[-1][1]} writes")
            return
        time.sleep(0.05)
    raise SystemExit(f"the guest at the {name} says nothing")
