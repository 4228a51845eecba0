"""Figures of the steps: throughput over time, where step time goes, how step time and data wait spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from drawbar.analyze.facts import Facts
from drawbar.analyze.schema import Result, StepShares
from drawbar.analyze.throughput import global_steps
from drawbar.analyze.timeline import Floats, Ints, RankTimeline
from drawbar.plural import plural
from drawbar.report import words
from drawbar.report.plot import (
    MAX_POINTS,
    Figure,
    Tree,
    area,
    axis,
    buckets,
    label,
    layout,
    level_line,
    numbers,
    rank_color,
)

MAX_BINS = 40


def rate_line(times: Floats, samples: Ints, seconds: Floats) -> tuple[Floats, Floats]:
    """(time, images/s) per bucket of steps: all samples over all seconds of it, at its last end."""
    groups = buckets(len(times))
    rates = [samples[rows].sum() / max(float(seconds[rows].sum()), 1e-9) for rows in groups]
    return np.array([times[rows[-1]] for rows in groups]), np.array(rates)


def throughput_figure(facts: Facts, result: Result) -> Figure | None:
    ranks = [rank for rank in facts.run.ranks if len(rank.measured) + len(rank.warmup)]
    if not ranks:
        return None
    zero_t = facts.interval.start_t if facts.interval else min(first_t(rank) for rank in ranks)
    data = total_traces(facts, ranks, zero_t)
    for index, rank in enumerate(facts.run.ranks):
        if rank in ranks:
            data.append(rank_trace(rank, index, zero_t))
    shapes = []
    if facts.interval:
        shapes = [area(min(first_t(rank) for rank in ranks) - zero_t, 0)]
    mean, total = result["images_per_s"]["mean"], result["images_per_s"]["total"]
    if mean is not None:
        shapes.append(level_line(mean))
    note = ""
    if max(len(rank.measured) for rank in ranks) > MAX_POINTS:
        note = " Each point is the mean of neighbouring steps, and the band holds the fastest and slowest of them."
    return Figure(
        id="throughput",
        title="Throughput over time",
        caption="Above: all ranks together, per step, with the mean as a dotted line. Below: each rank, samples over "
        f"its own step time. Shaded: warm-up, left out of the figures.{note}",
        alt=f"Line chart of images per second over time, for all ranks together and for each. Total "
        f"{words.number(total)} images/s, jitter {words.number(result['images_per_s']['jitter'])}.",
        height_px=440,
        data=data,
        layout=layout(
            xaxis=axis("time since all ranks were measuring (s)", anchor="y2", zeroline=False),
            yaxis=axis("all ranks (images/s)", domain=[0.56, 1], rangemode="tozero"),
            yaxis2=axis("one rank (images/s)", domain=[0, 0.44], rangemode="tozero"),
            shapes=shapes,
            showlegend=len(ranks) > 1,
        ),
    )


def first_t(rank: RankTimeline) -> float:
    return float((rank.warmup if len(rank.warmup) else rank.measured).start_t[0])


def total_traces(facts: Facts, ranks: Sequence[RankTimeline], zero_t: float) -> list[Tree]:
    """All ranks together: measured steps, and the band of single steps where points stand for several."""
    start_t = max(first_t(rank) for rank in ranks)
    warmup = global_steps([rank.warmup for rank in ranks], start_t) if all(len(r.warmup) for r in ranks) else None
    traces = []
    for steps in (warmup, facts.steps):
        if steps is None:
            continue
        times, rates = rate_line(steps.end_t - zero_t, steps.samples, steps.duration_s)
        if len(steps.step) > MAX_POINTS:
            speeds = steps.samples / np.maximum(steps.duration_s, 1e-9)
            groups = buckets(len(speeds))
            low = np.array([speeds[rows].min() for rows in groups])
            high = np.array([speeds[rows].max() for rows in groups])
            traces += [band_edge(times, low), band_edge(times, high, fill="tonexty", fillcolor="var(--band)")]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "all ranks",
                "legendgroup": "total",
                "showlegend": steps is facts.steps,
                "x": numbers(times),
                "y": numbers(rates),
                "line": {"color": "var(--ink)", "width": 1.5},
                "hovertemplate": "%{x:.1f} s: %{y:.1f} images/s<extra>all ranks</extra>",
            }
        )
    return traces


def band_edge(x: Floats, y: Floats, **more: Any) -> Tree:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": numbers(x),
        "y": numbers(y),
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        **more,
    }


def rank_trace(rank: RankTimeline, index: int, zero_t: float) -> Tree:
    both = [steps for steps in (rank.warmup, rank.measured) if len(steps)]
    lines = [rate_line(steps.end_t - zero_t, steps.samples, steps.step_s) for steps in both]
    name = f"rank {rank.rank}"
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "yaxis": "y2",
        "x": numbers(np.concatenate([times for times, _ in lines])),
        "y": numbers(np.concatenate([rates for _, rates in lines])),
        "line": {"color": rank_color(index), "width": 1.25},
        "hovertemplate": f"%{{x:.1f}} s: %{{y:.1f}} images/s<extra>{name} · {label(rank.node)}</extra>",
    }


SHARE_NAMES: dict[str, str] = {
    "data_wait": "data wait",
    "copy": "copy",
    "compute": "compute",
    "exchange": "exchange",
    "optimizer": "optimizer",
    "other": "other",
}


def shares_figure(result: Result) -> Figure | None:
    rows: list[tuple[str, StepShares]] = [
        (f"rank {rank['rank']} · {label(rank['node'], 16)}", rank["shares"])
        for rank in result["ranks"]
        if rank["shares"] is not None
    ]
    if not rows:
        return None
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [text for text, _ in rows],
            "x": numbers(np.array([shares[key] * 100 for _, shares in rows])),  # type: ignore[literal-required]
            "marker": {"color": f"var(--stage-{key})", "line": {"color": "var(--surface)", "width": 1}},
            "hovertemplate": f"%{{y}}: {name} %{{x:.1f}} %<extra></extra>",
        }
        for key, name in SHARE_NAMES.items()
    ]
    return Figure(
        id="shares",
        title="Where the step time goes",
        caption="Share of each rank's measured step time; compute is forward and backward, exchange the part of "
        "averaging the gradients that neither hides. Waiting for slower ranks is in it.",
        alt=f"Stacked bars per rank. Data wait {words.percent(result['data_wait_fraction'], 1)} on average, most on "
        f"rank {result['worst_rank']} with {words.percent(result['worst_rank_data_wait_fraction'], 1)}.",
        height_px=140 + 24 * len(rows),
        data=data,
        layout=layout(
            barmode="stack",
            xaxis=axis("share of step time (%)", range=[0, 100]),
            yaxis=axis("", autorange="reversed", type="category", dtick=1 if len(rows) <= 32 else None),
            legend={
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": 1.02,
                "yanchor": "bottom",
                "traceorder": "normal",
            },
        ),
    )


def loss_figure(facts: Facts) -> Figure | None:
    """Of every step, warm-up included; None where no rank fetched a loss."""
    both = [global_steps([getattr(rank, part) for rank in facts.run.ranks], 0.0) for part in ("warmup", "measured")]
    found = [steps for steps in both if steps is not None]
    losses = np.array([math.nan if loss is None else loss for steps in found for loss in steps.loss])
    if not np.isfinite(losses).any():
        return None
    numbered = np.concatenate([steps.step for steps in found])
    first = facts.run.ranks[0]
    rates = np.concatenate([first.warmup.learning_rate, first.measured.learning_rate])
    rate_steps = np.concatenate([first.warmup.step, first.measured.step])
    last = f"{losses[np.isfinite(losses)][-1]:.4g}"
    return Figure(
        id="loss",
        title="Loss and learning rate",
        caption="Above: loss of each step, mean over the ranks. Below: learning rate of its update.",
        alt=f"Line charts of loss and learning rate by step. The last loss is {last}.",
        height_px=380,
        data=[
            curve("loss", numbered, losses, "y", "var(--ink)"),
            curve("learning rate", rate_steps, rates, "y2", "var(--stage-compute)"),
        ],
        layout=layout(
            xaxis=axis("step, warm-up included", anchor="y2", zeroline=False),
            yaxis=axis("loss", domain=[0.48, 1]),
            yaxis2=axis("learning rate", domain=[0, 0.36], rangemode="tozero"),
            showlegend=False,
        ),
    )


def curve(name: str, steps: Ints, values: Floats, yaxis: str, color: str) -> Tree:
    """A line with at most `MAX_POINTS` points, each the mean of neighbouring steps."""
    groups = buckets(len(steps))
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "yaxis": yaxis,
        "x": [int(steps[rows[-1]]) for rows in groups],
        "y": numbers(np.array([values[rows].mean() for rows in groups])),
        "line": {"color": color, "width": 1.5},
        "hovertemplate": f"step %{{x}}: {name} %{{y:.4g}}<extra></extra>",
    }


def step_time_figure(facts: Facts, result: Result) -> Figure | None:
    seconds = np.concatenate([rank.measured.step_s for rank in facts.run.ranks] or [np.empty(0)])
    if not len(seconds):
        return None
    quantiles = result["step_s"]
    text = ", ".join(f"{name} {words.milliseconds(quantiles[name])} ms" for name in ("p50", "p90", "p99", "max"))
    return histogram("step-time", "Step time", "step time (ms)", seconds, f"All ranks' measured steps: {text}.")


def data_wait_figure(facts: Facts) -> Figure | None:
    seconds = np.concatenate([rank.measured.data_wait_s for rank in facts.run.ranks] or [np.empty(0)])
    if not len(seconds):
        return None
    p50, p99 = (float(value) for value in np.percentile(seconds, [50, 99]))
    text = f"All ranks' measured steps: p50 {words.milliseconds(p50)} ms, p99 {words.milliseconds(p99)} ms, longest "
    text += f"{words.milliseconds(float(seconds.max()))} ms."
    return histogram("data-wait", "Data wait per step", "waiting for the next batch (ms)", seconds, text)


def histogram(figure_id: str, title: str, x_title: str, seconds: Floats, text: str) -> Figure:
    """Few outliers must not squeeze the rest into one bar: what lies far out is gathered in the last one."""
    milliseconds = seconds * 1e3
    longest = float(milliseconds.max())
    edge = min(longest, 1.25 * float(np.percentile(milliseconds, 99)))
    low = float(milliseconds.min())
    low = 0.0 if low < 0.5 * edge else low
    high = edge if edge > low else low + 1.0
    bins = int(np.clip(np.sqrt(len(milliseconds)) * 1.5, 8, MAX_BINS))
    counts, edges = np.histogram(np.minimum(milliseconds, high), bins=bins, range=(low, high))
    beyond = int((milliseconds > high).sum())
    if beyond:
        text += f" The last bar gathers the {plural(beyond, 'step')} beyond {high:,.3g} ms."
    return Figure(
        id=figure_id,
        title=title,
        caption=text,
        alt=f"Histogram. {text}",
        height_px=260,
        data=[
            {
                "type": "bar",
                "x": numbers((edges[:-1] + edges[1:]) / 2),
                "y": counts.tolist(),
                "width": float(f"{edges[1] - edges[0]:.5g}"),
                "marker": {"color": "var(--stage-compute)", "line": {"color": "var(--surface)", "width": 1}},
                "hovertemplate": "about %{x:.4g} ms: %{y} steps<extra></extra>",
            }
        ],
        layout=layout(xaxis=axis(x_title), yaxis=axis("steps of all ranks"), bargap=0, showlegend=False),
    )
