"""From the recipe to what the loop trains with: model, gradient exchange, optimizer, step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from drawbar.config import Recipe
from drawbar.models.build import build_model
from drawbar.train.evaluate import ToDevice
from drawbar.train.step import Step, TrainStep
from drawbar.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    model: nn.Module
    """As it was built, not wrapped: what is evaluated and saved."""
    optimizer: torch.optim.Optimizer
    step: Step
    to_device: ToDevice
    """As a step prepares its batch; evaluations do it alike."""


def build_training(recipe: Recipe, world: World, device: torch.device, dtype: torch.dtype) -> Training:
    """Needs the process group where there is more than one rank."""
    model = build_model(recipe.model.name, recipe.data.num_classes).to(device)
    if recipe.model.channels_last:
        model = model.to(memory_format=torch.channels_last)
    exchanged = model
    if world.world_size > 1:
        exchanged = nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
        )
    optimizer = torch.optim.SGD(
        model.parameters(), recipe.train.learning_rate, recipe.train.momentum, weight_decay=recipe.train.weight_decay
    )
    step = TrainStep(exchanged, optimizer, device=device, dtype=dtype, channels_last=recipe.model.channels_last)
    return Training(model=model, optimizer=optimizer, step=step, to_device=step.to_device)
