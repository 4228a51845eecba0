"""The learning rate of each step: a pure function of its number. Needs no torch; a recipe is checked with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from drawbar.config import Recipe
from drawbar.errors import RecipeError


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Called with a step's number, from 0, it gives that step's rate. Lengths are in steps, whole or not.

    The warm-up is linear from `warmup_factor` of the full rate at step 0 to all of it at step `warmup` (Goyal et al.
    2017; MLPerf's ResNet from 0, its SSD from 1 - 2^-k). Boundaries count from step 0, warmed up or not. Polynomial
    and cosine decay go from the end of the warm-up to `length`, and stay at `end` after it.
    """

    full: float
    kind: Literal["constant", "step", "polynomial", "cosine"] = "constant"
    warmup: float = 0.0
    warmup_factor: float = 0.0
    boundaries: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()
    """What each boundary multiplies the rate by."""
    length: float = math.inf
    power: float = 1.0
    end: float = 0.0

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            rising = self.warmup_factor + (1 - self.warmup_factor) * step / self.warmup
            return rising * self._decayed(step)
        return self._decayed(step)

    def _decayed(self, step: int) -> float:
        if self.kind == "step":
            passed = (f for boundary, f in zip(self.boundaries, self.factors, strict=True) if step >= boundary)
            return self.full * math.prod(passed)
        if self.kind == "constant":
            return self.full
        done = min(1.0, max(0.0, step - self.warmup) / (self.length - self.warmup))
        left = (1 - done) ** self.power if self.kind == "polynomial" else (1 + math.cos(math.pi * done)) / 2
        return self.end + (self.full - self.end) * left


def steps_per_epoch(recipe: Recipe, num_records: int) -> float:
    """Optimizer updates in a pass over `num_records`; a part of one where the last batch is carried over."""
    steps = num_records / global_batch(recipe)
    return {"drop": float(math.floor(steps)), "pad": float(math.ceil(steps)), "carry": steps}[recipe.input.last_batch]


def global_batch(recipe: Recipe) -> int:
    """Samples of one optimizer update, over all ranks."""
    return recipe.train.batch_size * recipe.launch.ranks


def learning_rate(recipe: Recipe, *, total_steps: int, num_records: int | None) -> LearningRate:
    """`total_steps`: how long the run is; `num_records`: of the data set, None where they are not known.

    Raises RecipeError for a schedule in epochs where they are not, and for one that does not fit into the run.
    """
    schedule, optimizer = recipe.schedule, recipe.optimizer
    unit = 1.0
    if schedule.unit == "epochs":
        if num_records is None:
            raise RecipeError(
                'schedule.unit is "epochs", but how many records an epoch has is not known',
                hint='schedule.unit = "steps", or a data set with a manifest',
            )
        unit = steps_per_epoch(recipe, num_records)
    length = schedule.length * unit or float(total_steps)
    if schedule.name in ("polynomial", "cosine") and length <= schedule.warmup * unit:
        raise RecipeError(
            f"schedule.warmup takes {schedule.warmup * unit:g} of the run's {total_steps} steps",
            hint="a shorter warm-up, more train.steps, or schedule.length",
        )
    scale = global_batch(recipe) / schedule.reference_batch if schedule.reference_batch else 1.0
    return LearningRate(
        full=optimizer.learning_rate * scale,
        kind=schedule.name,
        warmup=schedule.warmup * unit,
        warmup_factor=schedule.warmup_factor,
        boundaries=tuple(boundary * unit for boundary in schedule.boundaries),
        factors=tuple(schedule.factors),
        length=length,
        power=schedule.power,
        end=schedule.end_learning_rate,
    )
