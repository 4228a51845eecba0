"""A small TFRecord set whose images are cheap to decode, for tests that damage or count records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import simplejpeg

from drawbar.dataset.example import encode_example
from drawbar.dataset.manifest import MANIFEST_NAME, Manifest, ShardEntry
from drawbar.dataset.tfrecord import frame

NUM_CLASSES = 10


def image(number: int, size: int = 48) -> bytes:
    rng = np.random.default_rng(number)
    blocks = rng.integers(0, 256, (6, 8, 3), np.uint8)
    pixels = np.kron(blocks, np.ones((size // 6, size // 6, 1), np.uint8))
    encoded: bytes = simplejpeg.encode_jpeg(pixels, quality=90, colorsubsampling="420")
    return encoded


def example(number: int, label: int, encoded: bytes) -> bytes:
    return encode_example(
        {"image/encoded": encoded, "image/class/label": [label], "image/filename": f"{number}.JPEG".encode()}
    )


def write_set(
    folder: Path,
    *,
    num_shards: int = 4,
    records_per_shard: int = 24,
    manifest: bool = True,
    payloads: dict[int, bytes] | None = None,
) -> list[Path]:
    """Shards of numbered records, labels 1 to 10 in turn; `payloads` replaces some by number."""
    folder.mkdir(parents=True, exist_ok=True)
    entries, paths, counts = [], [], [0] * NUM_CLASSES
    for shard in range(num_shards):
        framed = []
        for number in range(shard * records_per_shard, (shard + 1) * records_per_shard):
            counts[number % NUM_CLASSES] += 1
            payload = (payloads or {}).get(number) or example(number, 1 + number % NUM_CLASSES, image(number))
            framed.append(frame(payload))
        path = folder / f"train-{shard:05d}-of-{num_shards:05d}"
        path.write_bytes(b"".join(framed))
        paths.append(path)
        entries.append(
            ShardEntry(
                name=path.name,
                size_bytes=path.stat().st_size,
                num_records=len(framed),
                crc32c="00000000",
                record_bytes=tuple(map(len, framed)),
            )
        )
    if manifest:
        text = Manifest(
            split="train",
            seed=1,
            labels=tuple(f"n{i:08d}" for i in range(NUM_CLASSES)),
            class_counts=tuple(counts),
            shards=tuple(entries),
        ).dumps()
        (folder / MANIFEST_NAME).write_text(text)
    return paths


def offsets(path: Path) -> list[int]:
    """Where each record of a sound shard starts."""
    data, found, position = path.read_bytes(), [], 0
    while position < len(data):
        found.append(position)
        position += 16 + int.from_bytes(data[position : position + 8], "little")
    return found
