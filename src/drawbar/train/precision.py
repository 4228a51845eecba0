"""Which number format a device trains in."""

from __future__ import annotations

from pathlib import Path

import torch

from drawbar.errors import EnvironmentUnfit

_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bf16 itself; without AVX512-BF16 or AMX it is emulated, many times slower."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return bool(_BF16_FLAGS & set(flags.split()))


def choose_precision(wanted: str, device: torch.device) -> torch.dtype:
    """Raises EnvironmentUnfit where bf16 is asked for and the device would only emulate it."""
    has_bf16 = torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu_has_bf16()
    if wanted == "bf16" and not has_bf16:
        raise EnvironmentUnfit(
            f"this {device.type} has no bf16 arithmetic (AVX512-BF16 or AMX on a CPU)",
            hint='model.precision = "auto" or "fp32"',
        )
    return torch.bfloat16 if has_bf16 and wanted != "fp32" else torch.float32
