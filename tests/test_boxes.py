"""Box files that are damaged, ambiguous or no files: refused in one line, never taken for a set with fewer boxes."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from drawbar.dataset.boxes import read_boxes
from drawbar.dataset.imagenet import ImageNetFiles, scan_imagenet
from drawbar.dataset.labelled import LabelledItem
from drawbar.errors import InputError
from tests.image_files import jpeg

FIRST, SECOND = "n01440764", "n01443537"


def annotation(ymax: float) -> bytes:
    size = "<size><width>100</width><height>100</height></size>"
    box = f"<xmin>10</xmin><ymin>10</ymin><xmax>20</xmax><ymax>{ymax}</ymax>"
    return f"<annotation>{size}<object><bndbox>{box}</bndbox></object></annotation>".encode()


def tar_bytes(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


MANY = tar_bytes({f"{FIRST}/{number}.xml": annotation(30 + number % 60) for number in range(200)})
COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_boxes(path)
    assert str(path) in caught.value.message
    return caught.value.message


def written(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize("kind", COMPRESS)
def test_compressed_tars(tmp_path: Path, kind: str) -> None:
    boxes = read_boxes(written(tmp_path / f"boxes.tar.{kind}", COMPRESS[kind](MANY)))
    assert boxes.read == 200
    assert np.frombuffer(boxes.take(FIRST, f"{FIRST}/7.JPEG"), "f4") == pytest.approx([0.1, 0.1, 0.2, 0.37])


def test_a_wrong_checksum_behind_the_last_member_is_found(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(MANY))
    data[-6] ^= 1
    assert "CRC check failed" in refusal(written(tmp_path / "boxes.tar.gz", bytes(data)))


@pytest.mark.parametrize("kind", COMPRESS)
def test_any_damage_of_a_compressed_tar_is_found(tmp_path: Path, kind: str) -> None:
    whole = COMPRESS[kind](MANY)
    for at in range(16, len(whole) - 1, len(whole) // 40):
        data = bytearray(whole)
        data[at] ^= 0x55
        refusal(written(tmp_path / "boxes", bytes(data)))
        refusal(written(tmp_path / "boxes", whole[:at]))


def test_bytes_behind_the_end_are_refused(tmp_path: Path) -> None:
    refusal(written(tmp_path / "a.tar.gz", gzip.compress(MANY) + b"garbage"))
    second = tar_bytes({f"{SECOND}/1.xml": annotation(50)})
    for data in (gzip.compress(MANY) + gzip.compress(second), gzip.compress(MANY + second)):
        assert "more behind its end" in refusal(written(tmp_path / "b.tar.gz", data))
    read_boxes(written(tmp_path / "c.tar.gz", gzip.compress(MANY) + bytes(512)))  # padding, as of tapes


def test_a_hole_in_a_compressed_tar_is_refused(tmp_path: Path) -> None:
    for hole in (bytes(512), b"?" * 512):
        data = MANY[: 40 * 1024] + hole + MANY[40 * 1024 + 512 :]
        refusal(written(tmp_path / "boxes.tar.gz", gzip.compress(data)))
    for end in (len(MANY.rstrip(b"\0")) // 512 * 512 + 512, 100 * 1024, 100 * 1024 + 100):
        refusal(written(tmp_path / "boxes.tar.gz", gzip.compress(MANY[:end])))


def test_links_in_a_compressed_tar_are_not_lost(tmp_path: Path) -> None:
    for kind in (tarfile.LNKTYPE, tarfile.SYMTYPE):
        with tarfile.open(tmp_path / "boxes.tar.gz", "w:gz") as tar:
            for name in ("1.xml", "2.xml"):
                member = tarfile.TarInfo(name)
                member.size = len(annotation(30))
                if name == "2.xml":
                    member.type, member.linkname, member.size = kind, "1.xml", 0
                tar.addfile(member, io.BytesIO(annotation(30)))
        assert "2.xml is no file in the tar" in refusal(tmp_path / "boxes.tar.gz")


# Which image boxes belong to


@pytest.fixture
def two_classes(tmp_path: Path) -> Path:
    """The same file names in both."""
    for synset in (FIRST, SECOND):
        for number in range(2):
            written(tmp_path / "images" / synset / f"{number:04d}.JPEG", jpeg(number))
    return tmp_path / "images"


def boxes_of(source: Path, boxes: Path) -> dict[str, list[float]]:
    found = {}
    for item in scan_imagenet(source, ImageNetFiles(boxes=boxes)).items():
        assert isinstance(item, LabelledItem)
        if item.boxes:
            found[item.path] = [round(float(side), 4) for side in np.frombuffer(item.boxes, "f4")]
    return found


def test_equal_names_are_told_apart_by_their_class_folders(two_classes: Path, tmp_path: Path) -> None:
    expected = {f"{FIRST}/0000.JPEG": [0.1, 0.1, 0.2, 0.3], f"{SECOND}/0000.JPEG": [0.1, 0.1, 0.2, 0.6]}
    files = {f"{FIRST}/0000.xml": annotation(30), f"{SECOND}/0000.xml": annotation(60)}
    for name, data in files.items():
        written(tmp_path / "tree" / "boxes" / name, data)
    plain = written(tmp_path / "boxes.tar", tar_bytes(files))
    packed = written(tmp_path / "boxes.tar.gz", gzip.compress(plain.read_bytes()))
    table = written(tmp_path / "a.csv", f"{FIRST}/0000.JPEG,.1,.1,.2,.3\n{SECOND}/0000.JPEG,.1,.1,.2,.6\n")
    for boxes in (tmp_path / "tree", plain, packed, table):
        assert boxes_of(two_classes, boxes) == expected


def test_names_without_a_class_that_two_images_have_are_refused(two_classes: Path, tmp_path: Path) -> None:
    table = written(tmp_path / "a.csv", "0000.JPEG,.1,.1,.2,.3\n")
    written(tmp_path / "tree" / "0000.xml", annotation(30))
    for boxes in (table, tmp_path / "tree"):
        with pytest.raises(InputError, match=f"boxes of 0000 may be of {FIRST}/0000.JPEG or of {SECOND}/0000.JPEG"):
            scan_imagenet(two_classes, ImageNetFiles(boxes=boxes))
    both = written(tmp_path / "both.csv", f"x.JPEG,.1,.1,.2,.3\n{FIRST}/x.JPEG,.1,.1,.2,.3\n")
    written(two_classes / FIRST / "x.JPEG", jpeg())
    with pytest.raises(InputError, match=rf"boxes of x may be of {FIRST}/x.JPEG, and so may those of {FIRST}/x"):
        scan_imagenet(two_classes, ImageNetFiles(boxes=both))


def test_a_second_annotation_of_an_image_is_refused(tmp_path: Path) -> None:
    for folder in ("bbox", "bbox_v2"):
        written(tmp_path / "tree" / folder / FIRST / "1.xml", annotation(30))
    assert f"a second annotation of {FIRST}/1" in refusal(tmp_path / "tree")


# What is no annotation


def test_odd_text(tmp_path: Path) -> None:
    assert "line 2: field larger than field limit" in refusal(
        written(tmp_path / "long.csv", f"a,0,0,1,1\n{'x' * 140_000},0,0,1,1\n")
    )
    written(tmp_path / "tree" / "1.xml", b'<?xml version="1.0" encoding="klingon"?>' + annotation(30))
    assert "1.xml is no annotation: unknown encoding" in refusal(tmp_path / "tree")


@pytest.mark.timeout(20)
def test_what_is_no_file_is_never_opened(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    written(tree / "0.xml", annotation(30))
    for make in (os.mkfifo, lambda path: os.symlink("nowhere", path), lambda path: os.symlink(path, path)):
        make(tree / "1.xml")
        assert "1.xml is no file" in refusal(tree)
        (tree / "1.xml").unlink()
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in refusal(tmp_path / "pipe")


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    written(tmp_path / "elsewhere" / FIRST / "1.xml", annotation(30))
    (tree / FIRST).symlink_to(tmp_path / "elsewhere" / FIRST)
    (tmp_path / "elsewhere" / FIRST / "again").symlink_to(tree)
    boxes = read_boxes(tree)
    assert (boxes.read, list(boxes.of_image)) == (1, [f"{FIRST}/1"])
