"""Drawbar's reader against other S3 clients and against the gateways' own limit, bytes alone.

    python bench/storage_peers.py FOLDER [--rounds 5] [--endpoints 5]

FOLDER holds a set (`bench/input_peers.py --dir FOLDER` makes one), which is put into an embedded store with that many
gateways. Every client reads all its bytes by ranged GETs of 8 MiB, four at a time, spread over the gateways;
s3torchconnector reads whole shards, as its data sets do. In turn, the order turned each round; medians. Client CPU is
that of the client's process, Python included; server CPU that of all the store's processes meanwhile. `wrk`, where it
is installed, gets the same ranges and drops them.

boto3, s3dlio and s3torchconnector are measured where they are installed: in Drawbar's environment, or in the folder
that `scripts/peers` makes (DRAWBAR_S3_PEERS). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import obstore
import psutil

from drawbar.config import Storage
from drawbar.journal import Request
from drawbar.launch.environment import EMBEDDED_ENDPOINTS
from drawbar.storage import embedded
from drawbar.storage.environment import Credentials
from drawbar.storage.reader import CountedReader
from drawbar.storage.stores import open_place

REPOSITORY = Path(__file__).resolve().parents[1]
REQUEST_BYTES = 8 << 20
REQUESTS_AT_ONCE = 4
BUCKET, PREFIX = "bench", "set"
WRK_S = 4


class Part(NamedTuple):
    key: str
    start: int
    end: int


Get = Callable[[int, Part], int]
"""Through the endpoint of that number; the bytes that it put into memory."""


@dataclass(frozen=True)
class Clients:
    store: embedded.EmbeddedStore
    counted: Counter[str]
    """Bytes of Drawbar's requests, by endpoint."""

    def drawbar(self) -> Get:
        credentials = Credentials.from_environment()
        storage = Storage(policy="round-robin")
        places = [open_place(f"s3://{BUCKET}/{PREFIX}", url, credentials, storage) for url in self.store.endpoints]

        def record(request: Request) -> None:
            self.counted[request.endpoint] += request.got_bytes

        reader = CountedReader(places, storage, record)
        return lambda number, part: len(reader.get_view(*part))

    def obstore(self) -> Get:
        stores = [
            obstore.store.S3Store(
                BUCKET, endpoint=url, client_options={"allow_http": True}, virtual_hosted_style_request=False
            )
            for url in self.store.endpoints
        ]
        return lambda number, part: len(obstore.get_range(stores[number], part.key, start=part.start, end=part.end))

    def boto3(self) -> Get:
        boto3, config = import_module("boto3"), import_module("botocore.config")
        settings = config.Config(max_pool_connections=2 * REQUESTS_AT_ONCE, s3={"addressing_style": "path"})
        clients = [boto3.client("s3", endpoint_url=url, config=settings) for url in self.store.endpoints]

        def get(number: int, part: Part) -> int:
            ranged = f"bytes={part.start}-{part.end - 1}"
            return len(clients[number].get_object(Bucket=BUCKET, Key=part.key, Range=ranged)["Body"].read())

        return get

    def s3dlio(self) -> Get:
        # One endpoint only, that of AWS_ENDPOINT_URL.
        s3dlio: Any = import_module("s3dlio")
        return lambda number, part: len(
            memoryview(s3dlio.get_range(f"s3://{BUCKET}/{part.key}", part.start, part.end - part.start))
        )

    def s3torchconnector(self) -> Get:
        package: Any = import_module("s3torchconnector._s3client")
        settings = package.S3ClientConfig(force_path_style=True)
        clients = [
            package.S3Client("us-east-1", endpoint=url, s3client_config=settings) for url in self.store.endpoints
        ]
        return lambda number, part: len(clients[number].get_object(BUCKET, part.key).read())


def parts_of(sizes: dict[str, int], request_bytes: int) -> list[Part]:
    return [
        Part(key, start, min(size, start + request_bytes))
        for key, size in sizes.items()
        for start in range(0, size, request_bytes)
    ]


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(spent.user + spent.system for spent in times))


def server_processes(store: embedded.EmbeddedStore) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in (store.server_pid, *store.gateway_pids)]


def measure_clients(store: embedded.EmbeddedStore, sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    """CPU seconds per GB of each client and of the store meanwhile, and MB/s."""
    counted: Counter[str] = Counter()
    known = Clients(store, counted)
    names = ["drawbar", "obstore", *filter(find_spec, ("boto3", "s3dlio", "s3torchconnector"))]
    clients: dict[str, Get] = {name: getattr(known, name)() for name in names}
    servers, gigabytes = server_processes(store), sum(sizes.values()) / 1e9
    figures: dict[str, dict[str, list[float]]] = {
        name: {"client": [], "server": [], "mb_per_s": []} for name in clients
    }
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        for number in range(rounds + 1):
            for name in names[:: 1 if number % 2 else -1]:
                parts = parts_of(sizes, 1 << 40 if name == "s3torchconnector" else REQUEST_BYTES)
                before = time.process_time(), cpu_s(servers), time.perf_counter()
                got = sum(pool.map(clients[name], cycle(range(len(store.endpoints))), parts))
                wall_s = time.perf_counter() - before[2]
                if got != sum(sizes.values()):
                    sys.exit(f"{name} has read {got} bytes of {sum(sizes.values())}")
                if number:  # the first makes connections
                    figures[name]["client"].append((time.process_time() - before[0]) / gigabytes)
                    figures[name]["server"].append((cpu_s(servers) - before[1]) / gigabytes)
                    figures[name]["mb_per_s"].append(gigabytes * 1000 / wall_s)
    rate = {name: median(found["mb_per_s"]) for name, found in figures.items()}
    return {
        "client_cpu_s_per_gb": {name: median(found["client"]) for name, found in figures.items()},
        "client_cpu_over_obstore": median(
            ours / theirs
            for ours, theirs in zip(figures["drawbar"]["client"], figures["obstore"]["client"], strict=True)
        ),
        "server_cpu_s_per_gb": median(figures["drawbar"]["server"]),
        "read_mb_per_s": rate,
        "read_over_obstore": median(
            ours / theirs
            for ours, theirs in zip(figures["drawbar"]["mb_per_s"], figures["obstore"]["mb_per_s"], strict=True)
        ),
        "endpoint_share": [counted[url] / sum(counted.values()) for url in store.endpoints],
    }


def measure_wrk(store: embedded.EmbeddedStore, sizes: dict[str, int], folder: Path) -> float | None:
    """MB/s of one `wrk` a gateway, all at once, over the same ranges; None where it is not installed."""
    if not shutil.which("wrk"):
        return None
    processes = []
    for number, url in enumerate(store.endpoints):
        signer = obstore.store.S3Store(
            BUCKET, endpoint=url, client_options={"allow_http": True}, virtual_hosted_style_request=False
        )
        rows = []
        for key, start, end in parts_of(sizes, REQUEST_BYTES):
            path = obstore.sign(signer, "GET", key, timedelta(hours=1)).removeprefix(url.rstrip("/"))
            rows.append(f'{{"{path}", "bytes={start}-{end - 1}"}}')
        script = folder / f"wrk-{number}.lua"
        script.write_text(
            f"local parts = {{{', '.join(rows)}}}\nlocal at = {number}\n"
            "request = function()\n  at = at % #parts + 1\n"
            '  return wrk.format("GET", parts[at][1], {Range = parts[at][2]})\nend\n'
            "done = function(summary)\n"
            '  print("FOUND " .. summary.bytes .. " " .. summary.duration .. " " .. summary.errors.status)\nend\n'
        )
        command = ["wrk", "-t1", "-c1", f"-d{WRK_S}s", "-s", str(script), url]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    rate = 0.0
    for process in processes:
        out, _ = process.communicate(timeout=60)
        found = re.search(r"FOUND (\d+) (\d+) (\d+)", out)
        if found is None or int(found[3]):
            return None
        rate += int(found[1]) / int(found[2])
    return rate


@contextmanager
def stored_set(images: Path, folder: Path, endpoints: int, shards: int) -> Iterator[embedded.EmbeddedStore]:
    """A set packed from a folder of images into an embedded store, which ends with the block."""
    if folder.exists():  # of a bench that was killed
        embedded.down(folder)
        shutil.rmtree(folder)
    store = embedded.up(folder, num_endpoints=endpoints)
    try:
        command = [
            sys.executable, "-m", "drawbar", "data", "pack", "folder", str(images), f"s3://{BUCKET}/{PREFIX}",
            "--endpoint", store.endpoints[0], "--store-dir", str(folder), "--shards", str(shards),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield store
    finally:
        embedded.down(folder)
        shutil.rmtree(folder, ignore_errors=True)


def client_environment(store: embedded.EmbeddedStore) -> dict[str, str]:
    """What Drawbar's ranks and the other clients find the store by."""
    return {
        EMBEDDED_ENDPOINTS: ",".join(store.endpoints),
        "AWS_ACCESS_KEY_ID": store.access_key_id,
        "AWS_SECRET_ACCESS_KEY": store.secret_access_key,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": store.endpoints[0],
        "AWS_ALLOW_HTTP": "true",
    }


def measure(store: embedded.EmbeddedStore, rounds: int) -> dict[str, Any]:
    """All of this program's figures. The store's variables must be in the environment."""
    extra = os.environ.get("DRAWBAR_S3_PEERS", str(REPOSITORY / ".venv-peers/s3"))
    if Path(extra).is_dir():
        sys.path.append(extra)
    listing = obstore.store.S3Store(
        BUCKET, endpoint=store.endpoints[0], client_options={"allow_http": True}, virtual_hosted_style_request=False
    )
    sizes = {
        str(item["path"]): int(item["size"])
        for item in listing.list(f"{PREFIX}/").collect()
        if "-of-" in str(item["path"])
    }
    figures = measure_clients(store, sizes, rounds)
    for name, seconds in figures["client_cpu_s_per_gb"].items():
        print(
            f"read alone: {name} {seconds:.3f} client CPU s/GB, {figures['read_mb_per_s'][name]:.0f} MB/s", flush=True
        )
    with tempfile.TemporaryDirectory(prefix="drawbar-bench-") as scratch:
        wrk = measure_wrk(store, sizes, Path(scratch))
    if wrk:
        figures |= {"wrk_mb_per_s": wrk, "read_over_wrk": figures["read_mb_per_s"]["drawbar"] / wrk}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--endpoints", type=int, default=5)
    parser.add_argument("--shards", type=int, default=16)
    options = parser.parse_args()
    with stored_set(options.folder / "images", options.folder / "s3", options.endpoints, options.shards) as store:
        os.environ.update(client_environment(store))
        print(json.dumps(measure(store, options.rounds)))


if __name__ == "__main__":
    main()
