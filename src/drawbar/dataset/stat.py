"""Describes a set by reading all of it: sizes, dimensions, classes, boxes, kinds of image. Any TFRecord set will do.

Image sizes and kinds come from the images' own headers, not from what the records say. Records that are no image
records are still counted, with their keys.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from drawbar.dataset import jpeg
from drawbar.dataset.example import Decoded
from drawbar.dataset.listing import list_shards
from drawbar.dataset.record_check import Features, boxes_of, png_size, read_features
from drawbar.dataset.walk import Origin, Progress, ShardWalk, each_shard
from drawbar.errors import DataError

IMAGE_KEYS = ("image/encoded", "image", "image_raw", "jpeg", "image_bytes")
"""TensorFlow's converters, TensorFlow Datasets, and what tutorials use."""
LABEL_KEYS = ("image/object/class/label", "image/class/label", "label", "labels")
NAME_KEYS = ("image/object/class/text", "image/class/synset", "image/class/text")

_BINS_PER_OCTAVE = 64
_MAX_DIMENSIONS = 100_000


@dataclass
class SetStats:
    """Sums and counts that can be added up, shard by shard. Bounded, whatever the size of the set."""

    shards: int = 0
    missing_shards: int = 0
    """By the numbers in the others' names."""
    records: int = 0
    read_bytes: int = 0
    """As stored."""
    framed_bytes: int = 0
    """Of all records with their frames; more than what was read where shards are compressed."""
    images: int = 0
    image_bytes: int = 0
    smallest_image_bytes: int = 0
    largest_image_bytes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """Records or shards that could not be read, by reason; `drawbar data check` says where."""
    compression: Counter[str] = field(default_factory=Counter)
    """Shards by kind: none, gzip, zlib."""
    keys: Counter[str] = field(default_factory=Counter)
    """Records that have each key, as `image/width (int64)`."""
    size_bins: Counter[int] = field(default_factory=Counter)
    """Images by size in bytes: bin of its logarithm, 64 to a doubling."""
    widths: Counter[int] = field(default_factory=Counter)
    heights: Counter[int] = field(default_factory=Counter)
    dimensions: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Width and height; the first 100,000 different ones."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Images by what their headers say; one image can be of several kinds."""
    classes: Counter[int] = field(default_factory=Counter)
    """Images by label, or objects where each object has one."""
    class_names: dict[int, str] = field(default_factory=dict)
    boxes: Counter[int] = field(default_factory=Counter)
    """Images by their number of boxes."""

    def add(self, other: SetStats) -> None:
        for name in ("shards", "records", "read_bytes", "framed_bytes", "images", "image_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        sizes = [size for size in (self.smallest_image_bytes, other.smallest_image_bytes) if size]
        self.smallest_image_bytes = min(sizes, default=0)
        self.largest_image_bytes = max(self.largest_image_bytes, other.largest_image_bytes)
        for name in ("faults", "compression", "keys", "size_bins", "widths", "heights", "kinds", "classes", "boxes"):
            getattr(self, name).update(getattr(other, name))
        for dimensions, count in other.dimensions.items():
            _count_dimensions(self.dimensions, dimensions, count)
        self.class_names = other.class_names | self.class_names

    @property
    def mean_image_bytes(self) -> float:
        return self.image_bytes / self.images if self.images else 0.0

    def image_bytes_percentile(self, percent: float) -> float:
        """Within 1 %: the middle of its bin. 0 without images."""
        wanted, seen = self.images * percent / 100, 0
        for bin_, count in sorted(self.size_bins.items()):
            seen += count
            if seen >= wanted:
                middle = 2 ** ((bin_ + 0.5) / _BINS_PER_OCTAVE)
                return min(max(middle, self.smallest_image_bytes), self.largest_image_bytes)
        return 0.0

    def size_histogram(self) -> list[tuple[int, int, int]]:
        """From and below, in bytes, and count; a bar for each doubling."""
        octaves: Counter[int] = Counter()
        for bin_, count in self.size_bins.items():
            octaves[bin_ // _BINS_PER_OCTAVE] += count
        return [(1 << octave, 2 << octave, octaves[octave]) for octave in _between(octaves)]


def histogram(counts: Mapping[int, int], rows: int = 12) -> list[tuple[int, int, int]]:
    """From and below, and count: at most `rows` equal round steps up to the 99th percentile, and one for the rest."""
    if not counts:
        return []
    total, seen, high = sum(counts.values()), 0, 0
    for value in sorted(counts):
        high, seen = value, seen + counts[value]
        if seen >= 0.99 * total:
            break
    low = min(counts)
    step = _round_step((high - low + 1) / rows)
    first = low // step
    bars: Counter[int] = Counter()
    for value, count in counts.items():
        bars[min(value // step, high // step + 1)] += count
    last = max(bars)
    result = [(index * step, (index + 1) * step, bars[index]) for index in range(first, last + 1)]
    if last > high // step:
        result[-1] = (last * step, max(counts) + 1, bars[last])
    return result


def stat_set(
    origin: Origin,
    *,
    pattern: str = "",
    workers: int = 0,
    on_total: Callable[[int, int], None] = lambda shards, size_bytes: None,
    progress: Progress = lambda read_bytes, records: None,
) -> SetStats:
    """Reads the whole set. Damage is counted and does not end it; only a manifest that does not fit raises DataError.

    `pattern` and `on_total`: see `check.check_set`. Raises InputError where there is no set, or several in one place.
    """
    place = origin.open()
    listing = list_shards(place.store, place.prefix, pattern=pattern, shown=origin.url)
    on_total(len(listing.shards), listing.size_bytes)
    stats = SetStats(missing_shards=len(listing.missing))
    for shard in each_shard(origin, listing.shards, stat_shard, workers, progress):
        stats.add(shard)
    return stats


def stat_shard(walk: ShardWalk) -> SetStats:
    stats = SetStats(shards=1)
    for record in walk:
        stats.framed_bytes += len(record.payload) + 16
        try:
            features = read_features(record.payload)
        except DataError:
            stats.faults["no tf.train.Example"] += 1
            continue
        _count_record(stats, features)
    stats.records = walk.num_records
    stats.read_bytes = walk.read_bytes
    stats.compression[walk.compression or "none"] += 1
    for fault in walk.faults:
        stats.faults[fault.reason.partition(" (")[0]] += 1
    return stats


def _count_record(stats: SetStats, features: Features) -> None:
    for key, values in features.items():
        stats.keys[f"{key} ({_kind(values)})" if values else key] += 1
    encoded = next((features[key][0] for key in IMAGE_KEYS if len(features.get(key, ())) == 1), None)
    if isinstance(encoded, bytes) and encoded:
        _count_image(stats, encoded)
        stats.boxes[len(boxes_of(features))] += 1
    labels = next((features[key] for key in LABEL_KEYS if key in features), [])
    names = next((features[key] for key in NAME_KEYS if key in features), [])
    for index, label in enumerate(labels):
        if isinstance(label, int):
            stats.classes[label] += 1
            if label not in stats.class_names and index < len(names) and isinstance(name := names[index], bytes):
                stats.class_names[label] = name.decode(errors="replace")


def _count_image(stats: SetStats, encoded: bytes) -> None:
    size = len(encoded)
    stats.images += 1
    stats.image_bytes += size
    stats.smallest_image_bytes = min(stats.smallest_image_bytes or size, size)
    stats.largest_image_bytes = max(stats.largest_image_bytes, size)
    stats.size_bins[math.floor(math.log2(size) * _BINS_PER_OCTAVE)] += 1
    dimensions = None
    for kind in _kinds(encoded):
        if isinstance(kind, tuple):
            dimensions = kind
        else:
            stats.kinds[kind] += 1
    if dimensions is not None:
        stats.widths[dimensions[0]] += 1
        stats.heights[dimensions[1]] += 1
        _count_dimensions(stats.dimensions, dimensions, 1)


def _kinds(encoded: bytes) -> Iterator[str | tuple[int, int]]:
    """What the header says in words, and width and height once."""
    if not encoded.startswith(jpeg.SOI):
        yield jpeg.other_format(encoded) or "no image that is known"
        if encoded.startswith(jpeg.PNG) and len(encoded) >= 24:
            yield png_size(encoded)
        return
    try:
        header = jpeg.parse_header(encoded)
    except DataError as error:
        yield f"JPEG, {error.message}"
        return
    yield (header.width, header.height)
    yield f"JPEG, {_process(header)}"
    yield f"JPEG, {_colour(header)}"
    if header.bits != 8:
        yield f"JPEG, {header.bits} bits a sample"
    if header.components == 3:
        yield f"JPEG, {_subsampling(header)}"
    if b"Exif\0\0" in encoded[: header.frame_offset]:
        yield "JPEG, EXIF"
    if header.orientation != 1:
        yield "JPEG, EXIF-rotated"
    if encoded.rfind(jpeg.EOI, header.frame_offset) < 0:
        yield "JPEG, truncated"


def _process(header: jpeg.JpegHeader) -> str:
    return {0: "baseline", 1: "extended", 2: "progressive"}.get(header.process, f"SOF{header.process}")


def _colour(header: jpeg.JpegHeader) -> str:
    if header.components == 4:
        return "YCCK" if header.adobe_transform == 2 else "CMYK"
    return {1: "grey", 3: "colour"}.get(header.components, f"{header.components} components")


def _subsampling(header: jpeg.JpegHeader) -> str:
    (across, down), *rest = header.sampling
    if any(factors != (1, 1) for factors in rest):
        return "other chroma sampling"
    names = {(1, 1): "4:4:4", (2, 1): "4:2:2", (2, 2): "4:2:0", (1, 2): "4:4:0", (4, 1): "4:1:1"}
    return names.get((across, down), "other chroma sampling")


def _kind(values: Decoded) -> str:
    return {bytes: "bytes", int: "int64", float: "float"}[type(values[0])]


def _count_dimensions(counts: Counter[tuple[int, int]], dimensions: tuple[int, int], count: int) -> None:
    if dimensions in counts or len(counts) < _MAX_DIMENSIONS:
        counts[dimensions] += count


def _between(counts: Mapping[int, int]) -> range:
    return range(min(counts), max(counts) + 1) if counts else range(0)


def _round_step(least: float) -> int:
    """1, 2 or 5 times a power of ten, at least `least`."""
    power: int = 10 ** max(math.floor(math.log10(max(least, 1))), 0)
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
