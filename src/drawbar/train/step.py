"""One training step: an object with `run(batch)`. What a step does is here; when and how often is the loop's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drawbar.train.batch import HostBatch
from drawbar.train.clock import StepClock
from drawbar.train.exchange import Exchange
from drawbar.train.memory import batch_too_large, is_out_of_memory
from drawbar.train.objective import Objective
from drawbar.train.optimizer import set_learning_rate
from drawbar.train.precision import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """Points of one step in their order, as the clock takes them: the parts of the step lie between them."""

    start: Any
    """The batch is there."""
    copied: Any
    """It is on the device, normalised."""
    computed: Any
    """Forward and backward are over: this rank's last gradient is ready."""
    exchanged: Any
    """The gradients of all ranks are averaged."""
    updated: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What became of one batch."""

    loss: torch.Tensor | None
    """A scalar on the device, detached; None: there is none."""
    learning_rate: float | None
    marks: Marks
    tags: tuple[str, ...] = ()
    """What is odd about this step, for its journal line."""


class Step(Protocol):
    """What a step does; `train/loop.py` says when and writes down how long."""

    number: int
    """Of the next step, from 0; a resumed training sets it."""

    def run(self, batch: HostBatch) -> Trained:
        """Trains one batch."""


class TrainStep:
    """Normalise, forward, backward (gradients are exchanged meanwhile), update.

    `learning_rate` maps the number of a step, from 0, to its rate. `exchange` has wrapped `model`, or is None where
    there is one rank. A batch is trained in `accumulate` parts before the one update.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        learning_rate: Callable[[int], float],
        *,
        clock: StepClock,
        device: torch.device,
        precision: Precision,
        exchange: Exchange | None = None,
        accumulate: int = 1,
        loss_scale: float = 65536.0,
    ) -> None:
        self.number = 0
        """Of the next step; a resumed training sets it."""
        self._model, self._optimizer, self._objective = model, optimizer, objective
        self._learning_rate, self._clock, self._exchange = learning_rate, clock, exchange
        self._device, self._precision, self._accumulate = device, precision, accumulate
        self.scaler = torch.amp.GradScaler(device.type, init_scale=loss_scale, enabled=precision.name == "fp16")
        """Of fp16's loss; its state belongs to a checkpoint."""
        self._compilations = _compilations()

    def run(self, batch: HostBatch) -> Trained:
        rate = self._learning_rate(self.number)
        start = self._clock.mark()
        try:
            inputs = self._objective.to_device(batch)
            copied = self._clock.mark()
            loss = self._backward(inputs)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise batch_too_large(batch.samples, self._device, lambda samples: self._try(batch, samples)) from error
        exchanged = self._clock.mark()
        ready = self._exchange.take_ready() if self._exchange else None
        set_learning_rate(self._optimizer, rate)
        tags = self._update()
        updated = self._clock.mark()
        self.number += 1
        marks = Marks(
            start=start,
            copied=copied,
            computed=exchanged if ready is None else ready,
            exchanged=exchanged,
            updated=updated,
        )
        return Trained(loss=loss, learning_rate=rate, marks=marks, tags=tags)

    def _backward(self, inputs: Any) -> torch.Tensor:
        """Returns the mean loss of the batch."""
        parts = self._objective.split(inputs, self._accumulate)
        losses = []
        for number, part in enumerate(parts, 1):
            with self._without_exchange() if number < len(parts) else nullcontext():
                loss = self._loss(self._model, part) / len(parts)
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def _loss(self, model: nn.Module, part: Any) -> torch.Tensor:
        with torch.autocast(self._device.type, dtype=self._precision.dtype, enabled=self._precision.is_mixed):
            return self._objective.loss(model, part)

    def _without_exchange(self) -> Any:
        wrapped = getattr(self._model, "_orig_mod", self._model)  # torch.compile's
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()

    def _update(self) -> tuple[str, ...]:
        scale = self.scaler.get_scale()
        self.scaler.step(self._optimizer)
        self.scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        tags = ("update_skipped",) if self.scaler.get_scale() < scale else ()
        before, self._compilations = self._compilations, _compilations()
        return tags if self._compilations == before else (*tags, "compiled")

    def _try(self, batch: HostBatch, samples: int) -> None:
        """Forward and backward of the first `samples` of a batch, on this rank alone."""
        self._optimizer.zero_grad(set_to_none=True)
        part = self._objective.to_device(batch.first(samples))
        wrapped = getattr(self._model, "_orig_mod", self._model)
        model = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        self._loss(model, part).backward()  # type: ignore[no-untyped-call]


def _compilations() -> int:
    """Graphs that torch.compile has made in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0
