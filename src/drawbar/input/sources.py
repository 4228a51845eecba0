"""What one rank reads, as sources of chunks and records: its lanes where records are known, else whole shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from drawbar.config import Input
from drawbar.dataset.listing import ShardInfo
from drawbar.errors import InputError
from drawbar.input.batch import Record
from drawbar.input.fetch import Fetcher, Source, lane_chunks, shard_chunks
from drawbar.input.plan import Lane, PlanState, ReadingPlan, RecordIndex, part_of, whole_shards
from drawbar.input.records import RecordReader

RequestBytes = Callable[[], int]
"""How much to ask for in a GET now."""


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """Everything that decides what this rank reads, beside the recipe's `input` section."""

    shards: Sequence[ShardInfo]
    rank: int
    world_size: int
    batch_size: int
    """Per rank."""
    state: PlanState | None = None
    """Where to go on, as an earlier loader had it; None: at the beginning."""
    once: bool = False
    """For an evaluation: every record of the set once, in the set's order, and then no more."""


class Sources(Protocol):
    """A rank's way through its set."""

    num_lanes: int
    """How many bodies are open at once."""

    def groups(self, reader: RecordReader, request_bytes: RequestBytes) -> Iterator[list[Source]]:
        """Stretch after stretch, without end but for what is read once: the sources of which one record each is taken
        in turn, until one has no more."""

    def state_after(self, num_steps: int) -> PlanState | None:
        """Where the set's training stands `num_steps` global steps after the beginning of this loader."""


def open_sources(plan: ReadPlan, settings: Input) -> Sources:
    """Raises InputError where `plan.state` does not fit the set or the recipe."""
    if plan.once:
        return OnceSources(plan)
    if all(shard.record_bytes is not None for shard in plan.shards):
        return LaneSources(plan, settings)
    return ShardSources(plan, settings)


class LaneSources:
    """By lanes, see `plan.py`."""

    def __init__(self, plan: ReadPlan, settings: Input) -> None:
        self._plan = plan
        self._index = RecordIndex(plan.shards)
        self._reading = ReadingPlan(
            index=self._index,
            seed=settings.seed,
            lanes=settings.lanes,
            world_size=plan.world_size,
            batch_size=plan.batch_size,
            shuffle_buffer=settings.shuffle_buffer,
            last_batch=settings.last_batch,
        )
        self._state = self._reading.take_up(plan.state or self._reading.begin())
        self.num_lanes = self._state.legs[-1].lanes // plan.world_size

    def groups(self, reader: RecordReader, request_bytes: RequestBytes) -> Iterator[list[Source]]:
        for stretch in self._reading.stretches(self._state):
            lanes = stretch.lanes_of(self._plan.rank, self._plan.world_size)
            # First requests of different sizes: lanes are emptied in step, and must not run out all at once.
            shares = [(i + 1) / len(lanes) for i in range(len(lanes))]
            yield [self._source(reader, lane, request_bytes, share) for lane, share in zip(lanes, shares, strict=True)]

    def _source(self, reader: RecordReader, lane: Lane, request_bytes: RequestBytes, first_share: float) -> Source:
        trained = lane.trained_before()
        chunks = lane_chunks(self._plan.shards, self._index, lane, trained, request_bytes, first_share)
        return Source(chunks, partial(reader.lane, lane))

    def state_after(self, num_steps: int) -> PlanState:
        return self._reading.after(self._state, num_steps)


class ShardSources:
    """By whole shards: for sets whose records are not known, or cannot be reached (compressed ones)."""

    num_lanes = 1

    def __init__(self, plan: ReadPlan, settings: Input) -> None:
        if plan.state is not None:
            raise InputError(
                "cannot go on in the middle of an epoch: the sizes of this set's records are not known",
                hint="pack it with `drawbar data pack`: its manifest has them",
            )
        self._plan, self._seed = plan, settings.seed
        self._window = -(-settings.shuffle_buffer // plan.world_size)

    def groups(self, reader: RecordReader, request_bytes: RequestBytes) -> Iterator[list[Source]]:
        plan = self._plan
        for epoch in itertools.count():
            mine = whole_shards(
                len(plan.shards), rank=plan.rank, world_size=plan.world_size, seed=self._seed, epoch=epoch
            )
            seed = f"{self._seed}/{epoch}/{plan.rank}"
            chunks = shard_chunks(plan.shards, mine, epoch, request_bytes)
            yield [Source(chunks, partial(reader.shards, shuffle_seed=seed, window=self._window))]

    def state_after(self, num_steps: int) -> None:
        return None


class OnceSources:
    """Every record of the set once: by records where they are known, so that ranks' shares differ by one at most, else
    by whole shards, of which a rank may have none."""

    num_lanes = 1

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan

    def groups(self, reader: RecordReader, request_bytes: RequestBytes) -> Iterator[list[Source]]:
        plan = self._plan
        if any(shard.record_bytes is None for shard in plan.shards):
            chunks = shard_chunks(plan.shards, range(plan.rank, len(plan.shards), plan.world_size), 0, request_bytes)
            yield [Source(chunks, partial(reader.shards, shuffle_seed="", window=1))]
            return
        index = RecordIndex(plan.shards)
        mine = part_of(index.num_records, plan.rank, plan.world_size)
        lane = Lane(
            epoch=0,
            numbers=np.arange(mine.start, mine.stop),
            window=1,
            rng_seed="",
            done=0,
            stop=len(mine),
            padding=False,
        )
        yield [Source(lane_chunks(plan.shards, index, lane, set(), request_bytes, 1.0), partial(reader.lane, lane))]

    def state_after(self, num_steps: int) -> None:
        return None


def in_turn(fetcher: Fetcher) -> Iterator[Record]:
    """Stretch after stretch, a record of each source in turn: what a rank trains, without end, or evaluates."""
    while (group := fetcher.next_group()) is not None:
        sources = [source.records(fetcher.bodies(source)) for source in group]
        for source in itertools.cycle(sources):
            record = next(source, None)
            if record is None:
                break
            yield record
        # Their numbers of records differ by one at most: the others end here too, and count what they still hold.
        for source in sources:
            assert next(source, None) is None, "lanes of different length"  # noqa: S101
        for ended in group:
            fetcher.drop(ended)
