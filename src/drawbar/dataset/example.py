"""The `tf.train.Example` message: written, read whole, and read fast for image records.

The protobuf wire format is coded here because a training input path needs one record in a few microseconds without
copying its image, which neither the protobuf package (a copy and tens of microseconds of Python objects) nor
TensorFlow (not wanted as a dependency) gives. The messages, from tensorflow/core/example/{example,feature}.proto:

    Example   {Features features = 1}
    Features  {map<string, Feature> feature = 1}         a map entry is a message {string key = 1; Feature value = 2}
    Feature   {oneof: BytesList = 1, FloatList = 2, Int64List = 3}
    BytesList {repeated bytes value = 1}
    FloatList {repeated float value = 1 [packed]}        Int64List {repeated int64 value = 1 [packed]}

The keys of image records are those of `build_imagenet_data.py`; see `pack`.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from drawbar.errors import DataError
from drawbar.plural import plural

Value = bytes | str | int | float | Sequence[bytes] | Sequence[str] | Sequence[int] | Sequence[float]
"""What `encode_example` takes. `array("f")` and `array("q")` fix the list's kind even when it is empty."""

Decoded = list[bytes] | list[int] | list[float]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_SHORT = 256  # bytes; longer values are not remembered
_INT64_SPAN = 1 << 64
_INT64_MAX = (1 << 63) - 1


class Box(NamedTuple):
    """A bounding box, relative to the image: 0..1."""

    xmin: float
    ymin: float
    xmax: float
    ymax: float


# Writing


def encode_example(features: Mapping[str, Value]) -> bytes:
    """Serialized Example; keys in sorted order, so equal features give equal bytes.

    An empty plain list gives a Feature without a kind, as its type cannot be known. Raises TypeError for a value of
    another type (our caller's bug, never a user's).
    """
    message: list[bytes] = []
    for key in sorted(features):
        value = features[key]
        if isinstance(value, (bytes, str)) and len(value) > _SHORT:
            message += _entry(key, _encode_bytes([value]))
        elif isinstance(value, (bytes, str, int, float)):
            message.append(_short_entry(key, value))
        elif isinstance(value, array) and not value:
            message.append(_empty_entry(key, value.typecode))
        else:
            message += _entry(key, _encode_list(value))
    return b"".join(_nest(1, message))


@lru_cache(maxsize=8192, typed=True)
def _short_entry(key: str, value: bytes | str | int | float) -> bytes:
    """A map entry with one small value, remembered: in a set of images nearly all of them come again and again."""
    return b"".join(_entry(key, _encode_list([value])))  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def _empty_entry(key: str, typecode: str) -> bytes:
    """A list of no values, but of a kind: the boxes of most images of ImageNet."""
    return b"".join(_entry(key, _encode_list(array(typecode))))


def _entry(key: str, feature: list[bytes]) -> list[bytes]:
    name = key.encode()
    return _nest(1, [_head(1, len(name)), name, *_nest(2, feature)])


def _nest(number: int, pieces: list[bytes]) -> list[bytes]:
    """Makes a message in pieces the content of a field. A few bytes go in front; its image is not copied again."""
    pieces.insert(0, _head(number, sum(map(len, pieces))))
    return pieces


def _encode_list(values: Sequence[bytes] | Sequence[str] | Sequence[int] | Sequence[float]) -> list[bytes]:
    if isinstance(values, array):
        kind: type = float if values.typecode in "fd" else int
    elif values:
        kind = type(values[0])
    else:
        return []
    if issubclass(kind, (bytes, str)):
        return _encode_bytes(values)  # type: ignore[arg-type]
    if issubclass(kind, int):
        pieces = [_encode_varint(item % _INT64_SPAN) for item in values]  # type: ignore[arg-type]
        return _nest(_INT64_LIST, _nest(1, pieces) if pieces else pieces)
    if issubclass(kind, float):
        pieces = [struct.pack(f"<{len(values)}f", *values)] if values else []
        return _nest(_FLOAT_LIST, _nest(1, pieces) if pieces else pieces)
    raise TypeError(f"expected bytes, int, float, str or a list of one of them, not {kind.__name__}")


def _encode_bytes(values: Sequence[bytes | str]) -> list[bytes]:
    pieces: list[bytes] = []
    for item in values:
        content = item.encode() if isinstance(item, str) else item
        pieces += (_head(1, len(content)), content)
    return _nest(_BYTES_LIST, pieces)


def _head(number: int, size: int) -> bytes:
    """Tag and length of a length-delimited field, numbered up to 15."""
    tag = number << 3 | _BYTES
    return bytes((tag, size)) if size < 0x80 else bytes((tag,)) + _encode_varint(size)


def _encode_varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# Reading whole


def decode_example(payload: bytes) -> dict[str, Decoded]:
    """Every feature as a list; unknown fields are skipped. Raises DataError where the message is malformed."""
    return {key: _decode_feature(payload, *span) for key, span in _feature_spans(payload).items()}


def decode_features(payload: bytes, keys: Sequence[str]) -> dict[str, Decoded]:
    """As `decode_example`, of these keys alone and without copying the others; a key that is not there is left out."""
    spans = _feature_spans(payload)
    return {key: _decode_feature(payload, *spans[key]) for key in keys if key in spans}


def _feature_spans(payload: bytes) -> dict[str, tuple[int, int]]:
    """Byte range of each Feature message, by key. Takes any field order; the last of equal keys wins."""
    spans = {}
    for number, wire, start, end in _fields(payload, 0, len(payload)):
        if (number, wire) != (1, _BYTES):
            continue
        for entry_number, entry_wire, entry_start, entry_end in _fields(payload, start, end):
            if (entry_number, entry_wire) == (1, _BYTES):
                key, span = _map_entry(payload, entry_start, entry_end)
                spans[key] = span
    return spans


def _map_entry(payload: bytes, start: int, end: int) -> tuple[str, tuple[int, int]]:
    key = ""
    span = (end, end)
    for number, wire, field_start, field_end in _fields(payload, start, end):
        if (number, wire) == (1, _BYTES):
            key = _text(payload[field_start:field_end])
        elif (number, wire) == (2, _BYTES):
            span = (field_start, field_end)
    return key, span


def _decode_feature(payload: bytes, start: int, end: int) -> Decoded:
    values: Decoded = []
    for kind, wire, list_start, list_end in _fields(payload, start, end):
        if wire != _BYTES:
            continue
        if kind == _BYTES_LIST:
            values = [payload[a:b] for n, w, a, b in _fields(payload, list_start, list_end) if (n, w) == (1, _BYTES)]
        elif kind == _FLOAT_LIST:
            values = _decode_floats(payload, list_start, list_end)
        elif kind == _INT64_LIST:
            values = _decode_int64s(payload, list_start, list_end)
    return values


def _decode_floats(payload: bytes, start: int, end: int) -> list[float]:
    values: list[float] = []
    for number, wire, a, b in _fields(payload, start, end):
        if number != 1 or wire not in (_BYTES, _FIXED32):
            continue
        if (b - a) % 4:
            raise DataError(f"malformed Example: a float list of {b - a} bytes")
        values += struct.unpack_from(f"<{(b - a) // 4}f", payload, a)
    return values


def _decode_int64s(payload: bytes, start: int, end: int) -> list[int]:
    values: list[int] = []
    for number, wire, a, b in _fields(payload, start, end):
        if number != 1 or wire not in (_BYTES, _VARINT):
            continue
        position = a
        while position < b:
            value, position = _decode_varint(payload, position, b)
            values.append(value - _INT64_SPAN if value > _INT64_MAX else value)
    return values


def _fields(payload: bytes, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Field number, wire type, and byte range of each field's content, between two offsets.

    The content of a length-delimited field is without its length; of a varint, the varint itself.
    """
    while position < end:
        tag, position = _decode_varint(payload, position, end)
        number, wire = tag >> 3, tag & 7
        if wire == _BYTES:
            size, position = _decode_varint(payload, position, end)
            stop = position + size
        elif wire == _VARINT:
            stop = _decode_varint(payload, position, end)[1]
        elif wire in (_FIXED32, _FIXED64):
            stop = position + (4 if wire == _FIXED32 else 8)
        else:
            raise DataError(f"malformed Example: wire type {wire} at byte {position} of the record")
        if stop > end or number == 0:
            raise DataError(f"malformed Example: field {number} reaches from byte {position} to {stop}, beyond {end}")
        yield number, wire, position, stop
        position = stop


def _decode_varint(payload: bytes, position: int, end: int) -> tuple[int, int]:
    """The unsigned value and the position after it."""
    value = shift = 0
    for index in range(position, min(end, position + 10)):
        byte = payload[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value % _INT64_SPAN, index + 1
        shift += 7
    raise DataError(f"malformed Example: unfinished varint at byte {position} of the record")


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise DataError(f"malformed Example: {raw[:40]!r} is no UTF-8 text") from None


# Reading image records fast


class ImageExample:
    """One image record. `encoded` and `label` are read at once, the rest when asked for."""

    __slots__ = ("_payload", "encoded", "label")

    def __init__(self, payload: bytes, encoded: memoryview, label: int) -> None:
        self._payload = payload
        self.encoded = encoded
        """The JPEG file: a view into the record, not a copy."""
        self.label = label
        """1..N; 0 is left for background."""

    @property
    def filename(self) -> str:
        return self._text_of("image/filename")

    @property
    def synset(self) -> str:
        return self._text_of("image/class/synset")

    @property
    def boxes(self) -> list[Box]:
        """Raises DataError where the four coordinate lists differ in length."""
        spans = _feature_spans(self._payload)
        sides = [_span_values(self._payload, spans, f"image/object/bbox/{side}") for side in Box._fields]
        lengths = [len(side) for side in sides]
        if len(set(lengths)) > 1:
            raise DataError(f"malformed Example: bounding box lists of lengths {lengths}")
        return [Box(*map(float, box)) for box in zip(*sides, strict=True)]

    def _text_of(self, key: str) -> str:
        values = _span_values(self._payload, _feature_spans(self._payload), key)
        return _text(values[0]) if values and isinstance(values[0], bytes) else ""


def parse_image_example(payload: bytes, *, shard: str = "", offset: int = -1) -> ImageExample:
    """The image, its label and, on demand, the rest of a record with the ImageNet keys. About 5 us.

    Only what is needed is looked at: the walk stops when image and label are found (`decode_example` reads all).
    Raises DataError, naming `shard` and `offset` if given, for a malformed message and for one without exactly one
    image and one label.
    """
    try:
        try:
            start, stop, label = _plain_image(payload)
        except (_Unusual, IndexError):
            start, stop, label = _any_image(payload)
    except DataError as error:
        place = f"{shard}: byte offset {offset}: " if shard else ""
        raise DataError(place + error.message, hint=error.hint) from None
    return ImageExample(payload, memoryview(payload)[start:stop], label)


class _Unusual(Exception):
    """The message is not laid out as the usual writers do; the general reader decides whether it is right."""


def _plain_image(payload: bytes) -> tuple[int, int, int]:
    """Byte range of the image, and the label, for the one layout that all usual writers produce.

    That is: one Features message, in each entry the key before the value, keys shorter than 128 bytes.
    Written out flat, as it runs once per trained image: a call in this loop would cost as much as the loop.
    """
    end = len(payload)
    size = payload[1]
    position = 2
    if size > 0x7F:
        size, position = _decode_varint(payload, 1, end)
    if payload[0] != 0x0A or position + size != end:
        raise _Unusual
    image = label = None
    while position < end:
        if payload[position] != 0x0A:
            raise _Unusual
        size = payload[position + 1]
        position += 2
        if size > 0x7F:
            size, position = _decode_varint(payload, position - 1, end)
        stop = position + size
        key_size = payload[position + 1]
        if key_size > 0x7F or payload[position] != 0x0A:
            raise _Unusual
        value = position + 2 + key_size
        key = payload[position + 2 : value]
        if key == b"image/encoded":
            image = _plain_bytes(payload, value, stop)
        elif key == b"image/class/label":
            label = _plain_label(payload, value, stop)
        if image is not None and label is not None:
            return *image, label
        position = stop
    raise _Unusual


def _plain_bytes(payload: bytes, position: int, stop: int) -> tuple[int, int]:
    """Byte range of the only item: three nested messages (`12` Feature, `0A` BytesList, `0A` item), all ending here."""
    for tag in (0x12, 0x0A, 0x0A):
        if payload[position] != tag:
            raise _Unusual
        shift = size = 0
        while (byte := payload[position := position + 1]) > 0x7F:
            size |= (byte & 0x7F) << shift
            shift += 7
        position += 1
        if position + (size | byte << shift) != stop:
            raise _Unusual
    if position == stop or stop > len(payload):
        raise _Unusual
    return position, stop


def _plain_label(payload: bytes, position: int, stop: int) -> int:
    """A label below 2^14: packed `12 05 1A 03 0A 01 xx` or `12 06 1A 04 0A 02 xx xx`."""
    size = stop - position - 6
    if size == 1 and payload[position + 4] == 0x0A and payload[stop - 1] < 0x80:
        label = payload[stop - 1]
    elif size == 2 and payload[position + 4] == 0x0A and payload[stop - 1] < 0x80 <= payload[stop - 2]:
        label = payload[stop - 2] & 0x7F | payload[stop - 1] << 7
    else:
        raise _Unusual
    expected = (0x12, 4 + size, 0x1A, 2 + size, 0x0A, size)
    if tuple(payload[position : position + 6]) != expected:
        raise _Unusual
    return label


def _any_image(payload: bytes) -> tuple[int, int, int]:
    """As `_plain_image`, for every valid layout. Raises DataError saying what is wrong or missing."""
    spans = _feature_spans(payload)
    for key in ("image/encoded", "image/class/label"):
        if key not in spans:
            raise DataError(f"the record has no {key}", hint="the ImageNet keys of build_imagenet_data.py are expected")
    images = [
        (a, b)
        for kind, wire, start, end in _fields(payload, *spans["image/encoded"])
        if (kind, wire) == (_BYTES_LIST, _BYTES)
        for number, item_wire, a, b in _fields(payload, start, end)
        if (number, item_wire) == (1, _BYTES)
    ]
    if len(images) != 1 or images[0][0] == images[0][1]:
        raise DataError(
            f"image/encoded holds {plural(len(images), 'value')}, {plural(sum(b - a for a, b in images), 'byte')}; "
            "expected one"
        )
    labels = _decode_feature(payload, *spans["image/class/label"])
    if len(labels) != 1 or not isinstance(labels[0], int):
        raise DataError(f"image/class/label is {labels!r}; expected one whole number")
    return *images[0], labels[0]


def _span_values(payload: bytes, spans: dict[str, tuple[int, int]], key: str) -> Decoded:
    return _decode_feature(payload, *spans[key]) if key in spans else []
