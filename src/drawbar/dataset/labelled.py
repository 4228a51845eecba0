"""Images with one label each: how they are read, from files or out of tar archives, and become Examples.

What is in the set and which label an image has belongs to `folder` and `imagenet`, which list them.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drawbar.dataset.example import encode_example
from drawbar.dataset.items import CheckedImage, Item
from drawbar.errors import DataError, InputError

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Any case. Of files that lie in no class folder: they say which are meant as images, never what is in them."""
OTHER_SUFFIXES = (
    ".csv",
    ".db",
    ".htm",
    ".html",
    ".ini",
    ".json",
    ".log",
    ".mat",
    ".md",
    ".txt",
    ".xml",
    ".yaml",
    ".yml",
)
"""Any case. Of files that come with a set and are no images of it; everything else in a class folder is one, if a bad
one."""

DANGLING_LINK, LINK_LOOP, NO_REGULAR_FILE = -2, -3, -4
UNREADABLE = {
    DANGLING_LINK: "dangling link",
    LINK_LOOP: "link in a circle",
    NO_REGULAR_FILE: "no regular file",
}
"""Why there are no bytes where an image should be, by what its item has for an archive: it is a bad one, not none."""

_MAX_OPEN = 64
_NO_FLOATS = array("f")
_NO_INTS = array("q")
_CHANGED = "pack a source that nobody changes; finished shards are kept"


@dataclass(frozen=True, slots=True)
class LabelledItem(Item):
    label: int
    """1..N."""
    boxes: bytes = b""
    """xmin, ymin, xmax, ymax of each, relative to the image, as native 4-byte floats: a set has a million of these."""
    archive: int = -1
    """Which of the source's archives it is in; -1: a file of its own; a key of `UNREADABLE`: no file."""
    offset: int = 0
    """In the archive, in bytes."""

    def __reduce__(self) -> tuple[Any, ...]:  # a third of the time of a dataclass's own
        fields = (self.path, self.size_bytes, self.label, self.boxes, self.archive, self.offset)
        return LabelledItem, fields


class LabelledSource:
    """A listed set; `items` sorted by path. See `items.Source`."""

    def __init__(
        self,
        *,
        root: str,
        labels: Sequence[str],
        items: Sequence[LabelledItem],
        texts: Mapping[str, str] | None = None,
        archives: Sequence[str] = (),
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """`root` is the folder that paths of files start from; `texts` gives classes a readable name."""
        self.labels = tuple(labels)
        self._root = root
        self._archives = tuple(archives)
        self._synsets = [os.fsencode(label) for label in labels]
        self._texts = [os.fsencode((texts or {}).get(label, label)) for label in labels]
        self._notes = dict(notes or {})
        self._items = items
        self._open: dict[int, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For workers: without the list, as they get the items of their shards, and without open files."""
        return self.__dict__ | {"_items": (), "_open": {}}

    def items(self) -> Sequence[Item]:
        return self._items

    def notes(self) -> Mapping[str, Any]:
        return self._notes

    def item_labels(self, item: Item) -> Sequence[int]:
        assert isinstance(item, LabelledItem)  # noqa: S101  our bug only
        return (item.label,)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for synset, text in zip(self._synsets, self._texts, strict=True):
            digest.update(b"%d %b %d %b\n" % (len(synset), synset, len(text), text))
        for item in self._items:
            name = os.fsencode(item.path)
            digest.update(b"%d %b %d %d %b\n" % (len(name), name, item.size_bytes, item.label, item.boxes))
        return digest.hexdigest()

    def read(self, item: Item) -> bytes:
        assert isinstance(item, LabelledItem)  # noqa: S101  our bug only
        if item.archive in UNREADABLE:
            raise DataError(UNREADABLE[item.archive])
        size = item.size_bytes
        try:
            if item.archive >= 0:
                data = os.pread(self._descriptor(item.archive), size, item.offset)
            else:
                data = _read_file(f"{self._root}/{item.path}", size + 1)
        except OSError as error:
            # Not a bad image: a disk that fails, or a folder that was moved, would make a set of nothing.
            raise InputError(f"{item.path} cannot be read: {error.strerror}", hint=_CHANGED) from None
        if len(data) != size:
            raise InputError(f"{item.path} was {size} bytes when it was listed, and is not any more", hint=_CHANGED)
        return data

    def _descriptor(self, archive: int) -> int:
        found = self._open.get(archive)
        if found is None:
            if len(self._open) >= _MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            found = self._open[archive] = os.open(self._archives[archive], os.O_RDONLY)
        return found

    def example(self, item: Item, image: CheckedImage) -> bytes:
        """With the 15 keys of `build_imagenet_data.py`; channels 3 and RGB also for grey files, as there."""
        assert isinstance(item, LabelledItem)  # noqa: S101  our bug only
        label = item.label
        sides = [_NO_FLOATS] * 4
        box_labels = _NO_INTS
        if item.boxes:
            values = array("f", item.boxes)
            sides = [values[side::4] for side in range(4)]
            box_labels = array("q", [label] * len(sides[0]))
        return encode_example(
            {
                "image/height": image.header.height,
                "image/width": image.header.width,
                "image/colorspace": b"RGB",
                "image/channels": 3,
                "image/class/label": label,
                "image/class/synset": self._synsets[label - 1],
                "image/class/text": self._texts[label - 1],
                "image/object/bbox/xmin": sides[0],
                "image/object/bbox/ymin": sides[1],
                "image/object/bbox/xmax": sides[2],
                "image/object/bbox/ymax": sides[3],
                "image/object/bbox/label": box_labels,
                "image/format": b"JPEG",
                "image/filename": os.fsencode(item.path.rpartition("/")[2]),
                "image/encoded": image.data,
            }
        )


def is_image(name: str) -> bool:
    """Of a file in a class folder."""
    return not name.startswith(".") and not name.lower().endswith(OTHER_SUFFIXES)


def is_image_outside(name: str) -> bool:
    """Of a file that lies in no class folder, where a README may lie too."""
    return not name.startswith(".") and name.lower().endswith(IMAGE_SUFFIXES)


def _read_file(path: str, size: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        data = os.read(descriptor, size)
        # Network file systems may return less than there is; the size listed plus one byte finds that out.
        while 0 < len(data) < size - 1 and (more := os.read(descriptor, size - len(data))):
            data += more
        return data
    finally:
        os.close(descriptor)
