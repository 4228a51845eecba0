"""Points in time within a step, on the host's monotonic clock, for a CPU and for a GPU whose work runs behind the host.

A mark is taken where the work stands in the program; what time that was is asked later (`resolve`), when a GPU has got
there.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class StepClock(Protocol):
    runs_behind: bool
    """Whether work that was asked for may still be to do when the call returns."""

    def mark(self) -> Any: ...

    def resolve(self, mark: Any) -> float:
        """Seconds on `time.perf_counter`'s clock."""


class HostClock:
    """On a CPU a step is over when the call returns."""

    runs_behind = False

    def mark(self) -> float:
        return time.perf_counter()

    def resolve(self, mark: float) -> float:
        return mark


class CudaClock:
    """Device time of a point in the stream, as host time: an event against an anchor taken while both stood still."""

    runs_behind = True

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._anchor = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._anchor.record()
        self._anchor.synchronize()
        self._anchor_t = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def resolve(self, mark: torch.cuda.Event) -> float:
        """Waits until the device has passed `mark` (a synchronising call)."""
        mark.synchronize()
        return self._anchor_t + float(self._anchor.elapsed_time(mark)) / 1e3
