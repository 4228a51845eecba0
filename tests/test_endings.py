"""How runs end: readers that leave, streams that are closed, launchers that die at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from drawbar.storage import embedded
from drawbar.storage.hold import hold
from tests.drawbar_process import drawbar, finish, processes_of, rank_pids, result_of, start
from tests.small_recipe import write_recipe
from tests.small_set import write_set

pytestmark = pytest.mark.run


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_set(tmp_path / "set")
    return write_recipe(tmp_path, tmp_path / "set", launch={"stall_timeout_s": 20})


def in_shell(command: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    words = ["bash", "-c", command, "bash", sys.executable, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)


def test_a_reader_that_leaves_does_not_cost_the_measurement(recipe: Path, tmp_path: Path) -> None:
    done = in_shell('"$1" -m drawbar run "$2" --out "$3" | head -1; exit "${PIPESTATUS[0]}"', recipe, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert result_of(tmp_path / "run")["status"] == "ok"
    assert (tmp_path / "run" / "report.html").exists()


def test_with_stderr_closed_stdout_is_still_nothing_but_json(recipe: Path, tmp_path: Path) -> None:
    done = in_shell('"$1" -m drawbar run "$2" --out "$3" --json 2>&-', recipe, tmp_path / "run")
    assert done.returncode == 0
    assert json.loads(done.stdout)["status"] == "ok"


def test_json_of_a_failed_run_is_nothing_but_json(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "set" / "manifest.json").unlink()  # which would tell before ranks are started
    finished = drawbar("run", recipe, "--out", tmp_path / "run", "--json", "--set", "data.num_classes=5")
    assert finished.code == 4
    assert json.loads(finished.stdout)["error"]["exit_code"] == 4
    assert "is out of range 1..5" in finished.error_line


def test_a_launcher_killed_at_once_leaves_no_rank(recipe: Path, tmp_path: Path) -> None:
    """In the seconds in which torchrun imports torch nobody watches yet."""
    run_dir = tmp_path / "run"
    process = start("run", recipe, "--out", run_dir, "--set", "train.steps=1000000")
    end_t = time.monotonic() + 30
    while not (run_dir / "logs" / "torchrun.log").exists() and time.monotonic() < end_t:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    end_t = time.monotonic() + 30
    while processes_of(run_dir) and time.monotonic() < end_t:
        time.sleep(0.2)
    assert processes_of(run_dir) == []


def test_torchrun_killed_is_named(recipe: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start("run", recipe, "--out", run_dir, "--set", "train.steps=1000000")
    pids = rank_pids(run_dir, 2, after_step=2)
    torchrun = psutil.Process(pids[0]).ppid()
    os.kill(torchrun, signal.SIGKILL)
    finished = finish(process)
    assert finished.code == 4
    assert f"torchrun (pid {torchrun}) was killed by SIGKILL" in finished.error_line
    assert processes_of(run_dir) == []


def test_a_rank_that_is_stopped_is_named(recipe: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start("run", recipe, "--out", run_dir, "--set", "train.steps=1000000")
    pids = rank_pids(run_dir, 2, after_step=2)
    os.kill(pids[1], signal.SIGSTOP)
    finished = finish(process)
    assert finished.code == 4
    assert "rank 1" in finished.error_line
    assert "stopped" in finished.error_line
    assert processes_of(run_dir) == []


def test_a_store_in_use_is_not_stopped_unless_forced(recipe: Path, tmp_path: Path) -> None:
    store = embedded.up(tmp_path / "s3", num_endpoints=1)
    try:
        with embedded.reserved(store.directory):
            refused = drawbar("s3", "down", "--dir", store.directory)
            assert refused.code == 3
            assert f"in use by another run (pid {os.getpid()})" in refused.error_line
            assert embedded.status(store.directory).running
            assert drawbar("s3", "down", "--dir", store.directory, "--force").code == 0
    finally:
        embedded.down(store.directory)


def test_a_gateway_that_no_rank_used_may_die(recipe: Path, tmp_path: Path) -> None:
    store = embedded.up(tmp_path / "s3", num_endpoints=3)
    try:
        images = tmp_path / "images"
        assert drawbar("data", "make", "imagenet-like", images, "--images", "64", "--classes", "8").code == 0
        assert drawbar("data", "pack", "folder", images, "s3://gate/train", "--store-dir", store.directory).code == 0
        process = start(
            *("run", recipe, "--out", tmp_path / "run", "--set", f"storage.embedded_dir={store.directory}"),
            *("--set", "data.url=s3://gate/train", "--set", "train.steps=300"),
        )
        rank_pids(tmp_path / "run", 2, after_step=2)
        os.kill(embedded.find(store.directory).gateway_pids[2], signal.SIGKILL)
        finished = finish(process)
    finally:
        embedded.down(store.directory)
    assert finished.code == 0, finished.stderr
    result = result_of(tmp_path / "run")
    assert result["status"] == "ok"
    assert result["validity"]["grade"] == "qualified"


def test_a_second_demo_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with hold(tmp_path / "demo.lock", "", ""):
        finished = drawbar("demo", "--dir", tmp_path, "--images", "64")
    assert finished.code == 3
    assert f"another demo is at work in {tmp_path} (pid {os.getpid()})" in finished.error_line
