"""Who am I: the identity of this process among the ranks, read once from the launcher's variables and passed on.

No other module reads RANK and its kin. Training ranks are torchrun's; a process started without it is a world of one.
Work that needs no collectives, such as packing, takes its share by the variables of any launcher.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

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


class Launched(NamedTuple):
    """One of `size` processes that a launcher started to share a piece of work."""

    rank: int
    size: int
    ranks_on_host: int


_LAUNCHERS = (
    # rank, size, ranks on this host; torchrun first: it may itself have been started by one of the others
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    # The variables of a step: a batch script and an allocated shell have SLURM_PROCID too, but are no ranks.
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),
)


def launched_by(environ: Mapping[str, str] = os.environ) -> str:
    """The launcher by whose variables this process is a rank; empty where there are none."""
    return next((name for name, rank, size, _ in _LAUNCHERS if rank in environ and size in environ), "")


def launcher_rank(environ: Mapping[str, str] = os.environ) -> Launched:
    """By the variables of torchrun, Open MPI, MPICH's kin (PMI) or srun; else rank 0 of 1. Needs no torch and no MPI.

    Raises EnvironmentUnfit where the variables are there but make no sense.
    """
    for launcher, rank_name, size_name, local_name in _LAUNCHERS:
        if rank_name not in environ or size_name not in environ:
            continue
        try:
            rank, size = int(environ[rank_name]), int(environ[size_name])
            local = int(environ.get(local_name, "1")) if local_name else _slurm_tasks_on_host(environ)
        except ValueError as error:
            raise EnvironmentUnfit(f"{launcher}'s variables are no numbers: {error}") from None
        if not 0 <= rank < size or local < 1:
            raise EnvironmentUnfit(f"{launcher}'s variables contradict each other: rank {rank} of {size}")
        return Launched(rank, size, local)
    return Launched(0, 1, 1)


def _slurm_tasks_on_host(environ: Mapping[str, str]) -> int:
    """`SLURM_STEP_TASKS_PER_NODE` is such as `4(x2),3`; the largest is taken, as which is ours is not worth knowing."""
    groups = environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(",")
    return max(int(group.partition("(")[0]) for group in groups)
