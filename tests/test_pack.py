"""Packing, the manifest, the listing, and JPEG headers: from folders of real files to shards and back."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import obstore
import pytest
import simplejpeg
from obstore.store import LocalStore, MemoryStore, ObjectStore, S3Store

from drawbar.dataset import pack as packing
from drawbar.dataset.example import decode_example, parse_image_example
from drawbar.dataset.jpeg import HeaderCut, check_trainable, parse_header
from drawbar.dataset.listing import list_shards
from drawbar.dataset.manifest import MANIFEST_NAME, BadFile, Manifest, ShardEntry
from drawbar.dataset.pack import pack_folder
from drawbar.dataset.tfrecord import RawRecord, RecordSplitter
from drawbar.errors import DataError, InputError
from drawbar.storage import embedded

KEYS = {
    "image/height",
    "image/width",
    "image/colorspace",
    "image/channels",
    "image/class/label",
    "image/class/synset",
    "image/class/text",
    "image/object/bbox/xmin",
    "image/object/bbox/xmax",
    "image/object/bbox/ymin",
    "image/object/bbox/ymax",
    "image/object/bbox/label",
    "image/format",
    "image/filename",
    "image/encoded",
}


def jpeg(number: int = 0, height: int = 40, width: int = 60, colorspace: str = "RGB") -> bytes:
    channels = {"RGB": 3, "GRAY": 1, "CMYK": 4}[colorspace]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, channels), np.uint8)
    sampling = "Gray" if colorspace == "GRAY" else "444" if colorspace == "CMYK" else "420"
    data: bytes = simplejpeg.encode_jpeg(pixels, colorspace=colorspace, colorsubsampling=sampling)
    return data


PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
CMYK_FRAME = bytes.fromhex(
    "ffd8 ffee000e 41646f6265 0064 0000 0000 02 ffc0 0014 08 0010 0020 04 012200 021100 031100 042200"
)
BAD = {
    "n01/png.JPEG": (PNG, "PNG, not JPEG"),
    "n01/empty.jpg": (b"", "empty file"),
    "n02/cmyk.JPEG": (CMYK_FRAME + b"\xff\xd9", "YCCK JPEG (4 components)"),
    "n02/head.jpeg": (jpeg()[:100], "truncated JPEG header"),
    "n03/body.JPG": (jpeg(9)[:-40], "truncated JPEG: no end-of-image marker"),
    "n03/text.jpg": (b"<html>not found</html>", "not JPEG: begins with 3c 68 74 6d"),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """30 images in 3 classes, sizes and names all different."""
    folder = tmp_path / "source"
    for number in range(30):
        name = f"n0{number % 3 + 1}"
        (folder / name).mkdir(parents=True, exist_ok=True)
        suffix = ("JPEG", "jpg", "JPG", "jpeg")[number % 4]
        (folder / name / f"{name}_{number}.{suffix}").write_bytes(jpeg(number, 30 + number, 60))
    (folder / "README.txt").write_text("not an image")
    (folder / "n01" / "notes.txt").write_text("not an image either")
    (folder / "n01" / ".hidden.jpg").write_bytes(b"")
    return folder


def add_bad(source: Path) -> None:
    for path, (data, _) in BAD.items():
        (source / path).write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def records(data: bytes, shard: str = "s") -> list[RawRecord]:
    splitter = RecordSplitter(shard)
    found = list(splitter.feed(data))
    splitter.finish()
    return found


# JPEG headers


def test_headers_of_real_files() -> None:
    header = check_trainable(jpeg(height=33, width=47))
    assert (header.width, header.height, header.components) == (47, 33, 3)
    assert header.sampling == ((2, 2), (1, 1), (1, 1))
    assert not header.progressive
    assert check_trainable(jpeg(colorspace="GRAY")).components == 1
    assert check_trainable(jpeg() + b"bytes behind the end").width == 60
    comment = b"\xff\xd8" + b"\xff" * 3 + b"\xfe\x00\x05abc" + jpeg()[2:]  # fill bytes, a comment
    assert check_trainable(comment).height == 40


def test_progressive_and_adobe() -> None:
    data = jpeg()
    at = parse_header(data).frame_offset
    assert data[at : at + 2] == b"\xff\xc0"
    assert parse_header(data[:at] + b"\xff\xc2" + data[at + 2 :]).progressive
    assert parse_header(CMYK_FRAME).adobe_transform == 2
    assert parse_header(CMYK_FRAME).components == 4


@pytest.mark.parametrize("length", range(1, 150, 7))
def test_a_beginning_is_told_from_damage(length: int) -> None:
    with pytest.raises(HeaderCut):
        parse_header(jpeg()[:length])


@pytest.mark.parametrize(("data", "reason"), BAD.values())
def test_reasons(data: bytes, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        check_trainable(data)
    assert caught.value.message == reason


def test_more_reasons() -> None:
    data = jpeg()
    at = parse_header(data).frame_offset
    cases = {
        "JPEG process SOF3 is not supported by decoders": data[:at] + b"\xff\xc3" + data[at + 2 :],
        "JPEG with 12 bits a sample": data[: at + 4] + b"\x0c" + data[at + 5 :],
        "JPEG of 60x0 pixels": data[: at + 5] + b"\0\0" + data[at + 7 :],
        "JPEG with 2 components": data[: at + 2] + b"\0\x0e\x08\0\x10\0\x10\2\1\x11\0\2\x11\0" + data[at + 19 :],
        "no marker at byte 2": b"\xff\xd8nothing",
        "without a frame header": b"\xff\xd8\xff\xda\x00\x02",
        "GIF, not JPEG": b"GIF89a",
    }
    for reason, damaged in cases.items():
        with pytest.raises(DataError, match=reason):
            check_trainable(damaged)


# Packing


def test_every_image_is_there_once_with_every_key(source: Path, tmp_path: Path) -> None:
    manifest = pack_folder(source, str(tmp_path / "out"), num_shards=4, seed=7, texts={"n02": "goldfish"})
    seen = {}
    for shard in manifest.shards:
        data = (tmp_path / "out" / shard.name).read_bytes()
        assert len(data) == shard.size_bytes
        assert f"{google_crc32c.value(data):08x}" == shard.crc32c
        found = records(data)
        sizes = [later.offset - record.offset for record, later in pairwise(found)]
        assert sizes == list(shard.record_bytes[:-1])
        for record in found:
            example = decode_example(record.payload)
            assert set(example) == KEYS
            seen[example["image/filename"][0]] = example
            image = parse_image_example(record.payload)
            path = source / image.synset / image.filename
            assert bytes(image.encoded) == path.read_bytes()
            assert image.label == int(image.synset[-1])
            assert image.boxes == []
    assert len(seen) == manifest.num_records == 30
    example = seen[b"n02_4.JPEG"]
    assert {key: value for key, value in example.items() if key != "image/encoded"} == {
        "image/height": [34],
        "image/width": [60],
        "image/colorspace": [b"RGB"],
        "image/channels": [3],
        "image/class/label": [2],
        "image/class/synset": [b"n02"],
        "image/class/text": [b"goldfish"],
        "image/object/bbox/xmin": [],
        "image/object/bbox/xmax": [],
        "image/object/bbox/ymin": [],
        "image/object/bbox/ymax": [],
        "image/object/bbox/label": [],
        "image/format": [b"JPEG"],
        "image/filename": [b"n02_4.JPEG"],
    }
    assert [shard.num_records for shard in manifest.shards] == [7, 8, 7, 8]
    assert [shard.name for shard in manifest.shards][:2] == ["train-00000-of-00004", "train-00001-of-00004"]
    assert (manifest.labels, manifest.class_counts) == (("n01", "n02", "n03"), (10, 10, 10))
    assert sorted(contents(tmp_path / "out")) == [MANIFEST_NAME, *(shard.name for shard in manifest.shards)]


def test_same_bytes_for_any_number_of_workers_and_any_store(source: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    pack_folder(source, str(tmp_path / "1"), num_shards=5, workers=1, progress=lambda *step: steps.append(step))
    pack_folder(source, str(tmp_path / "4"), num_shards=5, workers=4)
    store = MemoryStore()
    pack_folder(source, "some/prefix/", num_shards=5, workers=2, store=store)
    assert contents(tmp_path / "1") == contents(tmp_path / "4")
    for name, data in contents(tmp_path / "1").items():
        assert bytes(obstore.get(store, f"some/prefix/{name}").bytes()) == data
    assert steps[0] == ("check", 30, 30)
    assert steps[-1] == ("pack", 30, 30)


def order(folder: Path) -> list[int]:
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("train-*")))
    return [parse_image_example(record.payload).label for record in records(data)]


def test_seed_decides_the_order(source: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        pack_folder(source, str(tmp_path / str(seed)), num_shards=1, seed=seed)
    first, second = order(tmp_path / "1"), order(tmp_path / "2")
    assert sorted(first) == sorted(second)
    assert first != second
    changes = sum(label != later for label, later in pairwise(first))
    assert changes > 12  # in listing order there would be 2


def test_bad_files_fail_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    add_bad(source)
    with pytest.raises(InputError) as caught:
        pack_folder(source, str(tmp_path / "out"), num_shards=2)
    assert caught.value.message.startswith(
        "5 files are no trainable JPEG: n01/empty.jpg: empty file; n01/png.JPEG: PNG"
    )
    assert caught.value.message.endswith("and 2 more")
    assert contents(tmp_path / "out") == {}


def test_a_file_found_bad_late_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    (source / "n03" / "body.JPG").write_bytes(BAD["n03/body.JPG"][0])
    with pytest.raises(InputError, match=r"1 file is no trainable JPEG: n03/body.JPG: truncated JPEG: no end-of-image"):
        pack_folder(source, str(tmp_path / "out"), num_shards=8, workers=1)
    assert contents(tmp_path / "out") == {}


def test_bad_files_are_skipped_and_listed(source: Path, tmp_path: Path) -> None:
    pack_folder(source, str(tmp_path / "clean"), num_shards=1)
    add_bad(source)
    manifest = pack_folder(source, str(tmp_path / "out"), num_shards=1, on_bad="skip")
    assert {item.path: item.reason for item in manifest.bad} == {path: reason for path, (_, reason) in BAD.items()}
    assert [item.path for item in manifest.bad] == sorted(BAD)
    assert manifest.num_records == 30
    name = "train-00000-of-00001"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "clean" / name).read_bytes()
    with pytest.raises(InputError, match="6 files are no trainable JPEG"):
        pack_folder(source, str(tmp_path / "out"), num_shards=1)


def test_a_shard_of_late_bad_files_is_empty(tmp_path: Path) -> None:
    (tmp_path / "source" / "n01").mkdir(parents=True)
    for number in range(3):
        (tmp_path / "source" / "n01" / f"{number}.jpg").write_bytes(jpeg(number) if number else jpeg()[:-40])
    manifest = pack_folder(tmp_path / "source", str(tmp_path / "out"), num_shards=3, on_bad="skip")
    assert sorted(shard.num_records for shard in manifest.shards) == [0, 1, 1]
    assert list_shards(LocalStore(tmp_path / "out"), "").num_records == 2
    for number in (1, 2):
        (tmp_path / "source" / "n01" / f"{number}.jpg").write_bytes(jpeg()[:-40])
    with pytest.raises(InputError, match=r"no image of .* is a trainable JPEG"):
        pack_folder(tmp_path / "source", str(tmp_path / "none"), num_shards=1, on_bad="skip")


def test_long_headers_are_read_to_their_end(tmp_path: Path) -> None:
    (tmp_path / "source" / "n01").mkdir(parents=True)
    profile = b"\xff\xe2\xff\xf0" + bytes(0xFFF0 - 2)
    (tmp_path / "source" / "n01" / "long.jpg").write_bytes(b"\xff\xd8" + profile * 3 + jpeg()[2:])
    assert pack_folder(tmp_path / "source", str(tmp_path / "out"), num_shards=1).num_records == 1


def test_the_same_set_again_is_left_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = pack_folder(source, str(out), num_shards=3)
    times = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert pack_folder(source, str(out), num_shards=3, workers=1) == manifest
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == times


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, "holds another set: 30 records in 3 shards, seed 1"),
        ({"num_shards": 4}, "holds another set"),
        ({"texts": {"n01": "tench"}}, "holds another set"),
        ({"split": "validation"}, "holds the split 'train'"),
    ],
)
def test_another_set_is_not_overwritten_unasked(
    source: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    out = tmp_path / "out"
    pack_folder(source, str(out), num_shards=3)
    before = contents(out)
    with pytest.raises(InputError, match=message) as caught:
        pack_folder(source, str(out), **{"num_shards": 3} | change)
    assert caught.value.hint
    assert contents(out) == before


def test_changed_source_is_another_set(source: Path, tmp_path: Path) -> None:
    pack_folder(source, str(tmp_path / "out"), num_shards=3)
    (source / "n01" / "new.jpg").write_bytes(jpeg(77))
    with pytest.raises(InputError, match="holds another set"):
        pack_folder(source, str(tmp_path / "out"), num_shards=3)


def test_incomplete_sets_are_refused_and_overwriting_clears_them(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack_folder(source, str(out), num_shards=6)
    (out / "train-00002-of-00006").write_bytes(b"")
    with pytest.raises(InputError, match="but train-00002-of-00006 is missing or has another size"):
        pack_folder(source, str(out), num_shards=6)
    (out / MANIFEST_NAME).unlink()
    with pytest.raises(InputError, match="holds train shards of a packing that did not end"):
        pack_folder(source, str(out), num_shards=2)
    (out / MANIFEST_NAME).write_text("{}")
    with pytest.raises(InputError, match=r"is in use: manifest.json is no manifest of Drawbar"):
        pack_folder(source, str(out), num_shards=2)
    (out / "keep.txt").write_text("mine")
    (out / "train-00001-of-00006#1").write_text("left by a killed process")
    manifest = pack_folder(source, str(out), num_shards=2, overwrite=True)
    assert sorted(contents(out)) == ["keep.txt", MANIFEST_NAME, *(shard.name for shard in manifest.shards)]


def test_unusable_sources_and_settings(source: Path, tmp_path: Path) -> None:
    empty, flat, bare = tmp_path / "empty", tmp_path / "flat", tmp_path / "bare"
    for folder in (empty, flat, bare / "n01"):
        folder.mkdir(parents=True)
    (flat / "a.JPEG").write_bytes(jpeg())
    out = str(tmp_path / "out")
    cases: list[tuple[str, Path, dict[str, Any]]] = [
        ("no source folder", tmp_path / "missing", {}),
        ("cannot list the source", source / "README.txt", {}),
        ("holds no class folders", empty, {}),
        ("holds images but no class folders", flat, {}),
        ("no images in the 1 folders", bare, {}),
        ("number of shards is 0; expected at least 1", source, {"num_shards": 0}),
        ("31 shards for 30 images", source, {"num_shards": 31}),
        ("number of workers is -1", source, {"workers": -1}),
        ("seed is -1", source, {"seed": -1}),
        ("split is '_x'", source, {"split": "_x"}),
    ]
    for message, folder, settings in cases:
        with pytest.raises(InputError, match=message):
            pack_folder(folder, out, **{"num_shards": 2} | settings)
    with pytest.raises(InputError, match=r"cannot write to .*: (Not a directory|File exists)"):
        pack_folder(source, str(source / "README.txt"), num_shards=2)


def test_a_destination_that_breaks_is_named(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "train-00001-of-00002" / "in the way").mkdir(parents=True)
    with pytest.raises(InputError, match=f"cannot write to {out}: "):
        pack_folder(source, str(out), num_shards=2, workers=1)
    assert sorted(contents_names(out)) == ["train-00001-of-00002"]


def contents_names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_shard_appears_only_when_whole(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    seen: list[list[str]] = []
    original = packing.encode_image

    def watch(*arguments: Any) -> bytes:
        seen.append(contents_names(out))
        return original(*arguments)

    monkeypatch.setattr(packing, "encode_image", watch)
    pack_folder(source, str(out), num_shards=3, workers=1)
    finished = ["train-00000-of-00003", "train-00001-of-00003", "train-00002-of-00003"]
    for number, names in enumerate(seen):
        assert sorted(name for name in names if "#" not in name) == finished[: number // 10]


# Manifest


def manifest_of_two() -> Manifest:
    shards = tuple(
        ShardEntry(name=f"train-{n}", size_bytes=130 + n, num_records=2, crc32c="00c0ffee", record_bytes=(110 + n, 20))
        for n in range(2)
    )
    return Manifest(
        split="train",
        seed=3,
        labels=("cat", "dög"),
        class_counts=(3, 1),
        shards=shards,
        bad=(BadFile(path="cat/1.jpg", reason="empty file"),),
        source_sha256="ab",
        tool_version="0.1",
    )


def test_manifest_round_trip_and_newer_fields() -> None:
    manifest = manifest_of_two()
    assert Manifest.loads(manifest.dumps()) == manifest
    tree = json.loads(manifest.dumps())
    assert (tree["num_classes"], tree["num_records"], tree["size_bytes"]) == (2, 4, 261)
    tree["new_field"] = {"anything": 1}
    tree["shards"][0]["new_field"] = True
    assert Manifest.loads(json.dumps(tree)) == manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "has schema 2; this Drawbar reads up to 1"),
        ({"schema": None}, "it has no schema number"),
        ({"seed": "three"}, "seed is 'three'; expected int"),
        ({"seed": -3}, "seed is '-3'"),
        ({"labels": ["cat"]}, "1 labels, but 2 class counts"),
        ({"labels": ["cat", 5]}, "labels holds '5'; expected str"),
        ({"class_counts": [3, 2]}, "class counts add up to 5, the shards to 4 records"),
        ({"num_records": 5}, "num_records is 5, but its parts give 4"),
        ({"size_bytes": 5}, "size_bytes is 5, but its parts give 261"),
        ({"shards": 5}, "shards is '5'; expected list"),
        ({"shards": [5]}, "shards holds '5'; expected dict"),
    ],
)
def test_malformed_manifests(change: dict[str, Any], message: str) -> None:
    tree = json.loads(manifest_of_two().dumps()) | change
    with pytest.raises(DataError, match=message):
        Manifest.loads(json.dumps(tree))


def test_malformed_shards_and_texts() -> None:
    for change, message in (
        ({"num_records": 3}, "shard train-0: 3 records, but 2 sizes"),
        ({"size_bytes": 131}, "shard train-0: its record sizes add up to 130, not 131 bytes"),
        ({"record_bytes": [120, 10]}, "shard train-0: a record of 10 bytes; a frame has 16"),
        ({"name": "a/b"}, "expected a plain name"),
        ({"name": "train-1"}, "two shards have the same name"),
    ):
        tree = json.loads(manifest_of_two().dumps())
        tree["shards"][0] |= change
        with pytest.raises(DataError, match=f"x/manifest.json: .*{message}"):
            Manifest.loads(json.dumps(tree), "x/manifest.json")
    del tree["shards"][0]["record_bytes"]
    with pytest.raises(DataError, match="record_bytes is missing"):
        Manifest.loads(json.dumps(tree))
    for text in ("", "{", "[]", b"\xff\xfe"):
        with pytest.raises(DataError, match=r"^manifest.json is no "):
            Manifest.loads(text)


# Listing


def packed_store(source: Path) -> MemoryStore:
    store = MemoryStore()
    pack_folder(source, "sets/train", num_shards=3, store=store)
    return store


def test_listing_with_manifest(source: Path) -> None:
    store = packed_store(source)
    obstore.put(store, "sets/train/train-00000-of-00009", b"left from another packing")
    obstore.put(store, "sets/train/deeper/file", b"x")
    obstore.put(store, "sets/trainee/file", b"x")
    listing = list_shards(store, "sets/train/")
    assert [shard.key for shard in listing.shards] == [f"sets/train/train-0000{n}-of-00003" for n in range(3)]
    assert listing.manifest is not None
    for shard, entry in zip(listing.shards, listing.manifest.shards, strict=True):
        assert (shard.name, shard.size_bytes, shard.num_records, shard.record_bytes) == (
            entry.name,
            entry.size_bytes,
            entry.num_records,
            entry.record_bytes,
        )
    assert listing.ignored == ("train-00000-of-00009",)
    assert (listing.num_records, listing.size_bytes) == (30, listing.manifest.size_bytes)


def test_listing_without_manifest() -> None:
    store = MemoryStore()
    for name in ("b", "a.tfrecord", ".hidden", "_SUCCESS", "labels.txt", "labels.json", "c/d"):
        obstore.put(store, f"data/{name}", b"12345")
    listing = list_shards(store, "data")
    assert [(shard.name, shard.size_bytes, shard.num_records) for shard in listing.shards] == [
        ("a.tfrecord", 5, None),
        ("b", 5, None),
    ]
    assert (listing.manifest, listing.num_records) == (None, None)


def test_fingerprint_of_the_listing(source: Path, tmp_path: Path) -> None:
    store = packed_store(source)
    first = list_shards(store, "sets/train").sha256
    pack_folder(source, str(tmp_path / "out"), num_shards=3)
    assert list_shards(LocalStore(tmp_path / "out"), "").sha256 == first
    obstore.delete(store, f"sets/train/{MANIFEST_NAME}")
    assert list_shards(store, "sets/train").sha256 != first


def test_shards_that_differ_from_the_manifest(source: Path) -> None:
    key = "sets/train/train-00001-of-00003"
    store = packed_store(source)
    data = bytes(obstore.get(store, key).bytes())
    for other, word in ((data[:-9], "truncated"), (data + b"more", "replaced")):
        obstore.put(store, key, other)
        message = f"shard {key} has {len(other)} bytes; manifest.json says {len(data)}: it was {word}"
        with pytest.raises(DataError, match=message):
            list_shards(store, "sets/train")
    obstore.delete(store, key)
    with pytest.raises(DataError, match=f"shard {key} is missing"):
        list_shards(store, "sets/train")


@pytest.mark.parametrize("prefix", ["data", "", "missing/prefix"])
def test_nothing_to_read(prefix: str, tmp_path: Path) -> None:
    stores: list[ObjectStore] = [MemoryStore(), LocalStore(tmp_path)]
    for store in stores:
        with pytest.raises(InputError, match=r"no shards under .*: nothing is there"):
            list_shards(store, prefix)
        if prefix == "data":
            obstore.put(store, "data/labels.txt", b"x")
            with pytest.raises(InputError, match=r"no shards under 'data': only labels.txt"):
                list_shards(store, prefix)


def test_a_manifest_without_shards_is_no_set() -> None:
    store = MemoryStore()
    manifest = replace(manifest_of_two(), shards=(), class_counts=(0, 0))
    obstore.put(store, f"x/{MANIFEST_NAME}", manifest.dumps().encode())
    with pytest.raises(InputError, match=r"no shards under 'x': only manifest.json"):
        list_shards(store, "x")


def test_packing_to_s3(source: Path, tmp_path: Path, embedded_store: embedded.EmbeddedStore) -> None:
    embedded.ensure_bucket(embedded_store, "packed")
    store = S3Store(
        "packed",
        endpoint=embedded_store.endpoints[0],
        access_key_id=embedded_store.access_key_id,
        secret_access_key=embedded_store.secret_access_key,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    add_bad(source)
    manifest = pack_folder(source, "imagenet/train", num_shards=3, store=store, on_bad="skip")
    pack_folder(source, str(tmp_path / "out"), num_shards=3, on_bad="skip")
    listing = list_shards(store, "imagenet/train")
    assert listing.manifest == manifest
    assert listing.sha256 == list_shards(LocalStore(tmp_path / "out"), "").sha256
    for shard in listing.shards:
        assert bytes(obstore.get(store, shard.key).bytes()) == (tmp_path / "out" / shard.name).read_bytes()
    with pytest.raises(InputError, match="no shards under 'imagenet/validation': nothing is there"):
        list_shards(store, "imagenet/validation")
    (source / "n01" / "late.jpg").write_bytes(jpeg()[:-40])
    for path in BAD:
        (source / path).unlink()
    with pytest.raises(InputError, match=r"late.jpg: truncated JPEG"):
        pack_folder(source, "imagenet/again", num_shards=3, store=store)
    with pytest.raises(InputError, match="nothing is there"):  # the store lists an empty object for the folder itself
        list_shards(store, "imagenet/again")
