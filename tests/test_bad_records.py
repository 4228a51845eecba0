"""Records that give no sample: named, counted, and replaced or the end of the run; nothing else moves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drawbar.config import Recipe
from drawbar.dataset.example import encode_example
from drawbar.errors import DataError
from drawbar.input.plan import LastBatch, PlanState
from drawbar.journal import BadRecord, Event, InputTotals
from tests.image_files import cmyk, good_jpegs, jpeg, other_formats, ycck
from tests.small_loader import loader_over, take, trained_ids
from tests.small_set import example, image, offsets, write_set

SPOILED = jpeg(1, 200, 200)
THUMBNAIL = b"\xff\xe1" + (2 + 6 + len(jpeg())).to_bytes(2, "big") + b"Exif\0\0" + jpeg()
WITH_THUMBNAIL = SPOILED[:2] + THUMBNAIL + SPOILED[2:]
BAD: dict[str, tuple[bytes, str]] = {
    "truncated": (example(1, 1, SPOILED[: len(SPOILED) // 2]), "truncated JPEG: no end-of-image marker"),
    "truncated behind a whole thumbnail": (
        example(1, 1, WITH_THUMBNAIL[:-200]),
        "truncated JPEG: no end-of-image marker",
    ),
    "no JPEG": (example(1, 1, other_formats()["PNG"]), "cannot decode image: PNG, not JPEG"),
    "text": (example(1, 1, b"<html>404</html>"), "cannot decode image: not JPEG: begins with 3c 68 74 6d"),
    "empty": (example(1, 1, b""), "image/encoded"),
    "no image": (encode_example({"image/class/label": [1]}), "image/encoded"),
    "no label": (encode_example({"image/encoded": image(1)}), "image/class/label"),
    "no Example": (b"\xff\xff\xff no protobuf", ""),
}


@pytest.mark.parametrize("kind", BAD)
def test_each_kind_is_named_with_its_reason_and_another_stands_in(tmp_path: Path, kind: str) -> None:
    payload, reason = BAD[kind]
    paths = write_set(tmp_path, payloads={30: payload})
    told: list[Event] = []
    with loader_over(tmp_path, on_bad="skip", told=told) as loader:
        trained = take(loader, 12)
        totals = loader.close()
    bad = (0, 1, offsets(paths[1])[6])
    ids = Counter(record for *_, batch in trained for record in batch)
    assert bad not in ids
    assert len(ids) == 95
    assert sorted(ids.values())[-2:] == [1, 2]
    assert totals.replaced_images == 1
    (event,) = (event for event in told if isinstance(event, BadRecord))
    assert (event.key, event.offset, event.policy) == (paths[1].name, bad[2], "skip")
    assert reason in event.reason


def test_files_that_only_look_bad_are_trained(tmp_path: Path) -> None:
    files = [*good_jpegs().values(), WITH_THUMBNAIL, WITH_THUMBNAIL + b"more", cmyk(), cmyk(adobe=False), ycck()]
    write_set(tmp_path, payloads={number: example(number, 1, data) for number, data in enumerate(files)})
    told: list[Event] = []
    with loader_over(tmp_path, on_bad="skip", told=told) as loader:
        take(loader, 12)
        totals = loader.close()
    assert not told
    assert (totals.bad_images, totals.replaced_images) == (0, 0)


def test_without_skip_the_first_bad_record_ends_the_run_and_is_told(tmp_path: Path) -> None:
    paths = write_set(tmp_path, payloads={30: BAD["truncated"][0]})
    told: list[Event] = []
    with loader_over(tmp_path, told=told) as loader:
        with pytest.raises(DataError) as caught:
            take(loader, 12)
        assert loader.close().bad_images == 1
    where = f"{paths[1].name} at byte {offsets(paths[1])[6]}"
    assert caught.value.message == f"{where}: cannot decode image: truncated JPEG: no end-of-image marker"
    assert 'input.on_bad = "skip"' in (caught.value.hint or "")
    assert [event.policy for event in told if isinstance(event, BadRecord)] == ["fail"]


@pytest.mark.parametrize("damage", [b"\xff\x00\xff", b"\x00"])
def test_a_wrong_crc_ends_the_run_with_skip_too(tmp_path: Path, damage: bytes) -> None:
    paths = write_set(tmp_path)
    data = bytearray(paths[2].read_bytes())
    at = offsets(paths[2])[5] + 200
    data[at : at + len(damage)] = bytes(value ^ 0xFF for value in data[at : at + len(damage)])
    paths[2].write_bytes(data)
    with loader_over(tmp_path, on_bad="skip") as loader, pytest.raises(DataError, match="CRC"):
        take(loader, 12)


def test_a_label_that_the_set_should_not_have_is_no_bad_image(tmp_path: Path) -> None:
    write_set(tmp_path, payloads={30: example(30, 11, image(30))})
    with loader_over(tmp_path, on_bad="skip") as loader, pytest.raises(DataError, match="label 11 is out of range"):
        take(loader, 12)


# What stands in


def spoiled_set(folder: Path, numbers: range, **settings: Any) -> set[tuple[int, int]]:
    """(shard, offset) of the records that give no sample."""
    paths = write_set(folder, num_shards=4, records_per_shard=25, payloads=dict.fromkeys(numbers, BAD["text"][0]))
    return {(number // 25, offsets(paths[number // 25])[number % 25]) for number in numbers}


def test_the_next_good_record_of_the_batch_stands_in_with_its_label_and_another_crop(tmp_path: Path) -> None:
    write_set(tmp_path / "good")
    # As long as what it replaces: others keep their offsets, and so their crops.
    write_set(tmp_path / "bad", payloads={n: example(n, 1 + n, bytes(len(image(n)))) for n in (3, 4)})
    plain: dict[str, Any] = {"lanes": 1, "shuffle_buffer": 0}
    batches = {}
    for name in ("good", "bad"):
        with loader_over(tmp_path / name, on_bad="skip", **plain) as loader:
            batches[name] = take(loader, 12)
    (sound,) = (one for one in batches["good"] if (0, 0) in {(shard, at) for _, shard, at in one[2]})
    (filled,) = (one for one in batches["bad"] if (0, 0) in {(shard, at) for _, shard, at in one[2]})
    labels = [1 + (5 if number in (3, 4) else number) for number in range(8)]
    assert (filled[1] + 1).tolist() == labels
    assert filled[2][3] == filled[2][4] == filled[2][5]
    for place in (0, 1, 2, 5, 6, 7):
        assert np.array_equal(filled[0][place], sound[0][place])
    assert not np.array_equal(filled[0][3], filled[0][5])
    assert not np.array_equal(filled[0][3], filled[0][4])


def test_what_stands_in_does_not_depend_on_threads(tmp_path: Path) -> None:
    spoiled_set(tmp_path, range(10, 60, 2))
    runs = []
    for threads in (1, 4):
        with loader_over(tmp_path, on_bad="skip", decode_threads=threads) as loader:
            runs.append(take(loader, 14))
    for one, other in zip(*runs, strict=True):
        assert one[2] == other[2]
        assert np.array_equal(one[0], other[0])
        assert np.array_equal(one[1], other[1])


def test_a_batch_without_a_good_record_ends_the_run(tmp_path: Path) -> None:
    spoiled_set(tmp_path, range(100))
    with loader_over(tmp_path, on_bad="skip") as loader, pytest.raises(DataError) as caught:
        take(loader, 2)
    assert "none of the 8 records of its batch can be decoded" in caught.value.message
    with pytest.raises(ValueError, match=r"needs a train\.batch_size of at least 2"):
        Recipe.model_validate({"input": {"on_bad": "skip"}, "train": {"batch_size": 1}})


# Steps, epochs, bytes


@pytest.mark.parametrize("last_batch", ["carry", "drop", "pad"])
def test_epochs_end_and_go_on_as_without_bad_records(tmp_path: Path, last_batch: LastBatch) -> None:
    """12 of 100 give no sample. Left after 4 steps and finished by twice the ranks: all others where they always are,
    each of the twelve replaced by one of its own batch, every byte trained or discarded."""
    bad = spoiled_set(tmp_path / "bad", range(5, 65, 5))
    write_set(tmp_path / "good", num_shards=4, records_per_shard=25)
    settings: dict[str, Any] = {"last_batch": last_batch, "shuffle_buffer": 64}
    sound = steps_of(tmp_path / "good", 11, 2, bad_at=offsets_of(tmp_path / "bad"), **settings)
    first, state, some = counted_steps(tmp_path / "bad", 4, 2, **settings)
    stored = PlanState.from_json(state.to_json())
    rest, _, more = counted_steps(tmp_path / "bad", 7, 4, state=stored, **settings)
    for step, (expected, got) in enumerate(zip(sound, [*first, *rest], strict=True)):
        assert sum(got.values()) == 16, step
        lost = {record for record in expected if record[1:] in bad}
        assert set(got) == expected - lost
        assert sum(count - 1 for count in got.values()) == len(lost)
    for totals in (*some, *more):
        assert totals.received_bytes + totals.inflated_bytes == totals.trained_bytes + totals.discarded_bytes
        assert totals.bad_images >= totals.replaced_images
        assert totals.decoded_images >= totals.trained_images
    assert sum(totals.replaced_images for totals in (*some, *more)) == sum(
        sum(record[1:] in bad for record in expected) for expected in sound
    )


def offsets_of(folder: Path) -> dict[tuple[int, int], int]:
    """(shard, number in it) -> offset."""
    paths = sorted(folder.glob("train-*"))
    return {(shard, i): at for shard, path in enumerate(paths) for i, at in enumerate(offsets(path))}


def steps_of(
    folder: Path, num_steps: int, world_size: int, bad_at: dict[tuple[int, int], int], **settings: Any
) -> list[set[tuple[int, int, int]]]:
    """What each global step of the sound set trains, with the offsets that the same records have in the other."""
    steps, *_ = trained_ids(folder, num_steps, world_size=world_size, batch_size=16 // world_size, **settings)
    number = {(shard, at): i for (shard, i), at in offsets_of(folder).items()}
    return [{(epoch, shard, bad_at[shard, number[shard, at]]) for epoch, shard, at in step} for step in steps]


def counted_steps(
    folder: Path, num_steps: int, world_size: int, *, state: PlanState | None = None, **settings: Any
) -> tuple[list[Counter[tuple[int, int, int]]], PlanState, list[InputTotals]]:
    """Per global step how often all ranks trained each record; the state after; the ranks' totals."""
    steps: list[Counter[tuple[int, int, int]]] = [Counter() for _ in range(num_steps)]
    totals = []
    for rank in range(world_size):
        with loader_over(
            folder,
            rank=rank,
            world_size=world_size,
            batch_size=16 // world_size,
            state=state,
            on_bad="skip",
            **settings,
        ) as loader:
            for step, (*_, ids) in zip(steps, take(loader, num_steps), strict=True):
                step.update(ids)
            after = loader.state
            totals.append(loader.close())
    assert after is not None
    return steps, after, totals


@pytest.mark.parametrize("manifest", [True, False])
def test_many_bad_records_are_counted_and_the_first_hundred_told(tmp_path: Path, manifest: bool) -> None:
    """150 of 200, met in three epochs: each is told once, those beyond a hundred only counted."""
    write_set(
        tmp_path,
        num_shards=2,
        records_per_shard=100,
        manifest=manifest,
        payloads={number: BAD["text"][0] for number in range(200) if number % 4},
    )
    told: list[Event] = []
    with loader_over(tmp_path, on_bad="skip", told=told, batch_size=50, lanes=1, shuffle_buffer=0) as loader:
        take(loader, 12)
        totals = loader.close()
    assert totals.trained_images == 600
    assert totals.replaced_images == 450
    assert totals.bad_images >= 450
    assert totals.received_bytes == totals.trained_bytes + totals.discarded_bytes
    places = [(event.key, event.offset) for event in told if isinstance(event, BadRecord)]
    assert len(places) == len(set(places)) == 100
