"""A batch too large for the device's memory, told in one line with the largest that fits."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from drawbar.errors import RunFailed


def is_out_of_memory(error: RuntimeError) -> bool:
    """CUDA has a class for it; the CPU's allocator says it in words alone. Where Linux overcommits it says nothing: the
    kernel kills."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def batch_too_large(samples: int, device: torch.device, attempt: Callable[[int], None]) -> RunFailed:
    """The error to raise. `attempt` trains that many samples, without the other ranks: halves are tried."""
    fits = 0
    for candidate in _halves(samples):
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            attempt(candidate)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                break
        else:
            fits = candidate
            break
    found = f"{fits} fit" if fits else "not even one image fits" if samples > 1 else "and it is one image"
    return RunFailed(
        f"a batch of {samples} does not fit into the memory of {device}; of its halves, {found}",
        hint=f"train.batch_size = {fits}, or train.accumulate" if fits else "a smaller model or input.image_size",
    )


def _halves(samples: int) -> list[int]:
    """samples / 2, / 4, … down to 1."""
    return [samples >> n for n in range(1, samples.bit_length())]
