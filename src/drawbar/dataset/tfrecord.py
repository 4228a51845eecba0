"""TFRecord framing: bytes of a shard to whole, checked records, and back.

A record is framed as uint64 length (little endian), masked CRC32C of those 8 bytes, payload, masked CRC32C of the
payload: 16 bytes around each payload. The mask rotates the CRC right by 15 bits and adds 0xa282ead8 modulo 2^32
(tensorflow/docs r1.10, `python_io.md`). What is inside a payload belongs to `example`; where the bytes come from
belongs to the caller.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import google_crc32c

from drawbar.errors import DataError

HEADER_BYTES = 12
FOOTER_BYTES = 4
FRAME_BYTES = HEADER_BYTES + FOOTER_BYTES

MAX_PAYLOAD_BYTES = 1 << 30
"""An announced length beyond this is called absurd rather than waited for: no image comes near it."""

GZIP_MAGIC = b"\x1f\x8b\x08"

Compression = Literal["", "gzip", "zlib"]
"""Of a whole shard, see `compressed`; empty: none."""

_MASK_DELTA = 0xA282EAD8
_HEADER = struct.Struct("<QI")
_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")


class FramingError(DataError):
    """A fault in a shard's bytes, after which nothing more of it can be read."""

    def __init__(self, shard: str, offset: int, reason: str, message: str = "", hint: str | None = None) -> None:
        super().__init__(message or f"{shard}: byte offset {offset}: {reason}", hint=hint)
        self.shard, self.offset, self.reason = shard, offset, reason


class RawRecord(NamedTuple):
    """One record as it stands in a shard."""

    shard: str
    offset: int
    """Of its frame's first byte, from the start of the shard."""
    payload: bytes


def masked_crc32c(data: bytes) -> int:
    """The masked CRC32C that TFRecord stores."""
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """The payload with its frame: `len(payload) + FRAME_BYTES` bytes."""
    header, footer = frame_ends(payload)
    return b"".join((header, payload, footer))


def frame_ends(payload: bytes) -> tuple[bytes, bytes]:
    """What stands before and behind the payload, for a writer that does not want it copied."""
    length = _UINT64.pack(len(payload))
    return length + _UINT32.pack(masked_crc32c(length)), _UINT32.pack(masked_crc32c(payload))


def compression_of(head: bytes | bytearray | memoryview) -> Compression:
    """Of a shard that begins with `head`: its first `HEADER_BYTES` bytes, fewer where it has no more.

    A record's length can look like a magic number, so whatever has a header with a right CRC is not compressed.
    """
    start = bytes(head[:HEADER_BYTES])
    if len(start) == HEADER_BYTES and _HEADER.unpack(start)[1] == masked_crc32c(start[:8]):
        return ""
    if start.startswith(GZIP_MAGIC):
        return "gzip"
    # RFC 1950: method 8 (deflate), a window of at most 32 KiB, no preset dictionary, both bytes a multiple of 31.
    if len(start) >= 2 and start[0] & 0x8F == 8 and not start[1] & 0x20 and (start[0] << 8 | start[1]) % 31 == 0:
        return "zlib"
    return ""


class RecordSplitter:
    """Cuts the bytes of one shard, fed in order in pieces of any size, into records; both CRCs of each are checked.

    `start` and `end` are byte offsets in the shard, both at record boundaries; `end` None means unknown. A record
    inside one chunk is copied once, into its payload; one that crosses chunks is copied twice.

    A record whose data have a wrong CRC raises, unless there is `on_bad_data`: then its offset and the reason go there,
    and the record is left out. After a DataError the splitter must not be used again, unless by `restart`.
    """

    def __init__(
        self,
        shard: str,
        start: int = 0,
        end: int | None = None,
        on_bad_data: Callable[[int, str], None] | None = None,
    ) -> None:
        self.shard = shard
        self.num_records = 0
        """Records so far, those left out included."""
        self.offset = start
        """Where the next record starts, in bytes from the start of the shard."""
        self._end = end
        self._on_bad_data = on_bad_data
        self._pending = bytearray()
        self._frame_bytes = 0
        """Size of the record that `_pending` begins, once its header is there."""

    def feed(self, chunk: bytes | bytearray | memoryview) -> Iterator[RawRecord]:
        """Yields the records that `chunk` completes. Consume the iterator before feeding the next chunk.

        Raises DataError naming shard and byte offset for a wrong CRC or an impossible length.
        """
        view = memoryview(chunk)
        size = len(view)
        position = 0
        if self._pending:
            position = self._fill(view)
            if position < 0:
                return
            record = self._take(memoryview(bytes(self._pending)), 0, self._frame_bytes)
            if record is not None:
                yield record
            self._pending.clear()
            self._frame_bytes = 0
        while size - position >= HEADER_BYTES:
            frame_bytes = self._check_header(view, position)
            if size - position < frame_bytes:
                self._frame_bytes = frame_bytes
                break
            record = self._take(view, position, frame_bytes)
            if record is not None:
                yield record
            position += frame_bytes
        self._pending += view[position:]

    def restart(self) -> None:
        """Forgets the record begun: the next piece fed starts at `offset` again. Also after a DataError."""
        self._pending.clear()
        self._frame_bytes = 0

    def finish(self) -> None:
        """Call after the last chunk. Raises DataError where the shard ends inside a record, or before `end`."""
        there = len(self._pending)
        if self._frame_bytes:
            raise self._error(
                f"truncated last record: {there} bytes are there, its header announces {self._frame_bytes}"
            )
        if there:
            if self.offset == 0:
                self._refuse_compressed(self._pending)
            raise self._error(f"truncated last record: {there} bytes are there, a header has {HEADER_BYTES}")
        if self._end is not None and self.offset != self._end:
            raise self._error(f"the bytes end here, {self._end - self.offset} short of the expected end {self._end}")

    def _fill(self, view: memoryview) -> int:
        """Completes the pending record from `view`; the bytes used, or -1 while it is still incomplete."""
        pending = self._pending
        used = 0
        if not self._frame_bytes:
            used = min(HEADER_BYTES - len(pending), len(view))
            pending += view[:used]
            if len(pending) < HEADER_BYTES:
                return -1
            self._frame_bytes = self._check_header(memoryview(bytes(pending)), 0)
        wanted = self._frame_bytes - len(pending)
        pending += view[used : used + wanted]
        return used + wanted if len(pending) == self._frame_bytes else -1

    def _check_header(self, view: memoryview, position: int) -> int:
        """Size in bytes of the whole frame that starts at `position`."""
        length, length_crc = _HEADER.unpack_from(view, position)
        crc: int = google_crc32c.value(bytes(view[position : position + 8]))
        if (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF != length_crc:
            if self.offset == 0:
                self._refuse_compressed(view[position:])
                reason = "is not a TFRecord file: wrong CRC of the length at byte offset 0"
                hint = "every object under the prefix is read as a shard; move other files elsewhere"
                raise FramingError(self.shard, 0, reason, f"{self.shard} {reason}", hint)
            raise self._error("wrong CRC of the record's length")
        if length > MAX_PAYLOAD_BYTES:
            raise self._error(f"absurd record length: {length} bytes (at most {MAX_PAYLOAD_BYTES})")
        frame_bytes: int = length + FRAME_BYTES
        if self._end is not None and self.offset + frame_bytes > self._end:
            there = self._end - self.offset
            raise self._error(
                f"truncated record: {there} bytes are there up to the expected end {self._end}, "
                f"its header announces {frame_bytes}"
            )
        return frame_bytes

    def _take(self, view: memoryview, position: int, frame_bytes: int) -> RawRecord | None:
        start = position + HEADER_BYTES
        end = position + frame_bytes - FOOTER_BYTES
        payload = bytes(view[start:end])  # google_crc32c takes bytes only
        crc: int = google_crc32c.value(payload)
        record: RawRecord | None
        if (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF != _UINT32.unpack_from(view, end)[0]:
            record = None
            reason = f"wrong CRC of the record's data ({len(payload)} bytes)"
            if self._on_bad_data is None:
                raise self._error(reason)
            self._on_bad_data(self.offset, reason)
        else:
            record = RawRecord(self.shard, self.offset, payload)
        self.offset += frame_bytes
        self.num_records += 1
        return record

    def _refuse_compressed(self, head: bytearray | memoryview) -> None:
        kind = compression_of(head)
        if kind:
            reason = f"is not a TFRecord file: it is {kind}-compressed"
            hint = "a set with a manifest, and part of a shard, are read uncompressed only"
            raise FramingError(self.shard, 0, reason, f"{self.shard} {reason}", hint)

    def _error(self, reason: str) -> FramingError:
        return FramingError(self.shard, self.offset, reason)
