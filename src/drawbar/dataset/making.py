"""What making a set of files takes, whatever is in them: a claimed folder, worker processes, whole files."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import cv2

from drawbar.dataset.workers import WorkerPool
from drawbar.errors import InputError, RunFailed

Progress = Callable[[str, int, int], None]
"""Stage, images done, images in all. Called from the caller's own thread."""

_AHEAD = 4
"""Chunks given out per worker: bounds what waits to be taken."""

_Job = TypeVar("_Job")
_Made = TypeVar("_Made")


def check_least(settings: Iterable[tuple[str, int, int]]) -> None:
    """Raises InputError for a setting (name, value, least) below its least value."""
    for name, value, least in settings:
        if value < least:
            raise InputError(f"{name} is {value}; expected at least {least}")


def claim(
    dest: Path,
    marker_name: str,
    wanted: Mapping[str, Any],
    folders: Iterable[str],
    *,
    beside: str = "",
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Makes `dest` and its folders, or finds that it is this set's already by the marker in it.

    Sets with markers that match the pattern `beside` may be there too. `defaults` are for settings that a marker of an
    earlier version lacks. Raises InputError for anything else that is there.
    """
    if dest.exists() and not dest.is_dir():
        raise InputError(f"{dest} is no folder")
    dest.mkdir(parents=True, exist_ok=True)
    marker = dest / marker_name
    if marker.exists():
        found = {key: (defaults or {}).get(key) for key in wanted} | _read_marker(marker, wanted)
        if found != wanted:
            differing = ", ".join(
                f"{key} {found.get(key)} instead of {value}" for key, value in wanted.items() if found.get(key) != value
            )
            raise InputError(f"{dest} holds another synthetic set: {differing}", hint="choose another folder")
    elif any(dest.iterdir()) and not (beside and any(dest.glob(beside))):
        raise InputError(f"{dest} is not empty and no synthetic set", hint="choose a new or empty folder")
    else:
        write_whole(marker, json.dumps(dict(wanted), indent=1).encode())
    for name in folders:
        (dest / name).mkdir(exist_ok=True)


def _read_marker(marker: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(marker.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{marker} is damaged", hint="delete the folder, or choose another")
    return {key: value for key, value in found.items() if key in wanted}


def write_whole(path: Path, data: bytes) -> None:
    """Under its name only when whole. The temporary name is the same each time, so one that a killed process left is
    overwritten; where writing fails nothing is left."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def in_chunks(
    make: Callable[[_Job, Sequence[int]], _Made], job: _Job, chunks: Sequence[Sequence[int]], workers: int
) -> Iterator[_Made]:
    """`make(job, chunk)` for each chunk, in order, in that many processes; 0: one per core, 1: in this process.

    Raises RunFailed where a worker process dies; its own errors pass through.
    """
    workers = min(workers or len(os.sched_getaffinity(0)), max(len(chunks), 1))
    if workers == 1:
        threads = cv2.getNumThreads()
        cv2.setNumThreads(1)
        try:
            for chunk in chunks:
                yield make(job, chunk)
        finally:
            cv2.setNumThreads(threads)
        return
    pool = WorkerPool(workers, _start_worker)
    waiting: deque[Future[_Made]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(make, job, chunk))
            if len(waiting) >= _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise RunFailed(
            "a worker process making images was killed", hint="perhaps for memory; use fewer workers and run it again"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    cv2.setNumThreads(1)  # one process per core is enough
