"""From the recipe to what the loop trains with: model, gradient exchange, optimizer, step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn

from drawbar.config import Recipe
from drawbar.epochs import run_steps
from drawbar.journal import WeightsRead
from drawbar.models.build import build_model, check_takes
from drawbar.models.names import DETECTORS, MASK_RCNN
from drawbar.models.weights import load_weights
from drawbar.train.batch import HostBatch
from drawbar.train.clock import StepClock
from drawbar.train.detection import DetectionObjective
from drawbar.train.emulated import EmulatedStep, buckets_of
from drawbar.train.evaluate import Evaluation, ImageEvaluation
from drawbar.train.exchange import Exchange
from drawbar.train.objective import Classification, Objective
from drawbar.train.optimizer import build_optimizer
from drawbar.train.precision import Precision
from drawbar.train.schedule import learning_rate
from drawbar.train.step import Step, TrainStep
from drawbar.world import World


class Stateful(Protocol):
    """Something of a training that a checkpoint holds: tensors, numbers, text, in dicts and lists."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    model: nn.Module
    """As it was built, not wrapped: what is evaluated and saved. On the meta device where the step is emulated."""
    optimizer: torch.optim.Optimizer
    step: Step
    objective: Objective
    """The step's; evaluations prepare their batches with it."""
    gradient_bytes: int
    """That this rank hands to the exchange in each step; 0 where there is none."""
    state: Mapping[str, Stateful] = field(default_factory=dict)
    """What else a checkpoint must hold, the same on every rank, such as a loss scaler; by name."""
    weights: WeightsRead | None = None
    """Where the model began with `model.weights`."""


def build_training(
    recipe: Recipe, world: World, device: torch.device, precision: Precision, clock: StepClock, num_records: int | None
) -> Training:
    """`num_records`: of the data set, None where they are not known. Needs the process group where there is more than
    one rank."""
    precision.apply()
    objective = make_objective(recipe, device, precision.dtype)
    if recipe.emulate.step_s:
        return _emulated(recipe, world, device, objective)
    model = _model(recipe)
    weights = load_weights(_pretrained_part(model), Path(recipe.model.weights)) if recipe.model.weights else None
    model = model.to(device)
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
        learning_rate(recipe, total_steps=run_steps(recipe, num_records), num_records=num_records),
        clock=clock,
        device=device,
        precision=precision,
        exchange=exchange,
        accumulate=recipe.train.accumulate,
        loss_scale=recipe.model.loss_scale,
    )
    return Training(
        model=model,
        optimizer=optimizer,
        step=step,
        objective=objective,
        gradient_bytes=exchange.gradient_bytes if exchange else 0,
        state={"loss_scaler": step.scaler} if precision.name == "fp16" else {},
        weights=weights,
    )


def _emulated(recipe: Recipe, world: World, device: torch.device, objective: Objective) -> Training:
    with torch.device("meta"):
        model = _model(recipe)
    shared = world.world_size > 1 and recipe.emulate.gradients
    buckets = buckets_of(model, recipe.exchange, device) if shared else []
    step = EmulatedStep(recipe.emulate, buckets, objective, device)
    return Training(
        model=model,
        optimizer=build_optimizer(model, recipe.optimizer),
        step=step,
        objective=objective,
        gradient_bytes=sum(bucket.gradients.nbytes for bucket in buckets),
    )


def _model(recipe: Recipe) -> nn.Module:
    if recipe.model.name in DETECTORS:
        # Not at the top: it takes seconds, and the trivial model does without.
        from drawbar.models.build_detector import build_detector

        return build_detector(recipe.model.name, recipe.data.num_classes, recipe.input.image_size, recipe.detection)
    check_takes(recipe.model.name, recipe.data.num_classes, recipe.input.image_size)
    return build_model(recipe.model.name, recipe.data.num_classes)


def _pretrained_part(model: nn.Module) -> nn.Module:
    from drawbar.models.build_detector import pretrained_part

    return pretrained_part(model)


def make_objective(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> Objective:
    channels_last = recipe.model.channels_last
    if recipe.model.name in DETECTORS:
        return DetectionObjective(
            device=device, dtype=dtype, channels_last=channels_last, pixels=recipe.detection.pixels
        )
    return Classification(
        device=device, dtype=dtype, channels_last=channels_last, label_smoothing=recipe.train.label_smoothing
    )


def make_evaluation(
    recipe: Recipe,
    training: Training,
    batches: Callable[[], Iterable[HostBatch]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    control: dist.ProcessGroup,
) -> Evaluation:
    """Of the model as it is when it runs. `batches`: this rank's share of the validation set, each time anew."""
    if isinstance(training.objective, Classification):
        to_device = training.objective.to_device
        return ImageEvaluation(training.model, batches, to_device, device=device, dtype=dtype, control=control)
    assert isinstance(training.objective, DetectionObjective)  # noqa: S101
    # Not at the top: it needs pycocotools.
    from drawbar.train.detection_evaluation import DetectionEvaluation

    return DetectionEvaluation(
        training.model,
        training.objective,
        batches,
        num_classes=recipe.data.num_classes,
        with_masks=recipe.model.name == MASK_RCNN,
        control=control,
    )
