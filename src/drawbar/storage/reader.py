"""Ranged GETs, each counted and in the journal: over one endpoint or several, tried again within a stated budget.

What a body must be before it is handed on: as long as asked for, of the version listed. Damage inside it shows only to
who takes the records apart, and is answered by `reread`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import obstore
from obstore.exceptions import BaseError

from drawbar.config import Storage
from drawbar.errors import DataError, DrawbarError, EnvironmentUnfit, RunFailed
from drawbar.journal import EndpointChange, Request
from drawbar.storage.endpoints import EndpointPool, NoEndpoint, backoff_s
from drawbar.storage.failures import PERMANENT, Replaced, ShortBody, explain, kind_of, status_of
from drawbar.storage.stores import Place

_REMEMBERED = 4096
"""Bodies of which it is known who sent them; far more than are read ahead."""


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """Bytes [start, end) of an object."""

    key: str
    start: int
    end: int
    kind: str
    e_tag: str
    reread: bool = False

    @property
    def size(self) -> int:
        return self.end - self.start


class Reader(Protocol):
    """Where a loader gets its bytes; see `CountedReader` for each member. Thread-safe."""

    @property
    def planned_bytes(self) -> int: ...

    @property
    def received_bytes(self) -> int: ...

    @property
    def failed_bytes(self) -> int: ...

    def get(self, key: str, start: int, end: int, *, kind: str = "", e_tag: str = "") -> bytes: ...

    def get_view(self, key: str, start: int, end: int, *, e_tag: str = "") -> memoryview: ...

    def blame(self, key: str, start: int, end: int, why: str) -> None: ...

    def reread(self, key: str, start: int, end: int, *, e_tag: str = "") -> bytes: ...

    def stop(self) -> None: ...


class CountedReader:
    """Thread-safe. One rank's, or one of a program that only wants retried reads."""

    def __init__(
        self,
        places: Place | Sequence[Place],
        settings: Storage,
        record: Callable[[Request], None],
        changed: Callable[[EndpointChange], None] = lambda change: None,
        *,
        rank: int = 0,
        kind: str = "data",
    ) -> None:
        """`places` are one bucket through each endpoint, in the recipe's order. `record` gets every request when it
        ended, `changed` what became of endpoints; both from any thread. `kind` is what the journal calls ranges of
        shards, `data` or `eval`."""
        self._places = [places] if isinstance(places, Place) else list(places)
        self._settings = settings
        self._kind = kind
        self._record, self._changed = record, changed
        self._pool = EndpointPool(
            [place.endpoint for place in self._places],
            settings.policy,
            rank,
            probe=self._probe,
            changed=lambda url, change, why: changed(EndpointChange(endpoint=url, change=change, why=why)),
        )
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._probe_key = ""
        self._senders: OrderedDict[tuple[str, int], tuple[int, int]] = OrderedDict()
        """(key, start) -> (end, endpoint) of the last bodies."""
        self.planned_bytes = 0
        """Sum of the ranges of shards asked for, each once."""
        self.received_bytes = 0
        """Bodies of ranges of shards, failed tries and rereads included."""
        self.failed_bytes = 0
        """Of those, the ones of tries that failed (a short body)."""

    @property
    def home(self) -> Place:
        """The one that policy `rank` gives this rank; what is listed is listed there."""
        return self._places[self._pool.home]

    def get(self, key: str, start: int, end: int, *, kind: str = "", e_tag: str = "") -> bytes:
        """Bytes [start, end) of an object, which must still be the version with this ETag where one is given. `kind`:
        where it is no range of a shard.

        Raises InputError (not there), DataError (gone, replaced), EnvironmentUnfit (refused, no answer) or RunFailed,
        once the budget is spent.
        """
        return bytes(self._get(_Wanted(key=key, start=start, end=end, kind=kind or self._kind, e_tag=e_tag)))

    def get_view(self, key: str, start: int, end: int, *, e_tag: str = "") -> memoryview:
        """As `get`, of a shard, in the store client's own memory: a copy more costs 0.05 CPU s per GB."""
        return self._get(_Wanted(key=key, start=start, end=end, kind=self._kind, e_tag=e_tag))

    def _get(self, wanted: _Wanted) -> memoryview:
        planned = wanted.size if wanted.kind == self._kind else 0
        with self._lock:
            self.planned_bytes += planned
        try:
            return self._tried(wanted)
        except BaseException:
            # Will not arrive: it must not count as missing in the byte balance.
            with self._lock:
                self.planned_bytes -= planned
            raise

    def blame(self, key: str, start: int, end: int, why: str) -> None:
        """Writes down that these bytes, as `get` returned them, were damaged."""
        for index in sorted(self._senders_of(key, start, end)):
            self._changed(EndpointChange(endpoint=self._places[index].endpoint, change="corrupt", why=why))

    def reread(self, key: str, start: int, end: int, *, e_tag: str = "") -> bytes:
        """The same bytes once more, from another endpoint than the one whose answer to `get` they were, where there is
        one. Raises what `get` raises."""
        wanted = _Wanted(key=key, start=start, end=end, kind=self._kind, e_tag=e_tag, reread=True)
        return bytes(self._tried(wanted, self._senders_of(key, start, end)))

    def _senders_of(self, key: str, start: int, end: int) -> set[int]:
        """Endpoints that sent a part of these bytes."""
        with self._lock:
            return {
                index for (name, at), (to, index) in self._senders.items() if name == key and at < end and to > start
            }

    def stop(self) -> None:
        """Ends pauses and waits, so that every `get` returns or raises within its time-outs, and is not tried again."""
        self._stopping.set()
        self._pool.close()

    def _tried(self, wanted: _Wanted, avoid: Collection[int] = ()) -> memoryview:
        attempt, failed_t = 0, 0.0
        last: DrawbarError | None = None
        while True:
            index = self._endpoint(wanted, avoid, last)
            try:
                body = self._try(index, wanted, attempt)
            except (BaseError, ShortBody, Replaced, OSError) as error:
                kind = kind_of(error)
                last = self._explained(error, wanted, self._places[index])
                self._pool.release(index, kind, _first_line(error))
                now_t = time.monotonic()
                failed_t = failed_t or now_t
                attempt += 1
                pause_s = backoff_s(attempt)
                spent = attempt > self._settings.retries or (now_t + pause_s > failed_t + self._settings.retry_budget_s)
                if kind in PERMANENT or spent or self._stopping.wait(pause_s):
                    raise last from error
                avoid = () if kind == "busy" else (index,)
            except BaseException:
                self._pool.release(index, "broken")
                raise
            else:
                self._pool.release(index, None)
                return body

    def _endpoint(self, wanted: _Wanted, avoid: Collection[int], last: DrawbarError | None) -> int:
        # Whoever waits for a busy endpoint waits for other requests to end, and these may last.
        timeout_s = self._settings.retry_budget_s + (0.0 if last else self._settings.whole_timeout_s)
        try:
            return self._pool.acquire(timeout_s, avoid)
        except NoEndpoint:
            if self._stopping.is_set():
                raise RunFailed(f"reading was stopped: {wanted.key}") from None
            names = ", ".join(place.endpoint for place in self._places)
            raise EnvironmentUnfit(
                f"no endpoint was well for {timeout_s:g} s: {names}" + (f"; the last error: {last}" if last else ""),
                hint="storage.retry_budget_s is how long that may take; the report counts what happened",
            ) from None

    def _explained(self, error: Exception, wanted: _Wanted, place: Place) -> DrawbarError:
        where = place.describe(wanted.key)
        if wanted.e_tag and kind_of(error) == "missing":
            return DataError(f"no such object any more: {where}: it was listed at the start and then deleted")
        return explain(error, where)

    def _try(self, index: int, wanted: _Wanted, attempt: int) -> memoryview:
        place, is_data = self._places[index], wanted.kind == self._kind
        begin_t = time.perf_counter()
        first_byte_s, got, status, error = 0.0, 0, 0, ""
        try:
            options: obstore.GetOptions = {"range": (wanted.start, wanted.end)}
            check = wanted.e_tag if self._settings.check_version else ""
            if check.startswith('"'):
                options["if_match"] = check
            response = obstore.get(place.store, wanted.key, options=options)
            first_byte_s = time.perf_counter() - begin_t
            found = response.meta["e_tag"]
            if check and found and _bare(found) != _bare(check):
                raise Replaced(f"listed as {check}, now {found}")
            body = memoryview(response.bytes())
            got = len(body)
            if got != wanted.size:
                raise ShortBody(f"asked for {wanted.size} bytes, got {got}")
            with self._lock:
                self._probe_key = wanted.key
                if is_data and not wanted.reread:
                    self._senders[wanted.key, wanted.start] = (wanted.end, index)
                    self._senders.move_to_end((wanted.key, wanted.start))
                    if len(self._senders) > _REMEMBERED:
                        self._senders.popitem(last=False)
            return body
        except BaseException as caught:
            error = f"{type(caught).__name__}: {str(caught).strip()[:300]}"
            status = status_of(caught) if isinstance(caught, Exception) else 0
            raise
        finally:
            if is_data:
                with self._lock:
                    self.received_bytes += got
                    self.failed_bytes += got if error else 0
            self._record(
                Request(
                    endpoint=place.endpoint,
                    key=wanted.key,
                    kind=wanted.kind,
                    offset=wanted.start,
                    wanted_bytes=wanted.size,
                    got_bytes=got,
                    first_byte_s=first_byte_s,
                    total_s=time.perf_counter() - begin_t,
                    attempt=attempt,
                    error=error,
                    status=status,
                    reread=wanted.reread,
                )
            )

    def _probe(self, index: int) -> bool:
        """One byte of an object that was there: an endpoint that says it is not, or refuses, is well enough to ask."""
        with self._lock:
            wanted = _Wanted(key=self._probe_key, start=0, end=1, kind="probe", e_tag="")
        try:
            self._try(index, wanted, 0)
        except Exception as error:
            return kind_of(error) in PERMANENT
        return True


def _bare(e_tag: str) -> str:
    return e_tag.removeprefix("W/").strip('"')


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
