"""One training step: an object with `run(batch)`. What a step does is here; when and how often is the loop's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from drawbar.train.batch import HostBatch
from drawbar.train.optimizer import set_learning_rate

# ImageNet's channel means and standard deviations, of pixels 0..255.
_MEAN = (123.68, 116.78, 103.94)
_STD = (58.4, 57.1, 57.4)


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
        learning_rate: Callable[[int], float],
        *,
        device: torch.device,
        dtype: torch.dtype,
        channels_last: bool,
        label_smoothing: float = 0.0,
    ) -> None:
        self.number = 0
        """Of the next step; a resumed training sets it."""
        self._model, self._optimizer, self._learning_rate = model, optimizer, learning_rate
        self._label_smoothing = label_smoothing
        self._device, self._dtype = device, dtype
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._mean = torch.tensor(_MEAN, device=device, dtype=dtype).view(1, 3, 1, 1)
        self._scale = 1 / torch.tensor(_STD, device=device, dtype=dtype).view(1, 3, 1, 1)

    def run(self, batch: HostBatch) -> Trained:
        rate = self._learning_rate(self.number)
        self.number += 1
        start = time.perf_counter()
        images, labels = self.to_device(batch.pixels, batch.labels)
        copied = time.perf_counter()
        with torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype != torch.float32):
            logits = self._model(images)
        loss = functional.cross_entropy(logits.float(), labels, label_smoothing=self._label_smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        computed = time.perf_counter()
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        end = time.perf_counter()
        spans = Spans(copy_s=copied - start, compute_s=computed - copied, optimizer_s=end - computed)
        return Trained(loss=loss.detach(), learning_rate=rate, spans=spans)

    def to_device(self, pixels: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 crosses to the device; normalised there, in the model's precision."""
        images = pixels.to(self._device, non_blocking=True).permute(0, 3, 1, 2)
        images = images.to(self._dtype, memory_format=self._layout)
        return images.sub_(self._mean).mul_(self._scale), labels.to(self._device, non_blocking=True)
