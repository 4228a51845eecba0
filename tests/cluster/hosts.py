"""A cluster on one machine: each host a network namespace with its own name, addresses and rate-limited links.

    node1 .. nodeN      eth0 10.90.0.1..   storage and control
                        rail0 10.91.0.1..  rail1 10.92.0.1..   data links, as two InfiniBand adapters would be
    store1 .. storeM    eth0 10.90.0.101..

Everything hangs on three bridges in a namespace of its own, so that no address exists outside and several clusters
stand side by side. Namespaces are named after the process that made them: what a killed one left is removed by the
next. Needs root and iproute2. A host shares file system, process table and clock with the others unless told otherwise.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROGRAMS = ("ip", "tc", "unshare", "nsenter")
LINKS = ("eth0", "rail0", "rail1")
_NETWORKS = {"eth0": "10.90.0", "rail0": "10.91.0", "rail1": "10.92.0"}
_FIRST_STORE = 101
_PREFIX = "drawbar"
_DEADLINE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Host:
    name: str
    """As it calls itself, and as the others know it."""
    namespace: str
    number: int
    """Last part of its addresses."""

    def address(self, link: str = "eth0") -> str:
        return f"{_NETWORKS[link]}.{self.number}"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    nodes: tuple[Host, ...]
    stores: tuple[Host, ...]
    folder: Path
    """For what belongs to the cluster: agent, hosts files, the store's data."""
    switch: str
    """The namespace with the bridges."""

    def host(self, name: str) -> Host:
        return next(host for host in (*self.nodes, *self.stores) if host.name == name)

    @property
    def agent(self) -> Path:
        """`AGENT [OPTIONS] HOST COMMAND…` runs a command on a host, as ssh would: Open MPI's launch agent."""
        return self.folder / "agent"

    def on(self, host: Host) -> list[str]:
        """What to put before a command so that it runs on `host`."""
        return [str(self.folder / "enter"), host.name]

    def make_private(self, folder: Path) -> None:
        """From now on each host finds a folder of its own under this path, as if file systems were not shared."""
        with (self.folder / "private").open("a") as file:
            file.write(f"{folder}\n")

    def seen_by(self, host: Host, path: Path) -> Path:
        """Where a path in a private folder of `host` lies for everybody else."""
        return self.folder / "private-of" / host.name / path.relative_to("/")

    def run(
        self, host: Host, command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.on(host), *command],
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )

    def popen(
        self, host: Host, command: Sequence[str], *, env: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(
                [*self.on(host), *command], env=dict(env), stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def limit(self, host: Host, link: str, mbit: float) -> None:
        """Lets at most `mbit` per second pass in each direction; 0: whatever the machine can."""
        for namespace, device in ((host.namespace, link), (self.switch, _port(host, link))):
            with suppress(subprocess.CalledProcessError):
                _ip_netns(namespace, "tc", "qdisc", "del", "dev", device, "root")
            if mbit:
                # A burst of 10 ms, and no less than one unsegmented packet; a queue of 100 ms.
                burst = max(70_000, int(mbit * 1e6 / 8 * 0.01))
                rate = ("rate", f"{mbit}mbit", "burst", str(burst), "latency", "100ms")
                _ip_netns(namespace, "tc", "qdisc", "add", "dev", device, "root", "tbf", *rate)

    def set_link(self, host: Host, link: str, *, up: bool) -> None:
        """Pulls a cable, or plugs it in again."""
        _ip_netns(self.switch, "ip", "link", "set", _port(host, link), "up" if up else "down")

    def link_bytes(self, host: Host, link: str) -> tuple[int, int]:
        """Received and sent so far, as the host's kernel counts them."""
        folder = f"/sys/class/net/{link}/statistics"
        text = _ip_netns(host.namespace, "cat", f"{folder}/rx_bytes", f"{folder}/tx_bytes")
        received, sent = text.split()
        return int(received), int(sent)

    def processes(self) -> list[psutil.Process]:
        """All that run on any host."""
        return [process for host in (*self.nodes, *self.stores) for process in _processes(host.namespace)]


def missing() -> str:
    """Why no cluster can be made here; empty where one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    programs = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None]
    return f"no {', '.join(programs)}: Debian's iproute2 and util-linux" if programs else ""


@contextmanager
def running_cluster(
    num_nodes: int = 8, num_stores: int = 0, *, rail_mbit: float = 0, storage_mbit: float = 0
) -> Iterator[Cluster]:
    """`rail_mbit` limits each data link of each node, `storage_mbit` each node's eth0; 0: no limit."""
    remove_orphans()
    base = f"{_PREFIX}-{os.getpid()}-{_started(os.getpid())}-{time.monotonic_ns() % 1_000_000}"
    nodes = tuple(Host(name=f"node{n}", namespace=f"{base}-node{n}", number=n) for n in range(1, num_nodes + 1))
    stores = tuple(
        Host(name=f"store{n}", namespace=f"{base}-store{n}", number=_FIRST_STORE + n - 1)
        for n in range(1, num_stores + 1)
    )
    with tempfile.TemporaryDirectory(prefix="drawbar-cluster-") as folder:
        cluster = Cluster(nodes=nodes, stores=stores, folder=Path(folder), switch=f"{base}-switch")
        try:
            _make(cluster)
            for node in nodes:
                for link, mbit in (("eth0", storage_mbit), ("rail0", rail_mbit), ("rail1", rail_mbit)):
                    if mbit:
                        cluster.limit(node, link, mbit)
            yield cluster
        finally:
            for namespace in (*(host.namespace for host in (*nodes, *stores)), cluster.switch):
                _remove(namespace)


def _make(cluster: Cluster) -> None:
    _ip("netns", "add", cluster.switch)
    for link in LINKS:
        _ip("-n", cluster.switch, "link", "add", _bridge(link), "type", "bridge")
        _ip("-n", cluster.switch, "link", "set", _bridge(link), "up")
    everyone = (*cluster.nodes, *cluster.stores)
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address()} {host.name}\n" for host in everyone)
    for host in everyone:
        _ip("netns", "add", host.namespace)
        _ip("-n", host.namespace, "link", "set", "lo", "up")
        for link in LINKS if host in cluster.nodes else LINKS[:1]:
            port = _port(host, link)
            _ip(
                "-n", cluster.switch, "link", "add", port, "type", "veth", "peer", "name", link, "netns", host.namespace
            )
            _ip("-n", cluster.switch, "link", "set", port, "master", _bridge(link), "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address(link)}/24", "dev", link)
            _ip("-n", host.namespace, "link", "set", link, "up")
        etc = _etc(host.namespace)
        etc.mkdir(parents=True)
        (etc / "hosts").write_text(names)
    _write_program(
        cluster.folder / "enter",
        f"""#!/bin/sh
# HOST COMMAND...: runs a command on a host of the test cluster, in its network and under its name.
host=$1; shift
exec ip netns exec "{cluster.switch.removesuffix("switch")}$host" unshare --uts "{cluster.folder}/inside" "$host" "$@"
""",
    )
    (cluster.folder / "private").touch()
    _write_program(
        cluster.folder / "inside",
        f"""#!/bin/sh
# The second half of enter, in namespaces of its own for network, mounts and name.
host=$1; shift
hostname "$host"
while read -r folder; do
  mkdir -p "{cluster.folder}/private-of/$host$folder" "$folder"
  mount --bind "{cluster.folder}/private-of/$host$folder" "$folder"
done < "{cluster.folder}/private"
exec "$@"
""",
    )
    _write_program(
        cluster.agent,
        f"""#!/bin/bash
# [OPTIONS] HOST COMMAND...: what ssh would do with a command line, for a host of the test cluster.
while [[ $1 == -* ]]; do shift; done
host=$1; shift
exec {cluster.folder}/enter "$host" bash -c "$*"
""",
    )


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _bridge(link: str) -> str:
    return f"br-{link}"


def _port(host: Host, link: str) -> str:
    """The switch's end of a host's cable."""
    return f"{host.name}-{link}"


def _etc(namespace: str) -> Path:
    """`ip netns exec` puts the files in it in the place of those in /etc."""
    return Path("/etc/netns") / namespace


def _remove(namespace: str) -> None:
    processes = _processes(namespace)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(number)
        _, processes = psutil.wait_procs(processes, timeout=5)
    with suppress(subprocess.CalledProcessError):
        _ip("netns", "del", namespace)
    shutil.rmtree(_etc(namespace), ignore_errors=True)


def remove_orphans() -> None:
    """Removes clusters whose makers are dead."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0] if line else ""
        parts = name.split("-")
        if parts[0] == _PREFIX and len(parts) == 5 and _started(int(parts[1])) != int(parts[2]):
            _remove(name)


def _started(pid: int) -> int:
    """Start time in clock ticks since boot; 0: no such process. With the pid it names a process for good."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def _processes(namespace: str) -> list[psutil.Process]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=_DEADLINE_S)
    found = []
    for pid in done.stdout.split():
        with suppress(psutil.Error):
            found.append(psutil.Process(int(pid)))
    return found


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _ip_netns(namespace: str, *command: str) -> str:
    return _run("ip", "netns", "exec", namespace, *command)


def _run(*command: str) -> str:
    env = {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DEADLINE_S, env=env).stdout
