"""A batch as it comes from the input path, on its way to a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from drawbar.input.target import GroundTruth, Target


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBatch:
    """A batch in host memory and what to call when its pixels have left it."""

    pixels: torch.Tensor
    """uint8 (batch, height, width, 3)."""
    labels: torch.Tensor
    """int64 (batch,); of a detection set they mean nothing."""
    epoch: int
    release: Callable[[], None]
    targets: Sequence[Target] = ()
    """Of a detection set: what is to be found, image by image."""
    truths: Sequence[GroundTruth] = ()
    """Of a detection set in evaluation, instead."""

    @property
    def samples(self) -> int:
        return len(self.pixels)

    def first(self, samples: int) -> HostBatch:
        """Its first few, in the same buffers."""
        return replace(self, pixels=self.pixels[:samples], labels=self.labels[:samples], targets=self.targets[:samples])
