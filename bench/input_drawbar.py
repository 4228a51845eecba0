"""Drawbar's side of `bench/input_peers.py`: one measurement a process.

    python bench/input_drawbar.py NAME PLAN.npz RECIPE.toml

* `loader`: a rank's whole input path, as `drawbar run` has it, over the recipe's data.
* `limit`: its decoder alone: the same images in memory, the same windows, the same options, as many threads; nothing
  is read, resized, flipped or batched.
* `limit_libjpeg`: the same with libjpeg-turbo's own Huffman decoding.

Protocol as in `input_contenders.py`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import simplejpeg
from input_contenders import BATCH_SIZE, CHECKED_IMAGES, THREADS, UNTIMED_BATCHES, Plan

from drawbar.config import Recipe, load_recipe
from drawbar.input import libjpeg
from drawbar.input.libjpeg import FAST_DCT, FAST_UPSAMPLING, LIBJPEG_HUFFMAN, Pixels, Window
from drawbar.input.sample import SampleMaker
from drawbar.journal import JournalWriter
from drawbar.world import World


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


def limit(plan: Plan, recipe: Recipe, more: int = 0) -> None:
    files = [Path(shard).read_bytes() for shard in plan.shards]
    images = [
        files[shard][start : start + size] for shard, (start, size) in zip(plan.shard, plan.jpeg.tolist(), strict=True)
    ]
    windows = [Window(*window) for window in plan.windows[0].tolist()]
    decoding = SampleMaker(recipe.input).decoding
    fast = FAST_DCT * decoding.fast_dct | FAST_UPSAMPLING * decoding.fast_upsampling
    position = 0

    def compiled(numbers: range) -> None:
        decoder, room = libjpeg.open_region_decoder(), np.empty(64 << 20, np.uint8)
        for i in numbers:
            data = np.frombuffer(images[i % len(images)], np.uint8)
            height, width, _ = decoder.header(data)
            whole = decoding.decoder == "full"
            window = Window(0, 0, height, width) if whole else windows[i % len(images)]
            decoder.window(window, fast | more, room)

    def simple(numbers: range) -> None:
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
        list(pool.map(compiled if libjpeg.can_resize() else simple, parts))

    scaled = " (scaled DCT, where a window allows it, is left out here)" if decoding.scaled_dct else ""
    answer(take, f"decoding alone, {decoding.decoder}{scaled}")


def main() -> None:
    name, plan, recipe = sys.argv[1], Plan(sys.argv[2]), load_recipe(Path(sys.argv[3]))
    measurements: dict[str, Callable[[Plan, Recipe], None]] = {
        "loader": loader,
        "limit": limit,
        "limit_libjpeg": partial(limit, more=LIBJPEG_HUFFMAN),
    }
    measurements[name](plan, recipe)


if __name__ == "__main__":
    main()
