"""Packing, the manifest and the listing: from folders of real files to shards and back."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import obstore
import pytest
from obstore.store import LocalStore, MemoryStore, ObjectStore, S3Store

from drawbar.dataset.destination import Destination, FolderDestination, StoreDestination
from drawbar.dataset.example import decode_example, parse_image_example
from drawbar.dataset.fix import fix_image
from drawbar.dataset.folder import read_names, scan_folder
from drawbar.dataset.items import Item
from drawbar.dataset.jpeg import MAX_PIXELS, check_trainable
from drawbar.dataset.labelled import LabelledSource
from drawbar.dataset.listing import list_shards
from drawbar.dataset.manifest import MANIFEST_NAME, BadFile, Manifest, ShardEntry
from drawbar.dataset.pack import pack
from drawbar.dataset.shard_writer import OnBad, PackSettings
from drawbar.dataset.tfrecord import RawRecord, RecordSplitter
from drawbar.errors import DataError, InputError
from drawbar.storage import embedded
from tests.drawbar_process import drawbar
from tests.image_files import jpeg, other_formats, rotated, ycck

OTHER = other_formats()
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


BAD = {
    "n01/png.JPEG": (OTHER["PNG"], "PNG, not JPEG", "fixed"),
    "n01/empty.jpg": (b"", "empty file", "skipped"),
    "n02/cmyk.JPEG": (ycck(), "YCCK JPEG (4 components)", "fixed"),
    "n02/head.jpeg": (jpeg()[:100], "truncated JPEG header", "skipped"),
    "n03/body.JPG": (jpeg(9)[:-40], "truncated JPEG: no end-of-image marker", "skipped"),
    "n03/text.jpg": (b"<html>not found</html>", "not JPEG: begins with 3c 68 74 6d", "skipped"),
    "n03/webp.webp": (OTHER["WebP"], "WebP, not JPEG", "fixed"),
}


def pack_folder(
    source: Path,
    dest: str | Path | Destination,
    *,
    num_shards: int,
    split: str = "train",
    seed: int = 1,
    on_bad: OnBad = "fail",
    max_pixels: int = MAX_PIXELS,
    classes: Path | None = None,
    **how: Any,
) -> Manifest:
    if isinstance(dest, str | Path):
        dest = FolderDestination(Path(dest))
    settings = PackSettings(num_shards, split, seed, on_bad, max_pixels=max_pixels)
    return pack(scan_folder(source, classes), dest, settings, **how)


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
    for path, (data, _, _) in BAD.items():
        (source / path).write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def records(data: bytes, shard: str = "s") -> list[RawRecord]:
    splitter = RecordSplitter(shard)
    found = list(splitter.feed(data))
    splitter.finish()
    return found


# Packing


def test_every_image_is_there_once_with_every_key(source: Path, tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("n01\nn02 goldfish\nn03\n")
    manifest = pack_folder(
        source, str(tmp_path / "out"), num_shards=4, seed=7, classes=tmp_path / "classes.txt", workers=1
    )
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
    add_bad(source)
    steps: list[tuple[str, int, int]] = []
    pack_folder(
        source,
        tmp_path / "1",
        num_shards=5,
        on_bad="fix",
        workers=1,
        progress=lambda *step: steps.append(step),
    )
    pack_folder(source, tmp_path / "3", num_shards=5, on_bad="fix", workers=3)
    store = MemoryStore()
    pack_folder(source, StoreDestination(store, "some/prefix/"), num_shards=5, on_bad="fix", workers=2)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    for name, data in contents(tmp_path / "1").items():
        assert bytes(obstore.get(store, f"some/prefix/{name}").bytes()) == data
    assert steps[0] == ("packing images", 0, 37)
    assert steps[-1] == ("packing images", 37, 37)


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


def test_bad_files_fail(source: Path, tmp_path: Path) -> None:
    for workers in (1, 2):
        for path, (data, reason, _) in BAD.items():
            (source / path).write_bytes(data)
            out = tmp_path / f"out{workers}-{path.replace('/', '-')}"
            with pytest.raises(InputError) as caught:
                pack_folder(source, out, num_shards=2, workers=workers)
            assert caught.value.message == f"{path} is no trainable JPEG: {reason}"
            assert caught.value.hint
            assert MANIFEST_NAME not in contents(out)
            (source / path).unlink()
            if workers == 2:
                break


def stored(folder: Path) -> dict[str, bytes]:
    """Image by file name."""
    images = {}
    for path in folder.glob("train-*"):
        for record in records(path.read_bytes()):
            image = parse_image_example(record.payload)
            images[image.filename] = bytes(image.encoded)
    return images


def test_bad_files_are_skipped_and_listed(source: Path, tmp_path: Path) -> None:
    good = {path.name: path.read_bytes() for path in source.glob("n*/[!.]*.[jJ]*")}
    add_bad(source)
    manifest = pack_folder(source, tmp_path / "out", num_shards=3, on_bad="skip")
    assert [(item.path, item.reason, item.action) for item in manifest.bad] == [
        (path, reason, "skipped") for path, (_, reason, _) in sorted(BAD.items())
    ]
    assert manifest.num_records == 30
    assert manifest.class_counts == (10, 10, 10)
    assert manifest.on_bad == "skip"
    assert stored(tmp_path / "out") == good


def test_bad_files_are_fixed_and_listed(source: Path, tmp_path: Path) -> None:
    (source / "n01" / "rotated.jpg").write_bytes(rotated(6))
    good = {path.name: path.read_bytes() for path in source.glob("n*/[!.]*.[jJ]*")}
    add_bad(source)
    manifest = pack_folder(source, tmp_path / "out", num_shards=3, on_bad="fix")
    assert {item.path: (item.reason, item.action) for item in manifest.bad} == {
        path: (reason, action) for path, (_, reason, action) in BAD.items()
    } | {"n01/rotated.jpg": ("Exif orientation 6", "kept")}
    assert manifest.class_counts == (12, 11, 11)
    assert manifest.num_records == 34
    found = stored(tmp_path / "out")
    fixed = {"png.JPEG": "PNG, not JPEG", "cmyk.JPEG": "YCCK JPEG (4 components)", "webp.webp": "WebP, not JPEG"}
    for name, reason in fixed.items():
        (path,) = source.glob(f"n*/{name}")
        assert found.pop(name) == fix_image(path.read_bytes(), reason).data
    assert found == good  # rotated.jpg among them: its bytes are its own
    for path in (tmp_path / "out").glob("train-*"):
        for record in records(path.read_bytes()):
            example = decode_example(record.payload)
            header = check_trainable(parse_image_example(record.payload).encoded.tobytes())
            assert (example["image/height"], example["image/width"]) == ([header.height], [header.width])


def test_a_shard_of_bad_files_is_empty(tmp_path: Path) -> None:
    (tmp_path / "source" / "n01").mkdir(parents=True)
    for number in range(3):
        (tmp_path / "source" / "n01" / f"{number}.jpg").write_bytes(jpeg(number) if number else jpeg()[:-40])
    manifest = pack_folder(tmp_path / "source", tmp_path / "out", num_shards=3, on_bad="skip")
    assert sorted(shard.num_records for shard in manifest.shards) == [0, 1, 1]
    assert list_shards(LocalStore(tmp_path / "out"), "").num_records == 2
    for number in (1, 2):
        (tmp_path / "source" / "n01" / f"{number}.jpg").write_bytes(jpeg()[:-40])
    with pytest.raises(InputError, match=r"no image of the source is a trainable JPEG; n01/0.jpg: truncated"):
        pack_folder(tmp_path / "source", tmp_path / "none", num_shards=1, on_bad="skip")
    assert MANIFEST_NAME not in contents(tmp_path / "none")


def test_absurd_sizes_are_bad(source: Path, tmp_path: Path) -> None:
    manifest = pack_folder(source, tmp_path / "out", num_shards=2, on_bad="fix", max_pixels=60 * 50)
    assert {item.reason for item in manifest.bad} == {
        f"absurd size: 60x{height} pixels, more than 3000" for height in range(51, 60)
    }
    assert manifest.num_records == 21


def test_a_source_that_changes_stops_the_packing(source: Path, tmp_path: Path) -> None:
    listed = scan_folder(source)
    path = source / "n02" / "n02_4.JPEG"
    original = path.read_bytes()
    settings = PackSettings(3, on_bad="fix")
    for change in (b"", original[:-1], original + b"\0", None):
        path.unlink() if change is None else path.write_bytes(change)
        message = "n02/n02_4.JPEG (was|cannot be read: No such file)"
        with pytest.raises(InputError, match=message):
            pack(listed, FolderDestination(tmp_path / "out"), settings, workers=1)
    path.write_bytes(original)
    assert pack(listed, FolderDestination(tmp_path / "out"), settings).num_records == 30


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
        ({"max_pixels": 1 << 20}, "holds another set"),
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


def test_a_set_that_is_kept_is_said_to_be(source: Path, tmp_path: Path) -> None:
    """Contents are not compared, so whoever edited a file in place must be told."""
    out = tmp_path / "out"
    pack_folder(source, out, num_shards=3)
    before = contents(out)
    path = source / "n01" / "n01_0.JPEG"
    path.write_bytes(path.read_bytes()[:-3] + b"\0" + path.read_bytes()[-2:])
    notes: list[str] = []
    pack_folder(source, out, num_shards=3, note=notes.append)
    assert contents(out) == before
    assert [note for note in notes if "it was kept" in note and "--overwrite packs anew" in note]


def test_changed_source_is_another_set(source: Path, tmp_path: Path) -> None:
    pack_folder(source, str(tmp_path / "out"), num_shards=3)
    (source / "n01" / "new.jpg").write_bytes(jpeg(77))
    with pytest.raises(InputError, match="holds another set"):
        pack_folder(source, str(tmp_path / "out"), num_shards=3)


def test_the_policy_is_another_set_only_where_files_are_bad(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (source / "n01" / "rotated.jpg").write_bytes(rotated(6))
    manifest = pack_folder(source, out, num_shards=3, on_bad="skip")
    assert pack_folder(source, out, num_shards=3, on_bad="fail") == manifest
    add_bad(source)
    pack_folder(source, out, num_shards=3, on_bad="skip", overwrite=True)
    with pytest.raises(InputError, match=r"packed with --on-bad skip, with 7 bad files: n01/empty.jpg: empty file"):
        pack_folder(source, out, num_shards=3, on_bad="fix")


def test_incomplete_sets_are_refused_and_overwriting_clears_them(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack_folder(source, out, num_shards=6)
    (out / "train-00002-of-00006").write_bytes(b"")
    with pytest.raises(InputError, match="but train-00002-of-00006 is missing or has another size"):
        pack_folder(source, out, num_shards=6)
    (out / MANIFEST_NAME).unlink()
    with pytest.raises(InputError, match="holds train shards, but no manifest"):
        pack_folder(source, out, num_shards=6)
    (out / MANIFEST_NAME).write_text("{}")
    with pytest.raises(InputError, match=r"is in use: manifest.json is no manifest of Drawbar"):
        pack_folder(source, out, num_shards=2)
    (out / "keep.txt").write_text("mine")
    (out / "validation-00000-of-00001").write_text("mine too")
    manifest = pack_folder(source, out, num_shards=2, overwrite=True)
    assert sorted(contents(out)) == sorted(
        ["keep.txt", MANIFEST_NAME, "validation-00000-of-00001", *(shard.name for shard in manifest.shards)]
    )
    assert not (out / "_parts").exists()


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
        ("no images in 1 class folder of", bare, {}),
        ("number of shards is 0; expected 1 to 99999", source, {"num_shards": 0}),
        ("31 shards for 30 images", source, {"num_shards": 31}),
        ("number of workers is -1", source, {"workers": -1}),
        ("seed is -1", source, {"seed": -1}),
        ("on_bad is 'mend'", source, {"on_bad": "mend"}),
        ("split is '_x'", source, {"split": "_x"}),
    ]
    for message, folder, settings in cases:
        with pytest.raises(InputError, match=message):
            pack_folder(folder, out, **{"num_shards": 2} | settings)
    assert not Path(out).exists()
    for below in ("README.txt", "README.txt/out"):
        with pytest.raises(InputError, match=r"cannot write to .*: Not a directory: .*README.txt$"):
            pack_folder(source, source / below, num_shards=2)
    assert not Path(out, "_parts").exists()


def test_class_names_with_blanks(tmp_path: Path) -> None:
    for number, name in enumerate(("polar bear", "brown bear", "cat", 'a "so-called" bear')):
        (tmp_path / "source" / name).mkdir(parents=True)
        (tmp_path / "source" / name / "1.jpg").write_bytes(jpeg(number))
    names = tmp_path / "names.txt"
    names.write_text('"polar bear"\ncat the tame one\nbrown bear\tUrsus arctos\na "so-called" bear\ta koala\n')
    found = scan_folder(tmp_path / "source", names)
    assert found.labels == ("polar bear", "cat", "brown bear", 'a "so-called" bear')
    assert list(read_names(names).values()) == ["polar bear", "the tame one", "Ursus arctos", "a koala"]
    names.write_text('"polar bear" Ursus maritimus\ncat\nbrown bear\n"a x" y')
    assert read_names(names)["polar bear"] == "Ursus maritimus"
    with pytest.raises(InputError, match=r"has the class folder") as caught:
        scan_folder(tmp_path / "source", names)
    assert "is quoted" in str(caught.value.hint)
    names.write_text('cat\n"polar bear\n')
    with pytest.raises(InputError, match=r"names.txt:2: '\"polar bear' has no closing quote"):
        read_names(names)


def test_labels_from_a_list(source: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("n03\tthird class\n\nn09 not there\nn01\nn02 second, or last\n")
    manifest = pack_folder(source, tmp_path / "out", num_shards=1, classes=names)
    assert manifest.labels == ("n03", "n09", "n01", "n02")
    assert manifest.class_counts == (10, 0, 10, 10)
    found = {
        (example["image/class/synset"][0], example["image/class/label"][0], example["image/class/text"][0])
        for record in records((tmp_path / "out" / "train-00000-of-00001").read_bytes())
        for example in [decode_example(record.payload)]
    }
    assert found == {(b"n01", 3, b"n01"), (b"n02", 4, b"second, or last"), (b"n03", 1, b"third class")}
    for text, message in (
        ("n01\nn02\n", "has the class folder 'n03', which .*names.txt does not name"),
        ("n01\nn02\nn03\nn01 again", "names.txt:4: 'n01' is there twice"),
        ("\n\n", "names no class"),
    ):
        names.write_text(text)
        with pytest.raises(InputError, match=message):
            scan_folder(source, names)
    names.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"names.txt is no text"):
        scan_folder(source, names)
    with pytest.raises(InputError, match=r"cannot read .*: No such file"):
        scan_folder(source, tmp_path / "missing.txt")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_destination_that_breaks_is_named(source: Path, tmp_path: Path, workers: int) -> None:
    out = tmp_path / "out"
    (out / "train-00001-of-00002" / "in the way").mkdir(parents=True)
    with pytest.raises(InputError, match=f"cannot write to {out}: "):
        pack_folder(source, out, num_shards=2, workers=workers)
    assert list((out / "_parts").glob("*.tmp")) == []
    (out / "train-00001-of-00002" / "in the way").rmdir()
    (out / "train-00001-of-00002").rmdir()
    assert pack_folder(source, out, num_shards=2, workers=workers).num_records == 30


def test_a_shard_appears_only_when_whole(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    seen: list[set[str]] = []

    class Watched(LabelledSource):
        def read(self, item: Item) -> bytes:
            seen.append({path.name for path in out.iterdir() if path.is_file()})
            return super().read(item)

    listed = scan_folder(source)
    listed.__class__ = Watched
    pack(listed, FolderDestination(out), PackSettings(3), workers=1)
    finished = ["train-00000-of-00003", "train-00001-of-00003", "train-00002-of-00003"]
    assert len(seen) == 30
    for number, names in enumerate(seen):
        assert names == set(finished[: number // 10])


# What is not packed, and what is only said


def scanned(folder: Path, *, classes: Path | None = None) -> tuple[LabelledSource, list[str]]:
    notes: list[str] = []
    return scan_folder(folder, classes, note=notes.append), notes


def test_every_file_of_a_class_folder_is_judged_by_content(source: Path, tmp_path: Path) -> None:
    for name, data in (("no_suffix", jpeg(90)), ("b.tiff", b"II*\0" + b"x" * 40), ("c.JPEG.part", jpeg(91)[:-30])):
        (source / "n01" / name).write_bytes(data)
    for name in ("list.csv", "a.XML", "Thumbs.db", ".DS_Store"):
        (source / "n01" / name).write_bytes(b"no image")
    manifest = pack_folder(source, tmp_path / "out", num_shards=2, on_bad="skip")
    assert manifest.num_records == 31
    assert {item.path: item.reason for item in manifest.bad} == {
        "n01/b.tiff": "TIFF, not JPEG",
        "n01/c.JPEG.part": "truncated JPEG: no end-of-image marker",
    }
    assert manifest.notes == {}


def test_what_is_ignored_is_counted(source: Path, tmp_path: Path) -> None:
    assert scanned(source)[1] == []
    before = pack_folder(source, tmp_path / "before", num_shards=3)
    for name in ("n01/more", "n02/more", "n03/.git"):
        (source / name).mkdir()
    (source / "n01" / "more" / "a.JPEG").write_bytes(jpeg(80))
    for name in ("z.JPEG", "y.JPEG", "sums.md"):
        (source / name).write_bytes(jpeg(81))
    (source / "gone.JPEG").symlink_to(tmp_path / "nothing")
    (source / "circle.JPEG").symlink_to(source / "circle.JPEG")
    listed, notes = scanned(source)
    assert listed.notes()["ignored"] == {
        "loose_files": {"count": 2, "example": "y.JPEG"},
        "sub_folders": {"count": 2, "example": "n01/more"},
        "not_readable": {"count": 2, "example": "circle.JPEG"},
    }
    (note,) = notes
    assert note.startswith(
        "ignored 2 files outside of class folders, such as y.JPEG; 2 folders within class folders, such as n01/more; "
        "2 links to nothing or special files, such as circle.JPEG"
    )
    manifest = pack_folder(source, tmp_path / "after", num_shards=3)
    assert manifest.shards == before.shards
    assert manifest.notes == listed.notes()


def test_loose_images_are_named_where_too_few_are_left(tmp_path: Path) -> None:
    source = tmp_path / "loose"
    (source / "sub").mkdir(parents=True)
    for number in range(19):
        (source / f"{number:02d}.jpg").write_bytes(jpeg(number))
    (source / "sub" / "a.jpg").write_bytes(jpeg())
    with pytest.raises(InputError, match="2 shards for 1 image;") as caught:
        pack_folder(source, tmp_path / "out", num_shards=2)
    assert "ignored 19 files outside of class folders, such as 00.jpg" in str(caught.value.hint)
    (source / "sub" / "a.jpg").unlink()
    (source / "sub" / "deeper").mkdir()
    with pytest.raises(InputError, match=r"no images in 1 class folder of .*; ignored 19 .*: sub/deeper"):
        scan_folder(source)


def test_classes_without_images_are_named(source: Path, tmp_path: Path) -> None:
    (source / "n02a").mkdir()
    listed, notes = scanned(source)
    assert listed.labels == ("n01", "n02", "n02a", "n03")
    assert [note.partition(";")[0] for note in notes] == ["1 of 4 classes has no image: n02a (label 3)"]
    names = tmp_path / "names.txt"
    names.write_text("n05\nn01\nn02\nn02a\nn03\n")
    (note,) = scanned(source, classes=names)[1]
    assert note.startswith("2 of 5 classes have no image: such as n05 (label 1)")


def test_addresses_are_no_sources() -> None:
    for path in (Path("s3://set/train"), Path("https://x/y")):
        with pytest.raises(InputError, match=r"^(s3://set/train|https://x/y) is an address, and sources are local"):
            scan_folder(path)


def test_a_file_too_large_for_an_image_is_not_read(source: Path, tmp_path: Path) -> None:
    with (source / "n01" / "film.mp4").open("wb") as file:
        file.truncate((1 << 29) + 1)
    manifest = pack_folder(source, tmp_path / "out", num_shards=1, on_bad="fix", workers=1)
    assert [(item.path, item.reason) for item in manifest.bad] == [
        ("n01/film.mp4", "absurd size: 536870913 bytes, more than 134217728")
    ]


def test_the_last_line_and_the_warnings(source: Path, tmp_path: Path) -> None:
    (source / "n01" / "rotated.jpg").write_bytes(rotated(6))
    (source / "loose.jpg").write_bytes(jpeg())
    done = drawbar("data", "pack", "folder", source, tmp_path / "out", "--shards", "1")
    assert done.code == 0, done.stderr
    assert "31 records in 1 shard, " in done.stdout
    assert "bad files: 0 re-encoded, 0 left out, 1 kept though Exif-rotated (see manifest.json)" in done.stdout
    warning = "ignored 1 file outside of class folders: loose.jpg"
    assert f"warning: {warning}" in done.stderr
    again = drawbar("data", "pack", "folder", source, tmp_path / "out", "--shards", "1", "--json")
    row = json.loads(again.stdout)
    assert row["kept"] == 1
    assert row["notes"]["ignored"] == {"loose_files": {"count": 1, "example": "loose.jpg"}}
    assert row["warnings"][0].startswith(warning)
    assert "it was kept" in row["warnings"][1]


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
        bad=(BadFile(path="cat/1.jpg", reason="empty file"), BadFile(path="cat/2.jpg", reason="PNG", action="fixed")),
        on_bad="fix",
        notes={"boxes_dropped": 3},
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
        ({"schema": 0}, "it has no schema number"),
        ({"schema": True}, "it has no schema number"),
        ({"split": "validation"}, "split is 'validation', but a shard's name is 'train-0'"),
        ({"seed": "three"}, "seed is 'three'; expected int"),
        ({"seed": -3}, "seed is '-3'"),
        ({"labels": ["cat"]}, "1 label, but 2 class counts"),
        ({"labels": ["cat", 5]}, "labels holds '5'; expected str"),
        ({"class_counts": [3, 2]}, "class counts add up to 5, the shards to 4 records"),
        ({"num_records": 5}, "num_records is 5, but its parts give 4"),
        ({"size_bytes": 5}, "size_bytes is 5, but its parts give 261"),
        ({"record_schema": "mnist"}, "record_schema is 'mnist'; expected imagenet, coco"),
        ({"on_bad": 3}, "on_bad is '3'; expected fail, skip, fix"),
        (
            {"bad": [{"path": "a", "reason": "b", "action": "eaten"}]},
            "action is 'eaten'; expected skipped, fixed, kept",
        ),
        ({"notes": []}, "notes is"),
        ({"shards": 5}, "shards is '5'; expected list"),
        ({"shards": [5]}, "shards holds '5'; expected dict"),
    ],
)
def test_malformed_manifests(change: dict[str, Any], message: str) -> None:
    tree = json.loads(manifest_of_two().dumps()) | change
    with pytest.raises(DataError, match=message):
        Manifest.loads(json.dumps(tree))


@pytest.mark.parametrize(
    "change", [{"labels": ["dog", "cat"]}, {"seed": 77}, {"source_sha256": "00"}, {"bad": []}, {"notes": {"a": 1}}]
)
def test_an_edited_manifest_is_told_by_its_digest(change: dict[str, Any]) -> None:
    """A change that contradicts nothing else: two classes swapped would train every image under the wrong name."""
    manifest = replace(manifest_of_two(), bad=(BadFile(path="a", reason="b"),))
    Manifest.loads(manifest.dumps()).refuse_edited()
    edited = Manifest.loads(json.dumps(json.loads(manifest.dumps()) | change))
    with pytest.raises(DataError, match=r"manifest.json was changed after it was written"):
        edited.refuse_edited()
    without = {key: value for key, value in json.loads(manifest.dumps()).items() if key != "sha256"}
    Manifest.loads(json.dumps(without)).refuse_edited()  # of a version before digests


def test_a_key_twice_is_no_manifest() -> None:
    text = manifest_of_two().dumps().replace('"seed": 3,', '"seed": 3,\n"seed": 2,')
    with pytest.raises(DataError, match="a key stands there twice"):
        Manifest.loads(text)


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
    pack_folder(source, StoreDestination(store, "sets/train"), num_shards=3)
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
        with pytest.raises(InputError, match=r"no shards in .*: nothing is there"):
            list_shards(store, prefix)
        if prefix == "data":
            obstore.put(store, "data/labels.txt", b"x")
            with pytest.raises(InputError, match=r"no shards in data: only labels.txt"):
                list_shards(store, prefix)


def test_a_manifest_without_shards_is_no_set() -> None:
    store = MemoryStore()
    manifest = replace(manifest_of_two(), shards=(), class_counts=(0, 0))
    obstore.put(store, f"x/{MANIFEST_NAME}", manifest.dumps().encode())
    with pytest.raises(InputError, match=r"no shards in x: only manifest.json"):
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
    dest = StoreDestination(store, "imagenet/train")
    manifest = pack_folder(source, dest, num_shards=3, on_bad="skip", workers=2)
    pack_folder(source, tmp_path / "out", num_shards=3, on_bad="skip")
    listing = list_shards(store, "imagenet/train")
    assert listing.manifest == manifest
    assert listing.sha256 == list_shards(LocalStore(tmp_path / "out"), "").sha256
    for shard in listing.shards:
        assert bytes(obstore.get(store, shard.key).bytes()) == (tmp_path / "out" / shard.name).read_bytes()
    assert dest.sizes("_parts") == {}
    assert pack_folder(source, dest, num_shards=3, on_bad="skip") == manifest
    with pytest.raises(InputError, match="no shards in imagenet/validation: nothing is there"):
        list_shards(store, "imagenet/validation")
    with pytest.raises(InputError, match=r"is no trainable JPEG"):
        pack_folder(source, StoreDestination(store, "imagenet/again"), num_shards=1, on_bad="fail")
    with pytest.raises(InputError, match="the packing of imagenet/again is not finished"):
        list_shards(store, "imagenet/again")
    obstore.delete(store, "imagenet/again/_parts/set.json")
    with pytest.raises(InputError, match="nothing is there"):  # the store lists an empty object for the folder itself
        list_shards(store, "imagenet/again")
