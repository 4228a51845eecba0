"""How a rank reads: bytes in a GET, GETs ahead. As the recipe says, or found out in the first requests of a run.

Tuned, a GET starts at 1 MiB, so that the first batch comes soon, and is doubled: up to 4 MiB in any case, as below that
a byte costs the client more CPU (0.77 s/GB at 1 MB, 0.55 at 4, 0.51 at 8), then as long as that makes a GET at least a
tenth faster per byte, so that the time to the first byte no longer counts. After that the read-ahead grows by one each
time a body was waited for. Both stay within a budget: `(lanes of the rank + read_ahead) * request_bytes` of at most
128 MiB.
"""

from __future__ import annotations

from statistics import median

_FIRST_BYTES = 1 << 20
_ENOUGH_BYTES = 4 << 20
_LAST_BYTES = 16 << 20
_FIRST_READ_AHEAD = 4
_LAST_READ_AHEAD = 32
BUDGET_BYTES = 128 << 20
_SAMPLES = 4
"""GETs of a size that are looked at before the next is tried."""
_WORTH_IT = 1.1


class Reading:
    """Request size and read-ahead of one rank. Used by one thread."""

    def __init__(self, *, request_bytes: int, read_ahead: int, num_lanes: int) -> None:
        """The recipe's values, 0 meaning tuned; `num_lanes`: how many bodies the rank has open at once."""
        self.tuned = [
            name for name, value in (("request_bytes", request_bytes), ("read_ahead", read_ahead)) if value == 0
        ]
        ahead = read_ahead or _FIRST_READ_AHEAD
        if request_bytes:
            self._max_request_bytes = self.request_bytes = request_bytes
        else:
            self._max_request_bytes = min(_LAST_BYTES, BUDGET_BYTES // (num_lanes + ahead))
            self.request_bytes = min(_FIRST_BYTES, self._max_request_bytes)
        self.read_ahead = ahead
        self.max_read_ahead = read_ahead or _LAST_READ_AHEAD
        self._num_lanes = num_lanes
        self._settled = request_bytes > 0
        self._rates: list[float] = []
        self._last_rate = 0.0

    def note(self, size_bytes: int, get_s: float, waited: bool) -> None:
        """A GET of `size_bytes` took `get_s`, and its body was waited for or not."""
        if not self._settled:
            # Of this size: not the odd end of a shard, nor one from before the last step.
            if size_bytes > 0.75 * self.request_bytes and get_s > 0:
                self._rates.append(size_bytes / get_s)
            if len(self._rates) >= _SAMPLES:
                self._next_size()
        elif waited and self.read_ahead < self._read_ahead_limit():
            self.read_ahead += 1

    def _next_size(self) -> None:
        rate = median(self._rates)
        self._rates.clear()
        if self.request_bytes > _ENOUGH_BYTES and rate < _WORTH_IT * self._last_rate:
            self.request_bytes //= 2
            self._settled = True
        elif self.request_bytes * 2 > self._max_request_bytes:
            self._settled = True
        else:
            self.request_bytes *= 2
        self._last_rate = rate

    def _read_ahead_limit(self) -> int:
        within_budget = BUDGET_BYTES // self.request_bytes - self._num_lanes
        return max(self.read_ahead, min(self.max_read_ahead, within_budget)) if "read_ahead" in self.tuned else 0
