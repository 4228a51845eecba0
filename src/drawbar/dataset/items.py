"""What a packer packs: the seam between sources (ImageNet, COCO, plain folders) and the packing engine.

A source lists its items, reads one, and writes its Example; the engine deals items to shards, checks
and mends images, frames, writes, resumes. Neither knows how the other works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from drawbar.dataset.jpeg import JpegHeader
from drawbar.dataset.manifest import BadFile

Progress = Callable[[str, int, int], None]
"""Stage, images done, images in all (0: not known yet). Called from the caller's own thread."""
Note = Callable[[str], None]
"""Told, in a line each, what a person should know though packing goes on."""


def no_note(text: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Item:
    """One image of a source. A source may subclass it: workers get the items of their shards, and nothing else of the
    list, so what one image needs (label, place in an archive, boxes) belongs into its item."""

    path: str
    """Unique within the source; dealing to shards, order and messages go by it alone."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CheckedImage:
    """An image as it will be stored: the file's own bytes where they are a good JPEG, else re-encoded ones."""

    data: bytes
    header: JpegHeader
    fixed: str = ""
    """Why it was re-encoded; empty: these are the file's own bytes."""


class Source(Protocol):
    """Must be picklable (workers are spawned processes); opens files on first use in each process."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names in label order; label 1 is the first."""

    def items(self) -> Sequence[Item]:
        """Sorted by path."""

    def read(self, item: Item) -> bytes:
        """The file's own bytes. Raises DataError with the reason alone where it cannot be read, InputError where the
        source has changed since it was listed (packing stops)."""

    def example(self, item: Item, image: CheckedImage) -> bytes:
        """The serialised tf.train.Example."""

    def item_labels(self, item: Item) -> Sequence[int]:
        """Labels that count for this item in the manifest's class counts: one for ImageNet, one per object for COCO."""

    def fingerprint(self) -> str:
        """Hex digest of everything that decides the records' content, as far as listing tells (paths, sizes, labels,
        boxes): equal fingerprints and settings give equal shards."""

    def notes(self) -> Mapping[str, Any]:
        """What else the manifest says of the source, as JSON: boxes dropped, the map of categories. After `items`."""


@runtime_checkable
class Lossy(Protocol):
    """A source that finds, when it is listed, things that are named but cannot be in the set."""

    def bad_files(self) -> Sequence[BadFile]:
        """Images that are not among the items, for the manifest's list."""

    def loss(self) -> str:
        """One line on all that is left out for what listing found; empty for nothing."""
