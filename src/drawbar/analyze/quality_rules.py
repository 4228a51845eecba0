"""Rules on evaluations: was each made when it was due, on every image of the set once, by all ranks alike; and what of
time to quality needs a sentence."""

from __future__ import annotations

from itertools import pairwise
from operator import attrgetter
from typing import cast

from drawbar.analyze.checkpoints import first_step
from drawbar.analyze.facts import Facts
from drawbar.analyze.quality import global_evaluations, training_records
from drawbar.analyze.schema import Reason
from drawbar.analyze.timeline import RankTimeline
from drawbar.epochs import EvalPlan, is_met, run_steps
from drawbar.errors import RecipeError
from drawbar.journal import DataSet, Evaluation, Step, TrainingStart

SLACK_S = 1e-3
"""By which a GPU's clock, which times steps, may differ from the host's, which times evaluations."""


def expected_steps(facts: Facts) -> int | None:
    """Of a run of this recipe, warm-up included: up to the evaluation that met the target, if one did. None where the
    recipe counts epochs and nobody wrote down how many records there are."""
    run = facts.run
    target = run.recipe.quality.targets
    for item in global_evaluations(run):
        if is_met(target, item.events[0].metrics):
            return item.step + 1
    try:
        return run_steps(run.recipe, training_records(run))
    except RecipeError:
        return None


def planned_warmup_steps(facts: Facts) -> int:
    """Of this run, which may be the rest of one; it has fewer where it met its target before they were over. Needs
    `expected_steps`."""
    run = facts.run
    return run.recipe.train.steps_from(first_step(run), run_steps(run.recipe, training_records(run)))[0]


def evaluations_complete(facts: Facts) -> Reason | None:
    """Each one that was due, once, on every rank, with equal metrics, of every image of the set."""
    run = facts.run
    if not run.recipe.data.eval_url or facts.status != "ok":
        return None
    expected = "each when it was due, of every image once, alike on all ranks"
    begin, steps = first_step(run), expected_steps(facts)
    try:
        due = [step for step in EvalPlan.of(run.recipe, training_records(run)).due if steps and begin <= step < steps]
    except RecipeError as error:
        return _invalid(expected, error.message)
    for rank in run.ranks:
        events = cast(list[Evaluation], rank.journal.of(Evaluation))
        made = [event.step for event in events]
        if made != due:
            return _invalid(expected, f"after steps {_few(made)} on rank {rank.rank} where {_few(due)} were due")
        if wrong := _outside_its_pause(rank, events):
            return _invalid(expected, wrong)
        if len(rank.journal.of(TrainingStart)) != 1:
            return _invalid(expected, f"not exactly one training_start of rank {rank.rank}")
    counted = [found.records for found in cast(list[DataSet], run.events(DataSet)) if found.role == "validation"]
    for item in global_evaluations(run):
        first, images = item.events[0], sum(event.images for event in item.events)
        if any(event.metrics != first.metrics for event in item.events):
            return _invalid(expected, f"ranks disagree on the metrics after step {item.step}")
        told = [count for event in item.events for count in (event.set_images, event.all_images)]
        known = [count for count in (*counted, *told) if count is not None]
        if any(count != images for count in known):
            return _invalid(expected, f"{images:,} images after step {item.step} of {max(known):,}")
    return None


def _outside_its_pause(rank: RankTimeline, events: list[Evaluation]) -> str:
    """What of a rank's evaluations does not lie between the steps it should lie between; empty where all do."""
    steps = {step.step: step for step in cast(list[Step], rank.journal.of(Step))}
    for event in events:
        before, after = steps.get(event.step), steps.get(event.step + 1)
        if before is None or event.start_t < before.end_t - SLACK_S or event.end_t < event.start_t:
            return f"the evaluation after step {event.step} of rank {rank.rank} began before that step's end"
        if after is not None and (event.end_t > after.start_t + SLACK_S or not after.after_pause):
            return f"the evaluation after step {event.step} of rank {rank.rank} ended within the next step"
    return ""


def explained_pauses(facts: Facts) -> Reason | None:
    """A pause that is called one for an evaluation holds it, and not much else: nothing hides from the throughput."""
    for rank in facts.run.ranks:
        events = {event.step: event for event in cast(list[Evaluation], rank.journal.of(Evaluation))}
        for before, after in pairwise(sorted(cast(list[Step], rank.journal.of(Step)), key=attrgetter("step"))):
            if after.tags and [tag for tag in after.tags if tag.startswith("after_")] == ["after_evaluation"]:
                event = events.get(before.step)
                spent_s = event.end_t - event.start_t if event else 0.0
                pause_s = after.start_t - before.end_t
                if pause_s - spent_s > max(0.1, 0.1 * spent_s):
                    actual = f"{pause_s:.3g} s before step {after.step} of rank {rank.rank}, {spent_s:.3g} s evaluating"
                    return Reason(
                        rule="pauses", expected="as long as the evaluation in it", actual=actual, severity="invalid"
                    )
    return None


def evaluated_on_clock(facts: Facts) -> Reason | None:
    quality = facts.quality
    if quality is None or not quality["target"] or quality["on_clock"]:
        return None
    actual = f"{quality['evaluation_s']:.1f} s of evaluations are left out of time to quality"
    return Reason(rule="evaluation on the clock", expected="counted", actual=actual, severity="qualified")


def trained_in_one_run(facts: Facts) -> Reason | None:
    quality, begin = facts.quality, first_step(facts.run)
    if quality is None or not quality["target"] or not begin:
        return None
    actual = f"resumed after {begin:,} steps, whose time is not known: no time to quality is claimed"
    return Reason(rule="one run to quality", expected="trained from the start", actual=actual, severity="qualified")


def own_validation_set(facts: Facts) -> Reason | None:
    data = facts.run.recipe.data
    if not data.eval_url or data.eval_url != data.url:
        return None
    actual = "the training set itself: the model is judged on what it was shown"
    return Reason(rule="validation set", expected="images that are not trained", actual=actual, severity="qualified")


def validation_counted(facts: Facts) -> Reason | None:
    sets = [found for found in cast(list[DataSet], facts.run.events(DataSet)) if found.role == "validation"]
    if not sets or sets[0].records is not None:
        return None
    actual = "not known before they were read: every shard was read to its end"
    return Reason(rule="validation images", expected="a known number", actual=actual, severity="qualified")


def short_init(facts: Facts) -> Reason | None:
    quality = facts.quality
    if quality is None or not quality["target"] or not quality["init_counted_s"]:
        return None
    actual = f"{quality['init_s'] or 0.0:.0f} s, of which {quality['init_counted_s']:.0f} s count in time to quality"
    return Reason(rule="initialisation", expected="at most 20 minutes", actual=actual, severity="qualified")


def _invalid(expected: str, actual: str) -> Reason:
    return Reason(rule="evaluations", expected=expected, actual=actual, severity="invalid")


def _few(numbers: list[int]) -> str:
    return (", ".join(map(str, numbers[:6])) or "none") + (", …" if len(numbers) > 6 else "")


QUALITY_RULES = (
    evaluations_complete,
    explained_pauses,
    own_validation_set,
    validation_counted,
    trained_in_one_run,
    evaluated_on_clock,
    short_init,
)
