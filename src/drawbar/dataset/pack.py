"""Packs a source into TFRecord shards and a manifest: deals the images, finds what is done already, does the rest.

Which record stands where follows from the seed and the image's path alone: the same source and settings give the same
shards byte for byte, whatever the number of workers, ranks and tries. A shard is there under its name only when
complete, the manifest only when all shards are; a packing that was stopped, in whatever way, goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from obstore.exceptions import BaseError as StoreError

from drawbar import __version__
from drawbar.dataset import parts
from drawbar.dataset.destination import Destination, FolderDestination, StoreDestination
from drawbar.dataset.folder import ignored_text
from drawbar.dataset.items import Item, Lossy, Note, Progress, Source, no_note
from drawbar.dataset.manifest import MANIFEST_NAME, Manifest
from drawbar.dataset.pack_workers import num_workers, pack_here, pack_in_processes
from drawbar.dataset.parts import PackedShard
from drawbar.dataset.shard_writer import PackJob, PackSettings
from drawbar.errors import DataError, InputError, RunFailed
from drawbar.plural import plural
from drawbar.world import World

__all__ = ["Destination", "FolderDestination", "PackSettings", "StoreDestination", "pack", "pack_share", "shard_name"]

FORMAT = 3
"""Goes up when the same source and settings would give other bytes, so that no set is made of both."""

_WAIT_S = 600.0
_POLL_S = 1.0
_INDEX_BITS = 40
_ALONE = World(rank=0, world_size=1, local_rank=0, local_world_size=1, node="")
_OCCUPIED = "choose another destination, or --overwrite to replace what is there"


def _no_progress(stage: str, done: int, total: int) -> None:
    pass


def pack(
    source: Source,
    dest: Destination,
    settings: PackSettings,
    *,
    workers: int = 0,
    overwrite: bool = False,
    progress: Progress = _no_progress,
    note: Note = no_note,
) -> Manifest:
    """Packs all of it; see `pack_share`."""
    manifest = pack_share(
        source, dest, settings, _ALONE, workers=workers, overwrite=overwrite, progress=progress, note=note
    )
    assert manifest is not None  # noqa: S101  rank 0 has one
    return manifest


def pack_share(
    source: Source,
    dest: Destination,
    settings: PackSettings,
    launched: World,
    *,
    workers: int = 0,
    overwrite: bool = False,
    progress: Progress = _no_progress,
    note: Note = no_note,
    wait_s: float = _WAIT_S,
) -> Manifest | None:
    """One rank's part: every `size`-th shard from its own on. Rank 0 then waits for the others and writes the manifest.

    Returns the manifest, or None on a rank other than 0. A complete set of the same source and settings is returned as
    it is. `workers` are processes; 0 means one per core of this rank's share. `wait_s` is how long rank 0 waits without
    any shard being finished. `note` is told what did not go as it might.

    Raises InputError for an unusable source, an unusable or occupied destination, a bad file under `fail`, or a wrong
    setting; EnvironmentUnfit or RunFailed where the destination fails, a worker is killed, or a rank's shards do not
    come. Finished shards stay, so that the same call goes on.
    """
    _check(settings, workers, launched, overwrite)
    items = source.items()
    if isinstance(source, Lossy) and launched.rank == 0 and (loss := source.loss()):
        note(loss)
    names = [shard_name(settings, index) for index in range(settings.num_shards)]
    set_sha256 = _set_sha256(source, settings)
    job = PackJob(source, dest, settings, set_sha256)
    try:
        existing = _existing(job, overwrite)
        if existing is not None:
            return _kept(job, existing, launched, note)
        if len(items) < settings.num_shards:
            ignored = ignored_text(source.notes())
            raise InputError(
                f"{plural(settings.num_shards, 'shard')} for {plural(len(items), 'image')}; expected at most one shard "
                "per image",
                hint="ask for fewer --shards" + f", or see what was not taken for an image: {ignored}" * bool(ignored),
            )
        mine = names[launched.rank :: launched.world_size]
        if not mine:
            return None  # nor a claim, which could come after the others have ended
        try:
            done = _begin(job, len(items), mine, overwrite, note)
        except (InputError, StoreError, OSError):
            existing = _existing(job, overwrite)
            if existing is None:
                raise
        else:
            existing = _existing(job, overwrite) if len(done) < len(mine) else None
        if existing is not None:
            # Where this rank's shards were there before, rank 0 may end, and clear what it goes by, at any moment.
            return _kept(job, existing, launched, note)
        shards = _deal(items, settings, {name for name in mine if name not in done})
        counted = _Progress(progress, done, shards, len(items) if launched.world_size == 1 else 0)
        del items
        started_t = time.monotonic()
        done |= _pack_all(job, shards, workers, launched, counted)
        if launched.rank:
            return None
        wait_s = max(wait_s, 3 * (time.monotonic() - started_t))
        manifest = _manifest(job, _all_shards(job, names, done, wait_s, progress))
        dest.put(MANIFEST_NAME, manifest.dumps().encode())
        parts.clear(dest)
        return manifest
    except (StoreError, OSError) as error:
        raise dest.explain(error) from None


def shard_name(settings: PackSettings, index: int) -> str:
    return f"{settings.split}-{index:05d}-of-{settings.num_shards:05d}"


# Before the first byte is written


def _check(settings: PackSettings, workers: int, launched: World, overwrite: bool) -> None:
    if not 1 <= settings.num_shards <= 99999:
        raise InputError(f"number of shards is {settings.num_shards}; expected 1 to 99999")
    if settings.seed < 0:
        raise InputError(f"seed is {settings.seed}; expected 0 or more")
    if workers < 0:
        raise InputError(f"number of workers is {workers}; expected at least 1, or 0 for one per core")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", settings.split):
        raise InputError(f"split is {settings.split!r}; expected letters, digits, - and _, such as train")
    if settings.on_bad not in ("fail", "skip", "fix"):
        raise InputError(f"on_bad is {settings.on_bad!r}; expected fix, skip or fail")
    if overwrite and launched.world_size > 1:
        raise InputError(
            f"--overwrite with {launched.world_size} ranks: one could delete what another has written",
            hint="delete the old set first, or pack with one process",
        )


def _set_sha256(source: Source, settings: PackSettings) -> str:
    """Of all that decides the shards' bytes, but for the policy on bad files, which most shards never meet."""
    facts = [
        FORMAT,
        source.fingerprint(),
        settings.num_shards,
        settings.split,
        settings.seed,
        settings.schema,
        settings.max_pixels,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _existing(job: PackJob, overwrite: bool) -> Manifest | None:
    """The complete set that is there already, if it is the one asked for. Raises InputError for any other."""
    dest, split = job.dest, job.settings.split
    sizes = dest.sizes()
    if MANIFEST_NAME not in sizes:
        return None
    try:
        manifest = Manifest.loads(dest.get(MANIFEST_NAME))
        manifest.refuse_edited()
    except DataError as error:
        if overwrite:
            return None
        raise InputError(f"{dest.shown} is in use: {error.message}", hint=_OCCUPIED) from None
    if manifest.split != split:
        raise InputError(
            f"{dest.shown} holds the split {manifest.split!r}", hint=f"pack {split!r} to a destination of its own"
        )
    if overwrite:
        return None
    if manifest.source_sha256 != job.set_sha256:
        there = (
            f"{plural(manifest.num_records, 'record')} in {plural(len(manifest.shards), 'shard')}, seed {manifest.seed}"
        )
        raise InputError(f"{dest.shown} holds another set: {there}", hint=_OCCUPIED)
    broken = [shard.name for shard in manifest.shards if sizes.get(shard.name) != shard.size_bytes]
    if broken:
        raise InputError(
            f"{dest.shown} holds this set, but {broken[0]} is missing or has another size",
            hint="--overwrite packs it anew",
        )
    return manifest


def _kept(job: PackJob, manifest: Manifest, launched: World, note: Note) -> Manifest | None:
    """A complete set is the answer if its bad files were treated as asked."""
    bad = [item for item in manifest.bad if item.action != "kept"]
    if bad and manifest.on_bad != job.settings.on_bad:
        raise InputError(
            f"{job.dest.shown} holds this set packed with --on-bad {manifest.on_bad}, with "
            f"{plural(len(bad), 'bad file')}: {bad[0].path}: {bad[0].reason}",
            hint=_OCCUPIED,
        )
    if launched.rank:
        return None
    parts.clear(job.dest)  # where the packer was killed between its last two steps
    if "synthetic" in manifest.notes:
        how = "it was made with the same settings (--overwrite makes it anew)"
    else:
        how = (
            "the source's paths and sizes are those it was made of (contents were not compared; --overwrite packs anew)"
        )
    note(f"{job.dest.shown} holds this set already, and it was kept: {how}")
    return manifest


def _claim(job: PackJob, num_images: int, overwrite: bool) -> bool:
    """Makes the destination this packing's, or finds that it is already: then True, to go on there.

    Raises InputError where it is another's.
    """
    dest, settings = job.dest, job.settings
    # Shards first: whoever wrote one wrote the claim before.
    sizes = dest.sizes()
    old_shards = [name for name in sizes if re.match(re.escape(settings.split) + r"-\d{5}-of-\d{5}", name)]
    claimed = parts.claimed(dest)
    if claimed is not None and claimed.get("set_sha256") == job.set_sha256 and MANIFEST_NAME not in sizes:
        return True
    if overwrite:
        # Manifest first: what is left of an old set must never look complete.
        for name in (MANIFEST_NAME, *old_shards):
            dest.delete(name)
        parts.clear(dest)
    elif claimed is not None:
        there = ", ".join(f"{key} {claimed[key]}" for key in ("split", "shards", "seed", "images") if key in claimed)
        raise InputError(
            f"{dest.shown} holds an unfinished packing of another source or other settings: {there or 'unreadable'}",
            hint=f"give its command again to end it, or {_OCCUPIED}",
        )
    elif old_shards:
        raise InputError(f"{dest.shown} holds {settings.split} shards, but no manifest", hint=_OCCUPIED)
    parts.claim(
        dest,
        {
            "set_sha256": job.set_sha256,
            "split": settings.split,
            "shards": settings.num_shards,
            "seed": settings.seed,
            "images": num_images,
            "tool_version": __version__,
        },
    )
    return False


def _begin(job: PackJob, num_images: int, mine: Sequence[str], overwrite: bool, note: Note) -> dict[str, PackedShard]:
    """Makes the destination this packing's; returns what is done of `mine`. Raises InputError where it is another's."""
    if not _claim(job, num_images, overwrite):
        return {}
    done = parts.finished(job.dest, mine, job.set_sha256, job.settings.on_bad, look_inside=True)
    job.dest.drop_unfinished([name for name in mine if name not in done], note)
    return done


def _deal(items: Sequence[Item], settings: PackSettings, wanted: set[str]) -> dict[str, list[Item]]:
    """Shuffles and cuts into shards whose counts differ by at most one; returns the wanted ones.

    Order is that of a keyed hash of the path: as good as a random shuffle, yet the same under every Python version
    and order of listing.
    """
    key = str(settings.seed).encode()[:64]
    # One number for hash and place: a set may have millions, and this is the largest thing that dealing needs.
    keyed: list[int] = []
    for index, item in enumerate(items):
        digest = hashlib.blake2b(os.fsencode(item.path), key=key, digest_size=16).digest()
        keyed.append(int.from_bytes(digest[:8], "big") << _INDEX_BITS | index)
    keyed.sort()
    order = array("L", (number & (1 << _INDEX_BITS) - 1 for number in keyed))
    del keyed
    cuts = pairwise(len(order) * index // settings.num_shards for index in range(settings.num_shards + 1))
    names = (shard_name(settings, index) for index in range(settings.num_shards))
    return {
        name: [items[index] for index in order[start:stop]]
        for name, (start, stop) in zip(names, cuts, strict=True)
        if name in wanted
    }


# Packing


class _Progress:
    """Images done of all: those of shards that were there already count as done."""

    def __init__(
        self,
        progress: Progress,
        done: Mapping[str, PackedShard],
        shards: Mapping[str, Sequence[Item]],
        num_images: int,
    ) -> None:
        left = sum(map(len, shards.values()))
        self._progress = progress
        self._total = num_images or left + sum(packed.entry.num_records for packed in done.values())
        self._done = self._total - left

    def __call__(self, images: int) -> None:
        self._done += images
        self._progress("packing images", self._done, self._total)


def _pack_all(
    job: PackJob, shards: Mapping[str, Sequence[Item]], workers: int, launched: World, report: _Progress
) -> dict[str, PackedShard]:
    report(0)
    if not shards:
        return {}
    size_bytes = sum(item.size_bytes for items in shards.values() for item in items)
    workers = num_workers(workers, len(shards), size_bytes, launched.local_world_size)
    if workers == 1 or job.dest.local_to_process:
        packing: Iterator[PackedShard] = pack_here(job, shards, report)
    else:
        packing = pack_in_processes(job, shards, workers, report)
    try:
        return {packed.entry.name: packed for packed in packing}
    except BaseException:
        # A worker that was killed leaves its temporary file. An upload that it leaves is found by the next packing:
        # where an endpoint was lost, looking for it now would only take long.
        if isinstance(job.dest, FolderDestination):
            job.dest.drop_unfinished(shards, no_note)
        raise


def _all_shards(
    job: PackJob, names: Sequence[str], done: dict[str, PackedShard], wait_s: float, progress: Progress
) -> list[PackedShard]:
    """Every shard's entry, in order; waits for those of other ranks."""
    heard_t = time.monotonic()
    while len(done) < len(names):
        missing = [name for name in names if name not in done]
        found = parts.finished(job.dest, missing, job.set_sha256, job.settings.on_bad)
        if found:
            done |= found
            heard_t = time.monotonic()
        elif time.monotonic() - heard_t > wait_s:
            raise RunFailed(
                f"{plural(len(missing), 'shard')} of other ranks did not come, {missing[0]} first: none for "
                f"{wait_s:.0f} s",
                hint="finished shards are kept: give the same command again, with any number of ranks",
            )
        else:
            time.sleep(min(_POLL_S, wait_s))
        progress("waiting for other ranks, shards", len(done), len(names))
    return [done[name] for name in names]


def _manifest(job: PackJob, packed: Sequence[PackedShard]) -> Manifest:
    settings, labels = job.settings, job.source.labels
    counts: Counter[int] = Counter()
    for shard in packed:
        counts.update(shard.label_counts)
    listed = job.source.bad_files() if isinstance(job.source, Lossy) else []
    bad = sorted([*listed, *(item for shard in packed for item in shard.bad)], key=lambda item: item.path)
    if not any(shard.entry.num_records for shard in packed):
        raise InputError(f"no image of the source is a trainable JPEG; {bad[0].path}: {bad[0].reason}")
    return Manifest(
        split=settings.split,
        seed=settings.seed,
        labels=labels,
        class_counts=tuple(counts[label] for label in range(1, len(labels) + 1)),
        shards=tuple(shard.entry for shard in packed),
        bad=tuple(bad),
        source_sha256=job.set_sha256,
        tool_version=__version__,
        record_schema=settings.schema,
        on_bad=settings.on_bad,
        notes=dict(job.source.notes()),
    )
