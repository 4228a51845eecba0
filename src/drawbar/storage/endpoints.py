"""Which endpoint a request goes to: the recipe's policy, over the endpoints that are well.

An endpoint that fails is set aside and asked for one byte from time to time, by a thread of its own, until it answers;
requests go to the others meanwhile. One that says it is busy (503 SlowDown) is not asked for a moment, and then by
fewer requests at a time, which grow again with each success. An only endpoint is never set aside: its requests are
tried again by themselves.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from drawbar.storage.failures import Kind

Policy = Literal["rank", "round-robin", "least-outstanding"]

_NO_LIMIT = 1_000_000
_BROKEN_IN_A_ROW = 3
"""Failures that may be one request's own bad luck, such as a cut body: so many in a row are the endpoint's."""
_BUSY_IN_A_ROW = 6
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 5.0
_FIRST_ASIDE_S, _LAST_ASIDE_S = 1.0, 30.0


def backoff_s(attempt: int, first_s: float = _FIRST_PAUSE_S, last_s: float = _LAST_PAUSE_S) -> float:
    """Doubling with each attempt, with jitter, so that ranks that failed together do not come back together."""
    return random.uniform(0.5, 1.0) * min(last_s, first_s * 2.0 ** min(attempt, 30))


class NoEndpoint(Exception):
    """None was free in time; or nobody waits any more, as the run ends."""


@dataclass(kw_only=True)
class _Door:
    url: str
    in_flight: int = 0
    is_aside: bool = False
    failures: int = 0
    """In a row."""
    busy: int = 0
    """Answers in a row that say so."""
    resume_t: float = 0.0
    limit: int = _NO_LIMIT
    """Requests at a time."""
    since_growth: int = 0


class EndpointPool:
    """Hands out endpoints by index. Thread-safe; every `acquire` is followed by one `release`."""

    def __init__(
        self,
        urls: Sequence[str],
        policy: Policy,
        rank: int,
        *,
        probe: Callable[[int], bool],
        changed: Callable[[str, str, str], None],
    ) -> None:
        """`probe` asks an endpoint for a byte and says whether it is well. `changed` hears of an endpoint's address,
        `set_aside` or `returned`, and why; it is called from any thread."""
        self._doors = [_Door(url=url) for url in urls]
        self._policy, self._home = policy, rank % len(urls)
        self._cursor = self._home
        self._probe, self._changed = probe, changed
        self._free = threading.Condition()
        self._closed = threading.Event()

    @property
    def home(self) -> int:
        return self._home

    def acquire(self, timeout_s: float, avoid: Collection[int] = ()) -> int:
        """The endpoint for one request, of `avoid` only if there is no other. Raises NoEndpoint after `timeout_s`."""
        end_t = time.monotonic() + timeout_s
        with self._free:
            while True:
                now_t = time.monotonic()
                if self._closed.is_set() or now_t > end_t:
                    raise NoEndpoint
                index, wait_s = self._choose(now_t, avoid)
                if index is not None:
                    self._doors[index].in_flight += 1
                    return index
                self._free.wait(min(wait_s, end_t - now_t + 0.001))

    def release(self, index: int, failure: Kind | None, why: str = "") -> None:
        """Says how the request ended."""
        aside = False
        with self._free:
            door = self._doors[index]
            if failure == "busy":
                self._note_busy(door)
            elif failure is None:
                self._note_success(door)
            elif failure in ("unreachable", "silent", "broken"):
                door.failures += 1
            door.in_flight -= 1
            dead = failure in ("unreachable", "silent")
            if dead or door.failures >= _BROKEN_IN_A_ROW or door.busy >= _BUSY_IN_A_ROW:
                aside = len(self._doors) > 1 and not door.is_aside
                door.is_aside = door.is_aside or aside
            self._free.notify_all()
        if aside and not self._closed.is_set():
            self._changed(door.url, "set_aside", why)
            threading.Thread(target=self._await_return, args=(index,), name="probe", daemon=True).start()

    def close(self) -> None:
        """Nobody waits any more, and set-aside endpoints are left alone."""
        self._closed.set()
        with self._free:
            self._free.notify_all()

    def _choose(self, now_t: float, avoid: Collection[int]) -> tuple[int | None, float]:
        """An endpoint that may be asked now, or None and for how long to wait at most."""
        count = len(self._doors)
        first = self._home if self._policy == "rank" else self._cursor
        ring = [(first + i) % count for i in range(count)]
        well = [i for i in ring if not self._doors[i].is_aside]
        well = [i for i in well if i not in avoid] or well
        if self._policy == "rank":
            # A busy endpoint is waited for: only one that is gone moves a rank's reads elsewhere.
            well = well[:1]
        ready = [i for i in well if self._is_ready(self._doors[i], now_t)]
        if not ready:
            pauses = [self._doors[i].resume_t - now_t for i in well if self._doors[i].resume_t > now_t]
            return None, max(0.001, min(pauses, default=1.0))
        index = ready[0]
        if self._policy == "least-outstanding":
            index = min(ready, key=lambda i: self._doors[i].in_flight)
        self._cursor = (index + 1) % count
        return index, 0.0

    def _is_ready(self, door: _Door, now_t: float) -> bool:
        return door.resume_t <= now_t and door.in_flight < door.limit

    def _note_busy(self, door: _Door) -> None:
        now_t = time.monotonic()
        if now_t < door.resume_t:
            return  # one of several under way together: their answers are one
        door.busy += 1
        door.resume_t = now_t + backoff_s(door.busy)
        door.limit = max(1, min(door.limit, door.in_flight) // 2)
        door.since_growth = 0

    def _note_success(self, door: _Door) -> None:
        door.failures = door.busy = 0
        if door.limit == _NO_LIMIT:
            return
        door.since_growth += 1
        if door.since_growth >= door.limit:
            door.since_growth = 0
            door.limit += 1

    def _await_return(self, index: int) -> None:
        door = self._doors[index]
        attempt = 0
        while not self._closed.wait(backoff_s(attempt, _FIRST_ASIDE_S, _LAST_ASIDE_S)):
            if self._probe(index):
                with self._free:
                    door.is_aside = False
                    door.failures = door.busy = 0
                    self._free.notify_all()
                if not self._closed.is_set():
                    self._changed(door.url, "returned", "")
                return
            attempt += 1
