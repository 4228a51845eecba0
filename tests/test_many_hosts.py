"""One recipe on many hosts: mpirun over namespaces, srun over Slurm's nodes; and what happens when a host goes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drawbar.journal import RunStart, Step, read_run
from tests.cluster import hosts
from tests.cluster.hosts import Cluster, running_cluster
from tests.drawbar_process import DEADLINE_S, Finished, drawbar, rank_pids
from tests.slurm import Slurm
from tests.small_set import NUM_CLASSES, write_set

pytestmark = [
    pytest.mark.run,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(hosts.missing()), reason=f"root is needed for namespaces: {hosts.missing()}"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(num_nodes=3) as made:
        yield made


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set")
    write_set(folder, num_shards=4, records_per_shard=24)
    path = folder / "recipe.toml"
    path.write_text(f"""
        name = "hosts"
        [data]
        url = "{folder}"
        num_classes = {NUM_CLASSES}
        [input]
        image_size = 32
        [model]
        name = "trivial"
        [train]
        batch_size = 4
        warmup_steps = 1
        steps = 12
        [launch]
        ranks = 4
        stall_timeout_s = 60
    """)
    return path


def mpirun_flags(cluster: Cluster, version: int) -> list[str]:
    if version == 4:
        return ["--mca", "plm_rsh_agent", str(cluster.agent), "--mca", "oob_tcp_if_include", "eth0"]
    agent = ["--mca", "plm", "ssh", "--mca", "plm_ssh_agent", str(cluster.agent)]
    return [*agent, "--prtemca", "prte_if_include", "eth0"]


def path_with(version: int) -> str:
    """Of a PATH that has Open MPI 4 (Debian's) or 5 (the wheel's) first."""
    first = "/usr/bin" if version == 4 else str(Path(sys.executable).parent)
    return f"{first}:{os.environ['PATH']}"


def command(cluster: Cluster, recipe: Path, run_dir: Path, version: int, *settings: str) -> list[str]:
    words = [
        'launch.hosts=["node1:2","node2:1","node3:1"]',
        f"launch.flags={json.dumps(mpirun_flags(cluster, version))}",
        *settings,
    ]
    line = [sys.executable, "-m", "drawbar", "run", str(recipe), "--out", str(run_dir)]
    return [*line, *(word for setting in words for word in ("--set", setting))]


def run_on(cluster: Cluster, recipe: Path, run_dir: Path, version: int, *settings: str) -> Finished:
    line = command(cluster, recipe, run_dir, version, *settings)
    done = cluster.run(cluster.nodes[0], line, env={"PATH": path_with(version)}, timeout_s=DEADLINE_S)
    return Finished(done.returncode, done.stdout, done.stderr)


def start_on(cluster: Cluster, recipe: Path, run_dir: Path, *settings: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A run of Open MPI 5 and the process ids of its ranks, once all of them have done a step."""
    process = subprocess.Popen(
        [*cluster.on(cluster.nodes[0]), *command(cluster, recipe, run_dir, 5, *settings)],
        env={**os.environ, "PATH": path_with(5)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, rank_pids(run_dir, 4, after_step=0)


def finish(process: subprocess.Popen[str]) -> Finished:
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    return Finished(process.returncode, stdout, stderr)


def losses(run_dir: Path) -> list[float]:
    """Mean over the ranks, step by step."""
    by_rank = [[step.loss for step in rank.of(Step)] for rank in read_run(run_dir).ranks]
    assert len(by_rank) == 4
    return [sum(row) / len(row) for row in zip(*by_rank, strict=True)]


def nodes(run_dir: Path) -> list[str]:
    return [rank.of(RunStart)[0].node for rank in read_run(run_dir).ranks]


@pytest.fixture(scope="module")
def reference(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run_dir = tmp_path_factory.mktemp("local") / "run"
    finished = drawbar("run", recipe, "--out", run_dir)
    assert finished.code == 0, finished.stderr
    return losses(run_dir)


@pytest.mark.parametrize("version", [4, 5])
def test_mpirun_over_hosts_that_share_nothing_trains_the_same(
    cluster: Cluster, recipe: Path, reference: list[float], tmp_path: Path, version: int
) -> None:
    cluster.make_private(tmp_path / "runs")
    run_dir = tmp_path / "runs" / "a"
    finished = run_on(cluster, recipe, run_dir, version)
    assert finished.code == 0, finished.stderr
    home = cluster.seen_by(cluster.nodes[0], run_dir)
    assert nodes(home) == ["node1", "node1", "node2", "node3"]
    assert losses(home) == pytest.approx(reference, rel=1e-5)
    result = json.loads((home / "result.json").read_text())
    assert result["status"] == "ok"
    assert result["world_size"] == 4
    assert {path.name for path in (home / "journal").glob("host-*")} == {f"host-node{n}.jsonl" for n in (1, 2, 3)}
    assert not (cluster.seen_by(cluster.nodes[1], run_dir) / "result.json").exists()


def test_srun_trains_the_same(slurm: Slurm, recipe: Path, reference: list[float], tmp_path: Path) -> None:
    finished = drawbar(
        *("run", recipe, "--out", tmp_path / "run", "--set", "launch.launcher=srun"),
        *("--set", 'launch.flags=["--nodes=2"]'),
        # Both nodes are this host, whose name leads outside.
        env={**slurm.env, "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"},
    )
    assert finished.code == 0, finished.stderr
    assert losses(tmp_path / "run") == pytest.approx(reference, rel=1e-5)


def left_running(cluster: Cluster) -> list[str]:
    end_t = time.monotonic() + 15
    while (left := cluster.processes()) and time.monotonic() < end_t:
        time.sleep(0.2)
    return [" ".join(process.cmdline()) for process in left]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_on_another_host_ends_the_run(
    cluster: Cluster, recipe: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process, pids = start_on(cluster, recipe, tmp_path / "run", "train.steps=1000000")
    os.kill(pids[3], number)
    finished = finish(process)
    assert finished.code == 4
    assert left_running(cluster) == []
    expected = "rank 3 on node3" if number == signal.SIGKILL else "host node3 has not been heard of"
    assert expected in finished.error_line


def test_a_pulled_cable_ends_the_run(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    process, _ = start_on(cluster, recipe, tmp_path / "run", "train.steps=1000000")
    try:
        cluster.set_link(cluster.nodes[1], "eth0", up=False)
        finished = finish(process)
    finally:
        cluster.set_link(cluster.nodes[1], "eth0", up=True)
    assert finished.code == 4
    assert "node2" in finished.error_line
    assert left_running(cluster) == []


def test_ctrl_c_ends_every_rank(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    process, _ = start_on(cluster, recipe, tmp_path / "run", "train.steps=1000000")
    process.send_signal(signal.SIGINT)
    finished = finish(process)
    assert finished.code == 130
    assert "interrupted" in finished.error_line
    assert left_running(cluster) == []


def test_a_host_that_is_none_is_named(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    finished = run_on(cluster, recipe, tmp_path / "run", 5, 'launch.hosts=["node1:2","nodex:2"]')
    assert finished.code == 3
    assert "no rank started; no answer from nodex (" in finished.error_line
    assert left_running(cluster) == []


def test_without_mpirun(recipe: Path, tmp_path: Path) -> None:
    only_python = tmp_path / "bin"
    only_python.mkdir()
    for name in ("python3",):
        (only_python / name).symlink_to(shutil.which(name) or "")
    settings = ("--set", 'launch.hosts=["node1:4"]')
    finished = drawbar("run", recipe, "--out", tmp_path / "run", *settings, env={"PATH": str(only_python)})
    assert finished.code == 3
    assert "there is no mpirun" in finished.error_line
