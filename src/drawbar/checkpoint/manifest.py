"""What a checkpoint says of itself: `checkpoint.json`, written last. Needs no torch.

A checkpoint is a folder, or the objects below a prefix, named `step-00000120` after the steps done:

    model.safetensors       the model's state under its own names
    training.safetensors    all other tensors: optimizer, random numbers
    checkpoint.json         everything else, and size and CRC32C of the two

Without its `checkpoint.json` it is unfinished. Nothing in it can hold code.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import drawbar
from drawbar.dataset.manifest import digest_of
from drawbar.errors import DataError, InputError
from drawbar.input.plan import PlanState

MANIFEST = "checkpoint.json"
MODEL, TRAINING = "model.safetensors", "training.safetensors"
SCHEMA = 1

_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """None where this is no name of a checkpoint."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


class FileEntry(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    name: str = Field(pattern=r"^(model|training)\.safetensors$")
    size_bytes: int = Field(ge=0)
    crc32c: str


class Manifest(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    tool: str = "drawbar-checkpoint"
    schema_number: int = SCHEMA
    drawbar: str = drawbar.__version__
    step: int = Field(ge=0)
    """Steps done; the next one has this number."""
    epoch: int = Field(ge=0)
    plan: str | None
    """`PlanState` as JSON, of all ranks and lanes; None: where reading stands is not known."""
    model: str
    world_size: int = Field(ge=1)
    global_batch: int = Field(ge=1)
    recipe_sha256: str
    recipe: dict[str, Any]
    dataset_sha256: str
    rounding: dict[str, str]
    """What sums of floating point numbers depend on: device, precision, threads, torch."""
    state: Any
    """Everything but the model, its tensors by reference; see `state.py`."""
    files: tuple[FileEntry, ...] = Field(strict=False)

    @property
    def size_bytes(self) -> int:
        """Without this manifest."""
        return sum(file.size_bytes for file in self.files)

    def plan_state(self) -> PlanState | None:
        return None if self.plan is None else PlanState.from_json(self.plan)

    def dumps(self) -> bytes:
        # Not by pydantic, which has no word for an infinite number.
        tree = json.loads(json.dumps(self.model_dump()))
        return (json.dumps(tree | {"sha256": digest_of(tree)}, indent=1) + "\n").encode()


def load_manifest(data: bytes, where: str) -> Manifest:
    """Raises InputError for what is no checkpoint's, DataError for one that is newer than this tool or damaged."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict) or tree.get("tool") != "drawbar-checkpoint":
        if data.lstrip()[:1] == b"{" and b"drawbar-checkpoint" in data:
            raise DataError(f"checkpoint is damaged: {where} is no JSON")
        raise InputError(f"not a checkpoint: {where} is not of Drawbar's making")
    if isinstance(tree.get("schema_number"), int) and tree["schema_number"] > SCHEMA:
        raise DataError(
            f"checkpoint {where} has schema {tree['schema_number']}; this Drawbar reads up to {SCHEMA}",
            hint=f"it was written by Drawbar {tree.get('drawbar')}",
        )
    if tree.get("sha256") != digest_of(tree):
        raise DataError(f"checkpoint is damaged: {where} has another sha256 than it says")
    try:
        manifest = Manifest.model_validate({key: value for key, value in tree.items() if key != "sha256"})
        manifest.plan_state()
    except (ValidationError, InputError) as error:
        raise DataError(f"checkpoint is damaged: {where}: {str(error).splitlines()[0]}") from None
    return manifest
