"""The decode threads: a batch's records, a few at a time, into its pixels and labels.

A record that gives no sample ends the run, or the next good one of its batch stands in for it (`input.on_bad`): the
batch stays full, and every other record stays where the plan has it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from drawbar.errors import DataError
from drawbar.input.augment import RecordRandom
from drawbar.input.batch import Batch, NoSample, Record
from drawbar.input.sample import Samples
from drawbar.input.stages import Stage, Times
from drawbar.journal import BadRecord

_MAX_GROUP = 8
"""Records of one task: handing one over costs less than a tenth of a decode, and the last task of a batch, on which
the others may wait, is short."""
_MAX_REPORTED = 100
"""Bad records that are told of one by one."""


class DecodePool:
    """Decodes whole batches in threads that hold no lock and no GIL while they decode."""

    def __init__(
        self,
        threads: int,
        samples: Samples,
        *,
        seed: int,
        on_bad: Literal["fail", "skip"] = "fail",
        downstream: Callable[[], float] = lambda: 0.0,
        tell: Callable[[BadRecord], None] = lambda event: None,
        evaluate: bool = False,
    ) -> None:
        """`downstream`: seconds so far in which nothing could be given to the pool because its output was full. `tell`
        hears of records that gave no sample, from any thread. `evaluate`: samples for evaluation, in which nothing is
        random."""
        self._samples, self._evaluate = samples, evaluate
        self._seed, self._downstream = seed, downstream
        self._on_bad, self._tell = on_bad, tell
        self._reported: set[tuple[int, int]] = set()
        self.bad = 0
        """Records so far that gave no sample, each time they came."""
        self._tasks: queue.SimpleQueue[tuple[Batch, int, int] | None] = queue.SimpleQueue()
        self.fallbacks = 0
        """Images so far that a GPU was to decode and the CPU did."""
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.stage = Stage(name="decode", threads=threads)
        self._idle: list[tuple[float, float] | None] = [None] * threads
        """Of each thread that waits for a task: since when, and `downstream` then."""
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"decode_{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def decoded(self) -> int:
        """Images so far."""
        return self.stage.items

    def times_now(self) -> Times:
        """From any thread. What a thread decodes at the moment is left out."""
        with self._lock:
            busy_s, wait_in_s, wait_out_s = self.stage.busy_s, self.stage.wait_in_s, self.stage.wait_out_s
        now_t, full_s = time.perf_counter(), self._downstream()
        for since_t, full_then_s in filter(None, tuple(self._idle)):
            blocked_s = min(full_s - full_then_s, now_t - since_t)
            wait_in_s, wait_out_s = wait_in_s + now_t - since_t - blocked_s, wait_out_s + blocked_s
        return Times(busy_s, wait_in_s, wait_out_s)

    def _group(self, batch_size: int) -> int:
        """Records of one task."""
        return max(1, min(_MAX_GROUP, batch_size // (2 * len(self._threads))))

    def submit(self, batch: Batch) -> None:
        size = len(batch.records)
        group = self._group(size)
        starts = range(0, size, group)
        batch.expect(len(starts))
        for start in starts:
            self._tasks.put((batch, start, min(start + group, size)))

    def close(self) -> None:
        """Ends the threads after what they decode now; the rest stays undone."""
        self._stop.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        stage = self.stage
        while True:
            idle_t, full_s = time.perf_counter(), self._downstream()
            self._idle[number] = (idle_t, full_s)
            task = self._tasks.get()
            self._idle[number] = None
            begin_t = time.perf_counter()
            full_s = min(self._downstream() - full_s, begin_t - idle_t)
            error: BaseException | None = None
            done, read_bytes = 0, 0
            gaps: list[int] = []
            if task is not None and not self._stop.is_set():
                try:
                    for record in self._decode_group(*task, gaps):
                        done, read_bytes = done + 1, read_bytes + len(record.payload)
                except BaseException as caught:
                    error = caught
            with self._lock:
                stage.wait_in_s += begin_t - idle_t - full_s
                stage.wait_out_s += full_s
                stage.busy_s += time.perf_counter() - begin_t
                stage.items += done
                stage.bytes += read_bytes
                if task is None or self._stop.is_set():
                    return
                is_last = task[0].finish_task(error, gaps)
            if is_last:
                self._finish(task[0])

    def _decode_group(self, batch: Batch, start: int, end: int, gaps: list[int]) -> Iterator[Record]:
        """Fills these places of the batch, and notes in `gaps` those whose record gives no sample. Yields each record
        that is done."""
        for i in range(start, end):
            try:
                self._decode(batch.records[i], batch.records[i], batch, i)
            except NoSample as bad:
                self._met(bad)
                gaps.append(i)
                continue
            yield batch.records[i]

    def _met(self, bad: NoSample) -> None:
        """Counts and tells of it. Raises it where that is the policy."""
        record = bad.record
        place = (record.shard, record.offset)
        with self._lock:
            self.bad += 1
            is_new = place not in self._reported and len(self._reported) < _MAX_REPORTED
            if is_new:
                self._reported.add(place)
        if is_new:
            self._tell(
                BadRecord(
                    key=record.key,
                    offset=record.offset,
                    epoch=record.epoch,
                    reason=bad.reason,
                    policy=self._on_bad,
                )
            )
        if self._on_bad == "fail":
            raise bad

    def _finish(self, batch: Batch) -> None:
        """Fills the gaps of a batch whose tasks have all ended."""
        begin_t = time.perf_counter()
        filled, read_bytes = 0, 0
        error: BaseException | None = None
        own = list(batch.records)
        try:
            for gap in sorted(batch.gaps):
                batch.records[gap] = self._fill(batch, gap, own)
                filled, read_bytes = filled + 1, read_bytes + len(batch.records[gap].payload)
        except BaseException as caught:
            error = caught
        if filled:
            with self._lock:
                self.stage.busy_s += time.perf_counter() - begin_t
                self.stage.items += filled
                self.stage.bytes += read_bytes
        batch.finish(error)

    def _fill(self, batch: Batch, gap: int, own: list[Record]) -> Record:
        """The record that stands in: the next good one of the batch, decoded with the draws of the one it replaces, so
        that it is another crop, and the same whatever the threads. Raises DataError where no record is good."""
        size = len(own)
        for i in (at % size for at in range(gap + 1, gap + size)):
            if i in batch.gaps:
                continue
            try:
                self._decode(own[i], own[gap], batch, gap)
            except NoSample:  # damage that the other crop did not touch
                continue
            return replace(own[i], stands_in=True, padding=False)
        record = own[gap]
        raise DataError(
            f"{record.key} at byte {record.offset}: none of the {size} records of its batch can be decoded",
            hint="`drawbar data check` names the records that cannot be decoded",
        )

    def _decode(self, record: Record, draws_of: Record, batch: Batch, place: int) -> None:
        """Into that place of the batch. Raises NoSample, and DataError for a label that the set should not have."""
        self._samples.fill(batch, place, record, None if self._evaluate else self._draws(draws_of))

    def _draws(self, record: Record) -> RecordRandom:
        return RecordRandom(self._seed, record.epoch, record.shard, record.offset)
