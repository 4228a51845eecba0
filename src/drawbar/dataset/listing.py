"""What lies under a prefix: the shards that a run reads, checked against the manifest where there is one.

Works on every obstore store alike. Errors of the store itself (no bucket, wrong key, nobody answers) pass through:
they are explained where the store was made.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import InvalidPathError
from obstore.store import LocalStore, ObjectStore

from drawbar.dataset.manifest import CLAIM_NAME, MANIFEST_NAME, PARTS, Manifest, ShardEntry
from drawbar.errors import DataError, InputError
from drawbar.plural import plural

if TYPE_CHECKING:
    from obstore import ObjectMeta  # in its stubs only

_NO_SHARD_SUFFIXES = (
    *(".json", ".txt", ".md", ".rst", ".csv", ".html", ".idx", ".index", ".pbtxt", ".xml", ".log", ".yaml", ".toml"),
    *(".jpeg", ".jpg", ".png", ".gif", ".bmp", ".webp", ".tar", ".zip"),
)
_NO_SHARD_NAMES = ("readme", "license", "licence", "notice", "changelog")
_MODIFIED = "modified "
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NUMBERED = re.compile(r"(.*?)(\d+)-of-(\d+)(.*)")
"""`train-00003-of-00016`, `x.tfrecord-00003-of-00016`, `train-00003-of-00016.tfrecord`: as TensorFlow names shards."""


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
    version: str = ""
    """What the store says an object's content goes by: its ETag, else `modified` and the time of change."""

    @property
    def e_tag(self) -> str:
        """Empty where the store's listing has none."""
        return "" if self.version.startswith(_MODIFIED) else self.version


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All shards, sorted by name."""

    shards: tuple[ShardInfo, ...]
    manifest: Manifest | None
    sha256: str
    """Of names, sizes and record sizes: ranks with the same one see the same set."""
    ignored: tuple[str, ...]
    """Names of objects that look like shards, but are not in the manifest or cannot be named (then escaped)."""
    missing: tuple[str, ...] = ()
    """Without a manifest: shards that the others' numbers say there should be."""

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def num_records(self) -> int | None:
        counts = [shard.num_records for shard in self.shards]
        return None if None in counts else sum(count or 0 for count in counts)


def split_pattern(url: str) -> tuple[str, str]:
    """`s3://bucket/all/train-*` to `s3://bucket/all` and `train-*`; an empty pattern where the last part has no `*`."""
    before, slash, last = url.rpartition("/")
    return (before if slash else ".", last) if "*" in last else (url, "")


def list_shards(
    store: ObjectStore,
    prefix: str,
    read: Callable[[str, int], bytes] | None = None,
    pattern: str = "",
    shown: str = "",
) -> Listing:
    """The shards directly under `prefix` (a whole path, without the last slash); folders below it are left out.

    With a manifest, exactly its shards. Without, every object whose name does not start with `.` or `_` and is not
    that of a text file; their record counts are unknown then. `pattern` (see `split_pattern`) picks some by name:
    TensorFlow's converters write the training and the validation shards to one folder. `shown` is how messages name
    the place.

    `read` gets an object by key and size; a run passes its counted reads, so that the manifest's bytes are counted too.

    Raises InputError where there are none, or those of several sets; DataError for a manifest that is no manifest, and
    for shards that are missing or have another size than it says.
    """
    prefix = prefix.strip("/")
    shown = shown or prefix or "/"
    objects, unnameable = listed_under(store, prefix)
    sizes = {name: size for name, (size, _) in objects.items()}
    candidates = sorted(name for name in sizes if looks_like_shard(name) and matches(name, pattern))
    manifest = load_manifest(store, prefix, read, sizes[MANIFEST_NAME]) if MANIFEST_NAME in sizes else None
    if manifest is not None and all(matches(entry.name, pattern) for entry in manifest.shards):
        manifest.refuse_edited(join(prefix, MANIFEST_NAME))
        shards = tuple(_checked(entry, objects, prefix) for entry in sorted(manifest.shards, key=lambda s: s.name))
    else:
        manifest = None
        refuse_unfinished(store, prefix, shown)
        refuse_several_sets(candidates, shown)
        shards = tuple(foreign_shard(prefix, name, *objects[name]) for name in candidates)
    if not shards:
        raise no_shards(sizes, shown, pattern)
    known = {shard.name for shard in shards}
    ignored = tuple(name for name in candidates if name not in known) + shards_among(unnameable, pattern)
    missing = () if manifest else missing_names(candidates)
    return Listing(shards=shards, manifest=manifest, sha256=sha256_of(shards), ignored=ignored, missing=missing)


def object_sizes(store: ObjectStore, prefix: str) -> dict[str, int]:
    """Size in bytes of each object directly under `prefix`, by the last part of its key."""
    return {name: size for name, (size, _) in objects_under(store, prefix).items()}


def objects_under(store: ObjectStore, prefix: str) -> dict[str, tuple[int, str]]:
    """Size in bytes and version of each object directly under `prefix`, by the last part of its key."""
    return listed_under(store, prefix)[0]


def listed_under(store: ObjectStore, prefix: str) -> tuple[dict[str, tuple[int, str]], tuple[str, ...]]:
    """As `objects_under`; and, escaped, the names of files in a folder that obstore cannot name: no UTF-8, or with
    control characters. One of them makes its own listing fail as a whole."""
    below = prefix + "/" if prefix else ""  # a store's empty object for the folder itself is none of them
    unnameable: tuple[str, ...] = ()
    try:
        found: Iterable[ObjectMeta] = obstore.list_with_delimiter(store, prefix or None)["objects"]
    except InvalidPathError:
        if not isinstance(store, LocalStore) or store.prefix is None:
            raise
        found, unnameable = _files_of(store, Path(store.prefix) / prefix, below)
    return {
        item["path"].removeprefix(below): (item["size"], item["e_tag"] or _MODIFIED + item["last_modified"].isoformat())
        for item in found
        if item["path"].startswith(below)
    }, unnameable


def _files_of(store: LocalStore, folder: Path, below: str) -> tuple[list[ObjectMeta], tuple[str, ...]]:
    found, unnameable = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_file():
                continue
            text = os.fsencode(entry.name).decode(errors="backslashreplace")
            escaped = _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
            if escaped == entry.name:
                found.append(obstore.head(store, below + entry.name))
            else:
                unnameable.append(escaped)
    return found, tuple(sorted(unnameable))


def shards_among(names: Iterable[str], pattern: str) -> tuple[str, ...]:
    return tuple(name for name in names if looks_like_shard(name) and matches(name, pattern))


def foreign_shard(prefix: str, name: str, size_bytes: int, version: str = "") -> ShardInfo:
    """A shard of which only the listing is known."""
    return ShardInfo(
        key=join(prefix, name), name=name, size_bytes=size_bytes, num_records=None, record_bytes=None, version=version
    )


def no_shards(sizes: Mapping[str, int], shown: str, pattern: str) -> InputError:
    return InputError(
        f"no shards {pattern or ''}{' ' if pattern else ''}in {shown}" + _what_is_there(sizes),
        hint="name the folder or prefix that holds the shards themselves; `drawbar data pack` makes shards of images",
    )


def refuse_unfinished(store: ObjectStore, prefix: str, shown: str) -> None:
    """Raises InputError where a packing has begun and not ended: its shards so far are no set."""
    if CLAIM_NAME in objects_under(store, join(prefix, PARTS)):
        raise InputError(
            f"the packing of {shown} is not finished",
            hint="give its `drawbar data pack` command again: it goes on with what is missing",
        )


def refuse_several_sets(names: Sequence[str], shown: str) -> None:
    """Raises InputError where names tell of several numbered sets: reading them as one would mix the splits."""
    sets: Counter[str] = Counter()
    for name in names:
        number = _NUMBERED.fullmatch(name)
        if number:
            sets[f"{number[1]}*-of-{number[3]}{number[4]}"] += 1
    if len(sets) > 1:
        named = ", ".join(f"{name} ({plural(count, 'shard')})" for name, count in sorted(sets.items())[:4])
        raise InputError(
            f"{len(sets)} sets in {shown}: {named}",
            hint=f"end the URL with the names of one of them, such as /{min(sets)}",
        )


def missing_names(names: Sequence[str]) -> tuple[str, ...]:
    """Shards of a numbered set that are not there, from the numbers of those that are. At most 100,000 are named."""
    found = [number for name in names if (number := _NUMBERED.fullmatch(name))]
    if not found or len(found) != len(names):
        return ()
    first, there = found[0], {int(number[2]) for number in found}
    total = min(int(first[3]), 100_000)
    width = len(first[2])
    wanted = (i for i in range(total) if i not in there)
    return tuple(f"{first[1]}{i:0{width}d}-of-{first[3]}{first[4]}" for i in wanted)


def load_manifest(
    store: ObjectStore, prefix: str, read: Callable[[str, int], bytes] | None = None, size_bytes: int = 0
) -> Manifest:
    key = join(prefix, MANIFEST_NAME)
    text = read(key, size_bytes) if read is not None else bytes(obstore.get(store, key).bytes())
    return Manifest.loads(text, key)


def looks_like_shard(name: str) -> bool:
    lower = name.lower()
    return not (lower.startswith((".", "_")) or lower in _NO_SHARD_NAMES or lower.endswith(_NO_SHARD_SUFFIXES))


def matches(name: str, pattern: str) -> bool:
    """`*` stands for any characters; an empty pattern takes every name."""
    return not pattern or re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None


def join(prefix: str, name: str) -> str:
    """A key from its prefix, which may be empty, and name."""
    return f"{prefix}/{name}" if prefix else name


def _checked(entry: ShardEntry, objects: Mapping[str, tuple[int, str]], prefix: str) -> ShardInfo:
    key = join(prefix, entry.name)
    hint = "copy or pack the set again; all shards and manifest.json belong together"
    if entry.name not in objects:
        raise DataError(f"shard {key} is missing; {MANIFEST_NAME} lists it with {entry.size_bytes} bytes", hint=hint)
    actual, version = objects[entry.name]
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
        version=version,
    )


def _what_is_there(sizes: Mapping[str, int]) -> str:
    if not sizes:
        return ": nothing is there"
    names = sorted(sizes)
    return f": only {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def sha256_of(shards: tuple[ShardInfo, ...]) -> str:
    canonical = [[shard.name, shard.size_bytes, shard.record_bytes] for shard in shards]
    return hashlib.sha256(json.dumps(canonical, separators=(",", ":")).encode()).hexdigest()
