"""What lies under a prefix: the shards that a run reads, checked against the manifest where there is one.

Works on every obstore store alike. Errors of the store itself (no bucket, wrong key, nobody answers) pass through:
they are explained where the store was made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import obstore
from obstore.store import ObjectStore

from drawbar.dataset.manifest import MANIFEST_NAME, Manifest, ShardEntry
from drawbar.errors import DataError, InputError

_NO_SHARD_SUFFIXES = (".json", ".txt", ".md", ".csv", ".html")


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """One shard to read."""

    key: str
    """In the store."""
    name: str
    """The last part of the key."""
    size_bytes: int
    num_records: int | None
    """None without a manifest: unknown until the shard is read."""
    record_bytes: tuple[int, ...] | None
    """Framed size of each record in order, or None."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All shards, sorted by name."""

    shards: tuple[ShardInfo, ...]
    manifest: Manifest | None
    sha256: str
    """Of names, sizes and record sizes: ranks with the same one see the same set."""
    ignored: tuple[str, ...]
    """Names of objects that look like shards but are not in the manifest."""

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def num_records(self) -> int | None:
        return self.manifest.num_records if self.manifest else None


def list_shards(store: ObjectStore, prefix: str, read: Callable[[str, int], bytes] | None = None) -> Listing:
    """The shards directly under `prefix` (a whole path, without the last slash); folders below it are left out.

    With a manifest, exactly its shards. Without, every object whose name does not start with `.` or `_` and is not
    that of a text file; their record counts are unknown then.

    `read` gets an object by key and size; a run passes its counted reads, so that the manifest's bytes are counted too.

    Raises InputError where there are none; DataError for a manifest that is no manifest, and for shards that are
    missing or have another size than it says.
    """
    prefix = prefix.strip("/")
    sizes = object_sizes(store, prefix)
    candidates = sorted(name for name in sizes if looks_like_shard(name))
    if MANIFEST_NAME in sizes:
        manifest = load_manifest(store, prefix, read, sizes[MANIFEST_NAME])
        shards = tuple(_checked(entry, sizes, prefix) for entry in sorted(manifest.shards, key=lambda s: s.name))
    else:
        manifest = None
        shards = tuple(
            ShardInfo(key=join(prefix, name), name=name, size_bytes=sizes[name], num_records=None, record_bytes=None)
            for name in candidates
        )
    if not shards:
        raise InputError(
            f"no shards under {prefix or '/'!r}" + _what_is_there(sizes),
            hint="data.url names the prefix that holds the shards themselves, such as s3://bucket/train",
        )
    known = {shard.name for shard in shards}
    ignored = tuple(name for name in candidates if name not in known)
    return Listing(shards=shards, manifest=manifest, sha256=_sha256(shards), ignored=ignored)


def object_sizes(store: ObjectStore, prefix: str) -> dict[str, int]:
    """Size in bytes of each object directly under `prefix`, by the last part of its key."""
    found = obstore.list_with_delimiter(store, prefix or None)
    below = prefix + "/" if prefix else ""  # a store's empty object for the folder itself is none of them
    return {
        item["path"].removeprefix(below): item["size"] for item in found["objects"] if item["path"].startswith(below)
    }


def load_manifest(
    store: ObjectStore, prefix: str, read: Callable[[str, int], bytes] | None = None, size_bytes: int = 0
) -> Manifest:
    key = join(prefix, MANIFEST_NAME)
    text = read(key, size_bytes) if read is not None else bytes(obstore.get(store, key).bytes())
    return Manifest.loads(text, key)


def looks_like_shard(name: str) -> bool:
    return not name.startswith((".", "_")) and not name.lower().endswith(_NO_SHARD_SUFFIXES)


def join(prefix: str, name: str) -> str:
    """A key from its prefix, which may be empty, and name."""
    return f"{prefix}/{name}" if prefix else name


def _checked(entry: ShardEntry, sizes: Mapping[str, int], prefix: str) -> ShardInfo:
    key = join(prefix, entry.name)
    hint = "copy or pack the set again; all shards and manifest.json belong together"
    if entry.name not in sizes:
        raise DataError(f"shard {key} is missing; {MANIFEST_NAME} lists it with {entry.size_bytes} bytes", hint=hint)
    actual = sizes[entry.name]
    if actual != entry.size_bytes:
        change = "truncated" if actual < entry.size_bytes else "replaced"
        raise DataError(
            f"shard {key} has {actual} bytes; {MANIFEST_NAME} says {entry.size_bytes}: it was {change}", hint=hint
        )
    return ShardInfo(
        key=key,
        name=entry.name,
        size_bytes=actual,
        num_records=entry.num_records,
        record_bytes=entry.record_bytes,
    )


def _what_is_there(sizes: Mapping[str, int]) -> str:
    if not sizes:
        return ": nothing is there"
    names = sorted(sizes)
    return f": only {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _sha256(shards: tuple[ShardInfo, ...]) -> str:
    canonical = [[shard.name, shard.size_bytes, shard.record_bytes] for shard in shards]
    return hashlib.sha256(json.dumps(canonical, separators=(",", ":")).encode()).hexdigest()
