"""GZIP and ZLIB shards: told by content, decompressed piece by piece in bounded memory.

TensorFlow's `TFRecordOptions(compression_type=...)` compresses a whole shard as one stream, its framing included. So a
record's offset counts decompressed bytes, and a shard can only be read from its start. Both formats end with a checksum
of the decompressed bytes, which is checked here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from drawbar.dataset.tfrecord import GZIP_MAGIC, Compression, FramingError

_PIECE_BYTES = 1 << 20
"""Most that is decompressed at a time, however well it was compressed."""
_SLICE_BYTES = 256 * 1024


@dataclass
class Inflation:
    """What decompressing did so far, over any number of shards: the first `consumed_bytes` gave `produced_bytes`."""

    fed_bytes: int = 0
    consumed_bytes: int = 0
    produced_bytes: int = 0

    @property
    def waiting_bytes(self) -> int:
        """Fed, not decompressed yet."""
        return self.fed_bytes - self.consumed_bytes

    @property
    def gained_bytes(self) -> int:
        """Negative where compressing made the bytes more, as it does with JPEG."""
        return self.produced_bytes - self.consumed_bytes


class Decompressor:
    """Decompresses one shard, fed in order in bodies of any size."""

    def __init__(self, shard: str, kind: Compression, inflation: Inflation | None = None) -> None:
        """`inflation` is counted up, as several shards may share one."""
        self._shard, self._kind = shard, kind
        self._wbits = zlib.MAX_WBITS + 16 if kind == "gzip" else zlib.MAX_WBITS
        self._stream = zlib.decompressobj(self._wbits)
        self._inflation = inflation or Inflation()
        self._produced_bytes = 0

    def feed(self, body: bytes | memoryview) -> Iterator[bytes]:
        """Yields what `body` decompresses to, in pieces of at most 1 MiB. Raises DataError for damage."""
        # In slices, as zlib copies what it leaves of its input each time.
        view = memoryview(body)
        self._inflation.fed_bytes += len(body)
        for start in range(0, len(view), _SLICE_BYTES):
            yield from self._feed(bytes(view[start : start + _SLICE_BYTES]))

    def finish(self) -> None:
        """Call after the last body. Raises DataError where the stream ends before its own end."""
        if not self._stream.eof:
            raise self._error("truncated")

    def _feed(self, rest: bytes) -> Iterator[bytes]:
        while True:
            if self._stream.eof:
                # gzip files may be joined (cat a.gz b.gz), and padded with zeros.
                rest = self._skip_padding(rest)
                if not rest:
                    return
                self._refuse_trailing(rest)
                self._stream = zlib.decompressobj(self._wbits)
            try:
                piece = self._stream.decompress(rest, _PIECE_BYTES)
            except zlib.error as error:
                raise self._error(f"damaged: {_words(error)}") from None
            left = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
            self._inflation.consumed_bytes += len(rest) - len(left)
            self._inflation.produced_bytes += len(piece)
            self._produced_bytes += len(piece)
            if piece:
                yield piece
            if not left and len(piece) < _PIECE_BYTES:
                return
            rest = left

    def _skip_padding(self, rest: bytes) -> bytes:
        left = rest.lstrip(b"\0") if self._kind == "gzip" else rest
        self._inflation.consumed_bytes += len(rest) - len(left)
        return left

    def _refuse_trailing(self, rest: bytes) -> None:
        if self._kind == "zlib" or not GZIP_MAGIC.startswith(rest[:3]):
            raise self._error(f"followed by {len(rest)} bytes or more that do not belong to it")

    def _error(self, words: str) -> FramingError:
        reason = f"the {self._kind} stream is {words}"
        message = f"{self._shard}: {reason}, after {self._produced_bytes} decompressed bytes"
        return FramingError(self._shard, self._produced_bytes, reason, message)


def _words(error: zlib.error) -> str:
    """`Error -3 while decompressing data: invalid block type` without its first half."""
    return str(error).rpartition(": ")[2]
