"""`drawbar data stat`: what it counts is what is there, for our sets and for foreign ones."""

from __future__ import annotations

import gzip
import io
import json
from array import array
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st

from drawbar.check_commands import stat_json, stat_text
from drawbar.dataset.example import Value, encode_example
from drawbar.dataset.stat import SetStats, histogram, stat_set
from drawbar.dataset.tfrecord import frame
from drawbar.dataset.walk import Origin
from tests.drawbar_process import drawbar
from tests.small_set import image, write_set


def write(folder: Path, examples: list[dict[str, Value]]) -> Path:
    path = folder / "train-00000-of-00001"
    path.write_bytes(b"".join(frame(encode_example(example)) for example in examples))
    return path


def stats_of(folder: Path, workers: int = 0) -> SetStats:
    return stat_set(Origin(url=str(folder)), workers=workers)


def labelled(label: int, encoded: bytes) -> dict[str, Value]:
    return {"image/encoded": encoded, "image/class/label": label, "image/class/synset": f"n{label}".encode()}


def jpeg_of(width: int, height: int, colorspace: str = "RGB", subsampling: str = "420") -> bytes:
    shape = (height, width, 1 if colorspace == "GRAY" else 3)
    pixels = np.arange(np.prod(shape), dtype=np.uint32).astype(np.uint8).reshape(shape)
    encoded: bytes = simplejpeg.encode_jpeg(pixels, colorspace=colorspace, colorsubsampling=subsampling)
    return encoded


def cmyk_jpeg() -> bytes:
    image_module = pytest.importorskip("PIL.Image", reason="Pillow makes the CMYK image")
    buffer = io.BytesIO()
    image_module.new("CMYK", (40, 30)).save(buffer, "JPEG")
    return buffer.getvalue()


def test_counts_sizes_and_classes(tmp_path: Path) -> None:
    paths = write_set(tmp_path, num_shards=3, records_per_shard=20)
    stats = stats_of(tmp_path)
    sizes = [len(image(number)) for number in range(60)]
    assert (stats.shards, stats.records, stats.images) == (3, 60, 60)
    assert stats.read_bytes == stats.framed_bytes == sum(path.stat().st_size for path in paths)
    assert (stats.image_bytes, stats.smallest_image_bytes, stats.largest_image_bytes) == (
        sum(sizes),
        min(sizes),
        max(sizes),
    )
    assert stats.classes == dict.fromkeys(range(1, 11), 6)
    assert stats.dimensions == {(64, 48): 60}
    assert (stats.widths, stats.heights) == ({64: 60}, {48: 60})
    assert sum(count for *_, count in stats.size_histogram()) == 60
    for low, high, count in stats.size_histogram():
        assert count == sum(low <= size < high for size in sizes)


def test_worker_processes_give_the_same(tmp_path: Path) -> None:
    write_set(tmp_path, num_shards=5, records_per_shard=8)
    assert stats_of(tmp_path, workers=2) == stats_of(tmp_path, workers=1)


@given(st.lists(st.integers(1, 10_000_000), min_size=1, max_size=300))
def test_percentiles_are_within_one_per_cent(sizes: list[int]) -> None:
    stats = SetStats()
    for size in sizes:
        one = SetStats(images=1, image_bytes=size, smallest_image_bytes=size, largest_image_bytes=size)
        one.size_bins[int(np.floor(np.log2(size) * 64))] = 1
        stats.add(one)
    for percent in (1, 50, 99):
        exact = sorted(sizes)[max(int(np.ceil(len(sizes) * percent / 100)) - 1, 0)]
        assert stats.image_bytes_percentile(percent) == pytest.approx(exact, rel=0.012)


@given(st.dictionaries(st.integers(0, 70_000), st.integers(1, 50), min_size=1, max_size=60))
def test_histogram_bars_hold_everything_without_gap_or_overlap(counts: dict[int, int]) -> None:
    bars = histogram(counts)
    assert len(bars) <= 14
    assert sum(count for *_, count in bars) == sum(counts.values())
    assert all(before[1] == after[0] for before, after in pairwise(bars))
    for low, high, count in bars:
        assert count == sum(n for value, n in counts.items() if low <= value < high)


def test_kinds_are_told_by_the_header(tmp_path: Path) -> None:
    flag = [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]
    progressive = cv2.imencode(".jpg", np.zeros((30, 40, 3), np.uint8), flag)[1].tobytes()
    exif = jpeg_of(40, 30)
    orientation = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    exif = exif[:2] + b"\xff\xe1" + (len(orientation) + 2).to_bytes(2, "big") + orientation + exif[2:]
    png = cv2.imencode(".png", np.zeros((30, 40, 3), np.uint8))[1].tobytes()
    images = [
        jpeg_of(40, 30),
        jpeg_of(40, 30, "GRAY", "Gray"),
        jpeg_of(40, 30, subsampling="444"),
        progressive,
        exif,
        png,
        cmyk_jpeg(),
        jpeg_of(40, 30)[:-2],
        b"no image at all",
    ]
    write(tmp_path, [labelled(1, encoded) for encoded in images])
    stats = stats_of(tmp_path)
    assert stats.kinds["PNG"] == 1
    assert stats.kinds["no image that is known"] == 1
    assert stats.kinds["JPEG, progressive"] == 1
    assert stats.kinds["JPEG, baseline"] == 6
    assert stats.kinds["JPEG, grey"] == 1
    assert stats.kinds["JPEG, CMYK"] == 1
    assert stats.kinds["JPEG, EXIF"] == stats.kinds["JPEG, EXIF-rotated"] == 1
    assert stats.kinds["JPEG, 4:4:4"] == 1
    assert stats.kinds["JPEG, truncated"] == 1
    assert stats.dimensions == {(40, 30): 8}


def test_boxes_and_object_classes(tmp_path: Path) -> None:
    def example(objects: int) -> dict[str, Value]:
        return {
            "image/encoded": jpeg_of(40, 30),
            **{f"image/object/bbox/{side}": array("f", [0.5] * objects) for side in ("xmin", "xmax", "ymin", "ymax")},
            "image/object/class/label": array("q", range(1, objects + 1)),
            "image/object/class/text": [f"class {label}".encode() for label in range(1, objects + 1)],
        }

    write(tmp_path, [example(0), example(3), example(3), example(1)])
    stats = stats_of(tmp_path)
    assert stats.boxes == {0: 1, 3: 2, 1: 1}
    assert stats.classes == {1: 3, 2: 2, 3: 2}
    assert stats.class_names == {1: "class 1", 2: "class 2", 3: "class 3"}
    text = stat_text(stats)
    assert "7 boxes, 1.75 on average, 1 images without" in text
    assert "1 class 1 (3)" in text


def test_foreign_sets_of_tensorflow_datasets_and_of_no_images(tmp_path: Path) -> None:
    tfds = tmp_path / "tfds"
    tfds.mkdir()
    write(
        tfds, [{"image": image(1), "label": 0, "file_name": b"x"}, {"image": image(2), "label": 7, "file_name": b"y"}]
    )
    stats = stats_of(tfds)
    assert (stats.images, stats.classes) == (2, {0: 1, 7: 1})
    assert stats.keys == {"image (bytes)": 2, "label (int64)": 2, "file_name (bytes)": 2}
    words = tmp_path / "words"
    words.mkdir()
    path = write(words, [{"text": b"hello", "length": 5}])
    path.write_bytes(path.read_bytes() + frame(b"\xff\xff no example"))
    stats = stats_of(words)
    assert (stats.records, stats.images, stats.faults) == (2, 0, {"no tf.train.Example": 1})
    assert "text (bytes)" in stat_text(stats)
    assert stat_json(stats)["image_bytes"]["mean"] == 0


def test_damage_is_counted_and_hides_nothing(tmp_path: Path) -> None:
    paths = write_set(tmp_path, manifest=False)
    data = bytearray(paths[1].read_bytes())
    data[60] ^= 1
    paths[1].write_bytes(data)
    paths[2].write_bytes(gzip.compress(paths[2].read_bytes()))
    stats = stats_of(tmp_path)
    assert (stats.records, stats.images) == (96, 95)
    assert stats.faults == {"wrong CRC of the record's data": 1}
    assert stats.compression == {"none": 3, "gzip": 1}
    text = stat_text(stats)
    assert "DAMAGED: 1 x wrong CRC of the record's data" in text
    assert "compressed shards: 1 gzip" in text


def test_the_command_is_readable_without_colour_and_as_json(tmp_path: Path) -> None:
    write_set(tmp_path)
    text = drawbar("data", "stat", tmp_path)
    assert text.code == 0
    assert "4 shards, 96 records" in text.stdout
    assert "####" in text.stdout
    assert text.stdout.isascii()
    row = json.loads(drawbar("data", "stat", tmp_path, "--json").stdout)
    assert (row["records"], len(row["classes"]), row["kinds"]["JPEG, baseline"]) == (96, 10, 96)
    assert row["dimensions"] == [{"width": 64, "height": 48, "images": 96}]
    missing = drawbar("data", "stat", tmp_path / "nowhere")
    assert (missing.code, "no such folder" in missing.error_line) == (2, True)
