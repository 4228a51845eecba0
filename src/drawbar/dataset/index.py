"""The index of a set that has no manifest: every record's size, found by a scan and kept for the next time.

A scan reads record headers only and steps over the records. It is needed where ranks share shards; compressed shards
cannot be shared, and a set that has any is not indexed. What is kept lies in the user's cache folder, under a
name that changes with the listing (names, sizes and versions of the objects).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from drawbar.dataset.listing import Listing, ShardInfo, sha256_of
from drawbar.dataset.tfrecord import FRAME_BYTES, HEADER_BYTES, MAX_PAYLOAD_BYTES, compression_of, masked_crc32c
from drawbar.errors import DataError

INDEX_NAME = "index.json"
INDEX_VARIABLE = "DRAWBAR_SHARD_INDEX"
"""Names the index file to the ranks."""
EVAL_INDEX_NAME = "eval-index.json"
EVAL_INDEX_VARIABLE = "DRAWBAR_EVAL_SHARD_INDEX"
"""The same of the validation set."""

_SCHEMA = 1
_HEADER = struct.Struct("<QI")

Read = Callable[[str, int, int], bytes]
"""Bytes [start, end) of an object, by key."""


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """Framed size of every record, in order, by shard name."""

    record_bytes: dict[str, tuple[int, ...]]
    read_bytes: int = 0
    """What making it read now; 0: it was kept from an earlier scan."""

    def dumps(self) -> str:
        return json.dumps({"schema": _SCHEMA, "record_bytes": self.record_bytes}, separators=(",", ":"))

    @classmethod
    def load(cls, path: Path) -> ShardIndex:
        """Raises DataError for a file that is none, and OSError."""
        try:
            tree = json.loads(path.read_bytes())
            if tree["schema"] != _SCHEMA:
                raise ValueError
            sizes = {str(name): tuple(map(int, sizes)) for name, sizes in tree["record_bytes"].items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            raise DataError(f"{path} is no index of shards", hint="delete it") from None
        return cls(record_bytes=sizes)

    def apply(self, listing: Listing) -> Listing:
        """The listing with record counts and sizes. Raises DataError where the shards are not those indexed."""
        shards = []
        for shard in listing.shards:
            sizes = self.record_bytes.get(shard.name)
            if sizes is None or sum(sizes) != shard.size_bytes:
                raise DataError(
                    f"shard {shard.key} with {shard.size_bytes} bytes is not the one that was indexed",
                    hint="did the set change since the run began?",
                )
            shards.append(dataclasses.replace(shard, num_records=len(sizes), record_bytes=sizes))
        return dataclasses.replace(listing, shards=tuple(shards), sha256=sha256_of(tuple(shards)))


def cache_path(url: str, listing: Listing) -> Path:
    """Where the index of this listing is kept."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    known = [url, *([shard.name, shard.size_bytes, shard.version] for shard in listing.shards)]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return base / "drawbar" / "index" / f"{digest}.json"


def find_or_scan(url: str, listing: Listing, read: Read, *, window_bytes: int, threads: int) -> ShardIndex | None:
    """The kept index, else that of a scan, which is kept then. None where a shard is compressed.

    `window_bytes` is how much is read at a time: little for files, where a small read is cheap, and much for objects.
    Raises DataError for a damaged shard; errors of `read` pass through. A cache folder that cannot be written is none.
    """
    path = cache_path(url, listing)
    try:
        return ShardIndex.load(path)
    except (OSError, DataError):
        pass
    index = scan(listing.shards, read, window_bytes=window_bytes, threads=threads)
    if index is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_text(index.dumps())
            temporary.replace(path)
        except OSError:
            pass
    return index


def scan(shards: Sequence[ShardInfo], read: Read, *, window_bytes: int, threads: int) -> ShardIndex | None:
    """Reads the headers of all shards, `threads` at a time. See `find_or_scan`."""
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda shard: _scan_shard(shard, read, window_bytes), shards))
    record_bytes: dict[str, tuple[int, ...]] = {}
    for shard, (sizes, _) in zip(shards, found, strict=True):
        if sizes is None:
            return None
        record_bytes[shard.name] = sizes
    return ShardIndex(record_bytes=record_bytes, read_bytes=sum(read_bytes for _, read_bytes in found))


def _scan_shard(shard: ShardInfo, read: Read, window_bytes: int) -> tuple[tuple[int, ...] | None, int]:
    """Record sizes, None for a compressed shard; and the bytes read."""
    sizes: list[int] = []
    position = read_bytes = start = 0
    window = b""
    while position < shard.size_bytes:
        if position + HEADER_BYTES > start + len(window):
            start = position
            window = read(shard.key, start, min(start + max(window_bytes, HEADER_BYTES), shard.size_bytes))
            read_bytes += len(window)
            if position == 0 and compression_of(window):
                return None, read_bytes
        frame_bytes = _frame_bytes(shard, window, position, position - start)
        sizes.append(frame_bytes)
        position += frame_bytes
    return tuple(sizes), read_bytes


def _frame_bytes(shard: ShardInfo, window: bytes, position: int, at: int) -> int:
    where = f"{shard.key}: byte offset {position}"
    if len(window) - at < HEADER_BYTES:
        raise DataError(f"{where}: truncated last record: {len(window) - at} bytes are there")
    length, length_crc = _HEADER.unpack_from(window, at)
    if masked_crc32c(window[at : at + 8]) != length_crc or length > MAX_PAYLOAD_BYTES:
        raise DataError(f"{where}: wrong CRC of the record's length", hint="`drawbar data check` lists every fault")
    if position + length + FRAME_BYTES > shard.size_bytes:
        raise DataError(f"{where}: truncated last record", hint="`drawbar data check` lists every fault")
    return int(length) + FRAME_BYTES
