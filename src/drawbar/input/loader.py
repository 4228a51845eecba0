"""The loader: one rank's records, from GETs to batches. It owns the input's threads.

One image's way, in the order of the code below (docs/input.md tells it at length):

    plan -> sources (the rank's lanes) -> fetch (GETs ahead of need) -> records (framing, CRCs, bounded shuffle)
    -> batches (decode threads fill slots) -> next_batch

A feeder thread drives these generators and puts batches that are being decoded into a bounded queue; `next_batch` waits
for the oldest. The order of records follows from the seed alone, whatever threads and requests do.

Memory is bounded whatever the size of the set: `(lanes of the rank + read_ahead + 1) * request_bytes` of bodies,
`shuffle_buffer / world_size` records, and `prefetch_batches + 2` batches of pixels and of encoded records. Beside that
only what is known of the records grows with the set: about 70 bytes each.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from drawbar.config import Input, Storage
from drawbar.errors import RunFailed
from drawbar.input.batch import Batch, Record
from drawbar.input.decode import DecodePool
from drawbar.input.fetch import Fetcher, Stopped
from drawbar.input.libjpeg import Pixels
from drawbar.input.plan import PlanState
from drawbar.input.reading import Reading
from drawbar.input.records import RecordReader
from drawbar.input.sample import SampleMaker
from drawbar.input.sources import ReadPlan, in_turn, open_sources
from drawbar.input.stages import Blocked, Stage
from drawbar.journal import InputReport, InputStage, InputTotals
from drawbar.storage.reader import Reader

__all__ = ["Batch", "EndOfSet", "Loader", "ReadPlan", "Record"]


class EndOfSet(Exception):
    """Every record of a set that is read once has been given out."""


class Loader:
    """Feeds one rank. `next_batch` raises the first error of any stage; `close` stops, drains and counts.

    A plan that reads its set `once` gives evaluation samples, a last batch that may be smaller, and then EndOfSet.
    """

    def __init__(
        self,
        plan: ReadPlan,
        reader: Reader,
        *,
        num_classes: int,
        input: Input,
        storage: Storage,
        decode_threads: int,
        samples: SampleMaker | None = None,
        allocate: Callable[[tuple[int, ...]], Pixels] = lambda shape: np.empty(shape, np.uint8),
    ) -> None:
        """`allocate` makes the pixel buffers (pinned memory on a GPU host). Raises InputError for a `plan.state` that
        does not fit the set or the recipe."""
        self._begin_t = time.perf_counter()
        self._plan, self._reader = plan, reader
        self._sources = open_sources(plan, input)
        self._reading = Reading(
            request_bytes=storage.request_bytes, read_ahead=storage.read_ahead, num_lanes=self._sources.num_lanes
        )
        shape = (plan.batch_size, input.image_size, input.image_size, 3)
        self._buffers: queue.SimpleQueue[Pixels | None] = queue.SimpleQueue()
        for _ in range(input.prefetch_batches + 2):
            self._buffers.put(allocate(shape))
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=input.prefetch_batches)
        self._stop = threading.Event()
        self._blocked = Blocked()
        self._records = RecordReader(reader)
        groups = self._sources.groups(self._records, lambda: self._reading.request_bytes)
        self._fetcher = Fetcher(reader, self._reading, groups)
        self._pool = DecodePool(
            decode_threads,
            samples or SampleMaker(input),
            num_classes=num_classes,
            seed=input.seed,
            downstream=self._blocked.total_s,
            evaluate=plan.once,
        )
        self._shuffle = Stage(name="shuffle", queue_capacity=-(-input.shuffle_buffer // plan.world_size))
        self._batch = Stage(name="batch", queue_capacity=input.prefetch_batches)
        self._totals: InputTotals | None = None
        self._first_batch_s = 0.0
        self._trained_batches = self._trained = self._padded = 0
        # Bytes on their way, counted stage by stage and not as a difference, so that a record lost or doubled shows.
        self._batched_bytes = 0
        self._trained_bytes = 0
        self._feeder = threading.Thread(target=self._feed, name="feeder", daemon=True)
        self._feeder.start()

    @property
    def state(self) -> PlanState | None:
        """Where training stands after the batches recycled so far; None for a set whose records are not known."""
        return self._sources.state_after(self._trained_batches)

    @property
    def trained_bytes(self) -> int:
        """Framed records of the batches recycled so far."""
        return self._trained_bytes

    def next_batch(self, timeout_s: float) -> Batch:
        """The next decoded batch. Raises DataError or a storage error of a stage; RunFailed after `timeout_s`; EndOfSet
        once after the last batch of a set that is read once."""
        # A look at the queue's own list, without its lock: how many there are decoded, give or take one.
        self._batch.look(sum(isinstance(item, Batch) and item.decoded for item in tuple(self._ready.queue)))
        try:
            item = self._ready.get(timeout=timeout_s)
            if isinstance(item, BaseException):
                raise item
            item.wait(timeout_s)
        except (queue.Empty, TimeoutError):
            raise RunFailed(f"no batch for {timeout_s:g} s: input stalled") from None
        if not self._first_batch_s:
            self._first_batch_s = time.perf_counter() - self._begin_t
        return item

    def recycle(self, batch: Batch) -> None:
        """Counts the batch as trained and takes its pixel buffer back."""
        self._trained_batches += 1
        self._trained += len(batch.records)
        self._padded += sum(record.padding for record in batch.records)
        self._trained_bytes += batch.framed_bytes
        self._buffers.put(batch.images)

    def close(self) -> InputTotals:
        """Stops, waits for every GET in flight, and accounts for what was fetched and never trained."""
        if self._totals is not None:
            return self._totals
        self._stop.set()
        self._fetcher.stop()
        self._reader.stop()
        self._buffers.put(None)
        while self._feeder.is_alive():
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue
        self._feeder.join()
        self._fetcher.close()
        self._pool.close()
        set_bytes = sum(shard.size_bytes for shard in self._plan.shards)
        self._totals = InputTotals(
            planned_bytes=self._reader.planned_bytes,
            received_bytes=self._reader.received_bytes,
            trained_bytes=self._trained_bytes,
            discarded_bytes=self._discarded_bytes(),
            inflated_bytes=self._records.inflation.gained_bytes,
            decoded_images=self._pool.decoded,
            trained_images=self._trained,
            padded_images=self._padded,
            bad_images=0,
            epochs=self._reader.planned_bytes * self._plan.world_size / set_bytes,
        )
        return self._totals

    def report(self) -> InputReport:
        """How it read, and the time to the first batch; final after `close`."""
        return InputReport(
            lanes=self._sources.num_lanes,
            request_bytes=self._reading.request_bytes,
            read_ahead=self._reading.read_ahead,
            tuned=list(self._reading.tuned),
            first_batch_s=self._first_batch_s,
        )

    def stages(self) -> list[InputStage]:
        """Each stage's times and its queue; final after `close`. Split, shuffle and batch share the feeder thread: what
        blocks it blocks all three."""
        for stage in (self._records.stage, self._shuffle, self._batch):
            stage.wait_in_s, stage.wait_out_s = self._fetcher.wait_s, self._blocked.total_s()
        parts = (self._fetcher.stage, self._records.stage, self._shuffle, self._pool.stage, self._batch)
        return [stage.event() for stage in parts]

    def _discarded_bytes(self) -> int:
        """Bodies not opened, what opened ones still held, batches not trained, failed tries."""
        untrained = self._batched_bytes - self._trained_bytes
        return self._fetcher.unread_bytes() + self._records.discarded_bytes() + untrained + self._reader.failed_bytes

    # --- the feeder thread: one stage per line -------------------------------------------------------------------

    def _feed(self) -> None:
        try:
            for batch in self._batches(in_turn(self._fetcher)):
                self._put(batch)
            self._put(EndOfSet())
        except Stopped:
            pass
        except BaseException as error:
            try:
                self._put(error)
            except Stopped:
                pass

    def _batches(self, records: Iterator[Record]) -> Iterator[Batch]:
        size, clock = self._plan.batch_size, time.perf_counter
        while True:
            with self._blocked.here():
                images = self._buffers.get()
            if images is None or self._stop.is_set():
                raise Stopped
            begin_t, before_s = clock(), self._records.stage.busy_s + self._fetcher.wait_s
            taken = []
            for record in itertools.islice(records, size):
                self._batched_bytes += record.framed_bytes
                taken.append(record)
            if not taken:
                return
            if len(taken) < size:
                images = images[: len(taken)]
            taken_t, after_s = clock(), self._records.stage.busy_s + self._fetcher.wait_s
            batch = Batch(images=images, labels=np.empty(len(taken), np.int64), records=taken, epoch=taken[-1].epoch)
            taken_bytes = batch.framed_bytes
            self._shuffle.look(self._records.num_held)
            self._shuffle.busy_s += taken_t - begin_t - (after_s - before_s)
            for stage in (self._shuffle, self._batch):
                stage.items += len(taken)
                stage.bytes += taken_bytes
            self._pool.submit(batch)
            self._batch.busy_s += clock() - taken_t
            yield batch

    def _put(self, item: Batch | BaseException) -> None:
        with self._blocked.here():
            while not self._stop.is_set():
                try:
                    return self._ready.put(item, timeout=0.1)
                except queue.Full:
                    continue
        raise Stopped
