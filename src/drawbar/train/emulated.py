"""A step without an accelerator: the batch is there, the time passes, gradients of the model's size are exchanged.

The emulated device is free when its last step was due to end, not when this process woke up to see it: deadlines are
absolute, so that steps of 100 ms make ten a second however late the system wakes us. Nothing spins.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from drawbar.config import Emulate, Exchange
from drawbar.train.batch import HostBatch
from drawbar.train.exchange import FORMATS
from drawbar.train.objective import Objective
from drawbar.train.step import Marks, Trained

_GRACE_S = 0.002
"""Of the host between two steps, hidden behind the device as a GPU's queue hides it; longer is a wait for data."""
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Bucket:
    gradients: torch.Tensor
    """Zeros, as many as are exchanged together."""
    ready: float
    """Part of backward after which they are all there, 0 to 1."""


def bucket_sizes(model: nn.Module, bucket_mib: float) -> list[int]:
    """Gradients in each bucket, in the order in which backward fills them, by DistributedDataParallel's rule: a bucket
    is closed by the tensor that reaches its limit."""
    limits = [bucket_mib * _MIB] if bucket_mib else [1 * _MIB, 25 * _MIB]
    sizes = [0]
    for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
        if sizes[-1] * 4 >= limits[min(len(sizes), len(limits)) - 1]:
            sizes.append(0)
        sizes[-1] += parameter.numel()
    return sizes


def buckets_of(model: nn.Module, exchange: Exchange, device: torch.device) -> list[Bucket]:
    """`model` may lie on the meta device: only its sizes count."""
    sizes = bucket_sizes(model, exchange.bucket_mib)
    buckets, done = [], 0
    for size in sizes:
        done += size
        gradients = torch.zeros(size, dtype=FORMATS[exchange.compression], device=device)
        buckets.append(Bucket(gradients=gradients, ready=1.0 if exchange.delayed else done / sum(sizes)))
    return buckets


class EmulatedStep:
    """`buckets`: none where there is nobody to exchange with, or the recipe leaves it out. On a GPU batches are copied
    there and the exchange is NCCL's; the time passes on the host."""

    def __init__(
        self, settings: Emulate, buckets: Sequence[Bucket], objective: Objective, device: torch.device
    ) -> None:
        self._settings, self._buckets, self._objective, self._device = settings, buckets, objective, device
        self._free_t = self._returned_t = 0.0
        self.number = 0

    def run(self, batch: HostBatch) -> Trained:
        self.number += 1
        step_s = self._settings.step_s
        start_t = time.perf_counter()
        waited = start_t - self._returned_t > _GRACE_S
        if self._device.type == "cuda":
            self._objective.to_device(batch)
            torch.cuda.synchronize()
        copied_t = time.perf_counter()
        # At most one step is caught up: a device whose host stood still for longer ran dry.
        begin_t = copied_t if waited else max(self._free_t + copied_t - start_t, copied_t - step_s)
        due_t = begin_t + step_s
        backward_s = step_s * self._settings.backward_share
        under_way: list[dist.Work] = []
        for bucket in self._buckets:
            _sleep_until(due_t - backward_s * (1 - bucket.ready))
            work = dist.all_reduce(bucket.gradients, async_op=True)
            assert work is not None  # noqa: S101 (every rank is a member of the group)
            under_way.append(work)
        _sleep_until(due_t)
        computed_t = exchanged_t = time.perf_counter()
        hidden = all(work.is_completed() for work in under_way)
        for work in under_way:
            work.wait()  # raises where another rank is gone
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._free_t = due_t
        if not hidden:
            self._free_t = exchanged_t = time.perf_counter()
        self._returned_t = exchanged_t
        marks = Marks(start=start_t, copied=copied_t, computed=computed_t, exchanged=exchanged_t, updated=exchanged_t)
        return Trained(loss=None, learning_rate=None, marks=marks)


def _sleep_until(due_t: float) -> None:
    left_s = due_t - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
