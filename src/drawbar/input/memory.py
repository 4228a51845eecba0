"""Memory-speed I/O: a few real records, read once and then repeated from memory (`input.source = "memory"`).

What `tf_cnn_benchmarks` calls a repeated cached sample: everything behind storage works as ever, storage itself rests.
"""

from __future__ import annotations

from dataclasses import replace

from drawbar.dataset.listing import ShardInfo
from drawbar.dataset.tfrecord import FRAME_BYTES, RecordSplitter, compression_of
from drawbar.errors import DataError, InputError
from drawbar.storage.reader import CountedReader


class MemoryReader:
    """A reader that answers from one sample. Its counts are of what it handed out; the journal has the one real GET."""

    def __init__(self, reader: CountedReader, shard: ShardInfo, sample_bytes: int) -> None:
        """Reads the whole records in the first `sample_bytes` of `shard`, at least one. Raises what reading raises, and
        InputError for a compressed shard."""
        self._reader = reader
        self._data, sizes = _whole_records(reader, shard, sample_bytes)
        self.sample = replace(shard, size_bytes=len(self._data), num_records=len(sizes), record_bytes=sizes)
        """The records in memory, as a shard of their own: plan with it alone."""
        self.planned_bytes = 0
        self.received_bytes = 0
        self.failed_bytes = 0

    def get(self, key: str, start: int, end: int, *, kind: str = "", e_tag: str = "") -> bytes:
        body = self._data[start:end]
        self.planned_bytes += len(body)
        self.received_bytes += len(body)
        return body

    def get_view(self, key: str, start: int, end: int, *, e_tag: str = "") -> memoryview:
        return memoryview(self.get(key, start, end))

    def blame(self, key: str, start: int, end: int, why: str) -> None:
        """These bytes were checked when they came: they are damaged in this host's memory, and none is read again."""
        raise DataError(f"damaged in memory: {why}", hint="this host's memory is not sound")

    def reread(self, key: str, start: int, end: int, *, e_tag: str = "") -> bytes:
        return self._data[start:end]

    def stop(self) -> None:
        self._reader.stop()


def _whole_records(reader: CountedReader, shard: ShardInfo, sample_bytes: int) -> tuple[bytes, tuple[int, ...]]:
    """The bytes of the records, and the framed size of each."""
    end = min(sample_bytes, shard.size_bytes)
    while True:
        body = reader.get(shard.key, 0, end, e_tag=shard.e_tag)
        if compression_of(body):
            raise InputError(
                f"shard {shard.key} is compressed", hint='input.source = "memory" takes its sample from plain shards'
            )
        splitter = RecordSplitter(shard.key)
        sizes = tuple(FRAME_BYTES + len(record.payload) for record in splitter.feed(body))
        if sizes:
            return body[: sum(sizes)], sizes
        if end == shard.size_bytes:
            splitter.finish()
            raise InputError(f"shard {shard.key} holds no record")
        end = min(2 * end, shard.size_bytes)
