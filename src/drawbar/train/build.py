"""From the recipe to what the loop trains with: model, gradient exchange, optimizer, step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from drawbar.config import Recipe
from drawbar.journal import WeightsRead
from drawbar.models.build import build_model
from drawbar.models.weights import load_weights
from drawbar.train.step import Step, TrainStep
from drawbar.world import World


class Stateful(Protocol):
    """Something of a training that a checkpoint holds: tensors, numbers, text, in dicts and lists."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    model: nn.Module
    """As it was built, not wrapped: what is evaluated and saved."""
    optimizer: torch.optim.Optimizer
    step: Step
    state: Mapping[str, Stateful] = field(default_factory=dict)
    """What else a checkpoint must hold, the same on every rank, such as a loss scaler; by name."""
    weights: WeightsRead | None = None
    """Where the model began with `model.weights`."""


def build_training(recipe: Recipe, world: World, device: torch.device, dtype: torch.dtype) -> Training:
    """Needs the process group where there is more than one rank."""
    model = build_model(recipe.model.name, recipe.data.num_classes)
    weights = load_weights(model, Path(recipe.model.weights)) if recipe.model.weights else None
    model = model.to(device)
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
    return Training(model=model, optimizer=optimizer, step=step, weights=weights)
