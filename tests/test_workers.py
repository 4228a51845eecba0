"""Worker processes: whatever happens to their parent or to one of them, none stays, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import psutil
import pytest

from drawbar.dataset.workers import WorkerPool

pytestmark = pytest.mark.timeout(120)

PARENT = """
import os, sys, time
from drawbar.dataset.workers import WorkerPool

if __name__ == "__main__":
    pool = WorkerPool(2)
    tasks = [pool.submit(time.sleep, 100) for _ in range(2)]
    while len(pool._processes) < 2 or not all(task.running() for task in tasks):
        time.sleep(0.01)
    print(*pool._processes, flush=True)
    time.sleep(100)
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    yield process, workers
    for each in (*workers, process):
        if each.poll() is None if isinstance(each, subprocess.Popen) else each.is_running():
            each.kill()
    process.communicate(timeout=30)


def test_workers_end_with_a_parent_that_was_killed(
    parent: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    process, workers = parent
    process.kill()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []


def test_workers_leave_ctrl_c_to_their_parent(parent: tuple[subprocess.Popen[str], list[psutil.Process]]) -> None:
    _, workers = parent
    for worker in workers:
        worker.send_signal(signal.SIGINT)
        worker.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert all(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)


def test_a_killed_worker_takes_the_pool_along() -> None:
    pool = WorkerPool(2)
    try:
        tasks = [pool.submit(time.sleep, 100) for _ in range(2)]
        workers = [psutil.Process(pid) for pid in pool._processes]
        workers[0].kill()
        wait(tasks, timeout=30)
        with pytest.raises(BrokenProcessPool):
            tasks[1].result(timeout=0)
    finally:
        pool.shutdown(cancel_futures=True)
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []


@pytest.mark.run
@pytest.mark.parametrize("delay_s", [0.3, 0.7, 1.0, 1.3, 2.0])
def test_ctrl_c_while_the_processes_start_is_one_line(tmp_path: Path, delay_s: float) -> None:
    """As a terminal sends it, to the whole group, some of which may still be importing."""
    words = ["data", "make", "imagenet-like", str(tmp_path / "set"), "--images", "5000", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "drawbar", *words], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    # From its first trace on: before, the interpreter itself may still be starting.
    end_t = time.monotonic() + 60
    while not (tmp_path / "set").exists() and process.poll() is None and time.monotonic() < end_t:
        time.sleep(0.01)
    time.sleep(delay_s - 0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert [line for line in stderr.splitlines() if line and not line.startswith("making ")] == [
        "error: interrupted by SIGINT"
    ]
    assert list(tmp_path.rglob("*.tmp")) == []
