"""Evaluations between steps, when they are due, until the quality target is met."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.distributed as dist

from drawbar.epochs import is_met
from drawbar.errors import RecipeError, RunFailed
from drawbar.journal import Evaluation as EvaluationEvent
from drawbar.journal import JournalWriter
from drawbar.train.evaluate import Evaluation, sum_over_ranks
from drawbar.train.loop import Pause


class Counted(Protocol):
    """What of an evaluation's reading is counted, see `launch.eval_feed.ReadCount`."""

    images: int
    offsets_sum: int
    data_wait_s: float


class CountedFeed(Protocol):
    num_records: int | None

    @property
    def read(self) -> Counted: ...

    @property
    def offsets_sum(self) -> int | None: ...


class Evaluations:
    """A `Between` of the training loop."""

    def __init__(
        self,
        evaluation: Evaluation,
        feed: CountedFeed,
        *,
        due: Mapping[int, int],
        target: dict[str, float],
        journal: JournalWriter,
        device: torch.device,
        control: dist.ProcessGroup | None,
        on_evaluation: Callable[[int], None],
    ) -> None:
        """`due`: step -> epoch. `on_evaluation` is told after which step one begins.

        Raises RecipeError for a target that this evaluation cannot meet.
        """
        if unknown := sorted(set(target) - set(evaluation.metrics)):
            raise RecipeError(
                f"quality.target names {', '.join(unknown)}, which an evaluation of this model does not give",
                hint=f"known: {', '.join(evaluation.metrics)}",
            )
        self._evaluation, self._feed = evaluation, feed
        self._due, self._target = due, target
        self._journal, self._device, self._control = journal, device, control
        self._on_evaluation = on_evaluation

    def after(self, step: int) -> Pause | None:
        """Collective where one is due. Raises RunFailed where it did not see every image of the set once."""
        epoch = self._due.get(step)
        if epoch is None:
            return None
        self._on_evaluation(step)
        if self._device.type == "cuda":
            # What the host has enqueued is training's time.
            torch.cuda.synchronize()
        start_t = time.perf_counter()
        metrics = self._evaluation.run(epoch)
        all_images = self._count()
        end_t = time.perf_counter()
        read = self._feed.read
        self._journal.write(
            EvaluationEvent(
                step=step,
                epoch=epoch,
                start_t=start_t,
                end_t=end_t,
                images=read.images,
                all_images=all_images,
                set_images=self._feed.num_records,
                data_wait_s=read.data_wait_s,
                metrics=metrics,
            )
        )
        return Pause(tag="after_evaluation", stop=is_met(self._target, metrics))

    def _count(self) -> int:
        read = self._feed.read
        images, offsets_sum = sum_over_ranks([read.images, read.offsets_sum], torch.int64, self._control)
        expected = (self._feed.num_records, self._feed.offsets_sum)
        if expected[0] is not None and (images, offsets_sum) != expected:
            raise RunFailed(
                f"an evaluation saw {images} images where the validation set has {expected[0]}"
                if images != expected[0]
                else f"an evaluation saw {images} images, as many as the set has, but not each of them once"
            )
        return images
