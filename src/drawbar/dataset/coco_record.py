"""A record of a detection set as training and evaluation read it: the image, and what is known of its objects.

The keys are those that `coco_example` writes, which are TensorFlow's `create_coco_tf_record.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import cv2
import numpy as np
import numpy.typing as npt

from drawbar.dataset.example import Decoded, decode_example, decode_features
from drawbar.errors import DataError

_Kind = TypeVar("_Kind", bytes, int)
_SIZE_KEYS = ("image/height", "image/width")
_MOST_PIXELS = 65535
"""Of a side: a JPEG has no more."""
_SIDES = ("xmin", "ymin", "xmax", "ymax")


@dataclass(frozen=True, kw_only=True, slots=True)
class CocoRecord:
    encoded: bytes
    """The JPEG file."""
    height: int
    width: int
    """As the record has it, pixels."""
    image_id: int
    boxes: npt.NDArray[np.float64]
    """(objects, 4): xmin, ymin, xmax, ymax in pixels."""
    categories: npt.NDArray[np.int64]
    """(objects,): COCO's own ids, with gaps."""
    crowd: npt.NDArray[np.bool_]
    areas: npt.NDArray[np.float64]
    """Of the objects, pixels squared; of their boxes where the set has none."""
    masks: list[bytes]
    """A PNG for each object; none in a set without masks."""

    def mask(self, number: int) -> npt.NDArray[np.uint8]:
        """(height, width), 0 and 1. Raises DataError for what is no mask of this image."""
        pixels = cv2.imdecode(np.frombuffer(self.masks[number], np.uint8), cv2.IMREAD_GRAYSCALE)
        if pixels is None or pixels.shape != (self.height, self.width):
            size = "no PNG" if pixels is None else "x".join(map(str, reversed(pixels.shape)))
            raise DataError(f"mask {number} is {size}; the image has {self.width}x{self.height}")
        return (pixels > 0).astype(np.uint8)


def image_size(payload: bytes) -> tuple[int, int]:
    """Height and width as the record has them, without a look at the rest. Raises DataError."""
    return _size(decode_features(payload, _SIZE_KEYS))


def _size(features: dict[str, Decoded]) -> tuple[int, int]:
    height, width = (_only(features, key, int) for key in _SIZE_KEYS)
    if not (1 <= height <= _MOST_PIXELS and 1 <= width <= _MOST_PIXELS):
        raise DataError(f"an image of {width}x{height} pixels")
    return height, width


def parse_coco_record(payload: bytes) -> CocoRecord:
    """Raises DataError saying what is missing or contradicts itself."""
    features = decode_example(payload)
    encoded = _only(features, "image/encoded", bytes)
    height, width = _size(features)
    if not encoded:
        raise DataError("an image of no bytes")
    source_id = _only(features, "image/source_id", bytes)
    if not source_id.isdigit() or len(source_id) > 18:
        raise DataError(f"image/source_id is {source_id[:40]!r}; expected a number")
    sides = [_floats(features, f"image/object/bbox/{side}") for side in _SIDES]
    categories = np.array(features.get("image/object/class/label", []), np.int64)
    count = len(categories)
    crowd = np.array(features.get("image/object/is_crowd", [0] * count), np.bool_)
    masks: list[Any] = features.get("image/object/mask", [])
    lengths = [*map(len, sides), len(crowd), *([len(masks)] if masks else [])]
    if set(lengths) - {count}:
        raise DataError(f"lists of objects of lengths {[count, *lengths]}")
    boxes = np.stack(sides, 1) * [width, height, width, height]
    spans = boxes[:, 2:] - boxes[:, :2]
    if not (spans > 0).all() or not np.isfinite(boxes).all():
        raise DataError("a box without area, or one that is no number")
    areas = _floats(features, "image/object/area")
    return CocoRecord(
        encoded=encoded,
        height=height,
        width=width,
        image_id=int(source_id),
        boxes=boxes,
        categories=categories,
        crowd=crowd,
        areas=areas if len(areas) == count else spans.prod(1),
        masks=masks,
    )


def _only(features: dict[str, Decoded], key: str, kind: type[_Kind]) -> _Kind:
    values = features.get(key, [])
    if len(values) != 1 or not isinstance(values[0], kind):
        raise DataError(
            f"the record has no {key}" if not values else f"{key} holds {len(values)} values; expected one",
            hint="the keys of create_coco_tf_record.py are expected: a set of `drawbar data pack coco`",
        )
    return values[0]


def _floats(features: dict[str, Decoded], key: str) -> npt.NDArray[np.float64]:
    try:
        return np.array(features.get(key, []), np.float64)
    except (TypeError, ValueError):
        raise DataError(f"{key} holds no numbers") from None
