"""Files beside the shards whose names no store can give; and the places that `data pack coco` takes."""

from __future__ import annotations

import os
from pathlib import Path

import obstore
import pytest

from drawbar.config import Storage
from drawbar.dataset.check import check_set
from drawbar.dataset.listing import list_shards
from drawbar.dataset.walk import Fault, Origin
from drawbar.storage.stores import open_place
from tests.drawbar_process import drawbar
from tests.small_set import write_set

# Names that no store can give


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"train-\xff\xfe", "train-\\xff\\xfe"),
        (b"train\n-1", "train\\n-1"),
        (b"a\x7fb\xc3\xa9", "a\\x7fb\u00e9"),
        (b".hidden\xff", None),
        (b"notes\xff.txt", None),
    ],
)
def test_a_file_beside_the_shards_with_an_odd_name(
    tmp_path: Path, manifest: bool, name: bytes, shown: str | None
) -> None:
    paths = write_set(tmp_path, manifest=manifest)
    plain = tmp_path / "caf\u00e9 %41#"  # odd, but a name
    plain.write_bytes(paths[0].read_bytes())
    Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).write_bytes(b"x")
    place = open_place(str(tmp_path), None, None, Storage())
    listing = list_shards(place.store, place.prefix)
    names = {path.name for path in paths} | (set() if manifest else {plain.name})
    assert {shard.name for shard in listing.shards} == names
    assert set(listing.ignored) == ({plain.name} if manifest else set()) | ({shown} if shown else set())
    # Its ETags are the store's own, by which a run notices a shard that is replaced.
    assert {shard.e_tag for shard in listing.shards} == {
        obstore.head(place.store, shard.key)["e_tag"] for shard in listing.shards
    }
    faults: list[Fault] = []
    check_set(Origin(url=str(tmp_path)), on_fault=faults.append, schema="none")
    odd = [fault for fault in faults if fault.shard == shown]
    assert [fault.reason[:8] for fault in odd] == (["not read"] if shown else [])


def test_commands_go_on_beside_odd_names(tmp_path: Path) -> None:
    write_set(tmp_path)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/train-\xff")).write_bytes(b"x")
    assert drawbar("data", "stat", tmp_path).code == 0
    checked = drawbar("data", "check", tmp_path)
    assert checked.code == 4
    assert "train-\\xff: not read: a name with control characters or other bytes than UTF-8" in checked.stdout


# COCO without a source


def test_coco_by_its_annotations_alone(tmp_path: Path) -> None:
    scenes = tmp_path / "scenes"
    made = drawbar("data", "make", "coco-like", scenes, "--images", "6", "--size", "160", "--workers", "1")
    assert made.code == 0, made.stderr
    (annotations,) = scenes.glob("annotations/instances_*.json")
    (images,) = (path for path in scenes.iterdir() if path.name.startswith("train"))
    options = ("--shards", "1", "--workers", "1")
    alone = drawbar(
        "data", "pack", "coco", "--annotations", annotations, "--images", images, tmp_path / "alone", *options
    )
    assert alone.code == 0, alone.stderr
    assert drawbar("data", "pack", "coco", scenes, tmp_path / "by-folder", *options).code == 0
    (one,) = (tmp_path / "alone").glob("train-*")
    assert one.read_bytes() == (tmp_path / "by-folder" / one.name).read_bytes()
    # Beside the annotations, as with a source.
    beside = drawbar("data", "pack", "coco", tmp_path / "beside", "--annotations", annotations, *options)
    assert beside.code == 0, beside.stderr


@pytest.mark.parametrize("places", [("dest",), ("source", "more", "dest")])
def test_coco_without_a_source_or_with_several_is_refused(tmp_path: Path, places: tuple[str, ...]) -> None:
    finished = drawbar("data", "pack", "coco", *(tmp_path / place for place in places))
    assert finished.code == 2
    assert "expected SOURCE and DEST" in finished.error_line
    assert not (tmp_path / "dest").exists()
