"""Whether one record is as its schema says: keys, types, list lengths, labels, boxes, and the image itself.

Two schemas are known (TensorFlow's `build_imagenet_data.py` and `create_coco_tf_record.py`). Of sets that Drawbar
packed every key is expected; of foreign ones only image and label, since converters differ in what they leave out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Literal

from drawbar.dataset import jpeg
from drawbar.dataset.example import Decoded, decode_example
from drawbar.dataset.manifest import RecordSchema
from drawbar.errors import DataError

Features = Mapping[str, Decoded]
"""The lists must not be changed: equal ones are shared."""
SchemaName = RecordSchema | Literal["none"]

_SIDES = tuple(f"image/object/bbox/{side}" for side in ("xmin", "ymin", "xmax", "ymax"))
_SINGLE: Mapping[RecordSchema, Mapping[str, type]] = {
    "imagenet": {
        "image/encoded": bytes,
        "image/class/label": int,
        "image/height": int,
        "image/width": int,
        "image/colorspace": bytes,
        "image/channels": int,
        "image/class/synset": bytes,
        "image/class/text": bytes,
        "image/format": bytes,
        "image/filename": bytes,
    },
    "coco": {
        "image/encoded": bytes,
        "image/height": int,
        "image/width": int,
        "image/filename": bytes,
        "image/source_id": bytes,
        "image/key/sha256": bytes,
        "image/format": bytes,
    },
}
_PER_OBJECT: Mapping[RecordSchema, Mapping[str, type]] = {
    "imagenet": dict.fromkeys(_SIDES, float) | {"image/object/bbox/label": int},
    "coco": dict.fromkeys(_SIDES, float)
    | {
        "image/object/class/label": int,
        "image/object/class/text": bytes,
        "image/object/is_crowd": int,
        "image/object/area": float,
    },
}
_MASK = "image/object/mask"
_ESSENTIAL: Mapping[RecordSchema, tuple[str, ...]] = {
    "imagenet": ("image/encoded", "image/class/label"),
    "coco": ("image/encoded", "image/object/class/label", *_SIDES),
}
_FORMATS = {b"jpeg": "JPEG", b"jpg": "JPEG", b"png": "PNG", b"gif": "GIF", b"bmp": "BMP", b"webp": "WebP"}
_CACHED_ENTRY_BYTES = 256


def read_features(payload: bytes) -> Features:
    """As `decode_example`, but quick where records share most of their small features, as those of a set do.

    Raises DataError where the message is malformed.
    """
    entries = _entries(payload)
    if entries is None:
        return decode_example(payload)
    features: dict[str, Decoded] = {}
    for start, stop in entries:
        entry = payload[start:stop]
        features.update(_small_entry(entry) if stop - start <= _CACHED_ENTRY_BYTES else _entry(entry))
    return features


def _entries(payload: bytes) -> list[tuple[int, int]] | None:
    """Byte ranges of the map entries, heads included; None for a layout that the usual writers do not produce."""
    try:
        start = 1
        size = shift = 0
        while True:
            byte = payload[start]
            start += 1
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        if payload[0] != 0x0A or start + size != len(payload):
            return None
        entries = []
        while start < len(payload):
            at = start + 1
            size = shift = 0
            while True:
                byte = payload[at]
                at += 1
                size |= (byte & 0x7F) << shift
                if byte < 0x80:
                    break
                shift += 7
            if payload[start] != 0x0A or at + size > len(payload):
                return None
            entries.append((start, at + size))
            start = at + size
        return entries
    except IndexError:
        return None


def _entry(entry: bytes) -> dict[str, Decoded]:
    """A map entry with its head is the content of a Features message, and with another head an Example."""
    size, head = len(entry), bytearray(b"\x0a")
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return decode_example(bytes(head) + entry)


_small_entry = lru_cache(maxsize=16384)(_entry)


@dataclass(frozen=True)
class Found:
    """What one record turned out to be."""

    reasons: list[str]
    """Faults; empty for a good record."""
    labels: Sequence[int]
    """Of the image, or with the COCO schema of each object; empty where they cannot be told."""


@dataclass(frozen=True, kw_only=True)
class RecordRules:
    """What is expected of the records of a set."""

    schema: SchemaName
    all_keys: bool
    """Every key of the schema, as in a set packed by Drawbar."""
    label_ids: frozenset[int] | None
    """Labels that there are; None: any from 0."""

    def check(self, payload: bytes, decode: bool) -> Found:
        """Looks at one record; with `decode` its image and masks are decoded too."""
        if self.schema == "none":
            return Found([], ())
        try:
            features = read_features(payload)
        except DataError as error:
            return Found([error.message], ())
        reasons = _key_faults(features, self.schema, self.all_keys)
        labels = _labels(features, self.schema)
        if self.label_ids is None:
            reasons += [f"label {label}; expected 0 or more" for label in sorted({x for x in labels if x < 0})]
        else:
            wrong = sorted({label for label in labels if label not in self.label_ids})
            reasons += [f"label {label} is none of the set's {_span(self.label_ids)}" for label in wrong]
        reasons += _box_faults(features, self.schema)
        reasons += _image_faults(features, decode)
        if self.schema == "coco":
            reasons += _coco_faults(features, decode)
        return Found(reasons, labels)


def schema_of(payload: bytes) -> RecordSchema | None:
    """By the keys of one record; None where it is no image record of either kind."""
    try:
        features = read_features(payload)
    except DataError:
        return None
    if "image/object/class/label" in features:
        return "coco"
    return "imagenet" if "image/class/label" in features else None


def _key_faults(features: Features, schema: RecordSchema, all_keys: bool) -> list[str]:
    single, per_object = _SINGLE[schema], _PER_OBJECT[schema]
    wanted = chain(single, per_object) if all_keys else _ESSENTIAL[schema]
    reasons = [f"{key} is missing" for key in wanted if key not in features]
    for key, kind in single.items():
        values = features.get(key)
        if values is not None and (len(values) != 1 or not isinstance(values[0], kind)):
            reasons.append(f"{key} is {_shown(values)}; expected one {_kind_name(kind)}")
    for key, kind in chain(per_object.items(), [(_MASK, bytes)]):
        values = features.get(key)
        if values and not isinstance(values[0], kind):
            reasons.append(f"{key} is {_shown(values)}; expected a list of {_kind_name(kind)}")
    lengths = {key: len(features[key]) for key in per_object if key in features}
    if features.get(_MASK):
        lengths[_MASK] = len(features[_MASK])
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key.removeprefix('image/object/')} {length}" for key, length in lengths.items())
        reasons.append(f"lists of different lengths: {listed}")
    return reasons


def _labels(features: Features, schema: RecordSchema) -> list[int]:
    values = features.get("image/class/label" if schema == "imagenet" else "image/object/class/label", ())
    return [value for value in values if isinstance(value, int)]


def boxes_of(features: Features) -> list[tuple[float, float, float, float]]:
    """xmin, ymin, xmax, ymax of each; empty where the lists do not fit together."""
    sides = [features.get(side, ()) for side in _SIDES]
    if len({len(side) for side in sides}) > 1 or any(side and not isinstance(side[0], float) for side in sides):
        return []
    return list(zip(*sides, strict=True))


def _box_faults(features: Features, schema: RecordSchema) -> list[str]:
    reasons = []
    for xmin, ymin, xmax, ymax in boxes_of(features):
        shown = f"box xmin {xmin:g} ymin {ymin:g} xmax {xmax:g} ymax {ymax:g}"
        if not all(0.0 <= value <= 1.0 for value in (xmin, ymin, xmax, ymax)):
            reasons.append(f"{shown}: not within 0..1")
        elif xmin > xmax or ymin > ymax:
            reasons.append(f"{shown}: minimum and maximum are reversed")
        elif schema == "imagenet" and (xmin == xmax or ymin == ymax):
            # In COCO an object of a hundredth of a pixel is one, and empty only in 32 bits.
            reasons.append(f"{shown}: empty")
    return reasons


def _image_faults(features: Features, decode: bool) -> list[str]:
    encoded = _one(features, "image/encoded")
    if not isinstance(encoded, bytes):
        return []
    reasons = []
    kind = "JPEG" if encoded.startswith(jpeg.SOI) else jpeg.other_format(encoded)
    stated = _one(features, "image/format")
    if isinstance(stated, bytes) and _FORMATS.get(stated.lower(), "") != kind:
        reasons.append(f"image/format is {_shown([stated])}, the image is {kind or 'none that is known'}")
    size: tuple[int, int] | None
    try:
        if kind == "PNG" and isinstance(stated, bytes) and stated.lower() == b"png":
            size = png_size(encoded)
            jpeg.check_size(*size, jpeg.MAX_PIXELS)
        else:
            header = jpeg.check_trainable(encoded)
            size = (header.width, header.height)
    except DataError as error:
        reasons.append(error.message)
        return reasons
    for key, actual in zip(("image/width", "image/height"), size, strict=True):
        value = _one(features, key)
        if isinstance(value, int) and value != actual:
            reasons.append(f"{key} is {value}, the image's header says {actual}")
    if decode:
        fault = decode_fault(encoded, size)
        reasons += [fault] if fault else []
    return reasons


def _coco_faults(features: Features, decode: bool) -> list[str]:
    reasons = []
    encoded, digest = _one(features, "image/encoded"), _one(features, "image/key/sha256")
    if isinstance(encoded, bytes) and isinstance(digest, bytes):
        actual = hashlib.sha256(encoded).hexdigest()
        if digest.decode(errors="replace") != actual:
            reasons.append(f"image/key/sha256 is {_shown([digest])}, the image's is {actual}")
    for number, area in enumerate(features.get("image/object/area", ())):
        if isinstance(area, float) and not (area >= 0 and math.isfinite(area)):
            reasons.append(f"object {number}: area {area:g}")
    for number, crowd in enumerate(features.get("image/object/is_crowd", ())):
        if crowd not in (0, 1):
            reasons.append(f"object {number}: is_crowd {crowd}; expected 0 or 1")
    size = (_one(features, "image/width"), _one(features, "image/height"))
    for number, mask in enumerate(features.get(_MASK, ())):
        if isinstance(mask, bytes):
            fault = _mask_fault(mask, size, decode)
            reasons += [f"object {number}: mask {fault}"] if fault else []
    return reasons


def _mask_fault(mask: bytes, size: tuple[object, object], decode: bool) -> str:
    try:
        actual = png_size(mask)
    except DataError as error:
        return error.message
    if actual != size and None not in size:
        return f"of {actual[0]}x{actual[1]} pixels, the image has {size[0]}x{size[1]}"
    return decode_fault(mask, actual) if decode else ""


def png_size(data: bytes) -> tuple[int, int]:
    """Width and height by the header. Raises DataError for what is no PNG."""
    if not data.startswith(jpeg.PNG) or data[12:16] != b"IHDR" or len(data) < 24:
        raise DataError("is no PNG")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def decode_fault(encoded: bytes, size: tuple[int, int]) -> str:
    """Decodes a JPEG or PNG whole; empty where it comes out with this width and height, without a warning."""
    if size[0] * size[1] > jpeg.MAX_PIXELS:
        return f"absurd size: {size[0]}x{size[1]} pixels"
    # These take half a second to import, which nobody needs for a check of framing.
    import cv2
    import numpy as np
    import simplejpeg

    if encoded.startswith(jpeg.SOI):
        try:
            shape = simplejpeg.decode_jpeg(encoded, "RGB", fastdct=True, fastupsample=True).shape
        except ValueError as error:
            return f"cannot be decoded: {error}"
    else:
        pixels = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_UNCHANGED)
        if pixels is None:
            return "cannot be decoded"
        shape = pixels.shape
    actual = (int(shape[1]), int(shape[0]))
    return "" if actual == size else f"decodes to {actual[0]}x{actual[1]} pixels; expected {size[0]}x{size[1]}"


def _one(features: Features, key: str) -> bytes | int | float | None:
    values = features.get(key, ())
    return values[0] if len(values) == 1 else None


def _shown(values: Sequence[bytes | int | float]) -> str:
    """Short, on one line, whatever is in it."""
    if not values:
        return "empty"
    first = values[0]
    if isinstance(first, bytes):
        text = repr(first[:40])[1:]
        shown = text if len(first) <= 40 else f"{len(first)} bytes"
    else:
        shown = f"{first}"
    return shown if len(values) == 1 else f"a list of {len(values)}, first {shown}"


def _kind_name(kind: type) -> str:
    return {bytes: "bytes", int: "int64", float: "float"}[kind]


def _span(label_ids: frozenset[int]) -> str:
    low, high = min(label_ids), max(label_ids)
    whole = len(label_ids) == high - low + 1
    return f"{low}..{high}" if whole else f"{len(label_ids)} within {low}..{high}"
