"""The result as text: tf_cnn_benchmarks' lines, live or afterwards, then tables. The same on a terminal and in a pipe.

No colour, no wrapping by terminal size: at most 80 columns in tables, and control characters that came in from outside
(host names, error messages) are shown, not obeyed.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from drawbar.analyze.facts import Facts
from drawbar.analyze.repeats import SeriesResult
from drawbar.analyze.schema import RankResult, Result
from drawbar.analyze.throughput import GlobalSteps, Rate, rate_of
from drawbar.journal import Clock, Evaluation, Event, Step
from drawbar.plural import plural
from drawbar.report import words

WIDTH = 80
RULE = "-" * 64
MAX_RANK_ROWS = 32
MAX_EVALUATION_ROWS = 24
STEP_HEADER = "Step\tImg/sec\ttotal_loss"


def step_line(step: int, rate: Rate, loss: float | None) -> str:
    """One progress line in tf_cnn_benchmarks' form; `step` counts measured steps from 1."""
    loss_text = "-" if loss is None else f"{loss:.3f}"
    return f"{step}\timages/sec: {rate.mean:.1f} +/- {rate.stderr:.1f} (jitter = {rate.jitter:.1f})\t{loss_text}"


def evaluation_line(event: Evaluation) -> str:
    """An evaluation, when it ends."""
    took_s = event.end_t - event.start_t
    return (
        f"evaluation after step {event.step + 1} (epoch {event.epoch}): {words.metrics(event.metrics)}; "
        f"{event.all_images:,} images in {took_s:.1f} s"
    )


def is_shown(step: int, display_every: int) -> bool:
    """Step 1 and every `display_every`-th, as tf_cnn_benchmarks does; `step` counts measured steps from 1."""
    return step == 1 or step % display_every == 0


def progress_text(
    step: int, steps: int, *, warmup: bool, rate: Rate | None, data_wait_fraction: float | None, left_s: float | None
) -> str:
    """One short line for a live display, at most 80 columns."""
    parts = [f"{'warm-up' if warmup else 'step'} {step}/{steps}"]
    if rate is not None:
        parts.append(f"{rate.mean:.1f} images/s")
    if data_wait_fraction is not None:
        parts.append(f"data wait {words.percent(data_wait_fraction)}")
    if left_s is not None:
        minutes, seconds = divmod(round(left_s), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return "  ".join(parts)


class StepPrinter:
    """Turns the ranks' events, in any interleaving, into finished progress lines.

    A step counts as done when every rank has reported it, and ends when the last rank's does: figures as in
    `throughput.py`, with the clock offset measured at the start alone (the one at the end is not known yet).
    """

    def __init__(self, *, world_size: int, warmup_steps: int, steps: int, display_every: int) -> None:
        self._world_size = world_size
        self._warmup_steps = warmup_steps
        self._steps = steps
        self._display_every = display_every
        self._offset_s: dict[int, float] = {}
        self._waiting: dict[int, dict[int, Step]] = {}
        self._previous_end_t: float | None = None
        self._samples: list[float] = []
        self._durations_s: list[float] = []
        self._data_wait_s = 0.0
        self._step_s = 0.0
        self._warmup_done = 0
        self._header_due = True
        self._evaluated: Counter[int] = Counter()

    def feed(self, rank: int, event: Event) -> list[str]:
        """Takes one event of `rank`; returns the lines that became complete, the header before the first."""
        if isinstance(event, Clock) and event.when == "start":
            self._offset_s[rank] = event.offset_s
        if isinstance(event, Evaluation):
            # Alike on all ranks; the last to tell has told of all steps before it.
            self._evaluated[event.step] += 1
            return [evaluation_line(event)] if self._evaluated[event.step] == self._world_size else []
        if not isinstance(event, Step):
            return []
        reported = self._waiting.setdefault(event.step, {})
        reported[rank] = event
        if len(reported) < self._world_size:
            return []
        del self._waiting[event.step]
        if event.warmup:
            self._warmup_done += 1
            return []
        return self._finish(reported)

    def feed_all(self, events: Iterable[tuple[int, Event]]) -> list[str]:
        return [line for rank, event in events for line in self.feed(rank, event)]

    def _finish(self, reported: dict[int, Step]) -> list[str]:
        offset_s = {rank: self._offset_s.get(rank, 0.0) for rank in reported}
        end_t = max(step.end_t + offset_s[rank] for rank, step in reported.items())
        start_t = self._previous_end_t
        if start_t is None or any(step.after_pause for step in reported.values()):
            start_t = max(step.start_t + offset_s[rank] for rank, step in reported.items())
        self._previous_end_t = end_t
        self._durations_s.append(end_t - start_t)
        self._samples.append(sum(step.samples for step in reported.values()))
        self._data_wait_s += sum(step.data_wait_s for step in reported.values())
        self._step_s += sum(step.end_t - step.start_t for step in reported.values())
        done = len(self._durations_s)
        rate = rate_of(self._samples, self._durations_s) if is_shown(done, self._display_every) else None
        if rate is None:
            return []
        lines = [STEP_HEADER] if self._header_due else []
        self._header_due = False
        return [*lines, step_line(done, rate, mean_loss(step.loss for step in reported.values()))]

    @property
    def steps_done(self) -> int:
        """Measured steps that all ranks finished."""
        return len(self._durations_s)

    def progress(self) -> str:
        """Where the run stands, as one short line."""
        if not self._durations_s:
            return progress_text(
                self._warmup_done, self._warmup_steps, warmup=True, rate=None, data_wait_fraction=None, left_s=None
            )
        # The last steps tell the time left better than the mean since the start.
        recent_s = self._durations_s[-20:]
        return progress_text(
            self.steps_done,
            self._steps,
            warmup=False,
            rate=rate_of(self._samples, self._durations_s),
            data_wait_fraction=self._data_wait_s / self._step_s if self._step_s > 0 else None,
            left_s=max(0, self._steps - self.steps_done) * sum(recent_s) / len(recent_s),
        )


def mean_loss(losses: Iterable[float | None]) -> float | None:
    """Mean over the ranks that fetched theirs from the device; not a number where one of them is."""
    known = [loss for loss in losses if loss is not None]
    return math.fsum(known) / len(known) if known else None


def run_text(facts: Facts, result: Result) -> str:
    """Everything after a run: step lines, then the summary."""
    lines = step_lines(facts.steps, facts.run.recipe.train.display_every) if result["status"] == "ok" else []
    return "\n".join([*lines, summary_text(result)])


def step_lines(steps: GlobalSteps | None, display_every: int) -> list[str]:
    """The header and one line for each step that tf_cnn_benchmarks would show; nothing without measured steps."""
    if steps is None:
        return []
    lines = [STEP_HEADER]
    for done in range(1, len(steps.step) + 1):
        if not is_shown(done, display_every):
            continue
        rate = rate_of(steps.samples[:done], steps.duration_s[:done])
        if rate is not None:
            lines.append(step_line(done, rate, steps.loss[done - 1]))
    return lines


def summary_text(result: Result) -> str:
    """The total, tables, cache, byte balance, validity, and what the number means. Without the step lines."""
    blocks = [
        _total_block(result) if result["status"] == "ok" else _failure_block(result),
        _quality_block(result),
        _rank_table(result),
        _endpoint_table(result),
        _stage_table(result),
        _bad_records_block(result),
        _facts_block(result),
        _validity_block(result),
        _wrapped(words.meaning_sentence(result)),
    ]
    return "\n\n".join("\n".join(map(visible, block)) for block in blocks if block) + "\n"


def visible(text: str) -> str:
    """Control characters as escapes: a message from outside must not move the cursor or hide a line."""
    return "".join(char if char.isprintable() or char == "\t" else ascii(char)[1:-1] for char in text)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def _total_block(result: Result) -> list[str]:
    total = result["images_per_s"]["total"]
    lines = [RULE, f"total images/sec: {'-' if total is None else f'{total:.2f}'}", RULE]
    return [*lines, *(_wrapped(words.model_sentence(result)) if words.is_emulated(result) else [])]


def _failure_block(result: Result) -> list[str]:
    lines = [RULE, words.headline(result), RULE, *_wrapped(words.failure_sentence(result))]
    hint = result["error"]["hint"] if result["error"] else ""
    return [*lines, *(["", *_wrapped(f"hint: {hint}")] if hint else [])]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Aligned columns, two spaces apart, numbers right-aligned. Of the columns in `left` (text), the widest give way
    where the whole would pass 80 columns."""
    cells = [[visible(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        widest = max(left, key=lambda i: widths[i], default=-1)
        if widest < 0 or widths[widest] <= 6:
            break
        widths[widest] -= 1

    def cell(text: str, i: int) -> str:
        if len(text) > widths[i]:
            # The end of an address (the port) and of a host name (its number) tells more than the middle.
            keep = widths[i] - 1
            text = text[: keep // 2] + "…" + text[len(text) - (keep - keep // 2) :]
        return text.ljust(widths[i]) if i in left else text.rjust(widths[i])

    return ["  ".join(cell(text, i) for i, text in enumerate(row)).rstrip() for row in cells]


def _quality_block(result: Result) -> list[str]:
    quality = result["quality"]
    if quality is None:
        return []
    shown = quality["evaluations"][-MAX_EVALUATION_ROWS:]
    names = list(dict.fromkeys(name for item in shown for name in item["metrics"]))
    rows = [
        [
            f"{item['end_s']:,.1f}",
            f"{item['step']:,}",
            words.number(item["epochs"], 2),
            *(f"{item['metrics'][name]:.4f}" if name in item["metrics"] else words.UNKNOWN for name in names),
            f"{item['images']:,}",
            f"{item['end_s'] - item['start_s']:.2f}",
            "yes" if item["met"] else "",
        ]
        for item in shown
    ]
    header = ["at s", "steps", "epochs", *names, "images", "took s", "target"]
    more = len(quality["evaluations"]) - len(shown)
    return [
        *_wrapped(words.quality_sentence(quality)),
        *_wrapped(words.split_sentence(quality)),
        *(["", *table(header, rows, (len(header) - 1,))] if rows else []),
        *([f"… and {plural(more, 'evaluation')} before; result.json has all"] if more else []),
    ]


def series_text(series: SeriesResult) -> str:
    """The runs of one series, and what they come to."""
    rows = [
        [
            run["run"],
            str(run["seed"]),
            words.UNKNOWN if run["time_to_quality_s"] is None else f"{run['time_to_quality_s']:,.1f}",
            words.number(run["epochs"], 2),
            words.number(run["train_images_per_s"]),
            words.percent(run["evaluation_share"], 1),
            run["grade"],
            run["counted"] if run["reached"] else f"{run['counted']}, not met",
        ]
        for run in series["runs"]
    ]
    header = ["run", "seed", "seconds", "epochs", "images/s", "evaluation", "validity", "counted"]
    lines = [
        f"Time to quality ({words.target(series['target'])}), {plural(len(rows), 'run')}",
        *table(header, rows, (0, 6, 7)),
        RULE,
        words.series_sentence(series),
        RULE,
        *(f"- {reason}" for reason in series["reasons"]),
    ]
    return "\n".join(lines) + "\n"


def _rank_table(result: Result) -> list[str]:
    if not result["ranks"]:
        return []
    ranks = result["ranks"]
    # Those that waited most are the ones to look at.
    waiting = sorted(ranks, key=lambda rank: -(rank["data_wait_fraction"] or 0.0))[:MAX_RANK_ROWS]
    shown = sorted(waiting, key=lambda rank: rank["rank"])
    header = ["rank", "node", "images/s", "p50 ms", "p99 ms", "wait", "MB", "GETs", "errors", "end"]
    lines = [
        "Ranks (step time, data wait, bytes received)",
        *table(header, [_rank_row(rank) for rank in shown], (1, 9)),
    ]
    if len(shown) < len(ranks):
        lines.append(f"… and {plural(len(ranks) - len(shown), 'rank')} that waited less; result.json has all")
    return lines


def _rank_row(rank: RankResult) -> list[str]:
    return [
        str(rank["rank"]),
        rank["node"] or words.UNKNOWN,
        words.number(rank["images_per_s"]),
        words.milliseconds(rank["step_s"]["p50"]),
        words.milliseconds(rank["step_s"]["p99"]),
        words.percent(rank["data_wait_fraction"]),
        words.megabytes(rank["received_bytes"]),
        f"{rank['requests']:,}",
        f"{rank['errors']:,}",
        rank["status"],
    ]


def _endpoint_table(result: Result) -> list[str]:
    if not result["endpoints"]:
        return []
    header = ["endpoint", "GETs", "MB", "served", "first ms", "whole ms", "errors", "retries"]
    rows = [
        [
            endpoint["url"],
            f"{endpoint['requests']:,}",
            words.megabytes(endpoint["bytes"]),
            words.megabytes(endpoint["gateway_bytes"]),
            words.milliseconds(endpoint["latency_s"]["first_byte"]["p50"]),
            words.milliseconds(endpoint["latency_s"]["total"]["p50"]),
            f"{endpoint['errors']:,}",
            f"{endpoint['retries']:,}",
        ]
        for endpoint in result["endpoints"]
    ]
    return [
        "Endpoints (MB received and served; median latency)",
        *table(header, rows, (0,)),
        *(f"  {line}" for line in words.endpoint_troubles(result)),
    ]


def _stage_table(result: Result) -> list[str]:
    if not result["input"]["stages"]:
        return []
    header = ["stage", "threads", "busy", "no input", "no room", "queue", "items", "MB"]
    rows = [
        [
            stage["stage"],
            str(stage["threads"]),
            words.percent(stage["busy"]),
            words.percent(stage["blocked_on_input"]),
            words.percent(stage["blocked_on_output"]),
            words.percent(stage["queue_fill"]),
            f"{stage['items']:,}",
            words.megabytes(stage["bytes"]),
        ]
        for stage in result["input"]["stages"]
    ]
    return ["Input (share of each stage's time; how full the queue behind it is)", *table(header, rows, (0,))]


def _bad_records_block(result: Result) -> list[str]:
    first, *rest = words.bad_records(result) or [""]
    if not first:
        return []
    return [
        f"Bad records: {first}",
        *(line for text in rest for line in textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")),
    ]


def _facts_block(result: Result) -> list[str]:
    lines = [
        f"data wait: {words.percent(result['data_wait_fraction'], 1)} of the step time, "
        f"AU {words.percent(result['au'], 1)}; bottleneck {result['verdict']['stage']} (no ceilings measured)",
        *([f"model: {model}"] if (model := words.model_sentence(result)) and not words.is_emulated(result) else []),
        f"data set: {words.data_set_sentence(result) or 'none, a constant batch'}",
        f"cache: {words.cache_sentence(result)}",
        f"bytes: {words.balance_sentence(result)}",
        *([f"reading: {reading}"] if (reading := words.reading_sentence(result)) else []),
        *([f"summaries: {written}"] if (written := words.summaries_sentence(result)) else []),
        *([f"weights: {weights}"] if (weights := words.weights_sentence(result)) else []),
        *([resumed] if (resumed := words.resumed_sentence(result)) else []),
        *([written] if (written := words.checkpoints_sentence(result)) else []),
    ]
    return [line for text in lines for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")]


def _validity_block(result: Result) -> list[str]:
    lines = [f"validity: {result['validity']['grade']}"]
    for reason in result["validity"]["reasons"]:
        text = f"- {reason['severity']}: {reason['rule']}: expected {reason['expected']}; got {reason['actual']}"
        lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
    return lines
