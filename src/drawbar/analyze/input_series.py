"""The input's queues and waits over time, all ranks together, from the samples that each rank took of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drawbar.analyze.timeline import Floats, Ints, Run
from drawbar.journal import InputSample

QUEUES = ("fetch", "shuffle", "batch")
"""Stages with a queue behind them."""
THREADS = ("fetch", "split", "decode")
"""Stages with threads of their own; `split` stands for the feeder's, which shuffles and assembles batches too."""


@dataclass(frozen=True, kw_only=True)
class InputSeries:
    """Every array has a value for each of some equal bins of time; NaN where nothing is known of one."""

    end_t: Floats
    """Ends of the bins, on rank 0's clock."""
    fill: dict[str, Floats]
    """By queue: items / capacity, mean over the samples of all ranks, 0 to 1. Queues that have no room are left out."""
    lowest: dict[str, Floats]
    """The same, of the sample in which it was emptiest."""
    blocked_in: dict[str, Floats]
    """By stage of THREADS: share of its threads' time on all ranks, 0 to 1."""
    blocked_out: dict[str, Floats]
    num_ranks: int
    """That were looked at."""


@dataclass(frozen=True, kw_only=True)
class _Rank:
    times: Floats
    samples: list[InputSample]


def input_series(run: Run, max_bins: int) -> InputSeries | None:
    """About as many bins as a rank has samples, at most `max_bins`; None where no rank was looked at twice."""
    ranks = []
    for rank in run.ranks:
        samples = sorted(rank.journal.of(InputSample), key=lambda sample: sample.t)
        if len(samples) > 1:
            times = rank.clock(np.array([sample.t for sample in samples], np.float64))
            ranks.append(_Rank(times=times, samples=samples))
    if not ranks:
        return None
    bins = min(max_bins, max(len(rank.samples) for rank in ranks) - 1)
    edges = np.linspace(min(rank.times[0] for rank in ranks), max(rank.times[-1] for rank in ranks), bins + 1)
    at = np.concatenate([np.clip(np.searchsorted(edges, rank.times) - 1, 0, bins - 1) for rank in ranks])
    fills = {name: _fill(name, ranks, at, bins) for name in QUEUES}
    known = {name: fill for name, fill in fills.items() if fill is not None}
    blocked = {name: _blocked(name, ranks, edges) for name in THREADS}
    return InputSeries(
        end_t=edges[1:],
        fill={name: mean for name, (mean, _) in known.items()},
        lowest={name: low for name, (_, low) in known.items()},
        blocked_in={name: wait_in for name, (wait_in, _) in blocked.items()},
        blocked_out={name: wait_out for name, (_, wait_out) in blocked.items()},
        num_ranks=len(ranks),
    )


def _fill(name: str, ranks: Sequence[_Rank], at: Ints, bins: int) -> tuple[Floats, Floats] | None:
    """(mean, lowest) per bin; `at` is the bin of each sample of all ranks. None where no sample shows such a queue."""
    samples = [sample for rank in ranks for sample in rank.samples]
    room = np.array([sample.queue_capacity.get(name, 0) for sample in samples], np.float64)
    queued = np.array([sample.queued.get(name, 0) for sample in samples], np.float64)
    there = room > 0
    if not there.any():
        return None
    # Of a pool that grows while it is looked at, more may be queued than it has room for.
    fill, at = np.clip(queued[there] / room[there], 0, 1), at[there]
    count = np.bincount(at, minlength=bins)
    low = np.full(bins, np.inf)
    np.minimum.at(low, at, fill)
    mean = np.full(bins, np.nan)
    np.divide(np.bincount(at, fill, minlength=bins), count, out=mean, where=count > 0)
    return mean, np.where(count > 0, low, np.nan)


def _blocked(name: str, ranks: Sequence[_Rank], edges: Floats) -> tuple[Floats, Floats]:
    """Shares of the stage's threads' time in each bin: blocked on input, blocked on output."""
    busy, wait_in, wait_out = (
        sum((_growth(rank, part, name, edges) for rank in ranks), np.zeros(len(edges) - 1))
        for part in ("busy_s", "wait_in_s", "wait_out_s")
    )
    total = busy + wait_in + wait_out
    unknown = np.full(len(total), np.nan)
    return (
        np.divide(wait_in, total, out=unknown.copy(), where=total > 0),
        np.divide(wait_out, total, out=unknown, where=total > 0),
    )


def _growth(rank: _Rank, part: str, name: str, edges: Floats) -> Floats:
    """Of a counter between edges, linear between samples; 0 beyond them."""
    values = [getattr(sample, part).get(name, 0.0) for sample in rank.samples]
    grown: Floats = np.maximum(np.diff(np.interp(edges, rank.times, values)), 0.0)
    return grown
