"""Where the images of a COCO set lie: in a folder or a zip archive."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Protocol

from drawbar.dataset import jpeg
from drawbar.dataset.zip_index import ZipIndex
from drawbar.errors import DataError, InputError

CHANGED = "pack a source that nobody changes; finished shards are kept"

_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


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
        found = self._stat(name)
        return None if found is None else found.st_size

    def read(self, name: str) -> bytes:
        found = self._stat(name)
        if found is None:
            raise DataError(f"missing in {self._folder}")
        jpeg.check_file_size(found.st_size)
        try:
            with open(f"{self._folder}/{name}", "rb", buffering=0) as file:
                data: bytes = file.read() or b""
                return data
        except OSError as error:
            raise self._unreadable(name, error) from None

    def _stat(self, name: str) -> os.stat_result | None:
        """None where there is no such file, or something else by that name: annotation files name anything."""
        try:
            found = os.stat(f"{self._folder}/{name}")
        except OSError as error:
            if error.errno in _NO_SUCH_FILE:
                return None
            raise self._unreadable(name, error) from None
        return found if stat.S_ISREG(found.st_mode) else None

    def _unreadable(self, name: str, error: OSError) -> InputError:
        # Not a bad image: a disk that fails would make a set of nothing.
        return InputError(f"{self._folder}/{name} cannot be read: {error.strerror}", hint=CHANGED)


class ZipImages:
    """An archive whose files lie at its root or all in one folder, as COCO's do."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        """Raises InputError where a name could be either of two files."""
        self._zip = ZipIndex(path)
        self._prefix = _folder_of(path, self._zip.names, set(names))

    def size_bytes(self, name: str) -> int | None:
        return self._zip.size_bytes(self._prefix + name)

    def read(self, name: str) -> bytes:
        return self._zip.read(self._prefix + name)


def _folder_of(path: Path, there: Sequence[str], wanted: AbstractSet[str]) -> str:
    """The folder within the archive that most of the wanted files are below."""
    places: list[tuple[str, str]] = []  # folder and name, for each wanted name that an archive's file may be
    for entry in there:
        cut = 0
        while True:
            if entry[cut:] in wanted:
                places.append((entry[:cut], entry[cut:]))
            cut = entry.find("/", cut) + 1
            if not cut:
                break
    counts = Counter(folder for folder, _ in places)
    best = max(sorted(counts), key=lambda folder: counts[folder], default="")
    in_best = {name for folder, name in places if folder == best}
    for folder, name in places:
        entry = folder + name
        if folder != best and name in in_best and not (entry.startswith(best) and entry[len(best) :] in wanted):
            raise InputError(
                f"{path} holds {name} twice, as {best}{name} and as {entry}",
                hint="unpack it, and name the folder that is meant with --images",
            )
    return best
