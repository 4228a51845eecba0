"""Which annotations belong to which image of a COCO JSON, as byte spans in that file: a few bytes an annotation.

One pass over the file, whatever its order of keys, checks what can be checked without the images. The index is plain
columns, so that it pickles small; a worker reads the spans of its images from the file again.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drawbar.dataset import coco_mask
from drawbar.dataset.coco_json import Element, JsonFile
from drawbar.errors import DataError, InputError

Progress = Callable[[int, int], None]
"""Bytes read, bytes in all."""

EMPTY_BOX = "no width or no height"
OUTSIDE_BOX = "reaches outside the image"

_LAYOUT_HINT = "expected COCO's instances_*.json: an object with the arrays images, annotations and categories"


@dataclass(frozen=True)
class Spans:
    """Pieces of a file, grouped by image: those of image `row` are number `first[row]` to `first[row + 1]`."""

    first: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int32]

    def of(self, row: int) -> Iterator[tuple[int, int]]:
        """Byte offset and size of each."""
        part = slice(int(self.first[row]), int(self.first[row + 1]))
        return zip(self.starts[part].tolist(), self.sizes[part].tolist(), strict=True)


@dataclass(frozen=True, kw_only=True)
class FileState:
    """Which file the spans are of."""

    path: Path
    size_bytes: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class CocoIndex:
    file: FileState
    names: list[str]
    """File names of the images, sorted; everything else that is by image is in this order."""
    image_ids: NDArray[np.int64]
    widths: NDArray[np.int32]
    heights: NDArray[np.int32]
    category_ids: tuple[int, ...]
    """Sorted; label 1 is the first."""
    category_names: tuple[str, ...]
    objects: Spans
    labels: NDArray[np.int32]
    """1..N, of each object."""
    has_masks: bool
    """Whether any annotation has a segmentation."""
    dropped: dict[str, list[int]]
    """Ids of annotations left out for their boxes, by reason."""
    faults: list[str]
    """What else is wrong, a line each; the image or annotation in question is left out."""

    def labels_of(self, row: int) -> list[int]:
        labels: list[int] = self.labels[self.objects.first[row] : self.objects.first[row + 1]].tolist()
        return labels


def index_instances(path: Path, progress: Progress = lambda done, total: None) -> CocoIndex:
    """Raises InputError for what is no instances file, DataError naming the byte offset for damaged JSON."""
    found = _Found()
    take = {"images": found.image, "annotations": found.object, "categories": found.category}
    state, keys = _walk(path, take, progress)
    for key in ("images", "annotations", "categories"):
        if key not in keys:
            raise InputError(f"{path} has no {key!r}", hint=_LAYOUT_HINT)
    if not found.names:
        raise InputError(f"{path} lists no usable image" + _first(found.faults), hint=_LAYOUT_HINT)
    return _assemble(state, found)


def index_captions(path: Path, instances: CocoIndex, progress: Progress = lambda done, total: None) -> CaptionIndex:
    """Captions of the images of `instances`; those of other images are counted and left out. Raises as above."""
    image_ids, starts, sizes = array("q"), array("q"), array("i")
    faults: list[str] = []

    def caption(element: Element) -> None:
        try:
            image_id = _whole(element.value, "image_id")
            if not isinstance(element.value.get("caption"), str):
                raise DataError("no text")
        except DataError as error:
            faults.append(f"caption at byte offset {element.start}: {error.message}")
            return
        image_ids.append(image_id)
        starts.append(element.start)
        sizes.append(element.size_bytes)

    state, keys = _walk(path, {"annotations": caption}, progress)
    if "annotations" not in keys:
        raise InputError(f"{path} has no 'annotations'", hint="expected COCO's captions_*.json")
    rows = _rows(instances.image_ids, np.array(image_ids, np.int64))
    known = np.flatnonzero(rows >= 0)
    spans = _group(rows[known], np.array(starts, np.int64)[known], np.array(sizes, np.int32)[known], instances)
    return CaptionIndex(state, spans, len(rows) - len(known), faults)


@dataclass(frozen=True)
class CaptionIndex:
    file: FileState
    captions: Spans
    num_unknown: int
    """Captions of images that the instances file does not list."""
    faults: list[str]


# The pass


def _walk(path: Path, take: Mapping[str, Callable[[Element], None]], progress: Progress) -> tuple[FileState, list[str]]:
    """Hands each element of the arrays named in `take` over; returns which keys the file has."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    walk = JsonFile(path)
    for element in walk.elements(lambda done: progress(done, stat.st_size)):
        if element.key in take:
            take[element.key](element)
    state = FileState(path=path, size_bytes=stat.st_size, mtime_ns=stat.st_mtime_ns, sha256=walk.sha256)
    return state, walk.keys


@dataclass
class _Found:
    """Columns in the file's order."""

    names: list[str] = field(default_factory=list)
    image_ids: array[int] = field(default_factory=lambda: array("q"))
    widths: array[int] = field(default_factory=lambda: array("i"))
    heights: array[int] = field(default_factory=lambda: array("i"))
    categories: dict[int, str] = field(default_factory=dict)
    ids: array[int] = field(default_factory=lambda: array("q"))
    object_images: array[int] = field(default_factory=lambda: array("q"))
    object_categories: array[int] = field(default_factory=lambda: array("q"))
    boxes: array[float] = field(default_factory=lambda: array("d"))
    masked: array[int] = field(default_factory=lambda: array("b"))
    starts: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("i"))
    faults: list[str] = field(default_factory=list)

    def image(self, element: Element) -> None:
        try:
            value = element.text()
            image_id = _whole(value, "id")
            width, height = (_whole(value, key, 1, 1 << 20) for key in ("width", "height"))
            name = _safe_name(value.get("file_name"))
        except DataError as error:
            self._fault("image", element, error)
            return
        self.names.append(name)
        self.image_ids.append(image_id)
        self.widths.append(width)
        self.heights.append(height)

    def category(self, element: Element) -> None:
        try:
            value = element.text()
            category_id = _whole(value, "id", 0, (1 << 31) - 1)
            name = value.get("name")
            if not isinstance(name, str):
                raise DataError(f"name is {_shown(name)}")
            if category_id in self.categories:
                raise DataError(f"the id comes twice, for {self.categories[category_id]!r} and {name!r}")
        except DataError as error:
            self._fault("category", element, error)
            return
        self.categories[category_id] = name

    def object(self, element: Element) -> None:
        value = element.value
        try:
            row = [_whole(value, key) for key in ("id", "image_id", "category_id")]
            if _crowd(value) not in (0, 1):
                raise DataError(f"iscrowd is {_shown(value.get('iscrowd'))}; expected 0 or 1")
            box = _numbers(value.get("bbox"), "bbox")
            _area(value, box)
        except DataError as error:
            self._fault("annotation", element, error)
            return
        for column, number in zip((self.ids, self.object_images, self.object_categories), row, strict=True):
            column.append(number)
        self.boxes.extend(box)
        self.masked.append(coco_mask.is_segmentation(value.get("segmentation")))
        self.starts.append(element.start)
        self.sizes.append(element.size_bytes)

    def _fault(self, what: str, element: Element, error: DataError) -> None:
        known = element.value.get("id") if isinstance(element.value, dict) else None
        which = f"{what} {known}" if type(known) is int else f"{what} at byte offset {element.start}"
        self.faults.append(f"{which}: {error.message}")


def object_fields(value: Any) -> tuple[list[float], int, float]:
    """Box (x, y, width, height in pixels), crowd flag and area of an annotation that the index took."""
    box = _numbers(value["bbox"], "bbox")
    return box, _crowd(value), _area(value, box)


def _crowd(value: dict[str, Any]) -> int:
    crowd = value.get("iscrowd", 0)
    return int(crowd) if isinstance(crowd, int) else -1


def _area(value: dict[str, Any], box: Sequence[float]) -> float:
    """The box's where the set has none, as sets of boxes alone do."""
    return _numbers([value["area"]], "area", 1)[0] if "area" in value else box[2] * box[3]


def _whole(value: Any, key: str, least: int = -(1 << 63), most: int = (1 << 63) - 1) -> int:
    number = value.get(key) if isinstance(value, dict) else None
    if type(number) is not int or not least <= number <= most:
        raise DataError(f"{key} is {_shown(number)}; expected a whole number" + (f" from {least}" if least > 0 else ""))
    return number


def _numbers(value: Any, key: str, count: int = 4) -> list[float]:
    if isinstance(value, list) and len(value) == count:
        try:
            numbers = [float(number) for number in value if type(number) in (int, float)]
        except OverflowError:
            numbers = []
        if len(numbers) == count and all(map(math.isfinite, numbers)):
            return numbers
    raise DataError(f"{key} is {_shown(value)}; expected {count} numbers" if count > 1 else f"{key} is {_shown(value)}")


def _safe_name(name: Any) -> str:
    """A path below the images folder, whoever wrote the file."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise DataError(f"file_name is {_shown(name)}")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(f"file_name {_shown(name)} leads out of the images folder")
    return str(path)


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    return repr(value)[:40]


def _first(faults: Sequence[str]) -> str:
    return f": {faults[0]}" if faults else ""


# Sorting it out


def _assemble(state: FileState, found: _Found) -> CocoIndex:
    order = _kept_images(found)
    names = [found.names[number] for number in order]
    image_ids = np.array(found.image_ids, np.int64)[order]
    widths, heights = np.array(found.widths, np.int32)[order], np.array(found.heights, np.int32)[order]
    category_ids = tuple(sorted(found.categories))
    ids = np.array(found.ids, np.int64)
    rows = _rows(image_ids, np.array(found.object_images, np.int64))
    labels = _rows(np.array(category_ids, np.int64), np.array(found.object_categories, np.int64)) + 1
    good = _sound(found, ids, rows, labels)
    has_masks = any(found.masked)
    if has_masks:
        unmasked = good & ~np.array(found.masked, bool)
        found.faults += [f"annotation {ids[number]}: no segmentation" for number in np.flatnonzero(unmasked)]
        good &= ~unmasked
    dropped = _bad_boxes(np.array(found.boxes, np.float64).reshape(-1, 4), good, rows, widths, heights)
    for numbers in dropped.values():
        good[numbers] = False
    kept = np.flatnonzero(good)
    kept = kept[np.argsort(rows[kept], kind="stable")]
    starts, sizes = np.array(found.starts, np.int64)[kept], np.array(found.sizes, np.int32)[kept]
    return CocoIndex(
        file=state,
        names=names,
        image_ids=image_ids,
        widths=widths,
        heights=heights,
        category_ids=category_ids,
        category_names=tuple(found.categories[category] for category in category_ids),
        objects=Spans(_offsets(rows[kept], len(names)), starts, sizes),
        labels=labels[kept].astype(np.int32),
        has_masks=has_masks,
        dropped={reason: ids[numbers].tolist() for reason, numbers in dropped.items()},
        faults=found.faults,
    )


def _kept_images(found: _Found) -> list[int]:
    """Numbers of the images in the order of their names, without those whose id or name was there before."""
    seen_ids: set[int] = set()
    seen_names: set[str] = set()
    kept = []
    for number, (image_id, name) in enumerate(zip(found.image_ids, found.names, strict=True)):
        if image_id in seen_ids:
            found.faults.append(f"image {image_id}: the id comes twice")
        elif name in seen_names:
            found.faults.append(f"image {image_id}: the file name {name!r} comes twice")
        else:
            kept.append(number)
            seen_names.add(name)
        seen_ids.add(image_id)
    return sorted(kept, key=lambda number: found.names[number])


def _sound(
    found: _Found, ids: NDArray[np.int64], rows: NDArray[np.int64], labels: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which annotations have an id of their own, a known image and a known category; the others are noted."""
    order = np.argsort(ids, kind="stable")
    again = np.zeros(len(ids), bool)
    again[order[1:]] = ids[order[1:]] == ids[order[:-1]]
    for reason, where, column in (
        ("the id comes twice", again, None),
        ("unknown image", ~again & (rows < 0), found.object_images),
        ("unknown category", ~again & (rows >= 0) & (labels < 1), found.object_categories),
    ):
        for number in np.flatnonzero(where):
            value = "" if column is None else f" {column[number]}"
            found.faults.append(f"annotation {ids[number]}: {reason}{value}")
    good: NDArray[np.bool_] = ~again & (rows >= 0) & (labels >= 1)
    return good


def _bad_boxes(
    boxes: NDArray[np.float64],
    good: NDArray[np.bool_],
    rows: NDArray[np.int64],
    widths: NDArray[np.int32],
    heights: NDArray[np.int32],
) -> dict[str, NDArray[np.int64]]:
    """By TensorFlow's rule, which lets no rounding pass, and for the sides left and above too."""
    safe = np.where(good, rows, 0)
    x, y, width, height = boxes.T
    empty = good & ((width <= 0) | (height <= 0))
    inside = (x >= 0) & (y >= 0) & (x + width <= widths[safe]) & (y + height <= heights[safe])
    return {EMPTY_BOX: np.flatnonzero(empty), OUTSIDE_BOX: np.flatnonzero(good & ~empty & ~inside)}


def _rows(known: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each wanted value stands among the known ones; -1 for none."""
    if not len(known):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(known)
    places = np.searchsorted(known, wanted, sorter=order)
    rows = order[np.minimum(places, len(known) - 1)]
    return np.where(known[rows] == wanted, rows, -1).astype(np.int64)


def _offsets(rows: NDArray[np.int64], num_images: int) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=num_images)))).astype(np.int64)


def _group(rows: NDArray[np.int64], starts: NDArray[np.int64], sizes: NDArray[np.int32], instances: CocoIndex) -> Spans:
    order = np.argsort(rows, kind="stable")
    return Spans(_offsets(rows, len(instances.names)), starts[order], sizes[order])
