"""What a result says of checkpoints: figures from the journal alone, pauses between steps, runs that were resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from drawbar.analyze.facts import load_facts
from drawbar.analyze.result import result_of
from drawbar.analyze.schema import Result
from drawbar.journal import CheckpointRead, CheckpointWrite, Event, Step, WeightsRead
from drawbar.report.page import page
from drawbar.report.terminal import summary_text
from tests.synthetic_run import SyntheticRun, synthetic_run, with_changes

FIRST = 7
"""Of the 3 + 24 steps that the recipe asks for."""


def _result(run: SyntheticRun, folder: Path) -> Result:
    return result_of(load_facts(run.write(folder / "run")))


def _rules(result: Result) -> dict[str, str]:
    return {reason["rule"]: f"{reason['severity']}: {reason['actual']}" for reason in result["validity"]["reasons"]}


def _shorten(run: SyntheticRun, step: int, by_s: float, tags: list[str]) -> None:
    """That step starts later than the one before ends."""

    def change(event: Step) -> Event:
        if event.step != step:
            return event
        return with_changes(event, start_t=event.start_t + by_s, compute_s=event.compute_s - by_s, tags=tags)

    for rank in run.ranks:
        run.change(rank, Step, change)


def test_a_pause_between_steps_needs_a_tag(tmp_path: Path) -> None:
    run = synthetic_run()
    _shorten(run, 12, 0.05, ["after_checkpoint"])
    assert _result(run, tmp_path / "tagged")["validity"]["grade"] == "valid"
    _shorten(run, 12, 0.0, ["gc"])
    found = _result(run, tmp_path / "untagged")
    assert _rules(found)["step times"] == "invalid: 0.05 s between the two in step 12 of rank 0"


def test_a_pause_does_not_excuse_steps_that_overlap(tmp_path: Path) -> None:
    run = synthetic_run()
    _shorten(run, 12, -0.05, ["after_checkpoint"])
    assert "step times" in _rules(_result(run, tmp_path))


def _resumed(run: SyntheticRun, *, ranks: list[int], differences: list[str] | None = None) -> None:
    """Cuts the steps done before, and begins the warm-up anew."""

    def change(event: Step) -> Event | None:
        return with_changes(event, warmup=event.step < FIRST + 3) if event.step >= FIRST else None

    for rank in run.ranks:
        run.change(rank, Step, change)
        if rank in ranks:
            read = CheckpointRead(
                t=run.ranks[rank][0].t + 0.1,
                step=FIRST,
                source="/checkpoints/step-00000007",
                size_bytes=100_000_000,
                read_s=0.5 + 0.5 * rank,
                load_s=0.1,
                differences=differences or [],
            )
            run.ranks[rank].insert(1, read)


def test_a_resumed_run_is_held_against_the_steps_that_were_left(tmp_path: Path) -> None:
    run = synthetic_run()
    _resumed(run, ranks=[0, 1])
    result = _result(run, tmp_path)
    assert "equal steps" not in _rules(result)
    assert "resumed training" not in _rules(result)
    assert (result["warmup_steps"], result["steps"]) == (3, 24 - FIRST)
    assert result["resumed"] is not None
    assert result["resumed"]["mb_per_s"] == pytest.approx(100.0), "of the slowest rank"
    assert "resumed from step 7, the earlier part is not counted" in summary_text(result)


def test_ranks_that_went_on_from_different_places_are_no_training(tmp_path: Path) -> None:
    run = synthetic_run()
    _resumed(run, ranks=[0])
    assert _rules(_result(run, tmp_path))["resumed together"] == "invalid: rank 0: [7], rank 1: none"


def test_steps_that_are_missing_without_a_checkpoint_are_missing(tmp_path: Path) -> None:
    run = synthetic_run()
    _resumed(run, ranks=[])
    assert "equal steps" in _rules(_result(run, tmp_path))


def test_what_may_go_another_way_is_said(tmp_path: Path) -> None:
    run = synthetic_run()
    _resumed(run, ranks=[0, 1], differences=["<b>other</b> ranks", "dropout is drawn anew"])
    result = _result(run, tmp_path)
    assert _rules(result)["resumed training"] == "qualified: <b>other</b> ranks; dropout is drawn anew"
    html = page(load_facts(tmp_path / "run"), result)
    assert "&lt;b&gt;other&lt;/b&gt; ranks; dropout is drawn anew" in html
    assert "<b>other" not in html


def test_written_checkpoints_and_weights_are_summed_up(tmp_path: Path) -> None:
    run = synthetic_run()
    for step, pause_s in ((5, 0.1), (10, 0.3)):
        write = CheckpointWrite(
            step=step,
            target=f"/ck/step-{step:08d}",
            size_bytes=50_000_000,
            pause_s=pause_s,
            waited_s=pause_s / 2,
            copy_s=0.02,
            write_s=0.25,
        )
        run.ranks[0].insert(1, with_changes(write, t=run.ranks[0][0].t + step))
    weights = WeightsRead(
        source="/w.pth",
        size_bytes=9,
        read_s=0.1,
        loaded=60,
        head=["fc.weight"],
        missing=[],
        unexpected=["a", "b", "c", "d"],
    )
    run.ranks[0].insert(1, with_changes(weights, t=run.ranks[0][0].t + 0.1))
    result = _result(run, tmp_path)
    written = result["checkpoints"]
    assert written is not None
    assert (written["written"], written["bytes"], written["last_step"]) == (2, 100_000_000, 10)
    assert written["mb_per_s"] == pytest.approx(200.0)
    assert written["pause_s"]["max"] == pytest.approx(0.3)
    assert written["waited_s"] == pytest.approx(0.2)
    text = " ".join(summary_text(result).split())
    assert "2 checkpoints of 50.0 MB written at 200.0 MB/s beside training, which stood still for 200 ms each" in text
    assert "60 tensors from /w.pth; left random, as the classes differ: fc.weight; not used: a, b, c and 1 more" in text


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    result = _result(synthetic_run(), tmp_path)
    assert (result["checkpoints"], result["resumed"], result["weights"]) == (None, None, None)
