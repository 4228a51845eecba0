"""One shard: its items read, checked, mended, framed and written, in one pass over each file."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import google_crc32c

from drawbar.dataset.destination import Destination, pause_s
from drawbar.dataset.fix import check_image, fix_image
from drawbar.dataset.items import CheckedImage, Item, Source
from drawbar.dataset.jpeg import MAX_PIXELS, check_file_size
from drawbar.dataset.manifest import BadFile, RecordSchema, ShardEntry
from drawbar.dataset.parts import PackedShard, part_name
from drawbar.dataset.tfrecord import frame_ends
from drawbar.errors import DataError, DrawbarError, InputError

OnBad = Literal["fail", "skip", "fix"]

_TRIES = 4
_REPORT_EVERY = 16  # images


@dataclass(frozen=True)
class PackSettings:
    """What decides a set's bytes, beside its source."""

    num_shards: int
    split: str = "train"
    """The shards' name prefix."""
    seed: int = 1
    """Of the shuffle."""
    on_bad: OnBad = "fail"
    schema: RecordSchema = "imagenet"
    max_pixels: int = MAX_PIXELS
    """An image of more is bad."""


@dataclass(frozen=True)
class PackJob:
    """What all shards of one packing share. Picklable."""

    source: Source
    dest: Destination
    settings: PackSettings
    set_sha256: str


@dataclass(frozen=True)
class Watch:
    """How a shard in the making and the rest of the packing see each other."""

    report: Callable[[int], None]
    """Told how many images more are done; fewer, where a try failed."""
    stopped: Callable[[], bool]


@dataclass
class _Tally:
    """What a shard's stream has carried so far."""

    record_bytes: list[int] = field(default_factory=list)
    label_counts: Counter[int] = field(default_factory=Counter)
    bad: list[BadFile] = field(default_factory=list)
    crc32c: int = 0
    images: int = 0


class Stopped(DrawbarError):
    """Another shard failed, and its error is the one to show."""


def pack_shard(job: PackJob, name: str, items: Sequence[Item], watch: Watch) -> PackedShard:
    """Writes the shard, then its entry. Tried again where the destination fails in a way that may pass.

    Raises InputError for a bad file where these fail, what the destination explains, and Stopped.
    """
    number = 1
    while True:
        tally = _Tally()
        try:
            job.dest.write(name, _records(job, items, tally, watch))
            packed = _packed(job, name, tally)
            job.dest.put(part_name(name), packed.dumps())
            return packed
        except job.dest.transient_errors as error:
            watch.report(-tally.images)
            if number == _TRIES or watch.stopped():
                raise job.dest.explain(error) from None
            time.sleep(pause_s(number))
            number += 1
        except OSError as error:
            raise job.dest.explain(error) from None


def _packed(job: PackJob, name: str, tally: _Tally) -> PackedShard:
    entry = ShardEntry(
        name=name,
        size_bytes=sum(tally.record_bytes),
        num_records=len(tally.record_bytes),
        crc32c=f"{tally.crc32c:08x}",
        record_bytes=tuple(tally.record_bytes),
    )
    return PackedShard(
        entry=entry,
        label_counts=tally.label_counts,
        bad=tuple(tally.bad),
        on_bad=job.settings.on_bad,
        set_sha256=job.set_sha256,
    )


def _records(job: PackJob, items: Sequence[Item], tally: _Tally, watch: Watch) -> Iterator[Sequence[bytes]]:
    """The pieces of each record; raising in here makes the destination drop the unfinished shard."""
    source = job.source
    reported = 0
    for item in items:
        image = _image(job, item, tally)
        tally.images += 1
        if tally.images - reported == _REPORT_EVERY:
            watch.report(_REPORT_EVERY)
            reported = tally.images
            if watch.stopped():
                raise Stopped("packing was stopped")
        if image is None:
            continue
        try:
            payload = source.example(item, image)
        except DataError as error:
            _leave_out(job, item, error.message, tally)
            continue
        header, footer = frame_ends(payload)
        tally.record_bytes.append(len(header) + len(payload) + len(footer))
        for label in source.item_labels(item):
            tally.label_counts[label] += 1
        extend = google_crc32c.extend
        tally.crc32c = extend(extend(extend(tally.crc32c, header), payload), footer)
        yield header, payload, footer
    watch.report(tally.images - reported)


def _image(job: PackJob, item: Item, tally: _Tally) -> CheckedImage | None:
    """The image as it will be stored; None where it is left out. What is odd about it is noted."""
    max_pixels = job.settings.max_pixels
    data = b""
    try:
        check_file_size(item.size_bytes)
        data = job.source.read(item)
        image = check_image(data, max_pixels)
    except DataError as error:
        if job.settings.on_bad != "fix":
            _leave_out(job, item, error.message, tally)
            return None
        return _fixed(job, item, data, error.message, tally)
    if image.header.orientation != 1:
        reason = f"Exif orientation {image.header.orientation}"
        tally.bad.append(BadFile(path=item.path, reason=reason, action="kept"))
    return image


def _fixed(job: PackJob, item: Item, data: bytes, reason: str, tally: _Tally) -> CheckedImage | None:
    try:
        image = fix_image(data, reason, job.settings.max_pixels)
    except DataError as error:
        _leave_out(job, item, error.message, tally)
        return None
    tally.bad.append(BadFile(path=item.path, reason=reason, action="fixed"))
    return image


def _leave_out(job: PackJob, item: Item, reason: str, tally: _Tally) -> None:
    """Raises InputError where bad files are to fail."""
    if job.settings.on_bad == "fail":
        raise InputError(
            f"{item.path} is no trainable JPEG: {reason}",
            hint="--on-bad fix re-encodes such files, skip leaves them out; or mend it and give the command again",
        )
    if tally.bad and tally.bad[-1].path == item.path:  # mended, but of no use to its source
        tally.bad.pop()
    tally.bad.append(BadFile(path=item.path, reason=reason))
