"""Several runs as one result: the olympic mean, and what invalidates it."""

from __future__ import annotations

import pytest

from drawbar.analyze.repeats import olympic_mean


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
