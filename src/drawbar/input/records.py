"""Bodies to records: decompression, framing, both CRCs; and of a lane's records those it trains, shuffled."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from typing import TypeVar

from drawbar.dataset.compressed import Decompressor, Inflation
from drawbar.dataset.tfrecord import FramingError, RecordSplitter, compression_of
from drawbar.errors import DataError
from drawbar.input.batch import Record
from drawbar.input.fetch import Body, Bytes, Chunk
from drawbar.input.plan import BoundedShuffle, Lane
from drawbar.input.stages import Stage
from drawbar.storage.reader import Reader

R = TypeVar("R", Record, Record | None)


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
        yield from self._split(splitter, chunk, body, chunk.end)
        splitter.finish()
        if splitter.num_records != chunk.num_records:
            raise DataError(
                f"{chunk.key}: {splitter.num_records} records in bytes {chunk.start} to {chunk.end}, the manifest says "
                f"{chunk.num_records}",
                hint="manifest and shards do not belong together: pack the set again",
            )

    def _of_shards(self, bodies: Iterable[Body]) -> Iterator[Record]:
        for _, group in groupby(bodies, key=lambda body: body[0].shard):
            chunk, first = next(group)
            kind = compression_of(first)
            stream = Decompressor(chunk.key, kind, self.inflation) if kind else None
            splitter = RecordSplitter(chunk.key)
            for part, body in chain(((chunk, first),), group):
                for piece in stream.feed(body) if stream else (body,):
                    self._input_bytes += len(piece)
                    yield from self._split(splitter, part, piece, None if stream else part.end)
            if stream:
                stream.finish()
            splitter.finish()

    def _split(self, splitter: RecordSplitter, chunk: Chunk, piece: Bytes, end: int | None) -> Iterator[Record]:
        """`end` is the piece's in the shard; None where it is decompressed, and damage cannot be read again."""
        try:
            yield from self._framed(splitter, chunk, piece)
            return
        except FramingError as error:
            if end is None:
                raise
            # Once: from the record's first byte, of which a part may have come with an earlier piece.
            again = self._reader.reread(chunk.key, error.offset, end, error.message, e_tag=chunk.e_tag)
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
