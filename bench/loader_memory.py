"""Resident size of one rank's loader over sets of 1,000 to 100,000 records, and its time to the first batch.

    python bench/loader_memory.py [--records 1000 10000 100000] [--images 40000] [--limit 1.1]

Each size is measured in a process of its own, with a rank's environment (allocator settings included), that reads as
many images as the others, whatever its set has: records of 110 kB, of which the picture is small, so that bytes and
records pass as in a run and decoding takes no time. The shards of all sets are hard links to one of 1,000 records: no
set takes room on the disk. The largest resident size is set against the smallest, and printed beside the bound that
`input/loader.py` states. The last line is one JSON object; exit code 1 where the ratio is beyond `--limit` or a first
batch took more than 2 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
import simplejpeg

from drawbar.config import Input, Recipe, Storage
from drawbar.dataset.example import encode_example
from drawbar.dataset.listing import list_shards
from drawbar.dataset.manifest import MANIFEST_NAME, Manifest, ShardEntry
from drawbar.dataset.tfrecord import frame
from drawbar.input.loader import Loader, ReadPlan
from drawbar.launch.environment import rank_environment
from drawbar.storage.reader import CountedReader
from drawbar.storage.stores import open_place

_SHARD_RECORDS = 1000
_BATCH_SIZE = 50
_FIRST_BATCH_GOAL_S = 2.0


def write_shard(path: Path) -> tuple[int, ...]:
    """Small pictures in records of about 110 kB. Returns their framed sizes."""
    rng = np.random.default_rng(1)
    framed = []
    for _ in range(_SHARD_RECORDS):
        pixels = np.kron(rng.integers(0, 256, (6, 8, 3), np.uint8), np.ones((8, 8, 1), np.uint8))
        encoded = simplejpeg.encode_jpeg(pixels, quality=90)
        filler = bytes(int(rng.integers(60_000, 160_000)))
        framed.append(
            frame(encode_example({"image/encoded": encoded, "image/class/label": [1], "image/filler": filler}))
        )
    path.write_bytes(b"".join(framed))
    return tuple(map(len, framed))


def write_set(folder: Path, shard: Path, record_bytes: tuple[int, ...], num_records: int) -> None:
    folder.mkdir()
    num_shards = num_records // _SHARD_RECORDS
    entries = []
    for number in range(num_shards):
        name = f"train-{number:05d}-of-{num_shards:05d}"
        os.link(shard, folder / name)
        entries.append(
            ShardEntry(
                name=name,
                size_bytes=sum(record_bytes),
                num_records=len(record_bytes),
                crc32c="00000000",
                record_bytes=record_bytes,
            )
        )
    manifest = Manifest(
        split="train", seed=1, labels=("n00000000",), class_counts=(num_records,), shards=tuple(entries)
    )
    (folder / MANIFEST_NAME).write_text(manifest.dumps())


def read_set(folder: Path, num_images: int) -> dict[str, float]:
    """Reads `num_images` images, over as many epochs as that takes; the resident size is looked at with every batch."""
    storage, settings = Storage(), Input(image_size=32)
    place = open_place(str(folder), None, None, storage)
    reader = CountedReader(place, storage, lambda request: None)
    plan = ReadPlan(shards=list_shards(place.store, place.prefix).shards, rank=0, world_size=1, batch_size=_BATCH_SIZE)
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    loader = Loader(plan, reader, num_classes=1, input=settings, storage=storage, decode_threads=2)
    peaks_bytes = [0, 0]
    for first in range(0, num_images, _BATCH_SIZE):
        loader.recycle(loader.next_batch(60))
        half = 2 * first // num_images
        peaks_bytes[half] = max(peaks_bytes[half], process.memory_info().rss)
    totals, report = loader.close(), loader.report()
    if totals.received_bytes != totals.trained_bytes + totals.discarded_bytes:
        raise SystemExit(f"bytes do not add up: {totals}")
    record_bytes = sum(shard.size_bytes for shard in plan.shards) / sum(shard.num_records or 0 for shard in plan.shards)
    held_records = settings.shuffle_buffer + (settings.prefetch_batches + 2) * _BATCH_SIZE
    bodies_bytes = (report.lanes + report.read_ahead + 1) * report.request_bytes
    return {
        "peak_rss_mb": max(peaks_bytes) / 1e6,
        "first_half_mb": peaks_bytes[0] / 1e6,
        "before_mb": before_bytes / 1e6,
        "bound_mb": (bodies_bytes + held_records * record_bytes) / 1e6,
        "request_mib": report.request_bytes / 2**20,
        "read_ahead": report.read_ahead,
        "first_batch_s": report.first_batch_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="in thousands")
    parser.add_argument("--images", type=int, default=40_000, help="read from each set")
    parser.add_argument("--limit", type=float, default=1.1, help="largest over smallest resident size")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(read_set(options.one, options.images)))
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="drawbar-bench-") as name:
        base = Path(name)
        record_bytes = write_shard(base / "shard")
        for num_records in options.records:
            folder = base / str(num_records)
            write_set(folder, base / "shard", record_bytes, num_records)
            done = subprocess.run(
                [sys.executable, __file__, "--one", str(folder), "--images", str(options.images)],
                env=rank_environment(Recipe(), os.environ, 1),
                check=True,
                capture_output=True,
                text=True,
                timeout=600,
            )
            row = json.loads(done.stdout)
            rows.append(row)
            print(
                f"{num_records:>9,} records: peak {row['peak_rss_mb']:.1f} MB (first half {row['first_half_mb']:.1f}, "
                f"before the loader {row['before_mb']:.1f}), GETs of {row['request_mib']:g} MiB, {row['read_ahead']} "
                f"ahead: bound {row['bound_mb']:.0f} MB; first batch {row['first_batch_s']:.3f} s",
                flush=True,
            )
    sizes = [row["peak_rss_mb"] for row in rows]
    slowest_s = max(row["first_batch_s"] for row in rows)
    ratio = max(sizes) / min(sizes)
    print(
        json.dumps(
            {
                "rss_ratio": ratio,
                "peak_rss_mb": dict(zip(options.records, sizes, strict=True)),
                "first_batch_s": slowest_s,
            }
        )
    )
    if ratio > options.limit or slowest_s > _FIRST_BATCH_GOAL_S:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
