"""An ImageNet-like set: JPEG files in class folders, `n00000001/n00000001_12.JPEG`, or their records without a folder.

Owns the set: who makes which file, resuming, and what is refused. What a file shows belongs to `picture`.
Each file follows from (seed, number) alone, so the set is the same whatever the number of workers, and the same whether
it is packed from a folder or never touches one; files appear under their names only when whole, so an interrupted run
can go on.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawbar.dataset import picture
from drawbar.dataset.folder import MARKER_NAME
from drawbar.dataset.items import Item
from drawbar.dataset.labelled import LabelledItem, LabelledSource
from drawbar.dataset.making import Progress, check_least, claim, in_chunks, write_whole
from drawbar.errors import EnvironmentUnfit, InputError

__all__ = ["MARKER_NAME", "ImagenetLikeSet", "SyntheticSource", "SyntheticStats", "make_imagenet_like"]

GENERATOR = 1
"""Goes up when the same settings would give other pictures."""

SMALLEST_SIZE = 32
LARGEST_SIZE = 4096

_CHUNK = 32


@dataclass(frozen=True, kw_only=True)
class SyntheticStats:
    """The whole set, as it is on disk now."""

    num_images: int
    num_classes: int
    total_bytes: int
    made: int
    """Images made by this call; the others were there already."""
    elapsed_s: float

    @property
    def mean_bytes(self) -> float:
        return self.total_bytes / self.num_images


@dataclass(frozen=True)
class ImagenetLikeSet:
    """Settings that decide every byte; picklable, as workers get it."""

    num_images: int
    num_classes: int = 1000
    seed: int = 1
    size: int = picture.FULL_SIZE
    """Pixels of the long side of an average picture. Small ones are for quick learning."""

    def __post_init__(self) -> None:
        """Raises InputError for a wrong setting."""
        check_least(
            (
                ("number of images", self.num_images, 1),
                ("number of classes", self.num_classes, 1),
                ("seed", self.seed, 0),
            )
        )
        if not SMALLEST_SIZE <= self.size <= LARGEST_SIZE:
            raise InputError(f"size is {self.size}; expected {SMALLEST_SIZE} to {LARGEST_SIZE} pixels")

    def place(self, index: int) -> tuple[str, str]:
        """Class folder and file name of image `index`; images go round the classes."""
        number, label = divmod(index, self.num_classes)
        name = class_name(label + 1)
        return name, f"{name}_{number}.JPEG"

    def label(self, index: int) -> int:
        """1..N."""
        return index % self.num_classes + 1

    def draw(self, index: int) -> bytes:
        return picture.make_picture(self.seed, index, self.label(index), size=self.size)

    def expected_bytes(self, index: int) -> int:
        """About what the picture will have."""
        return round(picture.target_bytes(self.seed, index) * (self.size / picture.FULL_SIZE) ** 2)

    def marker(self) -> dict[str, int]:
        return {
            "generator": GENERATOR,
            "num_images": self.num_images,
            "num_classes": self.num_classes,
            "seed": self.seed,
            "size": self.size,
        }


def class_name(label: int) -> str:
    """Folder of a class, numbered from 1; named like a WordNet synset."""
    return f"n{label:08d}"


def make_imagenet_like(
    dest: Path,
    *,
    num_images: int,
    num_classes: int = 1000,
    seed: int = 1,
    size: int = picture.FULL_SIZE,
    workers: int = 0,
    progress: Progress = lambda stage, done, total: None,
) -> SyntheticStats:
    """Makes `num_images` JPEG files spread evenly over `num_classes` folders in `dest`.

    If `dest` holds the same set, only what is missing is made. `workers` are processes; 0 means one per core, 1 works
    in this process. Every class has a folder even when there are fewer images than classes.

    Raises InputError for a wrong setting or a `dest` that holds something else, EnvironmentUnfit where files cannot
    be written, RunFailed where a worker process dies.
    """
    started_s = time.perf_counter()
    wanted = ImagenetLikeSet(num_images, num_classes, seed, size)
    check_least((("number of workers", workers, 0),))
    try:
        names = map(class_name, range(1, num_classes + 1))
        claim(dest, MARKER_NAME, wanted.marker(), names, defaults={"size": picture.FULL_SIZE})
        missing = _missing(dest, wanted)
        done = num_images - len(missing)
        chunks = [missing[start : start + _CHUNK] for start in range(0, len(missing), _CHUNK)]
        for made in in_chunks(_make_chunk, (dest, wanted), chunks, workers):
            done += made
            progress("making images", done, num_images)
        sizes = _sizes(dest, wanted)
    except OSError as error:
        raise EnvironmentUnfit(f"cannot write to {dest}: {error.strerror or error}") from None
    total_bytes = sum(sizes[wanted.place(index)] for index in range(num_images))
    return SyntheticStats(
        num_images=num_images,
        num_classes=num_classes,
        total_bytes=total_bytes,
        made=len(missing),
        elapsed_s=time.perf_counter() - started_s,
    )


def _sizes(dest: Path, wanted: ImagenetLikeSet) -> dict[tuple[str, str], int]:
    """Size in bytes of every file that is there, by class folder and name."""
    sizes = {}
    for label in range(1, wanted.num_classes + 1):
        name = class_name(label)
        with os.scandir(dest / name) as entries:
            sizes.update({(name, entry.name): entry.stat().st_size for entry in entries})
    return sizes


def _missing(dest: Path, wanted: ImagenetLikeSet) -> list[int]:
    sizes = _sizes(dest, wanted)
    return [index for index in range(wanted.num_images) if wanted.place(index) not in sizes]


def _make_chunk(job: tuple[Path, ImagenetLikeSet], indices: Sequence[int]) -> int:
    dest, wanted = job
    for index in indices:
        write_whole(dest.joinpath(*wanted.place(index)), wanted.draw(index))
    return len(indices)


class SyntheticSource(LabelledSource):
    """The same records as of the set on disk, each picture drawn when it is read. See `items.Source`."""

    def __init__(self, wanted: ImagenetLikeSet) -> None:
        self._wanted = wanted
        labels = [class_name(label) for label in range(1, wanted.num_classes + 1)]
        items = [self._item(index) for index in range(wanted.num_images)]
        items.sort(key=lambda item: item.path)
        super().__init__(root="", labels=labels, items=items, notes={"synthetic": wanted.marker()})

    def read(self, item: Item) -> bytes:
        assert isinstance(item, LabelledItem)  # noqa: S101  our bug only
        return self._wanted.draw(item.offset)

    def fingerprint(self) -> str:
        settings: list[Any] = ["imagenet-like", self._wanted.marker()]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def _item(self, index: int) -> LabelledItem:
        """Its size is an estimate; its offset is its number."""
        path = "/".join(self._wanted.place(index))
        return LabelledItem(path, self._wanted.expected_bytes(index), self._wanted.label(index), offset=index)
