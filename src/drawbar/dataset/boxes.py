"""Bounding boxes of ImageNet, from the annotation XML tree, a tar of it, or a CSV.

They are divided by the size that the annotator saw, which is not always the file's; swapped where min and max are
reversed; clamped to 0..1; dropped where nothing is left. How many were read, and each of the last three, is counted.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import os
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast
from xml.etree import ElementTree

from drawbar.dataset.archive import TarReader, looks_like_tar
from drawbar.dataset.folder import refuse_url
from drawbar.dataset.imagenet_labels import SYNSET
from drawbar.errors import DataError, InputError

_FLOATS = struct.Struct("=4f")
_LARGEST_RELATIVE = 2.0
"""Annotators draw a little beyond an image; a coordinate of more is no relative one."""
_REPORT_EVERY = 1000
_COMPRESSED: dict[bytes, Callable[[Path], object]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}
_TAR_BLOCK = 512
_READ_BYTES = 1 << 20


@dataclass
class Boxes:
    """By `key_of` the image's name."""

    of_image: dict[str, bytes] = field(default_factory=dict)
    """xmin, ymin, xmax, ymax of each, as native 4-byte floats."""
    read: int = 0
    swapped: int = 0
    clamped: int = 0
    """Reached out of the image, and were cut at its edge."""
    dropped: int = 0
    _taken: dict[str, str] = field(default_factory=dict)
    """Which image took the boxes of a key."""

    def take(self, synset: str, path: str) -> bytes:
        """The boxes of the image `path`, of class `synset`; empty where there are none.

        Raises InputError where they may be another image's: file names are unique in ImageNet, and not everywhere.
        """
        stem = _stem(path)
        found = b""
        for key in (f"{synset}/{stem}", stem):
            sides = self.of_image.get(key)
            if sides is None:
                continue
            other = self._taken.setdefault(key, path)
            if other != path or found:
                whose = (
                    f"of {other} or of {path}" if other != path else f"of {path}, and so may those of {synset}/{stem}"
                )
                raise InputError(
                    f"the boxes of {key} may be {whose}",
                    hint="name them by class folder and image, n01440764/0001, for each image once",
                )
            found = sides
        return found

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
    except (DataError, EOFError, tarfile.TarError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as error:
        raise InputError(f"cannot read the boxes {path}: {error}") from None
    if not boxes.read:
        raise InputError(f"no boxes in {path}", hint="a folder or tar of annotation XML files, or a CSV")
    return boxes


def _read(path: Path, boxes: Boxes) -> Iterator[None]:
    """Yields after every file or line."""
    if path.is_dir():
        yield from _add_xmls(boxes, _tree_files(path))
        return
    if path.exists() and not path.is_file():
        raise DataError("it is neither a file nor a folder")
    with path.open("rb") as file:
        begin = file.read(8)
        if looks_like_tar(file.fileno()):
            yield from _add_xmls(boxes, _tar_files(file.fileno()))
            return
    for magic, decompressed in _COMPRESSED.items():
        if begin.startswith(magic):
            with cast(BinaryIO, decompressed(path)) as content:
                yield from _add_xmls(boxes, _compressed_tar_files(content))
            return
    with path.open(newline="", encoding="utf-8-sig") as lines:
        rows = csv.reader(lines)
        try:
            for row in rows:
                _add_row(boxes, row, rows.line_num)
                yield
        except csv.Error as error:
            raise DataError(f"line {rows.line_num}: {error}") from None


def _tree_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Names with the folder before, and contents. Links are followed, each folder is read once."""
    seen: set[tuple[int, int]] = set()
    for where, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        status = os.stat(where)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders.sort()
        for name in sorted(names):
            if name.endswith(".xml"):
                path = Path(where, name)
                if not path.is_file():  # reading a pipe would never end
                    raise DataError(f"{path} is no file, or a link to none")
                yield f"{Path(where).name}/{name}", path.read_bytes()


def _raise(error: OSError) -> None:
    raise error


def _tar_files(descriptor: int) -> Iterator[tuple[str, bytes]]:
    for member in TarReader(descriptor).members():
        if member.name.endswith(".xml"):
            yield member.name, os.pread(descriptor, member.size_bytes, member.offset)


class _Watched(io.RawIOBase):
    """A stream that keeps what was read last: tarfile ends without a word at a block that is no header."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        self.last = self._stream.read(size)
        return self.last

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()


def _compressed_tar_files(stream: BinaryIO) -> Iterator[tuple[str, bytes]]:
    # Not as a stream ("r|*"): that takes a truncated gzip file for a short one.
    watched = _Watched(stream)
    with tarfile.open(fileobj=watched, mode="r:") as tar:
        for member in tar:
            tar.members.clear()  # type: ignore[attr-defined]  # it would keep half a million
            if not member.name.endswith(".xml") or member.isdir():
                continue
            content = tar.extractfile(member) if member.isfile() else None
            if content is None:
                raise DataError(f"{member.name} is no file in the tar, but a link or device")
            yield member.name, content.read()
        end = watched.last
    if len(end) < _TAR_BLOCK:
        raise DataError("truncated tar: no end-of-archive mark")
    # To the end of the compressed file, where its checksum is: only reading that compares it.
    while end:
        if end.count(0) != len(end):
            raise DataError("damaged tar: more behind its end")
        end = stream.read(_READ_BYTES)


def _add_xmls(boxes: Boxes, files: Iterator[tuple[str, bytes]]) -> Iterator[None]:
    there: set[str] = set()
    for name, text in files:
        key = key_of(name)
        if key in there:
            raise DataError(f"{name}: a second annotation of {key}")
        there.add(key)
        _add_xml(boxes, key, name, text)
        yield


def _add_xml(boxes: Boxes, key: str, name: str, text: bytes) -> None:
    """One annotation. Its image is that of the XML file's own name: what files say inside is not always right."""
    try:
        root = ElementTree.fromstring(text)
        width, height = (float(root.findtext(f"size/{side}", "")) for side in ("width", "height"))
        for box in root.iterfind("object/bndbox"):
            xmin, ymin, xmax, ymax = (float(box.findtext(side, "")) for side in ("xmin", "ymin", "xmax", "ymax"))
            boxes.add(key, (xmin, ymin, xmax, ymax), width, height)
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # LookupError: of an unknown encoding
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
    boxes.add(key_of(row[0]), (xmin, ymin, xmax, ymax), width, height)


def key_of(name: str) -> str:
    """The name without suffix, with the class folder where it has one: `n01440764/0001` of `a/n01440764/0001.xml`."""
    folder = name.rpartition("/")[0].rpartition("/")[2]
    return f"{folder}/{_stem(name)}" if SYNSET.fullmatch(folder) else _stem(name)


def _stem(name: str) -> str:
    return os.path.splitext(name.rpartition("/")[2])[0]
