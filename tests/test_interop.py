"""Against TensorFlow and NVIDIA DALI themselves: they read what Drawbar packed, and Drawbar reads what they wrote.

They run in an environment of their own: that of DRAWBAR_PEERS_PYTHON, else `.venv-peers` (scripts/peers makes it),
else this one.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drawbar.config import Storage
from drawbar.dataset.check import check_set
from drawbar.dataset.example import parse_image_example
from drawbar.dataset.listing import list_shards
from drawbar.dataset.record_check import read_features
from drawbar.dataset.synthetic import make_imagenet_like
from drawbar.dataset.tfrecord import RecordSplitter
from drawbar.dataset.walk import Fault, Origin
from drawbar.storage.stores import open_place
from tests.drawbar_process import drawbar
from tests.peers import BOX_KEYS, Row, shown
from tests.small_loader import loader_over

REPOSITORY = Path(__file__).parents[1]
DEADLINE_S = 110.0

pytestmark = pytest.mark.run


@functools.cache
def peer_python(module: str) -> str | None:
    """An interpreter that has `module`."""
    candidates = [
        os.environ.get("DRAWBAR_PEERS_PYTHON", ""),
        str(REPOSITORY / ".venv-peers/bin/python"),
        sys.executable,
    ]
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    for python in candidates:
        if python and os.access(python, os.X_OK) and subprocess.run([python, "-c", look], check=False).returncode == 0:
            return python
    return None


def need(module: str, what: str) -> str:
    """Fails without `module`: what was not compared is not shown."""
    python = peer_python(module)
    if python is None:
        pytest.fail(f"{what} ({module}) is not installed: scripts/peers makes an environment with it")
    return python


def tensorflow() -> str:
    return need("tensorflow", "TensorFlow")


def dali() -> str:
    return need("nvidia.dali", "NVIDIA DALI")


def peer(python: str, *arguments: str | Path) -> list[Row]:
    done = subprocess.run(
        [python, str(REPOSITORY / "tests/peers.py"), *map(str, arguments)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interop") / "images"
    make_imagenet_like(folder, num_images=60, num_classes=7, seed=3, workers=1)
    return folder


def box(number: int, index: int) -> tuple[float, ...]:
    return (0.01 * (number % 30), 0.02 * index, 0.5 + 0.003 * number, 0.9 + 0.01 * index)


@pytest.fixture(scope="module")
def packed(images: Path) -> Path:
    """The images in 4 shards, most with boxes."""
    names = sorted(path.name for path in images.rglob("*.JPEG"))
    lines = [",".join([name, *map(str, box(n, i))]) for n, name in enumerate(names) for i in range(n % 4)]
    csv = images.parent / "boxes.csv"
    csv.write_text("\n".join(lines) + "\n")
    dest = images.parent / "packed"
    finished = drawbar("data", "pack", "imagenet", images, dest, "--boxes", csv, "--shards", "4")
    assert finished.code == 0, finished.stderr
    return dest


def ours(folder: Path) -> list[Row]:
    """As Drawbar reads it, plain sets only."""
    rows = []
    place = open_place(str(folder), None, None, Storage())
    for shard in list_shards(place.store, place.prefix).shards:
        splitter = RecordSplitter(shard.name)
        records = splitter.feed((folder / shard.name).read_bytes())
        rows += [row_of(shard.name, record.payload) for record in records]
        splitter.finish()
    return rows


def row_of(shard: str, payload: bytes) -> Row:
    fast = parse_image_example(payload)
    features = read_features(payload)
    return {
        "shard": shard,
        "features": {key: shown(list(values)) for key, values in features.items()},
        "encoded": shown([bytes(fast.encoded)])[0],
        "label": fast.label,
        "boxes": [[box[side] for box in fast.boxes] for side in range(4)],
    }


def only(row: Row, *keys: str) -> dict[str, Any]:
    return {key: row[key] for key in keys}


def test_the_packed_set_is_what_the_files_and_boxes_were(packed: Path, images: Path) -> None:
    """The other tests compare readers; this one compares with the source."""
    names = sorted(path.name for path in images.rglob("*.JPEG"))
    files = {path.name: path for path in images.rglob("*.JPEG")}
    by_content = {shown([path.read_bytes()])[0]: name for name, path in files.items()}
    rows = ours(packed)
    assert len(rows) == len(by_content) == 60
    seen = set()
    for row in rows:
        name = by_content[row["encoded"]]
        number = names.index(name)
        seen.add(name)
        assert row["features"]["image/filename"] == shown([name.encode()])
        assert row["label"] == int(files[name].parent.name[1:])
        for side in range(4):
            assert row["boxes"][side] == pytest.approx([box(number, i)[side] for i in range(number % 4)], abs=1e-6)
    assert seen == set(names)


def test_tensorflow_reads_every_record_of_a_packed_set_and_gets_the_same(packed: Path) -> None:
    python = tensorflow()
    theirs, mine = peer(python, "tensorflow-read", packed), ours(packed)
    assert len(theirs) == len(mine) == 60
    for their, my in zip(theirs, mine, strict=True):
        assert only(their, "shard", "features", "encoded", "label", "boxes") == my
        sizes = [my["features"][key][0] for key in ("image/height", "image/width", "image/channels")]
        assert their["decoded"] == sizes


def test_dali_reads_every_record_of_a_packed_set_and_gets_the_same(packed: Path) -> None:
    python = dali()
    theirs, mine = peer(python, "dali-read", packed), ours(packed)
    assert len(theirs) == len(mine) == 60
    for their, my in zip(theirs, mine, strict=True):
        assert only(their, "shard", "encoded", "boxes") == only(my, "shard", "encoded", "boxes")
        assert their["labels"] == [my["label"]]


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row]]:
    """24 scenes with several objects each, and their records as Drawbar reads them."""
    folder = tmp_path_factory.mktemp("coco")
    made = drawbar("data", "make", "coco-like", folder / "files", "--images", "24", "--size", "160")
    assert made.code == 0, made.stderr
    finished = drawbar("data", "pack", "coco", folder / "files", folder / "packed", "--shards", "2")
    assert finished.code == 0, finished.stderr
    place = open_place(str(folder / "packed"), None, None, Storage())
    rows = []
    for shard in list_shards(place.store, place.prefix).shards:
        splitter = RecordSplitter(shard.name)
        for record in splitter.feed((folder / "packed" / shard.name).read_bytes()):
            features = read_features(record.payload)
            rows.append(
                {
                    "shard": shard.name,
                    "features": {key: shown(list(values)) for key, values in features.items()},
                    "encoded": shown(list(features["image/encoded"]))[0],
                    "object_labels": list(features["image/object/class/label"]),
                    "boxes": [list(features[key]) for key in BOX_KEYS],
                }
            )
        splitter.finish()
    assert len(rows) == 24
    assert sum(len(row["object_labels"]) for row in rows) > 48
    assert all(len(row["features"]["image/object/mask"]) == len(row["object_labels"]) for row in rows)
    return folder / "packed", rows


def test_tensorflow_reads_objects_boxes_and_masks_of_a_packed_coco_set(coco: tuple[Path, list[Row]]) -> None:
    theirs = peer(tensorflow(), "tensorflow-read", coco[0])
    assert [only(row, *coco[1][0]) for row in theirs] == coco[1]


def test_dali_reads_objects_and_boxes_of_a_packed_coco_set(coco: tuple[Path, list[Row]]) -> None:
    theirs = peer(dali(), "dali-read", coco[0])
    keys = ("shard", "encoded", "object_labels", "boxes")
    assert [only(row, *keys) for row in theirs] == [only(row, *keys) for row in coco[1]]


@pytest.fixture(scope="module")
def written(images: Path) -> tuple[Path, list[Row]]:
    python = tensorflow()
    folder = images.parent / "written"
    return folder, peer(python, "tensorflow-write", folder, images)


@pytest.mark.parametrize("kind", ["plain", "gzip", "zlib", "protobuf"])
def test_drawbar_reads_what_tensorflow_wrote(written: tuple[Path, list[Row]], kind: str) -> None:
    folder, rows = written[0] / kind, [row for row in written[1] if row["set"] == kind]
    faults: list[Fault] = []
    summary = check_set(Origin(url=str(folder)), sample=1.0, on_fault=faults.append)
    assert faults == []
    assert (summary.records, summary.decoded) == (60, 60)
    assert summary.compressed_shards == (2 if kind in ("gzip", "zlib") else 0)
    # By the training input, for one epoch: every record once, and what is in it.
    expected = sorted((row["shard"], row["encoded"], row["label"], row["boxes"]) for row in rows)
    with loader_over(folder, batch_size=10, num_classes=7, shuffle_buffer=0, request_bytes=65536) as loader:
        got = []
        for _ in range(6):
            batch = loader.next_batch(timeout_s=30)
            got += [row_of(record.key, record.payload) for record in batch.records]
            loader.recycle(batch)
    assert sorted((row["shard"], row["encoded"], row["label"], row["boxes"]) for row in got) == expected
    assert [row["features"]["image/object/bbox/xmin"] == row["boxes"][0] for row in got] == [True] * 60
