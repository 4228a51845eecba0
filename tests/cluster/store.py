"""An object store on the storage hosts of a cluster: the server on the first, a gateway on each, at ECS's port."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from drawbar.storage import seaweed
from tests.cluster.hosts import Cluster, Host

HTTP_PORT = 9020
"""ECS's own for S3 over HTTP."""
KEY, SECRET = "imagenet", "mysecretkey"
_DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Store:
    endpoints: tuple[str, ...]
    """One per storage host; they exist on the cluster's hosts only."""

    @property
    def env(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


@contextmanager
def running_store(cluster: Cluster) -> Iterator[Store]:
    folder = cluster.folder / "store"
    folder.mkdir()
    for name, text in seaweed.CONFIG_FILES.items():
        (folder / name).write_text(text)
    identity = {"name": KEY, "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    first = cluster.stores[0]
    # Not the usual ports: the server puts sockets into /tmp that are named after them, and clusters share that.
    free = iter(seaweed.free_block(6, avoid=()))
    ports = {role: {"port": next(free), "port.grpc": next(free)} for role in ("master", "volume", "filer")}
    filer = ports["filer"]
    env = {"PATH": os.defpath + ":/usr/sbin", "HOME": str(folder)}
    children: list[subprocess.Popen[bytes]] = []

    def start(host: Host, name: str, *arguments: str) -> None:
        command = [
            # In the store's folder: names of sockets must be short.
            *("sh", "-c", f'cd {folder} && exec "$@"', "sh", seaweed._weed(), "-logtostderr=true"),
            *(arguments[0], f"-ip={host.address()}", f"-ip.bind={host.address()}"),
            *arguments[1:],
        ]
        children.append(cluster.popen(host, command, env=env, log=folder / f"{name}.log"))

    start(
        first,
        "server",
        *("server", "-dir=.", "-filer", "-s3=false", "-master.peers=none", "-master.telemetry=false"),
        *(f"-{role}.{kind}={port}" for role, pair in ports.items() for kind, port in pair.items()),
        *("-master.volumeSizeLimitMB=64", "-volume.max=10000", "-volume.preStopSeconds=0"),
        *("-filer.localSocket=server.sock",),
    )
    try:
        _wait(cluster, f"http://{first.address()}:{filer['port']}/", children)
        for host in cluster.stores:
            start(
                host,
                f"gateway-{host.name}",
                *("s3", f"-port={HTTP_PORT}", "-config=s3.json", "-iam=false"),
                f"-filer={first.address()}:{filer['port']}.{filer['port.grpc']}",
                *(f"-localSocket={host.name}.sock", "-port.lance=0", "-port.iceberg=0"),
            )
        store = Store(endpoints=tuple(f"http://{host.address()}:{HTTP_PORT}" for host in cluster.stores))
        for endpoint in store.endpoints:
            _wait(cluster, endpoint, children)
        yield store
    finally:
        for child in children:
            child.kill()
            child.wait()
        for role, pair in ports.items():
            Path(f"/tmp/seaweedfs-{role}-grpc-{pair['port.grpc']}.sock").unlink(missing_ok=True)


def _wait(cluster: Cluster, url: str, children: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while cluster.run(cluster.stores[0], ["curl", "-s", "-o", "/dev/null", "--max-time", "5", url]).returncode != 0:
        logs = sorted((cluster.folder / "store").glob("*.log"))
        last = {log.name: log.read_text(errors="replace")[-500:] for log in logs}
        if any(child.poll() is not None for child in children) or time.monotonic() > deadline:
            raise RuntimeError(f"the store did not start: {url}: {last}")
        time.sleep(0.1)
