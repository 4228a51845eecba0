"""Bytes: what clients received per endpoint, what the other side says it served, and whether that came from disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np

from drawbar.analyze.schema import CacheResult, CacheState, DataSetResult, EndpointResult, InputResult, Latency
from drawbar.analyze.stages import first_batch_s, reading_result, stage_results
from drawbar.analyze.throughput import percentiles
from drawbar.analyze.timeline import Run
from drawbar.journal import Cache, DataSet, EndpointChange, InputTotals, Request, Witness

COLD_DISK_SHARE = 0.95
"""Of the bytes served: a store that read at least this much from disk had (almost) nothing in its page cache."""
COLD_RESIDENT_FRACTION = 0.01
"""Of a folder's bytes: less than this in the page cache counts as cold."""


def witness_deltas(run: Run, source: str) -> dict[str, int | None]:
    """Target -> bytes counted between the `before` and the `after` reading; None where one is missing or contradicted
    or the counter's process was restarted in between."""
    readings: dict[tuple[str, str], set[int]] = {}
    starts: dict[str, set[float]] = {}
    for event in cast(list[Witness], run.events(Witness)):
        if event.source == source:
            readings.setdefault((event.target.rstrip("/"), event.when), set()).add(event.count_bytes)
            starts.setdefault(event.target.rstrip("/"), set()).add(event.since_unix_s)
    once = {key: min(counts) for key, counts in readings.items() if len(counts) == 1}
    deltas: dict[str, int | None] = {}
    for target in sorted({target for target, _ in readings}):
        before, after = once.get((target, "before")), once.get((target, "after"))
        if before is None or after is None or after < before or len(starts[target]) > 1:
            deltas[target] = None
        else:
            deltas[target] = after - before
    return deltas


def total_delta(deltas: dict[str, int | None]) -> int | None:
    """Over all targets; None where there is none or one of them is unknown: a part is no total."""
    known = [delta for delta in deltas.values() if delta is not None]
    return sum(known) if known and len(known) == len(deltas) else None


def endpoint_results(run: Run) -> list[EndpointResult]:
    """One for each endpoint that was asked or that has a witness, in order of address."""
    requests: dict[str, list[Request]] = {}
    for rank in run.ranks:
        for request in rank.requests:
            requests.setdefault(request.endpoint.rstrip("/"), []).append(request)
    changes = Counter(
        (change.endpoint.rstrip("/"), change.change)
        for rank in run.ranks
        for change in cast(list[EndpointChange], rank.journal.of(EndpointChange))
    )
    served = witness_deltas(run, "gateway")
    urls = sorted({*requests, *served, *(url for url, _ in changes)})
    return [_endpoint(url, requests.get(url, []), changes, served.get(url)) for url in urls]


def _endpoint(
    url: str, requests: Sequence[Request], changes: Mapping[tuple[str, str], int], gateway_bytes: int | None
) -> EndpointResult:
    data = [request for request in requests if request.kind == "data"]
    good = [request for request in data if not request.error]
    return EndpointResult(
        url=url,
        requests=len(requests),
        data_requests=len(data),
        bytes=sum(request.got_bytes for request in requests),
        data_bytes=sum(request.got_bytes for request in data),
        errors=sum(bool(request.error) and request.kind != "probe" for request in requests),
        retries=sum(request.attempt > 0 for request in requests),
        busy=sum(request.status in (429, 503) and request.kind != "probe" for request in requests),
        rereads=sum(request.reread and request.attempt == 0 for request in requests),
        corrupt=changes.get((url, "corrupt"), 0),
        set_aside=changes.get((url, "set_aside"), 0),
        returned=changes.get((url, "returned"), 0),
        probes=sum(request.kind == "probe" for request in requests),
        latency_s=Latency(
            first_byte=percentiles(np.array([request.first_byte_s for request in good])),
            total=percentiles(np.array([request.total_s for request in good])),
        ),
        gateway_bytes=gateway_bytes,
    )


def input_totals(run: Run) -> list[InputTotals | None]:
    """In rank order; None for a rank that wrote none."""
    return [rank.journal.first(InputTotals) for rank in run.ranks]


def input_result(run: Run) -> InputResult:
    totals = input_totals(run)
    known = [total for total in totals if total is not None]
    complete = bool(known) and len(known) == len(totals)

    def summed(name: str) -> int | None:
        return sum(getattr(total, name) for total in known) if complete else None

    return InputResult(
        source=run.recipe.input.source,
        planned_bytes=summed("planned_bytes"),
        received_bytes=summed("received_bytes"),
        trained_bytes=summed("trained_bytes"),
        discarded_bytes=summed("discarded_bytes"),
        inflated_bytes=summed("inflated_bytes"),
        decoded_images=summed("decoded_images"),
        trained_images=summed("trained_images"),
        bad_images=summed("bad_images"),
        padded_images=summed("padded_images"),
        # The rank that read most decides: its second pass over its share cannot be cold.
        epochs=max(total.epochs for total in known) if complete else None,
        eval_bytes=sum(request.got_bytes for rank in run.ranks for request in rank.requests if request.kind == "eval"),
        reread_share=reread_share(request for rank in run.ranks for request in rank.requests),
        first_batch_s=first_batch_s(run),
        reading=reading_result(run),
        stages=stage_results(run),
    )


def reread_share(requests: Iterable[Request], kinds: Sequence[str] = ("data",)) -> float | None:
    """Of the bytes of these kinds that arrived, the part that some rank of this run had fetched before; None without
    any."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for request in requests:
        if request.kind in kinds and not request.error and request.got_bytes > 0:
            ranges.setdefault(request.key, []).append((request.offset, request.offset + request.got_bytes))
    total = sum(end - start for pieces in ranges.values() for start, end in pieces)
    if not total:
        return None
    different = 0
    for pieces in ranges.values():
        covered = min(pieces)[0]
        for start, end in sorted(pieces):
            different += max(0, end - max(start, covered))
            covered = max(covered, end)
    return 1 - different / total


def data_set_result(run: Run) -> DataSetResult | None:
    event = next((found for found in cast(list[DataSet], run.events(DataSet)) if found.role == "training"), None)
    if event is None:
        return None
    return DataSetResult(
        url=run.recipe.data.url,
        shards=event.shards,
        bytes=event.size_bytes,
        records=event.records,
        manifest=event.manifest,
        missing_shards=event.missing,
        ignored_shards=event.ignored,
    )


def cache_result(run: Run) -> CacheResult:
    event = next(iter(cast(list[Cache], run.events(Cache))), None)
    wanted = event.wanted if event else run.recipe.cache.start
    gateway_bytes = total_delta(witness_deltas(run, "gateway"))
    disk_read_bytes = total_delta(witness_deltas(run, "volume"))
    share = disk_read_bytes / gateway_bytes if gateway_bytes and disk_read_bytes is not None else None
    return CacheResult(
        wanted=wanted,
        state="not asked" if wanted != "cold" else _cache_state(run, _first_share(run, share), event),
        method=event.method if event else "",
        resident_fraction=event.resident_fraction if event else None,
        gateway_bytes=gateway_bytes,
        disk_read_bytes=disk_read_bytes,
        disk_share=share,
        note=event.note if event else "",
    )


def _first_share(run: Run, disk_share: float | None) -> float | None:
    """Of a run to quality, whose later epochs may come from a cache: disk reads / the bytes served for the first
    time."""
    if disk_share is None or not run.recipe.quality.target:
        return disk_share
    requests = (request for rank in run.ranks for request in rank.requests)
    return disk_share / (1 - (reread_share(requests, ("data", "eval")) or 0.0))


def _cache_state(run: Run, disk_share: float | None, event: Cache | None) -> CacheState:
    if disk_share is not None:
        return "cold" if disk_share >= COLD_DISK_SHARE else "not shown cold"
    if event is None or event.resident_fraction is None or run.recipe.data.url.startswith("s3://"):
        return "unknown"
    if not 0 <= event.resident_fraction < COLD_RESIDENT_FRACTION:
        return "not shown cold"
    # A folder on a local disk is cached by this host alone, so an empty page cache is the proof. A note says that
    # something speaks against that: another host's memory behind a network file system, for one.
    return "unknown" if event.note else "cold"
