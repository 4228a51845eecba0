"""result.json: one run's figures under the names of the stable contract, made from the journal alone.

Making it twice gives the same bytes: nothing of the machine or the moment that analyses enters it.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from drawbar.analyze.checkpoints import checkpoints_result, resumed_result, weights_result
from drawbar.analyze.facts import Facts, load_facts
from drawbar.analyze.failure import first_cause
from drawbar.analyze.schema import (
    RESULT_SCHEMA,
    ModelResult,
    RankResult,
    Result,
    SummariesResult,
    Throughput,
    Verdict,
)
from drawbar.analyze.throughput import (
    accelerator_utilization,
    data_wait,
    images_per_s,
    percentiles,
    rate_of,
    step_shares,
    total_images_per_s,
)
from drawbar.analyze.timeline import RankTimeline
from drawbar.analyze.traffic import input_totals
from drawbar.analyze.validity import judge
from drawbar.journal import InputTotals, ModelBuilt, Step, Summary

RESULT_NAME = "result.json"


def analyze(run_dir: Path) -> Result:
    """Raises InputError where there is no journal or no recipe, RecipeError where the recipe cannot be read."""
    return result_of(load_facts(run_dir))


def result_of(facts: Facts) -> Result:
    run, ranks = facts.run, facts.run.ranks
    per_rank = images_per_s(ranks, facts.interval)
    totals = input_totals(run)
    waits = data_wait(ranks)
    first = next((rank.start for rank in ranks if rank.start), None)
    return Result(
        schema=RESULT_SCHEMA,
        name=run.recipe.name,
        status=facts.status,
        error=first_cause(run),
        images_per_s=_throughput(facts, per_rank),
        interval_s=facts.interval.measured_s if facts.interval else None,
        step_s=percentiles(np.concatenate([rank.measured.step_s for rank in ranks] or [np.empty(0)])),
        world_size=run.recipe.launch.ranks,
        steps=0 if facts.steps is None else len(facts.steps.step),
        warmup_steps=min((len(rank.warmup) for rank in ranks), default=0),
        samples=sum(int(rank.measured.samples.sum()) for rank in ranks),
        read_bytes=sum(endpoint["bytes"] for endpoint in facts.endpoints),
        decoded_images=facts.input["decoded_images"],
        epochs=facts.input["epochs"],
        data_wait_fraction=waits.mean if waits else None,
        worst_rank=waits.worst_rank if waits else None,
        worst_rank_data_wait_fraction=waits.worst if waits else None,
        au=accelerator_utilization(ranks),
        model=_model(ranks),
        input=facts.input,
        endpoints=facts.endpoints,
        ranks=[_rank(rank, rate, total) for rank, rate, total in zip(ranks, per_rank, totals, strict=True)],
        hosts=facts.hosts,
        data_set=facts.data_set,
        cache=facts.cache,
        checkpoints=checkpoints_result(run),
        resumed=resumed_result(run),
        weights=weights_result(run),
        summaries=_summaries(ranks),
        quality=facts.quality,
        validity=judge(facts),
        verdict=_verdict(facts),
        started_unix_s=first.unix_s if first else None,
        recipe_sha256=run.recipe.sha256(),
        dataset_sha256=first.dataset_sha256 if first else "",
        environment=_environment(ranks),
    )


def _throughput(facts: Facts, per_rank: list[float | None]) -> Throughput:
    steps = facts.steps
    rate = rate_of(steps.samples, steps.duration_s) if steps is not None else None
    return Throughput(
        total=total_images_per_s(per_rank),
        mean=rate.mean if rate else None,
        stderr=rate.stderr if rate else None,
        jitter=rate.jitter if rate else None,
        n=rate.n if rate else 0,
        per_rank=per_rank,
    )


def _model(ranks: list[RankTimeline]) -> ModelResult | None:
    built: ModelBuilt | None = next((event for rank in ranks for event in rank.journal.of(ModelBuilt)), None)
    if built is None:
        return None
    first: list[Step] = ranks[0].journal.of(Step)
    compiled = [s for rank in ranks for s in rank.journal.of(Step) if "compiled" in s.tags]
    return ModelResult(
        name=built.model,
        parameters=built.parameters,
        gradient_bytes=built.gradient_bytes,
        emulated_step_s=built.emulated_step_s or None,
        skipped_updates=sum("update_skipped" in step.tags for step in first),
        compiled_s=max((step.end_t - step.start_t for step in compiled), default=None),
    )


def _rank(rank: RankTimeline, rate: float | None, totals: InputTotals | None) -> RankResult:
    shares = step_shares(rank.measured)
    return RankResult(
        rank=rank.rank,
        node=rank.node,
        pid=rank.start.pid if rank.start else None,
        endpoint=rank.start.endpoint if rank.start else "",
        status=rank.status,
        images_per_s=rate,
        steps=len(rank.measured),
        warmup_steps=len(rank.warmup),
        samples=int(rank.measured.samples.sum()),
        step_s=percentiles(rank.measured.step_s),
        data_wait_s=float(rank.measured.data_wait_s.sum()),
        data_wait_fraction=shares["data_wait"] if shares else None,
        shares=shares,
        requests=len(rank.requests),
        received_bytes=sum(request.got_bytes for request in rank.requests),
        errors=sum(bool(request.error) for request in rank.requests),
        retries=sum(request.attempt > 0 for request in rank.requests),
        decoded_images=totals.decoded_images if totals else None,
        trained_images=totals.trained_images if totals else None,
        bad_images=totals.bad_images if totals else None,
        clock_offset_s=rank.clock.offset_s[0] if rank.clock.offset_s else None,
        clock_uncertainty_s=rank.clock.uncertainty_s,
    )


def _summaries(ranks: list[RankTimeline]) -> SummariesResult | None:
    events = [event for rank in ranks for event in rank.journal.of(Summary)]
    return SummariesResult(written=len(events), write_s=sum(event.write_s for event in events)) if events else None


def _verdict(facts: Facts) -> Verdict:
    """Which stage binds takes ceilings to compare with. What the waits alone say is said, and no more."""
    waits = data_wait(facts.run.ranks)
    if waits is None:
        reason = "no step was measured"
    else:
        reason = (
            "the stages' ceilings were not measured : "
            f"{waits.mean * 100:.0f} % of the step time was spent waiting for data, "
            "which storage, decoding or the reading plan may have caused"
        )
    return Verdict(
        stage="undecided",
        reason=reason,
        data_wait_fraction=waits.mean if waits else None,
        worst_rank=waits.worst_rank if waits else None,
        worst_rank_data_wait_fraction=waits.worst if waits else None,
    )


def _environment(ranks: list[RankTimeline]) -> dict[str, Any]:
    nodes: dict[str, Any] = {}
    for rank in ranks:
        if rank.start is not None:
            nodes.setdefault(rank.start.node, rank.start.environment)
    return nodes


def finite(value: Any) -> Any:
    """The same tree with null for what JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def to_json(result: Result) -> str:
    """Strict JSON, with a line end: never NaN."""
    return json.dumps(finite(result), indent=2, allow_nan=False) + "\n"


def write_result(run_dir: Path) -> Result:
    """Analyses and writes `result.json` beside the journal."""
    result = analyze(run_dir)
    write_whole(run_dir / RESULT_NAME, to_json(result))
    return result


def write_whole(path: Path, text: str) -> None:
    """The old file or the whole new one, never a part: readers may look at any time."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # A host name or message may hold half a surrogate pair, which UTF-8 has no bytes for.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
