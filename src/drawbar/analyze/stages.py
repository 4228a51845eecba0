"""The input's stages over all ranks: where their threads' time went, and how full the queues between them were."""

from __future__ import annotations

from drawbar.analyze.schema import ReadingResult, StageResult
from drawbar.analyze.timeline import Run
from drawbar.journal import InputReport, InputStage

_ORDER = ("fetch", "split", "shuffle", "decode", "batch")


def stage_results(run: Run) -> list[StageResult]:
    """In the order of an image's way. Warm-up included: the loaders count from start to drain."""
    events: list[InputStage] = [event for rank in run.ranks for event in rank.journal.of(InputStage)]
    results = []
    for name in _ORDER:
        mine = [event for event in events if event.stage == name]
        if mine:
            results.append(_stage(name, mine))
    return [*results, *_copy(run)] if results else []


def _stage(name: str, events: list[InputStage]) -> StageResult:
    queues = [event.queue_mean / event.queue_capacity for event in events if event.queue_capacity > 0]
    return _result(
        name,
        busy_s=sum(event.busy_s for event in events),
        wait_in_s=sum(event.wait_in_s for event in events),
        wait_out_s=sum(event.wait_out_s for event in events),
        threads=sum(event.threads for event in events),
        items=sum(event.items for event in events),
        num_bytes=sum(event.bytes for event in events),
        queue_fill=sum(queues) / len(queues) if queues else None,
    )


def _copy(run: Run) -> list[StageResult]:
    """The copy to the device belongs to the step: what is not copying is waiting for a batch, or computing. Where steps
    do not tell it apart (on a GPU, where it runs behind the host) there is none."""
    ranks = [rank for rank in run.ranks if len(rank.measured)]
    copy_s = sum(float(rank.measured.copy_s.sum()) for rank in ranks)
    if not copy_s:
        return []
    wait_s = sum(float(rank.measured.data_wait_s.sum()) for rank in ranks)
    step_s = sum(float(rank.measured.step_s.sum()) for rank in ranks)
    samples = sum(int(rank.measured.samples.sum()) for rank in ranks)
    copied = _result(
        "copy",
        busy_s=copy_s,
        wait_in_s=wait_s,
        wait_out_s=max(0.0, step_s - copy_s - wait_s),
        threads=len(ranks),
        items=samples,
        num_bytes=samples * run.recipe.input.image_size**2 * 3,
        queue_fill=None,
    )
    return [copied]


def _result(
    name: str,
    *,
    busy_s: float,
    wait_in_s: float,
    wait_out_s: float,
    threads: int,
    items: int,
    num_bytes: int,
    queue_fill: float | None,
) -> StageResult:
    total_s = busy_s + wait_in_s + wait_out_s
    return StageResult(
        stage=name,
        busy=busy_s / total_s if total_s > 0 else None,
        blocked_on_input=wait_in_s / total_s if total_s > 0 else None,
        blocked_on_output=wait_out_s / total_s if total_s > 0 else None,
        busy_s=busy_s,
        threads=threads,
        items=items,
        bytes=num_bytes,
        queue_fill=queue_fill,
    )


def input_reports(run: Run) -> list[InputReport]:
    return [event for rank in run.ranks for event in rank.journal.of(InputReport)]


def reading_result(run: Run) -> ReadingResult | None:
    reports = input_reports(run)
    if not reports:
        return None
    return ReadingResult(
        request_bytes=_extremes([report.request_bytes for report in reports]),
        read_ahead=_extremes([report.read_ahead for report in reports]),
        lanes=_extremes([report.lanes for report in reports]),
        tuned=sorted({name for report in reports for name in report.tuned}),
    )


def first_batch_s(run: Run) -> float | None:
    """Of the slowest rank; None where none got a batch."""
    return max((report.first_batch_s for report in input_reports(run) if report.first_batch_s > 0), default=None)


def fallback_images(run: Run) -> int | None:
    """None where no rank told."""
    reports = input_reports(run)
    return sum(report.fallback_images for report in reports) if reports else None


def _extremes(values: list[int]) -> list[int]:
    return [min(values), max(values)]
