"""A Slurm cluster of its own on this host for as long as a `with` block lasts: munged, slurmctld, a slurmd per node.

Needs the programs of Debian's `slurm-wlm` and `munge`, no service and no configuration of the system. All daemons
stay in the foreground as children of this process, are stopped by process id, and are ended by the kernel where this
process is killed.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "scancel", "setpriv")

_DEADLINE_S = 60.0
_STOP_S = 10.0

_CONFIG = """\
ClusterName=drawbar
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}

# Whoever runs the tests owns all of it. By default slurmctld looks for a user `slurm`.
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket

# By default under /var, where a real cluster's may lie; %n is the node's name: several slurmd share this host.
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid

# Process groups and no binding: cgroups cannot be written to in most containers.
ProctrackType=proctrack/pgid
TaskPlugin=task/none
# No MPI library is to be found and no switch to be asked.
MpiDefault=none
SwitchType=switch/none
# A node that registers is in use at once, and is never put down for what it has less of than said here.
ReturnToService=2
SlurmdParameters=config_overrides
# A killed task ends its step within this many seconds.
KillWait=5

{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=10
"""


@dataclass(frozen=True)
class Slurm:
    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """For `srun` and its kin, beside the usual environment."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if _which(name) is None]


def _which(name: str) -> str | None:
    # Daemons are in sbin, which is not in everybody's path.
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextmanager
def running_slurm(num_nodes: int = 2, cpus_per_node: int = 4) -> Iterator[Slurm]:
    """Nodes n1, n2, ... that are idle; more CPUs than the host has may be claimed. Raises RuntimeError with the
    daemons' last words where they are not idle in time.
    """
    # Not below pytest's folder: the socket's path must be short, and munged wants its folders open to be looked into.
    folder = Path(tempfile.mkdtemp(prefix="drawbar-slurm-", dir="/tmp"))
    cluster = Slurm(folder)
    try:
        with ExitStack() as daemons:
            _write_config(folder, num_nodes, cpus_per_node)
            config = str(folder / "slurm.conf")
            files = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("key-file", "socket", "pid-file")]
            files += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
            # --force: a key below /tmp is not what munged likes to see.
            daemons.enter_context(_daemon(folder, "munged", "--foreground", "--force", *files))
            _wait_for((folder / "munge.socket").exists, folder)
            daemons.enter_context(_daemon(folder, "slurmctld", "-D", "-f", config))
            for node in range(1, num_nodes + 1):
                daemons.enter_context(_daemon(folder, "slurmd", "-D", "-N", f"n{node}", "-f", config))
            _wait_for(lambda: _node_states(cluster) == ["idle"] * num_nodes, folder)
            # The steps end before the daemons do: they have something to tell them.
            daemons.callback(_end_steps, cluster)
            yield cluster
    finally:
        for process in processes_of(folder):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _write_config(folder: Path, num_nodes: int, cpus_per_node: int) -> None:
    folder.chmod(0o711)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    (folder / "state").mkdir()
    ports = _free_ports(1 + num_nodes)
    nodes = [
        f"NodeName=n{number} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={cpus_per_node}"
        for number, port in enumerate(ports[1:], 1)
    ]
    user = pwd.getpwuid(os.geteuid()).pw_name
    text = _CONFIG.format(folder=folder, user=user, ports=ports, nodes="\n".join(nodes))
    (folder / "slurm.conf").write_text(text)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def _daemon(folder: Path, program: str, *arguments: str) -> Iterator[None]:
    path = _which(program)
    assert path is not None, program
    number = len(list(folder.glob("*.out")))
    with (folder / f"{number}-{program}.out").open("wb") as out:
        # setpriv: the kernel ends it with us. A session of its own: Ctrl-C is for us, and we stop all in order.
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", path, *arguments],
            cwd=folder,
            env={**os.environ, "SLURM_CONF": str(folder / "slurm.conf")},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _node_states(cluster: Slurm) -> list[str]:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%t"],
        env={**os.environ, **cluster.env},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
    )
    return done.stdout.split()


def _wait_for(condition: Callable[[], bool], folder: Path) -> None:
    end_t = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > end_t:
            texts = [
                f"{path.name}: {path.read_text(errors='replace')[-1000:]}" for path in sorted(folder.glob("*.out"))
            ]
            raise RuntimeError("\n".join(["Slurm does not start", *texts]))
        time.sleep(0.05)


def _end_steps(cluster: Slurm) -> None:
    """What a failed test left running, and what a step's own daemon still has to do."""
    user = str(os.geteuid())
    subprocess.run(
        ["scancel", "--user", user], env={**os.environ, **cluster.env}, capture_output=True, timeout=_DEADLINE_S
    )
    end_t = time.monotonic() + _STOP_S
    while time.monotonic() < end_t and any(_is_step(process) for process in processes_of(cluster.folder)):
        time.sleep(0.05)


def _is_step(process: psutil.Process) -> bool:
    try:
        return str(process.name()).startswith("slurmstepd")
    except psutil.NoSuchProcess:
        return False


def processes_of(folder: Path) -> list[psutil.Process]:
    """Living processes of this cluster: its daemons by their working directory (slurmstepd overwrites its environment),
    tasks by the configuration that they were started under.
    """
    found = []
    for process in psutil.process_iter():
        try:
            ours = (
                process.cwd().startswith(str(folder)) or process.environ().get("SLURM_CONF") == f"{folder}/slurm.conf"
            )
        except (psutil.Error, OSError):
            continue
        if ours and process.pid != os.getpid():
            found.append(process)
    return found
