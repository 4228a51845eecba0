"""What training does with a batch of a detection set: normalised pixels and objects on the device, and their loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from drawbar.config import PixelScale
from drawbar.input.target import Target
from drawbar.models.detector import Objects, Size
from drawbar.train.batch import HostBatch

_MEAN_AND_STD: dict[PixelScale, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    "caffe": ((102.9801, 115.9465, 122.7717), (1.0, 1.0, 1.0)),
}
"""Of pixels 0..255; of `caffe` in the order blue, green, red."""


class DetectionBatch(NamedTuple):
    """On the device."""

    images: Tensor
    """(batch, 3, height, width), normalised; 0 where an image does not reach."""
    sizes: list[Size]
    targets: list[Objects]


class DetectionObjective:
    """Implements `objective.Objective`."""

    def __init__(self, *, device: torch.device, dtype: torch.dtype, channels_last: bool, pixels: PixelScale) -> None:
        self._device, self._dtype = device, dtype
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        mean, std = _MEAN_AND_STD[pixels]
        self._to_bgr = pixels == "caffe"
        self._mean = torch.tensor(mean, device=device, dtype=dtype).view(1, 3, 1, 1)
        self._scale = 1 / torch.tensor(std, device=device, dtype=dtype).view(1, 3, 1, 1)

    def autocast(self) -> torch.autocast:
        """The precision of the model's arithmetic."""
        return torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype != torch.float32)

    def to_device(self, batch: HostBatch) -> DetectionBatch:
        images = self.normalise(batch.pixels, [target.size for target in batch.targets])
        targets = [self._objects(target, images.shape[-2:]) for target in batch.targets]
        return DetectionBatch(images, [target.size for target in batch.targets], targets)

    def split(self, inputs: DetectionBatch, parts: int) -> list[DetectionBatch]:
        size = len(inputs.images) // parts
        slices = [slice(start, start + size) for start in range(0, len(inputs.images), size)]
        return [DetectionBatch(inputs.images[part], inputs.sizes[part], inputs.targets[part]) for part in slices]

    def loss(self, model: nn.Module, inputs: DetectionBatch) -> Tensor:
        """The sum of the model's losses."""
        losses = cast(dict[str, Tensor], model(*inputs))
        return torch.stack([loss.float() for loss in losses.values()]).sum()

    def normalise(self, pixels: Tensor, sizes: Sequence[Size]) -> Tensor:
        """uint8 crosses to the device. What pads an image there is 0, the mean, as in the reference."""
        images = pixels.to(self._device, non_blocking=True).permute(0, 3, 1, 2)
        if self._to_bgr:
            images = images.flip(1)
        images = images.to(self._dtype, memory_format=self._layout).sub_(self._mean).mul_(self._scale)
        for image, (height, width) in zip(images, sizes, strict=True):
            image[:, height:] = 0
            image[:, :, width:] = 0
        return images

    def _objects(self, target: Target, size: torch.Size) -> Objects:
        masks = torch.zeros((len(target.masks), *size), dtype=torch.uint8, device=self._device)
        for whole, mask in zip(masks, target.masks, strict=True):
            height, width = mask.pixels.shape
            part = torch.from_numpy(np.ascontiguousarray(mask.pixels))
            whole[mask.top : mask.top + height, mask.left : mask.left + width] = part.to(self._device)
        return Objects(
            boxes=torch.from_numpy(target.boxes).to(self._device, non_blocking=True),
            labels=torch.from_numpy(target.labels).to(self._device, non_blocking=True),
            masks=masks,
        )
