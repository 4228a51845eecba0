"""Numbers and findings in words, alike in the terminal and on the page. A number that is not known is a dash."""

from __future__ import annotations

from datetime import UTC, datetime

from drawbar.analyze.schema import EndpointResult, Percentiles, Result
from drawbar.plural import plural

UNKNOWN = "-"


def number(value: float | None, digits: int = 1) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def percent(share: float | None, digits: int = 0) -> str:
    return UNKNOWN if share is None else f"{share * 100:.{digits}f} %"


def megabytes(count_bytes: float | None) -> str:
    """In 10^6 bytes, without the unit."""
    return number(None if count_bytes is None else count_bytes / 1e6)


def milliseconds(seconds: float | None) -> str:
    """Without the unit; three digits that matter, as far as there are."""
    if seconds is None:
        return UNKNOWN
    return number(seconds * 1e3, 0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2)


def headline(result: Result) -> str:
    """What happened in one short line."""
    if result["status"] != "ok":
        return {"failed": "The run failed", "interrupted": "The run was interrupted"}[result["status"]]
    total = result["images_per_s"]["total"]
    if total is None:
        return "No throughput was measured"
    return f"{number(total)} images/s" + (", emulated" if is_emulated(result) else "")


def is_emulated(result: Result) -> bool:
    return result["model"] is not None and result["model"]["emulated_step_s"] is not None


def model_sentence(result: Result) -> str:
    """What was trained, or emulated; empty where no rank came to build it."""
    model = result["model"]
    if model is None:
        return ""
    sent = f"{megabytes(model['gradient_bytes'])} MB of gradients exchanged a step" if model["gradient_bytes"] else ""
    sent = sent or "no gradients exchanged"
    text = f"{model['name']}, {model['parameters']:,} parameters, {sent}"
    if model["emulated_step_s"] is not None:
        return f"emulated, nothing was trained: each step takes {model['emulated_step_s']:g} s by the recipe; {text}"
    if model["compiled_s"] is not None:
        text += f"; compiled in a step of {number(model['compiled_s'])} s"
    if model["skipped_updates"]:
        text += f"; {plural(model['skipped_updates'], 'update')} skipped, as gradients overflowed"
    return text


def rate_sentence(result: Result) -> str:
    rate, interval_s = result["images_per_s"], result["interval_s"]
    nodes = len({rank["node"] for rank in result["ranks"] if rank["node"]})
    who = f"{plural(result['world_size'], 'rank')} on {plural(nodes, 'node')}"
    if result["status"] != "ok":
        who = f"Until then {who}"
    if rate["total"] is None or interval_s is None:
        return f"{who} shared no time in which all of them measured, so there is no throughput."
    done = "took to an emulated accelerator" if is_emulated(result) else "trained"
    return (
        f"{who} together {done} {number(rate['total'])} images/s, taken over the {number(interval_s)} s in which all "
        f"of them were measuring; step by step that is {number(rate['mean'])} ± {number(rate['stderr'])} images/s "
        f"(mean ± standard error, jitter {number(rate['jitter'])}, n = {plural(rate['n'], 'step')})."
    )


def time_sentence(result: Result) -> str:
    """Where the step time went; names no culprit, because nothing here measured one."""
    wait = result["data_wait_fraction"]
    if wait is None:
        return "No step was measured, so nothing can be said about where the time went."
    worst = ""
    if result["world_size"] > 1:
        worst = f" (most on rank {result['worst_rank']}: {percent(result['worst_rank_data_wait_fraction'])})"
    return (
        f"Of the step time {percent(wait)} was spent waiting for data{worst} and {percent(result['au'])} computing; "
        f"which stage holds the run back is {result['verdict']['stage']}, as no stage's ceiling was measured."
    )


def validity_sentence(result: Result) -> str:
    validity = result["validity"]
    reasons = validity["reasons"]
    if not reasons:
        return "The result is valid: every check passed."
    listed = "; ".join(f"{reason['rule']}: {reason['actual']}" for reason in reasons[:4])
    more = f"; and {plural(len(reasons) - 4, 'more reason')}" if len(reasons) > 4 else ""
    return f"The result is {validity['grade']} ({listed}{more})."


def meaning_sentence(result: Result) -> str:
    """What a reader may do with the number."""
    if result["status"] != "ok":
        return "The run did not end, so these figures describe what happened and are no result."
    if result["validity"]["grade"] == "invalid":
        return "Do not use this number: a check that it depends on did not pass."
    if result["images_per_s"]["total"] is None:
        return "There is no number to use."
    counted = {
        "constant": "trained from one constant batch",
        "memory": "decoded and trained, from records repeated in memory,",
    }.get(result["input"]["source"], "read, decoded and trained")
    replaced = result["input"]["replaced_images"]
    if replaced:
        trained = result["input"]["trained_images"] or replaced
        counted += f" ({percent(replaced / trained, 2)} of them a second time, for want of a good record)"
    if is_emulated(result):
        counted = counted.replace("trained", "handed to an emulated accelerator")
    with_reasons = "; quote it with the reasons above" if result["validity"]["reasons"] else ""
    return f"This many images per second were {counted} by all ranks together{with_reasons}."


def failure_sentence(result: Result) -> str:
    """Empty for a run that ended ok."""
    error = result["error"]
    if error is None:
        return ""
    phase = f" in {error['phase']}" if error["phase"] else ""
    if error["message"].startswith(f"rank {error['rank']} on"):
        return f"{error['type']}{phase}: {error['message']}"
    who = "the launcher" if error["rank"] is None else f"rank {error['rank']}"
    where = f" on {error['node']}" if error["node"] else ""
    return f"{error['type']} of {who}{where}{phase}: {error['message']}"


def data_set_sentence(result: Result) -> str:
    """What was read from; empty with a constant batch."""
    found = result["data_set"]
    if found is None:
        return ""
    parts = [plural(found["shards"], "shard"), f"{megabytes(found['bytes'])} MB"]
    if found["records"] is not None:
        parts.append(plural(found["records"], "record"))
    parts.append("with a manifest" if found["manifest"] else "without a manifest")
    if found["missing_shards"]:
        parts.append(f"{plural(found['missing_shards'], 'shard')} missing")
    if found["ignored_shards"]:
        verb = "was" if found["ignored_shards"] == 1 else "were"
        what = f"{plural(found['ignored_shards'], 'object')} beside the shards {verb} not read"
        parts.append(f"{what}: not in the manifest, or with names that no store can give")
    return f"{found['url']}: {', '.join(parts)}"


def cache_sentence(result: Result) -> str:
    cache = result["cache"]
    shares = []
    if cache["disk_share"] is not None:
        served = f"{megabytes(cache['disk_read_bytes'])} MB of {megabytes(cache['gateway_bytes'])} MB served"
        shares.append(f"{percent(cache['disk_share'])} read from disk ({served})")
    if cache["resident_fraction"] is not None:
        shares.append(f"{percent(cache['resident_fraction'], 1)} of the data in the page cache at the start")
    if cache["state"] == "unknown" and not cache["note"]:
        shares.append("server cache unknown")
    if (result["input"]["reread_share"] or 0) > 0:
        shares.append(f"{percent(result['input']['reread_share'], 1)} of the data bytes were read again")
    flush = cache["storage_flush"]
    if flush is not None:
        ended = "was stopped" if flush["exit_code"] is None else f"ended with {flush['exit_code']}"
        shares.append(f"the storage's flush command {ended} after {number(flush['duration_s'], 1)} s")
    state = {"cold": "shown cold", "unknown": "not shown cold"}.get(cache["state"], cache["state"])
    return "; ".join([f"wanted {cache['wanted']}, {state}", *shares, *filter(None, [cache["method"], cache["note"]])])


def balance_sentence(result: Result) -> str:
    """Where each received byte came from and went."""
    counts = result["input"]
    served = [endpoint["gateway_bytes"] for endpoint in result["endpoints"]]
    known = [count for count in served if count is not None]
    gateways = f"{megabytes(sum(known))} MB served by gateways" if known else "no count from the server"
    if known and len(known) < len(served):
        gateways += f" ({len(known)} of {len(served)} counted)"
    received = f"{gateways}, {megabytes(result['read_bytes'])} MB received"
    if counts["trained_bytes"] is None:
        return f"{received}; not every rank came to say what it trained of them"
    trained, discarded = megabytes(counts["trained_bytes"]), megabytes(counts["discarded_bytes"])
    if counts["source"] == "memory":
        received += f"; {megabytes(counts['received_bytes'])} MB taken from memory"
    inflated = counts["inflated_bytes"]
    added = f" + {megabytes(inflated)} MB added by decompressing" if inflated else ""
    return f"{received}{added} = {trained} MB trained + {discarded} MB discarded + metadata"


def reading_sentence(result: Result) -> str:
    """How the ranks read; empty where none told."""
    reading = result["input"]["reading"]
    if reading is None:
        return ""
    low, high = (value / 2**20 for value in reading["request_bytes"])
    size = f"{low:.2f}".rstrip("0").rstrip(".") + (f" to {high:.2f}".rstrip("0").rstrip(".") if high > low else "")
    ahead = " to ".join(map(str, dict.fromkeys(reading["read_ahead"])))
    how = " (tuned)" if reading["tuned"] else ""
    first = result["input"]["first_batch_s"]
    begun = f"; first batch {number(first, 2)} s after the loader's start" if first is not None else ""
    padded = result["input"]["padded_images"]
    filled = f"; {plural(padded, 'image')} trained twice to fill a last batch" if padded else ""
    fallbacks = result["input"]["fallback_images"]
    left = f"; {plural(fallbacks, 'image')} left to the CPU by the GPU" if fallbacks else ""
    return f"GETs of up to {size} MiB, {ahead} ahead{how}{begun}{filled}{left}"


def bad_records(result: Result, at_most: int = 5) -> list[str]:
    """What was found of records that gave no sample, one line each, the counts first; empty where there was none."""
    counts = result["input"]
    bad, replaced, told = counts["bad_images"] or 0, counts["replaced_images"] or 0, counts["bad_records"]
    if not bad and not told:
        return []
    # A rank that failed wrote no totals; what it reported is in its journal all the same.
    lines = [f"{plural(max(bad, len(told)), 'time')} a record gave no sample; others stand in for {replaced:,}"]
    lines += [f"{row['shard']} at byte {row['offset']}: {row['reason']}" for row in told[:at_most]]
    if len(told) > at_most:
        lines.append(f"and {len(told) - at_most:,} more in result.json")
    return lines


def summaries_sentence(result: Result) -> str:
    """What writing event files cost; empty where none were written."""
    summaries = result["summaries"]
    if summaries is None:
        return ""
    return f"written {plural(summaries['written'], 'time')} between steps, {number(summaries['write_s'], 2)} s in all"


def checkpoints_sentence(result: Result) -> str:
    """Empty where none was written."""
    written = result["checkpoints"]
    if written is None:
        return ""
    each = f"{megabytes(written['bytes'] / written['written'])} MB"
    pause = written["pause_s"]
    waited = f", {number(written['waited_s'], 2)} s of it for the write before" if written["waited_s"] >= 0.01 else ""
    return (
        f"{plural(written['written'], 'checkpoint')} of {each} written at {number(written['mb_per_s'])} MB/s "
        f"beside training, which stood still for {milliseconds(pause['p50'])} ms each (longest "
        f"{milliseconds(pause['max'])}{waited}); the last: {written['last_target']}"
    )


def resumed_sentence(result: Result) -> str:
    """Empty for a training that began with this run."""
    found = result["resumed"]
    if found is None:
        return ""
    return (
        f"resumed from step {found['step']}, the earlier part is not counted; {megabytes(found['bytes'])} MB read at "
        f"{number(found['mb_per_s'])} MB/s by each rank ({number(found['read_s'], 2)} s) from {found['source']}"
    )


def weights_sentence(result: Result) -> str:
    """Empty where all weights were random."""
    found = result["weights"]
    if found is None:
        return ""

    def listed(names: list[str], what: str) -> str:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"; {what}: {', '.join(names[:3])}{more}" if names else ""

    return (
        f"{plural(found['loaded'], 'tensor')} from {found['source']}"
        + listed(found["head"], "left random, as the classes differ")
        + listed(found["missing"], "not in the file")
        + listed(found["unexpected"], "not used")
    )


def endpoint_troubles(result: Result) -> list[str]:
    """One line for each endpoint of which there is more to say than its errors and retries."""
    lines = []
    for endpoint in result["endpoints"]:
        counts = (
            (endpoint["busy"], "busy answer (503, 429)", "busy answers (503, 429)"),
            (endpoint["corrupt"], "damaged body", "damaged bodies"),
            (endpoint["rereads"], "reread after damage", "rereads after damage"),
            (endpoint["set_aside"], "time set aside", "times set aside"),
            (endpoint["returned"], "time back", "times back"),
            (endpoint["probes"], "probe", "probes"),
        )
        said = ", ".join(plural(count, noun, nouns) for count, noun, nouns in counts if count)
        if said:
            lines.append(f"{endpoint['url']}: {said}")
    return lines


def latency_cell(endpoint: EndpointResult, kind: str) -> str:
    """Median / 90th / 99th percentile, in ms."""
    latency = endpoint["latency_s"]
    values: Percentiles = latency["first_byte"] if kind == "first_byte" else latency["total"]
    return " / ".join(milliseconds(values[name]) for name in ("p50", "p90", "p99"))


def utc(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def busy_nics(mb_per_s: dict[str, float]) -> str:
    """Interfaces that carried anything worth a word, the busiest first."""
    busy = sorted(((rate, name) for name, rate in mb_per_s.items() if rate >= 0.05), reverse=True)
    return ", ".join(f"{name} {number(rate)}" for rate, name in busy[:3]) or UNKNOWN
