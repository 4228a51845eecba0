"""Builds a model by name. Weights are random: nothing is downloaded."""

from __future__ import annotations

import torch
from torch import nn


class Trivial(nn.Module):
    """One linear layer on the mean colour: it costs nothing, so the input path's own limit shows."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def build_model(name: str, num_classes: int) -> nn.Module:
    """A model of `MODEL_NAMES` that maps images (batch, 3, height, width) to logits (batch, num_classes)."""
    if name == "trivial":
        return Trivial(num_classes)
    # Not at the top: it takes seconds, and the trivial model does without.
    import torchvision

    base, _, version = name.partition("_")
    model: nn.Module = getattr(torchvision.models, base)(num_classes=num_classes)
    if version != "v1.5":
        _stride_in_first_convolution(model)
    return model


def _stride_in_first_convolution(model: nn.Module) -> None:
    """ResNet v1.0 (He et al. 2015): the stride in a bottleneck's first 1x1; torchvision's 3x3 is v1.5."""
    from torchvision.models.resnet import Bottleneck

    for block in model.modules():
        if isinstance(block, Bottleneck):
            block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
