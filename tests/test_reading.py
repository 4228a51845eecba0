"""How request size and read-ahead are found: doubled while it pays, within a budget, never against the recipe."""

from __future__ import annotations

import pytest

from drawbar.input.reading import BUDGET_BYTES, Reading

MIB = 1 << 20


def feed(reading: Reading, first_byte_s: float, bytes_per_s: float, num_gets: int = 60, waited: bool = True) -> Reading:
    """GETs whose time is a fixed part and a part by size."""
    for _ in range(num_gets):
        size = reading.request_bytes
        reading.note(size, first_byte_s + size / bytes_per_s, waited)
    return reading


@pytest.mark.parametrize(
    ("first_byte_s", "bytes_per_s", "expected"),
    [
        (0.0, 500e6, 4 * MIB),  # nothing to hide: no larger than needed
        (0.003, 500e6, 8 * MIB),  # a store on the same host
        (0.05, 100e6, 16 * MIB),  # a far one
    ],
)
def test_a_request_is_doubled_as_long_as_that_makes_it_faster(
    first_byte_s: float, bytes_per_s: float, expected: int
) -> None:
    reading = feed(Reading(request_bytes=0, read_ahead=0, num_lanes=1), first_byte_s, bytes_per_s)
    assert reading.request_bytes == expected


@pytest.mark.parametrize("num_lanes", [1, 3, 16, 64, 500])
@pytest.mark.parametrize("read_ahead", [0, 8])
def test_the_budget_holds_whatever_the_lanes(num_lanes: int, read_ahead: int) -> None:
    reading = feed(Reading(request_bytes=0, read_ahead=read_ahead, num_lanes=num_lanes), 0.1, 100e6, 200)
    assert (num_lanes + reading.read_ahead) * reading.request_bytes <= BUDGET_BYTES
    assert reading.read_ahead >= (read_ahead or 4)


def test_read_ahead_grows_only_where_bodies_were_waited_for() -> None:
    assert feed(Reading(request_bytes=MIB, read_ahead=0, num_lanes=1), 0.01, 1e8, waited=False).read_ahead == 4
    grown = feed(Reading(request_bytes=MIB, read_ahead=0, num_lanes=1), 0.01, 1e8)
    assert 4 < grown.read_ahead <= grown.max_read_ahead


def test_what_the_recipe_says_is_left_as_it_is() -> None:
    reading = feed(Reading(request_bytes=3 * MIB, read_ahead=2, num_lanes=4), 0.1, 1e8)
    assert (reading.request_bytes, reading.read_ahead, reading.tuned) == (3 * MIB, 2, [])
    half = feed(Reading(request_bytes=0, read_ahead=2, num_lanes=4), 0.1, 1e8)
    assert (half.read_ahead, half.tuned) == (2, ["request_bytes"])
