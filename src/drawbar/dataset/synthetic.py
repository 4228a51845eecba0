"""Makes an ImageNet-like set: JPEG files in class folders, `n00000001/n00000001_12.JPEG`.

Owns the set on disk: who makes which file, resuming, and what is refused. What a file shows belongs to `picture`.
Each file follows from (seed, number) alone, so the set is the same whatever the number of workers; files appear
under their names only when whole, so an interrupted run can go on.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2

from drawbar.dataset.picture import make_picture
from drawbar.dataset.source import Progress
from drawbar.errors import EnvironmentUnfit, InputError, RunFailed

MARKER_NAME = "drawbar-synthetic.json"
GENERATOR = 1
"""Goes up when the same settings would give other pictures."""

_CHUNK = 32


@dataclass(frozen=True, kw_only=True)
class SyntheticStats:
    """The whole set, as it is on disk now."""

    num_images: int
    num_classes: int
    total_bytes: int
    made: int
    """Images made by this call; the others were there already."""
    elapsed_s: float

    @property
    def mean_bytes(self) -> float:
        return self.total_bytes / self.num_images


@dataclass(frozen=True)
class _Set:
    """Settings that decide every byte; picklable, as workers get it."""

    folder: str
    num_images: int
    num_classes: int
    seed: int

    def place(self, index: int) -> tuple[str, str]:
        """Class folder and file name of image `index`; images go round the classes."""
        number, label = divmod(index, self.num_classes)
        name = class_name(label + 1)
        return name, f"{name}_{number}.JPEG"

    def marker(self) -> dict[str, int]:
        return {
            "generator": GENERATOR,
            "num_images": self.num_images,
            "num_classes": self.num_classes,
            "seed": self.seed,
        }


def class_name(label: int) -> str:
    """Folder of a class, numbered from 1; named like a WordNet synset."""
    return f"n{label:08d}"


def make_imagenet_like(
    dest: Path,
    *,
    num_images: int,
    num_classes: int = 1000,
    seed: int = 1,
    workers: int = 0,
    progress: Progress = lambda stage, done, total: None,
) -> SyntheticStats:
    """Makes `num_images` JPEG files spread evenly over `num_classes` folders in `dest`.

    If `dest` holds the same set, only what is missing is made. `workers` are processes; 0 means one per core, 1 works
    in this process. Every class has a folder even when there are fewer images than classes.

    Raises InputError for a wrong setting or a `dest` that holds something else, EnvironmentUnfit where files cannot
    be written, RunFailed where a worker process dies.
    """
    started = time.perf_counter()
    _check_settings(num_images, num_classes, seed, workers)
    wanted = _Set(str(dest), num_images, num_classes, seed)
    try:
        _claim(dest, wanted)
        missing = _missing(wanted)
        for done in _made(wanted, missing, workers or len(os.sched_getaffinity(0))):
            progress("make", num_images - len(missing) + done, num_images)
        sizes = _sizes(wanted)
    except OSError as error:
        raise EnvironmentUnfit(f"cannot write to {dest}: {error.strerror or error}") from None
    except BrokenProcessPool:
        raise RunFailed(
            "a worker process making images was killed", hint="perhaps for memory; use fewer workers and run it again"
        ) from None
    total_bytes = sum(sizes[wanted.place(index)] for index in range(num_images))
    return SyntheticStats(
        num_images=num_images,
        num_classes=num_classes,
        total_bytes=total_bytes,
        made=len(missing),
        elapsed_s=time.perf_counter() - started,
    )


def _check_settings(num_images: int, num_classes: int, seed: int, workers: int) -> None:
    for name, value, least in (
        ("number of images", num_images, 1),
        ("number of classes", num_classes, 1),
        ("seed", seed, 0),
        ("number of workers", workers, 0),
    ):
        if value < least:
            raise InputError(f"{name} is {value}; expected at least {least}")


def _claim(dest: Path, wanted: _Set) -> None:
    """Makes `dest` and its class folders, or finds that it is this set's already."""
    if dest.exists() and not dest.is_dir():
        raise InputError(f"{dest} is no folder")
    dest.mkdir(parents=True, exist_ok=True)
    marker = dest / MARKER_NAME
    if marker.exists():
        found = _read_marker(marker)
        if found != wanted.marker():
            differing = ", ".join(
                f"{key} {found.get(key)} instead of {value}"
                for key, value in wanted.marker().items()
                if found.get(key) != value
            )
            raise InputError(f"{dest} holds another synthetic set: {differing}", hint="choose another folder")
    elif any(dest.iterdir()):
        raise InputError(f"{dest} is not empty and no synthetic set", hint="choose a new or empty folder")
    else:
        _write_whole(marker, json.dumps(wanted.marker(), indent=1).encode())
    for label in range(1, wanted.num_classes + 1):
        (dest / class_name(label)).mkdir(exist_ok=True)


def _read_marker(marker: Path) -> dict[str, Any]:
    try:
        found = json.loads(marker.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{marker} is damaged", hint="delete the folder, or choose another")
    return {key: found.get(key) for key in ("generator", "num_images", "num_classes", "seed")}


def _sizes(wanted: _Set) -> dict[tuple[str, str], int]:
    """Size in bytes of every file that is there, by class folder and name."""
    sizes = {}
    for label in range(1, wanted.num_classes + 1):
        name = class_name(label)
        with os.scandir(f"{wanted.folder}/{name}") as entries:
            sizes.update({(name, entry.name): entry.stat().st_size for entry in entries})
    return sizes


def _missing(wanted: _Set) -> list[int]:
    sizes = _sizes(wanted)
    return [index for index in range(wanted.num_images) if wanted.place(index) not in sizes]


def _made(wanted: _Set, missing: Sequence[int], workers: int) -> Iterator[int]:
    """Makes the missing images; yields how many are done so far."""
    chunks = [missing[start : start + _CHUNK] for start in range(0, len(missing), _CHUNK)]
    done = 0
    if workers == 1 or len(chunks) < 2:
        threads = cv2.getNumThreads()
        cv2.setNumThreads(1)
        try:
            for chunk in chunks:
                done += _make_chunk(wanted, chunk)
                yield done
        finally:
            cv2.setNumThreads(threads)
        return
    # Spawned, not forked: a fork of a process whose libraries run threads can hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(chunks)), context, initializer=_start_worker)
    try:
        for future in as_completed([pool.submit(_make_chunk, wanted, chunk) for chunk in chunks]):
            done += future.result()
            yield done
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    cv2.setNumThreads(1)  # one process per core is enough


def _make_chunk(wanted: _Set, indices: Sequence[int]) -> int:
    for index in indices:
        folder, name = wanted.place(index)
        data = make_picture(wanted.seed, index, index % wanted.num_classes + 1)
        _write_whole(Path(wanted.folder, folder, name), data)
    return len(indices)


def _write_whole(path: Path, data: bytes) -> None:
    """Under its name only when whole; the temporary name is the same each time, so a left one is overwritten."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
