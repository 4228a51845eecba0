"""Bodies to records: decompression, framing, both CRCs; and of a lane's records those it trains, shuffled.

What is damaged is read once more: of a plain shard from the record's first byte to the end of its body. Of a compressed
one from its start, as a stream can be taken up nowhere else and its damage may show long after the damaged byte; the
records given out before are passed over. It ends the run where that brings no further record.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from typing import TypeVar

import google_crc32c

from drawbar.dataset.compressed import Decompressor, Inflation
from drawbar.dataset.tfrecord import Compression, FramingError, RecordSplitter, compression_of
from drawbar.errors import DataError
from drawbar.input.batch import Record
from drawbar.input.fetch import Body, Bytes, Chunk
from drawbar.input.plan import BoundedShuffle, Lane
from drawbar.input.stages import Stage
from drawbar.plural import plural
from drawbar.storage.reader import Reader

R = TypeVar("R", Record, Record | None)


@dataclass(kw_only=True)
class _Came:
    """What has come of one compressed shard."""

    bodies: list[tuple[Chunk, int]] = field(default_factory=list)
    """With the CRC32C of each."""
    records: int = 0
    """Given out."""
    crc: int = 0
    """CRC32C of their payloads, one after another."""
    blamed: bool = False
    """A body was found to be damaged."""


class RecordReader:
    """Splits, checks and shuffles; what is damaged is read once more. Counts bytes as they pass, so that one lost or
    doubled shows in the balance."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.stage = Stage(name="split")
        self.inflation = Inflation()
        self._input_bytes = 0
        self._output_bytes = 0
        self._skipped_bytes = 0
        self._shuffles: list[BoundedShuffle[Record] | BoundedShuffle[Record | None]] = []

    def discarded_bytes(self) -> int:
        """Bytes that came in and did not go out: not yet split or decompressed, cut short, not wanted, still held."""
        held = sum(_held_bytes(shuffle) for shuffle in self._shuffles)
        return self.inflation.waiting_bytes + self._input_bytes - self._output_bytes + self._skipped_bytes + held

    @property
    def num_held(self) -> int:
        """Records held for shuffling."""
        return sum(len(shuffle.held) for shuffle in self._shuffles)

    def lane(self, lane: Lane, bodies: Iterable[Body]) -> Iterator[Record]:
        """The lane's records from `lane.done` to `lane.stop` in training order, from the bodies of `lane_chunks`."""
        shuffle = lane.shuffled(self._in_reading_order(lane, bodies))
        # The same draws bring those trained before out first.
        for record in islice(self._through(shuffle), lane.done, lane.stop):
            assert record is not None, "a record that is wanted was not read"  # noqa: S101
            yield record
        self._skipped_bytes += _held_bytes(shuffle)
        self._shuffles.remove(shuffle)

    def shards(self, bodies: Iterable[Body], shuffle_seed: str, window: int) -> Iterator[Record]:
        """All records of whole shards, from the bodies of `shard_chunks`, shuffled within `window`."""
        shuffle = BoundedShuffle(self._of_shards(bodies), window, shuffle_seed)
        yield from self._through(shuffle)
        self._shuffles.remove(shuffle)

    def _through(self, shuffle: BoundedShuffle[R]) -> Iterator[R]:
        self._shuffles.append(shuffle)
        return iter(shuffle)

    def _in_reading_order(self, lane: Lane, bodies: Iterable[Body]) -> Iterator[Record | None]:
        """An item for each of the lane's records; None for one that was trained before and is not read."""
        place = 0
        for chunk, body in bodies:
            wanted = zip(chunk.wanted, chunk.places, strict=True)
            next_wanted, next_place = next(wanted)
            for number, record in enumerate(self._of_chunk(chunk, body)):
                if number != next_wanted:
                    self._skipped_bytes += record.framed_bytes
                    continue
                while place < next_place:
                    yield None
                    place += 1
                record.padding = lane.padding
                yield record
                place += 1
                next_wanted, next_place = next(wanted, (-1, -1))
        for _ in range(place, len(lane.numbers)):
            yield None

    def _of_chunk(self, chunk: Chunk, body: Bytes) -> Iterator[Record]:
        """The records of a body that holds whole ones. Raises FramingError naming shard and offset for damage."""
        self._input_bytes += len(body)
        splitter = RecordSplitter(chunk.key, chunk.start, chunk.end)
        yield from self._split(splitter, chunk, body)
        splitter.finish()
        if splitter.num_records != chunk.num_records:
            raise DataError(
                f"{chunk.key}: {plural(splitter.num_records, 'record')} in bytes {chunk.start} to {chunk.end}, the "
                f"manifest says {chunk.num_records}",
                hint="manifest and shards do not belong together: pack the set again",
            )

    def _of_shards(self, bodies: Iterable[Body]) -> Iterator[Record]:
        for _, group in groupby(bodies, key=lambda body: body[0].shard):
            yield from self._of_shard(group)

    def _of_shard(self, bodies: Iterator[Body]) -> Iterator[Record]:
        chunk, first = next(bodies)
        bodies, kind = chain(((chunk, first),), bodies), compression_of(first)
        return self._of_compressed(chunk.key, kind, bodies) if kind else self._of_plain(chunk.key, bodies)

    def _of_plain(self, key: str, bodies: Iterable[Body]) -> Iterator[Record]:
        splitter = RecordSplitter(key)
        for chunk, body in bodies:
            self._input_bytes += len(body)
            yield from self._split(splitter, chunk, body)
        splitter.finish()

    def _of_compressed(self, key: str, kind: Compression, bodies: Iterator[Body]) -> Iterator[Record]:
        came, restarted_at = _Came(), -1
        parts = self._noted(came, bodies)
        while True:
            try:
                yield from self._inflated(key, kind, came, parts)
                return
            except FramingError as error:
                if came.records == restarted_at:
                    if not came.blamed:  # it came the same twice
                        last, _ = came.bodies[-1]
                        self._reader.blame(key, last.start, last.end, error.message)
                    raise
                restarted_at, came.blamed = came.records, False
                parts = chain(self._again(came, error.message), self._noted(came, bodies))

    @staticmethod
    def _noted(came: _Came, bodies: Iterable[Body]) -> Iterator[Body]:
        for chunk, body in bodies:
            came.bodies.append((chunk, google_crc32c.value(bytes(body))))
            yield chunk, body

    def _again(self, came: _Came, why: str) -> Iterator[Body]:
        """All that has come, read once more one body at a time; the one that is another now was the damaged one."""
        for i in range(len(came.bodies)):
            chunk, crc = came.bodies[i]
            body = self._reader.reread(chunk.key, chunk.start, chunk.end, e_tag=chunk.e_tag)
            found: int = google_crc32c.value(body)
            if found != crc:
                self._reader.blame(chunk.key, chunk.start, chunk.end, why)
                came.bodies[i], came.blamed = (chunk, found), True
            yield chunk, body

    def _inflated(self, key: str, kind: Compression, came: _Came, bodies: Iterable[Body]) -> Iterator[Record]:
        """A compressed shard's records from its first body on, without those that were given out before."""
        stream, splitter = Decompressor(key, kind, self.inflation), RecordSplitter(key)
        known, known_crc = came.records, came.crc
        number = crc = 0
        for chunk, body in bodies:
            for piece in stream.feed(body):
                self._input_bytes += len(piece)
                for record in self._framed(splitter, chunk, piece):
                    number, crc = number + 1, google_crc32c.extend(crc, record.payload)
                    if number > known:
                        came.records, came.crc = number, crc
                        yield record
                        continue
                    self._skipped_bytes += record.framed_bytes
                    if number == known and crc != known_crc:
                        raise DataError(
                            f"{key}: read once more, the first {plural(known, 'record')} came different than before",
                            hint="the endpoints hold different copies: pack the set again",
                        )
        stream.finish()
        splitter.finish()

    def _split(self, splitter: RecordSplitter, chunk: Chunk, body: Bytes) -> Iterator[Record]:
        """The records that a plain shard's body completes; what is damaged is read once more."""
        try:
            yield from self._framed(splitter, chunk, body)
            return
        except FramingError as error:
            # Once: from the record's first byte, of which a part may have come with an earlier body.
            start = error.offset
            self._reader.blame(chunk.key, start, chunk.end, error.message)
            again = self._reader.reread(chunk.key, start, chunk.end, e_tag=chunk.e_tag)
        splitter.restart()
        self._input_bytes += len(again)
        yield from self._framed(splitter, chunk, again)

    def _framed(self, splitter: RecordSplitter, chunk: Chunk, piece: Bytes) -> Iterator[Record]:
        stage, clock, pieces = self.stage, time.perf_counter, splitter.feed(piece)
        while True:
            begin_t = clock()
            raw = next(pieces, None)
            stage.busy_s += clock() - begin_t
            if raw is None:
                return
            record = Record(shard=chunk.shard, key=chunk.key, offset=raw.offset, epoch=chunk.epoch, payload=raw.payload)
            self._output_bytes += record.framed_bytes
            stage.items += 1
            stage.bytes += record.framed_bytes
            yield record


def _held_bytes(shuffle: BoundedShuffle[Record] | BoundedShuffle[Record | None]) -> int:
    return sum(record.framed_bytes for _, _, record in shuffle.held if record is not None)
