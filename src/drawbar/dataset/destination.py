"""Where a packed set is written: a folder, or a prefix in an object store.

An object is there under its name only when whole. What a killed packer leaves unfinished (temporary files; multipart
uploads, which cost money and show in no listing) is found and removed by the next one.
"""

from __future__ import annotations

import errno
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

import google_crc32c
import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import MemoryStore, ObjectStore, S3Store

from drawbar.dataset.items import Note
from drawbar.dataset.listing import join, object_sizes
from drawbar.dataset.manifest import PARTS
from drawbar.errors import DrawbarError, EnvironmentUnfit, InputError, RunFailed

"""Folder below the destination for what a packing needs until its manifest is written."""

_BLOCK_BYTES = 1 << 20
_MAX_PIECES = 512  # below the 1024 that writev takes
_PART_BYTES = 8 * 1024 * 1024
_PARTS_IN_FLIGHT = 4  # bounds memory: a worker holds about this many parts of its shard
_TRIES = 4
_AGAIN = "finished shards are kept: give the same command again, and it goes on with what is missing"
_T = TypeVar("_T")


class Destination(Protocol):
    """Picklable, but where `local_to_process`. Names are relative; errors pass through for `explain`."""

    @property
    def shown(self) -> str:
        """In messages."""

    @property
    def local_to_process(self) -> bool:
        """Whether other processes cannot see it."""

    @property
    def transient_errors(self) -> tuple[type[Exception], ...]:
        """After which writing is worth another try."""

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Size in bytes of each object directly in `folder`, by its name there."""

    def get(self, name: str) -> bytes: ...

    def put(self, name: str, data: bytes) -> None: ...

    def holds(self, name: str, crc32c: str) -> bool:
        """Whether a finished shard still has this content. True without a look where the store vouches for that."""

    def delete(self, name: str) -> None:
        """No error where there is none."""

    def write(self, name: str, pieces: Iterator[Sequence[bytes]]) -> None:
        """A large object. What `pieces` raises leaves nothing behind and passes through."""

    def drop_unfinished(self, names: Iterable[str], note: Note) -> None:
        """Removes what a killed packer left of these shards; none of them may be in the writing."""

    def explain(self, error: Exception) -> DrawbarError:
        """An error of this destination in one line."""


@dataclass(frozen=True)
class FolderDestination:
    """Made with the first thing written, so that what is refused before leaves no empty folder.

    Raises InputError at once where the folder could not be made or written to.
    """

    folder: Path
    local_to_process = False
    transient_errors: tuple[type[Exception], ...] = ()

    def __post_init__(self) -> None:
        there = next(path for path in (self.folder, *self.folder.parents, Path("/")) if os.path.lexists(path))
        if not there.is_dir():
            raise self.explain(NotADirectoryError(errno.ENOTDIR, f"{os.strerror(errno.ENOTDIR)}: {there}"))
        if not os.access(there, os.W_OK | os.X_OK):
            raise InputError(f"cannot write to {self.folder}: permission denied")

    @property
    def shown(self) -> str:
        return str(self.folder)

    def sizes(self, folder: str = "") -> dict[str, int]:
        try:
            with os.scandir(self.folder / folder) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except FileNotFoundError:
            return {}

    def get(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        self.write(name, iter([[data]]))

    def holds(self, name: str, crc32c: str) -> bool:
        found = 0
        with (self.folder / name).open("rb") as file:
            while chunk := file.read(_BLOCK_BYTES):
                found = google_crc32c.extend(found, chunk)
        return f"{found:08x}" == crc32c

    def delete(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)
        if name.startswith(f"{PARTS}/"):
            with suppress(OSError):  # not empty yet, or not there
                (self.folder / PARTS).rmdir()

    def write(self, name: str, pieces: Iterator[Sequence[bytes]]) -> None:
        """Not synced to disk: like `tar` and `cp`. After a power failure `holds` tells what was lost."""
        path = self.folder / name
        temporary = self.folder / PARTS / f"{path.name}.{secrets.token_hex(4)}.tmp"
        (self.folder / PARTS).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            try:
                for block in _blocks(pieces):
                    _write_all(descriptor, block)
            finally:
                os.close(descriptor)  # network file systems report a full disk here
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def drop_unfinished(self, names: Iterable[str], note: Note) -> None:
        wanted = set(names)
        for found in self.sizes(PARTS):
            match = re.fullmatch(r"(.+)\.[0-9a-f]{8}\.tmp", found)
            if match and match[1].removesuffix(".json") in wanted:
                (self.folder / PARTS / found).unlink(missing_ok=True)

    def explain(self, error: Exception) -> DrawbarError:
        what = f"cannot write to {self.folder}: {getattr(error, 'strerror', None) or error}"
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            return EnvironmentUnfit(what, hint=_AGAIN)
        return InputError(what)


@dataclass(frozen=True)
class StoreDestination:
    store: ObjectStore
    prefix: str
    where: str = ""
    """In messages, such as `s3://bucket/train at http://host:port`."""

    @property
    def shown(self) -> str:
        return self.where or self.prefix

    @property
    def local_to_process(self) -> bool:
        return isinstance(self.store, MemoryStore)

    @property
    def transient_errors(self) -> tuple[type[Exception], ...]:
        return (BaseError,)

    def sizes(self, folder: str = "") -> dict[str, int]:
        prefix = join(self.prefix.strip("/"), folder) if folder else self.prefix.strip("/")
        return _tried(lambda: object_sizes(self.store, prefix))

    def get(self, name: str) -> bytes:
        return _tried(lambda: bytes(obstore.get(self.store, self._key(name)).bytes()))

    def put(self, name: str, data: bytes) -> None:
        _tried(lambda: obstore.put(self.store, self._key(name), data, use_multipart=False))

    def holds(self, name: str, crc32c: str) -> bool:
        return True  # an object appears whole, and its store keeps checksums

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            _tried(lambda: obstore.delete(self.store, self._key(name)))

    def write(self, name: str, pieces: Iterator[Sequence[bytes]]) -> None:
        """One put for a small object, else a multipart upload, which obstore aborts on every error."""
        blocks = (b"".join(block) for block in _blocks(pieces))
        head: list[bytes] = []
        for block in blocks:
            head.append(block)
            if sum(map(len, head)) > _PART_BYTES:
                break
        else:
            obstore.put(self.store, self._key(name), b"".join(head), use_multipart=False)
            return
        obstore.put(
            self.store,
            self._key(name),
            chain(head, blocks),
            chunk_size=_PART_BYTES,
            max_concurrency=_PARTS_IN_FLIGHT,
        )

    def drop_unfinished(self, names: Iterable[str], note: Note) -> None:
        keys = {self._key(name) for name in names}
        abort_uploads(self.store, f"{self.prefix.strip('/')}/", lambda key: key in keys, note)

    def explain(self, error: Exception) -> DrawbarError:
        from drawbar.storage.failures import (
            explain,
        )  # with the recipe's machinery: not needed by a worker that succeeds

        found = explain(error, self.shown)
        text = str(error)
        if re.search(r"<Code>[^<]*Quota|status code: 507", text):
            return EnvironmentUnfit(f"no room left, or a quota reached: {self.shown}: {_words(text)}", hint=_AGAIN)
        if type(found) is RunFailed:
            hint = f"a full store and a reached quota may look like this too; {_AGAIN}"
            return RunFailed(f"write failed: {self.shown}: {_words(text)}", hint=hint)
        if isinstance(found, EnvironmentUnfit):
            found.hint = f"{found.hint}; {_AGAIN}" if found.hint else _AGAIN
        return found

    def _key(self, name: str) -> str:
        return join(self.prefix.strip("/"), name)


def _words(error: str) -> str:
    """What a store's error says, without its XML and the client's own state."""
    said = re.search(r"status code: (\d+ [^:<\n]*)", error)
    code = re.search(r"<Code>([^<]+)</Code>", error)
    message = re.search(r"<Message>([^<]+)</Message>", error)
    if said is None:
        return error.partition("\n")[0][:300]
    return ", ".join([said[1].strip(), *(found[1] for found in (code, message) if found)])[:300]


def _blocks(pieces: Iterator[Sequence[bytes]]) -> Iterator[list[bytes]]:
    """Pieces gathered to about 1 MiB, not copied."""
    block: list[bytes] = []
    size = 0
    for group in pieces:
        block += group
        size += sum(map(len, group))
        if size >= _BLOCK_BYTES or len(block) >= _MAX_PIECES:
            yield block
            block, size = [], 0
    if block:
        yield block


def _write_all(descriptor: int, block: Sequence[bytes]) -> None:
    written = os.writev(descriptor, block)
    total = sum(map(len, block))
    if written < total:  # the disk is nearly full; the next write says so
        rest = memoryview(b"".join(block))[written:]
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def _tried(action: Callable[[], _T]) -> _T:
    """The result of a small request, tried again after errors that may pass."""
    for number in range(1, _TRIES):
        try:
            return action()
        except (PermissionDeniedError, UnauthenticatedError):
            raise
        except BaseError:
            time.sleep(pause_s(number))
    return action()


def pause_s(number: int) -> float:
    """Before try `number` + 1: doubles, and differs between workers, which otherwise would come back all at once."""
    return random.uniform(0.5, 1.5) * 0.25 * (1 << number)


def abort_uploads(store: ObjectStore, prefix: str, ours: Callable[[str], bool], note: Note) -> None:
    """Ends the multipart uploads below `prefix` that a killed writer left, of the keys that are `ours`; `note` is told
    why not, where that cannot be."""
    if not isinstance(store, S3Store):
        return
    client = _upload_client(store)
    if client is None:
        note(
            "unfinished uploads of an earlier try are not looked for, as boto3 is not installed: "
            "pip install boto3, or let the bucket expire them"
        )
        return
    from botocore.exceptions import BotoCoreError, ClientError

    bucket = store.config["bucket"]
    try:
        for key, upload_id in _uploads(client, bucket, prefix):
            if ours(key):
                with suppress(client.exceptions.NoSuchUpload):
                    client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)
    except (BotoCoreError, ClientError) as error:  # writing goes on: they cost money, but are in nobody's way
        note(f"unfinished uploads of an earlier try could not be removed: {error}")


def _upload_client(store: S3Store) -> Any:
    """obstore neither lists unfinished uploads nor aborts another process's; boto3, an optional extra, does."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        return None
    config = store.config
    return boto3.client(
        "s3",
        endpoint_url=config.get("endpoint"),
        aws_access_key_id=config.get("access_key_id"),
        aws_secret_access_key=config.get("secret_access_key"),
        aws_session_token=config.get("session_token"),
        region_name=config.get("region"),
        config=Config(s3={"addressing_style": "path"} if config.get("endpoint") else {}, connect_timeout=10),
    )


def _uploads(client: Any, bucket: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Key and id of every unfinished upload below `prefix`."""
    markers: dict[str, str] = {}
    while True:
        page = client.list_multipart_uploads(Bucket=bucket, Prefix=prefix, **markers)
        for upload in page.get("Uploads", []):
            yield upload["Key"], upload["UploadId"]
        if not page.get("IsTruncated"):
            return
        markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}
