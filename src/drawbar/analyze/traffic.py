"""Bytes: what clients received per endpoint, and what the other side says it served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np

from drawbar.analyze.schema import (
    BadRecordResult,
    DataSetResult,
    EndpointResult,
    InputResult,
    Latency,
)
from drawbar.analyze.stages import fallback_images, first_batch_s, reading_result, stage_results
from drawbar.analyze.throughput import percentiles
from drawbar.analyze.timeline import Run
from drawbar.journal import BadRecord, DataSet, EndpointChange, InputTotals, Request, Witness

MAX_BAD_RECORDS = 100
"""Named in a result; the counts have them all."""


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
        replaced_images=summed("replaced_images"),
        bad_records=bad_records(run),
        fallback_images=fallback_images(run),
        padded_images=summed("padded_images"),
        # The rank that read most decides: its second pass over its share cannot be cold.
        epochs=max(total.epochs for total in known) if complete else None,
        eval_bytes=sum(request.got_bytes for rank in run.ranks for request in rank.requests if request.kind == "eval"),
        reread_share=reread_share(request for rank in run.ranks for request in rank.requests),
        first_batch_s=first_batch_s(run),
        reading=reading_result(run),
        stages=stage_results(run),
    )


def bad_records(run: Run) -> list[BadRecordResult]:
    told = {(event.key, event.offset): event.reason for event in cast(list[BadRecord], run.events(BadRecord))}
    return [
        BadRecordResult(shard=shard, offset=offset, reason=reason)
        for (shard, offset), reason in sorted(told.items())[:MAX_BAD_RECORDS]
    ]


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
