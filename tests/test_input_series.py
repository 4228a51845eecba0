"""The input over time: what each sample says stands where it was taken, whatever the ranks and their clocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from drawbar.analyze.facts import load_facts
from drawbar.analyze.input_series import InputSeries, input_series
from drawbar.journal import InputSample
from drawbar.report.input_figures import queues_figure
from drawbar.report.plot import MAX_POINTS
from tests.synthetic_run import START_T, SyntheticRun, synthetic_run, with_changes


def series_of(run: SyntheticRun, tmp_path: Path, max_bins: int = MAX_POINTS) -> InputSeries:
    series = input_series(load_facts(run.write(tmp_path / "run")).run, max_bins)
    assert series is not None
    return series


def test_a_steady_run_has_the_shares_of_its_samples_all_along(tmp_path: Path) -> None:
    series = series_of(synthetic_run(ranks=3, offset_s=[0, 99.5, -7.25]), tmp_path)
    assert series.num_ranks == 3
    assert len(series.end_t) == len(series.fill["batch"]) >= 10
    assert START_T < series.end_t[0] < series.end_t[-1] < START_T + 15
    for name in ("fetch", "shuffle", "batch"):
        assert series.fill[name] == pytest.approx(0.5)
        assert series.lowest[name] == pytest.approx(0.5)
    assert series.blocked_in["decode"] == pytest.approx(0.1)
    assert series.blocked_out["decode"] == pytest.approx(0.4)
    assert series.blocked_out["fetch"] == pytest.approx(0.75)
    assert series.blocked_in["split"] == pytest.approx(0.15 / 0.8)


def test_a_queue_that_runs_empty_on_one_rank_shows_when_it_does(tmp_path: Path) -> None:
    run = synthetic_run(ranks=2, steps=60, step_s=1.0)
    change_t = START_T + 30.5

    def emptied(sample: InputSample) -> InputSample:
        return with_changes(sample, queued={**sample.queued, "batch": 0}) if sample.t > change_t else sample

    run.change(1, InputSample, emptied)
    series = series_of(run, tmp_path)
    before, after = series.end_t < change_t - 1, series.end_t > change_t + 1
    assert series.lowest["batch"][before] == pytest.approx(0.5)
    assert series.fill["batch"][before] == pytest.approx(0.5)
    assert series.lowest["batch"][after] == pytest.approx(0.0)
    assert series.fill["batch"][after] == pytest.approx(0.25)
    assert series.fill["fetch"] == pytest.approx(0.5)
    few = series_of(run, tmp_path, max_bins=3)
    assert few.lowest["batch"] == pytest.approx([0.5, 0.0, 0.0])
    assert 0.25 < few.fill["batch"][1] < 0.5


def test_a_stall_shows_as_blocked_on_input(tmp_path: Path) -> None:
    run = synthetic_run(ranks=1, steps=20, step_s=1.0)

    def stalled(sample: InputSample) -> InputSample:
        """From the eighth second on the decoders do nothing but wait."""
        beyond_s = max(0.0, sample.t - START_T - 8)
        return with_changes(
            sample,
            busy_s={**sample.busy_s, "decode": sample.busy_s["decode"] - beyond_s},
            wait_in_s={**sample.wait_in_s, "decode": sample.wait_in_s["decode"] + 1.8 * beyond_s},
            wait_out_s={**sample.wait_out_s, "decode": sample.wait_out_s["decode"] - 0.8 * beyond_s},
        )

    run.change(0, InputSample, stalled)
    series = series_of(run, tmp_path)
    assert series.blocked_in["decode"][series.end_t < START_T + 7.5] == pytest.approx(0.1)
    assert series.blocked_in["decode"][series.end_t > START_T + 9.5] == pytest.approx(1.0)


def test_a_queue_without_room_is_left_out_and_odd_counts_stay_in_range(tmp_path: Path) -> None:
    run = synthetic_run()
    for rank in run.ranks:
        run.change(
            rank,
            InputSample,
            lambda sample: with_changes(sample, queue_capacity={"fetch": 4, "batch": 2}, queued={"fetch": 7}),
        )
    facts = load_facts(run.write(tmp_path / "run"))
    series = input_series(facts.run, MAX_POINTS)
    assert series is not None
    assert set(series.fill) == {"fetch", "batch"}
    assert series.fill["fetch"] == pytest.approx(1.0)
    assert series.fill["batch"] == pytest.approx(0.0)
    figure = queues_figure(facts)
    assert figure is not None
    assert "bodies read ahead 100 % full, batches ready 0 % full" in figure.alt
    assert np.isfinite([value for trace in figure.data for value in trace["y"]]).all()


def test_a_journal_without_samples_has_no_such_figure(tmp_path: Path) -> None:
    run = synthetic_run()
    for rank in run.ranks:
        run.drop(rank, InputSample)
    facts = load_facts(run.write(tmp_path))
    assert input_series(facts.run, MAX_POINTS) is None
    assert queues_figure(facts) is None
