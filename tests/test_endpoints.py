"""The endpoint policies by themselves: who is asked, who is set aside, who comes back."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from drawbar.storage.endpoints import EndpointPool, NoEndpoint, Policy
from drawbar.storage.failures import Kind

URLS = ["http://a:1", "http://b:1", "http://c:1"]


class Bench:
    """A pool whose endpoints are well again when `well` says so."""

    def __init__(self, policy: Policy = "rank", rank: int = 0, urls: list[str] = URLS) -> None:
        self.well = threading.Event()
        self.changes: list[tuple[str, str, str]] = []
        self.pool = EndpointPool(
            urls,
            policy,
            rank,
            probe=lambda index: self.well.is_set(),
            changed=lambda url, change, why: self.changes.append((url, change, why)),
        )

    def ask(self, count: int) -> list[int]:
        """Requests one after the other, all well."""
        asked = []
        for _ in range(count):
            asked.append(self.pool.acquire(5))
            self.pool.release(asked[-1], None)
        return asked


def test_a_rank_stays_with_its_endpoint() -> None:
    for rank in range(7):
        bench = Bench("rank", rank)
        assert bench.ask(4) == [rank % 3] * 4
        assert bench.pool.home == rank % 3


def test_round_robin_begins_at_the_rank_and_goes_round() -> None:
    assert Bench("round-robin", 1).ask(5) == [1, 2, 0, 1, 2]


def test_least_outstanding_asks_who_is_asked_least() -> None:
    bench = Bench("least-outstanding")
    held = [bench.pool.acquire(5) for _ in range(4)]
    assert Counter(held) == {0: 2, 1: 1, 2: 1}
    # Endpoint 1 answers at once, the others never: it gets everything from here on.
    bench.pool.release(1, None)
    assert bench.ask(5) == [1] * 5


@pytest.mark.parametrize("failure", ["unreachable", "silent"])
def test_an_endpoint_that_is_gone_is_set_aside_at_once_and_returns(failure: Kind) -> None:
    bench = Bench("rank")
    bench.pool.release(bench.pool.acquire(5), failure, "why it failed")
    assert bench.changes == [(URLS[0], "set_aside", "why it failed")]
    assert bench.ask(3) == [1] * 3
    bench.well.set()
    end_t = time.monotonic() + 10
    while len(bench.changes) < 2:
        assert time.monotonic() < end_t
        time.sleep(0.05)
    assert bench.changes[1] == (URLS[0], "returned", "")
    assert bench.ask(3) == [0] * 3


def test_a_broken_answer_now_and_then_sets_nothing_aside_three_in_a_row_do() -> None:
    bench = Bench("rank")
    for _ in range(5):
        for _ in range(2):
            bench.pool.release(bench.pool.acquire(5), "broken")
        assert bench.ask(1) == [0]
    assert not bench.changes
    for _ in range(3):
        bench.pool.release(bench.pool.acquire(5), "broken")
    assert [change for _, change, _ in bench.changes] == ["set_aside"]


def test_a_try_again_goes_elsewhere_where_there_is_an_elsewhere() -> None:
    assert Bench("rank").pool.acquire(5, avoid=(0,)) == 1
    assert Bench("rank", urls=URLS[:1]).pool.acquire(5, avoid=(0,)) == 0


def test_what_is_wrong_with_the_request_says_nothing_of_the_endpoint() -> None:
    bench = Bench("rank")
    failures: tuple[Kind, ...] = ("missing", "refused", "expired", "replaced")
    for failure in failures * 3:
        bench.pool.release(bench.pool.acquire(5), failure)
    assert bench.ask(1) == [0]
    assert not bench.changes


def test_an_only_endpoint_is_never_set_aside() -> None:
    bench = Bench("rank", urls=URLS[:1])
    for _ in range(9):
        bench.pool.release(bench.pool.acquire(5), "unreachable")
    assert bench.ask(1) == [0]
    assert not bench.changes


def test_a_busy_endpoint_rests_then_gets_half_as_many_requests_and_more_with_each_success() -> None:
    bench = Bench("rank", urls=URLS[:1])
    for _ in range(8):
        bench.pool.acquire(5)
    for _ in range(8):
        bench.pool.release(0, "busy")
    with pytest.raises(NoEndpoint):
        bench.pool.acquire(0.01)
    for _ in range(4):
        bench.pool.acquire(5)
    with pytest.raises(NoEndpoint):
        bench.pool.acquire(0.01)
    for _ in range(4):
        bench.pool.release(0, None)
    for _ in range(5):
        bench.pool.acquire(1)
    with pytest.raises(NoEndpoint):
        bench.pool.acquire(0.01)


def test_others_take_over_from_a_busy_one_unless_a_rank_has_its_own() -> None:
    bench = Bench("round-robin")
    bench.pool.release(bench.pool.acquire(5), "busy")
    assert 0 not in [bench.pool.acquire(5) for _ in range(2)]
    bench = Bench("rank")
    bench.pool.release(bench.pool.acquire(5), "busy")
    assert bench.pool.acquire(5) == 0


def test_closing_ends_every_wait() -> None:
    bench = Bench("rank", urls=URLS[:2])
    for index in (0, 1):
        bench.pool.release(bench.pool.acquire(5, avoid=(1 - index,)), "unreachable")
    threading.Timer(0.2, bench.pool.close).start()
    began_t = time.monotonic()
    with pytest.raises(NoEndpoint):
        bench.pool.acquire(60)
    assert time.monotonic() - began_t < 10
