"""Verifies a set, packed by Drawbar or foreign: framing and CRCs, schema, labels, boxes, images, and the manifest.

Goes on after a fault wherever the framing allows, so that one pass finds them all: a wrong CRC of a record's data
spoils that record, a wrong CRC of a length the rest of its shard.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from drawbar.dataset.listing import (
    ShardInfo,
    foreign_shard,
    join,
    listed_under,
    load_manifest,
    looks_like_shard,
    matches,
    missing_names,
    no_shards,
    refuse_several_sets,
    refuse_unfinished,
    shards_among,
)
from drawbar.dataset.manifest import MANIFEST_NAME, Manifest, ShardEntry
from drawbar.dataset.record_check import RecordRules, SchemaName, read_features, schema_of
from drawbar.dataset.walk import Fault, Origin, Progress, ShardWalk, each_shard, first_record
from drawbar.errors import DataError, InputError
from drawbar.plural import plural
from drawbar.storage.stores import Place

SchemaChoice = Literal["auto", "imagenet", "coco", "none"]
"""`auto`: the manifest's, else by the first record; `none`: framing only."""

OnFault = Callable[[Fault], None]


@dataclass(kw_only=True)
class CheckSummary:
    """What was looked at. Faults went to the caller one by one."""

    shards: int = 0
    records: int = 0
    """Framed, damaged ones included."""
    read_bytes: int = 0
    decoded: int = 0
    faults: int = 0
    faulty_shards: int = 0
    """Missing ones included."""
    unlisted_faults: int = 0
    """Counted and not told one by one: those beyond 10,000 of one shard."""
    unread_records: int = 0
    """Of shards that could not be read to their end, by the manifest."""
    schema: SchemaName = "none"
    has_manifest: bool = False
    compressed_shards: int = 0
    class_counts: Counter[int] = field(default_factory=Counter)
    """By label: records, or with the COCO schema objects."""


@dataclass(frozen=True)
class _Set:
    """What is to be checked."""

    shards: list[ShardInfo]
    entries: dict[str, ShardEntry]
    """Of the manifest, by shard name; empty without one."""
    manifest: Manifest | None


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    name: str
    records: int
    looked_at: int
    """Records whose labels are counted."""
    decoded: int
    read_bytes: int
    crc32c: str
    whole: bool
    compressed: bool
    faults: list[Fault]
    num_faults: int
    class_counts: Counter[int]


@dataclass(frozen=True, kw_only=True)
class ShardChecker:
    """Checks one shard; picklable."""

    rules: RecordRules
    sample: float
    """Share of the records whose images are decoded: 0 none, 1 all."""

    def __call__(self, walk: ShardWalk) -> ShardReport:
        sizes = walk.shard.record_bytes or ()
        sizes_agree = True
        decoded = looked_at = 0
        counts: Counter[int] = Counter()
        for number, offset, payload in walk:
            looked_at += 1
            framed = len(payload) + 16
            if sizes_agree and number < len(sizes) and sizes[number] != framed:
                # Told once: from here on every offset differs.
                sizes_agree = False
                walk.fault(number, offset, f"{framed} bytes with its frame; {MANIFEST_NAME} says {sizes[number]}")
            decode = is_sampled(walk.shard.name, number, self.sample)
            found = self.rules.check(payload, decode)
            decoded += decode
            for reason in found.reasons:
                walk.fault(number, offset, reason)
            counts.update(found.labels)
        return ShardReport(
            name=walk.shard.name,
            records=walk.num_records,
            looked_at=looked_at,
            decoded=decoded,
            read_bytes=walk.read_bytes,
            crc32c=f"{walk.crc32c:08x}",
            whole=walk.whole,
            compressed=bool(walk.compression),
            faults=walk.faults,
            num_faults=walk.num_faults,
            class_counts=counts,
        )


def is_sampled(shard: str, record: int, share: float) -> bool:
    """Whether a record belongs to the sample: by a hash of its place, so the same ones every time, on every machine."""
    if share <= 0 or share >= 1:
        return share >= 1
    digest = hashlib.blake2b(f"{shard}/{record}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def check_set(
    origin: Origin,
    *,
    pattern: str = "",
    schema: SchemaChoice = "auto",
    sample: float = 0.0,
    workers: int = 0,
    on_fault: OnFault,
    on_total: Callable[[int, int], None] = lambda shards, size_bytes: None,
    progress: Progress = lambda read_bytes, records: None,
) -> CheckSummary:
    """Reads the whole set and gives every fault to `on_fault`, shard after shard.

    `pattern` picks shards by name (see `listing.split_pattern`); `sample` is the share of images that are decoded.
    `on_total` is told once what there is to read. Raises InputError where there is no set, or several in one place;
    errors of the store pass through from the listing, and are EnvironmentUnfit or InputError later.
    """
    if not 0 <= sample <= 1:
        raise InputError(f"sample is {sample:g}; expected a share from 0 to 1")
    summary = CheckSummary()

    def tell(fault: Fault) -> None:
        summary.faults += 1
        on_fault(fault)

    found = _find(origin.open(), origin.url, pattern, tell)
    summary.faulty_shards = summary.faults
    on_total(len(found.shards), sum(shard.size_bytes for shard in found.shards))
    rules = _rules(origin, found, schema, tell)
    summary.schema, summary.has_manifest = rules.schema, found.manifest is not None
    checker = ShardChecker(rules=rules, sample=sample)
    counted_all = bool(found.manifest) and len(found.shards) == len(found.entries)
    for report in each_shard(origin, found.shards, checker, workers, progress):
        before = summary.faults
        for fault in report.faults:
            tell(fault)
        summary.faults += report.num_faults - len(report.faults)
        summary.unlisted_faults += report.num_faults - len(report.faults)
        entry = found.entries.get(report.name)
        if entry is not None:
            summary.unread_records += 0 if report.whole else max(entry.num_records - report.records, 0)
            for reason in _differences(report, entry):
                tell(Fault(report.name, None, None, reason))
        counted_all &= report.whole and report.looked_at == report.records
        summary.faulty_shards += summary.faults > before
        _add(summary, report)
    if found.manifest is not None and counted_all and rules.label_ids is not None:
        for reason in _class_differences(summary.class_counts, found.manifest):
            tell(Fault(MANIFEST_NAME, None, None, reason))
    return summary


def _add(summary: CheckSummary, report: ShardReport) -> None:
    summary.shards += 1
    summary.records += report.records
    summary.read_bytes += report.read_bytes
    summary.decoded += report.decoded
    summary.compressed_shards += report.compressed
    summary.class_counts.update(report.class_counts)


def _find(place: Place, shown: str, pattern: str, tell: OnFault) -> _Set:
    """Unlike `list_shards` it goes on without what is missing or of another size, and tells."""
    objects, unnameable = listed_under(place.store, place.prefix)
    names = sorted(name for name in objects if looks_like_shard(name) and matches(name, pattern))
    for name in shards_among(unnameable, pattern):
        tell(Fault(name, None, None, "not read: a name with control characters or other bytes than UTF-8"))
    manifest = None
    if MANIFEST_NAME in objects:
        try:
            manifest = load_manifest(place.store, place.prefix)
        except DataError as error:
            tell(Fault(MANIFEST_NAME, None, None, error.message.removeprefix(f"{join(place.prefix, MANIFEST_NAME)}: ")))
        else:
            if manifest.was_edited:
                tell(Fault(MANIFEST_NAME, None, None, "changed after it was written: its sha256 does not fit"))
    if manifest is not None and not all(matches(entry.name, pattern) for entry in manifest.shards):
        manifest = None
    if manifest is None:
        if MANIFEST_NAME not in objects:
            refuse_unfinished(place.store, place.prefix, shown)
        refuse_several_sets(names, shown)
        if not names:
            raise no_shards({name: size for name, (size, _) in objects.items()}, shown, pattern)
        for name in missing_names(names):
            tell(Fault(name, None, None, "missing, by the numbers of the others"))
        for name in names:
            if objects[name][0] == 0:
                tell(Fault(name, None, None, "empty: no record, as of a copy that failed"))
        return _Set([foreign_shard(place.prefix, name, *objects[name]) for name in names], {}, None)
    entries = {entry.name: entry for entry in manifest.shards}
    shards = []
    for name in sorted(entries):
        if name not in objects:
            tell(Fault(name, None, None, f"missing; {MANIFEST_NAME} lists it with {entries[name].size_bytes} bytes"))
            continue
        size_bytes = objects[name][0]
        if size_bytes != entries[name].size_bytes:
            tell(Fault(name, None, None, f"{size_bytes} bytes; {MANIFEST_NAME} says {entries[name].size_bytes}"))
        shards.append(_shard(place, entries[name], size_bytes))
    for name in names:
        if name not in entries:
            tell(Fault(name, None, None, f"not in {MANIFEST_NAME}"))
    return _Set(shards, entries, manifest)


def _shard(place: Place, entry: ShardEntry, size_bytes: int) -> ShardInfo:
    """With the size that it has, to be read whole, and the record sizes that it should have."""
    return ShardInfo(
        key=join(place.prefix, entry.name),
        name=entry.name,
        size_bytes=size_bytes,
        num_records=entry.num_records,
        record_bytes=entry.record_bytes,
    )


def _rules(origin: Origin, found: _Set, choice: SchemaChoice, tell: OnFault) -> RecordRules:
    manifest = found.manifest
    schema: SchemaName
    if choice != "auto":
        schema = choice
    elif manifest is not None:
        schema = manifest.record_schema
    else:
        schema = _guessed(origin, found.shards, tell)
    if manifest is None or schema != manifest.record_schema:
        return RecordRules(schema=schema, all_keys=False, label_ids=None)
    try:
        ids = frozenset(label_ids(manifest))
    except ValueError as error:
        tell(Fault(MANIFEST_NAME, None, None, str(error)))
        ids = frozenset()
    return RecordRules(schema=schema, all_keys=True, label_ids=ids or None)


def label_ids(manifest: Manifest) -> Sequence[int]:
    """What the records call each class, in label order: 1..N, or COCO's category ids, which have gaps.

    Raises ValueError for a map that is none."""
    category_map = manifest.notes.get("category_map")
    if manifest.record_schema == "coco" and isinstance(category_map, dict):
        labels = sorted((label, category) for category, label in category_map.items() if isinstance(label, int))
        if [label for label, _ in labels] != list(range(1, manifest.num_classes + 1)):
            raise ValueError(f"notes.category_map does not give each of 1..{manifest.num_classes} once")
        if not all(category.isascii() and category.isdecimal() for _, category in labels):
            raise ValueError("notes.category_map has keys that are no category ids")
        return [int(category) for _, category in labels]
    return range(1, manifest.num_classes + 1)


def _guessed(origin: Origin, shards: Sequence[ShardInfo], tell: OnFault) -> SchemaName:
    """By the first record that can be read; a set without any is checked for its framing, which tells why."""
    for shard in shards[:8]:
        record = first_record(origin, shard)
        if record is None:
            continue
        schema = schema_of(record.payload)
        if schema is None:
            try:
                keys = ", ".join(sorted(read_features(record.payload))[:8]) or "none"
            except DataError:
                keys = "no tf.train.Example"
            reason = f"neither ImageNet's nor COCO's keys ({keys}): only the framing is checked"
            tell(Fault(shard.name, record.number, record.offset, reason))
        return schema or "none"
    return "none"


def _differences(report: ShardReport, entry: ShardEntry) -> list[str]:
    if not report.whole:
        left = entry.num_records - report.records
        return [f"the last {left} of its {entry.num_records} records could not be looked at"] if left > 0 else []
    reasons = []
    if report.records != entry.num_records:
        reasons.append(f"{plural(report.records, 'record')}; {MANIFEST_NAME} says {entry.num_records}")
    if report.crc32c != entry.crc32c:
        reasons.append(f"crc32c of the whole shard is {report.crc32c}; {MANIFEST_NAME} says {entry.crc32c}")
    return reasons


def _class_differences(counts: Counter[int], manifest: Manifest) -> list[str]:
    return [
        f"class {label} ({name}): {counts[label]} counted, class_counts says {expected}"
        for label, name, expected in zip(label_ids(manifest), manifest.labels, manifest.class_counts, strict=False)
        if counts[label] != expected
    ]
