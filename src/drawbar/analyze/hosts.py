"""What each host was doing while the ranks measured: shares and rates from cumulative counters."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import numpy as np

from drawbar.analyze.schema import HostResult
from drawbar.analyze.throughput import Interval
from drawbar.analyze.timeline import Floats, HostTimeline
from drawbar.journal import Host

MB = 10**6
CPU_STATES = ("cpu_user_s", "cpu_system_s", "cpu_idle_s", "cpu_iowait_s", "cpu_steal_s")


def column(host: HostTimeline, value: Callable[[Host], float]) -> Floats:
    return np.array([value(sample) for sample in host.samples], dtype=np.float64)


def growth(host: HostTimeline, value: Callable[[Host], float], start_t: float, end_t: float) -> float:
    """How much a cumulative counter grew between two times, linear between samples."""
    at = np.interp([start_t, end_t], host.times, column(host, value))
    return float(at[1] - at[0])


def nic_counter(counters: Callable[[Host], dict[str, int]], name: str) -> Callable[[Host], float]:
    return lambda sample: counters(sample).get(name, 0)


def host_result(host: HostTimeline, interval: Interval | None) -> HostResult:
    """Counters over the part of the interval that was sampled; over all samples where there is no interval."""
    start_t, end_t = float(host.times[0]), float(host.times[-1])
    if interval is not None:
        start_t, end_t = max(start_t, interval.start_t), min(end_t, interval.end_t)
    seconds = max(0.0, end_t - start_t)

    def grown(value: Callable[[Host], float]) -> float:
        return growth(host, value, start_t, end_t) if seconds else 0.0

    def mb_per_s(value: Callable[[Host], float]) -> float | None:
        return grown(value) / seconds / MB if seconds else None

    def nics(counters: Callable[[Host], dict[str, int]]) -> dict[str, float]:
        names = sorted({name for sample in host.samples for name in counters(sample)})
        return {name: mb_per_s(nic_counter(counters, name)) or 0.0 for name in names}

    cpu_s = {state: grown(attrgetter(state)) for state in CPU_STATES}
    total_s = sum(cpu_s.values())

    def share(*states: str) -> float | None:
        return sum(cpu_s[state] for state in states) / total_s if total_s > 0 else None

    return HostResult(
        node=host.node,
        num_cpus=host.samples[-1].num_cpus,
        seconds=seconds,
        cpu_busy=share("cpu_user_s", "cpu_system_s"),
        cpu_iowait=share("cpu_iowait_s"),
        cpu_steal=share("cpu_steal_s"),
        disk_read_mb_per_s=mb_per_s(attrgetter("disk_read_bytes")),
        disk_write_mb_per_s=mb_per_s(attrgetter("disk_write_bytes")),
        nic_received_mb_per_s=nics(attrgetter("nic_received_bytes")),
        nic_sent_mb_per_s=nics(attrgetter("nic_sent_bytes")),
        peak_rank_rss_bytes=_peak_rss(host),
        gpus=_mean_gpus(host, start_t, end_t),
    )


def _peak_rss(host: HostTimeline) -> dict[str, int]:
    peak: dict[str, int] = {}
    for sample in host.samples:
        for local_rank, rss_bytes in sample.rank_rss_bytes.items():
            peak[local_rank] = max(peak.get(local_rank, 0), rss_bytes)
    return dict(sorted(peak.items(), key=lambda item: item[0].zfill(6)))


def _mean_gpus(host: HostTimeline, start_t: float, end_t: float) -> list[dict[str, float]]:
    within = [sample for sample, t in zip(host.samples, host.times, strict=True) if start_t <= t <= end_t]
    count = max((len(sample.gpus) for sample in within), default=0)
    means = []
    for index in range(count):
        rows = [sample.gpus[index] for sample in within if index < len(sample.gpus)]
        names = sorted({name for row in rows for name in row})
        means.append({name: float(np.mean([row[name] for row in rows if name in row])) for name in names})
    return means
