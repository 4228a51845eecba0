"""Reads whole sets for `check` and `stat`: every record of every shard, in processes, going on after a fault.

Processes and not threads, as looking at a record is mostly Python. Memory is bounded for each by one GET, one record
and what a shard's result holds, whatever the size of shards and set.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from typing import Any, NamedTuple, Protocol, TypeVar

import google_crc32c

from drawbar.config import Storage
from drawbar.dataset.compressed import Decompressor
from drawbar.dataset.listing import ShardInfo
from drawbar.dataset.tfrecord import Compression, FramingError, RecordSplitter, compression_of
from drawbar.dataset.workers import WorkerPool
from drawbar.errors import RunFailed
from drawbar.journal import Request
from drawbar.storage.environment import Credentials
from drawbar.storage.reader import CountedReader
from drawbar.storage.stores import Place, open_place

MAX_FAULTS = 10_000
"""Of one shard, that are kept; more are counted."""

_SMALL_SET_BYTES = 64 * 1024 * 1024  # not worth the second that starting processes takes
_REQUEST_BYTES = 8 * 1024 * 1024
_POLL_S = 0.25
_T = TypeVar("_T")

Progress = Callable[[int, int], None]
"""Bytes and records read so far. Called from the caller's own thread."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a set lies, in a form that a worker process can be given."""

    url: str
    endpoint: str | None = None
    credentials: Credentials | None = None
    settings: Storage = field(default_factory=Storage)

    def open(self) -> Place:
        return open_place(self.url, self.endpoint, self.credentials, self.settings)


class Fault(NamedTuple):
    """Something wrong, as exactly as it can be said."""

    shard: str
    """Or another object of the set, such as its manifest."""
    record: int | None
    """From 0; None: the shard as a whole."""
    offset: int | None
    """Of the record's frame, in bytes from the start of the shard, of its decompressed bytes if it is compressed."""
    reason: str


class Record(NamedTuple):
    number: int
    offset: int
    payload: bytes


class Stopped(Exception):
    """The caller does not want the rest."""


class Counters(Protocol):
    """Counts of what was read, shared between processes."""

    def add(self, read_bytes: int, records: int) -> None:
        """Raises Stopped where reading is to end."""


class ShardWalk:
    """The records of one shard, and what was wrong with its bytes. Iterate once, then look at the rest."""

    def __init__(self, shard: ShardInfo, reader: CountedReader, request_bytes: int, counters: Counters) -> None:
        self.shard = shard
        self._reader, self._request_bytes, self._counters = reader, request_bytes, counters
        self.faults: list[Fault] = []
        self.num_faults = 0
        """Those beyond `MAX_FAULTS` included."""
        self.num_records = 0
        """Framed, damaged ones included."""
        self.read_bytes = 0
        self.crc32c = 0
        """Of all bytes read, as they are stored."""
        self.compression: Compression = ""
        self.whole = False
        """The shard was read to its end."""

    def fault(self, record: int | None, offset: int | None, reason: str) -> None:
        self.num_faults += 1
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(Fault(self.shard.name, record, offset, reason))

    def __iter__(self) -> Iterator[Record]:
        splitter = RecordSplitter(
            self.shard.name, on_bad_data=lambda offset, reason: self.fault(splitter.num_records, offset, reason)
        )
        try:
            for piece in self._pieces():
                for raw in splitter.feed(piece):
                    yield Record(splitter.num_records - 1, raw.offset, raw.payload)
                self._counters.add(0, splitter.num_records - self.num_records)
                self.num_records = splitter.num_records
            splitter.finish()
            self.whole = True
        except FramingError as error:
            self.num_records = splitter.num_records
            self.fault(splitter.num_records, error.offset, error.reason)
        except RunFailed as error:
            # A body that will not come, as from a failing disk; an endpoint that is gone ends the whole reading.
            self.num_records = splitter.num_records
            self.fault(None, None, error.message)

    def _pieces(self) -> Iterator[bytes]:
        stream: Decompressor | None = None
        size_bytes = self.shard.size_bytes
        for start in range(0, size_bytes, self._request_bytes):
            body = self._reader.get(self.shard.key, start, min(start + self._request_bytes, size_bytes))
            self.read_bytes += len(body)
            self.crc32c = google_crc32c.extend(self.crc32c, body)
            self._counters.add(len(body), 0)
            if start == 0:
                self.compression = compression_of(body)
                stream = Decompressor(self.shard.name, self.compression) if self.compression else None
            if stream is None:
                yield body
            else:
                yield from stream.feed(body)
        if stream is not None:
            stream.finish()


Look = Callable[[ShardWalk], _T]
"""What is done with a shard. Must be picklable, as its result must."""


def each_shard(
    origin: Origin, shards: Sequence[ShardInfo], look: Look[_T], workers: int, progress: Progress
) -> Iterator[_T]:
    """`look` at every shard; results in the order of `shards`, while later ones are being read.

    `workers` are processes; 0: one per core, or none beside this one for a small set. Raises EnvironmentUnfit or
    InputError where the set cannot be read any more, RunFailed where a worker process dies.
    """
    if workers == 0:
        small = sum(shard.size_bytes for shard in shards) <= _SMALL_SET_BYTES
        workers = 1 if small else len(os.sched_getaffinity(0))
    workers = min(workers, len(shards))
    if workers <= 1:
        counted = _OwnCounters(progress)
        for shard in shards:
            yield look(_walk(origin, shard, counted))
        return
    yield from _in_processes(origin, shards, look, workers, progress)


def first_record(origin: Origin, shard: ShardInfo) -> Record | None:
    """None where the shard is empty or damaged at its beginning."""
    return next(iter(_walk(origin, shard, _OwnCounters(lambda read_bytes, records: None))), None)


def _in_processes(
    origin: Origin, shards: Sequence[ShardInfo], look: Look[_T], workers: int, progress: Progress
) -> Iterator[_T]:
    context = multiprocessing.get_context("spawn")
    counters = _SharedCounters(context.Value("q", 0), context.Value("q", 0), context.Value("q", 0))
    pool = WorkerPool(workers, _start_worker, counters)
    waiting: deque[Future[_T]] = deque()
    rest = iter(shards)
    try:
        while True:
            # A few more than workers, so that none waits; not all, as results take memory.
            while len(waiting) < 2 * workers and (shard := next(rest, None)) is not None:
                waiting.append(pool.submit(_look_at, origin, shard, look))
            if not waiting:
                return
            while not wait([waiting[0]], _POLL_S).done:
                progress(counters.read_bytes.value, counters.records.value)
            progress(counters.read_bytes.value, counters.records.value)
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise RunFailed("a worker process was killed", hint="perhaps for memory; use fewer workers") from None
    finally:
        counters.stop.value = 1
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _SharedCounters:
    read_bytes: Synchronized[int]
    records: Synchronized[int]
    stop: Synchronized[int]

    def add(self, read_bytes: int, records: int) -> None:
        if self.stop.value:
            raise Stopped
        for counter, count in ((self.read_bytes, read_bytes), (self.records, records)):
            if count:
                with counter.get_lock():
                    counter.value += count


@dataclass
class _OwnCounters:
    progress: Progress
    read_bytes: int = 0
    records: int = 0
    _told_t: float = 0.0

    def add(self, read_bytes: int, records: int) -> None:
        self.read_bytes += read_bytes
        self.records += records
        now_t = time.monotonic()
        if now_t - self._told_t >= _POLL_S:
            self._told_t = now_t
            self.progress(self.read_bytes, self.records)


_counters: _SharedCounters | None = None
"""Of a worker process: they can only be inherited."""


def _start_worker(counters: _SharedCounters) -> None:
    global _counters  # noqa: PLW0603
    _counters = counters


def _look_at(origin: Origin, shard: ShardInfo, look: Look[Any]) -> Any:
    assert _counters is not None  # noqa: S101
    return look(_walk(origin, shard, _counters))


def _walk(origin: Origin, shard: ShardInfo, counters: Counters) -> ShardWalk:
    return ShardWalk(shard, _reader(origin), origin.settings.request_bytes or _REQUEST_BYTES, counters)


_place = functools.lru_cache(maxsize=4)(Origin.open)
"""One connection pool for all shards of a process."""


def _reader(origin: Origin) -> CountedReader:
    return CountedReader(_place(origin), origin.settings, _unrecorded)


def _unrecorded(request: Request) -> None:
    pass
