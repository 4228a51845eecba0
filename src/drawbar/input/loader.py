"""The loader: one rank's records, from GETs to batches. The only place with threads.

One image's way, in the order of the code below:

    plan -> chunks -> _fetched (GETs ahead of need) -> _records (decompression, framing, CRCs) -> _shuffled (bounded)
    -> _batches (decode threads fill slots) -> next_batch

A feeder thread drives these generators and puts batches that are being decoded into a bounded queue; `next_batch`
waits for the oldest. Memory is bounded by `read_ahead * request_bytes` for bytes, `shuffle_buffer` records, and
`prefetch_batches + 2` batches of pixels, whatever the size of the data set.
"""

from __future__ import annotations

import itertools
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from drawbar.config import Input, Storage
from drawbar.dataset.compressed import Decompressor, Inflation
from drawbar.dataset.example import parse_image_example
from drawbar.dataset.listing import ShardInfo
from drawbar.dataset.tfrecord import FRAME_BYTES, RecordSplitter, compression_of
from drawbar.errors import DataError, RunFailed
from drawbar.input.augment import RecordRandom
from drawbar.input.image_decoder import BadImage
from drawbar.input.libjpeg import Pixels
from drawbar.input.plan import Chunk, Span, chunks, plan_epoch
from drawbar.input.sample import SampleMaker
from drawbar.journal import InputTotals
from drawbar.storage.stores import CountedReader


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One framed entry, CRC-checked, not yet decoded."""

    shard: int
    key: str
    offset: int
    epoch: int
    payload: bytes

    @property
    def framed_bytes(self) -> int:
        return FRAME_BYTES + len(self.payload)


@dataclass(kw_only=True)
class Batch:
    """Decoded samples. Give it back with `Loader.recycle` once its pixels are copied."""

    images: Pixels
    """uint8, (batch, size, size, 3), RGB."""
    labels: npt.NDArray[np.int64]
    """(batch,), from 0."""
    records: list[Record]
    epoch: int
    """Epoch of its last record."""
    _decodes: list[Future[None]] = field(default_factory=list)

    @property
    def framed_bytes(self) -> int:
        return sum(record.framed_bytes for record in self.records)


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """Everything that decides what this rank reads."""

    shards: Sequence[ShardInfo]
    rank: int
    world_size: int
    seed: int


class Loader:
    """Feeds one rank. `next_batch` raises the first error of any stage; `close` stops, drains and counts."""

    def __init__(
        self,
        plan: ReadPlan,
        reader: CountedReader,
        *,
        batch_size: int,
        num_classes: int,
        input: Input,
        storage: Storage,
        decode_threads: int,
        samples: SampleMaker | None = None,
        allocate: Callable[[tuple[int, ...]], Pixels] = lambda shape: np.empty(shape, np.uint8),
    ) -> None:
        """`samples` makes pixels (by default as `input` says); `allocate` their buffers (pinned on a GPU host)."""
        self._plan, self._reader = plan, reader
        self._batch_size, self._num_classes = batch_size, num_classes
        self._input, self._storage = input, storage
        self._samples = samples or SampleMaker(input)
        shape = (batch_size, input.image_size, input.image_size, 3)
        self._buffers: queue.SimpleQueue[Pixels | None] = queue.SimpleQueue()
        for _ in range(input.prefetch_batches + 2):
            self._buffers.put(allocate(shape))
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=input.prefetch_batches)
        self._stop = threading.Event()
        self._fetchers = ThreadPoolExecutor(storage.read_ahead, "fetch")
        self._decoders = ThreadPoolExecutor(decode_threads, "decode")
        self._count_lock = threading.Lock()
        self._decoded = 0
        self._trained = 0
        # Bytes on their way, counted stage by stage and not as a difference, so that a record lost or doubled shows.
        self._ahead: deque[tuple[Chunk, Future[bytes]]] = deque()
        self._held: list[Record] = []
        self._inflation = Inflation()
        self._split_input_bytes = 0
        self._split_output_bytes = 0
        self._batched_bytes = 0
        self._trained_bytes = 0
        self._feeder = threading.Thread(target=self._feed, name="feeder", daemon=True)
        self._feeder.start()

    def next_batch(self, timeout_s: float) -> Batch:
        """The next decoded batch. Raises DataError or a storage error of a stage; RunFailed after `timeout_s`."""
        try:
            item = self._ready.get(timeout=timeout_s)
            if isinstance(item, BaseException):
                raise item
            for decode in item._decodes:
                decode.result(timeout=timeout_s)
        except (queue.Empty, TimeoutError):
            raise RunFailed(f"no batch for {timeout_s:g} s: input stalled") from None
        return item

    def recycle(self, batch: Batch) -> None:
        """Counts the batch as trained and takes its pixel buffer back."""
        self._trained += len(batch.records)
        self._trained_bytes += batch.framed_bytes
        batch._decodes.clear()
        self._buffers.put(batch.images)

    def close(self) -> InputTotals:
        """Stops, waits for every GET in flight, and accounts for what was fetched and never trained."""
        self._stop.set()
        self._buffers.put(None)
        while self._feeder.is_alive():
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue
        self._feeder.join()
        self._fetchers.shutdown(wait=True, cancel_futures=True)
        self._decoders.shutdown(wait=True, cancel_futures=True)
        set_bytes = sum(shard.size_bytes for shard in self._plan.shards)
        return InputTotals(
            planned_bytes=self._reader.planned_bytes,
            received_bytes=self._reader.received_bytes,
            trained_bytes=self._trained_bytes,
            discarded_bytes=self._discarded_bytes(),
            inflated_bytes=self._inflation.gained_bytes,
            decoded_images=self._decoded,
            trained_images=self._trained,
            bad_images=0,
            epochs=self._reader.planned_bytes * self._plan.world_size / set_bytes,
        )

    def _discarded_bytes(self) -> int:
        """Bodies never cut or decompressed, a record cut short, records held, batches not trained, failed tries."""
        unread = sum(len(body.result()) for _, body in self._ahead if not body.cancelled() and body.exception() is None)
        cut_short = self._split_input_bytes - self._split_output_bytes
        held = sum(record.framed_bytes for record in self._held)
        untrained = self._batched_bytes - self._trained_bytes
        return unread + self._inflation.waiting_bytes + cut_short + held + untrained + self._reader.failed_bytes

    # --- the feeder thread: one stage per line -------------------------------------------------------------------

    def _feed(self) -> None:
        try:
            wanted = self._chunks()
            fetched = self._fetched(wanted)
            records = self._records(fetched)
            shuffled = self._shuffled(records)
            for batch in self._batches(shuffled):
                self._put(batch)
        except _Stopped:
            pass
        except BaseException as error:
            try:
                self._put(error)
            except _Stopped:
                pass

    def _put(self, item: Batch | BaseException) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
        raise _Stopped

    def _chunks(self) -> Iterator[Chunk]:
        plan = self._plan
        for epoch in itertools.count():
            spans = plan_epoch(plan.shards, rank=plan.rank, world_size=plan.world_size, seed=plan.seed, epoch=epoch)
            yield from chunks(spans, self._storage.request_bytes)

    def _fetched(self, wanted: Iterable[Chunk]) -> Iterator[tuple[Chunk, bytes]]:
        """Keeps `read_ahead` GETs going ahead of need; yields bodies in reading order."""
        ahead = self._ahead
        for chunk in wanted:
            ahead.append((chunk, self._fetchers.submit(self._fetch, chunk)))
            if len(ahead) >= self._storage.read_ahead:
                yield self._arrived(*ahead.popleft())
        while ahead:
            yield self._arrived(*ahead.popleft())

    def _fetch(self, chunk: Chunk) -> bytes:
        if self._stop.is_set():
            raise _Stopped
        return self._reader.get(chunk.span.key, chunk.start, chunk.end)

    def _arrived(self, chunk: Chunk, body: Future[bytes]) -> tuple[Chunk, bytes]:
        try:
            return chunk, body.result()
        except CancelledError:
            raise _Stopped from None

    def _records(self, fetched: Iterable[tuple[Chunk, bytes]]) -> Iterator[Record]:
        for span, group in itertools.groupby(fetched, key=lambda pair: pair[0].span):
            bodies = (body for _, body in group)
            first = next(bodies)
            # With record sizes known (a manifest, an index) a shard is not compressed, and a span may be part of it.
            whole = self._plan.shards[span.shard].record_bytes is None
            kind = compression_of(first) if whole else ""
            stream = Decompressor(span.key, kind, self._inflation) if kind else None
            splitter = RecordSplitter(span.key, span.start, None if stream else span.end)
            found = 0
            for body in itertools.chain((first,), bodies):
                for piece in stream.feed(body) if stream else (body,):
                    self._split_input_bytes += len(piece)
                    for record in self._split(splitter, span, piece):
                        found += 1
                        yield record
            if stream:
                stream.finish()
            splitter.finish()
            if span.num_records is not None and found != span.num_records:
                raise DataError(
                    f"{span.key}: {found} records in bytes {span.start} to {span.end}, the manifest says "
                    f"{span.num_records}",
                    hint="manifest and shards do not belong together: pack the set again",
                )

    def _split(self, splitter: RecordSplitter, span: Span, piece: bytes) -> Iterator[Record]:
        for raw in splitter.feed(piece):
            record = Record(shard=span.shard, key=span.key, offset=raw.offset, epoch=span.epoch, payload=raw.payload)
            self._split_output_bytes += record.framed_bytes
            yield record

    def _shuffled(self, records: Iterable[Record]) -> Iterator[Record]:
        """A bounded shuffle: each record swaps places with a random one of the last `shuffle_buffer`."""
        rng = random.Random(f"{self._plan.seed}/{self._plan.rank}")
        held = self._held
        for record in records:
            if len(held) < self._input.shuffle_buffer:
                held.append(record)
                continue
            if not held:
                yield record
                continue
            slot = rng.randrange(len(held))
            out = held[slot]
            held[slot] = record
            yield out

    def _batches(self, records: Iterable[Record]) -> Iterator[Batch]:
        source = iter(records)
        while True:
            images = self._buffers.get()
            if images is None or self._stop.is_set():
                raise _Stopped
            labels = np.empty(self._batch_size, np.int64)
            taken = []
            for record in itertools.islice(source, self._batch_size):
                self._batched_bytes += record.framed_bytes
                taken.append(record)
            batch = Batch(images=images, labels=labels, records=taken, epoch=taken[-1].epoch)
            for i, record in enumerate(taken):
                batch._decodes.append(self._decoders.submit(self._decode, record, images[i], labels[i : i + 1]))
            yield batch

    def _decode(self, record: Record, out: Pixels, label: npt.NDArray[np.int64]) -> None:
        try:
            example = parse_image_example(record.payload)
            boxes = example.boxes if self._samples.wants_boxes else ()
        except DataError as error:
            raise DataError(f"{record.key} at byte {record.offset}: {error.message}") from None
        if not 1 <= example.label <= self._num_classes:
            raise DataError(
                f"{record.key} at byte {record.offset}: label {example.label} is out of range 1..{self._num_classes}",
                hint="set data.num_classes to the number of classes of this set",
            )
        draws = RecordRandom(self._input.seed, record.epoch, record.shard, record.offset)
        try:
            self._samples.train(example.encoded, draws, out, boxes)
        except BadImage as error:
            raise DataError(f"{record.key} at byte {record.offset}: cannot decode image: {error}") from None
        label[0] = example.label - 1
        with self._count_lock:
            self._decoded += 1


class _Stopped(Exception):
    """The loader is being closed."""
