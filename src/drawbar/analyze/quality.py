"""Time to quality from the journal, by the rules of docs/quality.md, and what it is made of. Judges nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from drawbar.analyze.checkpoints import first_step
from drawbar.analyze.schema import EvaluationResult, QualityResult
from drawbar.analyze.throughput import GlobalSteps, global_steps
from drawbar.analyze.timeline import Run
from drawbar.epochs import Epochs, is_met
from drawbar.journal import DataSet, Evaluation, TrainingStart

FREE_INIT_S = 20 * 60.0
"""What MLPerf Training v0.6 allows before the clock for building the model."""


def training_records(run: Run) -> int | None:
    """Of the training set, as the launcher found it; None where they are not known."""
    sets = cast(list[DataSet], run.events(DataSet))
    return next((found.records for found in sets if found.role == "training"), None)


@dataclass(frozen=True, kw_only=True)
class GlobalEvaluation:
    """One evaluation of which every rank wrote. Times are rank 0's."""

    step: int
    start_t: float
    """The latest start: until then some rank was still training."""
    end_t: float
    known_t: float
    """The earliest end: from here on some part of the system knows the metrics."""
    events: list[Evaluation]
    """In rank order."""


def global_evaluations(run: Run) -> list[GlobalEvaluation]:
    """In order of steps."""
    of_ranks = [
        {event.step: event for event in cast(list[Evaluation], rank.journal.of(Evaluation))} for rank in run.ranks
    ]
    if not of_ranks:
        return []
    found = []
    for step in sorted(set.intersection(*(set(events) for events in of_ranks))):
        events = [by_step[step] for by_step in of_ranks]
        starts = [rank.clock.at(event.start_t) for rank, event in zip(run.ranks, events, strict=True)]
        ends = [rank.clock.at(event.end_t) for rank, event in zip(run.ranks, events, strict=True)]
        found.append(
            GlobalEvaluation(step=step, start_t=max(starts), end_t=max(ends), known_t=min(ends), events=events)
        )
    return found


def clock_start_t(run: Run) -> float | None:
    """When the first rank began to read the training set; None for a journal that does not say."""
    starts = [rank.clock.at(event.t) for rank in run.ranks if (event := rank.journal.first(TrainingStart)) is not None]
    return min(starts, default=None)


def quality_result(run: Run) -> QualityResult | None:
    """None for a run that evaluates nothing, or that ended before its clock was started."""
    recipe, start_t = run.recipe, clock_start_t(run)
    if not recipe.data.eval_url or start_t is None:
        return None
    target = recipe.quality.targets
    evaluations = global_evaluations(run)
    met = next((item for item in evaluations if is_met(target, item.events[0].metrics)), None)
    until = [item for item in evaluations if met is None or item.step <= met.step]
    steps = _steps(run, start_t, met.step if met else None)
    train_s = float(steps.duration_s.sum()) if steps else 0.0
    evaluation_s = sum((item.known_t if item is met else item.end_t) - item.start_t for item in until)
    stop_t = met.known_t if met else max([start_t, *(item.end_t for item in until), *_last_end(steps)])
    inits = [event.init_s for event in cast(list[TrainingStart], run.events(TrainingStart))]
    init_counted_s = max(0.0, max(inits) - FREE_INIT_S)
    on_clock_s = stop_t - start_t + init_counted_s - (0.0 if recipe.eval.on_clock else evaluation_s)
    count, samples = (int(steps.step[-1]) + 1, int(steps.samples.sum())) if steps else (0, 0)
    both_s = train_s + evaluation_s
    return QualityResult(
        target=target,
        reached=(met is not None) if target else None,
        # A resumed run does not know how long the steps before it took.
        time_to_quality_s=on_clock_s if met and not first_step(run) else None,
        time_s=on_clock_s,
        on_clock=recipe.eval.on_clock,
        init_s=max(inits),
        init_counted_s=init_counted_s,
        seed=recipe.input.seed,
        steps=count,
        epochs=_epochs(run, count),
        limit_epochs=recipe.quality.limit_epochs,
        samples=samples,
        train_s=train_s,
        train_images_per_s=samples / train_s if train_s > 0 else None,
        evaluation_s=evaluation_s,
        evaluation_share=evaluation_s / both_s if both_s > 0 else 0.0,
        other_s=on_clock_s - train_s - (evaluation_s if recipe.eval.on_clock else 0.0),
        evaluations=[_evaluation(run, item, start_t, target) for item in evaluations],
    )


def _steps(run: Run, start_t: float, last: int | None) -> GlobalSteps | None:
    """Those that all ranks finished, up to number `last`."""
    steps = global_steps([rank.all_steps for rank in run.ranks], start_t)
    if steps is None or last is None:
        return steps
    keep = int(np.searchsorted(steps.step, last, side="right"))
    if not keep:
        return None
    return GlobalSteps(
        step=steps.step[:keep],
        start_t=steps.start_t[:keep],
        end_t=steps.end_t[:keep],
        samples=steps.samples[:keep],
        loss=steps.loss[:keep],
    )


def _last_end(steps: GlobalSteps | None) -> list[float]:
    return [float(steps.end_t[-1])] if steps else []


def _epochs(run: Run, steps: int) -> float | None:
    records = training_records(run)
    return Epochs.of(run.recipe, records).after(steps) if records else None


def _evaluation(run: Run, item: GlobalEvaluation, start_t: float, target: dict[str, float]) -> EvaluationResult:
    first, length_s = item.events[0], max(item.end_t - item.start_t, 1e-9)
    waits = [event.data_wait_s / max(event.end_t - event.start_t, 1e-9) for event in item.events]
    return EvaluationResult(
        step=item.step + 1,
        epoch=first.epoch,
        epochs=_epochs(run, item.step + 1),
        start_s=item.start_t - start_t,
        end_s=item.end_t - start_t,
        known_s=item.known_t - start_t,
        images=sum(event.images for event in item.events),
        images_per_s=sum(event.images for event in item.events) / length_s,
        data_wait_fraction=sum(waits) / len(waits),
        metrics=first.metrics,
        met=is_met(target, first.metrics),
    )
