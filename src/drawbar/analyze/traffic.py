"""Bytes: what clients received per endpoint, what the other side says it served, and whether that came from disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from drawbar.analyze.schema import CacheResult, CacheState, EndpointResult, InputResult, Latency
from drawbar.analyze.throughput import percentiles
from drawbar.analyze.timeline import Run
from drawbar.journal import Cache, InputTotals, Request, Witness

COLD_DISK_SHARE = 0.95
"""Of the bytes served: a store that read at least this much from disk had (almost) nothing in its page cache."""
COLD_RESIDENT_FRACTION = 0.01
"""Of a folder's bytes: no more than this in the page cache counts as cold."""


def witness_deltas(run: Run, source: str) -> dict[str, int | None]:
    """Target -> bytes counted between the `before` and the `after` reading; None where one is missing or the counter
    went back (its process was restarted in between)."""
    readings: dict[tuple[str, str], int] = {}
    for event in cast(list[Witness], run.events(Witness)):
        if event.source == source:
            readings[event.target.rstrip("/"), event.when] = event.count_bytes
    deltas: dict[str, int | None] = {}
    for target in sorted({target for target, _ in readings}):
        before, after = readings.get((target, "before")), readings.get((target, "after"))
        deltas[target] = after - before if before is not None and after is not None and after >= before else None
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
    served = witness_deltas(run, "gateway")
    return [_endpoint(url, requests.get(url, []), served.get(url)) for url in sorted({*requests, *served})]


def _endpoint(url: str, requests: Sequence[Request], gateway_bytes: int | None) -> EndpointResult:
    data = [request for request in requests if request.kind == "data"]
    good = [request for request in data if not request.error]
    return EndpointResult(
        url=url,
        requests=len(requests),
        data_requests=len(data),
        bytes=sum(request.got_bytes for request in requests),
        data_bytes=sum(request.got_bytes for request in data),
        errors=sum(bool(request.error) for request in requests),
        retries=sum(request.attempt > 0 for request in requests),
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
        planned_bytes=summed("planned_bytes"),
        received_bytes=summed("received_bytes"),
        trained_bytes=summed("trained_bytes"),
        discarded_bytes=summed("discarded_bytes"),
        inflated_bytes=summed("inflated_bytes"),
        decoded_images=summed("decoded_images"),
        trained_images=summed("trained_images"),
        bad_images=summed("bad_images"),
        # The rank that read most decides: its second pass over its share cannot be cold.
        epochs=max(total.epochs for total in known) if complete else None,
    )


def cache_result(run: Run) -> CacheResult:
    event = next(iter(cast(list[Cache], run.events(Cache))), None)
    wanted = event.wanted if event else run.recipe.cache.start
    gateway_bytes = total_delta(witness_deltas(run, "gateway"))
    disk_read_bytes = total_delta(witness_deltas(run, "volume"))
    share = disk_read_bytes / gateway_bytes if gateway_bytes and disk_read_bytes is not None else None
    resident = event.resident_fraction if event else None
    return CacheResult(
        wanted=wanted,
        state="not asked" if wanted != "cold" else _cache_state(run, share, resident),
        method=event.method if event else "",
        resident_fraction=resident,
        gateway_bytes=gateway_bytes,
        disk_read_bytes=disk_read_bytes,
        disk_share=share,
        note=event.note if event else "",
    )


def _cache_state(run: Run, disk_share: float | None, resident_fraction: float | None) -> CacheState:
    if disk_share is not None:
        return "cold" if disk_share >= COLD_DISK_SHARE else "not shown cold"
    # For a folder the page cache is this host's own, so its emptiness at the start is the proof.
    if not run.recipe.data.url.startswith("s3://") and resident_fraction is not None:
        return "cold" if resident_fraction <= COLD_RESIDENT_FRACTION else "not shown cold"
    return "unknown"
