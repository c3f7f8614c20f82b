"""The settings that are compared."""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """One migration of a guest that does not write."""

    name: str
    ram_bytes: int
    # "image": the Silesia image. "touched": every page written, then zero. "untouched": never written.
    fill: str
    method: str = "none"
    level: int | None = None
    # Debian's QEMU is built without the methods of accelerators, and has no lz4.
    sides: tuple = ("qemu", "hotlift")


CASES = {case.name: case for case in (
    Case("none", 2 * GIB, "image"),
    Case("zlib", 2 * GIB, "image", "zlib", 1),
    Case("zstd", 2 * GIB, "image", "zstd", 1),
    # By threads, on the main channel, as QEMU has it up to 9.0.
    Case("compress", 2 * GIB, "image", "compress", 1),
    Case("qpl", 2 * GIB, "image", "qpl", sides=("hotlift",)),
    Case("uadk", 2 * GIB, "image", "uadk", sides=("hotlift",)),
    Case("qatzip", 2 * GIB, "image", "qatzip", 1, sides=("hotlift",)),
    Case("lz4", 2 * GIB, "image", "lz4", sides=("hotlift",)),
    Case("zero-touched", 4 * GIB, "touched"),
    Case("zero-untouched", 4 * GIB, "untouched"),
)}
IMAGE_BYTES = 2 * GIB
ZERO_SHARE = 0.1
SEED = 1
