"""Checkpoints and weights: what was written and read, how fast, and how long training stood still for it."""

from __future__ import annotations

from typing import cast

import numpy as np

from drawbar.analyze.schema import CheckpointsResult, ResumedResult, WeightsResult
from drawbar.analyze.throughput import percentiles
from drawbar.analyze.timeline import Run
from drawbar.journal import CheckpointRead, CheckpointWrite, WeightsRead


def checkpoints_result(run: Run) -> CheckpointsResult | None:
    """Of rank 0, which writes for all; None where nothing was written."""
    writes = cast(list[CheckpointWrite], run.events(CheckpointWrite))
    if not writes:
        return None
    last = max(writes, key=lambda write: write.step)
    size_bytes = sum(write.size_bytes for write in writes)
    write_s = sum(write.write_s for write in writes)
    return CheckpointsResult(
        written=len(writes),
        last_step=last.step,
        last_target=last.target,
        bytes=size_bytes,
        write_s=write_s,
        mb_per_s=size_bytes / 1e6 / write_s if write_s > 0 else None,
        pause_s=percentiles(np.array([write.pause_s for write in writes])),
        waited_s=sum(write.waited_s for write in writes),
        copy_s=sum(write.copy_s for write in writes),
    )


def first_step(run: Run) -> int:
    """Number of the first step of this run: the steps done before it was resumed."""
    reads = cast(list[CheckpointRead], run.events(CheckpointRead))
    return max((read.step for read in reads), default=0)


def resumed_result(run: Run) -> ResumedResult | None:
    """None for a training that began with this run."""
    reads = cast(list[CheckpointRead], run.events(CheckpointRead))
    if not reads:
        return None
    read_s = max(read.read_s for read in reads)
    rates = [read.size_bytes / 1e6 / read.read_s for read in reads if read.read_s > 0]
    return ResumedResult(
        step=first_step(run),
        source=reads[0].source,
        bytes=reads[0].size_bytes,
        ranks=len(reads),
        read_s=read_s,
        mb_per_s=min(rates, default=None),
        load_s=max(read.load_s for read in reads),
        differences=reads[0].differences,
    )


def weights_result(run: Run) -> WeightsResult | None:
    """Of the lowest rank that wrote one; None where the model began at random."""
    reads = cast(list[WeightsRead], run.events(WeightsRead))
    if not reads:
        return None
    read = reads[0]
    return WeightsResult(
        source=read.source,
        bytes=read.size_bytes,
        read_s=max(each.read_s for each in reads),
        loaded=read.loaded,
        head=read.head,
        missing=read.missing,
        unexpected=read.unexpected,
    )
