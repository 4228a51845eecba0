"""One training step: an object with `run(batch)`. What a step does is here; when and how often is the loop's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from drawbar.train.batch import HostBatch
from drawbar.train.objective import Objective
from drawbar.train.optimizer import set_learning_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Host seconds of the parts of one step. On a GPU they are the time to enqueue; the loop takes device time."""

    copy_s: float
    compute_s: float
    optimizer_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What became of one batch."""

    loss: torch.Tensor
    """A scalar on the device, detached."""
    learning_rate: float
    spans: Spans


class Step(Protocol):
    """What a step does; `train/loop.py` says when and writes down how long."""

    number: int
    """Of the next step, from 0; a resumed training sets it."""

    def run(self, batch: HostBatch) -> Trained:
        """Trains one batch."""


class TrainStep:
    """Normalise, forward, backward (DistributedDataParallel exchanges gradients meanwhile), update.

    `learning_rate` maps the number of a step, from 0, to its rate.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        learning_rate: Callable[[int], float],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.number = 0
        self._model, self._optimizer = model, optimizer
        self._objective, self._learning_rate = objective, learning_rate
        self._device, self._dtype = device, dtype

    def run(self, batch: HostBatch) -> Trained:
        rate = self._learning_rate(self.number)
        self.number += 1
        start = time.perf_counter()
        on_device = self._objective.to_device(batch)
        copied = time.perf_counter()
        with torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype != torch.float32):
            loss = self._objective.loss(self._model, on_device)
        loss.backward()  # type: ignore[no-untyped-call]
        computed = time.perf_counter()
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        end = time.perf_counter()
        spans = Spans(copy_s=copied - start, compute_s=computed - copied, optimizer_s=end - computed)
        return Trained(loss=loss.detach(), learning_rate=rate, spans=spans)
