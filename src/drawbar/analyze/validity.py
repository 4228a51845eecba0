"""May this number be used? A table of rules, each a pure function from the facts to a reason or None.

*invalid*: the number is wrong or nobody can tell what it means. *qualified*: it is right, but it needs this sentence
beside it. *valid*: no rule spoke.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from drawbar.analyze.facts import Facts
from drawbar.analyze.schema import Grade, Reason, Severity, Validity
from drawbar.analyze.timeline import RankTimeline
from drawbar.analyze.traffic import input_totals
from drawbar.journal import RunStart

BYTE_TOLERANCE = 0.01
"""Two counts of the same bytes may differ by this share: metadata and HTTP framing are not counted alike everywhere."""
CLOCK_TOLERANCE = 0.01
"""Of the interval; a larger clock uncertainty moves the edges of the interval by as much."""
SPAN_TOLERANCE = 0.05
"""Of the step time; what the spans may leave out or count twice."""
MAX_STEAL = 0.05
MIN_STEPS = 20

Rule = Callable[[Facts], Reason | None]


def _reason(rule: str, expected: str, actual: str, severity: Severity) -> Reason:
    return Reason(rule=rule, expected=expected, actual=actual, severity=severity)


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= BYTE_TOLERANCE * max(a, b)


def _percent(share: float, digits: int = 0) -> str:
    return f"{share * 100:.{digits}f} %"


def _mb(count_bytes: float) -> str:
    return f"{count_bytes / 1e6:,.1f} MB"


def _ranks(numbers: Iterable[int]) -> str:
    shown = list(numbers)
    text = ", ".join(str(number) for number in shown[:8])
    return ("rank " if len(shown) == 1 else "ranks ") + text + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def _reads_data(facts: Facts) -> bool:
    return facts.run.recipe.input.source == "data"


# --- the run itself ---------------------------------------------------------------------------------------------


def run_ended_ok(facts: Facts) -> Reason | None:
    if facts.status == "ok":
        return None
    return _reason("run ended ok", "ok", facts.status, "invalid")


def every_rank_wrote_to_the_end(facts: Facts) -> Reason | None:
    """One journal for each rank of the world, with one start and an end that says ok."""
    world_size = facts.run.recipe.launch.ranks
    found = [rank.rank for rank in facts.run.ranks]
    wrong = []
    if missing := sorted(set(range(world_size)) - set(found)):
        wrong.append(f"no journal of {_ranks(missing)}")
    if strange := sorted(set(found) - set(range(world_size))):
        wrong.append(f"unexpected {_ranks(strange)}")
    if unended := [rank.rank for rank in facts.run.ranks if rank.status != "ok"]:
        wrong.append(f"no run_end ok of {_ranks(unended)}")
    if unstarted := [rank.rank for rank in facts.run.ranks if len(rank.journal.of(RunStart)) != 1]:
        wrong.append(f"not exactly one run_start of {_ranks(unstarted)}")
    if other := [rank.rank for rank in facts.run.ranks if rank.start and rank.start.world_size != world_size]:
        wrong.append(f"another world size seen by {_ranks(other)}")
    if not wrong:
        return None
    return _reason("complete journals", f"{world_size} ranks, each from start to end", "; ".join(wrong), "invalid")


def journals_readable(facts: Facts) -> Reason | None:
    problems = facts.run.problems
    if not problems:
        return None
    severity: Severity = "invalid" if any(text.startswith("rank-") for text in problems) else "qualified"
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return _reason("readable journals", "every line", "; ".join(problems[:3]) + more, severity)


def one_recipe(facts: Facts) -> Reason | None:
    """All ranks ran the recipe that lies beside the journal."""
    expected = facts.run.recipe.sha256()
    other = [rank.rank for rank in facts.run.ranks if rank.start and rank.start.recipe_sha256 != expected]
    if not other:
        return None
    return _reason("one recipe", f"{expected[:12]} on all ranks", f"another on {_ranks(other)}", "invalid")


def one_data_set(facts: Facts) -> Reason | None:
    hashes = sorted({rank.start.dataset_sha256 for rank in facts.run.ranks if rank.start})
    if len(hashes) > 1:
        seen = ", ".join(value[:12] or "none" for value in hashes)
        return _reason("one data set", "the same shard list on all ranks", seen, "invalid")
    if hashes == [""] and _reads_data(facts):
        return _reason("one data set", "a hash of the shard list", "not recorded", "qualified")
    return None


def equal_steps(facts: Facts) -> Reason | None:
    """Every rank finished all steps of the recipe, each once, in order."""
    train = facts.run.recipe.train
    expected = np.arange(train.warmup_steps + train.steps)

    def complete(rank: RankTimeline) -> bool:
        return (
            len(rank.warmup) == train.warmup_steps
            and len(rank.measured) == train.steps
            and bool(np.array_equal(np.concatenate([rank.warmup.step, rank.measured.step]), expected))
        )

    wrong = [rank for rank in facts.run.ranks if not complete(rank)]
    if not wrong:
        return None
    counts = ", ".join(f"rank {rank.rank}: {len(rank.warmup)} + {len(rank.measured)}" for rank in wrong[:4])
    counts += ", …" if len(wrong) > 4 else ""
    return _reason("equal steps", f"{train.warmup_steps} warm-up + {train.steps} on every rank", counts, "invalid")


def shared_interval(facts: Facts) -> Reason | None:
    if facts.interval is not None:
        return None
    return _reason("common interval", "a time in which all ranks measured", "none", "invalid")


def enough_steps(facts: Facts) -> Reason | None:
    count = 0 if facts.steps is None else len(facts.steps.step)
    if count >= MIN_STEPS:
        return None
    return _reason("measured steps", f"at least {MIN_STEPS}", str(count), "qualified")


def loss_is_a_number(facts: Facts) -> Reason | None:
    for rank in facts.run.ranks:
        for steps in (rank.warmup, rank.measured):
            bad = steps.step[steps.fetched & ~np.isfinite(steps.loss)]
            if len(bad):
                return _reason("loss", "a finite number", f"not one in step {bad[0]} of rank {rank.rank}", "invalid")
    return None


def spans_make_up_the_step(facts: Facts) -> Reason | None:
    """A span that is missing or counted twice would put the blame on the wrong stage."""
    off = []
    for rank in facts.run.ranks:
        steps = rank.measured
        spans_s = float((steps.data_wait_s + steps.copy_s + steps.compute_s + steps.optimizer_s).sum())
        total_s = float(steps.step_s.sum())
        if total_s > 0 and abs(spans_s / total_s - 1) > SPAN_TOLERANCE:
            off.append((abs(spans_s / total_s - 1), rank.rank, spans_s / total_s))
    if not off:
        return None
    _, rank_number, share = max(off)
    actual = f"{_percent(share)} of it on rank {rank_number}"
    return _reason("step spans", "wait, copy, compute and optimizer make up the step time", actual, "qualified")


# --- bytes and images -------------------------------------------------------------------------------------------


def loaders_reported(facts: Facts) -> Reason | None:
    missing = [
        rank.rank for rank, totals in zip(facts.run.ranks, input_totals(facts.run), strict=True) if totals is None
    ]
    if not missing:
        return None
    return _reason("input totals", "one from every rank", f"none from {_ranks(missing)}", "invalid")


def received_is_served(facts: Facts) -> Reason | None:
    """Clients' counts against the gateways' own, per endpoint and in all."""
    witnessed = [endpoint for endpoint in facts.endpoints if endpoint["gateway_bytes"] is not None]
    for endpoint in witnessed:
        served = endpoint["gateway_bytes"] or 0
        if _close(endpoint["bytes"], served):
            continue
        # A body that broke off was sent, or half of it, and never counted by its client.
        broken = endpoint["errors"] > 0 and served > endpoint["bytes"]
        actual = f"{_mb(endpoint['bytes'])} received, {_mb(served)} served by {endpoint['url']}"
        severity: Severity = "qualified" if broken else "invalid"
        return _reason("received = served", f"within {_percent(BYTE_TOLERANCE)}", actual, severity)
    if witnessed and len(witnessed) < len(facts.endpoints):
        actual = f"{len(witnessed)} of {len(facts.endpoints)} endpoints"
        return _reason("received = served", "a count from every endpoint", actual, "qualified")
    return None


def received_is_trained_or_discarded(facts: Facts) -> Reason | None:
    counts = facts.input
    received, trained, discarded = counts["received_bytes"], counts["trained_bytes"], counts["discarded_bytes"]
    inflated = counts["inflated_bytes"]
    if received is None or trained is None or discarded is None or inflated is None:
        return None
    if discarded >= 0 and _close(received + inflated, trained + discarded):
        return None
    actual = f"{_mb(received)} received, {_mb(trained)} trained, {_mb(discarded)} discarded"
    actual += f", {_mb(inflated)} added by decompressing" if inflated else ""
    return _reason("received = trained + discarded", f"within {_percent(BYTE_TOLERANCE)}", actual, "invalid")


def received_is_planned(facts: Facts) -> Reason | None:
    received, planned = facts.input["received_bytes"], facts.input["planned_bytes"]
    if received is None or planned is None:
        return None
    requests = (request for rank in facts.run.ranks for request in rank.requests)
    failed = sum(request.got_bytes for request in requests if request.error and request.kind == "data")
    if _close(planned, received - failed):
        return None
    actual = f"{_mb(planned)} planned, {_mb(received - failed)} received without failed tries"
    return _reason("received = planned", f"within {_percent(BYTE_TOLERANCE)}", actual, "invalid")


def received_is_requested(facts: Facts) -> Reason | None:
    """The loaders' totals against the sum of single requests: two counts that meet nowhere else."""
    received = facts.input["received_bytes"]
    data_bytes = sum(endpoint["data_bytes"] for endpoint in facts.endpoints)
    if received is None or _close(received, data_bytes):
        return None
    actual = f"{_mb(received)} by the loaders, {_mb(data_bytes)} by single requests"
    return _reason("received = sum of requests", f"within {_percent(BYTE_TOLERANCE)}", actual, "invalid")


def images_add_up(facts: Facts) -> Reason | None:
    """No image is trained that was not decoded, and the loaders count as many as the steps did."""
    decoded, trained = facts.input["decoded_images"], facts.input["trained_images"]
    if decoded is None or trained is None:
        return None
    stepped = sum(int(rank.warmup.samples.sum() + rank.measured.samples.sum()) for rank in facts.run.ranks)
    if (decoded >= trained or not _reads_data(facts)) and trained == stepped:
        return None
    actual = f"{decoded:,} decoded, {trained:,} trained, {stepped:,} in steps"
    return _reason("images", "decoded >= trained = in steps", actual, "invalid")


def own_endpoint(facts: Facts) -> Reason | None:
    for rank in facts.run.ranks:
        if rank.start is None or not rank.start.endpoint:
            continue
        asked = {request.endpoint.rstrip("/") for request in rank.requests if request.kind == "data"}
        if stray := sorted(asked - {rank.start.endpoint.rstrip("/")}):
            actual = f"rank {rank.rank} also read from {stray[0]}"
            return _reason("endpoint policy", "each rank reads from its own endpoint", actual, "invalid")
    return None


def no_retries(facts: Facts) -> Reason | None:
    errors = sum(endpoint["errors"] for endpoint in facts.endpoints)
    retries = sum(endpoint["retries"] for endpoint in facts.endpoints)
    if not errors and not retries:
        return None
    return _reason("storage errors", "none", f"{errors} failed requests, {retries} retries", "qualified")


def no_bad_images(facts: Facts) -> Reason | None:
    bad = facts.input["bad_images"]
    return _reason("bad images", "none", f"{bad:,}", "qualified") if bad else None


# --- cold, emulated, disturbed ----------------------------------------------------------------------------------


def shown_cold(facts: Facts) -> Reason | None:
    cache = facts.cache
    if cache["wanted"] != "cold" or cache["state"] == "cold" or not _reads_data(facts):
        return None
    if cache["state"] == "unknown":
        return _reason("cold start", "bytes shown to come from disk", "server cache unknown", "qualified")
    if cache["disk_share"] is not None:
        actual = f"{_percent(cache['disk_share'])} of the served bytes were read from disk"
    else:
        actual = f"{_percent(cache['resident_fraction'] or 0)} of the data was in the page cache at the start"
    return _reason("cold start", "bytes shown to come from disk", actual, "qualified")


def one_epoch_when_cold(facts: Facts) -> Reason | None:
    epochs = facts.input["epochs"]
    if facts.cache["wanted"] != "cold" or epochs is None or epochs <= 1 + 1e-9:
        return None
    return _reason("cold epochs", "at most 1: only the first can be cold", f"{epochs:.2f} read", "qualified")


def real_input(facts: Facts) -> Reason | None:
    if _reads_data(facts):
        return None
    return _reason("input", "data read from the store", "one constant batch: nothing was read or decoded", "qualified")


def no_faults(facts: Facts) -> Reason | None:
    faults = facts.run.recipe.faults
    if faults.slow_rank < 0 or faults.slow_step_s <= 0:
        return None
    actual = f"{faults.slow_step_s:g} s added to each step of rank {faults.slow_rank}"
    return _reason("deliberate faults", "none", actual, "qualified")


def threads_fit_cores(facts: Facts) -> Reason | None:
    """Compute threads of all ranks on a host, where ranks compute on the CPU."""
    threads: dict[str, int] = {}
    cores: dict[str, int] = {}
    for rank in facts.run.ranks:
        environment = rank.start.environment if rank.start else {}
        if str(environment.get("device", "")).startswith("cuda"):
            continue
        threads[rank.node] = threads.get(rank.node, 0) + int(environment.get("compute_threads") or 0)
        cores[rank.node] = max(cores.get(rank.node, 0), int(environment.get("num_cpus") or 0))
    for node, count in sorted(threads.items()):
        if cores[node] and count > cores[node]:
            actual = f"{count} threads on {cores[node]} cores of {node}"
            return _reason("compute threads", "no more than cores", actual, "qualified")
    return None


def host_counters_present(facts: Facts) -> Reason | None:
    counted = {host["node"] for host in facts.hosts if host["cpu_busy"] is not None}
    missing = sorted({rank.node for rank in facts.run.ranks if rank.node} - counted)
    if not missing:
        return None
    return _reason(
        "host counters", "from every host", f"none during the interval from {', '.join(missing)}", "qualified"
    )


def little_steal(facts: Facts) -> Reason | None:
    stolen = [(host["cpu_steal"] or 0.0, host["node"]) for host in facts.hosts]
    worst, node = max(stolen, default=(0.0, ""))
    if worst <= MAX_STEAL:
        return None
    return _reason("CPU steal", f"at most {_percent(MAX_STEAL)}", f"{_percent(worst, 1)} on {node}", "qualified")


def clocks_agree(facts: Facts) -> Reason | None:
    ranks = facts.run.ranks
    nodes = {rank.node for rank in ranks}
    if silent := [rank.rank for rank in ranks if rank.rank != 0 and rank.clock.uncertainty_s is None]:
        # On one host perf_counter is one clock; between hosts it starts at each one's boot.
        severity: Severity = "invalid" if len(nodes) > 1 else "qualified"
        return _reason("clocks", "each rank's offset to rank 0", f"not measured on {_ranks(silent)}", severity)
    worst_s = max((rank.clock.uncertainty_s or 0.0 for rank in ranks), default=0.0)
    if facts.interval is None or worst_s <= CLOCK_TOLERANCE * facts.interval.length_s:
        return None
    expected = f"within {_percent(CLOCK_TOLERANCE)} of the interval ({facts.interval.length_s:.3g} s)"
    return _reason("clocks", expected, f"uncertain by {worst_s:.3g} s", "qualified")


RULES: Sequence[Rule] = (
    run_ended_ok,
    every_rank_wrote_to_the_end,
    journals_readable,
    one_recipe,
    one_data_set,
    equal_steps,
    shared_interval,
    loss_is_a_number,
    loaders_reported,
    received_is_served,
    received_is_trained_or_discarded,
    received_is_planned,
    received_is_requested,
    images_add_up,
    own_endpoint,
    clocks_agree,
    real_input,
    no_faults,
    shown_cold,
    one_epoch_when_cold,
    no_retries,
    no_bad_images,
    enough_steps,
    spans_make_up_the_step,
    threads_fit_cores,
    little_steal,
    host_counters_present,
)


def judge(facts: Facts) -> Validity:
    """All reasons, the invalidating ones first, each group in the order of the table."""
    reasons = list(_spoken(facts))
    reasons.sort(key=lambda reason: reason["severity"] != "invalid")
    return Validity(grade=_grade(reasons), reasons=reasons)


def _spoken(facts: Facts) -> Iterator[Reason]:
    for rule in RULES:
        reason = rule(facts)
        if reason is not None:
            yield reason


def _grade(reasons: Sequence[Reason]) -> Grade:
    severities = {reason["severity"] for reason in reasons}
    if "invalid" in severities:
        return "invalid"
    return "qualified" if severities else "valid"
