"""Before a run starts: where its checkpoints go, whether that will do, and the one it goes on from. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from obstore.exceptions import BaseError

from drawbar.checkpoint.manifest import MANIFEST, Manifest, load_manifest, name_of
from drawbar.checkpoint.stores import BucketStore, CheckpointStore, FolderStore
from drawbar.config import Recipe
from drawbar.epochs import run_steps
from drawbar.errors import DataError, InputError
from drawbar.storage.environment import Credentials
from drawbar.storage.stores import open_place
from drawbar.storage.urls import parse_url

RESUME_VARIABLE = "DRAWBAR_RESUME"
"""Place of the checkpoint that the launcher found; ranks that looked for it themselves might find several."""
ENDPOINT_VARIABLE = "DRAWBAR_CHECKPOINT_ENDPOINT"

_MAY_CHANGE = {
    "name",
    "data.url",
    "data.eval_url",
    "eval",
    "quality",
    "storage",
    "input.decode_threads",
    "input.lanes",
    "input.prefetch_batches",
    "model.weights",
    "train.batch_size",
    "train.display_every",
    "train.epochs",
    "train.steps",
    "train.warmup_steps",
    "checkpoint",
    "launch",
    "cache",
    "faults",
    "summaries",
}
"""Everything else decides what is trained. The batch size may change as the ranks do: not the global batch."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The checkpoint that a run goes on from."""

    url: str
    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """What the launcher found out for the ranks."""

    endpoint: str
    """Empty where no S3 address is needed."""
    credentials: Credentials | None
    resume: Resume | None

    @property
    def first_step(self) -> int:
        return self.resume.manifest.step if self.resume else 0

    def files_to_read(self) -> list[Path]:
        """Of the checkpoint, where it lies in a folder."""
        if self.resume is None or not parse_url(self.resume.url).is_folder:
            return []
        folder = parse_url(self.resume.url).folder
        return [folder / file.name for file in self.resume.manifest.files]

    def added_to(self, environ: Mapping[str, str]) -> dict[str, str]:
        env = self.credentials.added_to(environ) if self.credentials else dict(environ)
        env[ENDPOINT_VARIABLE] = self.endpoint
        env[RESUME_VARIABLE] = self.resume.url if self.resume else ""
        return env


def open_store(
    url: str, recipe: Recipe, endpoint: str | None, credentials: Credentials | None
) -> FolderStore | BucketStore:
    """Asks nothing of it yet. `endpoint` and `credentials` are needed for `s3://`."""
    where = parse_url(url)
    if where.is_folder:
        return FolderStore(where.folder)
    return BucketStore(open_place(url, endpoint, credentials, recipe.storage), url)


def store_of_rank(url: str, recipe: Recipe) -> FolderStore | BucketStore:
    """With the address and keys that the launcher passed on."""
    on_s3 = parse_url(url).on_s3
    credentials = Credentials.from_environment() if on_s3 else None
    return open_store(url, recipe, os.environ.get(ENDPOINT_VARIABLE) or None, credentials)


def find_checkpoints(
    recipe: Recipe, endpoint: str, credentials: Credentials | None, num_records: int | None
) -> Checkpoints | None:
    """None where the recipe neither saves nor resumes. `num_records` of the data set: None where not known.

    Raises InputError where the place cannot be used, holds what it must not, or the checkpoint does not fit the recipe;
    DataError for a damaged one; EnvironmentUnfit for a store that does not answer.
    """
    settings = recipe.checkpoint
    if not settings.url and settings.resume == "never":
        return None
    if settings.every_epochs and num_records is None:
        raise InputError(
            "checkpoint.every_epochs: how many records an epoch has is not known",
            hint="checkpoint.every_steps, or a data set with a manifest",
        )
    resume: Resume | None = None
    if settings.url:
        store = open_store(settings.url, recipe, endpoint, credentials)
        if isinstance(store, FolderStore):
            store.check_writable()
        there = _steps(store)
        if there and settings.resume == "never":
            raise InputError(
                f"checkpoint.url holds checkpoints already, the last of step {there[-1]}: {store.shown('')}",
                hint='checkpoint.resume = "auto" goes on from it; a new training needs a place of its own',
            )
        if there and settings.resume == "auto":
            resume = _load(store, name_of(there[-1]), settings.url)
    if settings.resume not in ("never", "auto"):
        resume = _named(recipe, endpoint, credentials)
        later = [step for step in there if step > resume.manifest.step] if settings.url else []
        if later:
            raise InputError(
                f"checkpoint.url holds checkpoints of a training that went further: of step {later[-1]}, while "
                f"checkpoint.resume is of step {resume.manifest.step}",
                hint="another checkpoint.url",
            )
    if resume is not None:
        check_fits(recipe, resume.manifest, num_records)
    return Checkpoints(endpoint=endpoint, credentials=credentials, resume=resume)


def _steps(store: CheckpointStore) -> list[int]:
    try:
        return store.steps()
    except (BaseError, OSError) as error:
        raise store.explain(error, "") from None


def _named(recipe: Recipe, endpoint: str, credentials: Credentials | None) -> Resume:
    """What `checkpoint.resume` names: a checkpoint, or a place of several."""
    url = recipe.checkpoint.resume
    store = open_store(url, recipe, endpoint, credentials)
    try:
        files = store.sizes("")
        steps = [] if MANIFEST in files else store.steps()
    except (BaseError, OSError) as error:
        raise store.explain(error, "") from None
    if MANIFEST in files:
        return _load(store, "", url)
    if steps:
        return _load(store, name_of(steps[-1]), url)
    if any(name.endswith(".safetensors") for name in files):
        raise DataError(f"unfinished checkpoint: {store.shown('')} has no {MANIFEST}")
    raise InputError(f"not a checkpoint: {store.shown('')} has no {MANIFEST}")


def _load(store: CheckpointStore, name: str, url: str) -> Resume:
    """Its manifest, and whether its files are as large as they should be; their bytes are checked by who reads them."""
    try:
        manifest = load_manifest(store.manifest(name), store.shown(name))
        sizes = store.sizes(name)
    except (BaseError, OSError) as error:
        raise store.explain(error, name) from None
    for file in manifest.files:
        found = sizes.get(file.name)
        if found != file.size_bytes:
            what = "is missing" if found is None else f"has {found:,} bytes, expected {file.size_bytes:,}"
            raise damaged(store, name, f"{file.name} {what}")
    return Resume(url=f"{url.rstrip('/')}/{name}" if name else url, manifest=manifest)


def damaged(store: CheckpointStore, name: str, what: str) -> DataError:
    return DataError(
        f"checkpoint is damaged: {store.shown(name)}: {what}",
        hint="checkpoint.resume names an older one to go on from; nothing older is taken by itself",
    )


def check_fits(recipe: Recipe, manifest: Manifest, num_records: int | None = None) -> None:
    """Raises InputError, the first key and both values, where the recipe would not go on with the same training."""
    if manifest.model != recipe.model.name:
        raise InputError(f"checkpoint is of another model: {manifest.model}, the recipe's is {recipe.model.name}")
    now = recipe.train.batch_size * recipe.launch.ranks
    if manifest.global_batch != now:
        raise InputError(
            f"cannot resume with another global batch: it was {manifest.global_batch}, now it is {now} "
            f"({recipe.launch.ranks} ranks x {recipe.train.batch_size})"
        )
    theirs = _flat(manifest.recipe)
    for key, mine in _flat(recipe.model_dump()).items():
        if key in _MAY_CHANGE or key.partition(".")[0] in _MAY_CHANGE or key not in theirs:
            continue
        if theirs[key] != mine:
            raise InputError(
                f"cannot resume with another {key}: it was {theirs[key]!r}, now it is {mine!r}",
                hint="docs/checkpoints.md lists what may change",
            )
    total = run_steps(recipe, num_records)
    if manifest.step >= total:
        raise InputError(
            f"nothing is left to train: the checkpoint is of step {manifest.step}, the recipe ends at step {total}",
            hint="more train.epochs or quality.limit_epochs"
            if recipe.epochs
            else f"train.steps of more than {manifest.step - recipe.train.warmup_steps}",
        )


def _flat(tree: Mapping[str, object]) -> dict[str, object]:
    """`section.key` to value."""
    flat: dict[str, object] = {}
    for section, value in tree.items():
        if isinstance(value, dict):
            flat |= {f"{section}.{key}": item for key, item in value.items()}
        else:
            flat[section] = value
    return flat
