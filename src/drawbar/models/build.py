"""Builds a model by name. Weights are random: nothing is downloaded."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from drawbar.errors import InputError
from drawbar.models.names import NamedModel, find_model


class Trivial(nn.Module):
    """One linear layer on the mean colour: it costs nothing, so the input path's own limit shows."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def build_model(name: str, num_classes: int) -> nn.Module:
    """A classifier that maps images (batch, 3, height, width) to logits (batch, num_classes).

    Raises InputError where the library does not have the network that `torchvision:NAME` or `timm:NAME` asks for.
    """
    entry = find_model(name)
    if entry.library == "drawbar":
        return Trivial(num_classes)
    model = _from_torchvision(entry, num_classes) if entry.library == "torchvision" else _from_timm(entry, num_classes)
    if entry.stride_in_first_convolution:
        move_stride_to_first_convolution(model)
    return model


def check_takes(name: str, num_classes: int, image_size: int) -> None:
    """Raises InputError where the model cannot take images of that size, or does not return logits.

    A forward pass over shapes alone, without memory or arithmetic: some tenths of a second.
    """
    with torch.device("meta"):
        # Two images: batch norm over a single value is refused.
        images = torch.empty(2, 3, image_size, image_size)
        try:
            logits = build_model(name, num_classes)(images)
        except (RuntimeError, AssertionError, ValueError) as error:
            why = str(error).strip().partition("\n")[0]
            raise InputError(
                f"model {name} cannot take images of {image_size} pixels: {why}", hint="--set input.image_size=…"
            ) from None
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, num_classes):
        raise InputError(f"model {name} is no classifier: it returns no logits (batch, classes)")


def _from_torchvision(entry: NamedModel, num_classes: int) -> nn.Module:
    # Not at the top, here and below: it takes seconds, and the trivial model does without.
    import torchvision

    known = torchvision.models.list_models(module=torchvision.models)
    if entry.network not in known:
        raise _unknown("torchvision", "image classifier", entry.network, known)
    options: dict[str, Any] = {}
    if entry.network in ("googlenet", "inception_v3"):
        # tf_cnn_benchmarks trains them without; torchvision has them by default.
        options = {"aux_logits": False, "init_weights": True}
    model: nn.Module = torchvision.models.get_model(entry.network, weights=None, num_classes=num_classes, **options)
    return model


def _from_timm(entry: NamedModel, num_classes: int) -> nn.Module:
    import timm

    if not timm.is_model(entry.network):
        raise _unknown("timm", "network", entry.network, timm.list_models())
    # Keeps 0.8 before its last layer, as tf_cnn_benchmarks' inception4; timm's default drops nothing.
    options: dict[str, Any] = {"drop_rate": 0.2} if entry.network == "inception_v4" else {}
    model: nn.Module = timm.create_model(entry.network, pretrained=False, num_classes=num_classes, **options)
    return model


def _unknown(library: str, kind: str, network: str, known: Iterable[str]) -> InputError:
    near = difflib.get_close_matches(network, known, 1, 0.4)
    return InputError(
        f"{library} has no {kind} {network!r}" + (f"; did you mean {library}:{near[0]}?" if near else ""),
        hint="drawbar models NAME tries a name without a run",
    )


def move_stride_to_first_convolution(model: nn.Module) -> None:
    """In every bottleneck of a ResNet, v1 or v2: from its 3x3 (v1.5) to its first 1x1 (He et al. 2015)."""
    for block in model.modules():
        first, second = getattr(block, "conv1", None), getattr(block, "conv2", None)
        if isinstance(first, nn.Conv2d) and isinstance(second, nn.Conv2d) and hasattr(block, "conv3"):
            first.stride, second.stride = second.stride, first.stride
