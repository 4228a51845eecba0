"""The reading plan: which records a rank trains, in which order. Pure functions of (shards, world, epoch, seed).

An epoch's records, shards shuffled, are one sequence. It is cut into a fixed number of lanes, contiguous slices that
differ by at most one record; each lane is shuffled within a bounded window, by (seed, epoch, lane). The global order
takes one record of each lane in turn: position p lies in lane (p + phase) mod lanes, and belongs to rank
(p + phase) mod world size. So where the world size divides the lanes,

* a rank owns whole lanes, and ranks are disjoint;
* any `world_size * batch_size` positions in a row hold exactly `batch_size` of each rank: equal steps by construction;
* a global step trains the same records whatever the world size, as long as the global batch is as large; so an epoch
  may be left at any step and finished by another number of ranks (`PlanState`, JSON for a checkpoint).

For another world size the lanes are as many as its smallest multiple that is no fewer. An epoch left in the middle is
then cut anew: what is left of it, still every record once, in another order.

Sets without record sizes (foreign, compressed) are read by whole shards in turn (`whole_shards`): disjoint, every
record once, equal steps; but ranks may be in different epochs at the same step, the order depends on the world size,
and a half epoch cannot be finished later.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from drawbar.dataset.listing import ShardInfo
from drawbar.errors import InputError
from drawbar.plural import plural

Numbers = npt.NDArray[np.int64]
LastBatch = Literal["drop", "pad", "carry"]
T = TypeVar("T")


class RecordIndex:
    """Where every record lies, numbered from 0 in order of shards and offsets. 24 bytes a record."""

    def __init__(self, shards: Sequence[ShardInfo]) -> None:
        sizes = [np.array(shard.record_bytes or (), np.int64) for shard in shards]
        self.first = np.concatenate([[0], np.cumsum([len(part) for part in sizes], dtype=np.int64)])
        """Number of each shard's first record, and that of all records at the end."""
        self.end = np.concatenate([np.cumsum(part) for part in sizes] or [np.empty(0, np.int64)])
        """Byte offset in its shard at which each record ends."""
        self.start = self.end - (np.concatenate(sizes) if sizes else 0)

    @property
    def num_records(self) -> int:
        return len(self.end)

    def epoch_order(self, seed: int, epoch: int) -> Numbers:
        """All record numbers, shards shuffled."""
        order = shard_order(len(self.first) - 1, seed, epoch)
        return np.concatenate([np.arange(self.first[i], self.first[i + 1]) for i in order])


def shard_order(num_shards: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_shards))
    # A string seed is hashed by value (SHA-512), the same on every host and Python version.
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


class BoundedShuffle(Generic[T]):
    """Item i comes in the order of i + uniform(0, window): it moves by less than `window` places, and fewer than
    `window` items are held. `held` are those read and not given out, as (order, i, item)."""

    def __init__(self, items: Iterable[T], window: int, seed: str) -> None:
        self._items, self._window, self._draw = items, window, random.Random(seed).random
        self.held: list[tuple[float, int, T]] = []

    def __iter__(self) -> Iterator[T]:
        if self._window <= 1:
            yield from self._items
            return
        held, draw, window = self.held, self._draw, self._window
        for i, item in enumerate(self._items):
            heapq.heappush(held, (i + draw() * window, i, item))
            # No item to come can be before i + 1.
            while held and held[0][0] <= i + 1:
                yield heapq.heappop(held)[2]
        while held:
            yield heapq.heappop(held)[2]


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A stretch of one epoch read over one number of lanes."""

    lanes: int
    phase: int = 0
    """Lane of position 0."""
    position: int = 0
    """Records of this stretch that all ranks together have trained."""


@dataclass(frozen=True, kw_only=True)
class PlanState:
    """Where the training of a set stands, between two global steps. The same on every rank."""

    seed: int
    num_records: int
    shuffle_buffer: int
    epoch: int
    legs: tuple[Leg, ...]
    """Of this epoch: more than one where it was taken up by a world size that does not divide the lanes."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> PlanState:
        """Raises InputError for what is no such state."""
        try:
            tree = json.loads(text)
            legs = tuple(Leg(**{key: int(value) for key, value in leg.items()}) for leg in tree.pop("legs"))
            state = cls(legs=legs, **{key: int(value) for key, value in tree.items()})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"this is no state of a reading plan: {error}") from None
        if not legs or state.epoch < 0 or any(leg.lanes < 1 or leg.phase < 0 or leg.position < 0 for leg in legs):
            raise InputError("this is no state of a reading plan: a number in it is out of range")
        return state


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One lane's part in a stretch of an epoch."""

    epoch: int
    numbers: Numbers
    """Its records in reading order."""
    window: int
    rng_seed: str
    done: int
    """How many of its shuffled records were trained before."""
    stop: int
    """How many of them will have been at the end of the stretch."""
    padding: bool

    def shuffled(self, items: Iterable[T]) -> BoundedShuffle[T]:
        """Items that stand for the lane's records, in reading order, to training order."""
        return BoundedShuffle(items, self.window, self.rng_seed)

    def trained_before(self) -> set[int]:
        """Indices in `numbers` of the first `done` shuffled records."""
        return set(islice(self.shuffled(range(len(self.numbers))), self.done))


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Positions [start, stop) of a sequence of records, over its lanes."""

    epoch: int
    sequence: Numbers
    lanes: int
    phase: int
    start: int
    stop: int
    window: int
    rng_seed: str
    padding: bool = False
    """Its records are trained a second time in this epoch, to fill the last batch."""

    def in_lane(self, lane: int, stop: int) -> int:
        """How many of the positions [0, stop) lie in a lane."""
        return max(0, -(-(stop - (lane - self.phase) % self.lanes) // self.lanes))

    def lanes_of(self, rank: int, world_size: int) -> list[Lane]:
        """A rank's lanes, in the order in which it takes a record of each, again and again."""
        first = self.start + (rank - self.phase - self.start) % world_size + self.phase
        cuts = self._cuts()
        return [self._lane((first + k * world_size) % self.lanes, cuts) for k in range(self.lanes // world_size)]

    def left(self) -> Numbers:
        """The sequence without the records at the positions before `start`."""
        keep = np.ones(len(self.sequence), bool)
        cuts = self._cuts()
        for lane in range(self.lanes):
            trained = self._lane(lane, cuts).trained_before()
            keep[cuts[lane] + np.fromiter(trained, np.int64, len(trained))] = False
        return self.sequence[keep]

    def _cuts(self) -> list[int]:
        """Where each lane's slice of the sequence begins."""
        sizes = (self.in_lane(lane, len(self.sequence)) for lane in range(self.lanes))
        return [0, *accumulate(sizes)]

    def _lane(self, lane: int, cuts: list[int]) -> Lane:
        # Padding takes the first records of each lane, unshuffled, so that no others are read for it.
        stop = cuts[lane] + self.in_lane(lane, self.stop) if self.padding else cuts[lane + 1]
        return Lane(
            epoch=self.epoch,
            numbers=self.sequence[cuts[lane] : stop],
            window=1 if self.padding else self.window,
            rng_seed=f"{self.rng_seed}/{lane}",
            done=self.in_lane(lane, self.start),
            stop=self.in_lane(lane, self.stop),
            padding=self.padding,
        )


@dataclass(frozen=True, kw_only=True)
class ReadingPlan:
    """What all ranks of one world read from an indexed set, epoch after epoch."""

    index: RecordIndex
    seed: int
    lanes: int
    """As the recipe has it; see `lanes_for`."""
    world_size: int
    batch_size: int
    """Per rank."""
    shuffle_buffer: int
    """Records held for shuffling, over all lanes."""
    last_batch: LastBatch

    def __post_init__(self) -> None:
        if self.last_batch != "carry" and self.index.num_records < self.global_batch:
            raise InputError(
                f"batch larger than the set: a step needs {self.global_batch} records, "
                f"the set has {self.index.num_records}"
            )

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world_size

    def begin(self) -> PlanState:
        return PlanState(
            seed=self.seed,
            num_records=self.index.num_records,
            shuffle_buffer=self.shuffle_buffer,
            epoch=0,
            legs=(Leg(lanes=lanes_for(self.lanes, self.world_size)),),
        )

    def take_up(self, state: PlanState) -> PlanState:
        """The state as this world goes on from it: the same lanes where its size divides them, else a new leg.

        Raises InputError for the state of another set, seed or shuffle.
        """
        for key, setting in (("seed", "input.seed"), ("shuffle_buffer", "input.shuffle_buffer")):
            theirs, mine = getattr(state, key), getattr(self, key)
            if theirs != mine:
                raise InputError(f"cannot go on with this epoch: {setting} was {theirs}, now it is {mine}")
        if state.num_records != self.index.num_records:
            raise InputError(
                f"cannot go on with this epoch: the set had {plural(state.num_records, 'record')}, "
                f"now it has {self.index.num_records}"
            )
        if sum(leg.position for leg in state.legs) > state.num_records:
            raise InputError("this is no state of a reading plan: more records trained than there are")
        if state.legs[-1].lanes % self.world_size == 0:
            return state
        legs = (*state.legs, Leg(lanes=lanes_for(self.lanes, self.world_size)))
        return dataclasses.replace(state, legs=legs)

    def stretches(self, state: PlanState) -> Iterator[Stretch]:
        """From a state that was taken up, without end: the rest of its epoch, then whole ones."""
        while True:
            leg = state.legs[-1]
            records = self._records_of(state)
            stop = records
            if self.last_batch == "drop":
                stop = leg.position + self._full_steps(state) * self.global_batch
            rest = self._stretch(state, self._sequence(state), stop=stop)
            if rest.stop > rest.start:
                yield rest
            padding = -(records - leg.position) % self.global_batch if self.last_batch == "pad" else 0
            if padding:
                whole = self.index.epoch_order(self.seed, state.epoch)
                legs = (Leg(lanes=leg.lanes, phase=(leg.phase + records) % leg.lanes),)
                filled = dataclasses.replace(state, legs=legs)
                yield dataclasses.replace(self._stretch(filled, whole, stop=padding), padding=True)
            state = self._next_epoch(state)

    def after(self, state: PlanState, num_steps: int) -> PlanState:
        """The state `num_steps` global steps after one that was taken up."""
        while True:
            left = self._records_of(state) - state.legs[-1].position
            if self.last_batch == "carry":
                # A step may lie in two epochs: counted in records.
                return self._after_records(state, num_steps * self.global_batch)
            steps = self._full_steps(state) + (self.last_batch == "pad" and left % self.global_batch > 0)
            if num_steps < steps:
                return _moved(state, num_steps * self.global_batch)
            num_steps -= steps
            state = self._next_epoch(state)

    def _after_records(self, state: PlanState, records: int) -> PlanState:
        while records >= (left := self._records_of(state) - state.legs[-1].position):
            records -= left
            state = self._next_epoch(state)
        return _moved(state, records)

    def _full_steps(self, state: PlanState) -> int:
        return (self._records_of(state) - state.legs[-1].position) // self.global_batch

    def _next_epoch(self, state: PlanState) -> PlanState:
        last = state.legs[-1]
        # What is carried over shares its step with the next epoch, whose lanes go on where this one's end.
        phase = (last.phase + self._records_of(state)) % last.lanes if self.last_batch == "carry" else 0
        return dataclasses.replace(state, epoch=state.epoch + 1, legs=(Leg(lanes=last.lanes, phase=phase),))

    def _records_of(self, state: PlanState) -> int:
        """Records in the sequence of the last leg."""
        return self.index.num_records - sum(leg.position for leg in state.legs[:-1])

    def _sequence(self, state: PlanState) -> Numbers:
        """What the last leg is read from: the epoch without what the legs before it trained."""
        sequence = self.index.epoch_order(self.seed, state.epoch)
        for count in range(1, len(state.legs)):
            before = dataclasses.replace(state, legs=state.legs[:count])
            sequence = self._stretch(before, sequence, stop=len(sequence)).left()
        return sequence

    def _stretch(self, state: PlanState, sequence: Numbers, *, stop: int) -> Stretch:
        leg = state.legs[-1]
        return Stretch(
            epoch=state.epoch,
            sequence=sequence,
            lanes=leg.lanes,
            phase=leg.phase,
            start=leg.position,
            stop=stop,
            window=-(-self.shuffle_buffer // leg.lanes),
            rng_seed=f"{self.seed}/{state.epoch}/{len(state.legs)}",
        )


def _moved(state: PlanState, records: int) -> PlanState:
    *before, last = state.legs
    moved = dataclasses.replace(last, position=last.position + records)
    return dataclasses.replace(state, legs=(*before, moved))


def lanes_for(lanes: int, world_size: int) -> int:
    """The recipe's lanes where the world size divides them, else its smallest multiple that is no fewer."""
    return -(-lanes // world_size) * world_size


def part_of(count: int, rank: int, world_size: int) -> range:
    """A rank's share of `count` things that are each to be had once: shares differ by one at most, and may be empty."""
    return range(count * rank // world_size, count * (rank + 1) // world_size)


def whole_shards(num_shards: int, *, rank: int, world_size: int, seed: int, epoch: int) -> list[int]:
    """A rank's shards of one epoch, where records are not known."""
    return shard_order(num_shards, seed, epoch)[rank::world_size]


def check_plan(shards: Sequence[ShardInfo], *, world_size: int, batch_size: int) -> None:
    """Raises InputError where these shards cannot feed this world."""
    if not any(shard.size_bytes for shard in shards):
        raise InputError(f"every one of {plural(len(shards), 'shard')} is empty")
    counts = [shard.num_records for shard in shards]
    if any(count is None for count in counts):
        if len(shards) < world_size:
            raise InputError(
                f"more ranks than shards: {world_size} ranks, {plural(len(shards), 'shard')} without a manifest",
                hint=f"use at most {plural(len(shards), 'rank')}, or make the shards with `drawbar data pack`, whose "
                "manifest lets ranks share a shard; compressed shards cannot be shared",
            )
        return
    records = sum(count or 0 for count in counts)
    if records < batch_size * world_size:
        raise InputError(
            f"batch larger than the set: {plural(world_size, 'rank')} x {batch_size} need "
            f"{plural(world_size * batch_size, 'record')} a step, the set has {records}",
            hint=f"train.batch_size of at most {records // world_size}" if records >= world_size else "fewer ranks",
        )
