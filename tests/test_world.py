from __future__ import annotations

import pytest

from drawbar.errors import EnvironmentUnfit
from drawbar.world import World

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
SRUN = {
    "SLURM_PROCID": "8",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("", 0, 1, 0, 1)),
        (TORCHRUN, ("torchrun", 3, 8, 3, 4)),
        (OPEN_MPI, ("mpirun", 5, 6, 1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ("mpirun", 1, 2, 0, 1)),
        (SRUN, ("srun", 8, 9, 0, 1)),
        ({**SRUN, "SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NODEID": "1"}, ("srun", 6, 9, 2, 4)),
        # torchrun inside srun; mpirun inside an allocation
        ({**SRUN, **TORCHRUN}, ("torchrun", 3, 8, 3, 4)),
        ({**SRUN, **OPEN_MPI}, ("mpirun", 5, 6, 1, 2)),
        # a batch script: no step, so no rank
        ({"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NODEID": "0"}, ("", 0, 1, 0, 1)),
        ({"RANK": "3"}, ("", 0, 1, 0, 1)),
    ],
)
def test_the_innermost_launcher_says_who_we_are(
    variables: dict[str, str], expected: tuple[str, int, int, int, int]
) -> None:
    world = World.detect(variables)
    assert (world.launcher, world.rank, world.world_size, world.local_rank, world.local_world_size) == expected


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "3", "WORLD_SIZE": "3"},
        {"RANK": "-1", "WORLD_SIZE": "3"},
        {"RANK": "one", "WORLD_SIZE": "3"},
        {**TORCHRUN, "LOCAL_RANK": "4"},
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "9"},
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "x"},
    ],
)
def test_variables_that_make_no_sense_are_refused(variables: dict[str, str]) -> None:
    with pytest.raises(EnvironmentUnfit, match="variables"):
        World.detect(variables)
