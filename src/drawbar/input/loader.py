"""The loader: one rank's records, from GETs to batches. It owns the input's threads.

One image's way, in the order of the code below (docs/input.md tells it at length):

    plan -> sources (the rank's lanes) -> fetch (GETs ahead of need) -> records (framing, CRCs, bounded shuffle)
    -> batches (decode threads fill slots) -> next_batch

A feeder thread drives these generators and puts batches that are being decoded into a bounded queue; `next_batch` waits
for the oldest. The order of records follows from the seed alone, whatever threads and requests do.

Memory is bounded whatever the size of the set: `(lanes of the rank + read_ahead + 1) * request_bytes` of bodies,
`shuffle_buffer / world_size` records, `prefetch_batches + 2` batches of pixels and of encoded records (on a GPU two
more, as it runs behind), and a window of records that are arranged together (`sample.Samples`). Beside that only what
is known of the records grows with the set: about 70 bytes each.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

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
from drawbar.input.sample import SampleMaker, Samples
from drawbar.input.sources import ReadPlan, in_turn, open_sources
from drawbar.input.stages import Blocked, Stage, Times
from drawbar.journal import Event, InputReport, InputSample, InputStage, InputTotals
from drawbar.storage.reader import Reader

__all__ = ["Batch", "EndOfSet", "Loader", "ReadPlan", "Record"]


class EndOfSet(Exception):
    """Every record of a set that is read once has been given out."""


T = TypeVar("T")

_SAMPLE_S = 1.0
"""Between two looks at the stages."""


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
        samples: Samples | None = None,
        allocate: Callable[[tuple[int, ...]], Pixels] = lambda shape: np.empty(shape, np.uint8),
        tell: Callable[[Event], None] = lambda event: None,
        pool: Callable[..., DecodePool] = DecodePool,
        unfinished: int = 0,
    ) -> None:
        """`allocate` makes the pixel buffers (pinned memory on a GPU host), `pool` what decodes into them (with
        DecodePool's arguments). `tell` hears, from any thread, what is for the journal at once. `unfinished`: batches
        that the training holds beside the one it is given, as a GPU runs behind. Raises InputError for a `plan.state`
        that does not fit the set or the recipe."""
        self._begin_t = time.perf_counter()
        self._plan, self._reader = plan, reader
        self._sources = open_sources(plan, input)
        self._reading = Reading(
            request_bytes=storage.request_bytes, read_ahead=storage.read_ahead, num_lanes=self._sources.num_lanes
        )
        self._samples = samples or SampleMaker(input, num_classes)
        shape = self._samples.buffer_shape(plan.batch_size)
        self._buffers: queue.SimpleQueue[Pixels | None] = queue.SimpleQueue()
        for _ in range(input.prefetch_batches + 2 + unfinished):
            self._buffers.put(allocate(shape))
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=input.prefetch_batches)
        self._stop = threading.Event()
        self._blocked = Blocked()
        self._records = RecordReader(reader)
        groups = self._sources.groups(self._records, lambda: self._reading.request_bytes)
        self._fetcher = Fetcher(reader, self._reading, groups)
        self._pool = pool(
            decode_threads,
            self._samples,
            seed=input.seed,
            on_bad=input.on_bad,
            downstream=self._blocked.total_s,
            tell=tell,
            evaluate=plan.once,
        )
        self._shuffle = Stage(name="shuffle", queue_capacity=-(-input.shuffle_buffer // plan.world_size))
        self._batch = Stage(name="batch", queue_capacity=input.prefetch_batches)
        self._totals: InputTotals | None = None
        self._first_batch_s = 0.0
        self._tell = tell
        self._sampled_t = self._begin_t
        self._trained_batches = self._trained = self._padded = self._replaced = 0
        # Bytes on their way, counted stage by stage and not as a difference, so that a record lost or doubled shows.
        self._batched_bytes = 0
        self._trained_bytes = 0
        self._feeder = threading.Thread(target=self._feed, name="feeder", daemon=True)
        self._feeder.start()

    @property
    def state(self) -> PlanState | None:
        """Where training stands after the batches recycled so far. None for a set whose records are not known, and in
        the middle of a window that is sorted by aspect ratio."""
        return self.state_after(self._trained_batches)

    def state_after(self, num_batches: int) -> PlanState | None:
        """Where training will stand when every rank has trained this many batches of its loader; None as above."""
        if num_batches % self._samples.window_batches:
            return None
        return self._sources.state_after(num_batches)

    @property
    def trained_bytes(self) -> int:
        """Framed records of the batches recycled so far."""
        return self._trained_bytes

    def next_batch(self, timeout_s: float) -> Batch:
        """The next decoded batch. Raises DataError or a storage error of a stage; RunFailed after `timeout_s`; EndOfSet
        once after the last batch of a set that is read once."""
        self._batch.look(self._num_decoded())
        if time.perf_counter() - self._sampled_t >= _SAMPLE_S:
            self._sample()
        item = self._waited_for(lambda seconds: self._ready.get(timeout=seconds), timeout_s)
        if isinstance(item, BaseException):
            raise item
        self._waited_for(item.wait, timeout_s)
        if not self._first_batch_s:
            self._first_batch_s = time.perf_counter() - self._begin_t
        return item

    def _num_decoded(self) -> int:
        """Batches that are ready. A look at the queue's own list, without its lock: give or take one."""
        return sum(isinstance(item, Batch) and item.decoded for item in tuple(self._ready.queue))

    def _waited_for(self, wait: Callable[[float], T], timeout_s: float) -> T:
        """What `wait` gives, with a sample each second until then."""
        end_t = time.perf_counter() + timeout_s
        while True:
            left_s = end_t - time.perf_counter()
            try:
                return wait(max(0.0, min(left_s, _SAMPLE_S)))
            except (queue.Empty, TimeoutError):
                if left_s <= _SAMPLE_S:
                    raise RunFailed(f"no batch for {timeout_s:g} s: input stalled") from None
                self._sample()

    def _sample(self) -> None:
        """Tells of the stages as they are now: 50 us, by the thread that takes batches. What other threads count
        meanwhile may be a moment older."""
        self._sampled_t = time.perf_counter()
        wait_in_s, wait_out_s = self._fetcher.wait_s, self._blocked.total_s()
        times = {"fetch": self._fetcher.times_now(), "decode": self._pool.times_now()}
        for stage in (self._records.stage, self._shuffle, self._batch):
            times[stage.name] = Times(stage.busy_s, wait_in_s, wait_out_s)
        self._tell(
            InputSample(
                busy_s={name: so_far.busy_s for name, so_far in times.items()},
                wait_in_s={name: so_far.wait_in_s for name, so_far in times.items()},
                wait_out_s={name: so_far.wait_out_s for name, so_far in times.items()},
                queued={
                    "fetch": self._fetcher.num_arrived,
                    "shuffle": self._records.num_held,
                    "batch": self._num_decoded(),
                },
                queue_capacity={
                    "fetch": self._reading.read_ahead,
                    "shuffle": self._shuffle.queue_capacity,
                    "batch": self._batch.queue_capacity,
                },
            )
        )

    def recycle(self, batch: Batch) -> None:
        """Counts the batch as trained and takes its pixel buffer back."""
        self._trained_batches += 1
        self._trained += len(batch.records)
        self._padded += sum(record.padding for record in batch.records)
        self._replaced += sum(record.stands_in for record in batch.records)
        self._trained_bytes += batch.framed_bytes
        self._buffers.put(batch.images if batch.buffer is None else batch.buffer)

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
            replaced_images=self._replaced,
            bad_images=self._pool.bad,
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
            fallback_images=self._pool.fallbacks,
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
        clock = time.perf_counter
        arranged = self._arranged(records)
        while True:
            with self._blocked.here():
                buffer = self._buffers.get()
            if buffer is None or self._stop.is_set():
                raise Stopped
            begin_t, before_s = clock(), self._records.stage.busy_s + self._fetcher.wait_s
            taken = next(arranged, None)
            if taken is None:
                return
            taken_t, after_s = clock(), self._records.stage.busy_s + self._fetcher.wait_s
            batch = Batch(
                images=self._samples.pixels(buffer, taken),
                labels=np.empty(len(taken), np.int64),
                records=taken,
                epoch=max(record.epoch for record in taken),
                buffer=buffer,
            )
            taken_bytes = batch.framed_bytes
            self._shuffle.look(self._records.num_held)
            self._shuffle.busy_s += taken_t - begin_t - (after_s - before_s)
            for stage in (self._shuffle, self._batch):
                stage.items += len(taken)
                stage.bytes += taken_bytes
            self._pool.submit(batch)
            self._batch.busy_s += clock() - taken_t
            yield batch

    def _arranged(self, records: Iterator[Record]) -> Iterator[list[Record]]:
        size = self._plan.batch_size
        while True:
            window = []
            for record in itertools.islice(records, size * self._samples.window_batches):
                self._batched_bytes += record.framed_bytes
                window.append(record)
            if not window:
                return
            yield from self._samples.arrange(window, size)

    def _put(self, item: Batch | BaseException) -> None:
        with self._blocked.here():
            while not self._stop.is_set():
                try:
                    return self._ready.put(item, timeout=0.1)
                except queue.Full:
                    continue
        raise Stopped
