"""Where each stage of the input spends its time: busy, blocked on its input, blocked on its output; and how full the
queue behind it is. Counted by the threads that do the work; read at the end, and once a second by the training loop.

A full queue blames who takes from it, an empty one who fills it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from drawbar.journal import InputStage


class Times(NamedTuple):
    """Of one stage so far, what goes on now included. Seconds, summed over its threads."""

    busy_s: float
    wait_in_s: float
    wait_out_s: float


@dataclass(kw_only=True)
class Stage:
    """One stage's own counts. Seconds are summed over its threads. Written by one thread, or under the stage's lock."""

    name: str
    threads: int = 1
    queue_capacity: int = 0
    """Of the queue behind it; 0: none, what it makes is taken at once."""
    busy_s: float = 0.0
    wait_in_s: float = 0.0
    wait_out_s: float = 0.0
    items: int = 0
    bytes: int = 0
    _queue_sum: int = 0
    _queue_looks: int = 0

    def look(self, queued: int) -> None:
        """Notes how many items wait in the queue behind, as somebody comes to take one."""
        self._queue_sum += queued
        self._queue_looks += 1

    def event(self) -> InputStage:
        return InputStage(
            stage=self.name,
            threads=self.threads,
            busy_s=self.busy_s,
            wait_in_s=self.wait_in_s,
            wait_out_s=self.wait_out_s,
            items=self.items,
            bytes=self.bytes,
            queue_capacity=self.queue_capacity,
            queue_mean=self._queue_sum / self._queue_looks if self._queue_looks else 0.0,
        )


class Blocked:
    """Seconds that one thread was blocked, readable by others while it is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total_s = 0.0
        self._since_t: float | None = None

    @contextmanager
    def here(self) -> Iterator[None]:
        with self._lock:
            self._since_t = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._total_s += time.perf_counter() - (self._since_t or 0.0)
                self._since_t = None

    def total_s(self) -> float:
        with self._lock:
            running_s = time.perf_counter() - self._since_t if self._since_t is not None else 0.0
            return self._total_s + running_s
