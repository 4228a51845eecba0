"""What the result says of endpoints that fail: who was asked instead, whether that was right, and what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drawbar.analyze.result import analyze
from drawbar.analyze.schema import Reason, Result
from drawbar.journal import EndpointChange, InputTotals, Request, Witness
from tests.synthetic_run import SyntheticRun, synthetic_run, with_changes

HOME, OTHER = "http://10.0.0.1:8333", "http://10.0.0.2:8333"


def run_of(policy: str = "rank") -> SyntheticRun:
    """One rank and two endpoints, its requests spread as `policy` has it; nobody witnesses what was served."""
    urls = [HOME, OTHER]
    run = synthetic_run(ranks=1, overrides={"storage": {"endpoints": urls, "policy": policy}})
    for when in ("before", "after"):
        run.change_launcher(Witness, lambda event, when=when: None if event.when == when else event)  # type: ignore[misc]
    if policy == "round-robin":
        turn = iter(urls * 1000)
        run.change(0, Request, lambda event: with_changes(event, endpoint=next(turn)))
    return run


def analyzed(run: SyntheticRun, tmp_path: Path) -> Result:
    return analyze(run.write(tmp_path / "run"))


def policy_reason(result: Result) -> Reason | None:
    return next((reason for reason in result["validity"]["reasons"] if reason["rule"] == "endpoint policy"), None)


def requests(run: SyntheticRun) -> list[Request]:
    return [event for event in run.ranks[0] if isinstance(event, Request)]


def send_elsewhere(run: SyntheticRun, number: int, **values: Any) -> Request:
    """The request with this number goes to the other endpoint."""
    chosen = requests(run)[number]
    moved = with_changes(chosen, endpoint=OTHER, **values)
    run.change(0, Request, lambda event: moved if event is chosen else event)
    return moved


def change(run: SyntheticRun, t: float, what: str, endpoint: str = HOME) -> None:
    run.ranks[0].insert(2, EndpointChange(t=t, endpoint=endpoint, change=what, why="it was told to"))


def test_reading_elsewhere_without_a_failure_is_invalid(tmp_path: Path) -> None:
    run = run_of()
    send_elsewhere(run, 1)
    reason = policy_reason(analyzed(run, tmp_path))
    assert reason is not None
    assert reason["severity"] == "invalid"
    assert OTHER in reason["actual"]


@pytest.mark.parametrize(
    ("before_s", "after_s", "severity"), [(5.0, 5.0, "qualified"), (None, None, "none"), (-60.0, 90.0, "invalid")]
)
def test_failover_counts_only_while_the_own_endpoint_was_set_aside(
    tmp_path: Path, before_s: float | None, after_s: float | None, severity: str
) -> None:
    run = run_of()
    if before_s is not None and after_s is not None:
        moved = send_elsewhere(run, 1)
        change(run, moved.t + after_s, "returned")
        change(run, moved.t - before_s, "set_aside")
    result = analyzed(run, tmp_path)
    reason = policy_reason(result)
    assert (reason["severity"] if reason else "none") == severity
    if severity == "qualified":
        assert reason is not None
        share = requests(run)[1].got_bytes / 1e6
        assert reason["actual"].startswith(f"{share:,.1f} of {result['read_bytes'] / 1e6:,.1f} MB came from others")


@pytest.mark.parametrize("values", [{"attempt": 1}, {"reread": True}])
def test_a_try_again_elsewhere_is_right_and_named(tmp_path: Path, values: dict[str, Any]) -> None:
    run = run_of()
    send_elsewhere(run, 1, **values)
    reason = policy_reason(analyzed(run, tmp_path))
    assert reason is not None
    assert reason["severity"] == "qualified"


@pytest.mark.parametrize("policy", ["rank", "round-robin", "least-outstanding"])
def test_an_endpoint_that_is_not_in_the_recipe_is_invalid(tmp_path: Path, policy: str) -> None:
    run = run_of(policy)
    chosen = requests(run)[0]
    run.change(
        0, Request, lambda event: with_changes(event, endpoint="http://10.9.9.9:1") if event is chosen else event
    )
    reason = policy_reason(analyzed(run, tmp_path))
    assert reason is not None
    assert (reason["severity"], reason["actual"]) == ("invalid", "rank 0 read from http://10.9.9.9:1")


def test_round_robin_is_held_to_its_word(tmp_path: Path) -> None:
    assert policy_reason(analyzed(run_of("round-robin"), tmp_path / "even")) is None
    run = run_of("round-robin")
    run.change(0, Request, lambda event: with_changes(event, endpoint=HOME))
    reason = policy_reason(analyzed(run, tmp_path / "uneven"))
    assert reason is not None
    assert reason["severity"] == "invalid"
    change(run, 100.0, "set_aside", OTHER)
    assert policy_reason(analyzed(run, tmp_path / "failed")) is None


def test_least_outstanding_may_ask_anyone_in_the_recipe(tmp_path: Path) -> None:
    assert policy_reason(analyzed(run_of("least-outstanding"), tmp_path)) is None


def test_each_endpoint_has_its_troubles_counted(tmp_path: Path) -> None:
    run = run_of()
    first = requests(run)[0]
    spoiled = [
        with_changes(first, got_bytes=0, error="503", status=503),
        with_changes(first, got_bytes=0, error="Timeout", attempt=1),
        with_changes(first, endpoint=OTHER, got_bytes=0, error="503", status=503, attempt=2),
        with_changes(first, endpoint=HOME, kind="probe", wanted_bytes=1, got_bytes=0, error="503", status=503),
        with_changes(first, endpoint=HOME, kind="probe", wanted_bytes=1, got_bytes=1),
        with_changes(first, endpoint=OTHER, reread=True),
    ]
    run.ranks[0][2:2] = spoiled
    for what in ("returned", "set_aside", "corrupt"):
        change(run, first.t, what)
    run.change(
        0,
        InputTotals,
        lambda totals: with_changes(
            totals,
            received_bytes=totals.received_bytes + first.got_bytes,
            discarded_bytes=totals.discarded_bytes + first.got_bytes,
        ),
    )
    result = analyzed(run, tmp_path)
    home, other = result["endpoints"]
    names = ("errors", "retries", "busy", "rereads", "corrupt", "set_aside", "returned", "probes")
    assert tuple(home[name] for name in names) == (2, 1, 1, 0, 1, 1, 1, 2)  # type: ignore[literal-required]
    assert tuple(other[name] for name in names) == (1, 1, 1, 1, 0, 0, 0, 0)  # type: ignore[literal-required]
    said = {reason["rule"]: reason for reason in result["validity"]["reasons"]}
    assert said["storage errors"]["actual"] == (
        "3 failed requests, 2 retries, 2 answers that the store is busy, 1 damaged body, "
        "1 time an endpoint was set aside"
    )
    # A reread is no more than was planned: the byte balance holds.
    assert not {"received = planned", "received = sum of requests", "received = trained + discarded"} & said.keys()
