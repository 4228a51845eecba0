"""Drawbar's side of `bench/input_peers.py`: one measurement a process.

    python bench/input_drawbar.py NAME PLAN.npz RECIPE.toml

* `loader`: a rank's whole input path, as `drawbar run` has it, over the recipe's data.
* `limit`: its decoder alone: the same images in memory, the same windows, the same options, as many threads; nothing
  is read, resized, flipped or batched.
* `read`: the bytes alone, by Drawbar's reader, plain obstore, boto3, and s3dlio or s3torchconnector where they are
  installed. Prints CPU seconds of this process per GB.

Protocol as in `input_contenders.py`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from input_contenders import BATCH_SIZE, CHECKED_IMAGES, THREADS, UNTIMED_BATCHES, Plan

from drawbar.config import Recipe, load_recipe
from drawbar.input import libjpeg
from drawbar.input.libjpeg import FAST_DCT, FAST_UPSAMPLING, Pixels, Window
from drawbar.input.sample import SampleMaker
from drawbar.journal import JournalWriter
from drawbar.world import World

REQUEST_BYTES = 8 << 20
REQUESTS_AT_ONCE = 4


def answer(take: Callable[[int], None], settings: str, save: Callable[[str], None] = lambda path: None) -> None:
    """`take(count)` makes that many images, in the middle of a stream."""
    print(json.dumps({"settings": settings}), flush=True)
    for line in sys.stdin:
        command, _, path = line.strip().partition(" ")
        if command == "pixels":
            save(path)
            print("{}", flush=True)
            continue
        take(UNTIMED_BATCHES * BATCH_SIZE)
        begin_t = time.perf_counter()
        take(int(command))
        print(json.dumps({"images_per_s": int(command) / (time.perf_counter() - begin_t)}), flush=True)


def loader(plan: Plan, recipe: Recipe) -> None:
    import torch

    from drawbar.launch.feed import DataFeed

    journal = JournalWriter(Path(tempfile.mkdtemp(prefix="drawbar-bench-")) / "rank.jsonl")
    feed = DataFeed(recipe, World.detect({}), torch.device("cpu"), recipe.input.decode_threads, journal.write)
    feed.start()
    number_of = {
        (int(shard), int(offset)): i for i, (shard, offset) in enumerate(zip(plan.shard, plan.offset, strict=True))
    }
    first: list[tuple[int, Pixels]] = []
    while len(first) < CHECKED_IMAGES:
        batch = feed._running().next_batch(60)  # a batch with its records, which the loop never sees
        for record, image in zip(batch.records, batch.images, strict=True):
            first.append((number_of[record.shard, record.offset], image.copy()))
        feed._running().recycle(batch)

    def take(count: int) -> None:
        for _ in range(count // BATCH_SIZE):
            feed.next_batch().release()

    def save(path: str) -> None:
        numbers, images = zip(*first, strict=True)
        np.savez(path, numbers=np.array(numbers), images=np.stack(images))

    answer(take, json.dumps(feed.decoding), save)
    feed.close()


def limit(plan: Plan, recipe: Recipe) -> None:
    files = [Path(shard).read_bytes() for shard in plan.shards]
    images = [
        files[shard][start : start + size] for shard, (start, size) in zip(plan.shard, plan.jpeg.tolist(), strict=True)
    ]
    windows = [Window(*window) for window in plan.windows[0].tolist()]
    decoding = SampleMaker(recipe.input).decoding
    fast = FAST_DCT * decoding.fast_dct | FAST_UPSAMPLING * decoding.fast_upsampling
    position = 0

    def region(numbers: range) -> None:
        decoder, room = libjpeg.open_region_decoder(), np.empty(64 << 20, np.uint8)
        for i in numbers:
            data = np.frombuffer(images[i % len(images)], np.uint8)
            decoder.header(data)
            decoder.window(windows[i % len(images)], fast, room)

    def full(numbers: range) -> None:
        room = np.empty(64 << 20, np.uint8)
        for i in numbers:
            simplejpeg.decode_jpeg(
                images[i % len(images)], "RGB", fastdct=bool(fast & FAST_DCT),
                fastupsample=bool(fast & FAST_UPSAMPLING), buffer=room,
            )  # fmt: skip

    pool = ThreadPoolExecutor(THREADS)

    def take(count: int) -> None:
        nonlocal position
        parts = [range(position + thread, position + count, THREADS) for thread in range(THREADS)]
        position += count
        list(pool.map(region if decoding.decoder == "region" else full, parts))

    scaled = " (scaled DCT, where a window allows it, is left out here)" if decoding.scaled_dct else ""
    answer(take, f"decoding alone, {decoding.decoder}{scaled}")


def read(plan: Plan, recipe: Recipe) -> None:
    """CPU seconds per GB of each client, in turn, `rounds` times; the last line is their medians."""
    ranges = []
    for shard in plan.shards:
        size = os.path.getsize(shard)
        ranges += [
            (Path(shard).name, start, min(size, start + REQUEST_BYTES)) for start in range(0, size, REQUEST_BYTES)
        ]
    gigabytes = sum(end - start for _, start, end in ranges) / 1e9
    clients = dict(s3_clients(recipe))
    seconds: dict[str, list[float]] = {name: [] for name in clients}
    rates: dict[str, list[float]] = {name: [] for name in clients}
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        for number in range(6):
            for name in list(clients)[:: 1 if number % 2 else -1]:
                get = clients[name]
                cpu_s, begin_t = time.process_time(), time.perf_counter()
                sizes = list(pool.map(lambda part, get=get: get(*part), ranges))
                if sum(sizes) != sum(end - start for _, start, end in ranges):
                    sys.exit(f"{name} has read {sum(sizes)} bytes")
                if number:  # the first makes connections
                    seconds[name].append((time.process_time() - cpu_s) / gigabytes)
                    rates[name].append(gigabytes * 1000 / (time.perf_counter() - begin_t))
    print(json.dumps({
        "cpu_s_per_gb": {name: float(np.median(values)) for name, values in seconds.items()},
        "mb_per_s": {name: float(np.median(values)) for name, values in rates.items()},
    }))  # fmt: skip


def s3_clients(recipe: Recipe) -> Iterator[tuple[str, Callable[[str, int, int], int]]]:
    """Each client's GET of a range, giving the number of bytes that it put into memory."""
    import torch

    from drawbar.launch.feed import DataFeed, addresses

    feed = DataFeed(
        recipe, World.detect({}), torch.device("cpu"), 1, JournalWriter(Path(tempfile.mkdtemp()) / "r.jsonl").write
    )
    keys = {Path(shard.key).name: shard.key for shard in feed._listing.shards}
    yield "drawbar", lambda name, start, end: len(feed._reader.get(keys[name], start, end))

    import obstore

    bucket, _, prefix = recipe.data.url.removeprefix("s3://").partition("/")
    address = addresses(recipe)[0]
    store = obstore.store.S3Store(
        bucket, endpoint=address, client_options={"allow_http": True}, virtual_hosted_style_request=False
    )
    yield "obstore", lambda name, start, end: len(obstore.get_range(store, f"{prefix}/{name}", start=start, end=end))

    if find_spec("boto3"):
        boto3, config = import_module("boto3"), import_module("botocore.config")
        client = boto3.client(
            "s3", endpoint_url=address, config=config.Config(max_pool_connections=8, s3={"addressing_style": "path"})
        )
        yield (
            "boto3",
            lambda name, start, end: len(
                client.get_object(Bucket=bucket, Key=f"{prefix}/{name}", Range=f"bytes={start}-{end - 1}")[
                    "Body"
                ].read()
            ),
        )
    if find_spec("s3dlio"):
        s3dlio: Any = import_module("s3dlio")
        yield (
            "s3dlio",
            lambda name, start, end: len(
                memoryview(s3dlio.get_range(f"s3://{bucket}/{prefix}/{name}", start, end - start))
            ),
        )


def main() -> None:
    name, plan, recipe = sys.argv[1], Plan(sys.argv[2]), load_recipe(Path(sys.argv[3]))
    {"loader": loader, "limit": limit, "read": read}[name](plan, recipe)


if __name__ == "__main__":
    main()
