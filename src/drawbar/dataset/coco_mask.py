"""Object masks of COCO: polygons and run lengths to pixels, pixels to PNG and run lengths.

Polygons are filled by pycocotools, whose rounding is what "COCO's masks" means. Run lengths are decoded here: its C
code believes whatever counts it is given.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drawbar.errors import DataError, EnvironmentUnfit

Mask = NDArray[np.uint8]
"""1 where the object is seen, else 0; (height, width)."""

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_LEAST_COORDINATES = 6
_FAR = 2.0
_HUGE = 1 << 40
"""No run length reaches it."""
_NUMBERS = frozenset((int, float))


def require_pycocotools() -> None:
    """Raises EnvironmentUnfit where it is not installed."""
    try:
        import pycocotools.mask  # noqa: F401
    except ImportError:
        raise EnvironmentUnfit(
            "COCO's polygons need pycocotools, which is not installed", hint="pip install pycocotools"
        ) from None


def is_segmentation(value: Any) -> bool:
    """Whether it looks like polygons, at least one of them with an area, or like run lengths; a cheap check."""
    if isinstance(value, list):
        return bool(_with_area(value))
    return isinstance(value, dict) and isinstance(value.get("counts"), list | str) and "size" in value


def _with_area(polygons: Sequence[Any]) -> list[list[float]]:
    """Without polygons of less than three corners, as detection libraries do."""
    return [
        polygon
        for polygon in polygons
        if isinstance(polygon, list) and len(polygon) >= _LEAST_COORDINATES and len(polygon) % 2 == 0
    ]


class Extent(NamedTuple):
    """What can be said of a segmentation without drawing it."""

    reach: float
    """The largest coordinate of its polygons, whatever its sign; 0 for run lengths."""
    height: int
    width: int
    """Of run lengths, as they say themselves; 0 for polygons."""
    pixels: int
    """That its run lengths add up to."""


def measure(segmentation: Any) -> Extent:
    """Raises DataError with the reason alone for what is neither polygons nor run lengths of an image of any size."""
    if isinstance(segmentation, list):
        polygons = _with_area(segmentation)
        if not polygons:
            raise DataError("no polygon of three corners")
        return Extent(max(map(_reach, polygons)), 0, 0, 0)
    size = segmentation.get("size") if isinstance(segmentation, dict) else None
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(type(side) is int and 0 < side < 1 << 20 for side in size)
    ):
        raise DataError(f"mask of size {str(size)[:40]}")
    height, width = size
    return Extent(0, height, width, sum(_counts(segmentation.get("counts"))))


def check_extent(extent: Extent, height: int, width: int) -> None:
    """Raises DataError with the reason alone for the segmentation of an image of another size."""
    if extent.height:
        if (extent.height, extent.width) != (height, width):
            raise DataError(f"mask of size [{extent.height}, {extent.width}]; the image has [{height}, {width}]")
        if extent.pixels != height * width:
            raise DataError(f"run lengths add up to {extent.pixels}; {width}x{height} pixels have {height * width}")
    elif not extent.reach <= _FAR * max(height, width):
        raise DataError(f"a polygon reaches far outside the {width}x{height} image")


def rasterise(segmentation: Any, height: int, width: int) -> Mask:
    """The pixels of COCO's `segmentation` member: polygons, compressed or uncompressed run lengths.

    Raises DataError with the reason alone for what is none of these or does not fit the image.
    """
    check_extent(measure(segmentation), height, width)
    if isinstance(segmentation, list):
        return _fill(_with_area(segmentation), height, width)
    return decode_counts(_counts(segmentation["counts"]), height, width)


def _reach(polygon: list[Any]) -> float:
    """The largest coordinate; infinite where one is no finite number. A set has tens of millions of them."""
    if not _NUMBERS.issuperset(map(type, polygon)):
        raise DataError("a polygon holds something else than numbers")
    try:
        # A NaN is never the largest, but makes the sum one.
        return math.inf if math.isnan(sum(polygon)) else float(max(max(polygon), -min(polygon)))  # noqa: PLW3301
    except OverflowError:  # a whole number beyond any float
        return math.inf


def _fill(polygons: list[list[float]], height: int, width: int) -> Mask:
    """The C code walks each edge step by step, and counts in 32 bits: only for polygons whose reach was checked."""
    from pycocotools import mask as coco

    runs: bytes = coco.merge(coco.frPyObjects(polygons, height, width))["counts"]
    return decode_counts(expand_counts(runs.decode()), height, width)


# Run lengths: column by column, beginning with a run of zeros


def decode_counts(counts: Any, height: int, width: int) -> Mask:
    """Raises DataError with the reason alone where the runs do not add up to the image."""
    counts = _counts(counts)
    if sum(counts) != height * width:
        raise DataError(f"run lengths add up to {sum(counts)}; {width}x{height} pixels have {height * width}")
    values = np.arange(len(counts), dtype=np.uint8) & 1
    return np.ascontiguousarray(np.repeat(values, counts).reshape((height, width), order="F"))


def _counts(counts: Any) -> list[int]:
    """Compressed or not. Raises DataError for what are no run lengths, or those of no image."""
    if isinstance(counts, str):
        counts = expand_counts(counts)
    if not isinstance(counts, list) or not all(type(count) is int and 0 <= count < _HUGE for count in counts):
        raise DataError("run lengths that are no list of whole numbers")
    return counts


def encode_counts(mask: Mask) -> list[int]:
    """The uncompressed run lengths of a mask, as COCO's crowd regions have them."""
    flat = mask.ravel(order="F")
    changes = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    edges = [0, *changes.tolist(), flat.size]
    counts = [after - before for before, after in pairwise(edges)]
    return [0, *counts] if flat[0] else counts


def expand_counts(text: str) -> list[int]:
    """The run lengths in a compressed string: 5 bits a character from 48 on, low ones first, bit 5 says that more
    follow; from the third on, differences to the run two before (cocoapi, maskApi.c, rleFrString)."""
    counts: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 60:
            raise DataError("damaged compressed run lengths")
        value |= (bits & 0x1F) << shift
        shift += 5
        if bits & 0x20:
            continue
        if bits & 0x10:
            value -= 1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
        value = shift = 0
    if shift:
        raise DataError("damaged compressed run lengths: they end too early")
    return counts


# PNG


def encode_png(mask: Mask) -> bytes:
    """8-bit grey, of values 0 and 1, as TensorFlow's converter stores masks.

    Written with the standard library, as an image library's own choice of filters changes with its version.
    """
    height, width = mask.shape
    rows = np.zeros((height, width + 1), np.uint8)  # each begins with its filter type: 0, none
    rows[:, 1:] = mask
    # Run-length matching only: a third of the bytes that the usual search finds at this speed, as masks are runs.
    packer = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    data = packer.compress(rows.data) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return _PNG_MAGIC + _chunk(b"IHDR", head) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(name: bytes, content: bytes) -> bytes:
    crc = zlib.crc32(content, zlib.crc32(name))
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", crc)


# Boxes


def bounding_box(mask: Mask) -> tuple[int, int, int, int] | None:
    """x, y, width, height of the smallest box around a mask, in pixels; None where it is empty."""
    columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    if not columns.size:
        return None
    x, y = int(columns[0]), int(rows[0])
    return x, y, int(columns[-1]) + 1 - x, int(rows[-1]) + 1 - y
