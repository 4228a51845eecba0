"""The training loop: wait for a batch, train it, write the step down."""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drawbar.errors import RunFailed
from drawbar.journal import Event
from drawbar.journal import Step as StepEvent
from drawbar.train.batch import HostBatch
from drawbar.train.clock import StepClock
from drawbar.train.step import Step, Trained

STEPS_IN_FLIGHT = 2
"""How far the host may run ahead of a GPU: enough to hide the launch, little enough to notice trouble at once."""


class Batches(Protocol):
    def __call__(self) -> HostBatch: ...


class Journal(Protocol):
    def write(self, event: Event) -> None: ...


class Between(Protocol):
    """Something done between two steps, when it is due: an evaluation, a checkpoint. Outside of every step's time."""

    def after(self, step: int) -> Pause | None:
        """`step` is over on every rank's schedule, its update made; None: nothing was due. Every rank is asked alike,
        and answers `stop` alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    tag: str
    """Of the step that follows, `after_…`: it may find cold caches."""
    stop: bool = False
    """The run is over."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    first_step: int = 0
    """Its number: the steps that were done before, where training was resumed."""
    warmup_steps: int
    steps: int
    rank: int
    slow_step_s: float = 0.0
    """A deliberate fault: added to every step of this rank."""


def train(
    next_batch: Batches,
    step: Step,
    clock: StepClock,
    journal: Journal,
    settings: LoopSettings,
    on_step: Callable[[int], None],
    between: Sequence[Between] = (),
) -> None:
    """Runs `warmup_steps + steps` steps, from `first_step` on, or until one of `between` says stop, and journals each.
    `on_step` is told the number of the step that begins.

    Raises whatever the input raises, and RunFailed when the loss is no longer a number.
    """
    pending: deque[_Pending] = deque()
    collections = _CollectionCount()
    last_epoch = -1
    tags: list[str] = []
    previous = clock.mark()
    first_measured = settings.first_step + settings.warmup_steps
    for number in range(settings.first_step, first_measured + settings.steps):
        on_step(number)
        wait_start = time.perf_counter()
        batch = next_batch()
        data_wait_s = time.perf_counter() - wait_start
        trained = step.run(batch)
        if settings.slow_step_s:
            time.sleep(settings.slow_step_s)
        mark = clock.mark()
        tags += [*collections.tags(), *trained.tags] + (["epoch_start"] if batch.epoch != last_epoch else [])
        last_epoch = batch.epoch
        pending.append(
            _Pending(
                number=number,
                warmup=number < first_measured,
                start=previous,
                end=mark,
                data_wait_s=data_wait_s,
                trained=trained,
                batch=batch,
                tags=tags,
            )
        )
        previous = mark
        # On a CPU the step is over; a GPU is allowed to run behind, and its buffers stay in use until it caught up.
        while len(pending) > (STEPS_IN_FLIGHT if clock.runs_behind else 0):
            _finish(pending.popleft(), clock, journal, settings.rank)
        pauses = [pause for each in between if (pause := each.after(number)) is not None]
        tags = [pause.tag for pause in pauses]
        if pauses:
            # Measuring goes on here: what was done in between is no step's time.
            previous = clock.mark()
        if any(pause.stop for pause in pauses):
            break
    while pending:
        _finish(pending.popleft(), clock, journal, settings.rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pending:
    number: int
    warmup: bool
    start: Any
    end: Any
    data_wait_s: float
    trained: Trained
    batch: HostBatch
    tags: list[str]


def _finish(step: _Pending, clock: StepClock, journal: Journal, rank: int) -> None:
    trained, marks = step.trained, step.trained.marks
    start_t, end_t = clock.resolve(step.start), clock.resolve(step.end)
    batch_t, copied_t, computed_t, exchanged_t, updated_t = (
        clock.resolve(mark) for mark in (marks.start, marks.copied, marks.computed, marks.exchanged, marks.updated)
    )
    loss = None if trained.loss is None else float(trained.loss)
    step.batch.release()
    journal.write(
        StepEvent(
            step=step.number,
            warmup=step.warmup,
            start_t=start_t,
            end_t=end_t,
            # Where work runs behind the host, the host's wait may cost nothing: what counts is that of the device.
            data_wait_s=batch_t - start_t if clock.runs_behind else step.data_wait_s,
            copy_s=copied_t - batch_t,
            compute_s=computed_t - copied_t,
            exchange_s=exchanged_t - computed_t,
            optimizer_s=updated_t - exchanged_t,
            samples=step.batch.samples,
            loss=loss,
            learning_rate=trained.learning_rate,
            tags=step.tags,
        )
    )
    if loss is not None and not math.isfinite(loss):
        raise RunFailed(
            f"loss is {loss} at step {step.number} on rank {rank}", hint="lower optimizer.learning_rate, or fp32"
        )


class _CollectionCount:
    """Says which steps Python's garbage collector ran in."""

    def __init__(self) -> None:
        self._seen = self._count()

    def tags(self) -> list[str]:
        now = self._count()
        ran, self._seen = now != self._seen, now
        return ["gc"] if ran else []

    @staticmethod
    def _count() -> int:
        # Young collections take microseconds; only a full one shows in a step.
        return int(gc.get_stats()[2]["collections"])
