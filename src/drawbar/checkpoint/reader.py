"""Going on from a checkpoint: read on every rank, compared with its digests, loaded into what was built."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import google_crc32c
import torch
from obstore.exceptions import BaseError
from torch import nn

from drawbar.checkpoint.find import RESUME_VARIABLE, check_fits, damaged, store_of_rank
from drawbar.checkpoint.manifest import MANIFEST, MODEL, TRAINING, FileEntry, Manifest, load_manifest
from drawbar.checkpoint.state import Tensors, from_tree, parse_safetensors
from drawbar.checkpoint.stores import BucketStore, FolderStore
from drawbar.checkpoint.writer import About
from drawbar.config import Recipe
from drawbar.errors import InputError
from drawbar.input.plan import PlanState
from drawbar.journal import CheckpointRead, Event, Request
from drawbar.storage.reader import CountedReader
from drawbar.train.build import Training
from drawbar.world import World

_PART_BYTES = 16 << 20
_PARTS_IN_FLIGHT = 4


@dataclass(frozen=True, kw_only=True)
class Resumed:
    step: int
    """Steps done."""
    epoch: int
    plan: PlanState | None


_ANEW = Resumed(step=0, epoch=0, plan=None)


def resume(training: Training, about: About, record: Callable[[Event], None]) -> Resumed:
    """Loads the checkpoint that the launcher found, if it found one, into `training`. `record` gets the requests and
    the `checkpoint_read` event.

    Raises DataError for a damaged one, InputError for one that does not fit, and what the store explains.
    """
    url = os.environ.get(RESUME_VARIABLE, "")
    if not url:
        return _ANEW
    store = store_of_rank(url, about.recipe)
    begin_t = time.perf_counter()
    try:
        read = _Reading(store, about.recipe, record)
        text = read.file(MANIFEST, store.sizes("").get(MANIFEST, 0))
        manifest = load_manifest(text, store.shown(""))
        files = {file.name: _checked(store, file, read.file(file.name, file.size_bytes)) for file in manifest.files}
    except (BaseError, OSError) as error:
        raise store.explain(error, "") from None
    read_t = time.perf_counter()
    check_fits(about.recipe, manifest, about.num_records)
    if not {MODEL, TRAINING} <= files.keys():
        raise damaged(store, "", f"it names no {MODEL} or {TRAINING}")
    tensors = {name: parse_safetensors(data, f"checkpoint {store.shown('')}/{name}") for name, data in files.items()}
    _load(training, tensors, manifest, about)
    record(
        CheckpointRead(
            step=manifest.step,
            source=store.shown(""),
            size_bytes=len(text) + manifest.size_bytes,
            read_s=read_t - begin_t,
            load_s=time.perf_counter() - read_t,
            differences=differences(manifest, about, training.model),
        )
    )
    return Resumed(step=manifest.step, epoch=manifest.epoch, plan=manifest.plan_state())


class _Reading:
    """Files of a checkpoint in a folder, or in a store: there by parts, so that one that breaks off costs little, each
    counted, and tried again as the recipe says."""

    def __init__(self, store: FolderStore | BucketStore, recipe: Recipe, record: Callable[[Request], None]) -> None:
        self._store = store
        self._reader = None if isinstance(store, FolderStore) else CountedReader(store.place, recipe.storage, record)

    def file(self, name: str, size_bytes: int) -> bytes:
        if isinstance(self._store, FolderStore):
            return (self._store.folder / name).read_bytes()
        reader, key = self._reader, self._store.key("", name)
        assert reader is not None  # noqa: S101

        def part(start: int) -> bytes:
            return reader.get(key, start, min(start + _PART_BYTES, size_bytes), kind="checkpoint")

        with ThreadPoolExecutor(_PARTS_IN_FLIGHT) as pool:
            return b"".join(pool.map(part, range(0, size_bytes, _PART_BYTES)))


def _checked(store: FolderStore | BucketStore, file: FileEntry, data: bytes) -> bytes:
    if len(data) != file.size_bytes:
        raise damaged(store, "", f"{file.name} has {len(data):,} bytes, expected {file.size_bytes:,}")
    if f"{google_crc32c.value(data):08x}" != file.crc32c:
        raise damaged(store, "", f"{file.name} has another CRC32C than was written")
    return data


def _load(training: Training, tensors: dict[str, Tensors], manifest: Manifest, about: About) -> None:
    content = from_tree(manifest.state, tensors[TRAINING])
    try:
        training.model.load_state_dict(tensors[MODEL])
        training.optimizer.load_state_dict(content["optimizer"])
        for name, part in training.state.items():
            part.load_state_dict(content[name])
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        first = " ".join(str(error).split())[:200]
        raise InputError(f"checkpoint does not fit the model or optimizer of this version: {first}") from None
    _take_layout_of_weights(training.optimizer)
    training.step.number = manifest.step
    _set_random_state(content["random"], manifest, about)


def _take_layout_of_weights(optimizer: torch.optim.Optimizer) -> None:
    """A file holds tensors in C order; the optimizer's must lie as the weights do, or each update is slower."""
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                state[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


def _set_random_state(states: list[dict[str, Any]], manifest: Manifest, about: About) -> None:
    world = about.world
    if manifest.world_size != world.world_size:
        # Nobody's numbers go on; neither may those of the beginning come again.
        torch.manual_seed(about.recipe.input.seed + manifest.step)
        return
    mine = states[world.rank]
    torch.set_rng_state(mine["cpu"])
    if mine["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(mine["cuda"])


def differences(manifest: Manifest, about: About, model: nn.Module) -> list[str]:
    """Why this training may go on otherwise than the one that wrote the checkpoint would have."""
    world: World = about.world
    found = []
    plan = manifest.plan_state()
    if manifest.dataset_sha256 != about.dataset_sha256:
        found.append("the data set's list of shards is another one")
    if plan is None and about.recipe.input.source != "constant":
        found.append("where reading stood is not known: it begins anew")
    if plan is not None and plan.legs[-1].lanes % world.world_size:
        found.append(
            f"the rest of epoch {plan.epoch} is read in another order: {world.world_size} ranks do not divide its "
            f"{plan.legs[-1].lanes} lanes"
        )
    if manifest.world_size != world.world_size:
        ranks = f"there were {manifest.world_size} ranks, now {world.world_size}"
        found.append(f"{ranks}: sums are rounded otherwise")
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            found.append(f"{ranks}: batch norm takes its statistics over the batch of a rank")
        if any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules()):
            found.append(f"{ranks}: dropout is drawn anew")
    if length := _other_length(manifest.recipe, about.recipe):
        found.append(f"the learning rate falls over the whole run, whose length was {length}")
    changed = [
        f"{key} {manifest.rounding[key]} -> {value}"
        for key, value in about.rounding.items()
        if manifest.rounding.get(key, value) != value
    ]
    if changed:
        found.append(f"sums are rounded otherwise: {', '.join(changed)}")
    return found


def _other_length(before: dict[str, Any], recipe: Recipe) -> str:
    """`A, now B` where the length of the run decides the learning rate of its steps and is another one; else empty."""
    if recipe.schedule.name not in ("polynomial", "cosine") or recipe.schedule.length:
        return ""
    train, quality = before.get("train", {}), before.get("quality", {})
    epochs = quality.get("limit_epochs") or train.get("epochs")
    old = f"{epochs:g} epochs" if epochs else f"{train.get('warmup_steps', 0) + train.get('steps', 0):,} steps"
    new = f"{recipe.epochs:g} epochs" if recipe.epochs else f"{recipe.train.warmup_steps + recipe.train.steps:,} steps"
    return f"{old}, now {new}" if old != new else ""
