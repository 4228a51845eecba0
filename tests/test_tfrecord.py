"""Framing against an independent CRC32C, cuts at every byte, and each kind of damage."""

from __future__ import annotations

import gzip
import struct
import time
import zlib
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawbar.dataset.tfrecord import FRAME_BYTES, RawRecord, RecordSplitter, frame, masked_crc32c
from drawbar.errors import DataError


def crc32c(data: bytes) -> int:
    """Bit by bit from the reflected Castagnoli polynomial; shares nothing with google_crc32c."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def mask(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


def split(
    data: bytes, cuts: Sequence[int] = (), start: int = 0, end: int | None = None, shard: str = "s"
) -> list[RawRecord]:
    splitter = RecordSplitter(shard, start, end)
    records: list[RawRecord] = []
    bounds = [0, *sorted(cuts), len(data)]
    for low, high in pairwise(bounds):
        records += splitter.feed(data[low:high])
    splitter.finish()
    return records


def test_crc_vectors() -> None:
    # RFC 3720 B.4, and the check value of CRC-32C.
    vectors = {b"\0" * 32: 0x8A9136AA, b"\xff" * 32: 0x62A8AB43, bytes(range(32)): 0x46DD794E, b"123456789": 0xE3069283}
    for data, expected in vectors.items():
        assert crc32c(data) == expected
        assert masked_crc32c(data) == mask(expected)


@pytest.mark.parametrize("payload", [b"", b"x", b"drawbar" * 99])
def test_frame_layout(payload: bytes) -> None:
    length = struct.pack("<Q", len(payload))
    expected = length + struct.pack("<I", mask(crc32c(length))) + payload + struct.pack("<I", mask(crc32c(payload)))
    assert frame(payload) == expected
    assert len(expected) == len(payload) + FRAME_BYTES


@settings(deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(0, 400), max_size=12))
def test_any_cuts_give_the_records(payloads: list[bytes], cuts: list[int]) -> None:
    data = b"".join(map(frame, payloads))
    records = split(data, [min(cut, len(data)) for cut in cuts])
    assert [record.payload for record in records] == payloads
    offsets = [sum(len(payload) + FRAME_BYTES for payload in payloads[:count]) for count in range(len(payloads))]
    assert [record.offset for record in records] == offsets


def test_one_byte_at_a_time_and_other_buffers() -> None:
    data = frame(b"one") + frame(b"") + frame(b"three")
    assert [record.payload for record in split(data, range(1, len(data)))] == [b"one", b"", b"three"]
    splitter = RecordSplitter("s")
    records = [*splitter.feed(memoryview(data)[:20]), *splitter.feed(bytearray(data[20:]))]
    assert [record.payload for record in records] == [b"one", b"", b"three"]
    assert all(type(record.payload) is bytes for record in records)


def test_part_of_a_shard() -> None:
    frames = [frame(b"a" * 10), frame(b"b" * 20), frame(b"c" * 30)]
    start, end = len(frames[0]), len(frames[0]) + len(frames[1])
    assert split(frames[1], [5], start, end) == [RawRecord("s", start, b"b" * 20)]
    with pytest.raises(DataError, match=f"s: byte offset {end}: the bytes end here, {len(frames[2])} short"):
        split(frames[1], [5], start, end + len(frames[2]))
    with pytest.raises(
        DataError, match=f"truncated record: 11 bytes are there up to the expected end {end + 11}, .* announces 46"
    ):
        split(b"".join(frames[1:]), [], start, end + 11)


def test_empty_shard_has_no_records() -> None:
    assert split(b"") == []


def test_large_records_in_small_chunks_take_linear_time() -> None:
    data = frame(b"x" * 8_000_000)
    started = time.perf_counter()
    assert len(split(data, range(0, len(data), 4096))) == 1
    assert time.perf_counter() - started < 2  # quadratic copying would take 8 GB of it


def damaged(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :]


@pytest.mark.parametrize("cuts", [[], [3], [30, 41]])
def test_damage_names_shard_and_offset(cuts: list[int]) -> None:
    first, second = frame(b"first record"), frame(b"second record")
    data, at = first + second, len(first)
    cases = {
        r"t-1: byte offset 28: wrong CRC of the record's length": damaged(data, at + 1),
        r"t-1: byte offset 28: wrong CRC of the record's data \(13 bytes\)": damaged(data, at + 15),
        r"t-1: byte offset 0: wrong CRC of the record's data \(12 bytes\)": damaged(data, 13),
        r"t-1 is not a TFRecord file: wrong CRC of the length at byte offset 0": damaged(data, 0),
    }
    for message, damage in cases.items():
        with pytest.raises(DataError, match=message):
            split(damage, cuts, shard="t-1")


def test_records_before_the_damage_are_given() -> None:
    splitter = RecordSplitter("s")
    records = splitter.feed(frame(b"good") + damaged(frame(b"bad"), 13))
    assert next(records).payload == b"good"
    with pytest.raises(DataError, match="byte offset 20"):
        next(records)


@pytest.mark.parametrize("left", [1, 11, 12, 20, 28])
def test_truncated_last_record(left: int) -> None:
    data = frame(b"whole") + frame(b"cut off here!")[:left]
    announced = f"its header announces {13 + FRAME_BYTES}" if left >= 12 else "a header has 12"
    with pytest.raises(DataError, match=rf"byte offset 21: truncated last record: {left} bytes are there, {announced}"):
        split(data)


def test_absurd_length() -> None:
    length = struct.pack("<Q", 1 << 40)
    header = length + struct.pack("<I", mask(crc32c(length)))
    with pytest.raises(DataError, match=r"byte offset 17: absurd record length: 1099511627776 bytes"):
        split(frame(b"x") + header)


def test_compressed_files_are_recognised() -> None:
    data = frame(b"compress me" * 10)
    for kind, packed in {"gzip": gzip.compress(data), "zlib": zlib.compress(data)}.items():
        for part in (packed, packed[:9]):
            with pytest.raises(DataError, match=f"it is {kind}-compressed") as caught:
                split(part)
            assert caught.value.hint
    with pytest.raises(DataError, match="is not a TFRecord file: wrong CRC"):
        split(b"\xff\xd8\xff\xe0 a JPEG file, not a shard")
