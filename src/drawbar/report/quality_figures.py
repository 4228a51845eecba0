"""Figures of a run to quality: what the evaluations found, and the loss, over time on the clock."""

from __future__ import annotations

import numpy as np

from drawbar.analyze.facts import Facts
from drawbar.analyze.quality import clock_start_t
from drawbar.analyze.schema import QualityResult
from drawbar.analyze.throughput import global_steps
from drawbar.report import words
from drawbar.report.plot import Figure, Tree, area, axis, buckets, layout, level_line, numbers, rank_color

MAX_SHADED = 100
"""Evaluations shaded in a figure; more would be a grey wall."""


def accuracy_figure(facts: Facts) -> Figure | None:
    """All shares from 0 to 1; the targets as dotted lines."""
    quality = facts.quality
    if quality is None or not quality["evaluations"]:
        return None
    evaluations = quality["evaluations"]
    names = [name for name in dict.fromkeys(key for item in evaluations for key in item["metrics"]) if name != "loss"]
    data = [_metric_trace(quality, name, index) for index, name in enumerate(names)]
    shapes = [level_line(value) for name, value in quality["target"].items() if name != "loss"]
    last = words.metrics(evaluations[-1]["metrics"])
    wanted = f" Dotted: the target, {words.target(quality['target'])}." if quality["target"] else ""
    return Figure(
        id="accuracy",
        title="Accuracy over time",
        caption=f"Each evaluation of the whole validation set; shaded: while it ran.{wanted}",
        alt=f"Line chart of {', '.join(names)} over time. The last of {len(evaluations)} evaluations: {last}.",
        height_px=300,
        data=data,
        layout=layout(
            xaxis=axis("time since the clock was started (s)", zeroline=False, rangemode="tozero"),
            yaxis=axis("share of the validation images", range=[0, 1.02]),
            shapes=[*shapes, *_shaded(quality)],
            showlegend=True,
        ),
    )


def loss_over_time_figure(facts: Facts) -> Figure | None:
    """The training loss of each step, and the evaluations'."""
    quality, start_t = facts.quality, clock_start_t(facts.run)
    if quality is None or start_t is None:
        return None
    steps = global_steps([rank.all_steps for rank in facts.run.ranks], start_t)
    if steps is None:
        return None
    losses = np.array([np.nan if loss is None else loss for loss in steps.loss])
    groups = buckets(len(losses))
    times = np.array([steps.end_t[rows[-1]] - start_t for rows in groups])
    data: list[Tree] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "training",
            "x": numbers(times),
            "y": numbers(np.array([losses[rows].mean() for rows in groups])),
            "line": {"color": "var(--ink)", "width": 1.25},
            "hovertemplate": "%{x:.1f} s: %{y:.4g}<extra>training</extra>",
        }
    ]
    if any("loss" in item["metrics"] for item in quality["evaluations"]):
        data.append(_metric_trace(quality, "loss", 0) | {"name": "validation"})
    return Figure(
        id="loss-over-time",
        title="Loss over time",
        caption="Training: mean over ranks; a point may stand for neighbouring steps. Validation: mean of all images.",
        alt=f"Line chart of the loss over time. Training loss from {losses[0]:.3g} to {losses[-1]:.3g}.",
        height_px=300,
        data=data,
        layout=layout(
            xaxis=axis("time since the clock was started (s)", zeroline=False, rangemode="tozero"),
            yaxis=axis("loss"),
            shapes=_shaded(quality),
            showlegend=True,
        ),
    )


def _metric_trace(quality: QualityResult, name: str, index: int) -> Tree:
    shown = [item for item in quality["evaluations"] if name in item["metrics"]]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": numbers(np.array([item["end_s"] for item in shown])),
        "y": numbers(np.array([item["metrics"][name] for item in shown])),
        "line": {"color": rank_color(index), "width": 1.5},
        "marker": {"size": 5},
        "hovertemplate": f"%{{x:.1f}} s: %{{y:.4f}}<extra>{name}</extra>",
    }


def _shaded(quality: QualityResult) -> list[Tree]:
    return [area(item["start_s"], item["end_s"]) for item in quality["evaluations"][:MAX_SHADED]]
