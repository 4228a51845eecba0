"""Saving the state of training while it goes on: all ranks stand still for the copy to host memory, nothing else.

Rank 0 writes for all, as every rank holds the same model and optimizer; of the others it gathers the states of their
random number generators. Costs rank 0 one copy of the state in host memory, and a thread. One write is under way at
most: the next one waits for it, and its event says how long. A write that fails ends the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import google_crc32c
import torch
import torch.distributed as dist
from obstore.exceptions import BaseError

from drawbar.checkpoint.manifest import MODEL, TRAINING, FileEntry, Manifest, name_of
from drawbar.checkpoint.state import HostCopy, Tensors, safetensors_pieces, to_tree
from drawbar.checkpoint.stores import CheckpointStore, Pieces
from drawbar.config import Recipe
from drawbar.errors import RunFailed
from drawbar.input.plan import PlanState
from drawbar.journal import CheckpointWrite, JournalWriter
from drawbar.train.build import Training
from drawbar.train.loop import Pause
from drawbar.world import World

TAG = "after_checkpoint"


@dataclass(frozen=True, kw_only=True)
class About:
    """What a checkpoint says of the run that wrote it."""

    recipe: Recipe
    world: World
    dataset_sha256: str
    num_records: int | None = None
    """Of the data set; None where not known."""
    rounding: dict[str, str]
    """See `Manifest.rounding`."""


class CheckpointWriter:
    """One on each rank; all are called alike. `store` is used by rank 0 alone."""

    def __init__(
        self,
        store: CheckpointStore,
        about: About,
        training: Training,
        control: dist.ProcessGroup,
        journal: JournalWriter,
        *,
        plan_state: Callable[[], PlanState | None],
        first_step: int,
        first_epoch: int,
    ) -> None:
        """`plan_state` tells where the reading plan stands after the batches handed out so far.

        Rank 0 cleans away what a killed writer left. Raises what the store explains."""
        self._store, self._about, self._training = store, about, training
        self._control, self._journal, self._plan_state = control, journal, plan_state
        self._settings = about.recipe.checkpoint
        self._deadline_s = about.recipe.launch.stall_timeout_s
        self._done = self._saved = first_step
        self._epoch = first_epoch
        self._copies = {MODEL: HostCopy(), TRAINING: HostCopy()}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        if about.world.rank == 0:
            try:
                for name in store.clean():
                    print(f"removed what an earlier run left unfinished: {store.shown(name)}", flush=True)
            except (BaseError, OSError) as error:
                raise store.explain(error, "") from error

    def after(self, step: int) -> Pause | None:
        self._done = step + 1
        self._raise_failure()
        if not self._is_due():
            return None
        self._save()
        return Pause(tag=TAG)

    def finish(self) -> None:
        """After the last step: saves its state, and returns when that is written. Raises what writing raised."""
        if self._done > self._saved:
            self._save()
        self._wait()

    def _is_due(self) -> bool:
        settings = self._settings
        by_steps = settings.every_steps > 0 and self._done % settings.every_steps == 0
        if not settings.every_epochs:
            return by_steps
        plan = self._plan_state()
        epoch = plan.epoch if plan else 0
        # Carried batches end in the next epoch: what counts is that one was left.
        by_epochs = epoch // settings.every_epochs > self._epoch // settings.every_epochs
        self._epoch = epoch
        return by_steps or by_epochs

    def _save(self) -> None:
        self._saved = self._done
        begin_t = time.perf_counter()
        self._wait()
        waited_s = time.perf_counter() - begin_t
        states = self._gather(_random_state())
        if self._about.world.rank != 0:
            # Here and not in the next exchange of gradients, which would count as computing.
            dist.barrier(self._control)
            return
        copy_t = time.perf_counter()
        tensors, tree = self._copy(states)
        copied_t = time.perf_counter()
        dist.barrier(self._control)
        event = CheckpointWrite(
            step=self._done,
            target=self._store.shown(name_of(self._done)),
            size_bytes=0,
            pause_s=time.perf_counter() - begin_t,
            waited_s=waited_s,
            copy_s=copied_t - copy_t,
            write_s=0.0,
        )
        arguments = (self._manifest(tree), tensors, event, copied_t)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def _gather(self, mine: dict[str, Any]) -> list[Any]:
        """On rank 0, of all ranks; empty on the others."""
        world = self._about.world
        everyone: list[Any] | None = [None] * world.world_size if world.rank == 0 else None
        dist.gather_object(mine, everyone, dst=0, group=self._control)
        return everyone or []

    def _copy(self, random_states: list[Any]) -> tuple[dict[str, Tensors], Any]:
        """Tensors in host memory by file, and the tree that the second file's hang in."""
        training: Tensors = {}
        content = {
            "optimizer": self._training.optimizer.state_dict(),
            "random": random_states,
            **{name: part.state_dict() for name, part in self._training.state.items()},
        }
        tree = to_tree(content, "state", training)
        parts = {MODEL: dict(self._training.model.state_dict()), TRAINING: training}
        return {file: self._copies[file].take(tensors) for file, tensors in parts.items()}, tree

    def _manifest(self, tree: Any) -> Manifest:
        recipe, world, plan = self._about.recipe, self._about.world, self._plan_state()
        return Manifest(
            step=self._done,
            epoch=plan.epoch if plan else 0,
            plan=plan.to_json() if plan else None,
            model=recipe.model.name,
            world_size=world.world_size,
            global_batch=recipe.train.batch_size * world.world_size,
            recipe_sha256=recipe.sha256(),
            recipe=recipe.model_dump(),
            dataset_sha256=self._about.dataset_sha256,
            rounding=self._about.rounding,
            state=tree,
            files=(),
        )

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join(self._deadline_s)
            if self._thread.is_alive():
                raise RunFailed(
                    f"a checkpoint was not written within {self._deadline_s:g} s: {self._store.shown('')}",
                    hint="launch.stall_timeout_s is how long that may take",
                )
            self._thread = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- the thread ----------------------------------------------------------------------------------------------

    def _write(self, manifest: Manifest, tensors: dict[str, Tensors], event: CheckpointWrite, copied_t: float) -> None:
        name = name_of(manifest.step)
        try:
            writing = self._store.begin(name)
            files = []
            for file, content in tensors.items():
                sums = _Sums(lambda content=content: safetensors_pieces(content))  # type: ignore[misc]
                writing.write(file, sums.pieces)
                files.append(FileEntry(name=file, size_bytes=sums.size_bytes, crc32c=f"{sums.crc32c:08x}"))
            text = manifest.model_copy(update={"files": tuple(files)}).dumps()
            writing.commit(text)
            end_t = time.perf_counter()
            size_bytes = len(text) + sum(file.size_bytes for file in files)
            self._journal.write(replace(event, t=end_t, size_bytes=size_bytes, write_s=end_t - copied_t))
            for step in self._store.steps()[: -self._settings.keep]:
                self._store.delete(name_of(step))
        except (BaseError, OSError) as error:
            self._failure = self._store.explain(error, name)
        except BaseException as error:
            self._failure = error


class _Sums:
    """Counts what passes, anew each time it is asked for."""

    def __init__(self, source: Pieces) -> None:
        self._source = source
        self.size_bytes = self.crc32c = 0

    def pieces(self) -> Iterator[bytes]:
        self.size_bytes = self.crc32c = 0
        for piece in self._source():
            self.size_bytes += len(piece)
            self.crc32c = google_crc32c.extend(self.crc32c, piece)
            yield piece


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "cuda": None}
    if torch.cuda.is_available():
        # The copy begins when the device has done what it was given: that is no pause.
        torch.cuda.synchronize()
        state["cuda"] = torch.cuda.get_rng_state()
    return state
