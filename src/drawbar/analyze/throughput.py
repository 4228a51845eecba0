"""Images per second, step times and where they go. Pure functions over timelines; nothing here is judged.

All ranks are counted; no rank's rate is ever multiplied by the number of ranks. Every function takes an empty set of
measured steps and answers None for what it cannot say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import cast

import numpy as np

from drawbar.analyze.schema import Percentiles, StepShares
from drawbar.analyze.timeline import Floats, Ints, RankTimeline, Steps

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation of a normal distribution; tf_cnn_benchmarks' `jitter` factor."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Seconds on rank 0's clock."""

    start_t: float
    end_t: float
    paused_s: float = 0.0
    """Of it, in which ranks did something else than training, such as evaluating."""

    @property
    def length_s(self) -> float:
        return self.end_t - self.start_t

    @property
    def measured_s(self) -> float:
        return self.length_s - self.paused_s


def common_interval(ranks: Sequence[RankTimeline]) -> Interval | None:
    """The time in which every rank was measuring: from the latest start of a first measured step to the earliest end
    of a last one. None where a rank measured nothing or the two cross."""
    if not ranks or any(not len(rank.measured) for rank in ranks):
        return None
    start_t = max(float(rank.measured.start_t[0]) for rank in ranks)
    end_t = min(float(rank.measured.end_t[-1]) for rank in ranks)
    steps = global_steps([rank.measured for rank in ranks], start_t)
    paused_s = steps.paused_s if steps is not None else 0.0
    return Interval(start_t=start_t, end_t=end_t, paused_s=paused_s) if end_t - start_t > paused_s else None


def samples_within(steps: Steps, interval: Interval) -> float:
    """Samples trained in the interval. A step that an edge cuts counts in proportion to the part of its time that lies
    inside: the samples of a step are taken as trained evenly over it."""
    overlap_s = np.minimum(steps.end_t, interval.end_t) - np.maximum(steps.start_t, interval.start_t)
    share = np.clip(overlap_s, 0, None) / np.maximum(steps.step_s, 1e-9)
    return float(np.sum(steps.samples * share))


def images_per_s(ranks: Sequence[RankTimeline], interval: Interval | None) -> list[float | None]:
    """Each rank's samples in the common interval / its length without pauses. Their sum is `total images/sec`."""
    if interval is None:
        return [None for _ in ranks]
    return [samples_within(rank.measured, interval) / interval.measured_s for rank in ranks]


def total_images_per_s(per_rank: Sequence[float | None]) -> float | None:
    known = [rate for rate in per_rank if rate is not None]
    return sum(known) if known and len(known) == len(per_rank) else None


@dataclass(frozen=True, kw_only=True)
class Rate:
    """tf_cnn_benchmarks' `images/sec: mean +/- stderr (jitter = jitter)` over n steps."""

    mean: float
    """All samples / all time."""
    stderr: float
    """Standard deviation (of the population) of the steps' speeds / sqrt(n)."""
    jitter: float
    """1.4826 x median absolute deviation of the steps' speeds."""
    n: int


def rate_of(samples: Sequence[float] | Floats | Ints, durations_s: Sequence[float] | Floats) -> Rate | None:
    """Definitions as in tf_cnn_benchmarks' `get_perf_timing`; None without a step that took time."""
    trained = np.asarray(samples, dtype=np.float64)
    seconds = np.asarray(durations_s, dtype=np.float64)
    trained, seconds = trained[seconds > 0], seconds[seconds > 0]
    if not len(seconds):
        return None
    speeds = trained / seconds
    return Rate(
        mean=float(trained.sum() / seconds.sum()),
        stderr=float(np.std(speeds) / np.sqrt(len(speeds))),
        jitter=float(MAD_TO_SIGMA * np.median(np.abs(speeds - np.median(speeds)))),
        n=len(speeds),
    )


@dataclass(frozen=True, kw_only=True)
class GlobalSteps:
    """Steps that every rank finished. Row i of each is one."""

    step: Ints
    start_t: Floats
    """End of the step before; for the first one, the start of the common interval; after a pause, the latest start over
    all ranks."""
    end_t: Floats
    """The latest end over all ranks."""
    samples: Ints
    """Of all ranks."""
    loss: list[float | None]
    """Mean over the ranks that fetched theirs; None where none did, NaN where one is not a number."""

    @property
    def duration_s(self) -> Floats:
        return self.end_t - self.start_t

    @property
    def paused_s(self) -> float:
        """Between steps."""
        return float((self.start_t[1:] - self.end_t[:-1]).sum())


def global_steps(ranks: Sequence[Steps], start_t: float | None) -> GlobalSteps | None:
    """None without a start or a step that every rank finished."""
    if start_t is None or not ranks:
        return None
    numbers = reduce(np.intersect1d, [steps.step for steps in ranks])
    if not len(numbers):
        return None
    rows = [(steps, np.searchsorted(steps.step, numbers)) for steps in ranks]
    end_t = np.max([steps.end_t[row] for steps, row in rows], axis=0)
    fetched = np.array([steps.fetched[row] for steps, row in rows])
    losses = np.array([steps.loss[row] for steps, row in rows])
    count = fetched.sum(axis=0)
    mean_loss = np.where(fetched, losses, 0.0).sum(axis=0) / np.maximum(count, 1)
    previous_t = np.concatenate([[start_t], end_t[:-1]])
    paused = np.any([steps.after_pause[row] for steps, row in rows], axis=0)
    paused[0] = False
    latest_t = np.max([steps.start_t[row] for steps, row in rows], axis=0)
    return GlobalSteps(
        step=numbers,
        start_t=np.where(paused, np.maximum(latest_t, previous_t), previous_t),
        end_t=end_t,
        samples=np.sum([steps.samples[row] for steps, row in rows], axis=0),
        loss=[float(loss) if fetches else None for loss, fetches in zip(mean_loss, count, strict=True)],
    )


def percentiles(seconds: Floats) -> Percentiles:
    if not len(seconds):
        return Percentiles(p50=None, p90=None, p99=None, max=None)
    p50, p90, p99 = (float(value) for value in np.percentile(seconds, [50, 90, 99]))
    return Percentiles(p50=p50, p90=p90, p99=p99, max=float(seconds.max()))


def step_shares(steps: Steps) -> StepShares | None:
    """Where the measured steps' time went, as parts of their sum."""
    total_s = float(steps.step_s.sum())
    if total_s <= 0:
        return None
    shares = {name: float(span.sum()) / total_s for name, span in steps.spans_s.items()}
    other = max(0.0, 1 - sum(shares.values()))
    return cast(StepShares, {**shares, "other": other})


def accelerator_utilization(ranks: Sequence[RankTimeline]) -> float | None:
    """MLPerf Storage's AU, compute time / total time, over all ranks' measured steps, 0 to 1.

    Its compute time is the training step alone: data end in host memory there, so handing a batch to the device is not
    part of it (mlcommons/storage, Submission_guidelines). Hence forward, backward, exchange and optimizer here; the
    copy and what the spans leave over count in the total only.
    """
    total_s = sum(float(rank.measured.step_s.sum()) for rank in ranks)
    compute_s = sum(
        float((steps.compute_s + steps.exchange_s + steps.optimizer_s).sum())
        for steps in (rank.measured for rank in ranks)
    )
    return compute_s / total_s if total_s > 0 else None


@dataclass(frozen=True, kw_only=True)
class DataWait:
    """Parts of step time spent waiting for the next batch, 0 to 1."""

    mean: float
    """Over ranks."""
    worst: float
    worst_rank: int


def data_wait(ranks: Sequence[RankTimeline]) -> DataWait | None:
    shares = [(step_shares(rank.measured), rank.rank) for rank in ranks]
    known = [(share["data_wait"], rank) for share, rank in shares if share is not None]
    if not known:
        return None
    worst, worst_rank = max(known, key=lambda pair: (pair[0], -pair[1]))
    return DataWait(mean=sum(share for share, _ in known) / len(known), worst=worst, worst_rank=worst_rank)
