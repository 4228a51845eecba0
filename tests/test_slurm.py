"""The tests' own Slurm leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm import Slurm, processes_of

INTERRUPTED = """
import os, subprocess
from tests.slurm import running_slurm

with running_slurm() as cluster:
    print(cluster.folder, flush=True)
    task = ["sh", "-c", "echo started; exec sleep 300"]
    subprocess.run(["srun", "-N2", "-n3", *task], env={**os.environ, **cluster.env})
"""


@pytest.mark.run
def test_ctrl_c_in_the_middle_of_a_step(slurm: Slurm) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        start_new_session=True,
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert [process.stdout.readline() for _ in range(3)] == ["started\n"] * 3
    names = sorted(each.name() for each in processes_of(folder))
    assert names.count("slurmd") == 2
    assert names.count("sleep") == 3
    assert folder != slurm.folder  # the two do not meet
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, stderr = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in stderr
    assert processes_of(folder) == []
    assert not folder.exists()
    assert len(processes_of(slurm.folder)) >= 4
