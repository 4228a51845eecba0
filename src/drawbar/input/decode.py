"""The decode threads: a batch's records, a few at a time, into its pixels and labels."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from drawbar.dataset.example import parse_image_example
from drawbar.errors import DataError
from drawbar.input.augment import RecordRandom
from drawbar.input.batch import Batch, Record
from drawbar.input.image_decoder import BadImage
from drawbar.input.libjpeg import Pixels
from drawbar.input.sample import SampleMaker
from drawbar.input.stages import Stage

_MAX_GROUP = 8
"""Records of one task: handing one over costs less than a tenth of a decode, and the last task of a batch, on which
the others may wait, is short."""


class DecodePool:
    """Decodes whole batches in threads that hold no lock and no GIL while they decode."""

    def __init__(
        self,
        threads: int,
        samples: SampleMaker,
        *,
        num_classes: int,
        seed: int,
        downstream: Callable[[], float] = lambda: 0.0,
        evaluate: bool = False,
    ) -> None:
        """`downstream`: seconds so far in which nothing could be given to the pool because its output was full.
        `evaluate`: the central crop of each image instead of a random one."""
        self._evaluate = evaluate
        self._samples = samples
        self._num_classes, self._seed, self._downstream = num_classes, seed, downstream
        self._tasks: queue.SimpleQueue[tuple[Batch, int, int] | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.stage = Stage(name="decode", threads=threads)
        self._threads = [threading.Thread(target=self._work, name=f"decode_{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def decoded(self) -> int:
        """Images so far."""
        return self.stage.items

    def submit(self, batch: Batch) -> None:
        size = len(batch.records)
        group = max(1, min(_MAX_GROUP, size // (2 * len(self._threads))))
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

    def _work(self) -> None:
        stage = self.stage
        while True:
            idle_t, full_s = time.perf_counter(), self._downstream()
            task = self._tasks.get()
            begin_t = time.perf_counter()
            full_s = min(self._downstream() - full_s, begin_t - idle_t)
            error: BaseException | None = None
            done, read_bytes = 0, 0
            if task is not None and not self._stop.is_set():
                batch, start, end = task
                try:
                    for i in range(start, end):
                        record = batch.records[i]
                        self._decode(record, batch.images[i], batch.labels[i : i + 1])
                        done, read_bytes = done + 1, read_bytes + len(record.payload)
                except BaseException as caught:
                    error = caught
            end_t = time.perf_counter()
            with self._lock:
                stage.wait_in_s += begin_t - idle_t - full_s
                stage.wait_out_s += full_s
                stage.busy_s += end_t - begin_t
                stage.items += done
                stage.bytes += read_bytes
                if task is None or self._stop.is_set():
                    return
                task[0].finish_task(error)

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
        try:
            if self._evaluate:
                self._samples.evaluate(example.encoded, out)
            else:
                draws = RecordRandom(self._seed, record.epoch, record.shard, record.offset)
                self._samples.train(example.encoded, draws, out, boxes)
        except BadImage as error:
            raise DataError(f"{record.key} at byte {record.offset}: cannot decode image: {error}") from None
        label[0] = example.label - 1
