"""Optimizers against formulas written down here with numpy, and against timm's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from drawbar.config import Optimizer as Settings
from drawbar.train.optimizer import build_optimizer, parameter_groups, set_learning_rate


def small_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rates: list[float]) -> list[dict[str, np.ndarray]]:
    """Takes a step for each rate; returns the gradients of each, by parameter name."""
    seen = []
    generator = torch.Generator().manual_seed(4)
    for rate in rates:
        optimizer.zero_grad()
        model(torch.randn(6, 3, 3, 3, generator=generator)).square().sum().backward()
        seen.append({name: _array(p.grad) for name, p in model.named_parameters()})
        set_learning_rate(optimizer, rate)
        optimizer.step()
    return seen


def _array(tensor: torch.Tensor | None) -> Any:
    assert tensor is not None
    return tensor.detach().numpy().astype(np.float64)


Update = Callable[[Any, Any, Any, float, str], tuple[Any, Any]]
"""(weight, gradient, momentum buffer, rate, name) -> (weight, buffer)"""


def replayed(start: dict[str, Any], gradients: list[dict[str, Any]], rates: list[float], update: Update) -> Any:
    weights, buffers = dict(start), {name: np.zeros_like(value) for name, value in start.items()}
    for rate, row in zip(rates, gradients, strict=True):
        for name, gradient in row.items():
            weights[name], buffers[name] = update(weights[name], gradient, buffers[name], rate, name)
    return weights


RATES = [0.1, 0.3, 0.02, 0.02]


def test_lars_is_mlperfs_formula_with_norm_and_bias_left_out() -> None:
    def update(w: Any, g: Any, m: Any, rate: float, name: str) -> tuple[Any, Any]:
        ratio: Any = 1.0
        if name in ("0.weight", "3.weight"):
            ratio = 0.001 * np.linalg.norm(w) / (np.linalg.norm(g) + 2e-4 * np.linalg.norm(w))
            g = g + 2e-4 * w
        m = 0.9 * m + g
        return w - rate * ratio * m, m

    model = small_model()
    start = {name: _array(p) for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, Settings(name="lars", weight_decay=2e-4))
    expected = replayed(start, train(model, optimizer, RATES), RATES, update)
    for name, parameter in model.named_parameters():
        assert _array(parameter) == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


def test_without_momentum_lars_is_timms_too() -> None:
    """With it they differ where the rate or the ratio changes: timm's momentum holds scaled gradients."""
    from timm.optim.lars import Lars

    ours, theirs = small_model(), small_model()
    settings = Settings(name="lars", momentum=0.0, weight_decay=1e-3, lars_epsilon=1e-8)
    train(ours, build_optimizer(ours, settings), RATES)
    groups = parameter_groups(theirs, settings)
    train(theirs, Lars(groups, lr=0.1, momentum=0.0, trust_coeff=0.001, eps=1e-8), RATES)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert _array(mine) == pytest.approx(_array(other), rel=1e-5, abs=1e-8), name


def test_a_tensor_of_zeros_is_not_scaled_by_lars() -> None:
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = build_optimizer(model, Settings(name="lars", weight_decay=0.0, momentum=0.0))
    model(torch.ones(1, 2)).sum().backward()
    set_learning_rate(optimizer, 0.5)
    optimizer.step()
    assert model.weight.tolist() == [[-0.5, -0.5], [-0.5, -0.5]]


@pytest.mark.parametrize("no_decay", [[], ["norm"], ["bias"], ["norm", "bias"]])
def test_sgd_decays_what_it_is_told_to_and_gives_biases_their_rate(no_decay: list[Any]) -> None:
    kinds = {"0.weight": "weight", "0.bias": "bias", "1.weight": "norm", "1.bias": "norm", "3.weight": "weight"}

    def update(w: Any, g: Any, m: Any, rate: float, name: str) -> tuple[Any, Any]:
        kind = kinds.get(name, "bias")
        m = 0.9 * m + g + (0.0 if kind in no_decay else 0.01) * w
        return w - rate * (2.0 if kind == "bias" else 1.0) * m, m

    model = small_model()
    start = {name: _array(p) for name, p in model.named_parameters()}
    settings = Settings(weight_decay=0.01, no_decay=no_decay, bias_lr_factor=2.0)
    expected = replayed(start, train(model, build_optimizer(model, settings), RATES), RATES, update)
    for name, parameter in model.named_parameters():
        assert _array(parameter) == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


def test_every_trained_parameter_is_in_one_group_and_frozen_ones_in_none() -> None:
    model = small_model()
    model[3].weight = model[3].weight.requires_grad_(False)
    model.append(model[3])
    groups = parameter_groups(model, Settings())
    found = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(found) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_norms_of_every_kind_are_known_by_their_class() -> None:
    norms = [
        nn.BatchNorm1d(4),
        nn.SyncBatchNorm(4),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(4),
        nn.InstanceNorm2d(4, affine=True),
    ]
    groups = parameter_groups(nn.ModuleList(norms), Settings(weight_decay=0.5))
    assert [group["weight_decay"] for group in groups] == [0.0]
