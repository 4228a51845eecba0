"""Weights from a file that the user gives, into a model that was built: a pre-trained backbone."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from drawbar.errors import DataError, InputError
from drawbar.journal import WeightsRead

_SHOWN = 3


def load_weights(model: nn.Module, path: Path) -> WeightsRead:
    """Copies the file's tensors into the model's of the same names, whatever wrapping prefix the file has.

    The classifier (the linear layers whose outputs are the model's classes) may have another number of classes in the
    file, or be missing; it is then left as it is. So may buffers. What the file has beside is not used. All is told.

    Raises InputError where the file is not there or does not fit, DataError where it cannot be read.
    """
    begin_t = time.perf_counter()
    found = _unwrapped(_read(path))
    wanted = model.state_dict()
    head = _head_of(model)
    parameters = {name for name, _ in model.named_parameters()}
    if not found.keys() & wanted.keys():
        raise InputError(
            f"model.weights is of another model: this one has none of its {len(found)} tensors, such as {_some(found)}"
        )
    missing = [name for name in wanted if name not in found]
    lacking = [name for name in missing if name in parameters - head]
    if lacking:
        raise InputError(
            f"model.weights is of another model: it lacks {len(lacking)} tensors, such as {_some(lacking)}"
        )
    odd = [name for name in wanted if name in found and found[name].shape != wanted[name].shape]
    wrong = next((name for name in odd if name not in head), None)
    if wrong is not None:
        shapes = f"{tuple(found[wrong].shape)}, the model's is {tuple(wanted[wrong].shape)}"
        raise InputError(f"model.weights is of another model: shape of {wrong} is {shapes}")
    taken = {name: found[name] for name in wanted if name in found and name not in odd}
    model.load_state_dict(taken, strict=False)
    return WeightsRead(
        source=str(path),
        size_bytes=path.stat().st_size,
        read_s=time.perf_counter() - begin_t,
        loaded=len(taken),
        head=[name for name in wanted if name in head and name not in taken],
        missing=[name for name in missing if name not in head],
        unexpected=[name for name in found if name not in wanted],
    )


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"no such file: model.weights is {path}") from None
    except (IsADirectoryError, PermissionError) as error:
        raise InputError(f"cannot read model.weights {path}: {error.strerror}") from None
    except pickle.UnpicklingError:
        raise InputError(
            f"model.weights {path} holds more than tensors, and reading it would run code from it",
            hint="save the state_dict alone, best as safetensors",
        ) from None
    except (SafetensorError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise DataError(f"cannot read model.weights {path}: {' '.join(str(error).split())[:200]}") from None
    # Training scripts wrap the weights among other things of theirs.
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    tensors = (
        {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
        if isinstance(content, dict)
        else {}
    )
    if not tensors:
        raise InputError(f"model.weights {path} holds no tensors by name")
    return tensors


def _unwrapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the prefix that DistributedDataParallel or torch.compile put before every name."""
    for prefix in ("module.", "_orig_mod."):
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors


def _head_of(model: nn.Module) -> set[str]:
    """Names of the parameters of the last linear layer, and of others as wide: auxiliary classifiers."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not layers:
        return set()
    num_classes = layers[-1][1].out_features
    return {
        f"{name}.{parameter}" if name else parameter
        for name, module in layers
        if module.out_features == num_classes
        for parameter, _ in module.named_parameters()
    }


def _some(names: object) -> str:
    listed = list(names)  # type: ignore[call-overload]
    return ", ".join(listed[:_SHOWN])
