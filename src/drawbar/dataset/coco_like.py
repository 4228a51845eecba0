"""Makes a detection set in COCO's format, of any size: `annotations/instances_train.json` and `train/000000000001.jpg`.

Owns the set on disk and the set as a source of records; what a picture shows belongs to `coco_scene`. Each picture and
its annotations follow from (seed, split, number) alone, so the set is the same whatever the number of workers, and the
same whether it is packed from a folder or never touches one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from drawbar.dataset import coco_mask, coco_scene, picture
from drawbar.dataset.coco import category_map
from drawbar.dataset.coco_example import CocoImage, encode, read_object
from drawbar.dataset.coco_outline import polygons
from drawbar.dataset.coco_scene import CATEGORIES, Layout
from drawbar.dataset.items import CheckedImage, Item
from drawbar.dataset.making import Progress, check_least, claim, in_chunks, write_whole
from drawbar.errors import EnvironmentUnfit, InputError

GENERATOR = 1
"""Goes up when the same settings would give other pictures or annotations."""

SMALLEST_SIZE = 96
LARGEST_SIZE = 4096
_MOST_OBJECTS = 16
"""Per picture, crowd included; annotation ids are numbered as if each had so many."""

_CHUNK = 32
_LABELS = {category.category_id: label for label, category in enumerate(CATEGORIES, start=1)}


@dataclass(frozen=True, kw_only=True)
class CocoLikeStats:
    """The whole set, as it is on disk now."""

    num_images: int
    total_bytes: int
    """Of the pictures."""
    annotations: Path
    made: int
    """Images made by this call; the others were there already."""
    elapsed_s: float


@dataclass(frozen=True)
class CocoLikeSet:
    """Settings that decide every byte; picklable, as workers get it."""

    num_images: int
    seed: int = 1
    split: str = "train"
    """Splits of one seed have no picture in common."""
    image_size: int = coco_scene.FULL_SIZE
    """Pixels of the long side."""

    def __post_init__(self) -> None:
        """Raises InputError for a wrong setting."""
        check_least((("number of images", self.num_images, 1), ("seed", self.seed, 0)))
        if not SMALLEST_SIZE <= self.image_size <= LARGEST_SIZE:
            raise InputError(f"image size is {self.image_size}; expected {SMALLEST_SIZE} to {LARGEST_SIZE} pixels")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", self.split):
            raise InputError(f"split is {self.split!r}; expected letters, digits, - and _, such as train")

    def marker(self) -> dict[str, Any]:
        return {"generator": GENERATOR} | asdict(self)

    def layout(self, index: int) -> Layout:
        return coco_scene.make_layout(self._key(index), self.image_size)

    def draw(self, index: int, layout: Layout) -> bytes:
        return coco_scene.draw(self._key(index), layout, self._target_bytes(index, layout.height * layout.width))

    def expected_bytes(self, index: int) -> int:
        """About what the picture will have."""
        return round(self._target_bytes(index, 0.72 * self.image_size**2))

    def _target_bytes(self, index: int, pixels: float) -> float:
        spread = picture.target_bytes(self.seed, index) / picture.MEAN_BYTES
        return coco_scene.MEAN_BYTES * spread * pixels / (640 * 480)

    def _key(self, index: int) -> tuple[int, ...]:
        return self.seed, zlib.crc32(self.split.encode()), index


def image_name(index: int) -> str:
    return f"{index + 1:012d}.jpg"


def image_entry(index: int, layout: Layout) -> dict[str, Any]:
    """As in the array `images`."""
    return {"id": index + 1, "file_name": image_name(index), "width": layout.width, "height": layout.height}


def annotate(index: int, layout: Layout) -> list[dict[str, Any]]:
    """As in the array `annotations`: what is seen of each object; areas and boxes are those of the mask given."""
    found = []
    for number, placed in enumerate(layout.objects, start=1):
        mask = (layout.ids == number).view("uint8")
        segmentation: Any = None
        if placed.crowd:
            segmentation = {"counts": coco_mask.encode_counts(mask), "size": [layout.height, layout.width]}
        elif box := coco_mask.bounding_box(mask):
            x, y, width, height = box
            segmentation = polygons(mask[y : y + height, x : x + width], x, y)
            mask = coco_mask.rasterise(segmentation, layout.height, layout.width)
        seen = coco_mask.bounding_box(mask)
        if seen is None:
            continue
        found.append(
            {
                "id": index * _MOST_OBJECTS + number,
                "image_id": index + 1,
                "category_id": placed.category.category_id,
                "iscrowd": int(placed.crowd),
                "area": float(mask.sum()),
                "bbox": [float(value) for value in seen],
                "segmentation": segmentation,
            }
        )
    return found


# On disk


def make_coco_like(
    dest: Path,
    *,
    num_images: int,
    seed: int = 1,
    split: str = "train",
    image_size: int = coco_scene.FULL_SIZE,
    workers: int = 0,
    progress: Progress = lambda stage, done, total: None,
) -> CocoLikeStats:
    """Makes `num_images` JPEG files in `dest/SPLIT`, and last of all their annotation file. Splits may share a `dest`.

    If `dest` holds the same set, only what is missing is made. `workers` are processes; 0 means one per core, 1 works
    in this process.

    Raises InputError for a wrong setting or a `dest` that holds something else, EnvironmentUnfit where files cannot
    be written or pycocotools is not installed, RunFailed where a worker process dies.
    """
    started_s = time.perf_counter()
    wanted = CocoLikeSet(num_images, seed, split, image_size)
    check_least((("number of workers", workers, 0),))
    coco_mask.require_pycocotools()
    try:
        name = f"drawbar-synthetic-{split}.json"
        claim(dest, name, wanted.marker(), [split, "annotations"], beside="drawbar-synthetic-*.json")
        made = _complete(dest, wanted, workers, progress)
        sizes = _sizes(dest / split)
    except OSError as error:
        raise EnvironmentUnfit(f"cannot write to {dest}: {error.strerror or error}") from None
    return CocoLikeStats(
        num_images=num_images,
        total_bytes=sum(sizes[image_name(index)] for index in range(num_images)),
        annotations=_annotation_path(dest, split),
        made=made,
        elapsed_s=time.perf_counter() - started_s,
    )


def _annotation_path(dest: Path, split: str) -> Path:
    return dest / "annotations" / f"instances_{split}.json"


def _sizes(folder: Path) -> dict[str, int]:
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries}


def _complete(dest: Path, wanted: CocoLikeSet, workers: int, progress: Progress) -> int:
    """Makes what is missing; returns how many images that were."""
    there = _sizes(dest / wanted.split)
    missing = [index for index in range(wanted.num_images) if image_name(index) not in there]
    path = _annotation_path(dest, wanted.split)
    # Without the annotation file all layouts are made again; a picture that is there is not drawn again.
    indices = missing if path.exists() else range(wanted.num_images)
    chunks = [indices[start : start + _CHUNK] for start in range(0, len(indices), _CHUNK)]
    texts = _counted(in_chunks(_make_chunk, (dest, wanted), chunks, workers), chunks, progress)
    if path.exists():
        for _ in texts:
            pass
    else:
        _write_annotations(path, wanted, texts)
    return len(missing)


def _write_annotations(path: Path, wanted: CocoLikeSet, texts: Iterator[tuple[str, str]]) -> None:
    """Annotations come first, as they are streamed; the list of images waits in a file of its own."""
    whole, later = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.images.tmp")
    try:
        with open(whole, "w") as out, open(later, "w+") as images:
            out.write('{"info": ' + json.dumps(_info(wanted)) + ',\n"licenses": [],\n')
            out.write('"categories": ' + json.dumps(categories()) + ',\n"annotations": [')
            _write_texts(texts, images, out)
            out.write('],\n"images": [')
            images.seek(0)
            shutil.copyfileobj(images, out)
            out.write("]}\n")
        whole.replace(path)
    finally:
        whole.unlink(missing_ok=True)
        later.unlink(missing_ok=True)


def _write_texts(texts: Iterator[tuple[str, str]], images: IO[str], annotations: IO[str]) -> None:
    comma = "\n"
    for image_text, annotation_text in texts:
        images.write(comma + image_text)
        annotations.write(comma + annotation_text)
        comma = ",\n"


def _counted(
    texts: Iterator[tuple[str, str]], chunks: Sequence[Sequence[int]], progress: Progress
) -> Iterator[tuple[str, str]]:
    total, done = sum(map(len, chunks)), 0
    for text, chunk in zip(texts, chunks, strict=True):
        yield text
        done += len(chunk)
        progress("making images", done, total)


def _make_chunk(job: tuple[Path, CocoLikeSet], indices: Sequence[int]) -> tuple[str, str]:
    """Draws those of these pictures that are missing; the JSON text of their images and of their annotations."""
    dest, wanted = job
    images: list[str] = []
    annotations: list[str] = []
    for index in indices:
        layout = wanted.layout(index)
        images.append(json.dumps(image_entry(index, layout)))
        annotations += map(json.dumps, annotate(index, layout))
        path = dest / wanted.split / image_name(index)
        if not path.exists():
            write_whole(path, wanted.draw(index, layout))
    return ",\n".join(images), ",\n".join(annotations)


def categories() -> list[dict[str, Any]]:
    """As in the array of that name."""
    return [{"id": category.category_id, "name": category.name, "supercategory": "shape"} for category in CATEGORIES]


def _info(wanted: CocoLikeSet) -> dict[str, Any]:
    return {"description": "made-up scenes, by Drawbar", "drawbar": wanted.marker()}


# Without a folder


class SyntheticCocoSource:
    """Implements `items.Source`: the same records as of the set on disk, each picture drawn when it is read."""

    def __init__(self, wanted: CocoLikeSet, *, masks: bool = True) -> None:
        """Raises EnvironmentUnfit where pycocotools is not installed."""
        coco_mask.require_pycocotools()
        self.labels = tuple(category.name for category in CATEGORIES)
        self._wanted = wanted
        self._masks = masks
        self._last: tuple[int, Layout, list[dict[str, Any]]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}

    def items(self) -> Sequence[Item]:
        """Sizes are estimates."""
        count = self._wanted.num_images
        return [Item(image_name(index), self._wanted.expected_bytes(index)) for index in range(count)]

    def read(self, item: Item) -> bytes:
        index, layout, _ = self._scene(item)
        return self._wanted.draw(index, layout)

    def example(self, item: Item, image: CheckedImage) -> bytes:
        index, layout, annotations = self._scene(item)
        height, width = layout.height, layout.width
        objects = [
            read_object(found, self.labels[_LABELS[found["category_id"]] - 1], height, width, masks=self._masks)
            for found in annotations
        ]
        return encode(CocoImage(item.path, index + 1, width, height, objects), image)

    def item_labels(self, item: Item) -> Sequence[int]:
        return [_LABELS[found["category_id"]] for found in self._scene(item)[2]]

    def fingerprint(self) -> str:
        settings = self._wanted.marker() | {"masks": self._masks}
        return hashlib.sha256(json.dumps(["coco-like", settings]).encode()).hexdigest()

    def notes(self) -> dict[str, Any]:
        category_ids = [category.category_id for category in CATEGORIES]
        return {"category_map": category_map(category_ids), "masks": self._masks, "synthetic": self._wanted.marker()}

    def _scene(self, item: Item) -> tuple[int, Layout, list[dict[str, Any]]]:
        """Kept for the next calls, which are about the same picture."""
        index = int(item.path.partition(".")[0]) - 1
        if self._last is None or self._last[0] != index:
            layout = self._wanted.layout(index)
            self._last = (index, layout, annotate(index, layout))
        return self._last
