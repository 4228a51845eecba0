"""One stage of the input alone, on one rank, for a given time. The parts are the loader's; each function says what is
removed.

What comes before the measured time: opening the set, and for `decode` its records in memory. Nothing is read ahead:
each stage starts from a standstill, as a run does.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from drawbar.config import Recipe
from drawbar.input.batch import Batch, Record
from drawbar.input.device import device_of_rank
from drawbar.input.fetch import Fetcher
from drawbar.input.reading import Reading
from drawbar.input.records import RecordReader
from drawbar.input.sources import in_turn, open_sources
from drawbar.journal import Event
from drawbar.launch.environment import decode_threads, threads_per_rank
from drawbar.launch.feed import ConstantFeed, DataFeed, open_feed
from drawbar.train.build import make_objective
from drawbar.train.loop import STEPS_IN_FLIGHT
from drawbar.train.precision import choose_precision
from drawbar.world import World

_DECODE_RECORDS = 256
"""Kept in memory and decoded again and again: more bytes than a core's caches hold."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """What went through a stage in `seconds`."""

    images: int | None
    """None: not known, as records were not counted."""
    bytes: int
    """Of `read` and `crc`: bodies; `decode` and `batch`: records; `copy`: pixels."""
    seconds: float
    cpu_s: float
    """Of this process."""
    threads: int
    request_bytes: int = 0
    read_ahead: int = 0


def _no_record(event: Event) -> None:
    """Each GET's own times are for a run's journal."""


Measure = Callable[[float], Passed]


class Rank:
    """What the stages of one rank are made of."""

    def __init__(self, recipe: Recipe, world: World) -> None:
        self.recipe = recipe
        self.device = device_of_rank(recipe.launch.device, world)
        self.decode_threads = decode_threads(recipe, world.local_world_size, self.device.type)
        torch.set_num_threads(threads_per_rank(recipe.launch, world.local_world_size))
        self._world = world

    def feed(self) -> DataFeed:
        feed = open_feed(self.recipe, self._world, self.device, self.decode_threads, _no_record)
        assert isinstance(feed, DataFeed), "a constant source has nothing to read"  # noqa: S101
        return feed

    def fetcher(self, feed: DataFeed) -> tuple[Fetcher, Reading]:
        records = RecordReader(feed.reader)
        sources = open_sources(feed.plan, self.recipe.input)
        reading = Reading(
            request_bytes=self.recipe.storage.request_bytes,
            read_ahead=self.recipe.storage.read_ahead,
            num_lanes=sources.num_lanes,
        )
        return Fetcher(feed.reader, reading, sources.groups(records, lambda: reading.request_bytes)), reading


def read(rank: Rank) -> Measure:
    """GETs in the plan's order; each body is dropped as it arrives."""
    feed = rank.feed()

    def bodies(fetcher: Fetcher) -> Iterator[tuple[int | None, int]]:
        while (group := fetcher.next_group()) is not None:
            open_sources = deque(fetcher.bodies(source) for source in group)
            while open_sources:
                body = next(open_sources[0], None)
                if body is None:
                    open_sources.popleft()
                    continue
                open_sources.rotate(-1)
                yield body[0].num_records, len(body[1])

    def measure(seconds: float) -> Passed:
        fetcher, reading = rank.fetcher(feed)
        return _reading(fetcher, reading, bodies(fetcher), seconds)

    return measure


def crc(rank: Rank) -> Measure:
    """As a run up to the shuffle: GETs, framing, both CRCs; the records are dropped."""
    feed = rank.feed()

    def measure(seconds: float) -> Passed:
        fetcher, reading = rank.fetcher(feed)
        return _reading(fetcher, reading, ((1, record.framed_bytes) for record in in_turn(fetcher)), seconds)

    return measure


def _reading(fetcher: Fetcher, reading: Reading, items: Iterator[tuple[int | None, int]], seconds: float) -> Passed:
    images: int | None = 0
    num_bytes = 0
    clock = _Clock(seconds)
    for count, size in items:
        images = images + count if images is not None and count is not None else None
        num_bytes += size
        if clock.is_over():
            break
    passed = clock.passed(images, num_bytes, 1, reading)
    fetcher.close()
    return passed


def decode(rank: Rank) -> Measure:
    """The decode threads over records that lie in memory: decode, crop, resize, flip into batches. No reading."""
    feed, size = rank.feed(), rank.recipe.train.batch_size
    fetcher, _ = rank.fetcher(feed)
    records = list(itertools.islice(in_turn(fetcher), _DECODE_RECORDS))
    fetcher.close()

    def measure(seconds: float) -> Passed:
        samples = feed.samples
        settings = rank.recipe.input
        pool = feed.pool(rank.decode_threads, samples, seed=settings.seed, on_bad=settings.on_bad)
        buffers = itertools.cycle([np.empty(samples.buffer_shape(size), np.uint8) for _ in range(4)])
        source: Iterator[Record] = itertools.cycle(records)
        ahead: deque[Batch] = deque()
        images = num_bytes = 0
        clock = _Clock(seconds)
        while not clock.is_over():
            while len(ahead) < 3:
                taken = list(itertools.islice(source, size))
                images_of = samples.pixels(next(buffers), taken)
                batch = Batch(images=images_of, labels=np.empty(size, np.int64), records=taken, epoch=0)
                pool.submit(batch)
                ahead.append(batch)
            done = ahead.popleft()
            done.wait(rank.recipe.launch.stall_timeout_s)
            images += size
            num_bytes += done.framed_bytes
        passed = clock.passed(images, num_bytes, rank.decode_threads)
        pool.close()
        return passed

    return measure


def batch(rank: Rank) -> Measure:
    """The whole loader; each batch is given back as it comes. No model."""
    feed = rank.feed()

    def measure(seconds: float) -> Passed:
        images = 0
        clock = _Clock(seconds)
        feed.start()
        while not clock.is_over():
            batch = feed.next_batch()
            images += len(batch.labels)
            batch.release()
        passed = clock.passed(images, feed.trained_bytes, rank.decode_threads)
        feed.close()
        return passed

    return measure


def copy(rank: Rank) -> Measure:
    """One made-up batch to the device again and again, and normalised there. No input, no model.

    On a GPU from pinned memory on the copy's own stream, as many in flight as training has.
    """
    pixels = ConstantFeed(rank.recipe, rank.device).next_batch()
    dtype = choose_precision(rank.recipe.model.precision, rank.device).dtype
    objective = make_objective(rank.recipe, rank.device, dtype)

    def measure(seconds: float) -> Passed:
        copied = 0
        normalised: deque[torch.cuda.Event] = deque()
        clock = _Clock(seconds)
        while not clock.is_over():
            objective.to_device(pixels)
            if rank.device.type == "cuda":
                normalised.append(torch.cuda.current_stream(rank.device).record_event())
                if len(normalised) <= STEPS_IN_FLIGHT:
                    continue
                normalised.popleft().synchronize()  # the copy is what is measured, not its launch
            copied += 1
        return clock.passed(copied * pixels.samples, copied * pixels.pixels.numel(), torch.get_num_threads())

    return measure


STAGES: dict[str, Callable[[Rank], Measure]] = {
    "read": read,
    "crc": crc,
    "decode": decode,
    "batch": batch,
    "copy": copy,
}


class _Clock:
    """From now for some seconds; wall time and CPU time of this process."""

    def __init__(self, seconds: float) -> None:
        self._cpu_s = self._process_s()
        self._begin_t = time.perf_counter()
        self._end_t = self._begin_t + seconds

    def is_over(self) -> bool:
        return time.perf_counter() >= self._end_t

    def passed(self, images: int | None, num_bytes: int, threads: int, reading: Reading | None = None) -> Passed:
        return Passed(
            images=images,
            bytes=num_bytes,
            seconds=time.perf_counter() - self._begin_t,
            cpu_s=self._process_s() - self._cpu_s,
            threads=reading.read_ahead if reading else threads,
            request_bytes=reading.request_bytes if reading else 0,
            read_ahead=reading.read_ahead if reading else 0,
        )

    @staticmethod
    def _process_s() -> float:
        times = os.times()
        return times.user + times.system
