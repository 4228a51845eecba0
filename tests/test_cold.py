"""The cold start: flushed on every host, on the storage side by the user's own command, and told for what it is."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import obstore
import psutil
import pytest

from drawbar.analyze.result import analyze
from drawbar.config import CacheState, Data, Input, Recipe, Train
from drawbar.config import Storage as StorageSettings
from drawbar.errors import InputError
from drawbar.journal import Cache, Error, RunStart, StorageFlush, Witness, read_run
from drawbar.launch.cold import FLUSHED_NODE, flush_files
from drawbar.report.words import cache_sentence
from drawbar.storage import embedded, page_cache
from drawbar.storage.environment import Credentials
from drawbar.storage.flush_hook import check_command, run_command
from drawbar.storage.stores import open_place
from tests.drawbar_process import Finished, drawbar, result_of
from tests.small_set import write_set
from tests.synthetic_run import SyntheticRun, synthetic_run, with_changes

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def shell(text: str) -> list[str]:
    return ["sh", "-c", text]


# The user's command


def test_a_command_runs_and_its_output_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "logs/flush.log"
    outcome = run_command(["printf", "%s|", "two words", "$HOME"], timeout_s=30, log=log)
    assert (outcome.exit_code, outcome.failure) == (0, "")
    assert log.read_text() == "two words|$HOME|"  # no shell has read it


def test_a_command_that_fails_is_told_with_its_last_line(tmp_path: Path) -> None:
    outcome = run_command(shell("echo first; echo no such node >&2; exit 7"), timeout_s=30, log=tmp_path / "log")
    assert outcome.failure == "cache.storage_flush_command ended with 7: no such node"
    silent = run_command(shell("kill -KILL $$"), timeout_s=30, log=tmp_path / "other")
    assert silent.failure == "cache.storage_flush_command was ended by SIGKILL, and printed nothing"


def test_a_command_cannot_ask_for_a_password(tmp_path: Path) -> None:
    """Neither on its stdin nor on a terminal, as sudo and ssh do."""
    asks = "read answer && exit 0; (exec 3</dev/tty) && exit 0; echo nobody to ask; exit 1"
    outcome = run_command(shell(asks), timeout_s=30, log=tmp_path / "log")
    assert outcome.failure.endswith("ended with 1: nobody to ask")


def test_a_command_that_hangs_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    # One child in the command's session, one that left it; and none of them hears SIGTERM.
    hang = (
        "trap '' TERM; sleep 1000 & echo $! >> $0; setsid sleep 1000 & echo $! >> $0; echo $$ >> $0; wait; sleep 1000"
    )
    outcome = run_command(["sh", "-c", hang, str(pids)], timeout_s=1, log=tmp_path / "log")
    assert outcome.exit_code is None
    assert "did not end within" in outcome.failure
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) == 3
    end_t = time.monotonic() + 10
    while any(alive(pid) for pid in started) and time.monotonic() < end_t:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in started)


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no program '/no/such' that can be run"):
        check_command(["/no/such", "word"])
    unreadable = tmp_path / "script"
    unreadable.write_text("#!/no/such/interpreter\n")
    unreadable.chmod(0o755)
    with pytest.raises(InputError, match="cannot run"):
        run_command([str(unreadable)], timeout_s=5, log=tmp_path / "log")


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"start": "any", "storage_flush_command": ["true"]}, "it would not be run"),
        ({"storage_flush_command": [""]}, "names no program"),
        ({"storage_flush_command": "true"}, "valid list"),
        ({"storage_flush_timeout_s": 0.0}, "greater than 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CacheState(**values)


# Files, on this host


def recipe_of(folder: Path, **cache: Any) -> Recipe:
    return Recipe(
        data=Data(url=str(folder), num_classes=10),
        input=Input(image_size=32),
        train=Train(batch_size=4, warmup_steps=1, steps=3),
        cache=CacheState(**cache),
    )


def test_files_are_flushed_and_asked_about(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    if page_cache.flush(paths) and page_cache.resident_fraction(paths) == 1:
        pytest.skip(f"{tmp_path} is on tmpfs: always resident")
    for path in paths:
        path.read_bytes()
    event = flush_files(recipe_of(tmp_path, drop_caches=False), paths)
    assert event.node == socket.gethostname()
    assert event.resident_fraction == 0
    assert event.method.startswith("fsync and posix_fadvise(DONTNEED) on 4 files")
    assert "drop_caches" not in event.method


@needs_root
def test_another_user_flushes_file_by_file_and_cannot_verify() -> None:
    code = (
        "import dataclasses, json, os, sys\n"
        "from pathlib import Path\n"
        "from drawbar.launch.cold import flush_files\n"
        "from tests.test_cold import recipe_of\n"
        "folder = Path(sys.argv[1])\n"
        "files = sorted(folder.glob('train-*'))\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print(json.dumps(dataclasses.asdict(flush_files(recipe_of(folder), files))))\n"
    )
    # Not below tmp_path: nobody else may enter pytest's folders.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        paths = write_set(folder)

        def flushed() -> dict[str, Any]:
            done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            found: dict[str, Any] = json.loads(done.stdout)
            return found

        for path in paths:
            path.chmod(0o644)
        event = flushed()
        assert "drop_caches needs root" in event["method"]
        assert event["resident_fraction"] is None
        assert event["note"].startswith("unverifiable")
        for path in paths:
            path.chmod(0o666)
        event = flushed()
        assert event["resident_fraction"] == 0
        assert "unverifiable" not in event["note"]


# Whole runs


def run(folder: Path, recipe: Recipe, env: dict[str, str] | None = None) -> Finished:
    path = folder / "recipe.toml"
    path.write_text(recipe.to_toml())
    return drawbar("run", path, "--out", folder / "run", "--set", "launch.stall_timeout_s=60", env=env)


@pytest.mark.run
def test_a_run_tells_what_was_flushed_where_and_by_whom(tmp_path: Path) -> None:
    write_set(tmp_path / "set")
    finished = run(tmp_path, recipe_of(tmp_path / "set", storage_flush_command=shell("echo flushed; sleep 0.1")))
    assert finished.code == 0, finished.stderr
    launcher = read_run(tmp_path / "run").launcher
    assert launcher is not None
    (flush,) = launcher.of(StorageFlush)
    assert (flush.command, flush.exit_code) == (shell("echo flushed; sleep 0.1"), 0)
    assert flush.duration_s >= 0.1
    assert (tmp_path / "run" / flush.log).read_text() == "flushed\n"
    (cache,) = launcher.of(Cache)
    # The hook first: what it reads on this host is flushed too.
    assert flush.t < cache.t
    assert all(not rank.of(Cache) for rank in read_run(tmp_path / "run").ranks)
    told = result_of(tmp_path / "run")["cache"]
    (host,) = told["hosts"]
    assert (host["node"], host["method"]) == (socket.gethostname(), cache.method)
    assert ("sync and drop_caches on the whole host" in cache.method) == (os.geteuid() == 0)
    assert told["resident_fraction"] == cache.resident_fraction == 0
    assert told["storage_flush"] == {
        "command": flush.command,
        "exit_code": 0,
        "duration_s": pytest.approx(flush.duration_s),
    }
    assert "flushed by hook, not proven" in told["method"]
    # A claim is no proof: the state is what can be seen from here.
    doubt = page_cache.doubt(tmp_path)
    assert (told["state"], told["note"]) == ("unknown" if doubt else "cold", doubt)
    assert "the storage's flush command ended with 0 after" in " ".join(finished.stdout.split())


@pytest.mark.run
@pytest.mark.parametrize(
    ("command", "timeout_s", "line"),
    [
        (shell("echo no such node; exit 7"), 60.0, "cache.storage_flush_command ended with 7: no such node"),
        (shell("sleep 1000"), 0.5, "cache.storage_flush_command did not end within"),
    ],
)
def test_a_command_that_fails_ends_the_run_before_a_rank_starts(
    tmp_path: Path, command: list[str], timeout_s: float, line: str
) -> None:
    write_set(tmp_path / "set")
    recipe = recipe_of(tmp_path / "set", storage_flush_command=command, storage_flush_timeout_s=timeout_s)
    finished = run(tmp_path, recipe)
    assert finished.code == 3
    assert line in finished.error_line
    journal = read_run(tmp_path / "run")
    assert not journal.ranks
    assert journal.launcher is not None
    (flush,) = journal.launcher.of(StorageFlush)
    assert flush.exit_code == (7 if timeout_s == 60 else None)
    assert line in journal.launcher.first(Error).message  # type: ignore[union-attr]
    assert result_of(tmp_path / "run")["cache"]["storage_flush"]["exit_code"] == flush.exit_code


def test_a_missing_program_leaves_nothing_behind(tmp_path: Path) -> None:
    write_set(tmp_path / "set")
    finished = run(tmp_path, recipe_of(tmp_path / "set", storage_flush_command=["no-such-program"]))
    assert finished.code == 2
    assert "no program 'no-such-program'" in finished.error_line
    assert not (tmp_path / "run").exists()


@pytest.mark.run
def test_a_store_that_is_not_ours_stays_unproven(embedded_store: embedded.EmbeddedStore, tmp_path: Path) -> None:
    write_set(tmp_path / "set")
    embedded.ensure_bucket(embedded_store, "flush-hook")
    keys = {
        "AWS_ACCESS_KEY_ID": embedded_store.access_key_id,
        "AWS_SECRET_ACCESS_KEY": embedded_store.secret_access_key,
    }
    place = open_place(
        "s3://flush-hook", embedded_store.endpoints[0], Credentials.from_environment(keys), StorageSettings()
    )
    for path in (tmp_path / "set").iterdir():
        obstore.put(place.store, f"train/{path.name}", path.read_bytes())
    recipe = recipe_of(tmp_path, storage_flush_command=["true"]).model_copy(
        update={
            "data": Data(url="s3://flush-hook/train", num_classes=10),
            "storage": StorageSettings(endpoints=[embedded_store.endpoints[0]]),
        }
    )
    finished = run(tmp_path, recipe, keys)
    assert finished.code == 0, finished.stderr
    result = result_of(tmp_path / "run")
    assert result["cache"]["state"] == "unknown"
    assert result["cache"]["method"] == "nothing flushed from here"
    assert result["validity"]["grade"] == "qualified"
    (reason,) = [row for row in result["validity"]["reasons"] if row["rule"] == "cold start"]
    assert reason["actual"] == "storage flushed by hook, not proven"


@pytest.mark.run
def test_ranks_flush_a_host_that_no_launcher_has(tmp_path: Path) -> None:
    """Two ranks by torchrun alone, as on a host away from the launcher."""
    write_set(tmp_path / "set")
    recipe = recipe_of(tmp_path / "set", drop_caches=False)
    (tmp_path / "recipe.toml").write_text(
        recipe.model_copy(update={"launch": recipe.launch.model_copy(update={"ranks": 2, "device": "cpu"})}).to_toml()
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    env = {name: value for name, value in os.environ.items() if name != FLUSHED_NODE}
    done = subprocess.run(
        [*command, "-m", "drawbar.launch.rank", str(tmp_path)],
        env={**env, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    first, second = read_run(tmp_path).ranks
    (cache,) = first.of(Cache)
    assert (cache.node, cache.resident_fraction) == (socket.gethostname(), 0)
    assert cache.t > first.first(RunStart).t  # type: ignore[union-attr]
    assert second.of(Cache) == []


# What is made of it


def folder_run() -> SyntheticRun:
    """Four ranks on hosts n1 and n2, the set in a folder; the launcher, on n1, has flushed that."""
    run = synthetic_run(ranks=4, overrides={"data": {"url": "/data/imagenet"}})
    run.change_launcher(Witness, lambda event: None)
    return run


def on_n2(**values: Any) -> Cache:
    event = Cache(t=1.0, node="n2", wanted="cold", method="flushed elsewhere", resident_fraction=0.0)
    return with_changes(event, **values)


@pytest.mark.parametrize(
    ("event", "state", "note"),
    [
        (None, "unknown", "nothing flushed on n2"),
        (on_n2(), "cold", ""),
        (on_n2(resident_fraction=0.4), "not shown cold", ""),
        (on_n2(resident_fraction=None, note="unverifiable"), "unknown", "n2: unverifiable"),
    ],
)
def test_every_host_counts(tmp_path: Path, event: Cache | None, state: str, note: str) -> None:
    run = folder_run()
    if event is not None:
        run.ranks[2].insert(1, event)
    result = analyze(run.write(tmp_path))
    cache = result["cache"]
    assert (cache["state"], cache["note"]) == (state, note)
    assert [host["node"] for host in cache["hosts"]] == (["n1"] if event is None else ["n1", "n2"])
    assert ("cold start" in {reason["rule"] for reason in result["validity"]["reasons"]}) == (state != "cold")
    if event is not None:
        assert cache["method"].endswith("; n2: flushed elsewhere")
        known = event.resident_fraction
        assert cache["resident_fraction"] == (None if known is None else known)


def test_the_report_says_that_the_command_was_stopped(tmp_path: Path) -> None:
    run = folder_run()
    assert run.launcher is not None
    run.launcher.insert(1, StorageFlush(t=1.0, command=["x"], exit_code=None, duration_s=5.0, log="logs/x"))
    assert "the storage's flush command was stopped after 5.0 s" in cache_sentence(analyze(run.write(tmp_path)))
