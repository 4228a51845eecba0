"""Who am I: the identity of this process among the ranks, read once from the launcher's variables and passed on.

No other module reads RANK and its kin. Where one launcher was started by another, the inner one is right: torchrun
inside srun, mpirun inside an allocation. A batch script or a shell of an allocation has Slurm's variables too, but no
step's, and is no rank.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
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
    launcher: str = ""
    """`torchrun`, `mpirun` (and all that speak PMI) or `srun`; empty: started by none."""

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> World:
        """By the variables of torchrun, Open MPI, MPICH's kin (PMI) or srun; else rank 0 of 1. Needs no torch, no MPI.

        Raises EnvironmentUnfit where the variables are there but make no sense.
        """
        node = socket.gethostname()
        for names in _LAUNCHERS:
            if names.rank not in environ or names.size not in environ:
                continue
            try:
                world = cls(
                    rank=int(environ[names.rank]),
                    world_size=int(environ[names.size]),
                    local_rank=int(environ.get(names.local_rank, "0")),
                    local_world_size=names.local_size(environ),
                    node=node,
                    launcher=names.launcher,
                )
            except ValueError as error:
                raise EnvironmentUnfit(f"{names.launcher}'s variables are no numbers: {error}") from None
            ranks_fit = 0 <= world.rank < world.world_size
            if not ranks_fit or not 0 <= world.local_rank < world.local_world_size <= world.world_size:
                raise EnvironmentUnfit(
                    f"{names.launcher}'s variables contradict each other: rank {world.rank} of {world.world_size}, "
                    f"on its host {world.local_rank} of {world.local_world_size}"
                )
            return world
        return cls(rank=0, world_size=1, local_rank=0, local_world_size=1, node=node)


@dataclass(frozen=True)
class _Names:
    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: Callable[[Mapping[str, str]], int]
    """Ranks on this host; 1 where the launcher does not say."""


def _number(name: str) -> Callable[[Mapping[str, str]], int]:
    return lambda environ: int(environ.get(name, "1"))


def _slurm_tasks_on_host(environ: Mapping[str, str]) -> int:
    """`SLURM_STEP_TASKS_PER_NODE` is such as `4(x2),3`: two hosts of 4 tasks, then one of 3."""
    hosts: list[int] = []
    for group in environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        tasks, _, repeated = group.partition("(x")
        hosts += [int(tasks)] * int(repeated.rstrip(")") or "1")
    host = int(environ.get("SLURM_NODEID", "0"))
    return hosts[host] if 0 <= host < len(hosts) else max(hosts)


_LAUNCHERS = (
    # The inner ones first.
    _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", _number("LOCAL_WORLD_SIZE")),
    _Names(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        _number("OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    _Names("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", _number("MPI_LOCALNRANKS")),
    _Names("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", _slurm_tasks_on_host),
)
