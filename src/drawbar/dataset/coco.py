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
from typing import Any, Literal, Protocol

from drawbar.dataset import coco_mask, jpeg
from drawbar.dataset.coco_example import CocoImage, CocoObject, check_size, encode, read_object
from drawbar.dataset.coco_index import (
    CaptionIndex,
    CocoIndex,
    FileState,
    Progress,
    index_captions,
    index_instances,
)
from drawbar.dataset.folder import refuse_url
from drawbar.dataset.items import CheckedImage, Item, plural
from drawbar.dataset.zip_index import ZipIndex
from drawbar.errors import DataError, InputError

OnBad = Literal["fail", "skip", "fix"]

_CHANGED = "pack a source that nobody changes; finished shards are kept"
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


# Where images lie


class Images(Protocol):
    """Picklable."""

    def size_bytes(self, name: str) -> int | None:
        """None where there is no such file."""

    def read(self, name: str) -> bytes:
        """Raises DataError with the reason alone where it is missing or damaged, InputError where reading fails."""


class FolderImages:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def size_bytes(self, name: str) -> int | None:
        try:
            return os.stat(f"{self._folder}/{name}").st_size
        except OSError:
            return None

    def read(self, name: str) -> bytes:
        try:
            with open(f"{self._folder}/{name}", "rb", buffering=0) as file:
                data: bytes = file.read() or b""
                return data
        except FileNotFoundError:
            raise DataError(f"missing in {self._folder}") from None
        except OSError as error:
            # Not a bad image: a disk that fails would make a set of nothing.
            raise InputError(f"{self._folder}/{name} cannot be read: {error.strerror}", hint=_CHANGED) from None


class ZipImages:
    """An archive whose files lie at its root or all in one folder, as COCO's do."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._zip = ZipIndex(path)
        there = set(self._zip.names)
        folders = {""} | {name.rpartition("/")[0] + "/" for name in there if "/" in name}
        sample = names[:: max(1, len(names) // 64)]
        self._prefix = max(sorted(folders), key=lambda folder: sum(folder + name in there for name in sample))

    def size_bytes(self, name: str) -> int | None:
        return self._zip.size_bytes(self._prefix + name)

    def read(self, name: str) -> bytes:
        return self._zip.read(self._prefix + name)


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
        return InputError(f"{self._state.path} changed while it was being packed", hint=_CHANGED)


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
        self._caption_reader = SpanReader(captions.file) if captions else None
        self._last: tuple[str, CocoImage] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For workers: without the list, as they get the items of their shards."""
        return self.__dict__ | {"_items": [], "_last": None}

    def items(self) -> Sequence[Item]:
        return self._items

    def read(self, item: Item) -> bytes:
        """Raises DataError for annotations that do not fit the image too: without them it is of no use."""
        record = self._record(item)
        data = self._images.read(item.path)
        if len(data) != item.size_bytes:
            raise InputError(
                f"{item.path} was {item.size_bytes} bytes when it was listed, and is not any more", hint=_CHANGED
            )
        try:
            header = jpeg.parse_header(data)
        except DataError:
            return data  # no JPEG; whether it can be mended is the packer's question
        check_size(record, header.width, header.height)
        return data

    def example(self, item: Item, image: CheckedImage) -> bytes:
        """Raises DataError, naming the image, where a mended one is not of the annotated size."""
        try:
            return encode(self._record(item), image)
        except DataError as error:
            raise DataError(f"{item.path}: {error.message}") from None

    def item_labels(self, item: Item) -> Sequence[int]:
        return self._index.labels_of(self._row(item))

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        captions = self._captions.file.sha256 if self._captions else ""
        digest.update(f"coco {self._index.file.sha256} {captions} {self.masks}\n".encode())
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
            "boxes_skipped": {reason: len(ids) for reason, ids in self._index.dropped.items()},
            "boxes_skipped_ids": self._index.dropped,
            "faults": faults(self._index, self._captions),
        }

    def _record(self, item: Item) -> CocoImage:
        """Kept for the next call, which is about the same image: masks are drawn once."""
        if self._last is None or self._last[0] != item.path:
            self._last = (item.path, self._load(item))
        return self._last[1]

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


def faults(index: CocoIndex, captions: CaptionIndex | None) -> list[str]:
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
    index = index_instances(layout.annotations, progress)
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


def _refuse(layout: Layout, found: Sequence[str], missing: Sequence[str]) -> None:
    hint = "--on-bad skip leaves them out and lists them in the manifest"
    if found:
        raise InputError(f"{layout.annotations} has {_some(found, 'fault')}", hint=hint)
    if missing:
        raise InputError(f"{layout.images} lacks {_some(missing, 'image')}", hint=hint)


def _some(lines: Sequence[str], what: str) -> str:
    more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
    return f"{plural(len(lines), what)}: {'; '.join(lines[:3])}{more}"
