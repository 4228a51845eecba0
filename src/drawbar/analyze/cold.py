"""Was the start cold? What was done on each host, and what can be shown for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from drawbar.analyze.schema import CacheResult, CacheState, HostCache, StorageFlushResult
from drawbar.analyze.timeline import Run
from drawbar.analyze.traffic import reread_share, total_delta, witness_deltas
from drawbar.journal import Cache, RunStart, StorageFlush
from drawbar.storage.urls import parse_url

COLD_DISK_SHARE = 0.95
"""Of the bytes served: a store that read at least this much from disk had (almost) nothing in its page cache."""
COLD_RESIDENT_FRACTION = 0.01
"""Of a folder's bytes: less than this in the page cache counts as cold."""


def cache_result(run: Run) -> CacheResult:
    launcher: RunStart | None = run.launcher.first(RunStart) if run.launcher else None
    events = cast(list[Cache], run.events(Cache))
    wanted = events[0].wanted if events else run.recipe.cache.start
    hosts = [_host(event, launcher.node if launcher else "") for event in events]
    hosts.sort(key=lambda host: host["node"])
    unflushed = _unflushed(run, wanted, hosts)
    gateway_bytes = total_delta(witness_deltas(run, "gateway"))
    disk_read_bytes = total_delta(witness_deltas(run, "volume"))
    share = disk_read_bytes / gateway_bytes if gateway_bytes and disk_read_bytes is not None else None
    fractions = [host["resident_fraction"] for host in hosts]
    known = [fraction for fraction in fractions if fraction is not None]
    fraction = max(known) if known and len(known) == len(fractions) else None
    note = "; ".join([*_by_host(hosts, "note"), *([f"nothing flushed on {', '.join(unflushed)}"] if unflushed else [])])
    return CacheResult(
        wanted=wanted,
        state="not asked" if wanted != "cold" else _state(run, _first_share(run, share), fraction, note),
        method="; ".join(_by_host(hosts, "method")),
        resident_fraction=fraction,
        gateway_bytes=gateway_bytes,
        disk_read_bytes=disk_read_bytes,
        disk_share=share,
        note=note,
        hosts=hosts,
        storage_flush=_storage_flush(run),
    )


def _first_share(run: Run, disk_share: float | None) -> float | None:
    """Of a run to quality, whose later epochs may come from a cache: disk reads / the bytes served for the first
    time."""
    if disk_share is None or not run.recipe.quality.target:
        return disk_share
    requests = (request for rank in run.ranks for request in rank.requests)
    reread = reread_share(requests, ("data", "eval")) or 0.0
    return disk_share / (1 - reread)


def _host(event: Cache, launcher_node: str) -> HostCache:
    return HostCache(
        node=event.node or launcher_node,
        method=event.method,
        resident_fraction=event.resident_fraction,
        note=event.note,
    )


def _unflushed(run: Run, wanted: str, hosts: Sequence[HostCache]) -> list[str]:
    """Hosts with ranks that read files there, and that told of no flush."""
    if wanted != "cold" or run.recipe.input.source != "data" or not parse_url(run.recipe.data.url).is_folder:
        return []
    return sorted({rank.node for rank in run.ranks if rank.node} - {host["node"] for host in hosts})


def _by_host(hosts: Sequence[HostCache], what: str) -> list[str]:
    """One text where all say the same, else each with its host; empty ones left out."""
    texts = {host["node"]: str(host[what]) for host in hosts}  # type: ignore[literal-required]
    if len(set(texts.values())) == 1:
        everywhere = f", on each of {len(hosts)} hosts" if len(hosts) > 1 and what == "method" else ""
        return [text + everywhere for text in list(texts.values())[:1] if text]
    return [f"{node}: {text}" for node, text in texts.items() if text]


def _state(run: Run, disk_share: float | None, resident_fraction: float | None, note: str) -> CacheState:
    if disk_share is not None:
        return "cold" if disk_share >= COLD_DISK_SHARE else "not shown cold"
    if resident_fraction is None or not parse_url(run.recipe.data.url).is_folder:
        return "unknown"
    if not 0 <= resident_fraction < COLD_RESIDENT_FRACTION:
        return "not shown cold"
    # A folder on a local disk is cached by this host alone, so an empty page cache is the proof. A note says that
    # something speaks against that: another host's memory behind a network file system, for one.
    return "unknown" if note else "cold"


def _storage_flush(run: Run) -> StorageFlushResult | None:
    event = next(iter(cast(list[StorageFlush], run.events(StorageFlush))), None)
    if event is None:
        return None
    return StorageFlushResult(command=event.command, exit_code=event.exit_code, duration_s=event.duration_s)
