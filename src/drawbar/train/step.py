"""One training step: an object with `run(batch)`. What a step does is here; when and how often is the loop's."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from drawbar.train.batch import HostBatch
from drawbar.train.objective import Objective


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Host seconds of the parts of one step. On a GPU they are the time to enqueue; the loop takes device time."""

    copy_s: float
    compute_s: float
    optimizer_s: float


class Step(Protocol):
    """What a step does; `train/loop.py` says when and writes down how long."""

    def run(self, batch: HostBatch) -> tuple[torch.Tensor, Spans]:
        """Trains one batch. Returns the loss (a scalar on the device, detached) and the host's spans."""


class TrainStep:
    """Normalise, forward, backward (DistributedDataParallel exchanges gradients meanwhile), update."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._model, self._optimizer, self._objective = model, optimizer, objective
        self._device, self._dtype = device, dtype

    def run(self, batch: HostBatch) -> tuple[torch.Tensor, Spans]:
        start = time.perf_counter()
        on_device = self._objective.to_device(batch)
        copied = time.perf_counter()
        with torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype != torch.float32):
            loss = self._objective.loss(self._model, on_device)
        loss.backward()  # type: ignore[no-untyped-call]
        computed = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        end = time.perf_counter()
        return loss.detach(), Spans(copy_s=copied - start, compute_s=computed - copied, optimizer_s=end - computed)
