"""One training step: an object with `run(batch)`. What a step does is here; when and how often is the loop's."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from drawbar.input.device import DeviceCopy

# ImageNet's channel means and standard deviations, of pixels 0..255.
_MEAN = (123.68, 116.78, 103.94)
_STD = (58.4, 57.1, 57.4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Host seconds of the parts of one step. On a GPU they are the time to enqueue; the loop takes device time."""

    copy_s: float
    compute_s: float
    optimizer_s: float


class TrainStep:
    """Normalise, forward, backward (DistributedDataParallel exchanges gradients meanwhile), update."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        device: torch.device,
        dtype: torch.dtype,
        channels_last: bool,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._device, self._dtype = device, dtype
        self._copy = DeviceCopy(device)
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._mean = torch.tensor(_MEAN, device=device, dtype=dtype).view(1, 3, 1, 1)
        self._scale = 1 / torch.tensor(_STD, device=device, dtype=dtype).view(1, 3, 1, 1)

    def run(self, pixels: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Spans]:
        """`pixels`: uint8 (batch, height, width, 3) on the host. Returns the loss (on the device) and the spans."""
        start = time.perf_counter()
        images, labels = self.to_device(pixels, labels)
        copied = time.perf_counter()
        with torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype != torch.float32):
            logits = self._model(images)
        loss = functional.cross_entropy(logits.float(), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        computed = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        end = time.perf_counter()
        return loss.detach(), Spans(copy_s=copied - start, compute_s=computed - copied, optimizer_s=end - computed)

    def to_device(self, pixels: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 crosses to the device; normalised there, in the model's precision."""
        there = self._copy.to_device(pixels, labels)
        images = there.pixels.permute(0, 3, 1, 2).to(self._dtype, memory_format=self._layout)
        return images.sub_(self._mean).mul_(self._scale), there.labels
