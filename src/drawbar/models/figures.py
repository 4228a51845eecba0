"""What a model costs: parameters, arithmetic per image, bytes of gradients. Counted on shapes alone, so in a moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from drawbar.models.build import build_model
from drawbar.models.names import DETECTORS, find_model

COCO_CLASSES = 80

_BATCH = 2
"""Batch norm over a single value is refused."""


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    name: str
    library: str
    """Where it comes from, and its name there."""
    image_size: int
    num_classes: int
    parameters: int
    """Trainable ones."""
    forward_flops: int
    """Per image. A multiplication and an addition are two; convolutions and matrix products only."""
    forward_backward_flops: int
    gradient_bytes_fp32: int
    """Exchanged in each step by each rank, at 4 bytes a parameter."""
    gradient_bytes_fp16: int
    note: str


def figures_of(name: str, num_classes: int = 1000) -> ModelFigures:
    """Raises InputError for a network that its library does not have. Detection models have COCO's 80 classes and their
    reference's numbers of regions, whatever `num_classes`."""
    entry = find_model(name)
    with torch.device("meta"):
        if name in DETECTORS:
            # Not at the top: torchvision takes seconds.
            from drawbar.models.build_detector import build_for_counting

            num_classes = COCO_CLASSES
            model, run = build_for_counting(name, num_classes, entry.image_size)
        else:
            model = run = build_model(name, num_classes)
        images = torch.empty(_BATCH, 3, *entry.image_shape)
        with _counter() as forward:
            outputs = run(images)
        with _counter() as backward:
            outputs.sum().backward()  # type: ignore[no-untyped-call]
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    forward_flops = forward.get_total_flops() // _BATCH
    return ModelFigures(
        name=name,
        library=f"{entry.library} {entry.network}",
        image_size=entry.image_size,
        num_classes=num_classes,
        parameters=parameters,
        forward_flops=forward_flops,
        forward_backward_flops=forward_flops + backward.get_total_flops() // _BATCH,
        gradient_bytes_fp32=4 * parameters,
        gradient_bytes_fp16=2 * parameters,
        note=entry.note,
    )


def _counter() -> FlopCounterMode:
    return FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.convolution_backward: _convolution_backward_flops}
    )


def _convolution_backward_flops(
    grad_out_shape: Sequence[int],
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    _bias: Any,
    _stride: Any,
    _padding: Any,
    _dilation: Any,
    transposed: bool,
    _output_padding: Any,
    _groups: int,
    output_mask: Sequence[bool],
    **_: Any,
) -> int:
    """As much as forward for the gradient of the input, where that is wanted, and again for that of the weights.

    PyTorch's own formula takes no account of groups, and gives MobileNet ten times its work.
    """
    places = prod((x_shape if transposed else grad_out_shape)[2:])
    forward = 2 * grad_out_shape[0] * places * prod(w_shape)
    return forward * sum(output_mask[:2])
