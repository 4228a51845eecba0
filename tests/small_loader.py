"""A loader over a folder of small shards, and what it gave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from drawbar.config import Input, Storage
from drawbar.dataset.listing import list_shards
from drawbar.input.loader import Batch, Loader, ReadPlan
from drawbar.input.plan import LastBatch, PlanState
from drawbar.journal import Event, InputTotals, Request
from drawbar.storage.reader import CountedReader
from drawbar.storage.stores import open_place
from tests.small_set import NUM_CLASSES


@contextmanager
def loader_over(
    folder: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    batch_size: int = 8,
    decode_threads: int = 2,
    num_classes: int = NUM_CLASSES,
    requests: list[Request] | None = None,
    request_bytes: int = 8192,
    read_ahead: int = 3,
    shuffle_buffer: int = 16,
    prefetch_batches: int = 2,
    seed: int = 1,
    lanes: int = 16,
    last_batch: LastBatch = "carry",
    state: PlanState | None = None,
    on_bad: Literal["fail", "skip"] = "fail",
    told: list[Event] | None = None,
) -> Iterator[Loader]:
    storage = Storage(request_bytes=request_bytes, read_ahead=read_ahead)
    settings = Input(
        image_size=32,
        shuffle_buffer=shuffle_buffer,
        prefetch_batches=prefetch_batches,
        seed=seed,
        lanes=lanes,
        last_batch=last_batch,
        on_bad=on_bad,
    )
    place = open_place(str(folder), None, None, storage)
    reader = CountedReader(place, storage, (requests if requests is not None else []).append)
    plan = ReadPlan(
        shards=list_shards(place.store, place.prefix).shards,
        rank=rank,
        world_size=world_size,
        batch_size=batch_size,
        state=state,
    )
    loader = Loader(
        plan,
        reader,
        num_classes=num_classes,
        input=settings,
        storage=storage,
        decode_threads=decode_threads,
        tell=(told if told is not None else []).append,
    )
    try:
        yield loader
    finally:
        loader.close()


def take(loader: Loader, num_batches: int) -> list[tuple[np.ndarray, np.ndarray, list[tuple[int, int, int]]]]:
    """Pixels, labels and (epoch, shard, offset) of each batch; buffers go back at once."""
    taken = []
    for _ in range(num_batches):
        batch: Batch = loader.next_batch(timeout_s=30)
        ids = [(record.epoch, record.shard, record.offset) for record in batch.records]
        taken.append((batch.images.copy(), batch.labels.copy(), ids))
        loader.recycle(batch)
    return taken


def trained_ids(
    folder: Path, num_batches: int, *, world_size: int, state: PlanState | None = None, **settings: Any
) -> tuple[list[set[tuple[int, int, int]]], PlanState, list[InputTotals]]:
    """Per global step what all ranks trained; the state after; the ranks' totals."""
    steps: list[list[tuple[int, int, int]]] = [[] for _ in range(num_batches)]
    totals = []
    for rank in range(world_size):
        with loader_over(folder, rank=rank, world_size=world_size, state=state, **settings) as loader:
            for step, (_, _, ids) in zip(steps, take(loader, num_batches), strict=True):
                step.extend(ids)
            after = loader.state
            totals.append(loader.close())
    assert after is not None
    assert all(len(set(step)) == len(step) for step in steps)
    return [set(step) for step in steps], after, totals
