"""What detection models have in common: what they are given, what they answer, and by which settings they are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypedDict

from torch import Tensor

Size = tuple[int, int]
"""Height and width, pixels."""


class Objects(TypedDict):
    """Of one image, on the device, in pixels of the image as the model sees it."""

    boxes: Tensor
    """float32 (objects, 4): xmin, ymin, xmax, ymax; each with an area."""
    labels: Tensor
    """int64 (objects,), from 1; 0 is the background."""
    masks: Tensor
    """uint8 (objects, height, width) of the padded image, 0 and 1; without objects and height for a model of boxes."""


class Found(TypedDict):
    """What a model sees in one image, best first; pixels as in `Objects`."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    masks: Tensor
    """float32 (found, 1, 28, 28): how likely each pixel of the box is the object's; empty for a model of boxes."""


class Detector(Protocol):
    def __call__(
        self, images: Tensor, sizes: Sequence[Size], targets: Sequence[Objects] | None = None
    ) -> dict[str, Tensor] | list[Found]:
        """With targets, the losses: scalars whose sum is trained. Without, what a model in evaluation mode finds.

        `images` are normalised, (batch, 3, height, width); each fills the upper left `sizes` of it.
        """
