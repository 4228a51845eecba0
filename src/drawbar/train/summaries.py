"""TensorBoard's event files, written by rank 0 between steps: outside of every step's time, and the cost journalled."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drawbar.config import Summaries as Settings
from drawbar.journal import Event, JournalWriter, Step, Summary
from drawbar.train.loop import Pause

_BINS = 64


class Summaries:
    """Stands between the loop and the journal to see the steps, and is asked after each step like an evaluation.

    Gradients are kept, not copied, on steps that are due: the optimizer drops its references, ours remain until the
    histograms are made, before the next backward pass writes over them.
    """

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        journal: JournalWriter,
    ) -> None:
        # Takes a second, and most runs do without.
        from torch.utils.tensorboard import SummaryWriter

        self._settings, self._model, self._optimizer, self._journal = settings, model, optimizer, journal
        self._writer: Any = SummaryWriter(str(directory))
        self._rates: dict[int, float] = {}
        self._finished: list[tuple[int, float | None, float]] = []
        """Steps that are due and over: number, loss, images/s since the one before."""
        self._samples, self._seconds = 0, 0.0
        self._gradients: list[tuple[str, torch.Tensor]] = []
        self._step = 0
        self._hook = optimizer.register_step_pre_hook(self._keep_gradients) if settings.verbosity >= 2 else None

    def write(self, event: Event) -> None:
        """Passes on to the journal."""
        self._journal.write(event)
        if isinstance(event, Step):
            self._samples += event.samples
            self._seconds += event.end_t - event.start_t
            if self._is_due(event.step):
                self._finished.append((event.step, event.loss, self._samples / self._seconds))
                self._samples, self._seconds = 0, 0.0

    def after(self, step: int) -> Pause | None:
        self._step = step + 1
        if self._is_due(step):
            self._rates[step] = float(self._optimizer.param_groups[0]["lr"])
        elif not self._finished:
            return None
        start = time.perf_counter()
        # On a GPU the loss of a step is known some steps later: scalars wait for it, gradients must not.
        self._write_scalars()
        if self._gradients:
            self._write_histograms(step)
        self._journal.write(Summary(step=step, write_s=time.perf_counter() - start))
        return Pause(tag="after_summary")

    def close(self) -> None:
        """Writes what is left, to the disk."""
        self._write_scalars()
        self._writer.close()
        if self._hook is not None:
            self._hook.remove()

    def _is_due(self, step: int) -> bool:
        return (step + 1) % self._settings.every_steps == 0

    def _write_scalars(self) -> None:
        for step, loss, images_per_s in self._finished:
            if loss is not None:
                self._writer.add_scalar("loss", loss, step + 1)
            self._writer.add_scalar("learning_rate", self._rates.pop(step), step + 1)
            self._writer.add_scalar("images_per_s_rank_0", images_per_s, step + 1)
        self._finished.clear()

    def _keep_gradients(self, *_: Any) -> None:
        if self._is_due(self._step):
            named = self._model.named_parameters()
            self._gradients = [(name, weight.grad) for name, weight in named if weight.grad is not None]

    def _write_histograms(self, step: int) -> None:
        flat = torch.cat([gradient.detach().flatten() for _, gradient in self._gradients]).abs()
        self._histogram("log_gradients", flat[flat != 0].log(), step)
        if self._settings.verbosity >= 3:
            for name, gradient in self._gradients:
                self._histogram(f"{name}/gradients", gradient.detach(), step)
            for name, weight in self._model.named_parameters():
                self._histogram(name, weight.detach(), step)
        self._gradients = []

    def _histogram(self, tag: str, values: torch.Tensor, step: int) -> None:
        """Counted on the device: TensorBoard's own counting would bring every value to the host."""
        values = values.float()
        values = values[values.isfinite()]
        if values.numel() == 0:
            return
        low, high = float(values.min()), float(values.max())
        first, last = (low, high) if low < high else (low - 1.0, high + 1.0)
        counts = torch.histc(values, _BINS, first, last)
        edges = torch.linspace(first, last, _BINS + 1)[1:]
        self._writer.add_histogram_raw(
            tag,
            min=low,
            max=high,
            num=values.numel(),
            sum=float(values.sum(dtype=torch.float64)),
            sum_squares=float(values.double().square().sum()),
            bucket_limits=edges.tolist(),
            bucket_counts=counts.cpu().tolist(),
            global_step=step + 1,
        )
