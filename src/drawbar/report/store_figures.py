"""Figures of the other side: bytes per endpoint, and the hosts' counters over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from drawbar.analyze.facts import Facts
from drawbar.analyze.hosts import CPU_STATES, MB, column, nic_counter
from drawbar.analyze.schema import Result
from drawbar.analyze.timeline import Floats, HostTimeline
from drawbar.plural import plural
from drawbar.report import words
from drawbar.report.plot import MAX_POINTS, Figure, area, axis, label, layout, numbers


def bytes_figure(result: Result) -> Figure | None:
    endpoints = result["endpoints"]
    if not endpoints:
        return None
    names = [label(endpoint["url"]) for endpoint in endpoints]
    series: list[tuple[str, str, list[float | None]]] = [
        ("received by clients", "var(--stage-compute)", [endpoint["bytes"] / MB for endpoint in endpoints]),
        (
            "served, says the gateway",
            "var(--stage-optimizer)",
            [None if count is None else count / MB for count in (endpoint["gateway_bytes"] for endpoint in endpoints)],
        ),
    ]
    known = [(name, color, values) for name, color, values in series if any(value is not None for value in values)]
    return Figure(
        id="bytes",
        title="Bytes per endpoint",
        caption="Bodies received by all ranks, metadata and failed tries included"
        + (", beside the gateway's own count." if len(known) > 1 else "; the server gave no count of its own."),
        alt=f"Bars per endpoint: {words.megabytes(result['read_bytes'])} MB received in all from "
        f"{plural(len(endpoints), 'endpoint')}.",
        height_px=110 + (18 + 16 * len(known)) * len(endpoints),
        data=[
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": names,
                "x": values,
                "marker": {"color": color},
                "hovertemplate": f"%{{y}}: %{{x:,.1f}} MB {name}<extra></extra>",
            }
            for name, color, values in known
        ],
        layout=layout(
            barmode="group",
            xaxis=axis("MB (10⁶ bytes)", rangemode="tozero"),
            yaxis=axis("", type="category", autorange="reversed"),
            showlegend=True,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    of: Callable[[HostTimeline], Floats]
    """Cumulative counter -> value per interval between kept samples is `scale` times its growth per second."""
    scale: float


def busiest_nic(host: HostTimeline) -> str:
    """By bytes received over all samples. One, because bridges and their ports count the same bytes again."""
    first, last = host.samples[0].nic_received_bytes, host.samples[-1].nic_received_bytes
    return max(sorted(last), key=lambda name: last[name] - first.get(name, 0), default="")


def hosts_figure(facts: Facts) -> Figure | None:
    hosts = [host for host in facts.run.hosts if len(host.samples) > 1]
    if not hosts:
        return None
    zero_t = facts.interval.start_t if facts.interval else float(hosts[0].times[0])
    panels = host_panels(hosts)
    data = []
    for index, host in enumerate(hosts):
        for row, panel in enumerate(panels, 1):
            times, values = between(host, panel)
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": label(host.node),
                    "legendgroup": label(host.node),
                    "showlegend": row == 1,
                    "yaxis": f"y{row}",
                    "x": numbers(times - zero_t),
                    "y": numbers(values),
                    "line": {"color": f"var(--host-{index})", "width": 1.5},
                    "hovertemplate": f"%{{x:.0f}} s: %{{y:.1f}}<extra>{label(host.node)}</extra>",
                }
            )
    share = 1 / len(panels)
    axes = {
        f"yaxis{row}": axis(
            panel.title, domain=[1 - row * share + 0.035, 1 - (row - 1) * share - 0.035], rangemode="tozero"
        )
        for row, panel in enumerate(panels, 1)
    }
    nics = ", ".join(f"{busiest_nic(host)} on {host.node}" for host in hosts[:4]) + (", …" if len(hosts) > 4 else "")
    shapes = []
    if facts.interval:
        shapes = [area(0, facts.interval.length_s)]
    return Figure(
        id="hosts",
        title="Hosts over time",
        caption="Counters of the whole host, once a second. Network: bytes received by its busiest interface "
        f"({nics}). Shaded: the measured interval.",
        alt="Line charts per host over time: "
        + "; ".join(
            f"{host['node']} CPU {words.percent(host['cpu_busy'])} busy, "
            f"{words.number(host['disk_read_mb_per_s'])} MB/s read from disk"
            for host in facts.hosts[:4]
        )
        + ".",
        height_px=90 + 170 * len(panels),
        data=data,
        layout=layout(
            xaxis=axis("time since all ranks were measuring (s)", anchor=f"y{len(panels)}", zeroline=False),
            **axes,
            shapes=shapes,
            showlegend=len(hosts) > 1,
        ),
    )


def host_panels(hosts: Sequence[HostTimeline]) -> list[Panel]:
    def busy(host: HostTimeline) -> Floats:
        return column(host, attrgetter("cpu_user_s")) + column(host, attrgetter("cpu_system_s"))

    panels = [
        Panel(title="CPU busy (%)", of=busy, scale=100.0),
        Panel(title="disk read (MB/s)", of=lambda host: column(host, attrgetter("disk_read_bytes")), scale=1 / MB),
        Panel(
            title="network in (MB/s)",
            of=lambda host: column(host, nic_counter(attrgetter("nic_received_bytes"), busiest_nic(host))),
            scale=1 / MB,
        ),
    ]
    return panels


def between(host: HostTimeline, panel: Panel) -> tuple[Floats, Floats]:
    """(time, value) of a panel: growth between kept samples per second; of the CPU, per second of all its cores."""
    rows = np.unique(np.linspace(0, len(host.times) - 1, min(len(host.times), MAX_POINTS + 1)).astype(np.int64))
    if panel.scale == 100.0:
        elapsed_s = sum((column(host, attrgetter(state)) for state in CPU_STATES), np.zeros(len(host.times)))
    else:
        elapsed_s = host.times
    growth = np.diff(panel.of(host)[rows])
    return host.times[rows][1:], panel.scale * growth / np.maximum(np.diff(elapsed_s[rows]), 1e-9)
