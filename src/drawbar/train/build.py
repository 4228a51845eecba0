"""From the recipe to what the loop trains with: model, gradient exchange, optimizer, step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from drawbar.config import Recipe
from drawbar.models.build import build_model
from drawbar.train.clock import StepClock
from drawbar.train.emulated import EmulatedStep, buckets_of
from drawbar.train.exchange import Exchange
from drawbar.train.objective import Classification, Objective
from drawbar.train.optimizer import build_optimizer
from drawbar.train.precision import Precision
from drawbar.train.schedule import learning_rate
from drawbar.train.step import Step, TrainStep
from drawbar.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    model: nn.Module
    """As it was built, not wrapped: what is evaluated and saved. On the meta device where the step is emulated."""
    optimizer: torch.optim.Optimizer
    step: Step
    gradient_bytes: int
    """That this rank hands to the exchange in each step; 0 where there is none."""


def build_training(
    recipe: Recipe, world: World, device: torch.device, precision: Precision, clock: StepClock, num_records: int | None
) -> Training:
    """`num_records`: of the data set, None where they are not known. Needs the process group where there is more than
    one rank."""
    precision.apply()
    objective = Classification(
        device=device,
        dtype=precision.dtype,
        channels_last=recipe.model.channels_last,
        label_smoothing=recipe.train.label_smoothing,
    )
    if recipe.emulate.step_s:
        return _emulated(recipe, world, device, objective)
    model = build_model(recipe.model.name, recipe.data.num_classes).to(device)
    if recipe.model.channels_last:
        model = model.to(memory_format=torch.channels_last)
    exchange = Exchange(recipe.exchange, clock, device) if world.world_size > 1 else None
    trained = exchange.wrap(model) if exchange else model
    if recipe.model.compile:
        trained = cast(nn.Module, torch.compile(trained))
    optimizer = build_optimizer(model, recipe.optimizer)
    step = TrainStep(
        trained,
        optimizer,
        objective,
        learning_rate(recipe, total_steps=recipe.train.warmup_steps + recipe.train.steps, num_records=num_records),
        clock=clock,
        device=device,
        precision=precision,
        exchange=exchange,
        accumulate=recipe.train.accumulate,
        loss_scale=recipe.model.loss_scale,
    )
    return Training(
        model=model, optimizer=optimizer, step=step, gradient_bytes=exchange.gradient_bytes if exchange else 0
    )


def _emulated(recipe: Recipe, world: World, device: torch.device, objective: Objective) -> Training:
    with torch.device("meta"):
        model = build_model(recipe.model.name, recipe.data.num_classes)
    shared = world.world_size > 1 and recipe.emulate.gradients
    buckets = buckets_of(model, recipe.exchange, device) if shared else []
    step = EmulatedStep(recipe.emulate, buckets, objective, device)
    return Training(
        model=model,
        optimizer=build_optimizer(model, recipe.optimizer),
        step=step,
        gradient_bytes=sum(bucket.gradients.nbytes for bucket in buckets),
    )
