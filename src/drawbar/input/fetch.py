"""GETs ahead of need: what is asked for in one request, how large, how many at a time, and in which order.

A rank takes a record of each of its lanes in turn, so each lane has one body open. Lanes are asked for in the order
in which they will run out, and their first requests have different sizes: they do not run out all at once.
"""

from __future__ import annotations

import heapq
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from drawbar.dataset.listing import ShardInfo
from drawbar.input.batch import Record
from drawbar.input.plan import Lane, RecordIndex
from drawbar.input.reading import Reading
from drawbar.input.stages import Blocked, Stage, Times
from drawbar.storage.reader import Reader

_MAX_RECORDS = 4096
"""In one GET."""


class Stopped(Exception):
    """The loader is being closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One GET: whole records of one shard where they are known, else a piece of it."""

    shard: int
    """Index in the listing; with the offset it makes a record's id."""
    key: str
    start: int
    end: int
    epoch: int
    e_tag: str = ""
    """Of the version that was listed; empty: not known."""
    num_records: int | None = None
    """As manifest or index have it; None: unknown."""
    wanted: Sequence[int] = ()
    """Which of them the lane trains, counted from 0."""
    places: Sequence[int] = ()
    """Their indices in the lane's reading order."""


Bytes = bytes | memoryview
"""What a GET brings: obstore's own memory."""

Body = tuple[Chunk, Bytes]


def lane_chunks(
    shards: Sequence[ShardInfo],
    index: RecordIndex,
    lane: Lane,
    trained: set[int],
    request_bytes: Callable[[], int],
    first_share: float,
) -> Iterator[Chunk]:
    """The GETs of a lane without the records in `trained` (indices in the lane), each of whole records and of at most
    `request_bytes()` (the first: that times `first_share`), or of one larger record. What lies between two wanted
    records is read along with them where it is less than an eighth of a request."""
    todo = np.array([i for i in range(len(lane.numbers)) if i not in trained], np.int64) if trained else None
    numbers = lane.numbers if todo is None else lane.numbers[todo]
    at = 0
    share = first_share
    while at < len(numbers):
        limit = max(1, int(request_bytes() * share))
        share = 1.0
        # (bisect: numpy's own search lets go of the GIL, and then waits for it longer than it searches.)
        # Shards come one after another in a lane, and records in order of offset within each.
        shard = bisect_right(index.first, numbers[at]) - 1
        block = numbers[at : at + _MAX_RECORDS]
        others = np.flatnonzero((block < index.first[shard]) | (block >= index.first[shard + 1]))
        block = block[: others[0]] if len(others) else block
        begin, ends = int(index.start[block[0]]), index.end[block]
        fits = max(1, bisect_right(ends, begin + limit))
        gaps = np.flatnonzero((index.start[block[1:fits]] - ends[: fits - 1]) * 8 > limit)
        stop = at + (int(gaps[0]) + 1 if len(gaps) else fits)
        first, last = int(numbers[at]), int(numbers[stop - 1])
        dense = last - first + 1 == stop - at
        yield Chunk(
            shard=shard,
            key=shards[shard].key,
            start=begin,
            end=int(ends[stop - at - 1]),
            epoch=lane.epoch,
            e_tag=shards[shard].e_tag,
            num_records=last - first + 1,
            wanted=range(stop - at) if dense else [int(number) - first for number in numbers[at:stop]],
            places=range(at, stop) if todo is None else [int(place) for place in todo[at:stop]],
        )
        at = stop


def shard_chunks(
    shards: Sequence[ShardInfo], order: Sequence[int], epoch: int, request_bytes: Callable[[], int]
) -> Iterator[Chunk]:
    """The GETs of whole shards one after another, in pieces of `request_bytes()`."""
    for number in order:
        shard, start = shards[number], 0
        while start < shard.size_bytes:
            end = min(start + request_bytes(), shard.size_bytes)
            yield Chunk(shard=number, key=shard.key, start=start, end=end, epoch=epoch, e_tag=shard.e_tag)
            start = end


class Source:
    """Chunks that are consumed in order, and their records: a lane, or a rank's whole shards."""

    def __init__(self, chunks: Iterator[Chunk], records: Callable[[Iterator[Body]], Iterator[Record]]) -> None:
        """`records` makes the records of the chunks' bodies."""
        self._chunks, self.records = chunks, records
        self.covered = 0
        """Records up to the end of what was asked for: when it will run out."""
        self.ahead: deque[tuple[Chunk, Future[tuple[Bytes, float]]]] = deque()
        self.open = True

    def next_chunk(self) -> Chunk | None:
        chunk = next(self._chunks, None)
        if chunk is None:
            self.open = False
        elif chunk.num_records is not None:
            self.covered = chunk.places[-1] + 1
        return chunk


class Fetcher:
    """Keeps GETs going ahead of need, over lanes and epochs, at most `reading.read_ahead` (one more where a lane runs
    out early). Used by one thread; GETs run in threads of its own."""

    def __init__(self, reader: Reader, reading: Reading, groups: Iterator[list[Source]]) -> None:
        """`groups`: the sources of each stretch of reading, in order."""
        self._reader, self._reading, self._groups = reader, reading, groups
        self._pool = ThreadPoolExecutor(reading.max_read_ahead + 1, "fetch")
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._ready: deque[list[Source]] = deque()
        self._heap: list[tuple[int, int, Source]] = []
        self._serial = 0
        self._outstanding: set[Future[tuple[Bytes, float]]] = set()
        self._unread_bytes = 0
        self.stage = Stage(name="fetch", threads=reading.read_ahead, queue_capacity=reading.read_ahead)
        self._waiting = Blocked()
        self._under_way: dict[int, float] = {}
        """Thread -> when its GET began."""
        self._allowed = (0.0, reading.read_ahead, time.perf_counter())
        """GETs that were allowed to run, summed over time up to the last change; how many are since; when it was."""

    @property
    def wait_s(self) -> float:
        """That the taking thread was blocked for a body, so far."""
        return self._waiting.total_s()

    def next_group(self) -> list[Source] | None:
        """The sources of the next stretch of reading; None after the last."""
        if not self._ready:
            if not self._open_group():
                return None
            self._top_up()
        return self._ready.popleft()

    def bodies(self, source: Source) -> Iterator[Body]:
        """The source's chunks with their bytes, in order. Raises what their GETs raise."""
        while True:
            if not source.ahead and not self._ask(source):
                return
            yield self._take(source)

    def drop(self, source: Source) -> None:
        """What was asked for and is not needed is counted as unread when it arrives."""
        source.open = False
        while source.ahead:
            _, future = source.ahead.popleft()
            self._outstanding.discard(future)
            future.add_done_callback(self._count_unread)

    def stop(self) -> None:
        """No GET begins after this; what waits for one gets `Stopped`."""
        self._stop.set()

    def close(self) -> None:
        """Waits for every GET in flight."""
        self.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._note_width()
        self.stage.threads = self.stage.queue_capacity = self._allowed[1]
        self.stage.wait_out_s = self.times_now().wait_out_s

    def times_now(self) -> Times:
        """From any thread."""
        allowed_s, width, since_t = self._allowed
        with self._lock:
            now_t = time.perf_counter()
            busy_s = self.stage.busy_s + sum(now_t - begin_t for begin_t in self._under_way.values())
        # A plan never runs out of chunks: whoever does not fetch, must not.
        return Times(busy_s, 0.0, max(0.0, allowed_s + width * (now_t - since_t) - busy_s))

    @property
    def num_arrived(self) -> int:
        """Bodies that nobody has taken yet. From any thread."""
        # (A copy: the set is another thread's, and changes while it is walked.)
        return sum(future.done() for future in self._outstanding.copy())

    def unread_bytes(self) -> int:
        """Bodies that arrived and were not taken; call after `close`."""
        for future in self._outstanding:
            self._count_unread(future)
        self._outstanding.clear()
        return self._unread_bytes

    def _take(self, source: Source) -> Body:
        chunk, future = source.ahead.popleft()
        self.stage.look(self.num_arrived)
        waited = not future.done()
        try:
            with self._waiting.here():
                body, get_s = future.result()
        except CancelledError:
            raise Stopped from None
        finally:
            self._outstanding.discard(future)
        self._reading.note(len(body), get_s, waited)
        if self._reading.read_ahead != self._allowed[1]:
            self._note_width()
        self._top_up()
        return chunk, body

    def _note_width(self) -> None:
        allowed_s, width, since_t = self._allowed
        now_t = time.perf_counter()
        self._allowed = (allowed_s + width * (now_t - since_t), self._reading.read_ahead, now_t)

    def _top_up(self) -> None:
        while len(self._outstanding) < self._reading.read_ahead:
            if not self._heap:
                if not self._open_group():
                    return
                continue
            covered, _, source = heapq.heappop(self._heap)
            if not source.open:
                continue
            # A lane that ran out early was served before its turn.
            if covered == source.covered and not self._ask(source):
                continue
            self._push(source)

    def _open_group(self) -> bool:
        group = next(self._groups, None)
        if group is None:
            return False
        self._ready.append(group)
        for source in group:
            self._push(source)
        return True

    def _push(self, source: Source) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (source.covered, self._serial, source))

    def _ask(self, source: Source) -> bool:
        chunk = source.next_chunk()
        if chunk is None:
            return False
        future = self._pool.submit(self._get, chunk)
        self._outstanding.add(future)
        source.ahead.append((chunk, future))
        return True

    def _get(self, chunk: Chunk) -> tuple[Bytes, float]:
        if self._stop.is_set():
            raise Stopped
        thread, begin_t = threading.get_ident(), time.perf_counter()
        with self._lock:
            self._under_way[thread] = begin_t
        try:
            body = self._reader.get_view(chunk.key, chunk.start, chunk.end, e_tag=chunk.e_tag)
        except BaseException:
            with self._lock:
                del self._under_way[thread]
            raise
        get_s = time.perf_counter() - begin_t
        with self._lock:
            del self._under_way[thread]
            self.stage.busy_s += get_s
            self.stage.items += 1
            self.stage.bytes += len(body)
        return body, get_s

    def _count_unread(self, future: Future[tuple[Bytes, float]]) -> None:
        if not future.cancelled() and future.exception() is None:
            with self._lock:
                self._unread_bytes += len(future.result()[0])
