"""What `drawbar data` does and prints."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from obstore.exceptions import BaseError

from drawbar.config import Storage
from drawbar.dataset.pack import pack_folder
from drawbar.errors import EnvironmentUnfit, InputError
from drawbar.storage import embedded
from drawbar.storage.stores import Credentials, Place, explain, open_place
from drawbar.terminal import Terminal


class StageProgress:
    """Stage, rate and time left, on the terminal's status line."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._stage, self._start_t = "", 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now_t = time.monotonic()
        if stage != self._stage:
            self._stage, self._start_t = stage, now_t
        passed_s = now_t - self._start_t
        text = f"{stage} {done}/{total} images"
        if passed_s > 0.5:
            rate = done / passed_s
            text += f", {rate:.0f} images/s, {(total - done) / rate:.0f} s left"
        self._terminal.status(text)


def make(
    dest: Path, *, images: int, classes: int, seed: int, workers: int, json_out: bool = False, quiet: bool = False
) -> None:
    # The generator's imports are not needed by any other command.
    from drawbar.dataset.synthetic import make_imagenet_like

    terminal = Terminal(quiet_stdout=json_out or quiet)
    try:
        stats = make_imagenet_like(
            dest, num_images=images, num_classes=classes, seed=seed, workers=workers, progress=StageProgress(terminal)
        )
    except OSError as error:
        raise InputError(f"cannot write {dest}: {error.strerror or error}") from None
    finally:
        terminal.close()
    row = {
        "dest": str(dest),
        "images": images,
        "classes": classes,
        "seed": seed,
        "mean_bytes": stats.mean_bytes,
        "total_bytes": stats.total_bytes,
    }
    _report(
        terminal,
        row,
        json_out,
        f"{images} images in {classes} classes, {stats.mean_bytes / 1e3:.1f} kB on average, in {dest}",
    )


def pack(
    source: Path,
    dest: str,
    *,
    shards: int,
    split: str = "train",
    seed: int = 1,
    on_bad: str = "fail",
    overwrite: bool = False,
    endpoint: str | None = None,
    store_dir: Path | None = None,
    json_out: bool = False,
    quiet: bool = False,
) -> None:
    if on_bad not in ("fail", "skip"):
        raise InputError(f"--on-bad is {on_bad!r}; expected fail or skip")
    place = destination(dest, endpoint, store_dir)
    terminal = Terminal(quiet_stdout=json_out or quiet)
    try:
        manifest = pack_folder(
            source,
            place.prefix if place else dest,
            num_shards=shards,
            split=split,
            seed=seed,
            store=place.store if place else None,
            on_bad=cast(Literal["fail", "skip"], on_bad),
            overwrite=overwrite,
            progress=StageProgress(terminal),
        )
    except (BaseError, FileNotFoundError, PermissionError) as error:
        raise explain(error, f"{dest}" + (f" at {place.endpoint}" if place else "")) from error
    finally:
        terminal.close()
    row = {
        "dest": dest,
        "records": manifest.num_records,
        "shards": len(manifest.shards),
        "bytes": manifest.size_bytes,
        "classes": manifest.num_classes,
        "bad": len(manifest.bad),
    }
    bad = f", {len(manifest.bad)} bad files left out (see manifest.json)" if manifest.bad else ""
    size = f"{manifest.num_records} records in {len(manifest.shards)} shards, {manifest.size_bytes / 1e6:.1f} MB"
    _report(terminal, row, json_out, f"{size}, in {dest}{bad}")


def destination(dest: str, endpoint: str | None, store_dir: Path | None) -> Place | None:
    """The S3 place to write to; None for a folder. Buckets of the embedded store are made as needed.

    Without `endpoint` it is the embedded store's first where one is running, else AWS_ENDPOINT_URL.
    """
    parts = urlsplit(dest)
    if parts.scheme == "":
        return None
    if parts.scheme != "s3" or not parts.netloc:
        raise InputError(f"cannot write to {dest!r}", hint="a folder, or s3://bucket/prefix")
    if not parts.path.strip("/"):
        raise InputError(f"{dest} names no prefix", hint=f"s3://{parts.netloc}/train, for example")
    foreign = endpoint or (None if store_dir else os.environ.get("AWS_ENDPOINT_URL"))
    try:
        store = embedded.find(store_dir or embedded.DEFAULT_DIRECTORY)
    except EnvironmentUnfit:
        if foreign is None:
            raise
        store = None
    if store is not None and (foreign is None or foreign in store.endpoints):
        embedded.ensure_bucket(store, parts.netloc)
        credentials = Credentials(access_key_id=store.access_key_id, secret_access_key=store.secret_access_key)
        return open_place(dest, foreign or store.endpoints[0], credentials, Storage())
    return open_place(dest, foreign, Credentials.from_environment(), Storage())


def _report(terminal: Terminal, row: dict[str, Any], json_out: bool, text: str) -> None:
    if json_out:
        json.dump(row, sys.stdout, indent=2)
        print()
    else:
        terminal.line(text)
