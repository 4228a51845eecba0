"""The source of a classification set: a folder of class folders of images, listed and checked by content.

Labels follow from the sorted class folder names: 1..N, empty folders included, so that two splits of one set agree.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from drawbar.dataset import jpeg
from drawbar.dataset.manifest import BadFile
from drawbar.errors import DataError, InputError

Progress = Callable[[str, int, int], None]
"""Stage, images done, images in all. Called from the caller's own thread."""

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
"""Any case. They say which files are meant as images, never what is in them."""

_HEAD_BYTES = 16 * 1024  # holds nearly every header; a longer one (EXIF, colour profile) costs a second read
_CHECK_CHUNK = 512
_LAYOUT_HINT = "expected one folder per class, such as SOURCE/n01440764/n01440764_10026.JPEG"


@dataclass(frozen=True, slots=True)
class SourceImage:
    """A file that is meant as an image."""

    class_name: str
    name: str
    label: int
    """1..N."""
    size_bytes: int

    @property
    def path(self) -> str:
        """Below the source folder."""
        return f"{self.class_name}/{self.name}"


@dataclass(frozen=True)
class Source:
    folder: Path
    labels: tuple[str, ...]
    """Class folder names in label order."""
    images: tuple[SourceImage, ...]
    """Sorted by class, then name."""

    def sha256(self) -> str:
        """Of all paths and sizes; the files' content is not read."""
        digest = hashlib.sha256()
        for label in self.labels:
            digest.update(os.fsencode(label) + b"/\n")
        for image in self.images:
            digest.update(os.fsencode(image.path) + b" %d\n" % image.size_bytes)
        return digest.hexdigest()


def scan_source(folder: Path) -> Source:
    """Lists the images directly inside each class folder. Raises InputError where there are none, or no folders."""
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except FileNotFoundError:
        raise InputError(f"no source folder: {folder}", hint=_LAYOUT_HINT) from None
    except OSError as error:
        raise InputError(f"cannot list the source {folder}: {error.strerror}", hint=_LAYOUT_HINT) from None
    labels = tuple(sorted(entry.name for entry in entries if entry.is_dir()))
    if not labels:
        found = "images but no class folders" if any(_is_image(entry) for entry in entries) else "no class folders"
        raise InputError(f"{folder} holds {found}", hint=_LAYOUT_HINT)
    images = [image for label, name in enumerate(labels, start=1) for image in _class_images(folder, name, label)]
    if not images:
        raise InputError(f"no images in the {len(labels)} folders of {folder}", hint=_LAYOUT_HINT)
    return Source(folder, labels, tuple(images))


def check_headers(source: Source, workers: int, progress: Progress) -> list[BadFile]:
    """Looks at the beginning of every file, in `workers` threads. Returns those that are no trainable JPEG."""
    total = len(source.images)
    chunks = [source.images[start : start + _CHECK_CHUNK] for start in range(0, total, _CHECK_CHUNK)]
    bad: list[BadFile] = []
    with ThreadPoolExecutor(workers) as pool:
        for number, found in enumerate(pool.map(lambda chunk: _check_chunk(source.folder, chunk), chunks), start=1):
            bad += found
            progress("check", min(number * _CHECK_CHUNK, total), total)
    return bad


def read_image(folder: Path, image: SourceImage) -> tuple[bytes, jpeg.JpegHeader]:
    """The whole file and its header. Raises DataError with the reason alone where it is no trainable JPEG."""
    data = _read(folder, image, -1)
    return data, jpeg.check_trainable(data)


def _class_images(folder: Path, class_name: str, label: int) -> list[SourceImage]:
    try:
        found = [
            SourceImage(class_name, entry.name, label, entry.stat().st_size)
            for entry in os.scandir(folder / class_name)
            if _is_image(entry)
        ]
    except OSError as error:
        raise InputError(f"cannot list the class folder {folder / class_name}: {error.strerror}") from None
    return sorted(found, key=lambda image: image.name)


def _is_image(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(IMAGE_SUFFIXES) and not entry.name.startswith(".") and entry.is_file()


def _check_chunk(folder: Path, images: Sequence[SourceImage]) -> list[BadFile]:
    return list(_bad_files(folder, images))


def _bad_files(folder: Path, images: Sequence[SourceImage]) -> Iterator[BadFile]:
    for image in images:
        try:
            try:
                jpeg.check_trainable(_read(folder, image, _HEAD_BYTES), whole=False)
            except jpeg.HeaderCut:
                jpeg.check_trainable(_read(folder, image, -1), whole=False)
        except DataError as error:
            yield BadFile(path=image.path, reason=error.message)


def _read(folder: Path, image: SourceImage, size: int) -> bytes:
    try:
        with open(f"{folder}/{image.class_name}/{image.name}", "rb", buffering=0) as file:
            data: bytes = file.read(size) or b""
            return data
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}") from None
