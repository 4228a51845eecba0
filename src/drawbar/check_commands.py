"""What `drawbar data check` and `drawbar data stat` do and print."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from obstore.exceptions import BaseError

from drawbar.dataset.check import CheckSummary, SchemaChoice, check_set
from drawbar.dataset.listing import split_pattern
from drawbar.dataset.stat import SetStats, histogram, stat_set
from drawbar.dataset.walk import Fault, Origin
from drawbar.errors import DataError, InputError
from drawbar.plural import plural
from drawbar.storage.address import find_address
from drawbar.storage.failures import explain
from drawbar.storage.urls import parse_url
from drawbar.terminal import Terminal

_BAR = 40
"""Characters of the longest bar."""


def check(
    url: str,
    *,
    decode: bool = False,
    sample: float | None = None,
    schema: str = "auto",
    workers: int = 0,
    endpoint: str | None = None,
    store_dir: Path | None = None,
    json_out: bool = False,
) -> CheckSummary:
    """Prints every fault of a set, and a summary. `sample` is the share of images to decode; `decode` means all.

    Raises DataError where there are faults, after they are printed.
    """
    if schema not in ("auto", "imagenet", "coco", "none"):
        raise InputError(f"--schema is {schema!r}; expected auto, imagenet, coco or none")
    share = sample if sample is not None else float(decode)
    terminal = Terminal(quiet_stdout=json_out)
    rate = Rate(terminal, "checking")
    with _spool() as faults, _explained(url, endpoint), _closing(terminal):
        origin, pattern = find_origin(url, endpoint, store_dir)

        def on_fault(fault: Fault) -> None:
            if json_out:
                faults.write(json.dumps(fault._asdict()) + "\n")
            else:
                terminal.line(fault_line(fault))

        summary = check_set(
            origin,
            pattern=pattern,
            schema=cast(SchemaChoice, schema),
            sample=share,
            workers=workers,
            on_fault=on_fault,
            on_total=rate.total,
            progress=rate,
        )
        if json_out:
            _print_check(url, summary, rate.passed_s, faults)
        else:
            terminal.line(_check_text(summary, rate.passed_s))
    if summary.faults:
        what = "1 fault" if summary.faults == 1 else f"{summary.faults} faults"
        raise DataError(f"{what} in {url}", hint=_check_hint(summary))
    return summary


def stat(
    url: str,
    *,
    workers: int = 0,
    endpoint: str | None = None,
    store_dir: Path | None = None,
    json_out: bool = False,
) -> SetStats:
    """Prints what a set consists of."""
    terminal = Terminal(quiet_stdout=json_out)
    rate = Rate(terminal, "reading")
    with _explained(url, endpoint), _closing(terminal):
        origin, pattern = find_origin(url, endpoint, store_dir)
        stats = stat_set(origin, pattern=pattern, workers=workers, on_total=rate.total, progress=rate)
    if json_out:
        json.dump({"url": url, **stat_json(stats)}, sys.stdout, indent=2)
        print()
    else:
        terminal.line(stat_text(stats))
    return stats


def find_origin(url: str, endpoint: str | None, store_dir: Path | None) -> tuple[Origin, str]:
    """Where a set is read from, and the pattern of names that its URL ends in, if any.

    For S3 without `endpoint` it is the embedded store's first where one is running, else AWS_ENDPOINT_URL, S3_ENDPOINT.
    Raises InputError or EnvironmentUnfit.
    """
    folder, pattern = split_pattern(url.rstrip("/") or "/")
    try:
        where = parse_url(folder)
    except ValueError as error:
        raise InputError(f"cannot read {error}") from None
    if where.scheme in ("gs", "az"):
        raise InputError(f"cannot read {url!r}", hint="a folder, or s3://bucket/prefix; runs read gs:// and az:// too")
    if where.is_folder:
        return Origin(url=folder), pattern
    address = find_address(endpoint, store_dir)
    return Origin(url=folder, endpoint=address.endpoint, credentials=address.credentials), pattern


class Rate:
    """Bytes, records, rate and time left, on the terminal's status line."""

    def __init__(self, terminal: Terminal, verb: str) -> None:
        self._terminal, self._verb = terminal, verb
        self._start_t = time.monotonic()
        self._shards = self._total_bytes = 0

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._start_t

    def total(self, shards: int, size_bytes: int) -> None:
        self._shards, self._total_bytes = shards, size_bytes
        self._start_t = time.monotonic()

    def __call__(self, read_bytes: int, records: int) -> None:
        total = (
            f"{self._verb} {plural(self._shards, 'shard')}: {read_bytes / 1e6:.0f} of {self._total_bytes / 1e6:.0f} MB"
        )
        rate = read_bytes / max(self.passed_s, 1e-9)
        left = f", {(self._total_bytes - read_bytes) / rate:.0f} s left" if rate and self.passed_s > 0.5 else ""
        self._terminal.status(f"{total}, {plural(records, 'record')}, {rate / 1e6:.0f} MB/s{left}")


# Check


def fault_line(fault: Fault) -> str:
    """`train-00003-of-00016, record 12 at byte 1234: reason`."""
    record = "" if fault.record is None else f", record {fault.record}"
    offset = "" if fault.offset is None else f" at byte {fault.offset}"
    return f"{fault.shard}{record}{offset}: {fault.reason}"


def _check_text(summary: CheckSummary, passed_s: float) -> str:
    schema = {"imagenet": "ImageNet keys", "coco": "COCO keys", "none": "framing only"}[summary.schema]
    against = "against manifest.json" if summary.has_manifest else "no manifest.json"
    read = f"{plural(summary.shards, 'shard')}, {plural(summary.records, 'record')}, {summary.read_bytes / 1e6:.1f} MB"
    lines = [
        f"checked {read} in {passed_s:.1f} s ({summary.read_bytes / max(passed_s, 1e-9) / 1e6:.0f} MB/s); "
        f"{schema}, {against}, {plural(summary.decoded, 'image')} decoded"
    ]
    if summary.compressed_shards:
        lines.append(f"{summary.compressed_shards} shards are compressed: bytes of their records are decompressed ones")
    if summary.unlisted_faults:
        lines.append(f"{summary.unlisted_faults} faults more are not listed: 10,000 of a shard are")
    lines.append(f"{summary.faults or 'no'} fault{'' if summary.faults == 1 else 's'}")
    return "\n".join(lines)


def _check_hint(summary: CheckSummary) -> str:
    shards = "1 shard has" if summary.faulty_shards == 1 else f"{summary.faulty_shards} shards have"
    return f"{shards} faults" if summary.faulty_shards else "the shards themselves are sound"


def _print_check(url: str, summary: CheckSummary, passed_s: float, faults: IO[str]) -> None:
    """Fault by fault, as there may be more of them than memory should hold."""
    row: dict[str, Any] = {
        "url": url,
        "shards": summary.shards,
        "records": summary.records,
        "bytes": summary.read_bytes,
        "decoded": summary.decoded,
        "schema": summary.schema,
        "manifest": summary.has_manifest,
        "compressed_shards": summary.compressed_shards,
        "passed_s": passed_s,
        "num_faults": summary.faults,
        "faulty_shards": summary.faulty_shards,
        "unlisted_faults": summary.unlisted_faults,
        "unread_records": summary.unread_records,
        "class_counts": {str(label): count for label, count in sorted(summary.class_counts.items())},
    }
    head = json.dumps(row, indent=2).removesuffix("\n}")
    sys.stdout.write(head + ',\n  "faults": [')
    faults.seek(0)
    for number, line in enumerate(faults):
        sys.stdout.write(("," if number else "") + "\n    " + line.rstrip("\n"))
    sys.stdout.write("\n  ]\n}\n" if summary.faults else "]\n}\n")
    sys.stdout.flush()


# Stat


def stat_json(stats: SetStats) -> dict[str, Any]:
    percentiles = {f"p{percent}": stats.image_bytes_percentile(percent) for percent in (1, 10, 50, 90, 99)}
    return {
        "shards": stats.shards,
        "missing_shards": stats.missing_shards,
        "records": stats.records,
        "bytes": stats.read_bytes,
        "record_bytes": stats.framed_bytes,
        "compression": dict(stats.compression),
        "faults": dict(stats.faults),
        "images": stats.images,
        "image_bytes": {
            "mean": stats.mean_image_bytes,
            "min": stats.smallest_image_bytes,
            "max": stats.largest_image_bytes,
            **percentiles,
        },
        "image_bytes_histogram": _bars_json(stats.size_histogram()),
        "width_histogram": _bars_json(histogram(stats.widths)),
        "height_histogram": _bars_json(histogram(stats.heights)),
        "dimensions": [
            {"width": size[0], "height": size[1], "images": count} for size, count in stats.dimensions.most_common(10)
        ],
        "kinds": dict(stats.kinds.most_common()),
        "classes": [
            {"label": label, "name": stats.class_names.get(label, ""), "count": count}
            for label, count in sorted(stats.classes.items())
        ],
        "boxes_per_image": {str(boxes): count for boxes, count in sorted(stats.boxes.items())},
        "keys": dict(stats.keys.most_common()),
    }


def stat_text(stats: SetStats) -> str:
    """Readable in any terminal: no colour, no character beyond ASCII but the data's own."""
    return "\n".join(_stat_lines(stats))


def _stat_lines(stats: SetStats) -> Iterator[str]:
    compressed = ", ".join(f"{count} {kind}" for kind, count in stats.compression.items() if kind != "none")
    per_shard = f", {stats.records / stats.shards:.0f} records a shard" if stats.shards else ""
    read = f"{stats.read_bytes / 1e6:.1f} MB{per_shard}"
    yield f"{plural(stats.shards, 'shard')}, {plural(stats.records, 'record')}, {read}"
    if stats.missing_shards:
        missing = plural(stats.missing_shards, "shard is", "shards are")
        yield f"NOT WHOLE: {missing} missing, by the numbers of the others"
    if compressed:
        yield f"compressed shards: {compressed}; {stats.framed_bytes / 1e6:.1f} MB of records"
    for reason, count in stats.faults.most_common(5):
        yield f"DAMAGED: {count} x {reason} (`drawbar data check` says where)"
    if stats.images:
        yield from _image_lines(stats)
    if stats.classes:
        yield from _class_lines(stats)
    if stats.boxes and stats.boxes.keys() != {0}:
        total = sum(boxes * count for boxes, count in stats.boxes.items())
        none = stats.boxes[0]
        yield f"\nboxes per image: {total} boxes, {total / stats.images:.2f} on average, {none} images without"
        yield from _bars(histogram(stats.boxes), "", 1)
    yield "\nkeys (records that have it)"
    width = max(map(len, stats.keys), default=0)
    for key, count in sorted(stats.keys.items()):
        yield f"  {key:<{width}}  {count}"


def _image_lines(stats: SetStats) -> Iterator[str]:
    p10, p50, p90, p99 = (stats.image_bytes_percentile(percent) / 1e3 for percent in (10, 50, 90, 99))
    yield (
        f"\nbytes per image: mean {stats.mean_image_bytes / 1e3:.1f} kB, p10 {p10:.1f}, p50 {p50:.1f}, p90 {p90:.1f}, "
        f"p99 {p99:.1f}, smallest {stats.smallest_image_bytes / 1e3:.1f}, largest {stats.largest_image_bytes / 1e3:.1f}"
    )
    yield from _bars(stats.size_histogram(), "KiB", 1024)
    for name, counts in (("width", stats.widths), ("height", stats.heights)):
        if counts:
            mean = sum(value * count for value, count in counts.items()) / sum(counts.values())
            yield f"\n{name}: mean {mean:.0f} pixels, {min(counts)} to {max(counts)}"
            yield from _bars(histogram(counts), "", 1)
    common = ", ".join(f"{size[0]}x{size[1]} ({count})" for size, count in stats.dimensions.most_common(5))
    yield f"\nmost common sizes: {common}" if common else ""
    yield "\nkinds"
    width = max(map(len, stats.kinds), default=0)
    for kind, count in stats.kinds.most_common():
        yield f"  {kind:<{width}}  {count:>9}  {100 * count / stats.images:5.1f} %"


def _class_lines(stats: SetStats) -> Iterator[str]:
    counts = stats.classes
    labels = f"labels {min(counts)} to {max(counts)}"
    mean = sum(counts.values()) / len(counts)
    most, least = counts.most_common(3), counts.most_common()[:-4:-1]
    yield f"\nclasses: {len(counts)}, {labels}, {mean:.1f} on average, {least[0][1]} to {most[0][1]}"
    for words, some in (("most", most), ("fewest", least)):
        named = ", ".join(f"{label} {stats.class_names.get(label, '')}".strip() + f" ({n})" for label, n in some)
        yield f"  {words}: {named}"


def _bars(bars: Sequence[tuple[int, int, int]], unit: str, scale: int) -> Iterator[str]:
    most = max((count for *_, count in bars), default=0)
    total = sum(count for *_, count in bars)
    rows = [(_edge(low, scale), _edge(high if scale > 1 else high - 1, scale), count) for low, high, count in bars]
    width = max((len(edge) for low, high, _ in rows for edge in (low, high)), default=0)
    for low, high, count in rows:
        # Something is never shown as nothing.
        length = max(round(_BAR * count / most), 1) if count else 0
        label = f"{low:>{width}} - {high:<{width}}" if low != high else f"{low:>{width}}   {'':<{width}}"
        bar = "#" * length
        yield f"  {label}{unit and ' ' + unit}  {bar:<{_BAR}} {count:>9}  {100 * count / total:5.1f} %"


def _edge(value: int, scale: int) -> str:
    return f"{value / scale:g}"


def _bars_json(bars: Sequence[tuple[int, int, int]]) -> list[dict[str, int]]:
    return [{"from": low, "below": high, "count": count} for low, high, count in bars]


# Both


@contextmanager
def _explained(url: str, endpoint: str | None) -> Iterator[None]:
    """What a store raises while it is listed, in one line."""
    try:
        yield
    except (BaseError, FileNotFoundError, PermissionError) as error:
        raise explain(error, url + (f" at {endpoint}" if endpoint else "")) from error


@contextmanager
def _closing(terminal: Terminal) -> Iterator[None]:
    try:
        yield
    finally:
        terminal.close()


@contextmanager
def _spool() -> Iterator[IO[str]]:
    """For faults on their way to JSON, which begins with their number."""
    with tempfile.SpooledTemporaryFile(1 << 20, "w+", encoding="utf-8") as file:
        yield file
