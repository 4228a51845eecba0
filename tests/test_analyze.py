"""The read half's numbers, against runs whose figures are known beforehand."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drawbar.analyze.facts import load_facts
from drawbar.analyze.quality_rules import QUALITY_RULES
from drawbar.analyze.result import analyze, result_of, to_json, write_result
from drawbar.analyze.schema import Reason, Result
from drawbar.analyze.throughput import rate_of
from drawbar.analyze.validity import RULES
from drawbar.errors import InputError, RecipeError
from drawbar.journal import (
    Cache,
    CheckpointRead,
    Clock,
    DataSet,
    Error,
    Event,
    Host,
    InputReport,
    InputStage,
    InputTotals,
    Request,
    RunEnd,
    RunStart,
    Step,
    Witness,
)
from drawbar.report.page import environment_table, figures, write_page
from drawbar.report.terminal import summary_text
from tests.quality_run import quality_run
from tests.synthetic_run import SAMPLE_BYTES, SyntheticRun, synthetic_run, with_changes


def analyzed(run: SyntheticRun, tmp_path: Path) -> Result:
    return analyze(run.write(tmp_path / "run"))


def steps_of(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    """Measured steps read with nothing but json, on rank 0's clock."""
    rows = [json.loads(line) for line in (run_dir / f"journal/rank-{rank:05d}.jsonl").read_text().splitlines()]
    offset_s = next(row["offset_s"] for row in rows if row["event"] == "clock")
    return [
        {**row, "start_t": row["start_t"] + offset_s, "end_t": row["end_t"] + offset_s}
        for row in rows
        if row["event"] == "step" and not row["warmup"]
    ]


def total_by_hand(run_dir: Path, ranks: int) -> float:
    """`total images/sec` again, step by step in plain Python."""
    steps = [steps_of(run_dir, rank) for rank in range(ranks)]
    start_t = max(rows[0]["start_t"] for rows in steps)
    end_t = min(rows[-1]["end_t"] for rows in steps)
    trained = 0.0
    for row in (row for rows in steps for row in rows):
        overlap_s = max(0.0, min(row["end_t"], end_t) - max(row["start_t"], start_t))
        trained += row["samples"] * overlap_s / (row["end_t"] - row["start_t"])
    return float(trained / (end_t - start_t))


# --- throughput -------------------------------------------------------------------------------------------------


def test_total_of_equal_ranks_is_their_samples_over_the_step_time(tmp_path: Path) -> None:
    result = analyzed(synthetic_run(ranks=3, batch_size=8, step_s=0.25), tmp_path)
    assert result["images_per_s"]["total"] == pytest.approx(3 * 8 / 0.25)
    assert result["images_per_s"]["per_rank"] == pytest.approx([32.0] * 3)
    assert result["images_per_s"]["mean"] == pytest.approx(96)
    assert result["images_per_s"]["stderr"] == pytest.approx(0, abs=1e-9)
    assert result["images_per_s"]["n"] == 24
    assert result["interval_s"] == pytest.approx(24 * 0.25)
    assert result["samples"] == 24 * 8 * 3
    assert result["step_s"]["p99"] == pytest.approx(0.25)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_total_matches_an_independent_computation(tmp_path: Path, ranks: int) -> None:
    run = synthetic_run(
        ranks=ranks,
        noise=0.3,
        skew_s=[0.0, 0.11, 0.02, 0.07, 0.3],
        offset_s=[0.0, -300.5, 12.25, 1e5, 0.5],
    )
    run_dir = run.write(tmp_path / "run")
    total = analyze(run_dir)["images_per_s"]["total"]
    assert total == pytest.approx(total_by_hand(run_dir, ranks), rel=1e-9)


def test_clock_offsets_alone_change_nothing(tmp_path: Path) -> None:
    plain = analyzed(synthetic_run(ranks=2, noise=0.2), tmp_path / "a")
    moved = analyzed(synthetic_run(ranks=2, noise=0.2, offset_s=[0.0, 12345.678]), tmp_path / "b")
    assert moved["images_per_s"]["total"] == pytest.approx(plain["images_per_s"]["total"])
    assert moved["images_per_s"]["jitter"] == pytest.approx(plain["images_per_s"]["jitter"], rel=1e-6)


def test_a_drifting_clock_is_interpolated(tmp_path: Path) -> None:
    """Rank 1's clock runs 1 % slow: its raw steps look short, and both offsets put them right again."""
    run = synthetic_run(ranks=2, step_s=0.25)
    clocks = [event for event in run.ranks[1] if isinstance(event, Clock)]
    zero_t = clocks[0].t

    def slowed(event: Event) -> Event:
        values: dict[str, Any] = {"t": zero_t + (event.t - zero_t) * 0.99}
        if isinstance(event, Step):
            values |= {name: zero_t + (getattr(event, name) - zero_t) * 0.99 for name in ("start_t", "end_t")}
        if isinstance(event, Clock):
            values["offset_s"] = (event.t - zero_t) * 0.01
        return dataclasses.replace(event, **values)

    run.ranks[1] = [slowed(event) for event in run.ranks[1]]
    assert analyzed(run, tmp_path)["images_per_s"]["total"] == pytest.approx(2 * 8 / 0.25, rel=1e-6)


def test_steps_cut_by_an_edge_count_in_proportion(tmp_path: Path) -> None:
    """Rank 1 is 0.1 s late: the interval loses 0.1 s, rank 0 keeps 0.6 of its first step, rank 1 0.6 of its last."""
    result = analyzed(synthetic_run(ranks=2, steps=4, batch_size=10, step_s=0.25, skew_s=[0, 0.1]), tmp_path)
    assert result["interval_s"] == pytest.approx(0.9)
    assert result["images_per_s"]["per_rank"] == pytest.approx([36 / 0.9, 36 / 0.9])


def test_a_slow_rank_pulls_the_total_down(tmp_path: Path) -> None:
    """Rank 1 takes twice as long for each step: the total follows what was trained, not 2 x rank 0's rate."""
    run = synthetic_run(ranks=2, steps=20, step_s=0.25)
    steps = [event for event in run.ranks[1] if isinstance(event, Step)]
    zero_t = steps[0].start_t
    run.change(
        1,
        Step,
        lambda step: with_changes(
            step, start_t=zero_t + 2 * (step.start_t - zero_t), end_t=zero_t + 2 * (step.end_t - zero_t)
        ),
    )
    run_dir = run.write(tmp_path / "run")
    result = analyze(run_dir)
    rates = result["images_per_s"]["per_rank"]
    assert rates[1] == pytest.approx(16)
    assert result["images_per_s"]["total"] == pytest.approx(total_by_hand(run_dir, 2))
    assert (result["images_per_s"]["total"] or 0) < 2 * (rates[0] or 0)


def test_mean_uncertainty_and_jitter_are_those_of_tf_cnn_benchmarks() -> None:
    seconds = np.array([0.5, 1.0, 0.25, 0.5])
    rate = rate_of([10, 10, 10, 10], seconds)
    speeds = np.array([20.0, 10.0, 40.0, 20.0])
    assert rate is not None
    assert rate.mean == pytest.approx(10 / np.mean(seconds))
    assert rate.stderr == pytest.approx(np.std(speeds) / 2)
    assert rate.jitter == pytest.approx(1.4826 * 5)


def test_a_global_step_ends_with_its_last_rank(tmp_path: Path) -> None:
    facts = load_facts(synthetic_run(ranks=2, step_s=0.25, skew_s=[0.0, 0.1]).write(tmp_path))
    steps = facts.steps
    assert steps is not None
    assert steps.end_t == pytest.approx(facts.run.ranks[1].measured.end_t)
    assert steps.duration_s == pytest.approx(np.full(24, 0.25))
    assert list(steps.samples) == [16] * 24


def test_data_wait_and_au(tmp_path: Path) -> None:
    run = synthetic_run(ranks=2, step_s=0.25, data_wait=0.2)
    run.change(
        1,
        Step,
        lambda step: with_changes(step, data_wait_s=2 * step.data_wait_s, compute_s=step.compute_s - step.data_wait_s),
    )
    result = analyzed(run, tmp_path)
    assert result["data_wait_fraction"] == pytest.approx(0.3)
    assert result["worst_rank"] == 1
    assert result["worst_rank_data_wait_fraction"] == pytest.approx(0.4)
    # Data wait and 2 % of copying are no compute.
    assert result["au"] == pytest.approx(1 - 0.3 - 0.02)
    assert result["ranks"][1]["data_wait_s"] == pytest.approx(24 * 0.25 * 0.4)


def test_warmup_is_recorded_and_left_out(tmp_path: Path) -> None:
    result = analyzed(synthetic_run(steps=24, warmup_steps=5, step_s=0.25), tmp_path)
    assert (result["warmup_steps"], result["steps"]) == (5, 24)
    assert result["step_s"]["max"] == pytest.approx(0.25), "the first warm-up step took three times as long"


# --- bytes, hosts -----------------------------------------------------------------------------------------------


def test_endpoints_and_bytes(tmp_path: Path) -> None:
    run = synthetic_run(ranks=3, endpoints=2)
    run.ranks[0].insert(2, request(run, 0, kind="metadata", got_bytes=500, error="", attempt=0))
    run.ranks[0].insert(2, request(run, 0, kind="data", got_bytes=0, error="Timeout", attempt=0))
    run.ranks[0].insert(3, request(run, 0, kind="data", got_bytes=0, error="Timeout", attempt=1))
    result = analyzed(run, tmp_path)
    per_rank = 27 * 8 * SAMPLE_BYTES
    first, second = result["endpoints"]
    assert (first["url"], second["url"]) == ("http://10.0.0.1:8333", "http://10.0.0.2:8333")
    assert (first["bytes"], second["bytes"]) == (2 * per_rank + 500, per_rank)
    assert (first["data_bytes"], first["errors"], first["retries"]) == (2 * per_rank, 2, 1)
    assert (first["requests"], first["data_requests"]) == (2 * 3 + 3, 2 * 3 + 2)
    assert first["gateway_bytes"] == 2 * per_rank
    assert result["read_bytes"] == 3 * per_rank + 500
    assert (first["latency_s"]["first_byte"]["p50"] or 0) < (first["latency_s"]["total"]["p50"] or 0)
    assert result["ranks"][0]["errors"] == 2


def request(run: SyntheticRun, rank: int, **values: Any) -> Request:
    first = next(event for event in run.ranks[rank] if isinstance(event, Request))
    return with_changes(first, **values)


def test_host_counters_over_the_interval(tmp_path: Path) -> None:
    result = analyzed(synthetic_run(ranks=2, ranks_per_node=1, offset_s=[0, 500.0]), tmp_path)
    host = result["hosts"][0]
    assert host["disk_read_mb_per_s"] == pytest.approx(80)
    assert host["nic_received_mb_per_s"] == pytest.approx({"eth0": 100.0, "lo": 0.0})
    assert host["cpu_busy"] == pytest.approx(0.5, abs=0.05)
    assert host["cpu_steal"] == 0
    assert host["seconds"] == pytest.approx(result["interval_s"])
    assert host["peak_rank_rss_bytes"]["1"] > host["peak_rank_rss_bytes"]["0"]


# --- failures ---------------------------------------------------------------------------------------------------


def fail(run: SyntheticRun, rank: int, *, t: float, after_step: int, **values: Any) -> None:
    run.kill(rank, after_step=after_step)
    error = Error(
        t=t, exit_code=4, phase=f"step {after_step + 1}", **{"type": "RuntimeError", "message": "?", **values}
    )
    run.ranks[rank] += [error, RunEnd(t=t, status="failed", unix_s=0)]


def end_launcher(run: SyntheticRun, status: str, *errors: Error) -> None:
    run.change_launcher(RunEnd, lambda end: with_changes(end, status=status))
    run.launcher = [*errors, *(run.launcher or [])]


def test_first_cause_is_the_earliest_primary_error_in_rank_0_time(tmp_path: Path) -> None:
    run = synthetic_run(ranks=3, offset_s=[0, 1000.0, -1000.0])
    fail(run, 0, t=1003.0, after_step=9, message="too late")
    fail(run, 1, t=2.0, after_step=9, type="DataError", message="bad CRC")  # 1002 on rank 0's clock
    fail(run, 2, t=2001.0, after_step=9, message="lost a peer", secondary=True)  # 1001
    result = analyzed(run, tmp_path)
    assert result["status"] == "failed"
    assert result["error"] == {
        "type": "DataError",
        "message": "bad CRC",
        "hint": "",
        "rank": 1,
        "node": "n1",
        "phase": "step 10",
        "exit_code": 4,
    }
    assert result["validity"]["grade"] == "invalid"


def test_a_killed_rank_is_named_with_the_last_thing_it_did(tmp_path: Path) -> None:
    run = synthetic_run(ranks=3)
    run.kill(2, after_step=7)
    for rank in (0, 1):
        fail(run, rank, t=1010.0, after_step=7, message="connection closed by peer", secondary=True)
    seen = Error(type="RanksFailed", message="rank 2: signal 9", exit_code=4, phase="launcher", secondary=True)
    end_launcher(run, "failed", seen)
    error = analyzed(run, tmp_path)["error"]
    assert error is not None
    assert (error["rank"], error["node"], error["phase"], error["exit_code"]) == (2, "n2", "step 8", 4)
    for part in ("rank 2 on n2 (pid 4002) was killed", "last finished step 7", "signal 9"):
        assert part in error["message"]


def test_a_stall_that_the_launcher_ended_is_the_cause_not_the_rank_it_had_to_kill(tmp_path: Path) -> None:
    run = synthetic_run(ranks=2)
    run.kill(1, after_step=7)
    end_launcher(run, "failed", Error(type="RunFailed", message="no step for 300 s", exit_code=4, phase="launcher"))
    error = analyzed(run, tmp_path)["error"]
    assert error is not None
    assert (error["rank"], error["message"]) == (None, "no step for 300 s")


def test_of_two_silent_ranks_the_first_to_fall_silent_is_the_cause(tmp_path: Path) -> None:
    run = synthetic_run(ranks=2)
    run.kill(0, after_step=9)
    run.kill(1, after_step=7)
    error = analyzed(run, tmp_path)["error"]
    assert error is not None
    assert error["rank"] == 1
    assert "later also silent: rank 0" in error["message"]


def test_launcher_alone_explains_a_run_without_ranks(tmp_path: Path) -> None:
    run = synthetic_run()
    run.ranks, run.hosts = {}, {}
    end_launcher(run, "failed", Error(type="EnvironmentUnfit", message="no disk", exit_code=3, phase="preflight"))
    result = analyzed(run, tmp_path)
    assert result["error"] is not None
    assert (result["error"]["rank"], result["error"]["exit_code"]) == (None, 3)
    assert result["images_per_s"]["total"] is None
    assert result["ranks"] == []


def test_interrupted(tmp_path: Path) -> None:
    run = synthetic_run()
    for rank in run.ranks:
        run.kill(rank, after_step=8)
    end_launcher(run, "interrupted")
    result = analyzed(run, tmp_path)
    assert result["status"] == "interrupted"
    assert result["error"] is not None
    assert (result["error"]["type"], result["error"]["exit_code"]) == ("Interrupted", 130)


@pytest.mark.parametrize("after_step", [1, 0])
def test_failing_before_the_first_measured_step_never_crashes(tmp_path: Path, after_step: int) -> None:
    run = synthetic_run()
    for rank in run.ranks:
        fail(run, rank, t=1001.0, after_step=after_step, message="no batch")
    result = analyzed(run, tmp_path)
    assert result["images_per_s"] == {
        "total": None,
        "mean": None,
        "stderr": None,
        "jitter": None,
        "n": 0,
        "per_rank": [None, None],
    }
    assert (result["steps"], result["samples"], result["au"]) == (0, 0, None)


def test_empty_and_torn_journals_never_crash(tmp_path: Path) -> None:
    run_dir = synthetic_run().write(tmp_path)
    (run_dir / "journal/rank-00000.jsonl").write_bytes(b"")
    (run_dir / "journal/rank-00001.jsonl").write_bytes(b'{"event":"run_st')
    (run_dir / "journal/host-n1.jsonl").write_bytes(b"")
    result = analyze(run_dir)
    assert result["status"] == "failed"
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]


def test_no_run_directory_and_no_recipe_are_the_users_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        analyze(tmp_path)
    run_dir = synthetic_run().write(tmp_path)
    (run_dir / "recipe.toml").write_text("name = 5")
    with pytest.raises(RecipeError):
        analyze(run_dir)
    (run_dir / "recipe.toml").unlink()
    with pytest.raises(InputError, match="no complete run directory"):
        analyze(run_dir)


# --- validity ---------------------------------------------------------------------------------------------------


def test_a_healthy_run_is_valid(tmp_path: Path) -> None:
    validity = analyzed(synthetic_run(), tmp_path)["validity"]
    assert validity["reasons"] == []
    assert validity["grade"] == "valid"


def change_totals(**values: Any) -> Callable[[SyntheticRun], None]:
    return lambda run: run.change(0, InputTotals, lambda totals: with_changes(totals, **values))


def change_steps(rank: int, number: int, **values: Any) -> Callable[[SyntheticRun], None]:
    return lambda run: run.change(
        rank, Step, lambda step: with_changes(step, **values) if step.step == number else step
    )


def change_start(rank: int, **values: Any) -> Callable[[SyntheticRun], None]:
    return lambda run: run.change(rank, RunStart, lambda start: with_changes(start, **values))


def resumed(ranks: Sequence[int], *differences: str) -> Callable[[SyntheticRun], None]:
    """These ranks went on from a checkpoint of step 0."""

    def broken(run: SyntheticRun) -> None:
        for rank in ranks:
            read = CheckpointRead(
                t=run.ranks[rank][0].t,
                step=0,
                source="/checkpoints/step-00000000",
                size_bytes=1,
                read_s=0.1,
                load_s=0.1,
                differences=list(differences),
            )
            run.ranks[rank].insert(1, read)

    return broken


def change_witness(source: str, share: float | None) -> Callable[[SyntheticRun], None]:
    """The count after the run times `share`; None drops both readings."""

    def changed(event: Witness) -> Witness | None:
        if event.source != source:
            return event
        if share is None:
            return None
        return with_changes(event, count_bytes=round(event.count_bytes * share)) if event.when == "after" else event

    return lambda run: run.change_launcher(Witness, changed)


def change_hosts(changed: Callable[[Host], Host | None]) -> Callable[[SyntheticRun], None]:
    def change(run: SyntheticRun) -> None:
        for node, events in run.hosts.items():
            rows = [changed(event) if isinstance(event, Host) else event for event in events]
            run.hosts[node] = [row for row in rows if row is not None]

    return change


def no_witness(run: SyntheticRun) -> None:
    change_witness("gateway", None)(run)
    change_witness("volume", None)(run)


def unplanned_request(run: SyntheticRun) -> None:
    run.ranks[0].insert(2, request(run, 0))


def failed_request(run: SyntheticRun) -> None:
    run.ranks[0].insert(2, request(run, 0, got_bytes=0, error="Timeout"))


def stray_request(run: SyntheticRun) -> None:
    run.change(0, Request, lambda event: with_changes(event, endpoint="http://10.0.0.2:8333"))
    no_witness(run)


def other_environment(run: SyntheticRun) -> None:
    for rank in run.ranks:
        run.change(rank, RunStart, lambda start: with_changes(start, environment={**start.environment, "num_cpus": 7}))


def read_again(run: SyntheticRun) -> None:
    """Rank 1 reads the shard that rank 0 reads."""
    run.change(1, Request, lambda event: with_changes(event, key="train/train-00000-of-01024"))


def change_end(rank: int, *more: Event) -> Callable[[SyntheticRun], None]:
    """Puts events before the run_end, which they follow where they are one themselves."""

    def change(run: SyntheticRun) -> None:
        *events, end = run.ranks[rank]
        run.ranks[rank] = [*events, end, *more] if isinstance(more[0], RunEnd | Host) else [*events, *more, end]

    return change


def another_totals(run: SyntheticRun) -> None:
    totals = next(event for event in run.ranks[0] if isinstance(event, InputTotals))
    change_end(0, with_changes(totals, trained_bytes=7))(run)


def stretch_step(run: SyntheticRun) -> None:
    """Rank 1's step 20 ends 0.3 s early and its line tells nothing of it."""
    run.change(1, Step, lambda step: with_changes(step, end_t=step.end_t - 0.3) if step.step == 20 else step)


def late_last_step(run: SyntheticRun) -> None:
    run.change(1, Step, lambda step: with_changes(step, end_t=step.end_t + 1000) if step.step == 26 else step)


def backwards_step(run: SyntheticRun) -> None:
    run.change(1, Step, lambda step: with_changes(step, end_t=step.start_t) if step.step == 26 else step)


def without_launcher(run: SyntheticRun) -> None:
    run.launcher = None


def launcher_of_another_recipe(run: SyntheticRun) -> None:
    run.change_launcher(RunStart, lambda start: with_changes(start, recipe_sha256="0" * 64))


def on_embedded_store(run: SyntheticRun) -> None:
    """The recipe then names no addresses; the ranks' hash of it follows."""
    run.recipe = run.recipe.model_copy(
        update={"storage": run.recipe.storage.model_copy(update={"endpoints": "embedded"})}
    )
    sha256 = run.recipe.sha256()
    for rank in run.ranks:
        change_start(rank, recipe_sha256=sha256)(run)
    run.change_launcher(RunStart, lambda start: with_changes(start, recipe_sha256=sha256))


def unwitnessed(run: SyntheticRun) -> None:
    on_embedded_store(run)
    change_witness("gateway", None)(run)


def contradicting_witness(run: SyntheticRun) -> None:
    witness = next(event for event in run.launcher or [] if isinstance(event, Witness) and event.source == "gateway")
    run.launcher = [with_changes(witness, count_bytes=witness.count_bytes + 1), *(run.launcher or [])]


def without_data_hash(run: SyntheticRun) -> None:
    for rank in run.ranks:
        change_start(rank, dataset_sha256="")(run)


def without_rank_1(run: SyntheticRun) -> None:
    del run.ranks[1]


def without_interval(run: SyntheticRun) -> None:
    run.change(1, Step, lambda step: with_changes(step, start_t=step.start_t + 1000, end_t=step.end_t + 1000))


def skipped(*, bad: int, replaced: int) -> Callable[[SyntheticRun], None]:
    """By a recipe that lets others stand in."""

    def broken(run: SyntheticRun) -> None:
        recipe = run.recipe
        run.recipe = recipe.model_copy(update={"input": recipe.input.model_copy(update={"on_bad": "skip"})})
        for rank in run.ranks:
            run.change(rank, RunStart, lambda start: with_changes(start, recipe_sha256=run.recipe.sha256()))
        run.change_launcher(RunStart, lambda start: with_changes(start, recipe_sha256=run.recipe.sha256()))
        change_totals(bad_images=bad, replaced_images=replaced)(run)

    return broken


BROKEN: list[tuple[str, str, Callable[[SyntheticRun], None]]] = [
    ("resumed together", "invalid", resumed([1])),
    ("resumed training", "qualified", resumed([0, 1], "dropout is drawn anew")),
    ("run ended ok", "invalid", lambda run: run.change(1, RunEnd, lambda end: with_changes(end, status="terminated"))),
    ("complete journals", "invalid", without_rank_1),
    ("complete journals", "invalid", lambda run: run.drop(1, RunEnd)),
    ("complete journals", "invalid", lambda run: run.ranks[1].insert(0, run.ranks[1][0])),
    ("complete journals", "invalid", change_start(1, world_size=3)),
    ("complete journals", "invalid", lambda run: run.change(1, RunStart, lambda start: with_changes(start, rank=0))),
    ("complete journals", "invalid", change_start(1, unix_s=1.6e9)),
    ("complete journals", "invalid", without_launcher),
    ("complete journals", "invalid", lambda run: run.change_launcher(RunEnd, lambda end: None)),
    ("complete journals", "invalid", change_end(1, RunEnd(status="ok", unix_s=0))),
    ("complete journals", "invalid", change_end(1, RunEnd(status="failed", unix_s=0))),
    ("complete journals", "invalid", change_end(1, Error(type="E", message="?", exit_code=4, phase="step 3"))),
    ("one recipe", "invalid", change_start(1, recipe_sha256="0" * 64)),
    ("one recipe", "invalid", launcher_of_another_recipe),
    ("samples per step", "invalid", change_steps(1, 20, samples=9)),
    ("samples per step", "invalid", change_steps(0, 1, samples=0)),
    ("step times", "invalid", stretch_step),
    ("step times", "invalid", late_last_step),
    ("step times", "invalid", backwards_step),
    ("step times", "invalid", change_steps(0, 20, data_wait_s=-0.01)),
    ("one data set", "invalid", change_start(1, dataset_sha256="0" * 64)),
    ("one data set", "qualified", without_data_hash),
    ("equal steps", "invalid", lambda run: run.change(1, Step, lambda step: step if step.step != 26 else None)),
    ("equal steps", "invalid", change_steps(1, 26, step=25)),
    ("common interval", "invalid", without_interval),
    ("common interval", "invalid", lambda run: run.drop(1, Step)),
    ("loss", "invalid", change_steps(1, 20, loss=math.nan)),
    ("loss", "invalid", change_steps(0, 0, loss=math.inf)),
    ("input totals", "invalid", lambda run: run.drop(0, InputTotals)),
    ("received = served", "invalid", change_witness("gateway", 1.05)),
    ("received = served", "invalid", change_witness("gateway", 0.9)),
    ("received = served", "qualified", unwitnessed),
    ("received = served", "qualified", contradicting_witness),
    ("input totals", "invalid", another_totals),
    ("received = trained + discarded", "invalid", change_totals(trained_bytes=10)),
    ("received = trained + discarded", "invalid", change_totals(discarded_bytes=1)),
    ("received = planned", "invalid", change_totals(planned_bytes=10)),
    ("received = sum of requests", "invalid", unplanned_request),
    ("images", "invalid", change_totals(decoded_images=10)),
    ("images", "invalid", change_totals(trained_images=10)),
    ("endpoint policy", "invalid", stray_request),
    ("clocks", "qualified", lambda run: run.drop(1, Clock)),
    (
        "clocks",
        "qualified",
        lambda run: run.change(1, Clock, lambda clock: with_changes(clock, uncertainty_s=0.2)),
    ),
    ("clocks", "qualified", lambda run: run.change(1, Clock, lambda clock: with_changes(clock, offset_s=0.003))),
    ("cold start", "qualified", change_witness("volume", 0.5)),
    ("cold start", "qualified", no_witness),
    ("cold epochs", "qualified", read_again),
    ("storage errors", "qualified", failed_request),
    ("bad images", "qualified", change_totals(bad_images=1)),
    ("bad images", "qualified", skipped(bad=2, replaced=2)),
    ("bad images", "invalid", skipped(bad=1, replaced=2)),
    ("bad images", "invalid", change_totals(bad_images=1, replaced_images=1)),
    (
        "decoder",
        "qualified",
        lambda run: run.change(1, InputReport, lambda report: with_changes(report, fallback_images=500)),
    ),
    (
        "whole data set",
        "qualified",
        lambda run: run.change_launcher(DataSet, lambda found: with_changes(found, manifest=False, missing=3)),
    ),
    ("step spans", "qualified", lambda run: run.change(1, Step, lambda step: with_changes(step, compute_s=0.0))),
    ("step spans", "invalid", lambda run: run.change(1, Step, lambda step: with_changes(step, compute_s=1.0))),
    ("compute threads", "qualified", other_environment),
    (
        "compilation",
        "qualified",
        lambda run: run.change(1, Step, lambda step: with_changes(step, tags=["compiled"] if step.step == 9 else [])),
    ),
    (
        "CPU steal",
        "qualified",
        change_hosts(lambda host: with_changes(host, cpu_steal_s=0.1 * (host.cpu_user_s + host.cpu_idle_s))),
    ),
    ("host counters", "qualified", lambda run: run.hosts.clear()),
    ("host counters", "qualified", change_hosts(lambda host: None)),
]


@pytest.mark.parametrize(("rule", "severity", "broken"), BROKEN)
def test_every_rule_speaks(tmp_path: Path, rule: str, severity: str, broken: Callable[[SyntheticRun], None]) -> None:
    run = synthetic_run()
    broken(run)
    validity = analyzed(run, tmp_path)["validity"]
    reasons = {reason["rule"]: reason for reason in validity["reasons"]}
    assert rule in reasons
    assert reasons[rule]["severity"] == severity
    assert validity["grade"] == ("invalid" if severity == "invalid" else validity["grade"])
    assert reasons[rule]["expected"]
    assert reasons[rule]["actual"]


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("input", {"overrides": {"input": {"source": "constant"}}}),
        ("training", {"overrides": {"emulate": {"step_s": 0.4}}}),
        ("deliberate faults", {"overrides": {"faults": {"slow_rank": 1, "slow_step_s": 0.1}}}),
        ("measured steps", {"steps": 19, "step_s": 1.0}),
        ("measured interval", {"steps": 24, "step_s": 0.25}),
        ("warm-up", {"warmup_steps": 0}),
    ],
)
def test_what_the_recipe_leaves_out_is_named(tmp_path: Path, rule: str, values: dict[str, Any]) -> None:
    validity = analyzed(synthetic_run(**values), tmp_path)["validity"]
    assert [reason["rule"] for reason in validity["reasons"]] == [rule]
    assert validity["grade"] == "qualified"


def test_all_rules_are_provoked_here() -> None:
    """A new rule needs a row above; those on evaluations are provoked in test_time_to_quality.py."""
    recipes = {"input", "training", "deliberate faults", "measured steps", "measured interval", "warm-up"}
    provoked = {rule for rule, _, _ in BROKEN} | recipes | {"readable journals"}
    assert len(provoked) == len(RULES) - len(QUALITY_RULES)


def test_a_runs_healthy_embedded_store_is_valid(tmp_path: Path) -> None:
    run = synthetic_run()
    on_embedded_store(run)
    assert analyzed(run, tmp_path)["validity"]["reasons"] == []


@pytest.mark.parametrize("name", ["rank-00007.jsonl", "rank-00000.jsonl", "rank-1.jsonl", "rank-x.jsonl"])
def test_a_copied_journal_is_added_to_no_sum(tmp_path: Path, name: str) -> None:
    run_dir = synthetic_run(ranks=2).write(tmp_path)
    before = analyze(run_dir)
    (run_dir / "journal" / name).write_bytes((run_dir / "journal/rank-00001.jsonl").read_bytes())
    after = analyze(run_dir)
    lost = 1 if name == "rank-00000.jsonl" else 0
    assert after["images_per_s"]["total"] == pytest.approx((before["images_per_s"]["total"] or 0) / (1 + lost))
    assert after["read_bytes"] * (1 + lost) == before["read_bytes"]
    assert len(after["ranks"]) == 2 - lost
    reason = reason_of(after, "complete journals")
    assert reason["severity"] == "invalid"
    assert name in reason["actual"]


def test_rereading_is_counted_across_ranks_and_in_parts_of_ranges(tmp_path: Path) -> None:
    run = synthetic_run(ranks=2)
    assert analyzed(run, tmp_path / "a")["input"]["reread_share"] == 0
    read_again(run)
    assert analyzed(run, tmp_path / "b")["input"]["reread_share"] == pytest.approx(0.5)
    size = sum(event.got_bytes for event in run.ranks[0] if isinstance(event, Request))
    run.change(1, Request, lambda event: with_changes(event, offset=event.offset + size // 2))
    assert analyzed(run, tmp_path / "c")["input"]["reread_share"] == pytest.approx(0.25)
    run.change(1, Request, lambda event: with_changes(event, error="Timeout"))
    assert analyzed(run, tmp_path / "d")["input"]["reread_share"] == 0


@pytest.mark.parametrize(
    "line",
    [
        '{"event":[]}',
        '{"event":"clock","t":1,"when":"end","offset_s":NaN,"uncertainty_s":0}',
        '{"event":"clock","t":1,"when":"end","offset_s":1e400,"uncertainty_s":0}',
        "[" * 100_000,
        '{"event":"run_end","t":1,"status":null,"unix_s":0}',
    ],
)
@pytest.mark.parametrize("name", ["rank-00001", "launcher"])
def test_a_line_that_cannot_be_is_invalid_and_no_traceback(tmp_path: Path, name: str, line: str) -> None:
    run_dir = synthetic_run().write(tmp_path)
    path = run_dir / f"journal/{name}.jsonl"
    path.write_text(line + "\n" + path.read_text())
    assert reason_of(analyze(run_dir), "readable journals")["severity"] == "invalid"


STRANGE = [None, True, "x", 5, -1, 1.5, math.nan, math.inf, 10**30, 1e300, [], [5], {}, {"a": "b"}, "\ud800", "rank"]


@pytest.mark.long
@pytest.mark.parametrize("make", [lambda: synthetic_run(steps=3, warmup_steps=1, step_s=2.0), quality_run])
@pytest.mark.parametrize("strange", STRANGE, ids=ascii)
def test_no_value_in_any_field_makes_a_traceback_or_nan(
    tmp_path: Path, strange: Any, make: Callable[[], SyntheticRun]
) -> None:
    """Each field of each event once, at the first event of its kind; then text and figures are made."""
    sound = make().write(tmp_path / "sound")
    recipe = (sound / "recipe.toml").read_text()
    for name in ("rank-00001.jsonl", "launcher.jsonl", "host-n1.jsonl"):
        lines = (sound / "journal" / name).read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        firsts = {row["event"]: number for number, row in reversed(list(enumerate(rows)))}
        run_dir = tmp_path / name
        (run_dir / "journal").mkdir(parents=True)
        (run_dir / "recipe.toml").write_text(recipe)
        for path in (sound / "journal").iterdir():
            (run_dir / "journal" / path.name).write_bytes(path.read_bytes())
        for number in firsts.values():
            for key in rows[number]:
                changed = [*lines[:number], json.dumps({**rows[number], key: strange}), *lines[number + 1 :]]
                (run_dir / "journal" / name).write_text("\n".join(changed) + "\n")
                facts = load_facts(run_dir)
                result = result_of(facts)
                json.loads(to_json(result), parse_constant=pytest.fail)
                total = result["images_per_s"]["total"]
                assert total is None or math.isfinite(total)
                assert summary_text(result)
                assert figures(facts, result).keys() >= {"bytes"}
                environment_table(result)


def test_one_time_that_is_no_number_makes_no_valid_total(tmp_path: Path) -> None:
    run = synthetic_run()
    change_steps(1, 20, end_t=math.nan)(run)
    run_dir = run.write(tmp_path)
    result = analyze(run_dir)
    assert result["validity"]["grade"] == "invalid"
    assert math.isfinite(result["images_per_s"]["total"] or 0)
    write_page(run_dir)


def test_a_folder_named_as_a_journal(tmp_path: Path) -> None:
    run_dir = synthetic_run().write(tmp_path)
    (run_dir / "journal/rank-00003.jsonl").mkdir()
    result = analyze(run_dir)
    assert "rank-00003.jsonl: cannot be read: Is a directory" in reason_of(result, "readable journals")["actual"]
    assert result["validity"]["grade"] == "invalid"


def test_clocks_not_measured_between_hosts_are_invalid(tmp_path: Path) -> None:
    run = synthetic_run(ranks=2, ranks_per_node=1)
    run.drop(1, Clock)
    assert reason_of(analyzed(run, tmp_path), "clocks")["severity"] == "invalid"


def reason_of(result: Result, rule: str) -> Reason:
    return next(reason for reason in result["validity"]["reasons"] if reason["rule"] == rule)


@pytest.mark.parametrize(("wanted_bytes", "severity"), [(5_000_000, "qualified"), (1_000_000, "invalid")])
def test_an_aborted_body_explains_no_more_than_was_asked(tmp_path: Path, wanted_bytes: int, severity: str) -> None:
    """The gateway sent 4 MB that the client counted as failed: a surplus that the failed tries bound."""
    run = synthetic_run()
    run.ranks[0].insert(2, request(run, 0, wanted_bytes=wanted_bytes, got_bytes=0, error="Timeout"))

    def more(event: Witness) -> Witness:
        is_first = event.target == "http://10.0.0.1:8333" and event.when == "after"
        return with_changes(event, count_bytes=event.count_bytes + 4_000_000) if is_first else event

    run.change_launcher(Witness, more)
    assert reason_of(analyzed(run, tmp_path), "received = served")["severity"] == severity


@pytest.mark.parametrize(
    ("name", "severity"), [("rank-00001", "invalid"), ("launcher", "invalid"), ("host-n1", "qualified")]
)
def test_unreadable_lines(tmp_path: Path, name: str, severity: str) -> None:
    run_dir = synthetic_run().write(tmp_path)
    path = run_dir / f"journal/{name}.jsonl"
    path.write_bytes(path.read_bytes() + b'{"event":"step","torn')
    result = analyze(run_dir)
    reason = reason_of(result, "readable journals")
    assert reason["severity"] == severity
    assert "torn last line" in reason["actual"]
    assert result["images_per_s"]["total"] is not None


def test_a_partial_volume_count_is_no_proof(tmp_path: Path) -> None:
    run = synthetic_run()
    run.change_launcher(Witness, lambda event: None if (event.source, event.when) == ("volume", "after") else event)
    result = analyzed(run, tmp_path)
    assert result["cache"]["state"] == "unknown"
    assert result["cache"]["disk_share"] is None


def test_a_folder_is_cold_when_nothing_was_resident(tmp_path: Path) -> None:
    run = synthetic_run(overrides={"data": {"url": "/data/imagenet"}})
    no_witness(run)
    assert analyzed(run, tmp_path / "a")["cache"]["state"] == "cold"
    run.change_launcher(Cache, lambda cache: with_changes(cache, note="not a local disk: nfs4"))
    result = analyzed(run, tmp_path / "c")
    assert result["cache"]["state"] == "unknown"
    assert reason_of(result, "cold start")["actual"] == "not a local disk: nfs4"
    run.change_launcher(Cache, lambda cache: with_changes(cache, resident_fraction=0.4))
    assert analyzed(run, tmp_path / "b")["cache"]["state"] == "not shown cold"


# --- result.json ------------------------------------------------------------------------------------------------

CONTRACT = [
    "status",
    "images_per_s",
    "step_s",
    "world_size",
    "steps",
    "warmup_steps",
    "samples",
    "read_bytes",
    "decoded_images",
    "data_wait_fraction",
    "au",
    "endpoints",
    "cache",
    "checkpoints",
    "resumed",
    "weights",
    "quality",
    "validity",
    "verdict",
    "environment",
    "schema",
    "error",
]


@pytest.mark.parametrize("broken", [None, *(row[2] for row in BROKEN)])
def test_json_has_every_key_and_no_nan(tmp_path: Path, broken: Callable[[SyntheticRun], None] | None) -> None:
    run = synthetic_run()
    if broken:
        broken(run)
    write_result(run.write(tmp_path))
    text = (tmp_path / "result.json").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    loaded = json.loads(text, parse_constant=refuse)
    assert set(CONTRACT) <= set(loaded)
    assert loaded["schema"] == 1
    assert loaded["verdict"]["stage"] == "undecided"
    assert {"mean", "stderr", "jitter", "per_rank"} <= set(loaded["images_per_s"])


def test_json_made_twice_is_byte_identical(tmp_path: Path) -> None:
    run_dir = synthetic_run(ranks=4, noise=0.2).write(tmp_path)
    write_result(run_dir)
    first = (run_dir / "result.json").read_bytes()
    code = f"import pathlib, drawbar.analyze.result as made; made.write_result(pathlib.Path({str(run_dir)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (run_dir / "result.json").read_bytes() == first
    assert not list(run_dir.glob(".result.json*"))


def test_json_survives_odd_strings(tmp_path: Path) -> None:
    run = synthetic_run()
    change_start(0, node="\ud800\u2028\x00")(run)
    assert "n1" in to_json(result_of(load_facts(run.write(tmp_path))))


def test_reading_never_imports_what_runs() -> None:
    code = (
        "import sys, pkgutil, importlib, drawbar.analyze, drawbar.report\n"
        "for package in (drawbar.analyze, drawbar.report):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "loaded = {'torch', 'obstore', 'multiprocessing.process', 'boto3'} & set(sys.modules)\n"
        "loaded |= {name for name in sys.modules if name.startswith(('drawbar.launch', 'drawbar.storage', "
        "'drawbar.train', 'drawbar.input'))}\n"
        # Taking addresses apart is no reading from them.
        "loaded -= {'drawbar.storage', 'drawbar.storage.urls'}\n"
        "sys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The input's stages


def test_stages_of_all_ranks_add_up_and_their_shares_to_one(tmp_path: Path) -> None:
    run = synthetic_run(ranks=3)
    result = analyze(run.write(tmp_path))
    stages = {stage["stage"]: stage for stage in result["input"]["stages"]}
    assert list(stages) == ["fetch", "split", "shuffle", "decode", "batch", "copy"]
    assert (stages["fetch"]["threads"], stages["decode"]["threads"], stages["copy"]["threads"]) == (12, 6, 3)
    assert stages["fetch"]["blocked_on_output"] == pytest.approx(0.75)
    assert stages["decode"]["busy"] == pytest.approx(0.5)
    assert stages["copy"]["busy"] == pytest.approx(0.02)
    assert stages["copy"]["blocked_on_input"] == pytest.approx(0.2)
    for stage in stages.values():
        shares = [stage["busy"], stage["blocked_on_input"], stage["blocked_on_output"]]
        assert sum(share or 0.0 for share in shares) == pytest.approx(1)
    assert stages["batch"]["queue_fill"] == pytest.approx(0.5)
    assert stages["decode"]["queue_fill"] is None
    run.change(1, InputReport, lambda report: with_changes(report, read_ahead=9, first_batch_s=1.5))
    result = analyze(run.write(tmp_path / "uneven"))
    assert result["input"]["first_batch_s"] == 1.5
    assert result["input"]["reading"] == {
        "request_bytes": [8 * 2**20] * 2,
        "read_ahead": [4, 9],
        "lanes": [8, 8],
        "tuned": ["read_ahead"],
    }


def test_a_journal_without_stages_has_none_in_its_result(tmp_path: Path) -> None:
    run = synthetic_run()
    for rank in run.ranks:
        run.drop(rank, InputStage, InputReport)
    counts = analyze(run.write(tmp_path))["input"]
    assert (counts["stages"], counts["reading"], counts["first_batch_s"]) == ([], None, None)
    assert counts["fallback_images"] is None
