"""A made-up run to quality whose figures are known beforehand: `synthetic_run` with evaluations between its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from drawbar.journal import DataSet, Evaluation, Event, Step, TrainingStart
from tests.synthetic_run import START_T, SyntheticRun, synthetic_run

STEP_S, PAUSE_S, OVERHEAD_S = 1.0, 4.0, 0.05
"""The first step takes three times as long; of a pause 0.05 s are no evaluation."""
IMAGES = 100
TOP1 = (0.2, 0.5, 0.7, 0.8)
EVERY = 6
"""24 steps, warm-up included: evaluations after 6, 12, 18 and 24."""


def quality_run(
    target: float | None = 0.7, *, on_clock: bool = True, init_s: float = 60.0, ranks: int = 2
) -> SyntheticRun:
    """Ends as a real run does: at the target."""
    wanted = {} if target is None else {"top1": target}
    met = next((i for i, top1 in enumerate(TOP1) if target is not None and top1 >= target), None)
    count = EVERY * len(TOP1) if met is None else EVERY * (met + 1)
    overrides = {
        "data": {"url": "s3://b/train", "eval_url": "s3://b/validation"},
        "eval": {"every_steps": EVERY, "on_clock": on_clock},
        "quality": {"target": wanted},
        "train": {"batch_size": 8, "warmup_steps": 3, "steps": EVERY * len(TOP1) - 3},
    }
    run = synthetic_run(ranks=ranks, steps=count - 3, warmup_steps=3, step_s=STEP_S, overrides=overrides)
    assert run.recipe.train.steps == EVERY * len(TOP1) - 3
    for rank, events in run.ranks.items():
        run.ranks[rank] = list(_with_evaluations(events, rank, ranks, init_s))
    found = DataSet(t=START_T - 8, role="validation", shards=2, size_bytes=10**6, records=IMAGES, manifest=True)
    assert run.launcher is not None
    run.launcher.insert(2, found)
    return run


def _with_evaluations(events: list[Event], rank: int, ranks: int, init_s: float) -> Iterator[Event]:
    shift_s = 0.0
    tags: list[str] = []
    for event in events:
        if not isinstance(event, Step):
            yield dataclasses.replace(event, t=event.t + shift_s)
            continue
        if event.step == 0:
            yield TrainingStart(t=event.start_t, init_s=init_s)
        step = dataclasses.replace(
            event,
            t=event.t + shift_s,
            start_t=event.start_t + shift_s,
            end_t=event.end_t + shift_s,
            tags=list(tags),
        )
        yield step
        tags = []
        if (event.step + 1) % EVERY == 0:
            number = (event.step + 1) // EVERY
            share = [len(range(IMAGES * r // ranks, IMAGES * (r + 1) // ranks)) for r in range(ranks)]
            yield Evaluation(
                t=step.end_t + PAUSE_S,
                step=event.step,
                epoch=1,
                start_t=step.end_t + OVERHEAD_S,
                end_t=step.end_t + PAUSE_S,
                images=share[rank],
                all_images=IMAGES,
                set_images=IMAGES,
                data_wait_s=1.0,
                metrics={"top1": TOP1[number - 1], "loss": 2.0 - TOP1[number - 1]},
            )
            shift_s += PAUSE_S
            tags = ["after_evaluation"]
