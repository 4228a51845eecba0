"""A small model without batch norm, a batch for it, and its step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drawbar.config import Optimizer
from drawbar.train.batch import HostBatch
from drawbar.train.clock import HostClock
from drawbar.train.objective import Classification
from drawbar.train.optimizer import build_optimizer
from drawbar.train.precision import Precision
from drawbar.train.step import TrainStep

CPU = torch.device("cpu")


def batch(samples: int = 8, brightest: int = 256) -> HostBatch:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randint(0, brightest, (samples, 16, 16, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (samples,), generator=generator)
    return HostBatch(pixels=pixels, labels=labels, epoch=0, release=lambda: None)


def convolution() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def train_step(model: nn.Module, precision: str = "fp32", *, smoothing: float = 0.0, **more: Any) -> TrainStep:
    kind = Precision(precision)  # type: ignore[arg-type]
    objective = Classification(device=CPU, dtype=kind.dtype, channels_last=True, label_smoothing=smoothing)
    optimizer = build_optimizer(model, Optimizer(learning_rate=0.5))
    clock = HostClock()
    return TrainStep(model, optimizer, objective, lambda _: 0.5, clock=clock, device=CPU, precision=kind, **more)


def losses(step: TrainStep, count: int = 4) -> list[float]:
    found = []
    for _ in range(count):
        loss = step.run(batch()).loss
        assert loss is not None
        found.append(float(loss))
    return found
