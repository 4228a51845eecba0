"""The exchange of gradients between ranks, and when a rank's own part of a step was over.

PyTorch's DistributedDataParallel (DDP) averages gradients bucket by bucket while backward still runs. What of that
costs time of its own lies between two points: the last gradient of this rank is ready, and backward returns, which it
does when the last bucket is averaged. DDP hands each bucket to a hook as it fills up, in a fixed order, the last one
when no gradient is missing: there the first point is taken. On a GPU both points are events in the stream of backward,
which waits for the exchange before it goes on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from drawbar.config import Exchange as Settings
from drawbar.train.clock import StepClock

_OPTIONS = inspect.signature(nn.parallel.DistributedDataParallel).parameters
_OWN_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers": False
}
"""By the newer name, or the one before it."""

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]
FORMATS = {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""In which gradients are sent, by `exchange.compression`."""
HOOKS: dict[str, Hook] = {
    "none": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


class Exchange:
    """Wraps a model, once. Needs the process group."""

    def __init__(self, settings: Settings, clock: StepClock, device: torch.device) -> None:
        self._settings, self._clock, self._device = settings, clock, device
        self._send = HOOKS[settings.compression]
        self.gradient_bytes = 0
        """That this rank sends in a step."""
        self._ready: Any = None
        self._held: list[tuple[GradBucket, Future[torch.Tensor]]] = []

    def wrap(self, model: nn.Module) -> nn.Module:
        width = FORMATS[self._settings.compression].itemsize
        self.gradient_bytes = width * sum(p.numel() for p in model.parameters() if p.requires_grad)
        wrapped = nn.parallel.DistributedDataParallel(
            model,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            bucket_cap_mb=self._settings.bucket_mib or None,
            gradient_as_bucket_view=True,
            # Batch statistics are each rank's own: sending rank 0's with every forward would be a second wait for it.
            **_OWN_BUFFERS,
        )
        # Not the method itself: DDP compares its annotations with types, and ours are text.
        wrapped.register_comm_hook(None, lambda state, bucket: self._take(bucket))
        return wrapped

    def take_ready(self) -> Any:
        """When the last gradient of the step was ready, as a mark of the clock; None where nothing was exchanged."""
        ready, self._ready = self._ready, None
        return ready

    def _take(self, bucket: GradBucket) -> Future[torch.Tensor]:
        if bucket.is_last():
            self._ready = self._clock.mark()
        if not self._settings.delayed:
            return self._send(None, bucket)
        if not bucket.is_last():
            promise: Future[torch.Tensor] = Future(devices=[self._device] if self._device.type == "cuda" else None)
            self._held.append((bucket, promise))
            return promise
        held, self._held = self._held, []
        for early, promise in held:
            self._send(None, early).then(_keep(promise))
        return self._send(None, bucket)


def _keep(promise: Future[torch.Tensor]) -> Callable[[Future[torch.Tensor]], None]:
    def sent(done: Future[torch.Tensor]) -> None:
        try:
            promise.set_result(done.value())
        except Exception as error:  # a lost peer: who waits for the promise must hear of it
            promise.set_exception(error)  # type: ignore[arg-type]

    return sent
