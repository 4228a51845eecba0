"""Which device a rank uses, and how a batch gets onto it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drawbar.errors import EnvironmentUnfit
from drawbar.world import World


def device_of_rank(wanted: str, world: World) -> torch.device:
    """`auto`: the GPU numbered like the local rank where there is one, else the CPU. Raises EnvironmentUnfit."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and available == 0):
        return torch.device("cpu")
    if world.local_world_size > available:
        raise EnvironmentUnfit(
            f"{world.local_world_size} ranks on {world.node}, which has {available} CUDA devices",
            hint='one rank per GPU, or launch.device = "cpu"',
        )
    return torch.device("cuda", world.local_rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBatch:
    pixels: torch.Tensor
    labels: torch.Tensor
    copied: torch.cuda.Event | None
    """Has passed when both are there, and not before may what they were copied from be overwritten. None: nothing runs
    behind the host's back."""


class DeviceCopy:
    """Brings batches to the rank's device. On a GPU on a stream of its own, so that a batch in pinned memory crosses
    while the device still computes the step before. For one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def to_device(self, pixels: torch.Tensor, labels: torch.Tensor) -> DeviceBatch:
        """What is enqueued on the current stream from now on finds them there; the host does not wait.

        Tensors that are on the device already are passed on, and must be complete.
        """
        if self._stream is None:
            return DeviceBatch(pixels=pixels.to(self._device), labels=labels.to(self._device), copied=None)
        consumer = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            there = [tensor.to(self._device, non_blocking=True) for tensor in (pixels, labels)]
            copied = self._stream.record_event()
        consumer.wait_event(copied)
        for tensor in there:
            # Allocated for another stream than the one that reads it: its memory is kept until that one is done too.
            tensor.record_stream(consumer)
        return DeviceBatch(pixels=there[0], labels=there[1], copied=copied)
