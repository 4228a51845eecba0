"""Bounding boxes of ImageNet, from the annotation XML tree, a tar of it, or a CSV.

They are divided by the size that the annotator saw, which is not always the file's; swapped where min and max are
reversed; clamped to 0..1; dropped where nothing is left. How many were read, and each of the last three, is counted.
"""

from __future__ import annotations

import csv
import os
import struct
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from drawbar.dataset.archive import TarReader, looks_like_tar
from drawbar.dataset.folder import refuse_url
from drawbar.errors import DataError, InputError

_FLOATS = struct.Struct("=4f")
_LARGEST_RELATIVE = 2.0
"""Annotators draw a little beyond an image; a coordinate of more is no relative one."""
_REPORT_EVERY = 1000


@dataclass
class Boxes:
    """By image name without folder and suffix."""

    of_image: dict[str, bytes] = field(default_factory=dict)
    """xmin, ymin, xmax, ymax of each, as native 4-byte floats."""
    read: int = 0
    swapped: int = 0
    clamped: int = 0
    """Reached out of the image, and were cut at its edge."""
    dropped: int = 0

    def add(self, image: str, sides: tuple[float, float, float, float], width: float = 1, height: float = 1) -> None:
        """One box: xmin, ymin, xmax, ymax in units of which the image has `width` and `height`."""
        xmin, ymin, xmax, ymax = sides
        self.read += 1
        if xmin > xmax or ymin > ymax:
            self.swapped += 1
            xmin, xmax = sorted((xmin, xmax))
            ymin, ymax = sorted((ymin, ymax))
        if width <= 0 or height <= 0:
            self.dropped += 1
            return
        reaches_out = xmin < 0 or ymin < 0 or xmax > width or ymax > height
        xmin, xmax = (min(max(side / width, 0.0), 1.0) for side in (xmin, xmax))
        ymin, ymax = (min(max(side / height, 0.0), 1.0) for side in (ymin, ymax))
        if not (xmin < xmax and ymin < ymax):  # so, as one may be no number
            self.dropped += 1
            return
        self.clamped += reaches_out
        self.of_image[image] = self.of_image.get(image, b"") + _FLOATS.pack(xmin, ymin, xmax, ymax)

    def notes(self) -> dict[str, int]:
        return {
            "boxes_read": self.read,
            "boxes_swapped": self.swapped,
            "boxes_clamped": self.clamped,
            "boxes_dropped": self.dropped,
        }


def read_boxes(path: Path, listed: Callable[[int], None] = lambda boxes: None) -> Boxes:
    """From a folder of XML files at any depth, a tar of them (compressed or not), or a CSV.

    CSV lines are `file,xmin,ymin,xmax,ymax` with relative coordinates, or with `,width,height` behind them pixels of an
    image of that size. `listed` is told how many boxes were read so far. Raises InputError for what is none of these,
    and for a damaged file, naming the place.
    """
    refuse_url(path)
    boxes = Boxes()
    reported = 0
    try:
        for _ in _read(path, boxes):
            if boxes.read - reported >= _REPORT_EVERY:
                reported = boxes.read
                listed(reported)
    except OSError as error:
        raise InputError(f"cannot read the boxes {path}: {error.strerror or error}") from None
    except (DataError, EOFError, tarfile.TarError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the boxes {path}: {error}") from None
    if not boxes.read:
        raise InputError(f"no boxes in {path}", hint="a folder or tar of annotation XML files, or a CSV")
    return boxes


def _read(path: Path, boxes: Boxes) -> Iterator[None]:
    """Yields after every file or line."""
    if path.is_dir():
        for name, text in _tree_files(path):
            _add_xml(boxes, name, text)
            yield
        return
    with path.open("rb") as file:
        plain_tar = looks_like_tar(file.fileno())
        if plain_tar or tarfile.is_tarfile(path):
            for name, text in _tar_files(file.fileno()) if plain_tar else _compressed_tar_files(path):
                _add_xml(boxes, name, text)
                yield
            return
    with path.open(newline="", encoding="utf-8-sig") as lines:
        for number, row in enumerate(csv.reader(lines), start=1):
            _add_row(boxes, row, number)
            yield


def _tree_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for where, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".xml"):
                yield name, Path(where, name).read_bytes()


def _tar_files(descriptor: int) -> Iterator[tuple[str, bytes]]:
    for member in TarReader(descriptor).members():
        if member.name.endswith(".xml"):
            yield member.name, os.pread(descriptor, member.size_bytes, member.offset)


def _compressed_tar_files(path: Path) -> Iterator[tuple[str, bytes]]:
    # Not as a stream ("r|*"): that takes a truncated gzip file for a short one.
    with tarfile.open(path, "r:*") as tar:
        for member in tar:
            tar.members.clear()  # type: ignore[attr-defined]  # it would keep half a million
            content = tar.extractfile(member) if member.isfile() and member.name.endswith(".xml") else None
            if content is not None:
                yield member.name, content.read()


def _add_xml(boxes: Boxes, name: str, text: bytes) -> None:
    """One annotation. Its image is that of the XML file's own name: what files say inside is not always right."""
    try:
        root = ElementTree.fromstring(text)
        width, height = (float(root.findtext(f"size/{side}", "")) for side in ("width", "height"))
        for box in root.iterfind("object/bndbox"):
            xmin, ymin, xmax, ymax = (float(box.findtext(side, "")) for side in ("xmin", "ymin", "xmax", "ymax"))
            boxes.add(_stem(name), (xmin, ymin, xmax, ymax), width, height)
    except (ElementTree.ParseError, ValueError) as error:
        raise DataError(f"{name} is no annotation: {error}") from None


def _add_row(boxes: Boxes, row: list[str], number: int) -> None:
    if not row or (number == 1 and row[1:2] == ["xmin"]):  # a header
        return
    try:
        if len(row) not in (5, 7):
            raise ValueError(f"{len(row)} columns")
        values = [float(value) for value in row[1:]]
    except ValueError as error:
        raise DataError(
            f"line {number}: {error}; expected file,xmin,ymin,xmax,ymax, with pixels also width,height"
        ) from None
    xmin, ymin, xmax, ymax = values[:4]
    if len(values) == 4 and max(map(abs, values)) > _LARGEST_RELATIVE:
        raise DataError(
            f"line {number}: {max(values):g} is no relative coordinate; pixels need the annotated size: "
            "file,xmin,ymin,xmax,ymax,width,height"
        )
    width, height = values[4:] if len(values) == 6 else (1.0, 1.0)
    boxes.add(_stem(row[0]), (xmin, ymin, xmax, ymax), width, height)


def _stem(name: str) -> str:
    return os.path.splitext(name.rpartition("/")[2])[0]
