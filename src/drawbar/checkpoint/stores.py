"""Where checkpoints lie: a folder, or a prefix in an object store. Needs no torch.

A checkpoint is there under its name only when whole. In a folder it is made under a temporary name, synced to disk and
renamed; in a store its manifest is put last. What a killed writer left is cleaned away by the next one.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from drawbar.checkpoint.manifest import MANIFEST, MODEL, TRAINING, step_of
from drawbar.dataset.destination import FolderDestination, StoreDestination, abort_uploads, pause_s
from drawbar.dataset.listing import join
from drawbar.errors import DrawbarError, EnvironmentUnfit, InputError
from drawbar.storage.failures import explain
from drawbar.storage.stores import Place

Pieces = Callable[[], Iterator[bytes]]
"""The content of a file, piece by piece, as often as asked for."""

_TRIES = 4
_BEFORE = "the checkpoints before it are whole"
_TEMPORARY = re.compile(r"\.(step-\d{8,})\.[0-9a-f]{8}\.tmp")


class Writing(Protocol):
    """One checkpoint that is being made. Errors pass through, for `CheckpointStore.explain`."""

    def write(self, file: str, pieces: Pieces) -> None: ...

    def commit(self, manifest: bytes) -> None:
        """From now on it is there."""


class CheckpointStore(Protocol):
    """Names are those of checkpoints; the empty one is the place itself, where it is a checkpoint."""

    def shown(self, name: str) -> str:
        """Its place, in messages."""

    def steps(self) -> list[int]:
        """Of the checkpoints that are there, whole, in order."""

    def sizes(self, name: str) -> dict[str, int]:
        """Size in bytes of each file, by name; empty where there is none."""

    def manifest(self, name: str) -> bytes: ...

    def begin(self, name: str) -> Writing:
        """A checkpoint of this name that is there already stays until the new one is whole."""

    def delete(self, name: str) -> None:
        """Whatever happens meanwhile, it is never seen in part."""

    def clean(self) -> list[str]:
        """Removes what is unfinished; returns its names. Nobody may be writing here."""

    def explain(self, error: Exception, name: str) -> DrawbarError:
        """An error of `steps` to `clean` in one line."""


@dataclass(frozen=True)
class FolderStore:
    folder: Path

    def check_writable(self) -> None:
        """Raises InputError where the folder could not be made or written to; makes nothing."""
        FolderDestination(self.folder)

    def shown(self, name: str) -> str:
        return str(self.folder / name)

    def steps(self) -> list[int]:
        try:
            whole = [step_of(entry.name) for entry in self.folder.iterdir() if (entry / MANIFEST).is_file()]
        except FileNotFoundError:
            return []
        return sorted(step for step in whole if step is not None)

    def sizes(self, name: str) -> dict[str, int]:
        try:
            return {path.name: path.stat().st_size for path in (self.folder / name).iterdir() if path.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def manifest(self, name: str) -> bytes:
        return (self.folder / name / MANIFEST).read_bytes()

    def begin(self, name: str) -> Writing:
        temporary = self._temporary(name)
        temporary.mkdir(parents=True)
        return _FolderWriting(self, temporary, name)

    def put_in_place(self, temporary: Path, name: str) -> None:
        if (self.folder / name).exists():
            self.delete(name)
        temporary.rename(self.folder / name)
        _sync_folder(self.folder)

    def delete(self, name: str) -> None:
        temporary = self._temporary(name)
        (self.folder / name).rename(temporary)
        shutil.rmtree(temporary)

    def clean(self) -> list[str]:
        try:
            left = [path for path in self.folder.iterdir() if _TEMPORARY.fullmatch(path.name)]
        except FileNotFoundError:
            return []
        for path in left:
            shutil.rmtree(path)
        return [path.name for path in left]

    def explain(self, error: Exception, name: str) -> DrawbarError:
        what = f"checkpoint {self.shown(name)}: {getattr(error, 'strerror', None) or error}"
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            return EnvironmentUnfit(what, hint=_BEFORE)
        return InputError(what)

    def _temporary(self, name: str) -> Path:
        return self.folder / f".{name}.{secrets.token_hex(4)}.tmp"


@dataclass(frozen=True)
class _FolderWriting:
    store: FolderStore
    temporary: Path
    name: str

    def write(self, file: str, pieces: Pieces) -> None:
        descriptor = os.open(self.temporary / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for piece in pieces():
                written = 0
                while written < len(piece):  # a nearly full disk takes a part
                    written += os.write(descriptor, memoryview(piece)[written:])
            # The time of a write that is only in the page cache says nothing about the disk.
            os.fsync(descriptor)
        except BaseException:
            self._drop()
            raise
        finally:
            os.close(descriptor)

    def commit(self, manifest: bytes) -> None:
        self.write(MANIFEST, lambda: iter([manifest]))
        _sync_folder(self.temporary)
        self.store.put_in_place(self.temporary, self.name)

    def _drop(self) -> None:
        # What a full disk leaves is in the way of whoever makes room.
        shutil.rmtree(self.temporary, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class BucketStore:
    place: Place
    url: str

    def shown(self, name: str) -> str:
        return f"{join(self.url, name) if name else self.url} at {self.place.endpoint}"

    def steps(self) -> list[int]:
        whole = (step_of(name) for name, files in self._folders().items() if MANIFEST in files)
        return sorted(step for step in whole if step is not None)

    def sizes(self, name: str) -> dict[str, int]:
        return self._destination(name).sizes()

    def manifest(self, name: str) -> bytes:
        return self._destination(name).get(MANIFEST)

    def key(self, name: str, file: str) -> str:
        return join(join(self.place.prefix, name) if name else self.place.prefix, file)

    def begin(self, name: str) -> Writing:
        # Without this an earlier manifest would vouch for files that are being replaced.
        self.delete(name)
        return _BucketWriting(self._destination(name))

    def delete(self, name: str) -> None:
        destination = self._destination(name)
        files = destination.sizes()
        # Without the manifest the rest is nothing, and the next clean-up finds it.
        for file in sorted(files, key=lambda file: file != MANIFEST):
            destination.delete(file)

    def clean(self) -> list[str]:
        left = [name for name, files in self._folders().items() if step_of(name) is not None and MANIFEST not in files]
        for name in left:
            self.delete(name)
        # Multipart uploads of a killed writer cost money, and show in no listing.
        abort_uploads(self.place.store, self._below, self._is_ours, print)
        return left

    def explain(self, error: Exception, name: str) -> DrawbarError:
        found = explain(error, f"checkpoint {self.shown(name)}")
        found.message = found.message.replace("read failed", "request failed")
        found.hint = found.hint or _BEFORE
        return found

    def _destination(self, name: str) -> StoreDestination:
        prefix = join(self.place.prefix, name) if name else self.place.prefix
        return StoreDestination(self.place.store, prefix, self.shown(name))

    @property
    def _below(self) -> str:
        return f"{self.place.prefix}/" if self.place.prefix else ""

    def _is_ours(self, key: str) -> bool:
        name, _, file = key.removeprefix(self._below).partition("/")
        return step_of(name) is not None and file in (MODEL, TRAINING, MANIFEST)

    def _folders(self) -> dict[str, set[str]]:
        """The files of each checkpoint, whole or not."""
        folders: dict[str, set[str]] = {}
        for page in obstore.list(self.place.store, self._below or None):
            for item in page:
                name, _, file = item["path"].removeprefix(self._below).partition("/")
                folders.setdefault(name, set()).add(file)
        return folders


@dataclass(frozen=True)
class _BucketWriting:
    destination: StoreDestination

    def write(self, file: str, pieces: Pieces) -> None:
        for number in range(1, _TRIES + 1):
            try:
                return self.destination.write(file, ([piece] for piece in pieces()))
            except (PermissionDeniedError, UnauthenticatedError):
                raise
            except BaseError:
                if number == _TRIES:
                    raise
                time.sleep(pause_s(number))

    def commit(self, manifest: bytes) -> None:
        self.destination.put(MANIFEST, manifest)
