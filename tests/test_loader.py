"""The loader against real files: every record once, every byte accounted for, every damage named."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drawbar.errors import DataError, DrawbarError, InputError, RunFailed
from drawbar.input.plan import LastBatch, PlanState
from drawbar.input.reading import BUDGET_BYTES
from drawbar.journal import Event, InputSample, Request
from tests.small_loader import loader_over, take, trained_ids
from tests.small_set import NUM_CLASSES, example, image, offsets, write_set


@pytest.mark.parametrize("with_manifest", [True, False])
def test_all_ranks_together_get_every_record_once_an_epoch(tmp_path: Path, with_manifest: bool) -> None:
    write_set(tmp_path, manifest=with_manifest)
    seen: Counter[tuple[int, int, int]] = Counter()
    for rank in range(2):
        with loader_over(tmp_path, rank=rank, world_size=2) as loader:
            # 96 records, 2 ranks, batches of 8: 6 batches an epoch; a bounded shuffle lets a few cross its end.
            seen.update(record for _, _, ids in take(loader, 18) for record in ids)
    assert set(seen.values()) == {1}
    first_two = [record for record in seen if record[0] < 2]
    assert len(first_two) == 2 * 96


def test_labels_and_pixels_belong_together(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    number_of = {
        (shard, offset): shard * 24 + i for shard, path in enumerate(paths) for i, offset in enumerate(offsets(path))
    }
    with loader_over(tmp_path) as loader:
        for images, labels, ids in take(loader, 12):
            assert images.shape == (8, 32, 32, 3)
            assert images.dtype == np.uint8
            assert [number_of[record[1:]] % NUM_CLASSES for record in ids] == labels.tolist()


def test_same_seed_gives_the_same_batches_whatever_the_threads_and_request_size(tmp_path: Path) -> None:
    write_set(tmp_path)
    runs = []
    for threads, request_bytes, read_ahead in [(1, 4096, 1), (4, 1 << 20, 8)]:
        with loader_over(
            tmp_path, decode_threads=threads, request_bytes=request_bytes, read_ahead=read_ahead
        ) as loader:
            runs.append(take(loader, 14))
    for first, second in zip(*runs, strict=True):
        assert first[2] == second[2]
        assert np.array_equal(first[0], second[0])
        assert np.array_equal(first[1], second[1])
    with loader_over(tmp_path, seed=2) as loader:
        assert [ids for *_, ids in take(loader, 14)] != [ids for *_, ids in runs[0]]


def test_every_byte_asked_for_is_received_and_trained_or_discarded(tmp_path: Path) -> None:
    write_set(tmp_path)
    requests: list[Request] = []
    with loader_over(tmp_path, requests=requests) as loader:
        batches = [loader.next_batch(timeout_s=30) for _ in range(2)]
        trained_bytes = sum(batch.framed_bytes for batch in batches)
        for batch in batches:
            loader.recycle(batch)
        totals = loader.close()
    assert totals.trained_images == 16
    assert totals.trained_bytes == trained_bytes
    assert totals.planned_bytes == totals.received_bytes == sum(request.got_bytes for request in requests)
    assert totals.discarded_bytes == totals.received_bytes - trained_bytes > 0
    assert totals.decoded_images >= totals.trained_images
    set_bytes = sum(path.stat().st_size for path in tmp_path.glob("train-*"))
    assert totals.epochs == pytest.approx(totals.planned_bytes / set_bytes)


def test_reading_stops_ahead_of_a_consumer_that_does_not_come(tmp_path: Path) -> None:
    """Memory is bounded: what is fetched with nobody taking batches stays within the settings, not the set."""
    write_set(tmp_path, num_shards=8, records_per_shard=200)
    largest = max(path.stat().st_size for path in tmp_path.glob("train-*")) / 200 * 2
    with loader_over(tmp_path, read_ahead=2, request_bytes=4096, shuffle_buffer=8, prefetch_batches=1) as loader:
        loader.next_batch(timeout_s=30)
        before = -1
        while before != loader._reader.received_bytes:
            before = loader._reader.received_bytes
            loader._stop.wait(0.3)
        bound_records = 8 + 8 * (1 + 2)
        assert before <= (loader.report().lanes + 2 + 1) * 4096 + bound_records * largest
        assert before < 0.5 * sum(path.stat().st_size for path in tmp_path.glob("train-*"))


def test_closing_at_once_leaves_no_thread(tmp_path: Path) -> None:
    import threading

    write_set(tmp_path)
    before = threading.active_count()
    for _ in range(5):
        with loader_over(tmp_path):
            pass
    assert threading.active_count() == before


def failing(folder: Path, error: type[DrawbarError] = DataError) -> str:
    with loader_over(folder) as loader, pytest.raises(error) as caught:
        take(loader, 50)
    assert "\n" not in caught.value.message
    return caught.value.message


def damage(path: Path, position: int, value: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(value)


def test_a_wrong_payload_crc_names_shard_and_offset(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    offset = offsets(paths[2])[5]
    damage(paths[2], offset + 100, b"\xff\x00\xff")
    message = failing(tmp_path)
    assert "train-00002-of-00004" in message
    assert f"{offset}" in message
    assert "CRC" in message


def test_a_wrong_length_crc_names_shard_and_offset(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    offset = offsets(paths[1])[3]
    damage(paths[1], offset, b"\x01\x02")
    message = failing(tmp_path)
    assert "train-00001-of-00004" in message
    assert f"{offset}" in message


def test_a_file_that_is_no_tfrecord_is_called_that(tmp_path: Path) -> None:
    paths = write_set(tmp_path, manifest=False)
    paths[0].write_bytes(b"<html>this is not a shard</html>" * 1000)
    message = failing(tmp_path)
    assert "train-00000-of-00004" in message
    assert "TFRecord" in message


def test_a_truncated_last_record_is_found(tmp_path: Path) -> None:
    paths = write_set(tmp_path, manifest=False)
    last = offsets(paths[3])[-1]
    paths[3].write_bytes(paths[3].read_bytes()[:-100])
    message = failing(tmp_path)
    assert "train-00003-of-00004" in message
    assert f"{last}" in message
    assert "truncated" in message


def test_an_image_that_is_no_image_is_named(tmp_path: Path) -> None:
    paths = write_set(tmp_path, payloads={30: example(30, 1, b"this is no image")})
    message = failing(tmp_path)
    assert f"train-00001-of-00004 at byte {offsets(paths[1])[6]}: cannot decode image" in message


@pytest.mark.parametrize("label", [0, 11, -1])
def test_a_label_out_of_range_is_named_with_the_range(tmp_path: Path, label: int) -> None:
    write_set(tmp_path, payloads={50: example(50, label, image(50))})
    message = failing(tmp_path)
    assert f"label {label} is out of range 1..10" in message
    assert "train-00002-of-00004" in message


def test_a_record_that_is_no_example_is_named(tmp_path: Path) -> None:
    write_set(tmp_path, payloads={50: b"\xff\xff\xff no protobuf"})
    assert "train-00002-of-00004 at byte" in failing(tmp_path)


def test_a_shard_that_vanishes_ends_the_run_after_the_retries(tmp_path: Path) -> None:
    paths = write_set(tmp_path, num_shards=2)
    with loader_over(tmp_path, read_ahead=1) as loader:
        for path in paths:
            path.unlink()
        with pytest.raises(DrawbarError, match="no such object"):
            take(loader, 50)


def test_an_input_that_stalls_ends_the_wait(tmp_path: Path) -> None:
    write_set(tmp_path)
    with loader_over(tmp_path) as loader:
        held = [loader.next_batch(timeout_s=30) for _ in range(3)]
        held += [loader.next_batch(timeout_s=30) for _ in range(4 - len(held))]
        with pytest.raises(RunFailed, match=r"no batch for 0\.2 s"):
            loader.next_batch(timeout_s=0.2)


def test_a_manifest_that_counts_other_records_than_the_shard_holds_is_found(tmp_path: Path) -> None:
    """Two entries of it merged: its sums are right and no offset that is read from is wrong."""
    write_set(tmp_path, num_shards=1)
    path = tmp_path / "manifest.json"
    tree = json.loads(path.read_text())
    sizes = tree["shards"][0]["record_bytes"]
    tree["shards"][0]["record_bytes"] = [sizes[0] + sizes[1], *sizes[2:]]
    tree["shards"][0]["num_records"] -= 1
    tree["num_records"] -= 1
    tree["class_counts"][0] -= 1
    del tree["sha256"]  # as a manifest of an earlier version, which nothing tells was edited
    path.write_text(json.dumps(tree))
    assert "2 records in bytes" in (message := failing(tmp_path))
    assert "the manifest says 1" in message


# Epochs, their ends, and going on with one


@pytest.mark.parametrize("last_batch", ["carry", "drop", "pad"])
@pytest.mark.parametrize(("first_world", "second_world"), [(1, 2), (4, 1), (2, 8)])
def test_an_epoch_goes_on_at_another_world_size_with_the_same_global_batches(
    tmp_path: Path, last_batch: LastBatch, first_world: int, second_world: int
) -> None:
    """100 records, 16 a step: left in the middle of the first epoch, followed into the second."""
    write_set(tmp_path, num_shards=4, records_per_shard=25)
    settings: dict[str, Any] = {"last_batch": last_batch, "shuffle_buffer": 64}
    whole, *_ = trained_ids(tmp_path, 11, world_size=first_world, batch_size=16 // first_world, **settings)
    _, state, _ = trained_ids(tmp_path, 4, world_size=first_world, batch_size=16 // first_world, **settings)
    stored = PlanState.from_json(state.to_json())
    rest, _, totals = trained_ids(
        tmp_path, 7, world_size=second_world, batch_size=16 // second_world, state=stored, **settings
    )
    assert rest == whole[4:]
    for total in totals:
        assert total.received_bytes == total.trained_bytes + total.discarded_bytes


def test_an_epoch_goes_on_at_a_world_size_that_does_not_divide_the_lanes_without_loss_or_repeat(tmp_path: Path) -> None:
    write_set(tmp_path, num_shards=4, records_per_shard=25)
    before, state, _ = trained_ids(tmp_path, 3, world_size=2, batch_size=8, shuffle_buffer=64)
    after, _, totals = trained_ids(tmp_path, 8, world_size=3, batch_size=5, state=state, shuffle_buffer=64)
    seen = Counter(record for step in (*before, *after) for record in step)
    assert set(seen.values()) == {1}
    assert len([record for record in seen if record[0] == 0]) == 100
    for total in totals:
        assert total.received_bytes == total.trained_bytes + total.discarded_bytes


def test_what_does_not_fill_a_global_batch_is_dropped_padded_or_carried_over(tmp_path: Path) -> None:
    """100 records in steps of 16: 4 are left over."""
    write_set(tmp_path, num_shards=4, records_per_shard=25)
    cases: list[tuple[LastBatch, int, int]] = [("drop", 96, 0), ("pad", 100, 12), ("carry", 100, 0)]
    for last_batch, own, again in cases:
        _, _, totals = trained_ids(tmp_path, 13, world_size=2, batch_size=8, last_batch=last_batch)
        seen: Counter[tuple[int, int, int]] = Counter()
        for rank in range(2):
            with loader_over(tmp_path, rank=rank, world_size=2, last_batch=last_batch) as loader:
                seen.update(record for _, _, ids in take(loader, 14) for record in ids)
        first = {record: count for record, count in seen.items() if record[0] == 0}
        assert (len(first), sum(count - 1 for count in first.values())) == (own, again), last_batch
        assert sum(total.padded_images for total in totals) == again
        for total in totals:
            assert total.trained_images == 13 * 8
            assert total.received_bytes == total.trained_bytes + total.discarded_bytes
            assert total.planned_bytes == total.received_bytes


def test_a_set_whose_records_are_not_known_cannot_be_gone_on_with(tmp_path: Path) -> None:
    write_set(tmp_path / "known")
    write_set(tmp_path / "unknown", manifest=False)
    _, state, _ = trained_ids(tmp_path / "known", 2, world_size=1)
    with (
        pytest.raises(InputError, match="the sizes of this set's records are not known"),
        loader_over(tmp_path / "unknown", state=state),
    ):
        pass
    with loader_over(tmp_path / "unknown") as loader:
        assert loader.state is None


# What it says of itself


def test_each_stage_says_what_passed_and_where_it_waited(tmp_path: Path) -> None:
    write_set(tmp_path)
    requests: list[Request] = []
    begin_t = time.perf_counter()
    with loader_over(tmp_path, requests=requests) as loader:
        take(loader, 6)
        time.sleep(0.5)  # full: everything before the queue of batches is blocked by what comes after
        totals = loader.close()
        report = loader.report()
        stages = {stage.stage: stage for stage in loader.stages()}
    wall_s = time.perf_counter() - begin_t
    assert list(stages) == ["fetch", "split", "shuffle", "decode", "batch"]
    assert stages["fetch"].items == len(requests)
    assert stages["fetch"].bytes == totals.received_bytes
    assert stages["decode"].items == totals.decoded_images
    assert stages["split"].items >= stages["shuffle"].items >= 48
    for stage in stages.values():
        assert 0 < stage.busy_s + stage.wait_in_s + stage.wait_out_s <= stage.threads * wall_s
        assert stage.wait_out_s >= 0.4
        assert 0 <= stage.queue_mean <= max(stage.queue_capacity, 1)
    assert 0 < report.first_batch_s < wall_s
    assert (report.request_bytes, report.read_ahead, report.tuned, report.lanes) == (8192, 3, [], 16)


def test_samples_tell_of_queues_and_waits_at_work_and_in_a_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drawbar.input.loader._SAMPLE_S", 0.02)
    write_set(tmp_path)
    told: list[Event] = []
    with loader_over(tmp_path, told=told) as loader:
        for _ in range(40):
            take(loader, 1)
            time.sleep(0.005)
        at_work = len(told)
        held = [loader.next_batch(timeout_s=30) for _ in range(4)]
        with pytest.raises(RunFailed):
            loader.next_batch(timeout_s=0.5)  # no buffer is free: everything is blocked by who does not give back
        loader.recycle(held[0])
        loader.close()
        stages = {stage.stage: stage for stage in loader.stages()}
    samples = [event for event in told if isinstance(event, InputSample)]
    assert samples == told
    assert at_work >= 3
    assert len(samples) - at_work >= 5
    for sample in samples:
        assert set(sample.busy_s) == set(sample.wait_in_s) == set(sample.wait_out_s) == set(stages)
        assert sample.queue_capacity == {"fetch": 3, "shuffle": 16, "batch": 2}
        assert all(0 <= sample.queued[name] <= room for name, room in sample.queue_capacity.items())
    first, last = samples[at_work], samples[-1]
    stalled_s = last.t - first.t
    assert last.queued["batch"] == 0
    for name, threads in (("fetch", 3), ("split", 1), ("decode", 2)):
        assert last.wait_out_s[name] - first.wait_out_s[name] >= 0.5 * threads * stalled_s, name
    for name, stage in stages.items():
        assert 0 < last.busy_s[name] <= stage.busy_s
        assert last.wait_out_s[name] <= stage.wait_out_s


def test_what_the_recipe_leaves_open_is_tuned_within_the_budget_and_said(tmp_path: Path) -> None:
    write_set(tmp_path)
    with loader_over(tmp_path, request_bytes=0, read_ahead=0) as loader:
        take(loader, 30)
        report = loader.report()
    assert report.tuned == ["request_bytes", "read_ahead"]
    assert (report.lanes + report.read_ahead) * report.request_bytes <= BUDGET_BYTES
