"""Command lines of the launchers: pure functions from the recipe to what a person could type.

No secret stands on them: what ranks need beside their run directory travels as environment, by the launcher's own
means, and a command line names the variables only.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from drawbar.config import Launch
from drawbar.errors import InputError

RANK_MODULE = "drawbar.launch.rank"

FORWARDED = ("AWS_", "S3_", "GOOGLE_", "AZURE_", "NCCL_", "GLOO_", "OMP_", "MKL_", "MALLOC_", "DRAWBAR_")
"""Beginnings of names: what of the environment decides how a rank runs, and so must be the same on every host."""
_FORWARDED_NAMES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "LD_LIBRARY_PATH",
    "PATH",
    "NO_PROXY",
    "CUDA_VISIBLE_DEVICES",
)


class HostSlots(NamedTuple):
    host: str
    slots: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a launcher is asked to start."""

    launch: Launch
    run_dir: Path
    """Absolute: the same on every host."""
    env: Mapping[str, str]
    """The ranks' whole environment."""
    program: Sequence[str] = ()
    """What each rank runs; empty: this Python with `drawbar.launch.rank RUN_DIR`."""

    @property
    def rank_program(self) -> list[str]:
        return list(self.program) or [sys.executable, "-u", "-m", RANK_MODULE, str(self.run_dir)]


def forwarded(job: Job) -> list[str]:
    """Names of the variables that ranks on other hosts must have too."""
    wanted = set(job.launch.forward)
    missing = sorted(wanted - set(job.env))
    if missing:
        raise InputError(
            f"launch.forward names {', '.join(missing)}, which the environment lacks",
            hint="set it before the command, or leave it out",
        )
    return sorted(name for name in job.env if name.startswith(FORWARDED) or name in _FORWARDED_NAMES or name in wanted)


def parse_hosts(launch: Launch) -> list[HostSlots]:
    """`launch.hosts` or the lines of `launch.host_file`, in order.

    Each is `host`, `host:slots` or, in a file, Open MPI's `host slots=2`; one slot where none is said.

    Raises InputError.
    """
    lines = list(launch.hosts)
    if launch.host_file:
        try:
            text = Path(launch.host_file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read launch.host_file {launch.host_file}: {error}") from None
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    hosts = [_parse_host(line) for line in lines if line]
    if (launch.hosts or launch.host_file) and not hosts:
        raise InputError(f"launch.host_file {launch.host_file} names no host")
    names = [host.host for host in hosts]
    if len(set(names)) < len(names):
        raise InputError(f"host {next(name for name in names if names.count(name) > 1)} stands there twice")
    return hosts


def _parse_host(text: str) -> HostSlots:
    words = text.replace("slots=", ":").replace(" ", "")
    host, _, slots = words.partition(":")
    if not host or host.startswith("-") or (slots and not slots.isdecimal()) or slots == "0":
        raise InputError(f"host {text!r} is none: expected host or host:slots, such as node1:2")
    return HostSlots(host, int(slots or 1))


def placement(launch: Launch) -> list[HostSlots]:
    """Ranks per host: slots filled host by host, or one rank per host in turn (`launch.map_by`).

    Raises InputError where there are fewer slots than ranks.
    """
    hosts = parse_hosts(launch)
    total = sum(host.slots for host in hosts)
    if total < launch.ranks:
        raise InputError(
            f"launch.ranks is {launch.ranks}, but the hosts have {total} slots: "
            + ", ".join(f"{host.host}:{host.slots}" for host in hosts),
            hint="more slots per host (host:2), more hosts, or fewer ranks",
        )
    placed = [0] * len(hosts)
    for _ in range(launch.ranks):
        free = [i for i, host in enumerate(hosts) if placed[i] < host.slots]
        placed[free[0] if launch.map_by == "slot" else min(free, key=lambda i: placed[i])] += 1
    return [HostSlots(host.host, count) for host, count in zip(hosts, placed, strict=True) if count]


def local(job: Job) -> list[str]:
    """torchrun on this host, with a rendezvous on loopback at a port that it finds free."""
    return [
        *_TORCHRUN,
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("--nnodes", "1", "--nproc-per-node", str(job.launch.ranks), "--max-restarts", "0"),
        # How often torchrun looks at its ranks; its default of ten times a second costs a measurable share of a core.
        *("--monitor-interval", "1"),
        *("-m", RANK_MODULE, str(job.run_dir)),
    ]


_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def torchrun_lines(job: Job, master_port: int) -> dict[str, list[str]]:
    """For each host the command that starts its ranks: torchrun does not reach other hosts itself."""
    hosts = placement(job.launch)
    counts = {host.slots for host in hosts}
    if len(counts) > 1:
        raise InputError(
            "torchrun starts equally many ranks on every host, not "
            + ", ".join(f"{host.slots} on {host.host}" for host in hosts),
            hint='equal slots, or launch.launcher = "mpirun"',
        )
    return {
        host.host: [
            *_TORCHRUN,
            *("--nnodes", str(len(hosts)), "--node-rank", str(number), "--nproc-per-node", str(host.slots)),
            *("--master-addr", hosts[0].host, "--master-port", str(master_port), "--max-restarts", "0"),
            *("--monitor-interval", "1", "-m", RANK_MODULE, str(job.run_dir)),
        ]
        for number, host in enumerate(hosts)
    }


def mpirun(job: Job, *, program: str, major_version: int, is_root: bool, only_host: str = "") -> list[str]:
    """Open MPI's, version 4 or 5. `only_host`: one process there instead of the ranks."""
    launch = job.launch
    dash = "-" if major_version < 5 else "--"
    placed = [HostSlots(only_host, 1)] if only_host else placement(launch)
    command = [program, "-n", str(1 if only_host else launch.ranks)]
    if is_root:
        command.append("--allow-run-as-root")
    command += ["--host", ",".join(f"{host.host}:{host.slots}" for host in placed)]
    if not only_host:
        command += [f"{dash}map-by", launch.map_by, f"{dash}bind-to", launch.bind_to]
        if launch.report_bindings:
            command.append(f"{dash}report-bindings")
    command += launch.flags
    for name in forwarded(job):
        command += ["-x", name]
    return [*command, *job.rank_program]


def srun(job: Job, *, only_host: str = "") -> list[str]:
    """Slurm's, inside an allocation or making one. It hands on the whole environment by itself."""
    launch = job.launch
    command = ["srun", f"--ntasks={1 if only_host else launch.ranks}", "--export=ALL", "--kill-on-bad-exit=1"]
    if only_host:
        command += ["--nodes=1", f"--nodelist={only_host}", "--overlap"]
    elif launch.hosts or launch.host_file:
        placed = placement(launch)
        command += [f"--nodes={len(placed)}", f"--nodelist={','.join(host.host for host in placed)}"]
        if len({host.slots for host in placed}) == 1:
            command.append(f"--ntasks-per-node={placed[0].slots}")
    if not only_host:
        command.append(f"--distribution={'block' if launch.map_by == 'slot' else 'cyclic'}")
        if launch.bind_to == "none":
            command.append("--cpu-bind=none")
    return [*command, *launch.flags, *job.rank_program]


def shown(command: Sequence[str]) -> str:
    """As a person could type it."""
    return shlex.join(command)
