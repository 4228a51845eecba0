"""Several runs as one result: the olympic mean, and what invalidates it."""

from __future__ import annotations

from pathlib import Path

import pytest

from drawbar.analyze.repeats import olympic_mean, summarize
from drawbar.analyze.result import analyze
from drawbar.report.terminal import series_text
from tests.quality_run import PAUSE_S, quality_run


def test_fastest_and_slowest_are_dropped() -> None:
    found = olympic_mean([50.0, 10.0, 30.0, 20.0, 40.0])
    assert found.mean_s == 30.0
    assert (found.fastest, found.slowest, found.kept) == (1, 0, (2, 3, 4))


def test_one_that_does_not_converge_counts_as_slowest() -> None:
    found = olympic_mean([50.0, 10.0, None, 20.0, 40.0])
    assert found.mean_s == pytest.approx((50 + 20 + 40) / 3)
    assert (found.slowest, found.failed) == (2, (2,))


@pytest.mark.parametrize("times_s", [[None, 10.0, None, 20.0, 40.0], [None] * 5, [None], [10.0, None], []])
def test_more_than_one_invalidates(times_s: list[float | None]) -> None:
    assert olympic_mean(times_s).mean_s is None


def test_of_three_the_middle_one_counts_and_fewer_are_all_kept() -> None:
    assert olympic_mean([3.0, 1.0, 2.0]).mean_s == 2.0
    assert olympic_mean([3.0, 1.0]).mean_s == 2.0
    assert olympic_mean([3.0]).mean_s == 3.0
    assert olympic_mean([3.0]).slowest is None


def test_equal_times() -> None:
    found = olympic_mean([2.0, 2.0, 2.0])
    assert (found.mean_s, found.fastest, found.kept, found.slowest) == (2.0, 0, (1,), 2)


def test_a_series_says_what_was_dropped_and_why_it_is_none(tmp_path: Path) -> None:
    results = []
    for i, target in enumerate((0.5, 0.7, 0.9)):
        result = analyze(quality_run(target).write(tmp_path / str(i)))
        results.append((f"run-{i}", result))
    series = summarize("made-up", results)
    # After 12 and 18 steps, and never: the second remains.
    assert [row["counted"] for row in series["runs"]] == ["fastest", "kept", "slowest"]
    assert series["time_to_quality_s"] == pytest.approx(20.0 + 3 * PAUSE_S)
    assert series["epochs"] == pytest.approx(18 * 16 / 2048)
    assert series["valid"]
    assert series["reasons"] == [
        "the target was not met by run-2, which counts as slowest",
        "3 runs; MLPerf's rules want 5",
    ]
    text = series_text(series)
    assert "slowest, not met" in text
    assert "time to quality: 32.00 s, the mean of 1 run without the fastest and the slowest" in text
    assert max(map(len, text.splitlines())) <= 80
    none = summarize("made-up", [*results, results[2]])
    assert (none["time_to_quality_s"], none["valid"]) == (None, False)
    assert "at most one" in none["reasons"][0]
    assert "no time to quality" in series_text(none)
