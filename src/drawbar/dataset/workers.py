"""Worker processes that end with their parent, however it ends.

Spawned, not forked: a fork of a process whose libraries run threads can hang. They see no signal that was meant for
their parent, and stop when it tells them; where it can tell nothing any more (SIGKILL), they notice and end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Process(SpawnProcess):
    def terminate(self) -> None:
        """What the pool does to the others when one was killed: with SIGKILL, as they see no SIGTERM."""
        self.kill()


class _Context(SpawnContext):
    Process = _Process


class WorkerPool(ProcessPoolExecutor):
    """`initializer` runs once in each process, before its first task."""

    def __init__(self, workers: int, initializer: Callable[..., None] | None = None, *initargs: Any) -> None:
        super().__init__(workers, _Context(), initializer=_begin, initargs=(initializer, initargs))

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Starts a process where none is idle."""
        with _signals_blocked():
            return super().submit(fn, *args, **kwargs)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """An exception raised by a signal must not leave a process half started: it would wait for us, and we for it.

    The processes inherit the block: they see no Ctrl-C and no SIGTERM to the group, not even while they import.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(initializer: Callable[..., None] | None, initargs: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if initializer is not None:
        initializer(*initargs)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for_any([parent.sentinel])
        os._exit(1)
