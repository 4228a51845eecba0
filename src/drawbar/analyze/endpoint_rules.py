"""Rules on endpoints: did each request go where the recipe's policy sends it, and what went wrong on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from drawbar.analyze.facts import Facts
from drawbar.analyze.schema import Reason, Severity
from drawbar.analyze.timeline import RankTimeline
from drawbar.journal import EndpointChange, Request
from drawbar.plural import plural

_SLACK_S = 1.0
"""A request that was sent elsewhere may begin this long before or after the journal has its endpoint set aside."""


def endpoint_policy(facts: Facts) -> Reason | None:
    """Where a failed endpoint made requests go elsewhere, the number is right and says how many bytes that were."""
    unknown = _outside_the_recipe(facts)
    if unknown:
        return _reason("only the recipe's endpoints", unknown, "invalid")
    policy = facts.run.recipe.storage.policy
    if policy == "rank":
        return _own_endpoint(facts)
    return _in_turn(facts) if policy == "round-robin" else None


def _outside_the_recipe(facts: Facts) -> str:
    listed = facts.run.recipe.storage.endpoints
    if isinstance(listed, str) or not facts.run.recipe.data.url.startswith("s3://"):
        return ""
    known = {url.rstrip("/") for url in listed}
    strays = (
        f"rank {rank.rank} read from {url}"
        for rank in facts.run.ranks
        for url in sorted({_url(request) for request in rank.requests if request.kind != "checkpoint"} - known)
    )
    return next(strays, "")


def _own_endpoint(facts: Facts) -> Reason | None:
    expected = "each rank reads from its own endpoint"
    moved_bytes = total_bytes = 0
    moved_ranks = []
    for rank in facts.run.ranks:
        if rank.start is None or not rank.start.endpoint:
            continue
        own = rank.start.endpoint.rstrip("/")
        data = [request for request in rank.requests if request.kind == "data"]
        elsewhere = [request for request in data if _url(request) != own]
        away = list(_set_aside(rank, own))
        for request in elsewhere:
            if not (request.attempt or request.reread or _within(request, away)):
                return _reason(expected, f"rank {rank.rank} also read from {_url(request)}", "invalid")
        total_bytes += sum(request.got_bytes for request in data)
        moved_bytes += sum(request.got_bytes for request in elsewhere)
        moved_ranks += [rank.rank] if elsewhere else []
    if not moved_ranks:
        return None
    actual = (
        f"{moved_bytes / 1e6:,.1f} of {total_bytes / 1e6:,.1f} MB came from others, as requests or the endpoint of "
        f"{plural(len(moved_ranks), 'rank')} failed"
    )
    return _reason(expected, actual, "qualified")


def _in_turn(facts: Facts) -> Reason | None:
    """Exact: where nothing failed, no endpoint was asked more than once more than another."""
    listed = facts.run.recipe.storage.endpoints
    urls = [row["url"] for row in facts.endpoints] if isinstance(listed, str) else [url.rstrip("/") for url in listed]
    for rank in facts.run.ranks:
        if rank.status != "ok" or rank.journal.of(EndpointChange) or any(request.error for request in rank.requests):
            continue
        asked = Counter(_url(request) for request in rank.requests)
        counts = [asked[url] for url in urls] or [0]
        if max(counts) - min(counts) > 1:
            actual = f"{min(counts)} to {max(counts)} by rank {rank.rank}"
            return _reason("as many requests to each endpoint", actual, "invalid")
    return None


def storage_errors(facts: Facts) -> Reason | None:
    """Anything that did not go well at once, in numbers."""
    counts = (
        (sum(endpoint["errors"] for endpoint in facts.endpoints), "failed request", "failed requests"),
        (sum(endpoint["retries"] for endpoint in facts.endpoints), "retry", "retries"),
        (
            sum(endpoint["busy"] for endpoint in facts.endpoints),
            "answer that the store is busy",
            "answers that the store is busy",
        ),
        (sum(endpoint["corrupt"] for endpoint in facts.endpoints), "damaged body", "damaged bodies"),
        (
            sum(endpoint["set_aside"] for endpoint in facts.endpoints),
            "time an endpoint was set aside",
            "times an endpoint was set aside",
        ),
    )
    said = ", ".join(plural(count, noun, nouns) for count, noun, nouns in counts if count)
    if not said:
        return None
    return Reason(rule="storage errors", expected="none", actual=said, severity="qualified")


def _set_aside(rank: RankTimeline, url: str) -> Iterator[tuple[float, float]]:
    """(from, to) of each time, on the rank's own clock."""
    begin_t: float | None = None
    for change in rank.journal.of(EndpointChange):
        if change.endpoint.rstrip("/") != url:
            continue
        if change.change == "set_aside":
            begin_t = change.t
        elif change.change == "returned" and begin_t is not None:
            yield begin_t, change.t
            begin_t = None
    if begin_t is not None:
        yield begin_t, float("inf")


def _within(request: Request, spans: list[tuple[float, float]]) -> bool:
    start_t = request.t - request.total_s
    return any(begin_t - _SLACK_S <= start_t <= end_t + _SLACK_S for begin_t, end_t in spans)


def _url(request: Request) -> str:
    return request.endpoint.rstrip("/")


def _reason(expected: str, actual: str, severity: Severity) -> Reason:
    return Reason(rule="endpoint policy", expected=expected, actual=actual, severity=severity)
