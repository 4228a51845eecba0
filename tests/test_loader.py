"""The loader against real files: every record once, every byte accounted for, every damage named."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from drawbar.config import Input, Storage
from drawbar.dataset.listing import list_shards
from drawbar.errors import DataError, DrawbarError, RunFailed
from drawbar.input.loader import Batch, Loader, ReadPlan
from drawbar.journal import Request
from drawbar.storage.stores import CountedReader, open_place
from tests.small_set import NUM_CLASSES, example, image, offsets, write_set


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
) -> Iterator[Loader]:
    storage = Storage(request_bytes=request_bytes, read_ahead=read_ahead)
    settings = Input(image_size=32, shuffle_buffer=shuffle_buffer, prefetch_batches=prefetch_batches, seed=seed)
    place = open_place(str(folder), None, None, storage)
    reader = CountedReader(place, storage, (requests if requests is not None else []).append)
    plan = ReadPlan(
        shards=list_shards(place.store, place.prefix).shards, rank=rank, world_size=world_size, seed=settings.seed
    )
    loader = Loader(
        plan,
        reader,
        batch_size=batch_size,
        num_classes=num_classes,
        input=settings,
        storage=storage,
        decode_threads=decode_threads,
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
        bound_records = 8 + 8 * (1 + 2) + 8
        assert before <= 3 * 4096 + bound_records * largest
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
    assert "24 records in bytes" in failing(tmp_path)
