"""Which annotations belong to which image of a COCO JSON, as byte spans in that file: a few bytes an annotation.

One pass over the file, whatever its order of keys, checks what can be checked without the images. The index is plain
columns, so that it pickles small; a worker reads the spans of its images from the file again.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drawbar.dataset import coco_mask
from drawbar.dataset.coco_fields import Fault, crowd_flag, fault_in, object_fields, safe_name, shown, text, whole
from drawbar.dataset.coco_json import Element, JsonFile
from drawbar.errors import DataError, InputError

Progress = Callable[[int, int], None]
"""Bytes read, bytes in all."""

EMPTY_BOX = "no width or no height"
OUTSIDE_BOX = "reaches outside the image"
BAD_MASK = "bad segmentation"

_NO_MASK = coco_mask.Extent(0, 0, 0, 0)
_MAX_INT = (1 << 63) - 1

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
    """Whether any annotation has a segmentation, and masks are wanted."""
    dropped: dict[str, list[int]]
    """Ids of annotations left out for their boxes, by reason."""
    faults: list[Fault]
    """What else is wrong; the image or annotation in question is left out."""
    num_annotations: int
    """In the file."""

    def labels_of(self, row: int) -> list[int]:
        labels: list[int] = self.labels[self.objects.first[row] : self.objects.first[row + 1]].tolist()
        return labels


def index_instances(path: Path, progress: Progress = lambda done, total: None, *, masks: bool = True) -> CocoIndex:
    """Without `masks`, segmentations are not looked at.

    Raises InputError for what is no instances file, or one whose annotations are all wrong; DataError naming the byte
    offset for damaged JSON.
    """
    found = _Found(masks)
    take = {"images": found.image, "annotations": found.object, "categories": found.category}
    state, keys = _walk(path, take, progress)
    for key in ("images", "annotations", "categories"):
        if key not in keys:
            raise InputError(f"{path} has no {key!r}", hint=_LAYOUT_HINT)
    return _assemble(state, found)


def index_captions(path: Path, instances: CocoIndex, progress: Progress = lambda done, total: None) -> CaptionIndex:
    """Captions of the images of `instances`; those of other images are counted and left out. Raises as above."""
    image_ids, starts, sizes = array("q"), array("q"), array("i")
    faults: list[Fault] = []

    def caption(element: Element) -> None:
        try:
            value = element.text()
            image_id = whole(value, "image_id")
            text(value.get("caption"), "caption")
        except DataError as error:
            faults.append(fault_in(element, "caption", error))
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
    faults: list[Fault]


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

    masks: bool
    """Whether segmentations are wanted."""
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
    """Whether there is a segmentation; the next four say what of, see `coco_mask.Extent`."""
    reaches: array[float] = field(default_factory=lambda: array("d"))
    mask_heights: array[int] = field(default_factory=lambda: array("i"))
    mask_widths: array[int] = field(default_factory=lambda: array("i"))
    mask_pixels: array[int] = field(default_factory=lambda: array("q"))
    starts: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("i"))
    faults: list[Fault] = field(default_factory=list)
    num_annotations: int = 0
    lost_images: set[int] = field(default_factory=set)
    """Ids of images that were left out."""
    has_masks: bool = False

    def image(self, element: Element) -> None:
        try:
            value = element.text()
            image_id = whole(value, "id")
            width, height = (whole(value, key, 1, 1 << 20) for key in ("width", "height"))
            name = safe_name(value.get("file_name"))
        except DataError as error:
            self.faults.append(fault_in(element, "image", error))
            known = element.value.get("id") if isinstance(element.value, dict) else None
            if type(known) is int:
                self.lost_images.add(known)
            return
        self.names.append(name)
        self.image_ids.append(image_id)
        self.widths.append(width)
        self.heights.append(height)

    def category(self, element: Element) -> None:
        try:
            value = element.text()
            category_id = whole(value, "id", 0, (1 << 31) - 1)
            name = text(value.get("name"), "name")
            if category_id in self.categories:
                raise DataError(f"the id comes twice, for {self.categories[category_id]!r} and {name!r}")
        except DataError as error:
            self.faults.append(fault_in(element, "category", error))
            return
        self.categories[category_id] = name

    def object(self, element: Element) -> None:
        self.num_annotations += 1
        kind = ""
        extent = _NO_MASK
        try:
            value = element.text()
            row = [whole(value, key) for key in ("id", "image_id", "category_id")]
            if crowd_flag(value) not in (0, 1):
                raise DataError(f"iscrowd is {shown(value.get('iscrowd'))}; expected 0 or 1")
            box, _, _ = object_fields(value)
            segmentation = value.get("segmentation")
            masked = self.masks and coco_mask.is_segmentation(segmentation)
            if masked:
                self.has_masks = True
                kind = BAD_MASK
                extent = coco_mask.measure(segmentation)
        except DataError as error:
            self.faults.append(fault_in(element, "annotation", error, kind))
            return
        for column, number in zip((self.ids, self.object_images, self.object_categories), row, strict=True):
            column.append(number)
        self.boxes.extend(box)
        self.masked.append(masked)
        self.reaches.append(extent.reach)
        self.mask_heights.append(extent.height)
        self.mask_widths.append(extent.width)
        self.mask_pixels.append(min(extent.pixels, _MAX_INT))
        self.starts.append(element.start)
        self.sizes.append(element.size_bytes)


def _first(faults: Sequence[Fault]) -> str:
    return f": {faults[0]}" if faults else ""


# Sorting it out


def _assemble(state: FileState, found: _Found) -> CocoIndex:
    order = _kept_images(found)
    if not order:
        raise InputError(f"{state.path} lists no usable image" + _first(found.faults), hint=_LAYOUT_HINT)
    names = [found.names[number] for number in order]
    image_ids = np.array(found.image_ids, np.int64)[order]
    widths, heights = np.array(found.widths, np.int32)[order], np.array(found.heights, np.int32)[order]
    category_ids = tuple(sorted(found.categories))
    ids = np.array(found.ids, np.int64)
    rows = _rows(image_ids, np.array(found.object_images, np.int64))
    labels = _rows(np.array(category_ids, np.int64), np.array(found.object_categories, np.int64)) + 1
    good = _sound(found, ids, rows, labels)
    if found.has_masks:
        good &= _fitting_masks(found, good, rows, widths, heights)
    dropped = _bad_boxes(np.array(found.boxes, np.float64).reshape(-1, 4), good, rows, widths, heights)
    for numbers in dropped.values():
        good[numbers] = False
    kept = np.flatnonzero(good)
    if found.num_annotations and not len(kept):
        reasons = ", ".join(f"{reason} x{count}" for reason, count in left_out(found.faults, dropped).items())
        raise InputError(f"{state.path}: none of its {found.num_annotations} annotations can be used: {reasons}")
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
        has_masks=found.has_masks,
        dropped={reason: ids[numbers].tolist() for reason, numbers in dropped.items()},
        faults=found.faults,
        num_annotations=found.num_annotations,
    )


def left_out(faults: Sequence[Fault], dropped: Mapping[str, Sized]) -> dict[str, int]:
    """How many annotations are not in the records, by reason."""
    counts = Counter(fault.kind for fault in faults if fault.what == "annotation")
    counts.update({reason: len(numbers) for reason, numbers in dropped.items() if len(numbers)})
    return dict(counts.most_common())


def _kept_images(found: _Found) -> list[int]:
    """Numbers of the images in the order of their names, without those whose name was there before, and without any
    whose id stands for several files: which one its annotations are of cannot be known."""
    name_of: dict[int, str] = {}
    ambiguous: dict[int, str] = {}
    for image_id, name in zip(found.image_ids, found.names, strict=True):
        if name_of.setdefault(image_id, name) != name:
            ambiguous[image_id] = f"the id comes twice, for {name_of[image_id]!r} and {name!r}"
    seen_names: set[str] = set()
    kept_ids: set[int] = set()
    kept = []
    for number, (image_id, name) in enumerate(zip(found.image_ids, found.names, strict=True)):
        if image_id in ambiguous:
            found.faults.append(Fault("image", f"{image_id}", ambiguous[image_id], "id twice", name))
        elif name in seen_names:
            reason = f"the file name {name!r} comes twice"
            found.faults.append(Fault("image", f"{image_id}", reason, "file name twice", name))
        else:
            kept.append(number)
            seen_names.add(name)
            kept_ids.add(image_id)
            continue
        if image_id not in kept_ids:
            found.lost_images.add(image_id)
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
            kind = reason
            if column is found.object_images and column[number] in found.lost_images:
                value, kind = f"{value}, which was left out", "image left out"
            found.faults.append(Fault("annotation", f"{ids[number]}", f"{reason}{value}", kind))
    good: NDArray[np.bool_] = ~again & (rows >= 0) & (labels >= 1)
    return good


def _fitting_masks(
    found: _Found,
    good: NDArray[np.bool_],
    rows: NDArray[np.int64],
    widths: NDArray[np.int32],
    heights: NDArray[np.int32],
) -> NDArray[np.bool_]:
    """Which annotations have a segmentation that fits their image; the others, of those that are good, are noted."""
    masked = np.array(found.masked, bool)
    for number in np.flatnonzero(good & ~masked).tolist():
        found.faults.append(Fault("annotation", f"{found.ids[number]}", "no segmentation", "no segmentation"))
    fits = masked.copy()
    columns = (found.reaches, found.mask_heights, found.mask_widths, found.mask_pixels)
    for number in np.flatnonzero(good & masked).tolist():
        image = int(rows[number])
        try:
            extent = coco_mask.Extent(*(column[number] for column in columns))  # type: ignore[arg-type]
            coco_mask.check_extent(extent, int(heights[image]), int(widths[image]))
        except DataError as error:
            found.faults.append(Fault("annotation", f"{found.ids[number]}", error.message, BAD_MASK))
            fits[number] = False
    return fits


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
