"""Which device a rank uses."""

from __future__ import annotations

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
