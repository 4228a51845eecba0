"""Evaluation: the model on every validation image once, over all ranks. What is measured of it is here; when it happens
and what follows is `train/quality.py`'s."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from drawbar.errors import RunFailed
from drawbar.train.batch import HostBatch
from drawbar.train.objective import Inputs

ToDevice = Callable[[HostBatch], Inputs]
"""As a step prepares its batch: `Classification.to_device`."""


class Evaluation(Protocol):
    metrics: tuple[str, ...]
    """The names that `run` gives."""

    def run(self, epoch: int) -> dict[str, float]:
        """Collective. The metrics of the whole validation set, each image once, equal on all ranks."""


class ImageEvaluation:
    """Top-1, top-5 and mean cross-entropy of a classifier, from sums over ranks: exact whatever their number and the
    batch size, but for the order in which floats are added."""

    metrics: tuple[str, ...] = ("top1", "top5", "loss")

    def __init__(
        self,
        model: nn.Module,
        batches: Callable[[], Iterable[HostBatch]],
        to_device: ToDevice,
        *,
        device: torch.device,
        dtype: torch.dtype,
        control: dist.ProcessGroup | None,
    ) -> None:
        """`batches`: this rank's share once. `control`: a CPU group of all ranks; None: there is one rank alone."""
        self._model, self._batches, self._to_device = model, batches, to_device
        self._device, self._dtype, self._control = device, dtype, control

    def run(self, epoch: int) -> dict[str, float]:
        """Raises RunFailed for a loss that is not finite, and what reading raises."""
        share_buffers(self._model, self._control)
        was_training = self._model.training
        self._model.eval()
        try:
            images, top1, top5, loss = self._sums()
        finally:
            self._model.train(was_training)
        images, top1, top5 = sum_over_ranks([images, top1, top5], torch.int64, self._control)
        (loss,) = sum_over_ranks([loss], torch.float64, self._control)
        if images == 0:
            raise RunFailed("the validation set holds no image")
        if not math.isfinite(loss):
            raise RunFailed(
                f"the loss on the validation set is {loss}", hint="a lower learning rate, or model.precision fp32"
            )
        return {"top1": top1 / images, "top5": top5 / images, "loss": loss / images}

    @torch.no_grad()
    def _sums(self) -> tuple[int, int, int, float]:
        """Images, right ones at first and among five, summed loss: of this rank."""
        images = 0
        right = torch.zeros(2, dtype=torch.int64, device=self._device)
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        copied: deque[tuple[HostBatch, torch.cuda.Event | None]] = deque()
        for batch in self._batches():
            pixels, labels = self._to_device(batch)
            copied.append((batch, self._mark()))
            with torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype != torch.float32):
                logits = self._model(pixels)
            logits = logits.float()
            loss += functional.cross_entropy(logits, labels, reduction="none").double().sum()
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            right += torch.stack([best[:, 0].sum(), best.sum()])
            images += batch.samples
            # A GPU may still be copying the last one; the one before was copied while the host was here.
            while len(copied) > (1 if self._device.type == "cuda" else 0):
                _release(*copied.popleft())
        while copied:
            _release(*copied.popleft())
        return images, int(right[0]), int(right[1]), float(loss)

    def _mark(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


def _release(batch: HostBatch, copied: torch.cuda.Event | None) -> None:
    if copied is not None:
        copied.synchronize()
    batch.release()


def share_buffers(model: nn.Module, control: dist.ProcessGroup | None) -> None:
    """Rank 0's buffers, such as the running statistics of batch norm, to all ranks: one model is evaluated. Each rank
    counts its own in training; DistributedDataParallel does the same before every forward."""
    if control is None or control.size() == 1:
        return
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for buffer in model.buffers():
        kinds.setdefault(buffer.dtype, []).append(buffer)
    with torch.no_grad():
        for buffers in kinds.values():
            # One message for all of a kind; over the gradients' group, which knows the device.
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(flat, 0)
            parts = torch.split(flat, [buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))


def sum_over_ranks(values: Sequence[float], dtype: torch.dtype, control: dist.ProcessGroup | None) -> list[int]:
    """Exact for int64, and the same bits on every rank: whether to stop depends on them. Collective."""
    totals = torch.tensor(values, dtype=dtype)
    if control is not None:
        dist.all_reduce(totals, group=control)
        dist.broadcast(totals, 0, group=control)
    return list(totals.tolist())
