"""Optimizers, and which parameters they treat how."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from drawbar.config import Optimizer as Settings

_NORMS = (
    nn.modules.batchnorm._NormBase,  # batch and instance norm
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
LR_FACTOR = "lr_factor"
"""Key of a parameter group: its learning rate / that of weights."""


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Over the parameters of `model` that are trained. Each step's rate is set by `set_learning_rate`."""
    groups = parameter_groups(model, settings)
    if settings.name == "lars":
        return Lars(
            groups,
            lr=settings.learning_rate,
            momentum=settings.momentum,
            trust=settings.lars_trust,
            epsilon=settings.lars_epsilon,
        )
    return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum, nesterov=settings.nesterov)


def parameter_groups(model: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """Weights, biases and normalisation parameters, each with its weight decay, rate factor, and whether LARS scales
    it. Groups without a parameter are left out; shared parameters are taken where they come first."""
    kinds: dict[str, list[nn.Parameter]] = {"weight": [], "bias": [], "norm": []}
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            kinds["norm" if isinstance(module, _NORMS) else "bias" if name == "bias" else "weight"].append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": 0.0 if kind in settings.no_decay else settings.weight_decay,
            LR_FACTOR: settings.bias_lr_factor if kind == "bias" else 1.0,
            "scaled": kind not in settings.no_decay,
        }
        for kind, parameters in kinds.items()
        if parameters
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group[LR_FACTOR]


class Lars(torch.optim.Optimizer):
    """SGD with momentum whose rate is scaled for each tensor (You et al. 2017), as MLPerf's reference has it:

        ratio = trust * |w| / (|g| + weight_decay * |w| + epsilon)      1 where |w| or |g| is 0
        m     = momentum * m + g + weight_decay * w
        w     = w - lr * ratio * m

    so the momentum holds unscaled gradients, and a changed rate or ratio acts on all of them ("scaled momentum").
    timm's, like the paper's, puts `ratio` inside the momentum. Groups that are not `scaled` have ratio 1.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, momentum: float, trust: float = 0.001, epsilon: float = 0.0
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": 0.0,
            "trust": trust,
            "epsilon": epsilon,
            "scaled": True,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is never taken anew"  # noqa: S101
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._step_group(group, weights)

    def _step_group(self, group: dict[str, Any], weights: list[torch.Tensor]) -> None:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        ratios = self._ratios(group, weights, gradients) if group["scaled"] else None
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))
        for weight in weights:
            if "momentum_buffer" not in self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, gradients)
        updates = torch._foreach_mul(buffers, ratios) if ratios else buffers
        torch._foreach_add_(weights, updates, alpha=-group["lr"])

    @staticmethod
    def _ratios(
        group: dict[str, Any], weights: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Scalars on the weights' device: nothing waits for it."""
        weight_norm = torch.stack(torch._foreach_norm(weights))
        gradient_norm = torch.stack(torch._foreach_norm(gradients))
        below = gradient_norm + group["weight_decay"] * weight_norm + group["epsilon"]
        scaled = (weight_norm > 0) & (gradient_norm > 0)
        return list(torch.where(scaled, group["trust"] * weight_norm / below, 1.0).unbind())
