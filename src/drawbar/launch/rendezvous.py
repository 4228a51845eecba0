"""Where the ranks meet: the address and port of rank 0's store, found by whatever their launcher tells."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

from drawbar.errors import EnvironmentUnfit
from drawbar.world import World

PORTS = range(20_000, 32_000)
"""For rank 0's store. Below the kernel's range for outgoing connections."""


class Rendezvous(NamedTuple):
    address: str
    port: int


def rendezvous(world: World, environ: Mapping[str, str] = os.environ) -> Rendezvous:
    """MASTER_ADDR and MASTER_PORT where they are set; of a Slurm step its first host; of Open MPI what rank 0 says.

    Raises EnvironmentUnfit where nothing tells.
    """
    port = environ.get("MASTER_PORT", "")
    if port and not port.isdecimal():
        raise EnvironmentUnfit(f"MASTER_PORT is {port!r}: expected a number")
    if environ.get("MASTER_ADDR"):
        return Rendezvous(environ["MASTER_ADDR"], int(port) if port else _port_of_job(environ))
    if world.launcher == "srun":
        return Rendezvous(first_host(environ["SLURM_STEP_NODELIST"]), int(port) if port else _port_of_job(environ))
    return _told_by_rank_0()


def _port_of_job(environ: Mapping[str, str]) -> int:
    """Equal on all ranks of a job step, and seldom that of another."""
    step = int(environ.get("SLURM_STEP_ID", "0") or 0)
    return PORTS[(int(environ.get("SLURM_JOB_ID", "0") or 0) * 31 + step) % len(PORTS)]


def first_host(nodelist: str) -> str:
    """Of Slurm's notation: `node[3-5,8],other` begins with `node3`."""
    head = nodelist.partition(",")[0] if "[" not in nodelist.partition(",")[0] else nodelist
    stem, bracket, rest = head.partition("[")
    if not bracket:
        return stem
    numbers, _, tail = rest.partition("]")
    return stem + numbers.partition(",")[0].partition("-")[0] + tail.partition(",")[0]


def _told_by_rank_0() -> Rendezvous:
    """Open MPI gives its ranks no address of rank 0: MPI itself must carry it."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise EnvironmentUnfit(
            f"ranks of a mpirun of your own need mpi4py to find rank 0: {error}",
            hint="pip install 'drawbar[mpi]', or mpirun -x MASTER_ADDR=first-host -x MASTER_PORT=29500",
        ) from None
    mine = None
    if MPI.COMM_WORLD.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            mine = (socket.gethostname(), probe.getsockname()[1])
    address, port = MPI.COMM_WORLD.bcast(mine, root=0)
    return Rendezvous(address, port)
