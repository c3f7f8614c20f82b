"""The ways from QEMU to QEMU that relay.py compares, and the links that they take."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """How a QEMU's migration reaches the other QEMU."""

    name: str
    # Channels of the two QEMUs; 0: multifd off.
    channels: int
    # Method of the QEMUs themselves.
    method: str = "none"
    # Method between the two relays; None: no relay.
    relay: str | None = None


WAYS = {way.name: way for way in (
    Way("qemu-main", 0),
    Way("qemu-2", 2),
    Way("qemu-4", 4),
    Way("qemu-zstd", 2, "zstd"),
    Way("relay-none", 2, relay="none"),
    Way("relay-zlib", 2, relay="zlib"),
    Way("relay-zstd", 2, relay="zstd"),
)}
# What a QEMU does that nobody has tuned but for channels: the fastest of these is "plain QEMU".
PLAIN = ("qemu-main", "qemu-2", "qemu-4")
RELAY_CHANNELS = 2


@dataclass(frozen=True)
class Road:
    """A link, and the guest that takes it."""

    name: str
    # bit/s; None: no limit.
    rate: int | None
    # Two namespaces joined by a veth pair; else one, and its loopback device.
    joined: bool = True
    # QEMU stops the guest when the rest fits into this. Its default is 300 ms, which without a limit on the
    # link is some 400 MB: the downtime would then tell how long those take and nothing of the switchover.
    downtime_limit_ms: int = 300
    # The guest runs and writes (its vCPU never sleeps, and takes one of the cores); else it is paused.
    live: bool = False


ROADS = {road.name: road for road in (
    Road("200mbit", 200_000_000),
    Road("1gbit", 1_000_000_000),
    Road("veth", None, downtime_limit_ms=10),
    Road("loopback", None, joined=False, downtime_limit_ms=10),
    Road("200mbit-live", 200_000_000, live=True),
    Road("veth-live", None, downtime_limit_ms=10, live=True),
)}
