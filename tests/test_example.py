"""The Example wire format: against hand-made bytes, against protobuf where it is installed, and unusual layouts."""

from __future__ import annotations

import struct
import timeit
from array import array
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drawbar.dataset.example import Box, Value, decode_example, encode_example, parse_image_example
from drawbar.errors import DataError

JPEG = b"\xff\xd8" + bytes(range(256)) * 300 + b"\xff\xd9"
INT64 = st.integers(-(2**63), 2**63 - 1)
FEATURES = st.dictionaries(
    st.text(max_size=20),
    st.one_of(
        st.lists(st.binary(max_size=300), min_size=1, max_size=4),
        st.lists(INT64, min_size=1),
        st.lists(st.floats(width=32, allow_nan=False), min_size=1),
    ),
    max_size=4,
)


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def example(*entries: tuple[str, bytes]) -> bytes:
    """Each entry a key and its Feature message."""
    return field(1, b"".join(field(1, field(1, key.encode()) + field(2, feature)) for key, feature in entries))


def image_features(**changes: Value) -> dict[str, Value]:
    features: dict[str, Value] = {
        "image/class/label": 7,
        "image/class/synset": b"n01440764",
        "image/filename": "n01440764_10026.JPEG",
        "image/object/bbox/xmin": [0.25, 0.5],
        "image/object/bbox/ymin": [0.125, 0.5],
        "image/object/bbox/xmax": [0.75, 1.0],
        "image/object/bbox/ymax": [0.875, 0.75],
        "image/encoded": JPEG,
    }
    return features | {f"image/{key}": value for key, value in changes.items()}


def test_hand_made_bytes() -> None:
    assert encode_example({"a": b"xy"}) == bytes.fromhex("0a0d 0a0b 0a01 61 1206 0a04 0a02 7879")
    assert encode_example({"a": 300}) == bytes.fromhex("0a0d 0a0b 0a01 61 1206 1a04 0a02 ac02")
    assert encode_example({"a": 1.0}) == bytes.fromhex("0a0f 0a0d 0a01 61 1208 1206 0a04 0000803f")
    assert encode_example({"a": array("f")}) == bytes.fromhex("0a09 0a07 0a01 61 1202 1200")
    assert encode_example({"a": array("q")}) == bytes.fromhex("0a09 0a07 0a01 61 1202 1a00")
    assert encode_example({}) == bytes.fromhex("0a00")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(FEATURES)
def test_round_trip(features: dict[str, Any]) -> None:
    assert decode_example(encode_example(features)) == features


def test_long_values_and_kinds() -> None:
    features: dict[str, Value] = {
        "one": b"x" * 1000,
        "text": "é" * 500,
        "flags": [1, -1],
        "none": [],
        "f": array("f", [1]),
    }
    decoded = {"one": [b"x" * 1000], "text": ["é".encode() * 500], "flags": [1, -1], "none": [], "f": [1.0]}
    assert decode_example(encode_example(features)) == decoded
    with pytest.raises(TypeError, match="not dict"):
        encode_example({"a": [{}]})  # type: ignore[dict-item]


def test_equal_values_of_other_types_are_kept_apart() -> None:
    assert decode_example(encode_example({"a": 1})) == {"a": [1]}
    assert isinstance(decode_example(encode_example({"a": 1.0}))["a"][0], float)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(FEATURES)
def test_like_protobuf(features: dict[str, Any]) -> None:
    message_class = protobuf_example()
    message = message_class()
    message.features.SetInParent()
    for key, values in features.items():
        kind = {bytes: "bytes_list", int: "int64_list", float: "float_list"}[type(values[0])]
        getattr(message.features.feature[key], kind).value.extend(values)
    theirs = message.SerializeToString(deterministic=True)
    assert decode_example(theirs) == features
    assert message_class.FromString(encode_example(features)) == message


@cache
def protobuf_example() -> Any:
    """tf.train.Example built with google's protobuf from a description written here."""
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory  # type: ignore[import-untyped, import-not-found, unused-ignore]

    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    for name, kind in (("BytesList", 12), ("FloatList", 2), ("Int64List", 3)):
        file.message_type.add(name=name).field.add(name="value", number=1, label=3, type=kind)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("bytes_list", "float_list", "int64_list"), start=1):
        kind_name = ".t." + name.title().replace("_", "")
        feature.field.add(name=name, number=number, label=1, type=11, type_name=kind_name, oneof_index=0)
    features = file.message_type.add(name="Features")
    features.field.add(name="feature", number=1, label=3, type=11, type_name=".t.Features.FeatureEntry")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=1, type=9)
    entry.field.add(name="value", number=2, label=1, type=11, type_name=".t.Feature")
    top = file.message_type.add(name="Example")
    top.field.add(name="features", number=1, label=1, type=11, type_name=".t.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


def test_packed_and_unpacked_lists() -> None:
    packed_int = field(3, field(1, varint(5) + varint(2**64 - 3)))
    unpacked_int = field(3, b"\x08" + varint(5) + b"\x08" + varint(2**64 - 3))
    packed_float = field(2, field(1, struct.pack("<2f", 0.5, -2)))
    unpacked_float = field(2, b"\x0d" + struct.pack("<f", 0.5) + b"\x0d" + struct.pack("<f", -2))
    payload = example(("a", packed_int), ("b", unpacked_int), ("c", packed_float), ("d", unpacked_float))
    assert decode_example(payload) == {"a": [5, -3], "b": [5, -3], "c": [0.5, -2.0], "d": [0.5, -2.0]}


def test_image_record() -> None:
    image = parse_image_example(encode_example(image_features()))
    assert (bytes(image.encoded), image.label, image.filename) == (JPEG, 7, "n01440764_10026.JPEG")
    assert image.synset == "n01440764"
    assert image.boxes == [Box(0.25, 0.125, 0.75, 0.875), Box(0.5, 0.5, 1.0, 0.75)]
    assert isinstance(image.encoded, memoryview)


@pytest.mark.parametrize("label", [0, 1, 127, 128, 1000, 16383, 16384, 2**40, -1])
def test_labels_of_all_sizes(label: int) -> None:
    record: dict[str, Value] = {"image/encoded": JPEG, "image/class/label": label}
    assert parse_image_example(encode_example(record)).label == label


@pytest.mark.parametrize("size", [1, 100, 120, 127, 128, 16383, 16384, 2_100_000])
def test_images_of_all_sizes(size: int) -> None:
    record: dict[str, Value] = {"image/encoded": b"j" * size, "image/class/label": 3}
    assert len(parse_image_example(encode_example(record)).encoded) == size


def test_unusual_layouts_are_read() -> None:
    image = field(1, field(1, JPEG))
    label = field(3, field(1, varint(9)))
    value_first = field(1, field(2, label) + field(1, b"image/class/label"))
    unpacked = field(3, b"\x08\x09")
    unknown = field(15, b"new") + b"\x78\x05" + b"\x7d1234" + b"\x79" + b"12345678"
    entry = field(1, field(1, b"image/encoded") + field(2, image))
    for payload in (
        field(1, entry + value_first),
        field(1, value_first) + field(1, entry),
        example(("image/encoded", image), ("image/class/label", unpacked)),
        unknown
        + field(1, unknown + entry + unknown + field(1, field(1, b"image/class/label") + unknown + field(2, label))),
        example(("k" * 200, label), ("image/class/label", label), ("image/encoded", image)),
        field(1, entry + field(1, field(1, b"image/class/label") + field(2, unknown + label))),
    ):
        parsed = parse_image_example(payload)
        assert (bytes(parsed.encoded), parsed.label) == (JPEG, 9)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"image/class/label": 1}, "the record has no image/encoded"),
        ({"image/encoded": JPEG}, "the record has no image/class/label"),
        ({"image/encoded": JPEG, "image/class/label": [1, 2]}, r"image/class/label is \[1, 2\]"),
        ({"image/encoded": JPEG, "image/class/label": b"1"}, r"image/class/label is \[b'1'\]"),
        ({"image/encoded": b"", "image/class/label": 1}, "image/encoded holds 1 value, 0 bytes"),
        ({"image/encoded": [JPEG, JPEG], "image/class/label": 1}, "image/encoded holds 2 values"),
        ({"image/encoded": 5, "image/class/label": 1}, "image/encoded holds 0 values"),
    ],
)
def test_what_is_no_image_record(features: dict[str, Value], message: str) -> None:
    with pytest.raises(DataError, match=f"train-3: byte offset 96: {message}"):
        parse_image_example(encode_example(features), shard="train-3", offset=96)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_a_data_error(payload: bytes) -> None:
    for read in (decode_example, parse_image_example):
        try:
            read(payload)
        except DataError:
            pass


@settings(deadline=None)
@given(st.integers(0, 700), st.integers(0, 255))
def test_damaged_records_are_read_or_refused(position: int, byte: int) -> None:
    whole = encode_example(image_features(encoded=b"j" * 200))
    payload = whole[:position] + bytes([byte]) + whole[position + 1 :]
    for damaged in (payload, whole[:position]):
        try:
            image = parse_image_example(damaged)
            assert len(image.encoded) <= len(damaged)
            assert len(image.filename) <= len(damaged)
        except DataError:
            pass


@pytest.mark.parametrize(
    "payload",
    [
        field(1, field(1, field(1, b"\xff\xfe") + field(2, b""))),  # a key that is no text
        field(1, b"\x0a\x7f"),  # reaches beyond the end
        b"\x0a" + b"\xff" * 11,  # varint without an end
        b"\x0b",  # group
        example(("a", field(2, field(1, b"123")))),  # three bytes of floats
    ],
)
def test_malformed(payload: bytes) -> None:
    with pytest.raises(DataError, match="malformed Example"):
        decode_example(payload)


def test_unequal_boxes() -> None:
    image = parse_image_example(encode_example(image_features() | {"image/object/bbox/xmin": [0.5]}))
    with pytest.raises(DataError, match=r"bounding box lists of lengths \[1, 2, 2, 2\]"):
        _ = image.boxes


def test_parsing_is_fast() -> None:
    payload = encode_example(image_features())
    per_record_s = min(timeit.repeat(lambda: parse_image_example(payload), number=500, repeat=5)) / 500
    assert per_record_s < 60e-6  # 5 us on a free core; the general reader takes 60 and more
