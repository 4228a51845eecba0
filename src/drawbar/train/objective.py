"""What is trained for: how a batch gets to the device, and the loss it gives there."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from drawbar.input.device import DeviceCopy
from drawbar.train.batch import HostBatch

# ImageNet's channel means and standard deviations, of pixels 0..255.
_MEAN = (123.68, 116.78, 103.94)
_STD = (58.4, 57.1, 57.4)


class Objective(Protocol):
    def to_device(self, batch: HostBatch) -> Any:
        """What `loss` takes. Of a batch's buffers nothing is kept but on the device."""

    def split(self, inputs: Any, parts: int) -> list[Any]:
        """In equal parts, each of which `loss` takes too."""

    def loss(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        """Mean over the samples, a scalar; runs under autocast where the precision is mixed."""


Inputs = tuple[torch.Tensor, torch.Tensor]
"""Images (batch, 3, height, width), normalised; labels (batch,), int64."""


class Classification:
    """One label for each image: cross-entropy in fp32."""

    def __init__(
        self, *, device: torch.device, dtype: torch.dtype, channels_last: bool, label_smoothing: float = 0.0
    ) -> None:
        self._dtype, self._label_smoothing = dtype, label_smoothing
        self._copy = DeviceCopy(device)
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._mean = torch.tensor(_MEAN, device=device, dtype=dtype).view(1, 3, 1, 1)
        self._scale = 1 / torch.tensor(_STD, device=device, dtype=dtype).view(1, 3, 1, 1)

    def to_device(self, batch: HostBatch) -> Inputs:
        """uint8 crosses to the device; normalised there, in the model's precision."""
        there = self._copy.to_device(batch.pixels, batch.labels)
        images = there.pixels.permute(0, 3, 1, 2).to(self._dtype, memory_format=self._layout)
        return images.sub_(self._mean).mul_(self._scale), there.labels

    def split(self, inputs: Inputs, parts: int) -> list[Inputs]:
        images, labels = inputs
        return list(zip(images.chunk(parts), labels.chunk(parts), strict=True)) if parts > 1 else [inputs]

    def loss(self, model: nn.Module, inputs: Inputs) -> torch.Tensor:
        images, labels = inputs
        return functional.cross_entropy(model(images).float(), labels, label_smoothing=self._label_smoothing)
