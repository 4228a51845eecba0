"""Who am I: the identity of this process among the ranks, read once from the launcher's variables and passed on.

No other module reads RANK and its kin. Today's source is torchrun; a process started without it is a world of one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from drawbar.errors import EnvironmentUnfit


@dataclass(frozen=True, kw_only=True)
class World:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str
    """Host name."""

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> World:
        """Raises EnvironmentUnfit where the variables are there but make no sense."""
        node = socket.gethostname()
        if "RANK" not in environ:
            return cls(rank=0, world_size=1, local_rank=0, local_world_size=1, node=node)
        try:
            world = cls(
                rank=int(environ["RANK"]),
                world_size=int(environ["WORLD_SIZE"]),
                local_rank=int(environ["LOCAL_RANK"]),
                local_world_size=int(environ["LOCAL_WORLD_SIZE"]),
                node=node,
            )
        except (KeyError, ValueError) as error:
            raise EnvironmentUnfit(f"torchrun's variables are incomplete or no numbers: {error}") from None
        if not 0 <= world.rank < world.world_size or not 0 <= world.local_rank < world.local_world_size:
            raise EnvironmentUnfit(f"torchrun's variables contradict each other: {world}")
        return world
