"""May this number be used? A table of rules, each a pure function from the facts to a reason or None.

*invalid*: the number is wrong or nobody can tell what it means. *qualified*: it is right, but it needs this sentence
beside it. *valid*: no rule spoke.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

import numpy as np

from drawbar.analyze.checkpoint_rules import resumed_alike, resumed_together
from drawbar.analyze.checkpoints import first_step
from drawbar.analyze.endpoint_rules import endpoint_policy, storage_errors
from drawbar.analyze.facts import Facts
from drawbar.analyze.quality_rules import QUALITY_RULES, expected_steps, planned_warmup_steps
from drawbar.analyze.schema import Grade, Reason, Severity, Validity
from drawbar.analyze.timeline import RankTimeline
from drawbar.analyze.traffic import input_totals
from drawbar.journal import Error, InputTotals, RankJournal, RunEnd, RunStart, Step
from drawbar.plural import plural

BYTE_TOLERANCE = 0.01
"""What a server counts and what its clients count may differ by this share: HTTP framing is not counted alike
everywhere. Counts of our own must be equal."""
CLOCK_TOLERANCE = 0.01
"""Of the interval; a larger clock uncertainty moves the edges of the interval by as much."""
SPAN_TOLERANCE = 0.05
"""Of the step time; what the spans may leave out or count twice."""
MAX_SPANS = 2.0
"""Times the step time; spans that add up to more were not measured."""
SAME_TIME_S = 1e-6
SAME_HOST_CLOCK_S = 1e-3
WALL_CLOCK_STEP_S = 60.0
"""What a time server may move a host's clock by during a run."""
MAX_REREAD = 0.01
MAX_STEAL = 0.05
MAX_FALLBACK = 0.01
MIN_STEPS = 20
MIN_INTERVAL_S = 10.0

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
    """One journal for each rank of the world and one of the launcher, each with one start and one end, which is its
    last line and says ok."""
    world_size = facts.run.recipe.launch.ranks
    found = [rank.rank for rank in facts.run.ranks]
    wrong = []
    if missing := sorted(set(range(world_size)) - set(found)):
        wrong.append(f"no journal of {_ranks(missing)}")
    wrong += facts.run.foreign
    if unended := [rank.rank for rank in facts.run.ranks if rank.status != "ok"]:
        wrong.append(f"no run_end ok of {_ranks(unended)}")
    if unstarted := [rank.rank for rank in facts.run.ranks if len(rank.journal.of(RunStart)) != 1]:
        wrong.append(f"not exactly one run_start of {_ranks(unstarted)}")
    if other := [rank.rank for rank in facts.run.ranks if rank.start and rank.start.world_size != world_size]:
        wrong.append(f"another world size seen by {_ranks(other)}")
    if strays := [rank.rank for rank in facts.run.ranks if _started_elsewhere(rank, facts.run.launcher)]:
        wrong.append(f"not started by this launcher: {_ranks(strays)}")
    for rank in facts.run.ranks:
        if rank.status == "ok" and (fault := _bad_end(rank.journal)):
            wrong.append(f"{fault} of {_ranks([rank.rank])}")
    if facts.run.launcher is None:
        wrong.append("no journal of the launcher")
    elif fault := _bad_end(facts.run.launcher):
        wrong.append(f"{fault} of the launcher")
    if not wrong:
        return None
    expected = f"{world_size} ranks and the launcher, each from start to end"
    more = f"; and {len(wrong) - 6} more" if len(wrong) > 6 else ""
    return _reason("complete journals", expected, "; ".join(wrong[:6]) + more, "invalid")


def _started_elsewhere(rank: RankTimeline, launcher: RankJournal | None) -> bool:
    """Whether a rank on the launcher's host began before or after it: a journal of another run."""
    start: RunStart | None = launcher.first(RunStart) if launcher else None
    end: RunEnd | None = launcher.first(RunEnd) if launcher else None
    if start is None or end is None or rank.start is None or rank.start.node != start.node:
        return False
    return not start.unix_s - WALL_CLOCK_STEP_S <= rank.start.unix_s <= end.unix_s + WALL_CLOCK_STEP_S


def _bad_end(journal: RankJournal) -> str:
    """What is wrong with the last lines of a writer that claims to have ended; empty where nothing is."""
    ends: list[RunEnd] = journal.of(RunEnd)
    if not ends:
        return "no run_end"
    if len(ends) > 1:
        return "more than one run_end"
    if journal.events[-1] is not ends[0]:
        return "events after the run_end"
    if ends[0].status == "ok" and journal.first(Error) is not None:
        return "an error before the run_end ok"
    return ""


def journals_readable(facts: Facts) -> Reason | None:
    problems = facts.run.problems
    if not problems:
        return None
    # Host counters explain the number; they are no part of it.
    severity: Severity = "qualified" if all(text.startswith("host-") for text in problems) else "invalid"
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return _reason("readable journals", "every line", "; ".join(problems[:3]) + more, severity)


def one_recipe(facts: Facts) -> Reason | None:
    """Launcher and ranks ran the recipe that lies beside the journal."""
    expected = facts.run.recipe.sha256()
    other = [rank.rank for rank in facts.run.ranks if rank.start and rank.start.recipe_sha256 != expected]
    launcher: RunStart | None = facts.run.launcher.first(RunStart) if facts.run.launcher else None
    if not other and (launcher is None or launcher.recipe_sha256 == expected):
        return None
    who = _ranks(other) if other else "the launcher"
    return _reason("one recipe", f"{expected[:12]} everywhere", f"another on {who}", "invalid")


def one_data_set(facts: Facts) -> Reason | None:
    hashes = sorted({rank.start.dataset_sha256 for rank in facts.run.ranks if rank.start})
    if len(hashes) > 1:
        seen = ", ".join(value[:12] or "none" for value in hashes)
        return _reason("one data set", "the same shard list on all ranks", seen, "invalid")
    if hashes == [""] and _reads_data(facts):
        return _reason("one data set", "a hash of the shard list", "not recorded", "qualified")
    return None


def equal_steps(facts: Facts) -> Reason | None:
    """Every rank finished all steps of the recipe, or all up to the one that met its target, each once, in order; those
    that a resumed run had to do."""
    begin, total = first_step(facts.run), expected_steps(facts)
    if total is None:
        return _reason("equal steps", "a known number of records an epoch", "not recorded", "invalid")
    expected = np.arange(begin, total)
    warmup_steps = min(planned_warmup_steps(facts), len(expected))
    steps = len(expected) - warmup_steps

    def complete(rank: RankTimeline) -> bool:
        return (
            len(rank.warmup) == warmup_steps
            and len(rank.measured) == steps
            and bool(np.array_equal(np.concatenate([rank.warmup.step, rank.measured.step]), expected))
        )

    wrong = [rank for rank in facts.run.ranks if not complete(rank)]
    if not wrong:
        return None
    counts = ", ".join(f"rank {rank.rank}: {len(rank.warmup)} + {len(rank.measured)}" for rank in wrong[:4])
    counts += ", …" if len(wrong) > 4 else ""
    return _reason("equal steps", f"{warmup_steps} warm-up + {steps} on every rank", counts, "invalid")


def whole_batches(facts: Facts) -> Reason | None:
    """A step of another size than the recipe's was not what the loop ran."""
    batch_size = facts.run.recipe.train.batch_size
    for rank in facts.run.ranks:
        for steps in (rank.warmup, rank.measured):
            odd = np.flatnonzero(steps.samples != batch_size)
            if len(odd):
                actual = f"{steps.samples[odd[0]]:,} in step {steps.step[odd[0]]} of rank {rank.rank}"
                return _reason("samples per step", f"train.batch_size = {batch_size}", actual, "invalid")
    return None


def steps_follow_each_other(facts: Facts) -> Reason | None:
    """The loop starts a step with the mark that ended the one before, so every second belongs to one step, or to a
    pause between two."""
    for rank in facts.run.ranks:
        previous: Step | None = None
        for step in sorted(rank.journal.of(Step), key=attrgetter("step")):
            if wrong := _bad_times(step, previous, on_host_clock=not _on_gpu(rank)):
                actual = f"{wrong} in step {step.step} of rank {rank.rank}"
                return _reason("step times", "each step starts where the last one ended", actual, "invalid")
            previous = step
    return None


def _bad_times(step: Step, previous: Step | None, *, on_host_clock: bool) -> str:
    """What is wrong; empty where nothing is."""
    if step.end_t <= step.start_t:
        return "the end is not after the start"
    if min(step.data_wait_s, step.copy_s, step.compute_s, step.exchange_s, step.optimizer_s) < 0:
        return "a negative span"
    gap_s = step.start_t - previous.end_t if previous is not None and previous.step + 1 == step.step else 0.0
    if gap_s < -SAME_TIME_S or (gap_s > SAME_TIME_S and not step.after_pause):
        return f"{gap_s:.3g} s between the two"
    # A GPU's clock drifts against the host's, on which the line was written.
    if on_host_clock and step.end_t > step.t + SAME_TIME_S:
        return "an end after its own line was written"
    return ""


def _on_gpu(rank: RankTimeline) -> bool:
    return rank.start is not None and str(rank.start.environment.get("device", "")).startswith("cuda")


def shared_interval(facts: Facts) -> Reason | None:
    if facts.interval is not None:
        return None
    return _reason("common interval", "a time in which all ranks measured", "none", "invalid")


def enough_steps(facts: Facts) -> Reason | None:
    count = 0 if facts.steps is None else len(facts.steps.step)
    if count >= MIN_STEPS:
        return None
    return _reason("measured steps", f"at least {MIN_STEPS}", str(count), "qualified")


def long_enough(facts: Facts) -> Reason | None:
    if facts.interval is None or facts.interval.measured_s >= MIN_INTERVAL_S:
        return None
    actual = f"too short to trust: {facts.interval.measured_s:.3g} s"
    return _reason("measured interval", f"at least {MIN_INTERVAL_S:g} s", actual, "qualified")


def warmed_up(facts: Facts) -> Reason | None:
    if facts.run.recipe.train.warmup_steps > 0:
        return None
    return _reason("warm-up", "at least 1 step left out", "none: the first steps' one-off costs count", "qualified")


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
        spans_s = sum(float(span.sum()) for span in steps.spans_s.values())
        total_s = float(steps.step_s.sum())
        if total_s > 0 and abs(spans_s / total_s - 1) > SPAN_TOLERANCE:
            off.append((abs(spans_s / total_s - 1), rank.rank, spans_s / total_s))
    if not off:
        return None
    _, rank_number, share = max(off)
    actual = f"{_percent(share)} of it on rank {rank_number}"
    severity: Severity = "invalid" if share > MAX_SPANS else "qualified"
    return _reason("step spans", "wait, copy, compute, exchange and optimizer make up the step time", actual, severity)


# --- bytes and images -------------------------------------------------------------------------------------------


def loaders_reported(facts: Facts) -> Reason | None:
    counts = {rank.rank: len(rank.journal.of(InputTotals)) for rank in facts.run.ranks}
    for word, numbers in (
        ("none", [rank for rank, count in counts.items() if count == 0]),
        ("several", [rank for rank, count in counts.items() if count > 1]),
    ):
        if numbers:
            return _reason("input totals", "one from every rank", f"{word} from {_ranks(numbers)}", "invalid")
    return None


def received_is_served(facts: Facts) -> Reason | None:
    """Clients' counts against the gateways' own, per endpoint and in all."""
    witnessed = [endpoint for endpoint in facts.endpoints if endpoint["gateway_bytes"] is not None]
    expected = f"within {_percent(BYTE_TOLERANCE)}"
    explained = None
    for endpoint in witnessed:
        received, served = endpoint["bytes"], endpoint["gateway_bytes"] or 0
        if _close(received, served):
            continue
        # A body that broke off was sent, or a part of it, and never counted by its client.
        most = received + _failed_bytes(facts, endpoint["url"])
        actual = f"{_mb(received)} received, {_mb(served)} served by {endpoint['url']}"
        if not received < served <= most * (1 + BYTE_TOLERANCE):
            return _reason("received = served", expected, actual, "invalid")
        explained = explained or _reason("received = served", expected, actual, "qualified")
    if explained:
        return explained
    if len(witnessed) < len(facts.endpoints) and (witnessed or _on_embedded_store(facts)):
        missing = len(facts.endpoints) - len(witnessed)
        actual = f"bytes not witnessed on {missing} of {plural(len(facts.endpoints), 'endpoint')}"
        return _reason("received = served", "a count from every endpoint", actual, "qualified")
    return None


def _failed_bytes(facts: Facts, url: str) -> int:
    """What an endpoint may have sent for tries that failed, beyond what their clients counted."""
    return sum(
        max(0, request.wanted_bytes - request.got_bytes)
        for rank in facts.run.ranks
        for request in rank.requests
        if request.error and request.endpoint.rstrip("/") == url
    )


def _on_embedded_store(facts: Facts) -> bool:
    recipe = facts.run.recipe
    return _reads_data(facts) and recipe.storage.endpoints == "embedded" and recipe.data.url.startswith("s3://")


def received_is_trained_or_discarded(facts: Facts) -> Reason | None:
    """Exact: the loader counts every byte at each stage it passes; what decompressing adds counts as received."""
    wrong = [
        (rank.rank, totals)
        for rank, totals in zip(facts.run.ranks, input_totals(facts.run), strict=True)
        if totals is not None
        and (
            totals.discarded_bytes < 0
            or totals.received_bytes + totals.inflated_bytes != totals.trained_bytes + totals.discarded_bytes
        )
    ]
    if not wrong:
        return None
    rank, counts = wrong[0]
    actual = f"{counts.received_bytes:,} received, {counts.trained_bytes:,} trained, {counts.discarded_bytes:,} "
    actual += f"discarded on rank {rank}"
    actual += f", {counts.inflated_bytes:,} added by decompressing" if counts.inflated_bytes else ""
    return _reason("received = trained + discarded", "equal", actual, "invalid")


def received_is_planned(facts: Facts) -> Reason | None:
    received, planned = facts.input["received_bytes"], facts.input["planned_bytes"]
    if received is None or planned is None:
        return None
    requests = (request for rank in facts.run.ranks for request in rank.requests if request.kind == "data")
    extra = sum(request.got_bytes for request in requests if request.error or request.reread)
    if _close(planned, received - extra):
        return None
    actual = f"{_mb(planned)} planned, {_mb(received - extra)} received without failed tries and rereads"
    return _reason("received = planned", f"within {_percent(BYTE_TOLERANCE)}", actual, "invalid")


def received_is_requested(facts: Facts) -> Reason | None:
    """The loaders' totals against the sum of single requests: two counts that meet nowhere else, and equal."""
    if not _reads_data(facts):
        return None  # what memory hands out was not requested
    for rank, totals in zip(facts.run.ranks, input_totals(facts.run), strict=True):
        requested = sum(request.got_bytes for request in rank.requests if request.kind == "data")
        if totals is not None and totals.received_bytes != requested:
            actual = f"{totals.received_bytes:,} by the loader, {requested:,} by requests on rank {rank.rank}"
            return _reason("received = sum of requests", "equal", actual, "invalid")
    return None


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


def no_bad_images(facts: Facts) -> Reason | None:
    """Where others stand in for them, the number is right, and says for how many."""
    bad, replaced = facts.input["bad_images"] or 0, facts.input["replaced_images"] or 0
    trained, told = facts.input["trained_images"] or 0, facts.input["bad_records"]
    if not bad and not replaced and not told:
        return None
    policy = facts.run.recipe.input.on_bad
    share = f" ({_percent(replaced / trained, 2)})" if trained else ""
    # A rank that failed wrote no totals; what it reported is in its journal all the same.
    actual = f"{plural(max(bad, len(told)), 'time')} a record gave no sample; others stand in for {replaced:,} of "
    actual += f"{plural(trained, 'trained image')}{share}"
    actual += f"; first: {told[0]['shard']} at byte {told[0]['offset']}: {told[0]['reason']}" if told else ""
    # More stand-ins than what they stand in for, or any where the run should have ended, were not counted right.
    wrong = replaced > bad or (replaced > 0 and policy == "fail")
    return _reason("bad images", "none", actual, "invalid" if wrong else "qualified")


def decoded_where_asked(facts: Facts) -> Reason | None:
    """A GPU's figure that the CPU had a part in."""
    fallbacks, decoded = facts.input["fallback_images"], facts.input["decoded_images"]
    if not fallbacks or not decoded or fallbacks <= MAX_FALLBACK * decoded:
        return None
    actual = f"{_percent(fallbacks / decoded, 1)} of them decoded by the CPU"
    return _reason("decoder", 'images decoded by the GPU (input.decoder = "gpu")', actual, "qualified")


def whole_data_set(facts: Facts) -> Reason | None:
    """A part of a set has fewer bytes to read and more of them in every cache."""
    found = facts.data_set
    if found is None or not found["missing_shards"]:
        return None
    missing = found["missing_shards"]
    actual = f"{missing:,} of {found['shards'] + missing:,} missing, by the names of the others"
    return _reason("whole data set", "every shard", actual, "qualified")


# --- cold, emulated, disturbed ----------------------------------------------------------------------------------


def shown_cold(facts: Facts) -> Reason | None:
    cache = facts.cache
    if cache["wanted"] != "cold" or cache["state"] == "cold" or not _reads_data(facts):
        return None
    if cache["state"] == "unknown":
        actual = cache["note"] or "server cache unknown"
    elif cache["disk_share"] is not None:
        actual = f"{_percent(cache['disk_share'])} of the served bytes were read from disk"
    else:
        actual = f"{_percent(cache['resident_fraction'] or 0)} of the data was in the page cache at the start"
    return _reason("cold start", "bytes shown to come from disk", actual, "qualified")


def read_once_when_cold(facts: Facts) -> Reason | None:
    share = facts.input["reread_share"]
    if facts.run.recipe.quality.target:
        # Time to quality is epoch after epoch by its nature: the start is cold, no more is said.
        return None
    if facts.cache["wanted"] != "cold" or share is None or share <= MAX_REREAD:
        return None
    actual = f"{_percent(share, 1)} of the data bytes were read again"
    return _reason("cold epochs", "each byte read once: only the first time can be cold", actual, "qualified")


def real_input(facts: Facts) -> Reason | None:
    if _reads_data(facts):
        return None
    actual = {
        "constant": "one constant batch: nothing was read or decoded",
        "memory": "a few records of each rank, read once and repeated from memory",
    }[facts.run.recipe.input.source]
    return _reason("input", "data read from the store", actual, "qualified")


def real_model(facts: Facts) -> Reason | None:
    step_s = facts.run.recipe.emulate.step_s
    if not step_s:
        return None
    exchanged = "" if facts.run.recipe.emulate.gradients else ", and no gradients are exchanged"
    actual = f"an emulated accelerator: each step takes {step_s:g} s by the recipe{exchanged}"
    return _reason("training", "a model that is trained", actual, "qualified")


def compiled_before(facts: Facts) -> Reason | None:
    """torch.compile takes seconds to minutes: a step in which it ran says nothing of the others."""
    for rank in facts.run.ranks:
        steps: list[Step] = rank.journal.of(Step)
        late = [step for step in steps if "compiled" in step.tags and not step.warmup]
        if late:
            actual = f"{len(late)} measured steps of rank {rank.rank} compiled, the first of them {late[0].step}"
            return _reason("compilation", "over before the measured steps", actual, "qualified")
    return None


def no_faults(facts: Facts) -> Reason | None:
    faults = facts.run.recipe.faults
    if faults.slow_rank < 0 or faults.slow_step_s <= 0:
        return None
    actual = f"{faults.slow_step_s:g} s added to each step of rank {faults.slow_rank}"
    return _reason("deliberate faults", "none", actual, "qualified")


def threads_fit_cores(facts: Facts) -> Reason | None:
    """Compute threads of all ranks on a host, where ranks compute on the CPU. An emulated accelerator has none."""
    threads: dict[str, int] = {}
    cores: dict[str, int] = {}
    for rank in facts.run.ranks:
        environment = rank.start.environment if rank.start else {}
        if _on_gpu(rank):
            continue
        threads[rank.node] = threads.get(rank.node, 0) + _count(environment.get("compute_threads"))
        cores[rank.node] = max(cores.get(rank.node, 0), _count(environment.get("num_cpus")))
    for node, count in sorted(threads.items()):
        if cores[node] and count > cores[node]:
            actual = (
                f"{plural(count, 'thread')} on {plural(cores[node], 'core')} of {node}: ranks take each other's time, "
                "and scaling over ranks means nothing (emulate.step_s does without cores)"
            )
            return _reason("compute threads", "no more than cores", actual, "qualified")
    return None


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


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
    if apart := _apart_on_one_host(ranks):
        return _reason("clocks", "one clock on one host", apart, "qualified")
    worst_s = max((rank.clock.uncertainty_s or 0.0 for rank in ranks), default=0.0)
    if facts.interval is None or worst_s <= CLOCK_TOLERANCE * facts.interval.length_s:
        return None
    expected = f"within {_percent(CLOCK_TOLERANCE)} of the interval ({facts.interval.length_s:.3g} s)"
    return _reason("clocks", expected, f"uncertain by {worst_s:.3g} s", "qualified")


def _apart_on_one_host(ranks: Sequence[RankTimeline]) -> str:
    """All processes of a host share one clock, so that offsets between them are noise. Empty where they are."""
    first: dict[str, RankTimeline] = {}
    for rank in ranks:
        other = first.setdefault(rank.node, rank)
        noise_s = 10 * ((rank.clock.uncertainty_s or 0.0) + (other.clock.uncertainty_s or 0.0)) + SAME_HOST_CLOCK_S
        for mine_s, theirs_s in zip(rank.clock.offset_s, other.clock.offset_s, strict=False):
            if abs(mine_s - theirs_s) > noise_s:
                return f"{abs(mine_s - theirs_s):.3g} s between ranks {other.rank} and {rank.rank} on {rank.node}"
    return ""


RULES: Sequence[Rule] = (
    run_ended_ok,
    every_rank_wrote_to_the_end,
    journals_readable,
    one_recipe,
    one_data_set,
    equal_steps,
    whole_batches,
    steps_follow_each_other,
    shared_interval,
    loss_is_a_number,
    loaders_reported,
    received_is_served,
    received_is_trained_or_discarded,
    received_is_planned,
    received_is_requested,
    images_add_up,
    endpoint_policy,
    clocks_agree,
    real_input,
    real_model,
    compiled_before,
    no_faults,
    resumed_together,
    resumed_alike,
    shown_cold,
    read_once_when_cold,
    *QUALITY_RULES,
    storage_errors,
    no_bad_images,
    decoded_where_asked,
    whole_data_set,
    enough_steps,
    long_enough,
    warmed_up,
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
