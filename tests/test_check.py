"""`drawbar data check`: every kind of damage is found, named exactly, and hides no other."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cv2
import google_crc32c
import numpy as np
import pytest
import simplejpeg

from drawbar.dataset.check import CheckSummary, check_set, is_sampled
from drawbar.dataset.example import Value, encode_example
from drawbar.dataset.manifest import MANIFEST_NAME, Manifest, ShardEntry
from drawbar.dataset.record_check import read_features
from drawbar.dataset.tfrecord import frame
from drawbar.dataset.walk import Fault, Origin
from drawbar.errors import DataError, InputError
from tests.drawbar_process import drawbar
from tests.small_set import image, offsets

Features = dict[str, Value]
NUM_CLASSES = 5


def imagenet_features(number: int) -> Features:
    encoded = image(number)
    return {
        "image/height": 48,
        "image/width": 64,
        "image/colorspace": b"RGB",
        "image/channels": 3,
        "image/class/label": 1 + number % NUM_CLASSES,
        "image/class/synset": f"n{number % NUM_CLASSES:08d}".encode(),
        "image/class/text": b"thing",
        "image/object/bbox/xmin": array("f", [0.25] * (number % 3)),
        "image/object/bbox/xmax": array("f", [0.5] * (number % 3)),
        "image/object/bbox/ymin": array("f", [0.0] * (number % 3)),
        "image/object/bbox/ymax": array("f", [1.0] * (number % 3)),
        "image/object/bbox/label": array("q", [1 + number % NUM_CLASSES] * (number % 3)),
        "image/format": b"JPEG",
        "image/filename": f"{number}.JPEG".encode(),
        "image/encoded": encoded,
    }


def coco_features(number: int, objects: int = 2) -> Features:
    encoded = image(number)
    mask = cv2.imencode(".png", np.ones((48, 64), np.uint8))[1].tobytes()
    return {
        "image/height": 48,
        "image/width": 64,
        "image/filename": f"{number}.jpg".encode(),
        "image/source_id": str(number).encode(),
        "image/key/sha256": hashlib.sha256(encoded).hexdigest().encode(),
        "image/encoded": encoded,
        "image/format": b"jpeg",
        "image/object/bbox/xmin": array("f", [0.25] * objects),
        "image/object/bbox/xmax": array("f", [0.5] * objects),
        "image/object/bbox/ymin": array("f", [0.0] * objects),
        "image/object/bbox/ymax": array("f", [1.0] * objects),
        "image/object/class/text": [b"cat"] * objects,
        "image/object/class/label": array("q", [17] * objects),
        "image/object/is_crowd": array("q", [0] * objects),
        "image/object/area": array("f", [768.0] * objects),
        "image/object/mask": [mask] * objects,
    }


def write(
    folder: Path,
    *,
    shards: int = 3,
    per_shard: int = 10,
    changes: Mapping[int, Features] | None = None,
    features: Callable[[int], Features] = imagenet_features,
    manifest: bool = True,
) -> list[Path]:
    """A sound set, but for `changes`, which replace features of some records by number; None-valued keys go."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, entries = [], []
    counts = [0] * NUM_CLASSES
    for shard in range(shards):
        framed = []
        for number in range(shard * per_shard, (shard + 1) * per_shard):
            content = features(number) | (changes or {}).get(number, {})
            framed.append(frame(encode_example({key: value for key, value in content.items() if value != "gone"})))
            counts[number % NUM_CLASSES] += 1
        path = folder / f"train-{shard:05d}-of-{shards:05d}"
        path.write_bytes(b"".join(framed))
        paths.append(path)
        entries.append(entry_of(path, list(map(len, framed))))
    if manifest:
        write_manifest(folder, entries, tuple(counts))
    return paths


def entry_of(path: Path, sizes: list[int]) -> ShardEntry:
    data = path.read_bytes()
    return ShardEntry(
        name=path.name,
        size_bytes=len(data),
        num_records=len(sizes),
        crc32c=f"{google_crc32c.value(data):08x}",
        record_bytes=tuple(sizes),
    )


def write_manifest(folder: Path, entries: list[ShardEntry], counts: tuple[int, ...]) -> None:
    labels = tuple(f"n{index:08d}" for index in range(len(counts)))
    manifest = Manifest(split="train", seed=1, labels=labels, class_counts=counts, shards=tuple(entries))
    (folder / MANIFEST_NAME).write_text(manifest.dumps())


def checked(folder: Path, **options: Any) -> tuple[CheckSummary, list[Fault]]:
    faults: list[Fault] = []
    summary = check_set(Origin(url=str(folder)), on_fault=faults.append, **options)
    assert summary.faults - summary.unlisted_faults == len(faults)
    return summary, faults


def of_records(faults: list[Fault]) -> list[tuple[str, int | None, int | None]]:
    return [(fault.shard, fault.record, fault.offset) for fault in faults if fault.record is not None]


def damage(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


def test_a_sound_set_has_no_faults_and_everything_is_counted(tmp_path: Path) -> None:
    paths = write(tmp_path)
    summary, faults = checked(tmp_path, sample=1.0)
    assert faults == []
    assert (summary.shards, summary.records, summary.decoded) == (3, 30, 30)
    assert summary.read_bytes == sum(path.stat().st_size for path in paths)
    assert (summary.schema, summary.has_manifest) == ("imagenet", True)
    assert summary.class_counts == dict.fromkeys(range(1, 6), 6)


def test_worker_processes_find_the_same_faults_in_the_same_order(tmp_path: Path) -> None:
    paths = write(tmp_path, shards=5)
    for path, record in ((paths[4], 3), (paths[0], 9), (paths[2], 0)):
        damage(path, offsets(path)[record] + 40)
    alone = checked(tmp_path, workers=1)
    together = checked(tmp_path, workers=2)
    assert len(alone[1]) == 6
    assert together == alone


def test_every_bad_record_of_a_shard_is_found_in_one_pass(tmp_path: Path) -> None:
    paths = write(tmp_path)
    starts = offsets(paths[1])
    for record in (0, 4, 9):
        damage(paths[1], starts[record] + 60)
    _, faults = checked(tmp_path)
    assert of_records(faults) == [(paths[1].name, record, starts[record]) for record in (0, 4, 9)]
    assert all("wrong CRC of the record's data" in fault.reason for fault in faults[:3])
    assert [(fault.shard, fault.record) for fault in faults[3:]] == [(paths[1].name, None)]
    assert "crc32c of the whole shard" in faults[3].reason


def test_a_bad_length_ends_its_shard_and_no_other(tmp_path: Path) -> None:
    paths = write(tmp_path)
    starts = offsets(paths[0])
    damage(paths[0], starts[4])
    damage(paths[2], offsets(paths[2])[7] + 60)
    summary, faults = checked(tmp_path)
    assert of_records(faults) == [(paths[0].name, 4, starts[4]), (paths[2].name, 7, offsets(paths[2])[7])]
    assert "wrong CRC of the record's length" in faults[0].reason
    assert "the last 6 of its 10 records could not be looked at" in faults[1].reason
    assert (summary.records, summary.unread_records, summary.faulty_shards) == (24, 6, 2)


@pytest.mark.parametrize(("cut", "reason"), [(100, "truncated last record"), (5, "truncated last record")])
def test_a_truncated_shard(tmp_path: Path, cut: int, reason: str) -> None:
    paths = write(tmp_path)
    last = offsets(paths[2])[9]
    paths[2].write_bytes(paths[2].read_bytes()[:-cut])
    _, faults = checked(tmp_path)
    assert f"manifest.json says {paths[2].stat().st_size + cut}" in faults[0].reason
    assert (faults[1].record, faults[1].offset) == (9, last)
    assert reason in faults[1].reason


def test_missing_extra_and_exchanged_shards(tmp_path: Path) -> None:
    paths = write(tmp_path)
    paths[0].unlink()
    (tmp_path / "train-00007-of-00003").write_bytes(paths[1].read_bytes())
    first, second = paths[1].read_bytes(), paths[2].read_bytes()
    paths[1].write_bytes(second)
    paths[2].write_bytes(first)
    _, faults = checked(tmp_path)
    reasons = {fault.shard: fault.reason for fault in faults if fault.record is None and "crc32c" not in fault.reason}
    assert "missing" in reasons[paths[0].name]
    assert reasons["train-00007-of-00003"] == "not in manifest.json"
    assert sum("crc32c of the whole shard" in fault.reason for fault in faults) == 2


def test_a_shard_whose_record_was_replaced_by_another_sound_one(tmp_path: Path) -> None:
    """All CRCs are right: only the manifest knows."""
    paths = write(tmp_path)
    write(tmp_path / "other", changes={11: imagenet_features(13)}, manifest=False)
    paths[1].write_bytes((tmp_path / "other" / paths[1].name).read_bytes())
    _, faults = checked(tmp_path)
    assert any("crc32c of the whole shard" in fault.reason for fault in faults)
    assert [fault.reason for fault in faults if fault.shard == MANIFEST_NAME] == [
        "class 2 (n00000001): 5 counted, class_counts says 6",
        "class 4 (n00000003): 7 counted, class_counts says 6",
    ]


def test_a_manifest_that_contradicts_itself_is_a_fault_and_the_shards_are_still_checked(tmp_path: Path) -> None:
    paths = write(tmp_path)
    tree = json.loads((tmp_path / MANIFEST_NAME).read_text())
    tree["num_records"] += 1
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(tree))
    damage(paths[0], 60)
    summary, faults = checked(tmp_path)
    assert not summary.has_manifest
    assert faults[0].shard == MANIFEST_NAME
    assert "num_records is 31" in faults[0].reason
    assert of_records(faults) == [(paths[0].name, 0, 0)]


def test_an_edited_manifest_and_a_map_that_is_none_are_faults(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / MANIFEST_NAME
    text = path.read_text()
    tree = json.loads(text)
    tree["labels"] = tree["labels"][::-1]
    path.write_text(json.dumps(tree))
    _, faults = checked(tmp_path)
    assert [fault.reason for fault in faults] == ["changed after it was written: its sha256 does not fit"]
    maps: list[dict[str, Any]] = [{"a": 1}, {"1": "x"}, {"1": {}}, {}, {"1": 1}]
    for category_map in maps:
        tree = json.loads(text) | {"record_schema": "coco", "notes": {"category_map": category_map}}
        path.write_text(json.dumps(tree))
        _, faults = checked(tmp_path)
        assert any("notes.category_map" in fault.reason for fault in faults if fault.shard == MANIFEST_NAME)


def test_empty_shards_of_a_foreign_set_are_faults(tmp_path: Path) -> None:
    paths = write(tmp_path, manifest=False)
    paths[1].write_bytes(b"")
    _, faults = checked(tmp_path)
    assert [(fault.shard, fault.reason) for fault in faults] == [
        (paths[1].name, "empty: no record, as of a copy that failed")
    ]


PNG = cv2.imencode(".png", np.zeros((48, 64, 3), np.uint8))[1].tobytes()
BIG = simplejpeg.encode_jpeg(np.zeros((96, 64, 3), np.uint8))
ONE_BOX: Features = {
    "image/object/bbox/xmin": array("f", [0.25]),
    "image/object/bbox/xmax": array("f", [0.5]),
    "image/object/bbox/ymin": array("f", [0.25]),
    "image/object/bbox/ymax": array("f", [0.5]),
    "image/object/bbox/label": array("q", [2]),
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image/class/text": "gone"}, "image/class/text is missing"),
        ({"image/class/label": "gone"}, "image/class/label is missing"),
        ({"image/height": [48, 48]}, "image/height is a list of 2, first 48; expected one int64"),
        ({"image/height": 48.0}, "image/height is 48.0; expected one int64"),
        ({"image/filename": 7}, "image/filename is 7; expected one bytes"),
        ({"image/encoded": [b"a" * 300, b"b"]}, "image/encoded is a list of 2, first 300 bytes; expected one bytes"),
        ({"image/object/bbox/xmin": array("q", [0])}, "image/object/bbox/xmin is 0; expected a list of float"),
        ({"image/object/bbox/label": array("q", [2])}, "lists of different lengths"),
        ({"image/class/label": 0}, "label 0 is none of the set's 1..5"),
        ({"image/class/label": 6}, "label 6 is none of the set's 1..5"),
        ({"image/class/label": -1}, "label -1 is none of the set's 1..5"),
        (ONE_BOX | {"image/object/bbox/xmax": array("f", [1.5])}, "not within 0..1"),
        (ONE_BOX | {"image/object/bbox/xmin": array("f", [float("nan")])}, "not within 0..1"),
        (ONE_BOX | {"image/object/bbox/xmin": array("f", [0.75])}, "minimum and maximum are reversed"),
        (ONE_BOX | {"image/object/bbox/ymin": array("f", [0.5])}, "empty"),
        ({"image/width": 65}, "image/width is 65, the image's header says 64"),
        ({"image/encoded": BIG}, "image/height is 48, the image's header says 96"),
        ({"image/format": b"PNG"}, "image/format is 'PNG', the image is JPEG"),
        ({"image/encoded": PNG}, "PNG, not JPEG"),
        ({"image/encoded": b"no image"}, "not JPEG: begins with"),
        ({"image/encoded": image(11)[:-2]}, "truncated JPEG"),
    ],
)
def test_what_is_wrong_in_a_record(tmp_path: Path, changes: Features, reason: str) -> None:
    paths = write(tmp_path, shards=2, changes={11: changes})
    _, faults = checked(tmp_path)
    assert {(paths[1].name, 1, offsets(paths[1])[1])} == set(of_records(faults))
    assert any(reason in fault.reason for fault in faults), faults
    assert all("\n" not in fault.reason for fault in faults)


def test_a_payload_that_is_no_example(tmp_path: Path) -> None:
    path = tmp_path / "train-00000-of-00001"
    path.write_bytes(frame(encode_example(imagenet_features(1))) + frame(b"\xff\xff no protobuf"))
    _, faults = checked(tmp_path)
    assert [(fault.record, "malformed Example" in fault.reason) for fault in faults] == [(1, True)]


def test_only_decoding_finds_damage_inside_an_image(tmp_path: Path) -> None:
    encoded = bytearray(image(4, 96))
    encoded[-60:-20] = b"\xff\xd9" * 20
    changes: Features = {"image/encoded": bytes(encoded), "image/height": 96, "image/width": 128}
    paths = write(tmp_path, shards=1, changes={4: changes})
    assert checked(tmp_path)[1] == []
    summary, faults = checked(tmp_path, sample=1.0)
    assert of_records(faults) == [(paths[0].name, 4, offsets(paths[0])[4])]
    assert "cannot be decoded" in faults[0].reason
    assert summary.decoded == 10


def test_a_sample_is_the_same_every_time_and_about_as_large_as_asked(tmp_path: Path) -> None:
    write(tmp_path, shards=4, per_shard=50)
    chosen = {(s, r) for s in range(4) for r in range(50) if is_sampled(f"train-{s:05d}-of-00004", r, 0.3)}
    assert 35 <= len(chosen) <= 85
    assert checked(tmp_path, sample=0.3, workers=1)[0].decoded == len(chosen)
    assert checked(tmp_path, sample=0.3, workers=2)[0].decoded == len(chosen)
    smaller = {(s, r) for s in range(4) for r in range(50) if is_sampled(f"train-{s:05d}-of-00004", r, 0.1)}
    assert smaller < chosen
    with pytest.raises(InputError, match=r"sample is 1\.5"):
        checked(tmp_path, sample=1.5)


def test_a_foreign_set_needs_only_image_and_label(tmp_path: Path) -> None:
    only = {"image/encoded", "image/class/label"}

    def features(number: int) -> Features:
        return {key: value for key, value in imagenet_features(number).items() if key in only}

    write(tmp_path, features=features, manifest=False)
    summary, faults = checked(tmp_path)
    assert faults == []
    assert (summary.schema, summary.has_manifest, summary.records) == ("imagenet", False, 30)


def test_a_foreign_set_with_a_missing_number(tmp_path: Path) -> None:
    paths = write(tmp_path, shards=4, manifest=False)
    paths[2].unlink()
    _, faults = checked(tmp_path)
    assert faults == [Fault("train-00002-of-00004", None, None, "missing, by the numbers of the others")]


def test_two_sets_in_one_folder_must_be_told_apart(tmp_path: Path) -> None:
    write(tmp_path, manifest=False)
    for path in list(tmp_path.iterdir()):
        (tmp_path / path.name.replace("train", "validation")).write_bytes(path.read_bytes())
    with pytest.raises(InputError, match="2 sets in") as caught:
        checked(tmp_path)
    assert "train-*-of-00003" in str(caught.value.hint)
    assert checked(tmp_path, pattern="validation-*")[0].records == 30


def test_records_with_unknown_keys_are_one_fault_and_framing_is_still_checked(tmp_path: Path) -> None:
    paths = write(tmp_path, features=lambda number: {"text": f"{number}".encode()}, manifest=False)
    starts = offsets(paths[2])
    damage(paths[2], starts[5] + 13)
    summary, faults = checked(tmp_path)
    assert "neither ImageNet's nor COCO's keys (text)" in faults[0].reason
    assert of_records(faults[1:]) == [(paths[2].name, 5, starts[5])]
    assert summary.schema == "none"
    assert len(checked(tmp_path, schema="none")[1]) == 1


COCO_CHANGES: list[tuple[Features, str]] = [
    ({"image/object/class/label": array("q", [17, 12])}, "label 12 is none of the set's 2 within 1..17"),
    ({"image/object/area": array("f", [1.0])}, "lists of different lengths"),
    ({"image/object/mask": [b"x"]}, "lists of different lengths"),
    ({"image/object/mask": [b"x", b"y"]}, "object 0: mask is no PNG"),
    (
        {"image/object/mask": [cv2.imencode(".png", np.ones((8, 9), np.uint8))[1].tobytes()] * 2},
        "object 1: mask of 9x8 pixels, the image has 64x48",
    ),
    ({"image/key/sha256": b"0" * 64}, "image/key/sha256 is"),
    ({"image/object/is_crowd": array("q", [0, 2])}, "object 1: is_crowd 2"),
    ({"image/object/area": array("f", [1.0, float("inf")])}, "object 1: area inf"),
]


@pytest.mark.parametrize(("changes", "reason"), COCO_CHANGES)
def test_what_is_wrong_in_a_coco_record(tmp_path: Path, changes: Features, reason: str) -> None:
    paths = write(tmp_path, shards=1, features=coco_features, changes={3: changes}, manifest=False)
    entry = entry_of(paths[0], np.diff([*offsets(paths[0]), paths[0].stat().st_size]).tolist())
    manifest = Manifest(
        split="train",
        seed=1,
        labels=("person", "cat"),
        class_counts=(0, 20),
        shards=(entry,),
        record_schema="coco",
        notes={"category_map": {"1": 1, "17": 2}},
    )
    (tmp_path / MANIFEST_NAME).write_text(manifest.dumps())
    _, faults = checked(tmp_path, sample=1.0)
    assert any(fault.record == 3 and reason in fault.reason for fault in faults), faults
    assert {fault.record for fault in faults} <= {3, None}


def test_a_coco_set_without_a_manifest_is_recognised(tmp_path: Path) -> None:
    write(tmp_path, features=lambda number: coco_features(number, number % 4), manifest=False)
    summary, faults = checked(tmp_path, sample=1.0)
    assert faults == []
    assert (summary.schema, summary.class_counts) == ("coco", {17: 43})


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_compressed_shards_are_checked_by_content_whatever_their_name(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    paths = write(tmp_path, manifest=False)
    starts = offsets(paths[1])
    damage(paths[1], starts[6] + 60)
    for path in paths[1:]:
        path.write_bytes(compress(path.read_bytes()))
    summary, faults = checked(tmp_path)
    assert of_records(faults) == [(paths[1].name, 6, starts[6])]
    assert (summary.records, summary.compressed_shards) == (30, 2)
    assert summary.read_bytes == sum(path.stat().st_size for path in paths)


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_a_damaged_compressed_shard(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    paths = write(tmp_path, manifest=False)
    whole = compress(paths[0].read_bytes())
    paths[0].write_bytes(whole[:-1])
    wrong = bytearray(compress(paths[1].read_bytes()))
    wrong[-8 if compress is gzip.compress else -1] ^= 1  # of the checksum at the end
    paths[1].write_bytes(wrong)
    paths[2].write_bytes(compress(paths[2].read_bytes()) + b"rest")
    _, faults = checked(tmp_path)
    reasons = {fault.shard: fault.reason for fault in faults}
    assert "stream is truncated" in reasons[paths[0].name]
    assert "stream is damaged: " in reasons[paths[1].name]
    assert "followed by 4 bytes" in reasons[paths[2].name]
    # What came out before the damage was looked at: nothing of so small a shard where its checksum is wrong.
    assert {fault.shard: fault.record for fault in faults} == dict(zip(reasons, (10, 0, 10), strict=True))


def test_features_read_fast_are_those_read_slowly() -> None:
    from drawbar.dataset.example import decode_example

    for number in range(5):
        for features in (imagenet_features(number), coco_features(number)):
            payload = encode_example(features)
            assert read_features(payload) == decode_example(payload)
    assert read_features(b"") == {}
    for broken in (b"\x0a", b"\x0a\x05\x0a\x7f", payload[:-1], payload[:40]):
        with pytest.raises(DataError):
            read_features(broken)


def test_the_command_prints_faults_to_stdout_and_ends_with_4(tmp_path: Path) -> None:
    paths = write(tmp_path)
    good = drawbar("data", "check", tmp_path, "--decode")
    assert (good.code, good.stderr.count("error")) == (0, 0)
    assert "3 shards, 30 records" in good.stdout
    assert "30 images decoded" in good.stdout
    assert good.stdout.rstrip().endswith("no faults")
    starts = offsets(paths[1])
    damage(paths[1], starts[2] + 60)
    bad = drawbar("data", "check", tmp_path)
    assert bad.code == 4
    assert bad.error_line == f"error: 2 faults in {tmp_path}"
    assert f"{paths[1].name}, record 2 at byte {starts[2]}: wrong CRC" in bad.stdout
    as_json = drawbar("data", "check", tmp_path, "--json", "--sample", "0.5")
    assert as_json.code == 4
    row = json.loads(as_json.stdout)
    assert row["num_faults"] == len(row["faults"]) == 2
    assert row["faults"][0] == {
        "shard": paths[1].name,
        "record": 2,
        "offset": starts[2],
        "reason": row["faults"][0]["reason"],
    }
    assert json.loads(drawbar("data", "check", tmp_path, "--json", "--schema", "none").stdout)["schema"] == "none"


def test_bad_arguments_are_refused_in_one_line(tmp_path: Path) -> None:
    empty = drawbar("data", "check", tmp_path)
    assert (empty.code, "no shards in" in empty.error_line) == (2, True)
    nowhere = drawbar("data", "check", tmp_path / "nowhere")
    assert (nowhere.code, "no such folder" in nowhere.error_line) == (2, True)
    assert drawbar("data", "check", tmp_path, "--schema", "voc").code == 2
    assert drawbar("data", "check", "http://localhost/x").code == 2


def test_memory_does_not_grow_with_the_number_of_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drawbar.dataset.walk.MAX_FAULTS", 20)
    record = bytearray(frame(b"x"))
    record[-1] ^= 1
    (tmp_path / "train-00000-of-00001").write_bytes(bytes(record) * 100)
    summary, faults = checked(tmp_path, workers=1)
    assert len(faults) == 20
    assert (summary.faults, summary.unlisted_faults, summary.records) == (100, 80, 100)
