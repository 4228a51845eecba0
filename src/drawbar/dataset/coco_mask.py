"""Object masks of COCO: polygons and run lengths to pixels, pixels to PNG and run lengths.

Polygons are filled by pycocotools, whose rounding is what "COCO's masks" means. Run lengths are decoded here: its C
code believes whatever counts it is given.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drawbar.errors import DataError, EnvironmentUnfit

Mask = NDArray[np.uint8]
"""1 where the object is seen, else 0; (height, width)."""

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_LEAST_COORDINATES = 6


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


def rasterise(segmentation: Any, height: int, width: int) -> Mask:
    """The pixels of COCO's `segmentation` member: polygons, compressed or uncompressed run lengths.

    Raises DataError with the reason alone for what is none of these or does not fit the image.
    """
    if isinstance(segmentation, list):
        return _fill(_with_area(segmentation), height, width)
    if not isinstance(segmentation, dict) or segmentation.get("size") != [height, width]:
        size = segmentation.get("size") if isinstance(segmentation, dict) else None
        raise DataError(f"mask of size {str(size)[:40]}; the image has [{height}, {width}]")
    counts = segmentation.get("counts")
    return decode_counts(expand_counts(counts) if isinstance(counts, str) else counts, height, width)


def _fill(polygons: list[list[float]], height: int, width: int) -> Mask:
    from pycocotools import mask as coco

    if not polygons:
        raise DataError("no polygon of three corners")
    reach = 2.0 * max(height, width)
    for polygon in polygons:
        if not all(type(value) in (int, float) for value in polygon):
            raise DataError("a polygon holds something else than numbers")
        # The C code walks each edge step by step, and counts in 32 bits.
        if not all(-reach <= value <= reach for value in polygon):
            raise DataError(f"a polygon reaches far outside the {width}x{height} image")
    runs: bytes = coco.merge(coco.frPyObjects(polygons, height, width))["counts"]
    return decode_counts(expand_counts(runs.decode()), height, width)


# Run lengths: column by column, beginning with a run of zeros


def decode_counts(counts: Any, height: int, width: int) -> Mask:
    """Raises DataError with the reason alone where the runs do not add up to the image."""
    if not isinstance(counts, list) or not all(type(count) is int and count >= 0 for count in counts):
        raise DataError("run lengths that are no list of whole numbers")
    if sum(counts) != height * width:
        raise DataError(f"run lengths add up to {sum(counts)}; {width}x{height} pixels have {height * width}")
    values = np.arange(len(counts), dtype=np.uint8) & 1
    return np.ascontiguousarray(np.repeat(values, counts).reshape((height, width), order="F"))


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
