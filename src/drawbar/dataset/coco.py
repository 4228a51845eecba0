"""COCO 2017, or any set in COCO's JSON format, as a source of records for detection.

Owns where annotations, images and captions lie and how a worker reads one image with its objects. The annotation file
is never held in memory (`coco_index`); what goes into a record is `coco_example`'s.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from drawbar.dataset import coco_mask, jpeg
from drawbar.dataset.coco_example import CocoImage, CocoObject, check_size, encode, read_object
from drawbar.dataset.coco_fields import Fault
from drawbar.dataset.coco_images import CHANGED, FolderImages, Images, ZipImages
from drawbar.dataset.coco_index import (
    CaptionIndex,
    CocoIndex,
    FileState,
    Progress,
    index_captions,
    index_instances,
    left_out,
)
from drawbar.dataset.folder import refuse_url
from drawbar.dataset.items import CheckedImage, Item
from drawbar.dataset.manifest import BadFile
from drawbar.errors import DataError, InputError
from drawbar.plural import plural

OnBad = Literal["fail", "skip", "fix"]

_SHORT_SPLITS = {"validation": "val"}


@dataclass(frozen=True)
class Layout:
    """The files of one split."""

    annotations: Path
    images: Path
    """A folder or a zip archive."""
    captions: Path | None


def find_layout(
    source: Path,
    split: str = "train",
    *,
    annotations: Path | None = None,
    images: Path | None = None,
    captions: Path | None = None,
) -> Layout:
    """COCO's own layout under `source`, for a split `train` or `validation`; what is given by name is not looked for.

    `source` may be an annotation file: its images lie beside it, or beside its folder, as in COCO's own layout. A
    captions file is used where it lies beside the instances. Raises InputError where something is not there or could
    be several things.
    """
    for path in (source, annotations, images, captions):
        if path is not None:
            refuse_url(path)
    if annotations is None:
        annotations = source if source.is_file() else _annotations(source, split)
    name = annotations.stem.removeprefix("instances_")
    if images is None:
        beside = annotations.parent
        roots = [beside, Path(os.path.normpath(beside / ".."))] if source.is_file() else [source]
        places = [(root / name, root / "images" / name, root / f"{name}.zip", root / "images") for root in roots]
        images = next((path for candidates in places for path in candidates if path.exists()), None)
        if images is None:
            looked = " and ".join(f"no {path}" for candidates in places for path in (candidates[0], candidates[2]))
            raise InputError(
                f"no images for {annotations}: {looked}",
                hint=f"name their folder or zip archive with --images; without, {_layout_hint(split)}",
            )
    if captions is None:
        beside = annotations.with_name(f"captions_{name}.json")
        captions = beside if beside.is_file() else None
    return Layout(annotations, images, captions)


def _annotations(source: Path, split: str) -> Path:
    if not source.is_dir():
        raise InputError(f"no source folder: {source}", hint=_layout_hint(split))
    short = _SHORT_SPLITS.get(split, split)
    folder = source / "annotations" if (source / "annotations").is_dir() else source
    found = sorted(folder.glob(f"instances_{short}*.json"))
    if len(found) != 1:
        what = f"several: {', '.join(path.name for path in found)}" if found else "none"
        packed = next(iter(sorted(source.glob("annotations*.zip"))), None)
        if any(source.glob(f"drawbar-synthetic-{short}*.json")):
            hint = "a synthetic set whose making did not end has none: give its `drawbar data make` command again"
        else:
            hint = f"unpack {packed} first" if packed else _layout_hint(split)
        raise InputError(
            f"expected one file instances_{short}*.json in {folder}, found {what}",
            hint="name it with --annotations" if found else hint,
        )
    return found[0]


def _layout_hint(split: str) -> str:
    name = f"{_SHORT_SPLITS.get(split, split)}2017"
    return f"expected SRC/annotations/instances_{name}.json beside SRC/{name}/ or SRC/{name}.zip"


# Where annotations lie


class SpanReader:
    """Reads JSON values by their spans. Picklable; opened on first use in each process."""

    def __init__(self, state: FileState) -> None:
        self._state = state
        self._descriptor = -1

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_descriptor": -1}

    def read(self, spans: Iterable[tuple[int, int]]) -> list[Any]:
        """Raises InputError where the file is not the one that was indexed."""
        if self._descriptor < 0:
            self._descriptor = self._open()
        try:
            return [json.loads(os.pread(self._descriptor, size, start)) for start, size in spans]
        except (OSError, ValueError):
            raise self._changed() from None

    def _open(self) -> int:
        try:
            descriptor = os.open(self._state.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(f"cannot read {self._state.path}: {error.strerror}") from None
        stat = os.fstat(descriptor)
        if (stat.st_size, stat.st_mtime_ns) != (self._state.size_bytes, self._state.mtime_ns):
            os.close(descriptor)
            raise self._changed()
        return descriptor

    def _changed(self) -> InputError:
        return InputError(f"{self._state.path} changed while it was being packed", hint=CHANGED)


# The source


class CocoSource:
    """Implements `items.Source`; made by `open_coco`."""

    def __init__(
        self, index: CocoIndex, captions: CaptionIndex | None, images: Images, items: list[Item], *, masks: bool
    ) -> None:
        self.labels = index.category_names
        """Label 1 is the category with the lowest id; records keep the ids themselves, see `category_ids`."""
        self.category_ids = index.category_ids
        self.masks = masks and index.has_masks
        self._index = index
        self._captions = captions
        self._images = images
        self._items = items
        self._reader = SpanReader(index.file)
        self._faults = faults(index, captions)
        self._caption_reader = SpanReader(captions.file) if captions else None

    def __getstate__(self) -> dict[str, Any]:
        """For workers: without the list, as they get the items of their shards."""
        return self.__dict__ | {"_items": []}

    def items(self) -> Sequence[Item]:
        return self._items

    def read(self, item: Item) -> bytes:
        """Raises DataError for a file that is too large, or not of the annotated size too."""
        jpeg.check_file_size(item.size_bytes)
        data = self._images.read(item.path)
        if len(data) != item.size_bytes:
            raise InputError(
                f"{item.path} was {item.size_bytes} bytes when it was listed, and is not any more", hint=CHANGED
            )
        try:
            header = jpeg.parse_header(data)
        except DataError:
            return data  # no JPEG; whether it can be mended is the packer's question
        self._check_size(item, header)
        return data

    def example(self, item: Item, image: CheckedImage) -> bytes:
        """Raises DataError, naming the image, where a mended one is not of the annotated size."""
        try:
            # Before masks of that size are drawn.
            self._check_size(item, image.header)
            return encode(self._load(item), image)
        except DataError as error:
            raise DataError(f"{item.path}: {error.message}") from None

    def _check_size(self, item: Item, header: jpeg.JpegHeader) -> None:
        row = self._row(item)
        check_size(int(self._index.widths[row]), int(self._index.heights[row]), header.width, header.height)

    def item_labels(self, item: Item) -> Sequence[int]:
        return self._index.labels_of(self._row(item))

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        captions = self._captions.file.sha256 if self._captions else ""
        digest.update(f"coco 2 {self._index.file.sha256} {captions} {self.masks}\n".encode())
        for item in self._items:
            digest.update(os.fsencode(item.path) + b" %d\n" % item.size_bytes)
        return digest.hexdigest()

    def notes(self) -> dict[str, Any]:
        """What the manifest says of this source: the category map, and which annotations are not in the records."""
        return {
            "category_map": category_map(self.category_ids),
            "masks": self.masks,
            "captions": self._captions is not None,
            "annotations": len(self._index.labels),
            "annotations_left_out": left_out(self._index.faults, self._index.dropped),
            "boxes_skipped": {reason: len(ids) for reason, ids in self._index.dropped.items()},
            "boxes_skipped_ids": self._index.dropped,
            "captions_of_other_images": self._captions.num_unknown if self._captions else 0,
            "faults": list(map(str, self._faults)),
        }

    def bad_files(self) -> list[BadFile]:
        """Images that the annotation file names in a way that none of the items stands for."""
        return [BadFile(path=fault.path, reason=str(fault)) for fault in self._faults if fault.what == "image"]

    def loss(self) -> str:
        """One line on the annotations that are not in the records; empty where all are."""
        counts = left_out(self._index.faults, self._index.dropped)
        lost = []
        if counts:
            reasons = ", ".join(f"{reason} x{count}" for reason, count in counts.items())
            lost.append(f"{sum(counts.values())} of {self._index.num_annotations} annotations left out: {reasons}")
        for what in ("category", "caption", "image"):
            found = [fault for fault in self._faults if fault.what == what]
            if found:
                lost.append(_some(found, f"{what} entry", "left out"))
        return "; ".join(lost)

    def _load(self, item: Item) -> CocoImage:
        index, row = self._index, self._row(item)
        height, width = int(index.heights[row]), int(index.widths[row])
        annotations = self._reader.read(index.objects.of(row))
        objects: list[CocoObject] = []
        for annotation, label in zip(annotations, index.labels_of(row), strict=True):
            objects.append(read_object(annotation, self.labels[label - 1], height, width, masks=self.masks))
        captions: list[str] = []
        if self._captions and self._caption_reader:
            captions = [found["caption"] for found in self._caption_reader.read(self._captions.captions.of(row))]
        return CocoImage(item.path, int(index.image_ids[row]), width, height, objects, captions)

    def _row(self, item: Item) -> int:
        return bisect_left(self._index.names, item.path)


def category_map(category_ids: Sequence[int]) -> dict[str, int]:
    """COCO's category ids, which have gaps, to labels 1..N; the keys are text, as in JSON."""
    return {str(category): label for label, category in enumerate(category_ids, start=1)}


def faults(index: CocoIndex, captions: CaptionIndex | None) -> list[Fault]:
    return index.faults + (captions.faults if captions else [])


def open_coco(
    layout: Layout,
    *,
    masks: bool = True,
    on_bad: OnBad = "fail",
    progress: Progress = lambda done, total: None,
) -> CocoSource:
    """Reads the annotation files once and looks for every image.

    Images that are missing stay among the items where `on_bad` is not `fail`: reading one says so, and the packer
    lists it as bad. `progress` is told the bytes read of the annotation file.

    Raises InputError for unusable files, and with `on_bad` `fail` for the first faults in them; DataError for damaged
    JSON; EnvironmentUnfit where masks are wanted and pycocotools is not there.
    """
    if masks:
        coco_mask.require_pycocotools()
    index = index_instances(layout.annotations, progress, masks=masks)
    captions = index_captions(layout.captions, index) if layout.captions else None
    images: Images = FolderImages(layout.images) if layout.images.is_dir() else ZipImages(layout.images, index.names)
    items, missing = _items(index, images)
    if len(missing) == len(items):
        raise InputError(
            f"{layout.images} holds none of the {plural(len(items), 'image')} of {layout.annotations}, such as "
            f"{missing[0]}",
            hint="the images folder and the annotation file must be of the same split",
        )
    if on_bad == "fail":
        _refuse(layout, faults(index, captions), missing)
    return CocoSource(index, captions, images, items, masks=masks)


def _items(index: CocoIndex, images: Images) -> tuple[list[Item], list[str]]:
    items, missing = [], []
    for name in index.names:
        size_bytes = images.size_bytes(name)
        if size_bytes is None:
            missing.append(name)
        items.append(Item(name, size_bytes or 0))
    return items, missing


def _refuse(layout: Layout, found: Sequence[Fault], missing: Sequence[str]) -> None:
    hint = "--on-bad skip leaves them out and lists them in the manifest"
    if found:
        raise InputError(f"{layout.annotations} has {_some(found, 'fault')}", hint=hint)
    if missing:
        raise InputError(f"{layout.images} lacks {_some(missing, 'image')}", hint=hint)


def _some(found: Sequence[Fault | str], what: str, then: str = "") -> str:
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    many = plural(len(found), what, f"{what[:-1]}ies" if what.endswith("y") else "")
    return f"{many}{' ' + then if then else ''}: {'; '.join(map(str, found[:3]))}{more}"
