"""COCO to records: the annotation file streamed and indexed, masks as pycocotools draws them, faults named."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import tracemalloc
import zipfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from drawbar.dataset import coco_json
from drawbar.dataset.coco import CocoSource, Layout, find_layout, open_coco
from drawbar.dataset.coco_index import index_instances
from drawbar.dataset.coco_json import JsonFile
from drawbar.dataset.coco_mask import decode_counts, encode_counts, encode_png, expand_counts, rasterise
from drawbar.dataset.destination import FolderDestination
from drawbar.dataset.example import decode_example
from drawbar.dataset.items import CheckedImage
from drawbar.dataset.jpeg import parse_header
from drawbar.dataset.pack import pack
from drawbar.dataset.shard_writer import PackSettings
from drawbar.dataset.tfrecord import RecordSplitter
from drawbar.dataset.zip_index import ZipIndex
from drawbar.errors import DataError, InputError

coco_reference = pytest.importorskip("pycocotools.mask")

KEYS = {
    "image/height",
    "image/width",
    "image/filename",
    "image/source_id",
    "image/key/sha256",
    "image/encoded",
    "image/format",
    "image/caption",
    "image/object/bbox/xmin",
    "image/object/bbox/xmax",
    "image/object/bbox/ymin",
    "image/object/bbox/ymax",
    "image/object/class/text",
    "image/object/class/label",
    "image/object/is_crowd",
    "image/object/area",
    "image/object/mask",
}
WIDTH, HEIGHT = 80, 60
CATEGORIES = [{"id": 1, "name": "person"}, {"id": 90, "name": "brosse à dents"}, {"id": 13, "name": "stop sign"}]


def jpeg(number: int, width: int = WIDTH, height: int = HEIGHT) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
    data: bytes = simplejpeg.encode_jpeg(pixels, colorsubsampling="420")
    return data


def image(number: int, **changes: Any) -> dict[str, Any]:
    return {"id": number, "file_name": f"{number:012d}.jpg", "width": WIDTH, "height": HEIGHT, "license": 3} | changes


def annotation(
    number: int, image_id: int, box: Sequence[float] = (10, 20, 30.5, 15.25), **changes: Any
) -> dict[str, Any]:
    x, y, width, height = box
    corners = [x, y, x + width, y, x + width, y + height, x, y + height]
    return {
        "id": number,
        "image_id": image_id,
        "category_id": 1,
        "bbox": list(box),
        "area": 321.5,
        "iscrowd": 0,
        "segmentation": [corners],
    } | changes


def crowd_mask() -> NDArray[np.uint8]:
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[5:30, 40:70] = np.random.default_rng(0).integers(0, 2, (25, 30))
    return mask


def unpng(png: bytes) -> NDArray[Any]:
    pixels = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_UNCHANGED)
    assert pixels is not None
    return np.asarray(pixels)


def instances() -> dict[str, Any]:
    """Four images: three objects, one crowd, none, and boxes of which only one is right."""
    crowd = {"counts": encode_counts(crowd_mask()), "size": [HEIGHT, WIDTH]}
    return {
        "info": {"description": "größer", "contributor": 'a "quoted" [name]'},
        "annotations": [
            annotation(101, 4, (0, 0, 80, 60)),
            annotation(7, 2, category_id=90, area=12),
            annotation(102, 4, (10, 10, 0, 5)),
            annotation(8, 2, (40.25, 30, 20, 10), category_id=13),
            annotation(9, 1, (40, 5, 30, 25), iscrowd=1, segmentation=crowd),
            annotation(103, 4, (70, 10, 10.5, 5)),
            annotation(104, 4, (-1, 10, 10, 5)),
            annotation(105, 4, (1, 55, 10, 5.01)),
            annotation(106, 4, (1, 55, 10, -5)),
            annotation(6, 2, (1, 2, 3, 4)),
        ],
        "categories": CATEGORIES,
        "images": [image(3), image(1), image(4), image(2)],
    }


def write(folder: Path, tree: dict[str, Any], **captions: Any) -> Path:
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    (folder / "annotations" / "instances_train2017.json").write_text(json.dumps(tree, ensure_ascii=False))
    if captions:
        (folder / "annotations" / "captions_train2017.json").write_text(json.dumps(captions))
    (folder / "train2017").mkdir(exist_ok=True)
    for number in range(1, 5):
        (folder / "train2017" / f"{number:012d}.jpg").write_bytes(jpeg(number))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "coco", instances())


def examples(source: CocoSource) -> dict[bytes, dict[str, Any]]:
    """By file name, read as a worker process reads them."""
    found = {}
    worker: CocoSource = pickle.loads(pickle.dumps(source))
    for item in source.items():
        data = worker.read(item)
        example = decode_example(worker.example(item, CheckedImage(data, parse_header(data))))
        assert set(example) == KEYS
        found[bytes(example["image/filename"][0])] = example  # type: ignore[arg-type]
    return found


# The stream


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=5),
        st.one_of(
            st.integers(),
            st.text(max_size=8),
            st.lists(st.recursive(st.integers() | st.text(max_size=9), st.lists, max_leaves=6)),
            st.lists(st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False, allow_infinity=False))),
        ),
        max_size=5,
    ),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.integers(1, 40),
)
def test_elements_and_their_spans(
    tmp_path_factory: Any, tree: Any, indent: int | None, ascii_: bool, chunk: int
) -> None:
    path = tmp_path_factory.mktemp("json") / "x.json"
    path.write_text(json.dumps(tree, indent=indent, ensure_ascii=ascii_), encoding="utf-8")
    raw = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coco_json, "_CHUNK_BYTES", chunk)
        walk = JsonFile(path)
        elements = list(walk.elements())
    wanted = [(key, value) for key, values in tree.items() if isinstance(values, list) for value in values]
    assert [
        (element.key if ascii_ else key, element.text()) for element, (key, _) in zip(elements, wanted, strict=True)
    ] == (wanted)
    for element in elements:
        assert json.loads(raw[element.start : element.start + element.size_bytes]) == element.text()
    assert walk.sha256 == hashlib.sha256(raw).hexdigest()
    assert len(walk.keys) == len(tree)


def test_truncated_anywhere(tmp_path: Path) -> None:
    whole = json.dumps(instances()).encode()
    path = tmp_path / "cut.json"
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        with pytest.raises(
            DataError, match=rf"cut.json is no COCO annotation file: byte offset {size}: it is truncated"
        ):
            list(JsonFile(path).elements())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1, 2]", "byte offset 0: expected an object, found '\\['"),
        ('{"images": [{"id": 1,}]}', "byte offset 21: "),
        ('{"images": [1 2]}', "byte offset 14: expected ',' or '\\]', found '2'"),
        ('{"images": [1], }', "byte offset 16: expected a key, found '}'"),
        ('{"images": []} {}', "byte offset 15: something follows"),
        ('{"images": [], "images": []}', "'images' comes twice"),
        ('{"images": [' + "[" * 100_000, "nested too deeply"),
        ("<html>404</html>", "byte offset 0: expected an object, found '<'"),
    ],
)
def test_malformed(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError, match=reason) as caught:
        list(JsonFile(tmp_path / "x.json").elements())
    assert "\n" not in caught.value.message


def test_other_encodings(tmp_path: Path) -> None:
    (tmp_path / "bom.json").write_bytes(b'\xef\xbb\xbf{"a": [1]}')
    assert [(element.start, element.value) for element in JsonFile(tmp_path / "bom.json").elements()] == [(10, 1)]
    (tmp_path / "wide.json").write_text("{}", encoding="utf-16")
    with pytest.raises(DataError, match="is UTF-16 text; expected UTF-8"):
        list(JsonFile(tmp_path / "wide.json").elements())
    with pytest.raises(InputError, match=r"cannot read .*none.json: No such file"):
        index_instances(tmp_path / "none.json")


def test_memory_is_far_below_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "big.json"
    corners = [round(0.37 * number % 79, 2) for number in range(80)]
    tree = {
        "annotations": [annotation(number, number % 500 + 1, segmentation=[corners]) for number in range(6_000)],
        "images": [image(number + 1) for number in range(500)],
        "categories": CATEGORIES,
    }
    path.write_text(json.dumps(tree))
    del tree
    monkeypatch.setattr(coco_json, "_CHUNK_BYTES", 1 << 16)
    tracemalloc.start()
    index = index_instances(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(index.labels) == 6_000
    assert path.stat().st_size > 3.9e6
    assert peak_bytes < 2e6
    assert len(pickle.dumps(index)) < 200_000


# Masks


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # pycocotools' decode, with numpy 2
def test_polygons_are_filled_as_pycocotools_does() -> None:
    rng = np.random.default_rng(3)
    for count in (3, 4, 9, 30):
        polygons = [np.round(rng.uniform(-5, 85, 2 * count), 2).tolist() for _ in range(2)]
        runs = coco_reference.merge(coco_reference.frPyObjects(polygons, HEIGHT, WIDTH))
        assert (rasterise(polygons, HEIGHT, WIDTH) == coco_reference.decode(runs)).all()
        assert rasterise(polygons, HEIGHT, WIDTH).sum() == coco_reference.area(runs) > 0
    # Less than three corners have no area; the rest counts.
    whole = [[0, 0, 10, 0, 10, 10, 0, 10], [1, 2, 3, 4]]
    assert rasterise(whole, HEIGHT, WIDTH).sum() == 100


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_run_lengths_as_pycocotools_writes_them(height: int, width: int, seed: int) -> None:
    mask = np.random.default_rng(seed).integers(0, 2, (height, width), np.uint8)
    packed = coco_reference.encode(np.asfortranarray(mask))["counts"].decode()
    assert expand_counts(packed) == encode_counts(mask)
    for counts in (packed, encode_counts(mask)):
        assert (rasterise({"counts": counts, "size": [height, width]}, height, width) == mask).all()


def test_long_runs() -> None:
    mask = np.zeros((480, 640), np.uint8)
    mask[100:400, 250:600] = 1
    mask[200:210] = 0
    packed = coco_reference.encode(np.asfortranarray(mask))["counts"].decode()
    assert (decode_counts(expand_counts(packed), 480, 640) == mask).all()
    assert np.array_equal(unpng(encode_png(mask)), mask)


@pytest.mark.parametrize(
    ("segmentation", "reason"),
    [
        ([[1, 2, 3, 4]], "no polygon of three corners"),
        ([[1, 2, 3, 4, 5, "6"]], "something else than numbers"),
        ([[1, 2, 3, 4, 5, 1e9]], "reaches far outside the 80x60 image"),
        ([[1, 2, 3, 4, 5, float("nan")]], "reaches far outside"),
        ({"counts": [10, 20], "size": [HEIGHT, WIDTH]}, "run lengths add up to 30; 80x60 pixels have 4800"),
        ({"counts": [-10, 4810], "size": [HEIGHT, WIDTH]}, "no list of whole numbers"),
        ({"counts": [1e3, 3800], "size": [HEIGHT, WIDTH]}, "no list of whole numbers"),
        ({"counts": [4800], "size": [WIDTH, HEIGHT]}, r"mask of size \[80, 60\]; the image has \[60, 80\]"),
        ({"counts": "PP", "size": [HEIGHT, WIDTH]}, "they end too early"),
        ({"counts": "\x01", "size": [HEIGHT, WIDTH]}, "damaged compressed run lengths"),
        (None, "mask of size None"),
    ],
)
def test_masks_that_do_not_fit(segmentation: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        rasterise(segmentation, HEIGHT, WIDTH)


# Records


def test_every_key_of_a_record(folder: Path) -> None:
    found = examples(open_coco(find_layout(folder)))
    example = found[b"000000000002.jpg"]
    data = (folder / "train2017" / "000000000002.jpg").read_bytes()
    assert example["image/encoded"] == [data]
    assert example["image/key/sha256"] == [hashlib.sha256(data).hexdigest().encode()]
    assert (example["image/height"], example["image/width"]) == ([HEIGHT], [WIDTH])
    assert (example["image/source_id"], example["image/format"]) == ([b"2"], [b"jpeg"])
    assert example["image/object/class/label"] == [90, 13, 1]
    assert example["image/object/class/text"] == ["brosse à dents".encode(), b"stop sign", b"person"]
    assert example["image/object/bbox/xmin"] == pytest.approx([10 / 80, 40.25 / 80, 1 / 80])
    assert example["image/object/bbox/xmax"] == pytest.approx([40.5 / 80, 60.25 / 80, 4 / 80])
    assert example["image/object/bbox/ymin"] == pytest.approx([20 / 60, 30 / 60, 2 / 60])
    assert example["image/object/bbox/ymax"] == pytest.approx([35.25 / 60, 40 / 60, 6 / 60])
    assert example["image/object/area"] == [12, 321.5, 321.5]
    assert example["image/object/is_crowd"] == [0, 0, 0]
    assert example["image/caption"] == []
    masks = list(map(unpng, example["image/object/mask"]))
    assert [mask.shape for mask in masks] == [(HEIGHT, WIDTH)] * 3
    assert masks[2].sum() == 12
    assert masks[2][2:6, 1:4].all()


def test_crowds_and_images_without_objects(folder: Path) -> None:
    found = examples(open_coco(find_layout(folder)))
    crowd = found[b"000000000001.jpg"]
    assert crowd["image/object/is_crowd"] == [1]
    assert np.array_equal(unpng(crowd["image/object/mask"][0]), crowd_mask())
    empty = found[b"000000000003.jpg"]
    assert {key for key, values in empty.items() if values == []} == {
        key for key in KEYS if "object" in key or "cap" in key
    }


def test_bad_boxes_are_skipped_and_counted(folder: Path) -> None:
    source = open_coco(find_layout(folder))
    assert examples(source)[b"000000000004.jpg"]["image/object/bbox/xmax"] == [1.0]
    notes = source.notes()
    assert notes["boxes_skipped"] == {"no width or no height": 2, "reaches outside the image": 3}
    assert notes["boxes_skipped_ids"] == {
        "no width or no height": [102, 106],
        "reaches outside the image": [103, 104, 105],
    }
    assert notes["annotations"] == 5
    assert json.loads(json.dumps(notes)) == notes


def test_labels_and_the_map_of_categories(folder: Path) -> None:
    source = open_coco(find_layout(folder))
    assert source.labels == ("person", "stop sign", "brosse à dents")
    assert source.notes()["category_map"] == {"1": 1, "13": 2, "90": 3}
    assert [source.item_labels(item) for item in source.items()] == [[1], [3, 2, 1], [], [1]]
    assert [item.path for item in source.items()] == [f"{number:012d}.jpg" for number in range(1, 5)]


def test_captions(tmp_path: Path) -> None:
    captions = [
        {"image_id": 2, "id": 1, "caption": "Ein Hund."},
        {"image_id": 99, "id": 2, "caption": "of another split"},
        {"image_id": 1, "id": 3, "caption": "Zwei Hüte."},
        {"image_id": 2, "id": 4, "caption": "A dog."},
    ]
    source = open_coco(find_layout(write(tmp_path, instances(), annotations=captions)))
    found = examples(source)
    assert found[b"000000000002.jpg"]["image/caption"] == [b"Ein Hund.", b"A dog."]
    assert found[b"000000000001.jpg"]["image/caption"] == ["Zwei Hüte.".encode()]
    assert found[b"000000000003.jpg"]["image/caption"] == []


def test_without_masks(folder: Path) -> None:
    found = examples(open_coco(find_layout(folder), masks=False))
    assert found[b"000000000002.jpg"]["image/object/mask"] == []
    tree = instances()
    for each in tree["annotations"]:
        del each["segmentation"], each["area"]
    source = open_coco(find_layout(write(folder, tree)))
    assert not source.masks
    example = examples(source)[b"000000000002.jpg"]
    assert example["image/object/mask"] == []
    assert example["image/object/area"] == [pytest.approx(30.5 * 15.25), 200, 12]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("below", ["", "train2017/"])
def test_images_in_a_zip(folder: Path, method: int, below: str) -> None:
    plain = examples(open_coco(find_layout(folder)))
    with zipfile.ZipFile(folder / "train2017.zip", "w", method) as archive:
        archive.writestr(f"{below}other/readme.txt", "no image")
        for path in sorted((folder / "train2017").iterdir(), reverse=True):
            archive.write(path, below + path.name)
            path.unlink()
    (folder / "train2017").rmdir()
    layout = find_layout(folder)
    assert layout.images.suffix == ".zip"
    assert examples(open_coco(layout)) == plain


def test_damaged_zips(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(b"PK no zip")
    with pytest.raises(InputError, match=r"x.zip is no zip archive"):
        ZipIndex(path)
    content = bytes(range(256)) * 40
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("a.jpg", content)
        archive.writestr("b.jpg", content, zipfile.ZIP_DEFLATED)
        archive.writestr("c.jpg", content, zipfile.ZIP_BZIP2)
        headers = [archive.getinfo(name).header_offset for name in ("a.jpg", "b.jpg")]
    index = ZipIndex(path)
    assert index.read("a.jpg") == index.read("b.jpg") == content
    assert (index.size_bytes("a.jpg"), index.size_bytes("d.jpg")) == (len(content), None)
    with pytest.raises(DataError, match="zip compression method 12"):
        index.read("c.jpg")
    data = bytearray(path.read_bytes())
    for header in headers:
        data[header + 60] ^= 0xFF
    path.write_bytes(data)
    for name, reason in (("a.jpg", "wrong CRC"), ("b.jpg", "wrong CRC|damaged deflate"), ("d.jpg", "missing in")):
        with pytest.raises(DataError, match=reason):
            ZipIndex(path).read(name)


# Faults


def broken(**changes: Any) -> dict[str, Any]:
    tree = instances()
    for key, added in changes.items():
        tree[key] = [*tree[key], *added]
    return tree


FAULTS = [
    ({"annotations": [annotation(50, 77)]}, "annotation 50: unknown image 77"),
    ({"annotations": [annotation(50, 1, category_id=5)]}, "annotation 50: unknown category 5"),
    ({"annotations": [annotation(7, 1)]}, "annotation 7: the id comes twice"),
    ({"annotations": [annotation(50, 1, bbox=[1, 2, 3])]}, r"annotation 50: bbox is \[1, 2, 3\]; expected 4 numbers"),
    ({"annotations": [annotation(50, 1, bbox=[1, 2, 3, float("inf")])]}, "annotation 50: bbox is"),
    ({"annotations": [{"id": 50, "image_id": 1, "category_id": 1}]}, "annotation 50: bbox is missing"),
    ({"annotations": [annotation(50, 1, area="big")]}, "annotation 50: area is"),
    ({"annotations": [annotation(50, 1, area=-5)]}, "annotation 50: area is -5"),
    ({"annotations": [annotation(50, 1, area=1e300)]}, r"annotation 50: area is 1e\+300; records hold 32 bits"),
    ({"annotations": [annotation(50, 1, area=None)]}, "annotation 50: area is"),
    (
        {"annotations": [annotation(50, 1, segmentation={"counts": "zzzz\x7f", "size": [HEIGHT, WIDTH]})]},
        "annotation 50: damaged compressed run lengths",
    ),
    (
        {"annotations": [annotation(50, 1, segmentation={"counts": [0, 10], "size": [HEIGHT, WIDTH]})]},
        "annotation 50: run lengths add up to 10; 80x60 pixels have 4800",
    ),
    (
        {"annotations": [annotation(50, 1, segmentation={"counts": [4800], "size": [WIDTH, HEIGHT]})]},
        r"annotation 50: mask of size \[80, 60\]; the image has \[60, 80\]",
    ),
    ({"annotations": [annotation(50, 1, segmentation=[[1e18] * 8])]}, "annotation 50: a polygon reaches far outside"),
    ({"annotations": [annotation(50, 1, segmentation=[[10**400] * 8])]}, "annotation 50: a polygon reaches far out"),
    ({"annotations": [annotation(50, 1, segmentation=[[float("nan")] * 8])]}, "annotation 50: a polygon reaches far"),
    ({"annotations": [annotation(50, 1, segmentation=[["1"] * 8])]}, "annotation 50: a polygon holds something else"),
    ({"images": [image(5, id=5.0)]}, r"image at byte offset \d+: id is 5.0; expected a whole number"),
    ({"annotations": [annotation(50, 1, iscrowd=2)]}, "annotation 50: iscrowd is 2; expected 0 or 1"),
    ({"annotations": [annotation(50, 1, segmentation=[])]}, "annotation 50: no segmentation"),
    ({"annotations": [annotation(50, 1) | {"image_id": "1"}]}, "annotation 50: image_id is '1'; expected a whole"),
    ({"annotations": [annotation(1 << 70, 1)]}, r"annotation 1180591620717411303424: id is"),
    ({"annotations": [[1]]}, r"annotation at byte offset \d+: id is missing"),
    ({"images": [image(1)]}, "image 1: the file name '000000000001.jpg' comes twice"),
    ({"images": [image(5, file_name="000000000001.jpg")]}, "image 5: the file name '000000000001.jpg' comes twice"),
    ({"images": [image(5, file_name="../../etc/passwd")]}, "leads out of the images folder"),
    ({"images": [image(5, file_name="/etc/passwd")]}, "leads out of the images folder"),
    ({"images": [image(5, width=0)]}, "image 5: width is 0; expected a whole number from 1"),
    ({"categories": [{"id": 13, "name": "again"}]}, "category 13: the id comes twice, for 'stop sign' and 'again'"),
]


@pytest.mark.parametrize(("changes", "line"), FAULTS)
def test_faults_are_named_or_left_out(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    folder = write(tmp_path, broken(**changes))
    with pytest.raises(InputError, match=f"instances_train2017.json has 1 fault: .*{line}") as caught:
        open_coco(find_layout(folder))
    assert "\n" not in caught.value.message
    source = open_coco(find_layout(folder), on_bad="skip")
    (fault,) = source.notes()["faults"]
    assert fault in caught.value.message
    assert line.partition(":")[0].split(" ")[0] in source.loss()  # said while packing
    (key,) = changes
    assert sum(source.notes()["annotations_left_out"].values()) == (5 + 1 if key == "annotations" else 5)
    assert [bad.reason for bad in source.bad_files()] == ([fault] if key == "images" else [])
    sound = open_coco(find_layout(write(tmp_path / "sound", instances())))
    assert examples(source) == examples(sound)


def test_lone_surrogates_are_faults(tmp_path: Path) -> None:
    """Text that JSON can hold and UTF-8 cannot."""
    tree = instances()
    tree["images"].append(image(5, file_name="\ud800.jpg"))
    tree["categories"] = [*tree["categories"], {"id": 14, "name": "\udfff"}]
    folder = write(tmp_path, instances(), annotations=[{"image_id": 2, "id": 1, "caption": "\ud800"}])
    (folder / "annotations" / "instances_train2017.json").write_text(json.dumps(tree))
    source = open_coco(find_layout(folder), on_bad="skip")
    assert len(examples(source)) == 4
    faults = source.notes()["faults"]
    assert [fault.partition(":")[0].partition(" at ")[0] for fault in faults] == ["category 14", "image 5", "caption 1"]
    assert all("half of a surrogate pair" in fault and fault.isascii() for fault in faults)
    assert [bad.path for bad in source.bad_files()] == [r"\ud800.jpg"]
    manifest = pack(source, FolderDestination(tmp_path / "p"), PackSettings(1, schema="coco", on_bad="fix"))
    assert manifest.bad_paths("skipped") == [r"\ud800.jpg"]


def test_bytes_that_are_no_utf8(folder: Path) -> None:
    path = folder / "annotations" / "instances_train2017.json"
    raw = path.read_bytes().replace(b'"area": 12,', b'"area": 12, "note": "caf\xe9",')
    path.write_bytes(raw)
    at = raw.index(b"\xe9")
    with pytest.raises(InputError, match=rf"has 1 fault: annotation 7: byte offset {at} is no UTF-8 text"):
        open_coco(find_layout(folder))
    source = open_coco(find_layout(folder), on_bad="fix")
    assert examples(source)[b"000000000002.jpg"]["image/object/class/label"] == [13, 1]
    assert source.notes()["annotations_left_out"]["no UTF-8 text"] == 1


def test_images_left_out_are_listed_and_their_annotations_counted(tmp_path: Path) -> None:
    tree = instances()
    tree["images"] += [image(5, file_name="000000000001.jpg"), image(6, file_name="/etc/pässwörd"), image(1 << 70)]
    tree["annotations"] += [annotation(50, 5), annotation(51, 6), annotation(52, 77), annotation(53, 1, area=-1)]
    source = open_coco(find_layout(write(tmp_path, tree)), on_bad="fix")
    notes: list[str] = []
    dest = FolderDestination(tmp_path / "p")
    manifest = pack(source, dest, PackSettings(1, schema="coco", on_bad="fix"), note=notes.append)
    (line,) = notes
    assert line.startswith("9 of 14 annotations left out: ")
    for part in ("image left out x2", "unknown image x1", "bad area x1", "no width or no height x2", "outside the"):
        assert part in line
    assert "3 image entries left out: image " in line
    assert sorted(manifest.bad_paths("skipped")) == ["/etc/pässwörd", "000000000001.jpg", f"{1 << 70:012d}.jpg"]
    assert manifest.notes["annotations_left_out"]["image left out"] == 2
    assert pack(source, dest, PackSettings(1, schema="coco", on_bad="fix")) == manifest


def test_an_id_of_several_files_is_no_ones(tmp_path: Path) -> None:
    """Which of them its annotations were made on cannot be known."""
    folder = write(tmp_path, broken(images=[image(2, file_name="x.jpg")]))
    (folder / "train2017" / "x.jpg").write_bytes(jpeg(9))
    with pytest.raises(InputError, match=r"image 2: the id comes twice, for '0+2.jpg' and 'x.jpg'|'x.jpg' and '0+2"):
        open_coco(find_layout(folder))
    source = open_coco(find_layout(folder), on_bad="skip")
    assert [item.path for item in source.items()] == [f"{number:012d}.jpg" for number in (1, 3, 4)]
    assert sorted(bad.path for bad in source.bad_files()) == ["000000000002.jpg", "x.jpg"]
    assert source.notes()["annotations_left_out"]["image left out"] == 3
    tree = instances() | {"images": [image(1), image(1, file_name="x.jpg")]}
    with pytest.raises(InputError, match=r"lists no usable image: image 1: the id comes twice"):
        open_coco(find_layout(write(tmp_path, tree)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"categories": []}, "none of its 10 annotations can be used: unknown category x10$"),
        ({"images": [image(number + 90, file_name=f"{number:012d}.jpg") for number in (1, 2)]}, "unknown image x10$"),
    ],
)
def test_annotations_none_of_which_can_be_used(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    folder = write(tmp_path, instances() | changes)
    for policy in ("fix", "skip", "fail"):
        with pytest.raises(InputError, match=reason):
            open_coco(find_layout(folder), on_bad=policy)
    (folder / "annotations" / "instances_train2017.json").write_text(json.dumps(instances() | {"annotations": []}))
    assert len(examples(open_coco(find_layout(folder)))) == 4


def test_without_masks_no_segmentation_is_needed(folder: Path) -> None:
    tree = instances()
    del tree["annotations"][1]["segmentation"]
    tree["annotations"][3]["segmentation"] = [["no number"] * 8]
    write(folder, tree)
    found = examples(open_coco(find_layout(folder), masks=False))
    assert found[b"000000000002.jpg"]["image/object/class/label"] == [90, 13, 1]
    source = open_coco(find_layout(folder), on_bad="skip")
    assert examples(source)[b"000000000002.jpg"]["image/object/class/label"] == [1]
    assert (
        source.notes()["annotations_left_out"] | {"no segmentation": 1, "bad segmentation": 1}
        == (source.notes()["annotations_left_out"])
    )


def test_masks_of_an_absurd_size_are_never_drawn(folder: Path, tmp_path: Path) -> None:
    """Neither for a file of another size, nor for one that claims the same, nor for one that is mended."""
    tree = instances()
    for each in tree["images"]:
        if each["id"] in (1, 2, 4):
            each.update(width=60000, height=60000)
    tree["annotations"] = [annotation(number, number, (0, 0, 50000, 50000)) for number in (1, 2, 4)]
    write(folder, tree)
    bomb = bytearray(jpeg(4))
    at = parse_header(bytes(bomb)).frame_offset + 5
    bomb[at : at + 4] = (60000).to_bytes(2, "big") * 2
    (folder / "train2017" / "000000000004.jpg").write_bytes(bomb)
    png = cv2.imencode(".png", np.zeros((HEIGHT, WIDTH, 3), np.uint8))[1].tobytes()
    (folder / "train2017" / "000000000002.jpg").write_bytes(png)
    source = open_coco(find_layout(folder), on_bad="fix")
    manifest = pack(source, FolderDestination(tmp_path / "p"), PackSettings(1, schema="coco", on_bad="fix"))
    assert {bad.path[11]: bad.reason for bad in manifest.bad} == {
        "1": "80x60 pixels; the annotations say 60000x60000",
        "2": "000000000002.jpg: 80x60 pixels; the annotations say 60000x60000",
        "4": "absurd size: 60000x60000 pixels, more than 67108864",
    }
    assert manifest.num_records == 1


def test_files_too_large_to_be_images_are_not_read(folder: Path, tmp_path: Path) -> None:
    with (folder / "train2017" / "000000000002.jpg").open("r+b") as file:
        file.truncate(900 << 20)
    source = open_coco(find_layout(folder), on_bad="fix")
    tracemalloc.start()
    manifest = pack(source, FolderDestination(tmp_path / "p"), PackSettings(1, schema="coco", on_bad="fix"), workers=1)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 100e6
    assert [bad.reason for bad in manifest.bad] == [f"absurd size: {900 << 20} bytes, more than {128 << 20}"]


def test_large_members_of_a_zip_are_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drawbar.dataset.jpeg.MAX_FILE_BYTES", 1000)
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for size in (1000, 1001):
            archive.writestr(f"{size}", bytes(size))
    index = ZipIndex(tmp_path / "x.zip")
    assert index.read("1000") == bytes(1000)
    with pytest.raises(DataError, match="absurd size: 1001 bytes, more than 1000"):
        index.read("1001")


def test_names_of_what_is_no_file(tmp_path: Path) -> None:
    """A folder, a pipe (opening it would wait for ever), a name too long, one below a file, a link to itself."""
    names = (".", "pipe", "x" * 300, "000000000001.jpg/y", "loop")
    tree = instances()
    tree["images"] += [image(10 + number, file_name=name) for number, name in enumerate(names)]
    folder = write(tmp_path, tree)
    os.mkfifo(folder / "train2017" / "pipe")
    (folder / "train2017" / "loop").symlink_to("loop")
    source = open_coco(find_layout(folder), on_bad="fix")
    manifest = pack(source, FolderDestination(tmp_path / "p"), PackSettings(1, schema="coco", on_bad="fix"), workers=1)
    assert manifest.num_records == 4
    assert {bad.path for bad in manifest.bad} == set(names)
    assert all(bad.reason.startswith("missing in ") for bad in manifest.bad)


def test_zips_in_which_a_name_could_be_two_files(folder: Path) -> None:
    path = folder / "train2017.zip"
    files = {file.name: file.read_bytes() for file in (folder / "train2017").iterdir()}
    shutil.rmtree(folder / "train2017")

    def zipped(*names: str) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, files[name.rpartition("/")[2]])

    zipped(*(f"a/{name}" for name in files), *(f"b/{name}" for name in files))
    with pytest.raises(InputError, match=r"holds 0+1.jpg twice, as a/0+1.jpg and as b/0+1.jpg") as caught:
        open_coco(find_layout(folder))
    assert "--images" in str(caught.value.hint)
    zipped(*(f"b/{name}" for name in files), "a/000000000003.jpg")
    with pytest.raises(InputError, match=r"holds 0+3.jpg twice, as b/0+3.jpg and as a/0+3.jpg"):
        open_coco(find_layout(folder))
    with pytest.warns(UserWarning, match="Duplicate name"):
        zipped(*files, "000000000003.jpg")
    with pytest.raises(InputError, match=r"train2017.zip holds 0+3.jpg twice"):
        open_coco(find_layout(folder))
    # One name may end as another does.
    tree = instances()
    tree["images"][0]["file_name"] = "b/000000000001.jpg"
    (folder / "annotations" / "instances_train2017.json").write_text(json.dumps(tree))
    zipped("x/000000000001.jpg", "x/b/000000000001.jpg", "x/000000000002.jpg", "x/000000000004.jpg")
    assert len(examples(open_coco(find_layout(folder)))) == 4


@pytest.mark.parametrize("number", ["1.5", "1e+22", "-2.5E-7", "-0", "10", "1.25e3"])
@pytest.mark.parametrize("form", ['{"a": %s}', '{"a": [%s]}', '{"a": [%s, 2]}', '{"a": [1, %s ]}', '{"b": {"a": %s}}'])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 9])
def test_numbers_cut_by_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, form: str, chunk: int
) -> None:
    path = tmp_path / "x.json"
    path.write_text(form % number)
    monkeypatch.setattr(coco_json, "_CHUNK_BYTES", chunk)
    wanted = json.loads(path.read_text()).get("a", [])
    found = [element.value for element in JsonFile(path).elements()]
    assert found == (wanted if isinstance(wanted, list) else [])


def test_many_faults_are_one_line(tmp_path: Path) -> None:
    folder = write(tmp_path, broken(annotations=[annotation(number, 77) for number in range(50, 60)]))
    with pytest.raises(InputError, match=r"has 10 faults: annotation 50: .*; annotation 52: [^;]*; and 7 more$"):
        open_coco(find_layout(folder))


def test_missing_images(folder: Path) -> None:
    (folder / "train2017" / "000000000003.jpg").unlink()
    with pytest.raises(InputError, match=r"train2017 lacks 1 image: 000000000003.jpg$"):
        open_coco(find_layout(folder))
    source = open_coco(find_layout(folder), on_bad="skip")
    with pytest.raises(DataError, match=r"missing in .*train2017"):
        source.read(source.items()[2])
    for path in (folder / "train2017").iterdir():
        path.rename(path.with_name("val" + path.name))
    with pytest.raises(InputError, match=r"holds none of the 4 images of .*, such as 000000000001.jpg"):
        open_coco(find_layout(folder), on_bad="skip")


def test_images_of_another_size(folder: Path) -> None:
    (folder / "train2017" / "000000000002.jpg").write_bytes(jpeg(2, HEIGHT, WIDTH))
    source = open_coco(find_layout(folder))
    with pytest.raises(DataError, match=r"^60x80 pixels; the annotations say 80x60$"):
        source.read(source.items()[1])


def test_masks_that_do_not_fit_their_image(tmp_path: Path) -> None:
    crowd = {"counts": [4800], "size": [WIDTH, HEIGHT]}
    tree = broken(annotations=[annotation(50, 2, segmentation=crowd)])
    for key in ("images", "annotations", "categories"):  # what a mask must fit may come behind it
        tree = {key: tree.pop(key)} | tree
        with pytest.raises(InputError, match=r"annotation 50: mask of size \[80, 60\]; the image has \[60, 80\]"):
            open_coco(find_layout(write(tmp_path, tree)))


def test_files_that_change_meanwhile(folder: Path) -> None:
    source = open_coco(find_layout(folder))
    first = source.items()[0]
    (folder / "train2017" / first.path).write_bytes(jpeg(1) + b"x")
    with pytest.raises(InputError, match="and is not any more"):
        source.read(first)
    worker = pickle.loads(pickle.dumps(source))
    write(folder, broken(annotations=[annotation(50, 1)]))
    item = source.items()[1]
    data = worker.read(item)
    with pytest.raises(InputError, match="changed while it was being packed"):
        worker.example(item, CheckedImage(data, parse_header(data)))


def test_layouts(folder: Path, tmp_path: Path) -> None:
    annotations = folder / "annotations" / "instances_train2017.json"
    wanted = Layout(annotations, folder / "train2017", None)
    assert find_layout(folder) == find_layout(tmp_path, annotations=annotations, images=wanted.images) == wanted
    assert find_layout(annotations, images=wanted.images) == wanted
    (folder / "annotations_trainval2017.zip").touch()
    with pytest.raises(InputError, match=r"expected one file instances_val\*.json in .*, found none") as caught:
        find_layout(folder, "validation")
    assert caught.value.hint == f"unpack {folder / 'annotations_trainval2017.zip'} first"
    annotations.with_name("instances_train2014.json").write_text("{}")
    with pytest.raises(InputError, match=r"found several: instances_train2014.json, instances_train2017.json"):
        find_layout(folder)
    with pytest.raises(InputError, match="no source folder"):
        find_layout(tmp_path / "none")
    (folder / "train2017").rename(folder / "pictures")
    with pytest.raises(InputError, match=r"no images for .*instances_train2017.json: no .*train2017 and no .*.zip"):
        find_layout(folder, annotations=annotations)
    with pytest.raises(InputError, match=r"no images for .*: no .*train2017 and no") as caught:
        find_layout(annotations)
    assert str(caught.value.hint).startswith("name their folder or zip archive with --images; ")
    with pytest.raises(InputError, match=r"instances_train2014.json has no 'images'"):
        index_instances(annotations.with_name("instances_train2014.json"))


def test_images_are_found_beside_the_folder_of_an_annotation_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = find_layout(folder)
    assert find_layout(wanted.annotations) == wanted
    monkeypatch.chdir(folder / "annotations")
    assert find_layout(Path("instances_train2017.json")).images.samefile(wanted.images)
    monkeypatch.chdir(folder)
    assert find_layout(Path("annotations/instances_train2017.json")).images == Path("train2017")
    Path("train2017").rename("elsewhere")
    Path("train2017.zip").touch()
    assert find_layout(wanted.annotations).images == folder / "train2017.zip"


def test_hints_name_the_files_of_the_split(folder: Path) -> None:
    for split, name in (("validation", "val2017"), ("train", "train2017"), ("minival", "minival2017")):
        with pytest.raises(InputError) as caught:
            find_layout(folder / "train2017", split)
        assert caught.value.hint == (
            f"expected SRC/annotations/instances_{name}.json beside SRC/{name}/ or SRC/{name}.zip"
        )
    (folder / "drawbar-synthetic-validation.json").write_text("{}")
    with pytest.raises(InputError, match="found none") as caught:
        find_layout(folder, "validation")
    assert "give its `drawbar data make` command again" in str(caught.value.hint)
    with pytest.raises(InputError, match=r"^s3://coco/all is an address"):
        find_layout(Path("s3://coco/all"))


def test_fingerprint_follows_the_content(folder: Path) -> None:
    first = open_coco(find_layout(folder)).fingerprint()
    assert open_coco(find_layout(folder)).fingerprint() == first
    assert open_coco(find_layout(folder), masks=False).fingerprint() != first
    tree = instances()
    tree["annotations"][0]["area"] = 1
    assert open_coco(find_layout(write(folder, tree))).fingerprint() != first


def test_packed(folder: Path, tmp_path: Path) -> None:
    """Through the packer: every image once, the same bytes for any number of workers, the notes in the manifest."""
    source = open_coco(find_layout(folder))
    shards = []
    for workers in (1, 2):
        place = tmp_path / f"packed{workers}"
        manifest = pack(source, FolderDestination(place), PackSettings(num_shards=2, schema="coco"), workers=workers)
        shards.append([(place / shard.name).read_bytes() for shard in manifest.shards])
    assert shards[0] == shards[1]
    assert manifest.notes == source.notes()
    assert (manifest.labels, manifest.class_counts) == (source.labels, (3, 1, 1))
    found = {}
    for data in shards[0]:
        splitter = RecordSplitter("s")
        for record in splitter.feed(data):
            example = decode_example(record.payload)
            found[example["image/filename"][0]] = example
        splitter.finish()
    assert found == examples(source)


def test_spans_do_not_overlap(folder: Path) -> None:
    index = index_instances(folder / "annotations" / "instances_train2017.json")
    spans = sorted(zip(index.objects.starts.tolist(), index.objects.sizes.tolist(), strict=True))
    assert all(start + size < following for (start, size), (following, _) in pairwise(spans))
