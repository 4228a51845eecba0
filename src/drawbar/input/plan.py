"""The reading plan: which bytes a rank reads, in which order. Pure functions of (shards, world, seed, epoch).

With record sizes known (a manifest), the epoch's records, shards shuffled, are cut into equal contiguous slices, one
a rank: disjoint, equal to the record, for any world size. Records left over by the division are dropped in that epoch,
and the shuffle makes them others in the next. Without record sizes, ranks take whole shards in turn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from drawbar.dataset.listing import ShardInfo
from drawbar.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Span:
    """A run of whole records in one shard: bytes [start, end)."""

    shard: int
    """Index in the listing; with the offset it makes a record's id."""
    key: str
    start: int
    end: int
    epoch: int
    num_records: int | None = None
    """As the manifest has it; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One GET."""

    span: Span
    start: int
    end: int


def check_plan(shards: Sequence[ShardInfo], *, world_size: int, batch_size: int) -> None:
    """Raises InputError where these shards cannot feed this world."""
    if not any(shard.size_bytes for shard in shards):
        raise InputError(f"all {len(shards)} shards are empty")
    counts = [shard.num_records for shard in shards]
    if any(count is None for count in counts):
        if len(shards) < world_size:
            raise InputError(
                f"more ranks than shards: {world_size} ranks, {len(shards)} shards without a manifest",
                hint=f"use at most {len(shards)} ranks, or make the shards with `drawbar data pack`, whose manifest "
                "lets ranks share a shard; compressed shards cannot be shared",
            )
        return
    records = sum(count or 0 for count in counts)
    if records < batch_size * world_size:
        raise InputError(
            f"batch larger than the set: {world_size} ranks x {batch_size} need {world_size * batch_size} records a "
            f"step, the set has {records}",
            hint=f"train.batch_size of at most {records // world_size}" if records >= world_size else "fewer ranks",
        )


def plan_epoch(shards: Sequence[ShardInfo], *, rank: int, world_size: int, seed: int, epoch: int) -> list[Span]:
    """This rank's spans of one epoch, in reading order."""
    order = list(range(len(shards)))
    # A string seed is hashed by value (SHA-512), the same on every host and Python version.
    random.Random(f"{seed}/{epoch}").shuffle(order)
    if any(shards[i].record_bytes is None for i in order):
        mine = order[rank::world_size]
        return [Span(shard=i, key=shards[i].key, start=0, end=shards[i].size_bytes, epoch=epoch) for i in mine]
    per_rank = sum(len(shards[i].record_bytes or ()) for i in order) // world_size
    return list(_cut(shards, order, rank * per_rank, (rank + 1) * per_rank, epoch))


def _cut(shards: Sequence[ShardInfo], order: list[int], first: int, last: int, epoch: int) -> Iterator[Span]:
    """Spans of records [first, last) of the concatenated shards."""
    before = 0
    for i in order:
        sizes = shards[i].record_bytes or ()
        low, high = max(first - before, 0), min(last - before, len(sizes))
        if low < high:
            offsets = [0, *accumulate(sizes)]
            yield Span(
                shard=i, key=shards[i].key, start=offsets[low], end=offsets[high], epoch=epoch, num_records=high - low
            )
        before += len(sizes)


def chunks(spans: Sequence[Span], request_bytes: int) -> Iterator[Chunk]:
    """The GETs of these spans, none larger than `request_bytes`."""
    for span in spans:
        for start in range(span.start, span.end, request_bytes):
            yield Chunk(span=span, start=start, end=min(start + request_bytes, span.end))
