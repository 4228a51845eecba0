"""Numbers and findings in words, alike in the terminal and on the page. A number that is not known is a dash."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from drawbar.analyze.repeats import SeriesResult
from drawbar.analyze.schema import EndpointResult, Percentiles, QualityResult, Result
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


def duration(seconds: float) -> str:
    """`12.3 s`, `4:05 min`, `2:03:04 h`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, whole = divmod(round(seconds), 60)
    return f"{minutes}:{whole:02d} min" if minutes < 100 else f"{minutes // 60}:{minutes % 60:02d}:{whole:02d} h"


def metrics(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())


def headline(result: Result) -> str:
    """What happened in one short line."""
    if result["status"] != "ok":
        return {"failed": "The run failed", "interrupted": "The run was interrupted"}[result["status"]]
    quality = result["quality"]
    if quality is not None and quality["time_to_quality_s"] is not None:
        return f"{duration(quality['time_to_quality_s'])} to {target(quality['target'])}"
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
    paused = " (evaluations left out)" if result["quality"] and result["quality"]["evaluations"] else ""
    return (
        f"{who} together {done} {number(rate['total'])} images/s, taken over the {number(interval_s)} s in which all "
        f"of them were measuring{paused}; step by step that is {number(rate['mean'])} ± {number(rate['stderr'])} "
        f"images/s (mean ± standard error, jitter {number(rate['jitter'])}, n = {plural(rate['n'], 'step')})."
    )


def target(wanted: Mapping[str, float]) -> str:
    """`top1 >= 0.759`, joined by `and`."""
    signs = {"loss": "<="}
    return " and ".join(f"{name} {signs.get(name, '>=')} {value:g}" for name, value in wanted.items())


def quality_sentence(quality: QualityResult) -> str:
    """Whether the target was met, when, or how far it was."""
    evaluations = quality["evaluations"]
    if not quality["target"]:
        last = f"; the last: {metrics(evaluations[-1]['metrics'])}" if evaluations else ""
        return f"No quality target; {plural(len(evaluations), 'evaluation')}{last}."
    wanted = target(quality["target"])
    passes = "" if quality["epochs"] is None else f" and {number(quality['epochs'], 2)} epochs"
    effort = f"{plural(quality['steps'], 'step')}{passes}"
    off = "" if quality["on_clock"] else ", evaluations left out"
    if quality["time_to_quality_s"] is not None:
        met = next(item for item in evaluations if item["met"])
        took = f"{duration(quality['time_to_quality_s'])}{off}, after {effort}"
        return f"Time to quality ({wanted}): {took}: {metrics(met['metrics'])}."
    best = {
        name: (min if name == "loss" else max)(found)
        for name in quality["target"]
        if (found := [item["metrics"][name] for item in evaluations if name in item["metrics"]])
    }
    came = f"; the best were {metrics(best)}" if best else ""
    return f"The target ({wanted}) was not met in {duration(quality['time_s'])}{off} and {effort}{came}."


def series_sentence(series: SeriesResult) -> str:
    seconds = series["time_to_quality_s"]
    if seconds is None:
        return "no time to quality: too many runs did not meet the target"
    dropped = sum(run["counted"] != "kept" for run in series["runs"])
    without = " without the fastest and the slowest" if dropped else ""
    return f"time to quality: {seconds:.2f} s, the mean of {plural(len(series['runs']) - dropped, 'run')}{without}"


def split_sentence(quality: QualityResult) -> str:
    """What the time is made of."""
    counted = "" if quality["on_clock"] else " off the clock"
    init = f"; building the model before the clock took {duration(quality['init_s'])}" if quality["init_s"] else ""
    return (
        f"It is {quality['samples']:,} images trained at {number(quality['train_images_per_s'])} images/s "
        f"({duration(quality['train_s'])}), {plural(len(quality['evaluations']), 'evaluation')} "
        f"({duration(quality['evaluation_s'])}, {percent(quality['evaluation_share'], 1)} of both){counted}, and "
        f"{duration(max(0.0, quality['other_s']))} of the rest{init}."
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
    quality = result["quality"]
    if quality is not None and quality["reached"] is not None:
        if not quality["reached"]:
            return f"The target was not met, so there is no time to quality; the throughput stands{with_reasons}."
        return (
            "This is the time to quality of one seed, and seeds differ: --repeats gives a mean. It is MLPerf-style, no "
            f"MLPerf result{with_reasons}."
        )
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
    evaluated = f" + {megabytes(counts['eval_bytes'])} MB evaluated" if counts["eval_bytes"] else ""
    return f"{received}{added} = {trained} MB trained + {discarded} MB discarded{evaluated} + metadata"


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
