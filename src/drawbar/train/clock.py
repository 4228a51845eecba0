"""When steps start and end, on the host's monotonic clock, for a CPU and for a GPU whose work runs behind the host."""

from __future__ import annotations

import time

import torch


class HostClock:
    """On a CPU a step is over when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def resolve(self, mark: float) -> float:
        return mark


class CudaClock:
    """Device time of a point in the stream, as host time: an event against an anchor taken while both stood still."""

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
