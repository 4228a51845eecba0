"""The reading plan's promises, over many sizes: disjoint, equal, every record once, the same for every world size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.dataset.listing import ShardInfo
from drawbar.errors import InputError
from drawbar.input.fetch import Chunk, lane_chunks, shard_chunks
from drawbar.input.plan import (
    BoundedShuffle,
    LastBatch,
    Leg,
    PlanState,
    ReadingPlan,
    RecordIndex,
    check_plan,
    lanes_for,
    whole_shards,
)

Trained = tuple[int, int, bool]
"""Epoch, record number, whether to fill a batch."""


def shards_of(counts: list[int], *, known: bool = True) -> list[ShardInfo]:
    """Shards of the given record counts; record i of a shard is 20 + i bytes."""
    shards = []
    for number, count in enumerate(counts):
        sizes = tuple(20 + i for i in range(count))
        shards.append(
            ShardInfo(
                key=f"p/train-{number:05d}",
                name=f"train-{number:05d}",
                size_bytes=sum(sizes),
                num_records=count if known else None,
                record_bytes=sizes if known else None,
            )
        )
    return shards


def plan_of(
    counts: list[int],
    *,
    world_size: int = 1,
    batch_size: int = 1,
    lanes: int = 8,
    shuffle_buffer: int = 20,
    last_batch: LastBatch = "carry",
    seed: int = 1,
) -> ReadingPlan:
    return ReadingPlan(
        index=RecordIndex(shards_of(counts)),
        seed=seed,
        lanes=lanes,
        world_size=world_size,
        batch_size=batch_size,
        shuffle_buffer=shuffle_buffer,
        last_batch=last_batch,
    )


def of_rank(plan: ReadingPlan, state: PlanState, rank: int) -> Iterator[Trained]:
    """What a rank trains from a state on, without end."""
    for stretch in plan.stretches(state):
        lanes = stretch.lanes_of(rank, plan.world_size)
        orders = [list(lane.shuffled(lane.numbers.tolist()))[lane.done : lane.stop] for lane in lanes]
        for turn in range(max(map(len, orders))):
            yield from ((stretch.epoch, order[turn], stretch.padding) for order in orders if turn < len(order))


def global_batches(plan: ReadingPlan, state: PlanState, num_steps: int) -> list[list[Trained]]:
    """Per global step, what all ranks together train."""
    size = plan.batch_size
    ranks = [list(islice(of_rank(plan, state, rank), num_steps * size)) for rank in range(plan.world_size)]
    return [[record for rank in ranks for record in rank[step * size : (step + 1) * size]] for step in range(num_steps)]


COUNTS = st.lists(st.integers(1, 30), min_size=1, max_size=12)
LAST_BATCH: st.SearchStrategy[LastBatch] = st.sampled_from(["drop", "pad", "carry"])


@given(
    counts=COUNTS,
    lanes=st.integers(1, 24),
    world_size=st.integers(1, 9),
    batch_size=st.integers(1, 5),
    shuffle_buffer=st.integers(0, 200),
    seed=st.integers(0, 2**32 - 1),
    last_batch=LAST_BATCH,
)
def test_every_step_is_full_and_every_record_comes_once_an_epoch(
    counts: list[int],
    lanes: int,
    world_size: int,
    batch_size: int,
    shuffle_buffer: int,
    seed: int,
    last_batch: LastBatch,
) -> None:
    records, size = sum(counts), world_size * batch_size
    if records < size:
        return
    plan = plan_of(
        counts,
        lanes=lanes,
        world_size=world_size,
        batch_size=batch_size,
        shuffle_buffer=shuffle_buffer,
        last_batch=last_batch,
        seed=seed,
    )
    steps = {"drop": records // size, "pad": -(-records // size), "carry": -(-records // size)}[last_batch]
    batches = global_batches(plan, plan.take_up(plan.begin()), 3 * steps)
    assert all(len(batch) == size for batch in batches)
    trained = Counter(record for batch in batches for record in batch)
    assert set(trained.values()) == {1}
    for epoch in range(2):
        mine = [record for record in trained if record[0] == epoch]
        own = {number for _, number, padding in mine if not padding}
        padding = sum(padding for *_, padding in mine)
        assert len(own) == (records // size * size if last_batch == "drop" else records)
        assert padding == (-records % size if last_batch == "pad" else 0)
        if last_batch != "carry":
            assert {record[0] for batch in batches[epoch * steps : (epoch + 1) * steps] for record in batch} == {epoch}


@given(
    counts=COUNTS,
    sizes=st.sampled_from([(1, 2), (1, 4), (2, 1), (2, 8), (4, 2), (8, 1), (4, 8), (3, 6), (6, 2)]),
    batch=st.integers(1, 3),
    left_at=st.integers(0, 30),
    last_batch=LAST_BATCH,
    shuffle_buffer=st.integers(0, 100),
)
def test_an_epoch_left_at_any_step_goes_on_with_the_same_global_batches_at_another_world_size(
    counts: list[int],
    sizes: tuple[int, int],
    batch: int,
    left_at: int,
    last_batch: LastBatch,
    shuffle_buffer: int,
) -> None:
    """24 lanes; equal global batches of 24 * `batch` records."""
    if sum(counts) < 24 * batch:
        return
    first, second = (
        plan_of(
            counts,
            lanes=24,
            world_size=world_size,
            batch_size=24 * batch // world_size,
            last_batch=last_batch,
            shuffle_buffer=shuffle_buffer,
        )
        for world_size in sizes
    )
    begin = first.take_up(first.begin())
    whole = global_batches(first, begin, left_at + 6)
    state = PlanState.from_json(first.after(begin, left_at).to_json())
    rest = global_batches(second, second.take_up(state), 6)
    assert [sorted(step) for step in rest] == [sorted(step) for step in whole[left_at:]]


@given(
    counts=COUNTS,
    worlds=st.lists(st.integers(1, 7), min_size=2, max_size=4),
    steps=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    lanes=st.integers(1, 12),
    shuffle_buffer=st.integers(0, 60),
)
def test_an_epoch_taken_up_by_any_world_sizes_in_turn_trains_each_record_once(
    counts: list[int], worlds: list[int], steps: list[int], lanes: int, shuffle_buffer: int
) -> None:
    trained: Counter[tuple[int, int]] = Counter()
    state: PlanState | None = None
    for turn, world_size in enumerate(worlds):
        plan = plan_of(counts, world_size=world_size, lanes=lanes, shuffle_buffer=shuffle_buffer)
        state = plan.take_up(state or plan.begin())
        last = turn == len(worlds) - 1
        num_steps = -(-sum(counts) // world_size) if last else steps[turn]
        for batch in global_batches(plan, state, num_steps):
            trained.update((epoch, number) for epoch, number, _ in batch)
        state = plan.after(state, num_steps)
    assert set(trained.values()) == {1}
    assert len([record for record in trained if record[0] == 0]) == sum(counts)


@given(counts=COUNTS, num_steps=st.lists(st.integers(0, 20), min_size=1, max_size=4), last_batch=LAST_BATCH)
def test_steps_in_parts_lead_where_they_lead_together(
    counts: list[int], num_steps: list[int], last_batch: LastBatch
) -> None:
    if sum(counts) < 6:
        return
    plan = plan_of(counts, world_size=2, batch_size=3, last_batch=last_batch)
    state = begin = plan.take_up(plan.begin())
    for steps in num_steps:
        state = plan.after(state, steps)
    together = plan.after(begin, sum(num_steps))
    assert global_batches(plan, state, 4) == global_batches(plan, together, 4)


@given(count=st.integers(0, 300), window=st.integers(0, 80), seed=st.integers(0, 1000))
def test_the_shuffle_moves_and_holds_less_than_its_window(count: int, window: int, seed: int) -> None:
    shuffle = BoundedShuffle(range(count), window, str(seed))
    out = []
    for item in shuffle:
        out.append(item)
        assert len(shuffle.held) < max(1, window)
    assert sorted(out) == list(range(count))
    assert all(abs(place - item) < max(1, window) for place, item in enumerate(out))
    if window > 10 and count > 100:
        assert out != sorted(out)


def test_epochs_and_seeds_differ() -> None:
    plan = plan_of([30] * 8)
    orders = [[number for _, number, _ in islice(of_rank(plan, plan.begin(), 0), 480)]]
    orders += [orders[0][:240], orders[0][240:]]
    other = plan_of([30] * 8, seed=2)
    orders.append([number for _, number, _ in islice(of_rank(other, other.begin(), 0), 240)])
    assert orders[1] != orders[2]
    assert orders[1] != orders[3]


def test_a_global_batch_is_taken_from_all_lanes_alike() -> None:
    """Of 16 records two come from each of 8 lanes: a batch is a mixture of shards without any shuffle buffer."""
    plan = plan_of([100] * 8, world_size=2, batch_size=8, shuffle_buffer=0)
    for batch in global_batches(plan, plan.begin(), 10):
        assert Counter(number // 100 for _, number, _ in batch) == dict.fromkeys(range(8), 2)


@pytest.mark.parametrize(("lanes", "world_size", "expected"), [(16, 4, 16), (16, 3, 18), (16, 64, 64), (1, 1, 1)])
def test_lanes_are_the_recipes_where_ranks_divide_them(lanes: int, world_size: int, expected: int) -> None:
    assert lanes_for(lanes, world_size) == expected


# States


def test_a_state_of_another_set_seed_or_shuffle_is_refused() -> None:
    state = plan_of([10, 10]).begin()
    for other, message in (
        (plan_of([10, 11]), "the set had 20 records, now it has 21"),
        (plan_of([10, 10], seed=2), "input.seed was 1, now it is 2"),
        (plan_of([10, 10], shuffle_buffer=5), "input.shuffle_buffer was 20, now it is 5"),
    ):
        with pytest.raises(InputError, match=message):
            other.take_up(state)
    beyond = PlanState(seed=1, num_records=20, shuffle_buffer=20, epoch=0, legs=(Leg(lanes=8, position=21),))
    with pytest.raises(InputError, match="more records trained than there are"):
        plan_of([10, 10]).take_up(beyond)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"legs": 1}', '{"legs": []}', '{"legs": [{"lanes": 0}], "epoch": 0}']
)
def test_what_is_no_state_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no state of a reading plan"):
        PlanState.from_json(text)


# Requests


def chunks_of(
    counts: list[int], request_bytes: int, *, done: int = 0, lanes: int = 3, first_share: float = 1.0
) -> list[tuple[list[int], list[Chunk]]]:
    """Of each lane the record numbers that are wanted, and its GETs."""
    plan = plan_of(counts, lanes=lanes)
    state = plan.after(plan.begin(), min(done, sum(counts) - 1))
    stretch = next(plan.stretches(state))
    found = []
    for lane in stretch.lanes_of(0, 1):
        trained = lane.trained_before()
        wanted = [number for i, number in enumerate(lane.numbers.tolist()) if i not in trained]
        cut = lane_chunks(shards_of(counts), plan.index, lane, trained, lambda: request_bytes, first_share)
        found.append((wanted, list(cut)))
    return found


@given(counts=COUNTS, request_bytes=st.integers(1, 500), done=st.integers(0, 200), share=st.floats(0.01, 1))
def test_requests_hold_the_wanted_records_once_and_keep_to_their_size(
    counts: list[int], request_bytes: int, done: int, share: float
) -> None:
    index = RecordIndex(shards_of(counts))
    for wanted, chunks in chunks_of(counts, request_bytes, done=done, first_share=share):
        got = []
        places = []
        for number, chunk in enumerate(chunks):
            assert chunk.num_records is not None
            limit = request_bytes * share if number == 0 else request_bytes
            assert chunk.end - chunk.start <= limit or chunk.num_records == 1
            first = int(index.first[chunk.shard])
            inside = [
                i
                for i in range(first, int(index.first[chunk.shard + 1]))
                if index.start[i] >= chunk.start and index.end[i] <= chunk.end
            ]
            assert len(inside) == chunk.num_records
            assert (index.start[inside[0]], index.end[inside[-1]]) == (chunk.start, chunk.end)
            got += [inside[i] for i in chunk.wanted]
            places += list(chunk.places)
        assert got == wanted
        assert places == sorted(set(places))


@given(counts=COUNTS, world_size=st.integers(1, 6), seed=st.integers(0, 1000))
def test_without_record_sizes_ranks_take_whole_shards_and_miss_none(
    counts: list[int], world_size: int, seed: int
) -> None:
    shards = shards_of(counts, known=False)
    taken: list[int] = []
    for rank in range(world_size):
        mine = whole_shards(len(shards), rank=rank, world_size=world_size, seed=seed, epoch=0)
        taken += mine
        for number in mine:
            cut = list(shard_chunks(shards, [number], 0, lambda: 100))
            assert all(0 < chunk.end - chunk.start <= 100 for chunk in cut)
            assert [chunk.start for chunk in cut] == [0, *(chunk.end for chunk in cut)][:-1]
            assert cut[-1].end == shards[number].size_bytes
    assert sorted(taken) == list(range(len(counts)))


def test_more_ranks_than_shards_works_by_records_with_a_manifest_and_says_what_to_do_without() -> None:
    check_plan(shards_of([10, 10]), world_size=4, batch_size=5)
    with pytest.raises(InputError, match="more ranks than shards: 4 ranks, 2 shards") as caught:
        check_plan(shards_of([10, 10], known=False), world_size=4, batch_size=5)
    assert "at most 2 ranks" in (caught.value.hint or "")


def test_a_batch_larger_than_the_set_is_refused_with_the_largest_that_fits() -> None:
    with pytest.raises(InputError, match="2 ranks x 11 need 22 records a step, the set has 20") as caught:
        check_plan(shards_of([10, 10]), world_size=2, batch_size=11)
    assert "at most 10" in (caught.value.hint or "")
