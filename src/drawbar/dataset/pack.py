"""Packs a folder of class folders of JPEG files into TFRecord shards with the ImageNet keys.

The keys are those of tensorflow/models `build_imagenet_data.py`; the image is the file's own bytes. Which record
stands where follows from the seed and the file's path alone: the same source and settings give the same shards byte
for byte, whatever the number of workers. A shard is there under its name only when complete, the manifest only when
all shards are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal

import google_crc32c
import obstore
from obstore.exceptions import BaseError as StoreError
from obstore.store import LocalStore, ObjectStore

from drawbar import __version__
from drawbar.dataset.example import encode_example
from drawbar.dataset.jpeg import JpegHeader
from drawbar.dataset.listing import join, load_manifest, object_sizes
from drawbar.dataset.manifest import MANIFEST_NAME, BadFile, Manifest, ShardEntry
from drawbar.dataset.source import Progress, Source, SourceImage, check_headers, read_image, scan_source
from drawbar.dataset.tfrecord import frame
from drawbar.errors import DataError, InputError

OnBad = Literal["fail", "skip"]

_PART_BYTES = 8 * 1024 * 1024
_PARTS_IN_FLIGHT = 4  # bounds memory: a worker holds about this many parts of its shard
_NO_FLOATS = array("f")
_NO_INTS = array("q")


@dataclass(frozen=True)
class _Target:
    """Where shards go: a prefix in a store, and the words for it."""

    store: ObjectStore
    prefix: str
    shown: str
    folder: Path | None
    """None for a remote store."""

    def key(self, name: str) -> str:
        return join(self.prefix, name)


@dataclass
class _Packed:
    """One shard as written."""

    entry: ShardEntry
    label_counts: Counter[int]
    bad: list[BadFile]


@dataclass
class _Tally:
    """What a shard's stream has carried so far."""

    record_bytes: list[int] = field(default_factory=list)
    label_counts: Counter[int] = field(default_factory=Counter)
    bad: list[BadFile] = field(default_factory=list)
    crc32c: int = 0


def pack_folder(
    source: Path,
    dest: str,
    *,
    num_shards: int,
    split: str = "train",
    seed: int = 1,
    workers: int = 0,
    store: ObjectStore | None = None,
    on_bad: OnBad = "fail",
    overwrite: bool = False,
    texts: Mapping[str, str] | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Manifest:
    """Writes `SPLIT-00000-of-NNNNN` and the manifest to `dest`: a folder, or with `store` a key prefix in it.

    Files that are no grey or colour JPEG by content are bad: `fail` raises before anything is written, `skip` leaves
    them out and lists them in the manifest. `texts` gives classes a readable name (default: the folder name).
    `workers` 0 means one thread per core. A complete set of the same source and settings is returned as it is.

    Raises InputError for an unusable source, an unusable or occupied destination, bad files, or a wrong setting;
    errors of a remote store pass through. What was written before an error is deleted again.
    """
    _check_settings(num_shards, split, seed, workers)
    listing = scan_source(source)
    target = _target(dest, store)
    source_sha256 = _fingerprint(listing, num_shards, split, seed, texts or {})
    existing = _existing(target, split, source_sha256, overwrite)
    if existing is not None:
        _obey(existing.bad, on_bad)
        return existing
    workers = workers or len(os.sched_getaffinity(0))
    bad = check_headers(listing, workers, progress)
    _obey(bad, on_bad)
    bad_paths = {item.path for item in bad}
    shards = _deal([image for image in listing.images if image.path not in bad_paths], num_shards, seed)
    if overwrite:
        _delete_set(target, split)
    packed = _pack_all(_Job(listing, target, split, on_bad, texts or {}), shards, workers, progress)
    counts = sum((item.label_counts for item in packed), Counter[int]())
    bad += [item for shard in packed for item in shard.bad]
    manifest = Manifest(
        split=split,
        seed=seed,
        labels=listing.labels,
        class_counts=tuple(counts[label] for label in range(1, len(listing.labels) + 1)),
        shards=tuple(item.entry for item in packed),
        bad=tuple(sorted(bad, key=lambda item: item.path)),
        source_sha256=source_sha256,
        tool_version=__version__,
    )
    obstore.put(target.store, target.key(MANIFEST_NAME), manifest.dumps().encode())
    return manifest


def shard_name(split: str, index: int, num_shards: int) -> str:
    return f"{split}-{index:05d}-of-{num_shards:05d}"


# Before the first byte is written


def _check_settings(num_shards: int, split: str, seed: int, workers: int) -> None:
    if num_shards < 1:
        raise InputError(f"number of shards is {num_shards}; expected at least 1")
    if seed < 0:
        raise InputError(f"seed is {seed}; expected 0 or more")
    if workers < 0:
        raise InputError(f"number of workers is {workers}; expected at least 1, or 0 for one per core")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", split):
        raise InputError(f"split is {split!r}; expected letters, digits, - and _, such as train")


def _target(dest: str, store: ObjectStore | None) -> _Target:
    if store is not None:
        return _Target(store, dest.strip("/"), dest, None)
    folder = Path(dest)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {dest}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"cannot write to {dest}: permission denied")
    return _Target(LocalStore(folder.resolve()), "", dest, folder)


def _fingerprint(source: Source, num_shards: int, split: str, seed: int, texts: Mapping[str, str]) -> str:
    settings = [source.sha256(), num_shards, split, seed, sorted(texts.items())]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _existing(target: _Target, split: str, source_sha256: str, overwrite: bool) -> Manifest | None:
    """The complete set that is there already, if it is the one asked for. Raises InputError for any other."""
    sizes = object_sizes(target.store, target.prefix)
    hint = "choose another destination, or ask for overwriting to replace what is there"
    manifest = None
    if MANIFEST_NAME in sizes:
        try:
            manifest = load_manifest(target.store, target.prefix)
        except DataError as error:
            if not overwrite:
                raise InputError(f"{target.shown} is in use: {error.message}", hint=hint) from None
    if manifest and manifest.split != split:
        raise InputError(
            f"{target.shown} holds the split {manifest.split!r}", hint=f"pack {split!r} to a destination of its own"
        )
    if overwrite:
        return None
    if manifest is None:
        if _old_shards(sizes, split):
            raise InputError(f"{target.shown} holds {split} shards of a packing that did not end", hint=hint)
        return None
    if manifest.source_sha256 != source_sha256:
        there = f"{manifest.num_records} records in {len(manifest.shards)} shards, seed {manifest.seed}"
        raise InputError(f"{target.shown} holds another set: {there}", hint=hint)
    broken = [shard.name for shard in manifest.shards if sizes.get(shard.name) != shard.size_bytes]
    if broken:
        raise InputError(f"{target.shown} holds this set, but {broken[0]} is missing or has another size", hint=hint)
    return manifest


def _old_shards(sizes: Mapping[str, int], split: str) -> list[str]:
    return sorted(name for name in sizes if re.fullmatch(re.escape(split) + r"-\d{5}-of-\d{5}", name))


def _delete_set(target: _Target, split: str) -> None:
    """Manifest first: what is left of an old set must never look complete."""
    sizes = object_sizes(target.store, target.prefix)
    for name in [MANIFEST_NAME, *_old_shards(sizes, split)]:
        if name in sizes:
            obstore.delete(target.store, target.key(name))
    _delete_unfinished(target, split)


def _delete_unfinished(target: _Target, split: str) -> None:
    """obstore writes a file as `NAME#1` before it renames it; a killed process leaves that behind, unlisted."""
    if target.folder:
        for path in target.folder.glob(f"{split}-*-of-*#*"):
            path.unlink(missing_ok=True)


def _obey(bad: Sequence[BadFile], on_bad: OnBad) -> None:
    if bad and on_bad == "fail":
        named = "; ".join(f"{item.path}: {item.reason}" for item in bad[:3])
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        files = "1 file is" if len(bad) == 1 else f"{len(bad)} files are"
        raise InputError(f"{files} no trainable JPEG: {named}{more}", hint="remove them, or choose to skip bad files")


def _deal(images: Sequence[SourceImage], num_shards: int, seed: int) -> list[list[SourceImage]]:
    """Shuffles and cuts into shards whose counts differ by at most one.

    Order is that of a keyed hash of the path: as good as a random shuffle, yet the same under every Python version
    and order of listing.
    """
    if len(images) < num_shards:
        raise InputError(f"{num_shards} shards for {len(images)} images; expected at most one shard per image")
    key = str(seed).encode()[:64]
    shuffled = sorted(
        images, key=lambda image: hashlib.blake2b(os.fsencode(image.path), key=key, digest_size=16).digest()
    )
    cuts = [len(shuffled) * index // num_shards for index in range(num_shards + 1)]
    return [shuffled[start:stop] for start, stop in pairwise(cuts)]


# Writing


@dataclass(frozen=True)
class _Job:
    """What all shards of one packing share."""

    source: Source
    target: _Target
    split: str
    on_bad: OnBad
    texts: Mapping[str, str]
    stop: threading.Event = field(default_factory=threading.Event)


def _pack_all(job: _Job, shards: Sequence[list[SourceImage]], workers: int, progress: Progress) -> list[_Packed]:
    """All shards, in order, `workers` at a time. Threads do: reading and CRC hold the GIL for a tenth of the time."""
    names = [shard_name(job.split, index, len(shards)) for index in range(len(shards))]
    total = sum(map(len, shards))
    done = 0
    pool = ThreadPoolExecutor(min(workers, len(shards)))
    try:
        futures = [pool.submit(_pack_shard, job, name, images) for name, images in zip(names, shards, strict=True)]
        images_of = dict(zip(futures, map(len, shards), strict=True))
        for future in as_completed(futures):
            future.result()
            done += images_of[future]
            progress("pack", done, total)
        packed = [future.result() for future in futures]
        if not any(item.entry.num_records for item in packed):
            raise InputError(f"no image of {job.source.folder} is a trainable JPEG")
        return packed
    except BaseException as error:
        job.stop.set()
        pool.shutdown(cancel_futures=True)
        _discard(job.target, job.split, names)
        if job.target.folder and isinstance(error, StoreError | OSError):
            first_line = str(error).partition("\n")[0]
            raise InputError(f"cannot write to {job.target.shown}: {first_line}") from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _pack_shard(job: _Job, name: str, images: Sequence[SourceImage]) -> _Packed:
    tally = _Tally()
    frames = _frames(job, images, tally)
    first = next(frames, None)
    # A multipart upload needs at least one part; a shard whose images all turned out bad has none.
    content = b"" if first is None else chain((first,), frames)
    obstore.put(
        job.target.store,
        job.target.key(name),
        content,
        chunk_size=_PART_BYTES,
        max_concurrency=_PARTS_IN_FLIGHT,
    )
    entry = ShardEntry(
        name=name,
        size_bytes=sum(tally.record_bytes),
        num_records=len(tally.record_bytes),
        crc32c=f"{tally.crc32c:08x}",
        record_bytes=tuple(tally.record_bytes),
    )
    return _Packed(entry, tally.label_counts, tally.bad)


def _frames(job: _Job, images: Sequence[SourceImage], tally: _Tally) -> Iterator[bytes]:
    """Framed records of one shard; raising in here makes the store drop the unfinished object."""
    for image in images:
        if job.stop.is_set():
            raise InputError("packing was stopped")
        try:
            data, header = read_image(job.source.folder, image)
        except DataError as error:
            bad = BadFile(path=image.path, reason=error.message)
            _obey([bad], job.on_bad)
            tally.bad.append(bad)
            continue
        framed = frame(encode_image(image, data, header, job.texts.get(image.class_name, image.class_name)))
        tally.record_bytes.append(len(framed))
        tally.label_counts[image.label] += 1
        tally.crc32c = google_crc32c.extend(tally.crc32c, framed)
        yield framed


def encode_image(image: SourceImage, data: bytes, header: JpegHeader, text: str) -> bytes:
    """Example with the 15 keys of `build_imagenet_data.py`; channels 3 and RGB also for grey files, as there."""
    return encode_example(
        {
            "image/height": header.height,
            "image/width": header.width,
            "image/colorspace": b"RGB",
            "image/channels": 3,
            "image/class/label": image.label,
            "image/class/synset": os.fsencode(image.class_name),
            "image/class/text": os.fsencode(text),
            "image/object/bbox/xmin": _NO_FLOATS,
            "image/object/bbox/xmax": _NO_FLOATS,
            "image/object/bbox/ymin": _NO_FLOATS,
            "image/object/bbox/ymax": _NO_FLOATS,
            "image/object/bbox/label": _NO_INTS,
            "image/format": b"JPEG",
            "image/filename": os.fsencode(image.name),
            "image/encoded": data,
        }
    )


def _discard(target: _Target, split: str, names: Sequence[str]) -> None:
    """Removes what this packing wrote. Best effort: the error that led here must not be hidden by another."""
    try:
        sizes = object_sizes(target.store, target.prefix)
        for name in names:
            if name in sizes:
                obstore.delete(target.store, target.key(name))
        _delete_unfinished(target, split)
    except (StoreError, OSError):
        pass
