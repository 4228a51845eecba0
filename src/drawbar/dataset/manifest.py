"""The manifest: what a packed set consists of, written beside the shards as the last object of all.

Its presence says that the set is complete. It lists every record's framed size, so that a reader knows the byte
offset of each record, and so the plan for any number of ranks, without reading a shard.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from drawbar.dataset.tfrecord import FRAME_BYTES
from drawbar.errors import DataError
from drawbar.plural import plural

Action = Literal["skipped", "fixed", "kept"]
RecordSchema = Literal["imagenet", "coco"]

MANIFEST_NAME = "manifest.json"
PARTS = "_parts"
CLAIM_NAME = "set.json"
"""`_parts/set.json` is there from the beginning of a packing until its manifest is."""
SCHEMA = 1
"""Goes up when a reader of the old number would misread; keys that a reader does not know are skipped."""


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One shard as written. Its sums are checked when it is made."""

    name: str
    """Object name below the prefix, such as `train-00000-of-00016`."""
    size_bytes: int
    num_records: int
    crc32c: str
    """Of the whole file, 8 hexadecimal digits."""
    record_bytes: tuple[int, ...]
    """Framed size of each record, in order; the offsets are its running sums."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise DataError(f"shard name {self.name!r}: expected a plain name")
        if len(self.record_bytes) != self.num_records:
            raise DataError(
                f"shard {self.name}: {plural(self.num_records, 'record')}, but {plural(len(self.record_bytes), 'size')}"
            )
        if self.record_bytes and min(self.record_bytes) < FRAME_BYTES:
            raise DataError(f"shard {self.name}: a record of {min(self.record_bytes)} bytes; a frame has {FRAME_BYTES}")
        if sum(self.record_bytes) != self.size_bytes:
            total = sum(self.record_bytes)
            raise DataError(f"shard {self.name}: its record sizes add up to {total}, not {self.size_bytes} bytes")


@dataclass(frozen=True, kw_only=True)
class BadFile:
    """A source file that was not as it should be, and what was done with it."""

    path: str
    """Below the source folder."""
    reason: str
    action: Action = "skipped"
    """`skipped`: not in the set; `fixed`: there as a re-encoded RGB JPEG; `kept`: there with its own bytes."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A complete packed set. Raises DataError where its parts contradict each other."""

    split: str
    """The shards' name prefix, such as `train`."""
    seed: int
    """Of the shuffle."""
    labels: tuple[str, ...]
    """Class names in label order: label 1 is the first; 0 is left for background."""
    class_counts: tuple[int, ...]
    """By class, in label order: records, or with the COCO schema objects."""
    shards: tuple[ShardEntry, ...]
    bad: tuple[BadFile, ...] = ()
    source_sha256: str = ""
    """Of the source's file names and sizes and the packing's settings: equal means the same shards."""
    tool_version: str = ""
    schema: int = SCHEMA
    record_schema: RecordSchema = "imagenet"
    """Which keys the records have."""
    on_bad: str = "fail"
    """What was asked for: `fail`, `skip` or `fix`."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the source had to say: counts of boxes dropped, the map of categories."""
    was_edited: bool = field(default=False, compare=False)
    """As read: its digest is not that of what it says."""

    def __post_init__(self) -> None:
        if len(self.class_counts) != len(self.labels):
            raise DataError(f"{plural(len(self.labels), 'label')}, but {plural(len(self.class_counts), 'class count')}")
        if self.record_schema == "imagenet" and sum(self.class_counts) != self.num_records:
            raise DataError(
                f"class counts add up to {sum(self.class_counts)}, the shards to {self.num_records} records"
            )
        if len({shard.name for shard in self.shards}) != len(self.shards):
            raise DataError("two shards have the same name")
        stranger = next((shard.name for shard in self.shards if not shard.name.startswith(self.split)), None)
        if stranger is not None:
            raise DataError(f"split is {self.split!r}, but a shard's name is {stranger!r}")

    def bad_paths(self, action: Action) -> list[str]:
        return [item.path for item in self.bad if item.action == action]

    @property
    def num_classes(self) -> int:
        return len(self.labels)

    @property
    def num_records(self) -> int:
        return sum(shard.num_records for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)

    def dumps(self) -> str:
        """JSON: one line a setting, one line a shard."""
        head: dict[str, Any] = {
            "schema": self.schema,
            "tool": "drawbar",
            "tool_version": self.tool_version,
            "split": self.split,
            "record_schema": self.record_schema,
            "seed": self.seed,
            "on_bad": self.on_bad,
            "source_sha256": self.source_sha256,
            "num_classes": self.num_classes,
            "num_records": self.num_records,
            "size_bytes": self.size_bytes,
            "labels": self.labels,
            "class_counts": self.class_counts,
            "notes": dict(self.notes),
            "bad": [asdict(item) for item in self.bad],
        }
        shard_trees = [asdict(shard) for shard in self.shards]
        head["sha256"] = digest_of(head | {"shards": shard_trees})
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        shards = ",\n".join(json.dumps(tree, separators=(",", ":")) for tree in shard_trees)
        return "{\n" + ",\n".join([*lines, f'"shards": [\n{shards}\n]']) + "\n}\n"

    @classmethod
    def loads(cls, text: str | bytes, where: str = MANIFEST_NAME) -> Manifest:
        """Raises DataError naming `where` for what is no manifest, is newer than this tool, or contradicts itself; see
        `refuse_edited` for one that does not and yet was changed."""
        try:
            tree = json.loads(text, object_pairs_hook=_without_doubles)
        except (ValueError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(f"{where} is no JSON: {error}") from None
        schema = tree.get("schema") if isinstance(tree, dict) else None
        if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
            raise DataError(f"{where} is no manifest of Drawbar: it has no schema number")
        if schema > SCHEMA:
            raise DataError(
                f"{where} has schema {schema}; this Drawbar reads up to {SCHEMA}",
                hint="use the Drawbar that packed the set, or a newer one",
            )
        try:
            return _from_tree(tree)
        except DataError as error:
            raise DataError(f"{where}: {error.message}") from None

    def refuse_edited(self, where: str = MANIFEST_NAME) -> None:
        """Raises DataError where it was changed after the packer had written it."""
        if self.was_edited:
            raise DataError(
                f"{where} was changed after it was written: its sha256 is not that of its content",
                hint="copy or pack the set again; `drawbar data check` looks at everything else",
            )


def digest_of(tree: Mapping[str, Any]) -> str:
    """SHA-256 of everything but `sha256` itself, whatever the order of keys and the white space."""
    content = {key: value for key, value in tree.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("a key stands there twice")
    return tree


def _from_tree(tree: Mapping[str, Any]) -> Manifest:
    manifest = Manifest(
        split=_get(tree, "split", str),
        seed=_get(tree, "seed", int),
        labels=_tuple(tree, "labels", str),
        class_counts=_tuple(tree, "class_counts", int),
        shards=tuple(shard_entry(item) for item in _tuple(tree, "shards", dict)),
        bad=tuple(bad_file(item) for item in _tuple(tree, "bad", dict)),
        source_sha256=_get(tree, "source_sha256", str),
        tool_version=_get(tree, "tool_version", str),
        schema=_get(tree, "schema", int),
        # Sets of the first version have none of these.
        record_schema=_one_of(tree, "record_schema", get_args(RecordSchema), "imagenet"),
        on_bad=_one_of(tree, "on_bad", ("fail", "skip", "fix"), "skip"),
        notes=_get(tree, "notes", dict) if "notes" in tree else {},
        # Those before it was kept have none.
        was_edited="sha256" in tree and tree["sha256"] != digest_of(tree),
    )
    for key in ("num_classes", "num_records", "size_bytes"):
        announced = _get(tree, key, int)
        if announced != getattr(manifest, key):
            raise DataError(f"{key} is {announced}, but its parts give {getattr(manifest, key)}")
    return manifest


def bad_file(item: Mapping[str, Any]) -> BadFile:
    """From JSON. Raises DataError for what is none."""
    return BadFile(
        path=_get(item, "path", str),
        reason=_get(item, "reason", str),
        action=_one_of(item, "action", get_args(Action), "skipped"),
    )


def shard_entry(item: Mapping[str, Any]) -> ShardEntry:
    """From JSON. Raises DataError for what is none."""
    return ShardEntry(
        name=_get(item, "name", str),
        size_bytes=_get(item, "size_bytes", int),
        num_records=_get(item, "num_records", int),
        crc32c=_get(item, "crc32c", str),
        record_bytes=_tuple(item, "record_bytes", int),
    )


def _get(tree: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
    if key not in tree:
        raise DataError(f"{key} is missing")
    value = tree[key]
    if not isinstance(value, kind) or (kind is int and value < 0):
        raise DataError(f"{key} is {str(value)[:60]!r}; expected {kind.__name__}")
    return value


def _one_of(tree: Mapping[str, Any], key: str, allowed: tuple[str, ...], default: str) -> Any:
    value = tree.get(key, default)
    if value not in allowed:
        raise DataError(f"{key} is {str(value)[:60]!r}; expected {', '.join(allowed)}")
    return value


def _tuple(tree: Mapping[str, Any], key: str, kind: type[Any]) -> tuple[Any, ...]:
    values: list[Any] = _get(tree, key, list)
    for value in values:
        if not isinstance(value, kind) or (kind is int and value < 0):
            raise DataError(f"{key} holds {str(value)[:60]!r}; expected {kind.__name__}")
    return tuple(values)
