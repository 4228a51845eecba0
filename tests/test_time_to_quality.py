"""Time to quality and throughput from made-up journals whose figures are known, and every rule on evaluations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drawbar.analyze.quality_rules import QUALITY_RULES
from drawbar.analyze.result import analyze
from drawbar.analyze.schema import Result
from drawbar.journal import CheckpointRead, DataSet, Evaluation, Request, Step, TrainingStart, Witness
from drawbar.report.page import write_page
from drawbar.report.terminal import StepPrinter, summary_text
from tests.quality_run import OVERHEAD_S, PAUSE_S, STEP_S, quality_run
from tests.synthetic_run import START_T, SyntheticRun


def analyzed(run: SyntheticRun, folder: Path) -> Result:
    return analyze(run.write(folder))


def test_a_healthy_run_is_valid(tmp_path: Path) -> None:
    for target in (0.7, 0.9, None):
        validity = analyzed(quality_run(target), tmp_path / str(target))["validity"]
        assert [reason for reason in validity["reasons"] if reason["rule"] not in ("measured steps",)] == []


def test_time_to_quality_is_from_the_first_read_to_the_evaluation_that_meets_it(tmp_path: Path) -> None:
    quality = analyzed(quality_run(0.7), tmp_path)["quality"]
    assert quality is not None
    # 18 steps, the first of 3 s, and three pauses.
    assert quality["time_to_quality_s"] == pytest.approx(20.0 + 3 * PAUSE_S)
    assert quality["train_s"] == pytest.approx(20.0)
    assert quality["evaluation_s"] == pytest.approx(3 * (PAUSE_S - OVERHEAD_S))
    assert quality["other_s"] == pytest.approx(3 * OVERHEAD_S)
    assert quality["evaluation_share"] == pytest.approx(11.85 / 31.85)
    assert (quality["reached"], quality["steps"], quality["samples"]) == (True, 18, 18 * 16)
    assert quality["train_images_per_s"] == pytest.approx(18 * 16 / 20.0)
    assert quality["epochs"] == pytest.approx(18 * 16 / 2048)
    assert [item["met"] for item in quality["evaluations"]] == [False, False, True]
    assert quality["evaluations"][0]["start_s"] == pytest.approx(8.0 + OVERHEAD_S)


def test_off_the_clock_evaluations_are_left_out_and_it_is_said(tmp_path: Path) -> None:
    result = analyzed(quality_run(0.7, on_clock=False), tmp_path)
    assert result["quality"] is not None
    assert result["quality"]["time_to_quality_s"] == pytest.approx(20.0 + 3 * OVERHEAD_S)
    assert "evaluation on the clock" in [reason["rule"] for reason in result["validity"]["reasons"]]
    assert "evaluations left out" in summary_text(result)


def test_initialising_beyond_20_minutes_counts(tmp_path: Path) -> None:
    result = analyzed(quality_run(0.7, init_s=1300.0), tmp_path)
    assert result["quality"] is not None
    assert result["quality"]["time_to_quality_s"] == pytest.approx(20.0 + 3 * PAUSE_S + 100.0)
    assert "initialisation" in [reason["rule"] for reason in result["validity"]["reasons"]]


def test_met_at_the_first_evaluation_and_never(tmp_path: Path) -> None:
    first = analyzed(quality_run(0.1), tmp_path / "first")["quality"]
    assert first is not None
    assert first["steps"] == 6
    assert first["time_to_quality_s"] == pytest.approx(8.0 + PAUSE_S)
    never = analyzed(quality_run(0.9), tmp_path / "never")["quality"]
    assert never is not None
    assert (never["reached"], never["time_to_quality_s"], never["steps"]) == (False, None, 24)
    assert never["time_s"] == pytest.approx(26.0 + 4 * PAUSE_S)
    without = analyzed(quality_run(None), tmp_path / "without")["quality"]
    assert without is not None
    assert without["reached"] is None


@pytest.mark.parametrize("ranks", [1, 3])
def test_throughput_leaves_the_pauses_out(tmp_path: Path, ranks: int) -> None:
    result = analyzed(quality_run(0.9, ranks=ranks), tmp_path)
    assert result["images_per_s"]["total"] == pytest.approx(8 * ranks / STEP_S)
    assert result["images_per_s"]["mean"] == pytest.approx(8 * ranks / STEP_S)
    assert result["images_per_s"]["jitter"] == pytest.approx(0, abs=1e-6)
    assert result["interval_s"] == pytest.approx(21.0)


def test_printed_lines_leave_the_pauses_out_and_tell_of_each_evaluation(tmp_path: Path) -> None:
    run = quality_run(0.9)
    printer = StepPrinter(world_size=2, warmup_steps=3, steps=21, display_every=21)
    lines = [line for rank in (0, 1) for event in run.ranks[rank] for line in printer.feed(rank, event)]
    assert sum(line.startswith("evaluation after step") for line in lines) == 4
    assert "evaluation after step 6 (epoch 1): top1 0.2000, loss 1.8000; 100 images in 4.0 s" in lines
    assert next(line for line in lines if line.startswith("21\t")).startswith("21\timages/sec: 16.0 +/- 0.0")


def test_page_and_text_tell_of_it(tmp_path: Path) -> None:
    run_dir = quality_run(0.7).write(tmp_path)
    result = analyze(run_dir)
    text = summary_text(result)
    assert "Time to quality (top1 >= 0.7): 32.0 s, after 18 steps and 0.14 epochs" in " ".join(text.split())
    assert max(len(line) for line in text.splitlines()) <= 80
    page = write_page(run_dir).read_text()
    for words in ("Time to quality (top1 &gt;= 0.7)", 'data-figure="accuracy"', 'data-figure="loss"'):
        assert words in page


def change(rank: int, step: int, **values: Any) -> Callable[[SyntheticRun], None]:
    """Of one evaluation on one rank."""
    return lambda run: run.change(
        rank, Evaluation, lambda event: dataclasses.replace(event, **values) if event.step == step else event
    )


def drop(rank: int, step: int) -> Callable[[SyntheticRun], None]:
    return lambda run: run.change(rank, Evaluation, lambda event: None if event.step == step else event)


def untagged(run: SyntheticRun) -> None:
    run.change(0, Step, lambda step: dataclasses.replace(step, tags=[]))


def other_set(run: SyntheticRun) -> None:
    run.change_launcher(
        DataSet, lambda found: dataclasses.replace(found, records=99) if found.role == "validation" else found
    )


def uncounted_set(run: SyntheticRun) -> None:
    run.change_launcher(
        DataSet, lambda found: dataclasses.replace(found, records=None) if found.role == "validation" else found
    )
    for rank in run.ranks:
        run.change(rank, Evaluation, lambda event: dataclasses.replace(event, set_images=None))


def one_more_step(run: SyntheticRun) -> None:
    """Training goes on although the target was met."""
    for rank in run.ranks:
        run.change(
            rank,
            Evaluation,
            lambda event: dataclasses.replace(event, metrics={"top1": 0.7}) if event.step == 11 else event,
        )


@pytest.mark.parametrize(
    ("rule", "severity", "broken"),
    [
        ("evaluations", "invalid", drop(1, 11)),
        ("evaluations", "invalid", change(1, 11, metrics={"top1": 0.51, "loss": 1.5})),
        ("evaluations", "invalid", change(0, 11, images=49)),
        ("evaluations", "invalid", change(1, 11, all_images=99)),
        ("evaluations", "invalid", change(1, 5, start_t=START_T + 1)),
        ("evaluations", "invalid", lambda run: run.drop(1, TrainingStart)),
        ("evaluations", "invalid", other_set),
        ("step times", "invalid", untagged),
        ("pauses", "invalid", change(0, 5, start_t=START_T + 8 + 3.0)),
        ("validation images", "qualified", uncounted_set),
        ("equal steps", "invalid", one_more_step),
    ],
)
def test_every_rule_on_evaluations_speaks(
    tmp_path: Path, rule: str, severity: str, broken: Callable[[SyntheticRun], None]
) -> None:
    run = quality_run(0.7)
    broken(run)
    reasons = {reason["rule"]: reason for reason in analyzed(run, tmp_path)["validity"]["reasons"]}
    assert reasons[rule]["severity"] == severity
    assert reasons[rule]["expected"]
    assert reasons[rule]["actual"]


def test_judged_on_the_training_set_is_said(tmp_path: Path) -> None:
    run = quality_run(0.7)
    data = run.recipe.data.model_copy(update={"eval_url": run.recipe.data.url})
    run.recipe = run.recipe.model_copy(update={"data": data})
    reasons = [reason["rule"] for reason in analyzed(run, tmp_path)["validity"]["reasons"]]
    assert "validation set" in reasons


def test_a_resumed_run_claims_no_time_to_quality(tmp_path: Path) -> None:
    run = quality_run(0.7)
    for rank, events in run.ranks.items():
        read = CheckpointRead(
            t=events[0].t + 0.1,
            step=8,
            source="/checkpoints/step-00000008",
            size_bytes=1000,
            read_s=0.1,
            load_s=0.1,
            differences=[],
        )
        run.ranks[rank] = [
            events[0],
            read,
            *(each for each in events[1:] if not isinstance(each, Step | Evaluation) or each.step >= 8),
        ]
    result = analyzed(run, tmp_path)
    assert result["quality"] is not None
    assert result["quality"]["reached"]
    assert result["quality"]["time_to_quality_s"] is None
    assert result["quality"]["epochs"] == pytest.approx(18 * 16 / 2048)
    reasons = {reason["rule"]: reason for reason in result["validity"]["reasons"]}
    assert reasons["one run to quality"]["severity"] == "qualified"
    assert "evaluations" not in reasons
    summary_text(result)
    write_page(tmp_path)


def test_all_rules_on_evaluations_are_provoked_here() -> None:
    """A new rule needs a test above."""
    provoked = {"evaluations", "pauses", "validation set", "validation images", "evaluation on the clock"}
    assert len(provoked | {"initialisation", "one run to quality"}) == len(QUALITY_RULES)


def test_later_epochs_from_a_cache_do_not_make_the_start_warm(tmp_path: Path) -> None:
    """Each byte is read twice and comes from disk once: cold for a run to quality, and for no other."""
    for target, expected in ((0.7, "cold"), (None, "not shown cold")):
        run = quality_run(target)
        for rank, events in run.ranks.items():
            twice = [event for event in events if isinstance(event, Request)]
            run.ranks[rank] = events[:2] + twice + events[2:]
        assert run.launcher is not None
        sent = [event for event in run.launcher if isinstance(event, Witness) and event.source == "gateway"]
        first = {event.target: event.count_bytes for event in sent if event.when == "before"}
        run.change_launcher(
            Witness,
            lambda event, first=first: (
                dataclasses.replace(  # type: ignore[misc]
                    event, count_bytes=2 * event.count_bytes - first[event.target]
                )
                if event.source == "gateway"
                else event
            ),
        )
        assert analyzed(run, tmp_path / str(target))["cache"]["state"] == expected
