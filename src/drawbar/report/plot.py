"""What all figures of the page share: plotly.js trees with the style sheet's colours, and data reduced beforehand.

Colours are written as `var(--name)`; the page's script puts in what the style sheet says for light, dark or print.
Text that comes from outside (host names, addresses) passes `label`, because plotly reads tags in text.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

import numpy as np

from drawbar.analyze.timeline import Floats, Ints

MAX_POINTS = 300
"""Per line; more cannot be told apart on a screen, and a long run's page must stay small."""

Tree = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Figure:
    id: str
    title: str
    caption: str
    alt: str
    """For those who do not see the figure: what it shows, with its main numbers."""
    height_px: int
    data: list[Tree]
    layout: Tree


def label(text: str, longest: int = 28) -> str:
    """Outside text for plotly: shortened in the middle, tags shown and not obeyed."""
    if len(text) > longest:
        text = text[: longest // 2 - 1] + "…" + text[-(longest // 2) :]
    return html.escape(text, quote=False)


def numbers(values: Floats) -> list[float | None]:
    """Five significant digits: more than a screen shows, and a third of the bytes."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]


def axis(title: str, **more: Any) -> Tree:
    return {
        "title": {"text": title, "standoff": 8},
        "automargin": True,
        "gridcolor": "var(--grid)",
        "zerolinecolor": "var(--line)",
        "linecolor": "var(--line)",
        **more,
    }


def layout(**more: Any) -> Tree:
    return {
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--ink-2)"},
        "hoverlabel": {"bgcolor": "var(--surface)", "bordercolor": "var(--line)", "font": {"color": "var(--ink)"}},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        "bargap": 0.3,
        **more,
    }


def rank_color(index: int) -> str:
    return f"var(--rank-{index})"


def buckets(count: int) -> list[Ints]:
    """Row numbers of at most MAX_POINTS groups of neighbours."""
    return [np.asarray(rows) for rows in np.array_split(np.arange(count), min(count, MAX_POINTS)) if len(rows)]


def area(x0: float, x1: float) -> Tree:
    """A shaded stretch of the time axis, behind everything."""
    return {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": x0,
        "x1": x1,
        "y0": 0,
        "y1": 1,
        "fillcolor": "var(--shade)",
        "line": {"width": 0},
        "layer": "below",
    }


def level_line(value: float) -> Tree:
    """Dotted, over the whole width, at a value of the y axis."""
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "yref": "y",
        "y0": value,
        "y1": value,
        "line": {"color": "var(--ink-2)", "width": 1, "dash": "dot"},
    }
