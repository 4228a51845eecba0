"""Figure of the input: how full each queue was over time, and what blocked each stage."""

from __future__ import annotations

import numpy as np

from drawbar.analyze.facts import Facts
from drawbar.analyze.input_series import InputSeries, input_series
from drawbar.analyze.timeline import Floats
from drawbar.plural import plural
from drawbar.report import words
from drawbar.report.plot import MAX_POINTS, Figure, Tree, area, axis, layout, numbers

QUEUE_NAMES = {"fetch": "bodies read ahead", "shuffle": "records to shuffle", "batch": "batches ready"}
STAGE_NAMES = {"fetch": "fetch", "split": "split, shuffle, batch", "decode": "decode"}
COLORS = {
    "fetch": "var(--input-fetch)",
    "shuffle": "var(--input-shuffle)",
    "batch": "var(--input-batch)",
    "split": "var(--input-split)",
    "decode": "var(--input-decode)",
}


def queues_figure(facts: Facts) -> Figure | None:
    series = input_series(facts.run, MAX_POINTS)
    if series is None:
        return None
    zero_t = facts.interval.start_t if facts.interval else float(series.end_t[0])
    times = series.end_t - zero_t
    data = [line(times, values, QUEUE_NAMES[name], COLORS[name], 1) for name, values in series.fill.items()]
    if series.num_ranks > 1:
        data += [
            line(times, values, f"{QUEUE_NAMES[name]}, emptiest", COLORS[name], 1, dash="dot")
            for name, values in series.lowest.items()
        ]
    for row, shares in ((2, series.blocked_in), (3, series.blocked_out)):
        data += [
            line(times, values, STAGE_NAMES[name], COLORS[name], row, showlegend=row == 2 and name != "fetch")
            for name, values in shares.items()
            if row == 3 or name != "fetch"  # what the plan asks for never runs out
        ]
    emptiest = "; dotted: where it was emptiest among the ranks" if series.num_ranks > 1 else ""
    return Figure(
        id="queues",
        title="Queues over time",
        caption="Above: items in the queue behind a stage, of those it has room for, as the training loop comes for a "
        f"batch or waits for one{emptiest}. Below: share of a stage's threads' time blocked for want of input, and "
        "blocked as what they make is not taken. A full queue blames who takes from it, an empty one who fills it. "
        "Shaded: the measured interval.",
        alt=f"Line charts over time of {plural(series.num_ranks, 'rank')}. {spoken(series)}",
        height_px=560,
        data=data,
        layout=layout(
            xaxis=axis("time since all ranks were measuring (s)", anchor="y3", zeroline=False),
            yaxis=axis("queue filled (%)", domain=[0.70, 1], range=[-3, 103]),
            yaxis2=axis("no input (%)", domain=[0.35, 0.62], range=[-3, 103]),
            yaxis3=axis("no room (%)", domain=[0, 0.27], range=[-3, 103]),
            shapes=[area(0, facts.interval.length_s)] if facts.interval else [],
            showlegend=True,
        ),
    )


def line(times: Floats, shares: Floats, name: str, color: str, row: int, dash: str = "solid", **more: object) -> Tree:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "yaxis": "y" if row == 1 else f"y{row}",
        "x": numbers(times),
        "y": numbers(shares * 100),
        "connectgaps": True,
        "line": {"color": color, "width": 1 if dash == "dot" else 1.5, "dash": dash},
        "hovertemplate": f"%{{x:.0f}} s: %{{y:.0f}} %<extra>{name}</extra>",
        **more,
    }


def spoken(series: InputSeries) -> str:
    means = [f"{QUEUE_NAMES[name]} {words.percent(_mean(values))} full" for name, values in series.fill.items()]
    blocked = f"decode threads {words.percent(_mean(series.blocked_in['decode']))} of the time without input"
    return f"On average: {', '.join([*means, blocked])}."


def _mean(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None
