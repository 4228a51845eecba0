"""The reading plan's promises, over many sizes: disjoint, equal, in whole records, the same for everybody."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawbar.dataset.listing import ShardInfo
from drawbar.errors import InputError
from drawbar.input.plan import Span, check_plan, chunks, plan_epoch

RecordId = tuple[int, int]


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


def records(spans: list[Span], shards: list[ShardInfo]) -> list[RecordId]:
    ids = []
    for span in spans:
        offsets = [0, *accumulate(shards[span.shard].record_bytes or ())]
        assert span.start in offsets
        assert span.end in offsets
        ids += [(span.shard, offset) for offset in offsets if span.start <= offset < span.end]
    return ids


COUNTS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(counts=COUNTS, world_size=st.integers(1, 40), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 50))
def test_ranks_read_disjoint_equal_parts_and_drop_less_than_one_record_a_rank(
    counts: list[int], world_size: int, seed: int, epoch: int
) -> None:
    shards = shards_of(counts)
    parts = [
        records(plan_epoch(shards, rank=rank, world_size=world_size, seed=seed, epoch=epoch), shards)
        for rank in range(world_size)
    ]
    together = [record for part in parts for record in part]
    assert len(set(together)) == len(together)
    assert {len(part) for part in parts} == {sum(counts) // world_size}
    assert sum(counts) - len(together) < world_size


@given(counts=COUNTS, seed=st.integers(0, 1000))
def test_one_rank_reads_every_record_once_an_epoch_in_an_order_that_the_epoch_changes(
    counts: list[int], seed: int
) -> None:
    shards = shards_of(counts)
    epochs = [records(plan_epoch(shards, rank=0, world_size=1, seed=seed, epoch=e), shards) for e in range(8)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == sum(counts) for epoch in epochs)
    if len(counts) > 3:
        assert any(epoch != epochs[0] for epoch in epochs)


@given(counts=COUNTS, world_size=st.integers(1, 6), seed=st.integers(0, 1000))
def test_without_record_sizes_ranks_take_whole_shards_and_miss_none(
    counts: list[int], world_size: int, seed: int
) -> None:
    shards = shards_of(counts, known=False)
    spans = [
        span
        for rank in range(world_size)
        for span in plan_epoch(shards, rank=rank, world_size=world_size, seed=seed, epoch=0)
    ]
    assert sorted(span.shard for span in spans) == list(range(len(counts)))
    assert all((span.start, span.end) == (0, shards[span.shard].size_bytes) for span in spans)


@given(counts=COUNTS, request_bytes=st.integers(1, 500))
def test_chunks_cover_the_spans_without_gap_or_overlap(counts: list[int], request_bytes: int) -> None:
    shards = shards_of(counts)
    spans = plan_epoch(shards, rank=0, world_size=1, seed=1, epoch=0)
    cut = list(chunks(spans, request_bytes))
    assert all(0 < chunk.end - chunk.start <= request_bytes for chunk in cut)
    for span in spans:
        mine = [chunk for chunk in cut if chunk.span is span]
        assert [chunk.start for chunk in mine] == [span.start, *(chunk.end for chunk in mine)][:-1]
        assert mine[-1].end == span.end


def test_more_ranks_than_shards_works_by_records_with_a_manifest_and_says_what_to_do_without() -> None:
    check_plan(shards_of([10, 10]), world_size=4, batch_size=5)
    with pytest.raises(InputError, match="more ranks than shards: 4 ranks, 2 shards") as caught:
        check_plan(shards_of([10, 10], known=False), world_size=4, batch_size=5)
    assert "at most 2 ranks" in (caught.value.hint or "")


def test_a_batch_larger_than_the_set_is_refused_with_the_largest_that_fits() -> None:
    with pytest.raises(InputError, match="2 ranks x 11 need 22 records a step, the set has 20") as caught:
        check_plan(shards_of([10, 10]), world_size=2, batch_size=11)
    assert "at most 10" in (caught.value.hint or "")
