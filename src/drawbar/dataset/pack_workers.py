"""Packs many shards at once, in spawned processes that watch their parent and end with it.

Processes, as the work beside the system calls (headers, examples, framing) holds the GIL. No locks between them: a
process may be killed at any moment, and must not take one along.
"""

from __future__ import annotations

import multiprocessing
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection

from drawbar.dataset.items import Item
from drawbar.dataset.parts import PackedShard
from drawbar.dataset.shard_writer import PackJob, Stopped, Watch, pack_shard
from drawbar.dataset.workers import WorkerPool
from drawbar.errors import RunFailed

Report = Callable[[int], None]

_POLL_S = 0.25
_COUNT = struct.Struct("<q")
_MIN_BYTES_PER_WORKER = 128 * 1024 * 1024
"""With less, starting a process takes longer than its share of the work."""


def num_workers(asked: int, num_shards: int, size_bytes: int, ranks_on_host: int) -> int:
    """`asked` 0: one per core of this rank's share of the host, fewer for a small set."""
    if asked:
        return min(asked, num_shards)
    cores = max(1, len(os.sched_getaffinity(0)) // ranks_on_host)
    return max(1, min(cores, num_shards, size_bytes // _MIN_BYTES_PER_WORKER))


def pack_here(job: PackJob, shards: Mapping[str, Sequence[Item]], report: Report) -> Iterator[PackedShard]:
    """One shard after the other, in this process."""
    watch = Watch(report, lambda: False)
    for name, items in shards.items():
        yield pack_shard(job, name, items, watch)


def pack_in_processes(
    job: PackJob, shards: Mapping[str, Sequence[Item]], workers: int, report: Report
) -> Iterator[PackedShard]:
    """`workers` shards at a time, in any order. `report` is told of images done, in this thread.

    Raises the first error of a shard, once the shards in the making have been dropped; RunFailed where a worker was
    killed.
    """
    with _pool(job, workers) as (pool, counts):
        waiting: set[Future[PackedShard]] = {pool.submit(_work, name, items) for name, items in shards.items()}
        while waiting:
            done, waiting = wait(waiting, _POLL_S, FIRST_COMPLETED)
            while counts.poll():
                report(_COUNT.unpack(counts.recv_bytes())[0])
            yield from (future.result() for future in done)


@contextmanager
def _pool(job: PackJob, workers: int) -> Iterator[tuple[WorkerPool, Connection]]:
    context = multiprocessing.get_context("spawn")
    counts, count = context.Pipe(duplex=False)
    stop, stopper = context.Pipe(duplex=False)
    pool = WorkerPool(workers, _start, job, count, stop)
    try:
        yield pool, counts
    except BrokenProcessPool:
        raise RunFailed(
            "a worker process was killed", hint="perhaps for memory: use fewer --workers, and give the command again"
        ) from None
    finally:
        stopper.send_bytes(b"!")
        # Workers whose counts nobody reads any more must not block on a full pipe.
        ender = threading.Thread(target=_drain, args=(counts,), daemon=True)
        ender.start()
        pool.shutdown(cancel_futures=True)
        for end in (count, stop, stopper):
            end.close()
        ender.join()
        counts.close()


def _drain(counts: Connection) -> None:
    try:
        while True:
            counts.recv_bytes()
    except EOFError:
        pass


# In the worker


class _Worker:
    """This process's part of the packing, from its start."""

    def __init__(self, job: PackJob, count: Connection, stop: Connection) -> None:
        self.job = job
        self.stopped = False
        self._count, self._stop = count, stop
        self._unsent, self._sent_t = 0, time.monotonic()
        threading.Thread(target=self._wait_for_stop, daemon=True).start()

    def report(self, images: int) -> None:
        self._unsent += images
        now_t = time.monotonic()
        if now_t - self._sent_t > _POLL_S:
            self.flush()
            self._sent_t = now_t

    def flush(self) -> None:
        self._count.send_bytes(_COUNT.pack(self._unsent))  # one write below PIPE_BUF: whole, whoever else writes
        self._unsent = 0

    def _wait_for_stop(self) -> None:
        self._stop.poll(None)
        self.stopped = True


_this: list[_Worker] = []  # one per process: a pool's initializer has no other way to hand something over


def _start(job: PackJob, count: Connection, stop: Connection) -> None:
    _this.append(_Worker(job, count, stop))


def _work(name: str, items: Sequence[Item]) -> PackedShard:
    (worker,) = _this
    if worker.stopped:
        raise Stopped("packing was stopped")
    packed = pack_shard(worker.job, name, items, Watch(worker.report, lambda: worker.stopped))
    worker.flush()
    return packed
