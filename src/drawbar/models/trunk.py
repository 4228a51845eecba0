"""Trunks of detection models: ResNet's basic blocks without a classifier, as many and as wide as is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, conv1x1
from torchvision.ops import FrozenBatchNorm2d

Norm = Literal["batch", "frozen", "group"]

_CHANNELS_OF_A_GROUP, _MOST_GROUPS = 8, 32


def norm_layer(norm: Norm) -> Callable[[int], nn.Module]:
    """From a number of channels to the layer. `frozen`: batch norm whose statistics and factors never change."""
    if norm == "group":
        return lambda channels: nn.GroupNorm(max(1, min(channels // _CHANNELS_OF_A_GROUP, _MOST_GROUPS)), channels)
    return FrozenBatchNorm2d if norm == "frozen" else nn.BatchNorm2d


class ResidualTrunk(nn.Module):
    """The stem (1/4 of the size) and a stage for each entry of `blocks`, channels doubling from stage to stage.

    With (3, 4, 6, 3) blocks, 64 channels and strides of 2 it is ResNet-34's; parameters have torchvision's names.
    """

    def __init__(self, blocks: Sequence[int], strides: Sequence[int], channels: int, norm: Norm) -> None:
        super().__init__()
        make_norm = norm_layer(norm)
        self.conv1 = nn.Conv2d(3, channels, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = make_norm(channels)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.out_channels = [channels << stage for stage in range(len(blocks))]
        """Of each stage."""
        before = channels
        for stage, (count, stride, after) in enumerate(zip(blocks, strides, self.out_channels, strict=True), start=1):
            self.add_module(f"layer{stage}", _stage(before, after, count, stride, make_norm))
            before = after
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """The last stage's map."""
        features = images
        for layer in self.children():
            features = layer(features)
        return features


def _stage(before: int, after: int, count: int, stride: int, make_norm: Callable[[int], nn.Module]) -> nn.Sequential:
    shortcut = None
    if stride != 1 or before != after:
        shortcut = nn.Sequential(conv1x1(before, after, stride), make_norm(after))
    first = BasicBlock(before, after, stride, shortcut, norm_layer=make_norm)
    return nn.Sequential(first, *(BasicBlock(after, after, norm_layer=make_norm) for _ in range(count - 1)))
