"""The cold start: what is flushed before the first read, host by host, and what can be shown for it.

The launcher flushes its own host. Ranks on hosts that it did not flush do so themselves, one of each host, before any
of them reads. Nothing here ever asks for a password.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from drawbar.config import Recipe
from drawbar.dataset.listing import ShardInfo, split_pattern
from drawbar.errors import EnvironmentUnfit
from drawbar.journal import Cache, JournalWriter, StorageFlush
from drawbar.storage import embedded, page_cache
from drawbar.storage.flush_hook import run_command
from drawbar.storage.urls import parse_url
from drawbar.world import World

if TYPE_CHECKING:
    from drawbar.launch.run import Storage

FLUSHED_NODE = "DRAWBAR_FLUSHED_NODE"
"""How the ranks learn which host the launcher has flushed: its name."""
NOT_PROVEN = "storage flushed by hook, not proven"
HOOK_LOG = "storage-flush.log"


def make_cold(recipe: Recipe, storage: Storage, run_dir: Path, journal: JournalWriter) -> Storage:
    """Flushes what can be flushed from here and writes down what was done; returns the storage, restarted where it was
    ours. Raises EnvironmentUnfit where the user's own command fails."""
    wanted = recipe.cache.start
    read_before = sum(index.read_bytes for index in (storage.index, storage.validation_index) if index)
    scanned = f"the launcher read {read_before / 1e6:.1f} MB of the shards before, to index them" if read_before else ""

    def write(method: str, resident_fraction: float | None = None, note: str = "") -> None:
        journal.write(
            Cache(
                node=socket.gethostname(),
                wanted=wanted,
                method=method,
                resident_fraction=resident_fraction,
                note=_joined(note, scanned),
            )
        )

    if wanted == "any" or storage.listing is None:
        write("left as it was")
        return storage
    hooked = NOT_PROVEN if recipe.cache.storage_flush_command else ""
    if hooked:
        _flush_storage(recipe, run_dir, journal)
    if storage.store is not None:
        store, cold = embedded.restart_cold(storage.store.directory)
        write(_joined(cold.method, hooked), cold.resident_fraction, cold.note)
        return replace(storage, store=store)
    if not parse_url(recipe.data.url).is_folder:
        write("nothing flushed from here", note=hooked or "server cache unknown: this store is not ours to flush")
        return storage
    sets = ((recipe.data.url, storage.listing), (recipe.data.eval_url, storage.validation))
    files = [file for url, listing in sets if listing for file in files_of(url, listing.shards)]
    flushed = flush_files(recipe, files)
    write(_joined(flushed.method, hooked), flushed.resident_fraction, flushed.note)
    return storage


def flush_unflushed(recipe: Recipe, world: World, files: Iterable[Path], journal: JournalWriter) -> None:
    """By the first rank of a host that the launcher has not flushed, where the set lies in files."""
    here = world.local_rank == 0 and os.environ.get(FLUSHED_NODE) != world.node
    if here and recipe.cache.start == "cold" and recipe.input.source == "data" and parse_url(recipe.data.url).is_folder:
        journal.write(replace(flush_files(recipe, files), node=world.node))


def files_of(url: str, shards: Iterable[ShardInfo]) -> list[Path]:
    """The shards of a set, where it lies in files."""
    parsed = parse_url(split_pattern(url)[0])
    return [parsed.folder / shard.key for shard in shards] if parsed.is_folder else []


def flush_files(recipe: Recipe, files: Iterable[Path]) -> Cache:
    """Puts these files out of this host's page cache; as root all else too, unless the recipe forbids it."""
    folder = parse_url(split_pattern(recipe.data.url)[0]).folder
    files = list(files)
    method = page_cache.flush(files, whole_host=recipe.cache.drop_caches)
    fraction = page_cache.resident_fraction(files)
    unknown = "unverifiable: mincore does not tell this user, who may not write the files" if fraction is None else ""
    return Cache(
        node=socket.gethostname(),
        wanted=recipe.cache.start,
        method=method,
        resident_fraction=fraction,
        note=_joined(unknown, page_cache.doubt(folder)),
    )


def _flush_storage(recipe: Recipe, run_dir: Path, journal: JournalWriter) -> None:
    settings = recipe.cache
    log = run_dir / "logs" / HOOK_LOG
    outcome = run_command(settings.storage_flush_command, timeout_s=settings.storage_flush_timeout_s, log=log)
    journal.write(
        StorageFlush(
            command=settings.storage_flush_command,
            exit_code=outcome.exit_code,
            duration_s=outcome.duration_s,
            log=f"logs/{HOOK_LOG}",
        )
    )
    if outcome.failure:
        raise EnvironmentUnfit(outcome.failure, hint=f"what it printed is in {log}")


def _joined(*texts: str) -> str:
    return "; ".join(text for text in texts if text)
