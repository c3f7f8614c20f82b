"""The bytes that both sides put into guest RAM: a file as large as the RAM."""

import json
import random
import subprocess
from pathlib import Path

PAGE = 4096
ZERO_PAGE = bytes(PAGE)


def image(cache, corpus, ram_bytes, zero_share, seed):
    """Path of the image, made if it is not in the cache yet.

    The corpus runs through all pages but a seeded choice of `zero_share` of them, which are zero.
    Each time the corpus starts again its bytes are XORed with another constant: the ratio of every
    order-preserving codec stays, but no window and no deduplication finds the earlier repetition.
    """
    folder = Path(cache) / f"fill-{ram_bytes >> 20}M-zero{zero_share:g}-seed{seed}"
    path, facts = folder / "ram.img", folder.with_name(f"{folder.name}.json")
    if facts.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    pages = ram_bytes // PAGE
    zero = set(random.Random(seed).sample(range(pages), round(pages * zero_share)))
    files = sorted(Path(corpus).glob("*.zst"))
    if not files:
        raise SystemExit(f"fill: no .zst file in {corpus}")
    source = _stream(b"".join(_unpacked(file) for file in files))
    zero_pages = 0
    with open(path, "wb", buffering=4 << 20) as out:
        for page in range(pages):
            data = ZERO_PAGE if page in zero else next(source)
            zero_pages += data == ZERO_PAGE
            out.write(data)
    facts.write_text(json.dumps({
        "corpus": [file.stem for file in files],
        "bytes": ram_bytes,
        "zero_pages": zero_pages,
        "seed": seed,
    }) + "\n")
    return path


def _unpacked(file):
    return subprocess.run(["zstd", "-dcq", str(file)], check=True, stdout=subprocess.PIPE).stdout


def _stream(corpus):
    """The pages of the endlessly repeated corpus; a page never spans two repetitions."""
    repetition = 0
    while True:
        data = corpus.translate(bytes(byte ^ (repetition & 0xFF) for byte in range(256)))
        for at in range(0, len(data) - PAGE + 1, PAGE):
            yield data[at:at + PAGE]
        repetition += 1
