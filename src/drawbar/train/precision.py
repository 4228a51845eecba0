"""Which number format a device trains in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from drawbar.errors import EnvironmentUnfit

_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


@dataclass(frozen=True, slots=True)
class Precision:
    name: Literal["fp32", "tf32", "bf16", "fp16"]

    @property
    def dtype(self) -> torch.dtype:
        """Of activations. Weights and gradients are fp32 whatever it is."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.name, torch.float32)

    @property
    def is_mixed(self) -> bool:
        return self.dtype != torch.float32

    def apply(self) -> None:
        """Tells this process how fp32 numbers are multiplied: by PyTorch's default, convolutions would use TF32."""
        mode = "tf32" if self.name == "tf32" else "ieee"
        torch.backends.cuda.matmul.fp32_precision = mode
        torch.backends.cudnn.conv.fp32_precision = mode  # type: ignore[attr-defined]


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bf16 itself; without AVX512-BF16 or AMX it is emulated, many times slower."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return bool(_BF16_FLAGS & set(flags.split()))


def choose_precision(wanted: str, device: torch.device) -> Precision:
    """Raises EnvironmentUnfit where the device has not what is asked for, or would only emulate it."""
    on_gpu = device.type == "cuda"
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else cpu_has_bf16()
    if wanted == "auto":
        return Precision("bf16" if has_bf16 else "fp32")
    if wanted == "bf16" and not has_bf16:
        raise EnvironmentUnfit(
            f"this {device.type} has no bf16 arithmetic (AVX512-BF16 or AMX on a CPU)",
            hint='model.precision = "auto" or "fp32"',
        )
    if wanted in ("tf32", "fp16") and not on_gpu:
        raise EnvironmentUnfit(f"{wanted} needs a GPU; this rank trains on the CPU", hint='model.precision = "auto"')
    if wanted == "tf32" and torch.cuda.get_device_capability(device) < (8, 0):
        raise EnvironmentUnfit(
            f"{torch.cuda.get_device_name(device)} has no TF32 arithmetic", hint='model.precision = "fp32" or "fp16"'
        )
    return Precision(wanted)  # type: ignore[arg-type]
