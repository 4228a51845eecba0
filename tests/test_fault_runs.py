"""Whole runs whose store fails on the way: they go on and say so, or end with one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import obstore
import pytest

from drawbar.config import Storage
from drawbar.journal import InputSample, Request, RunStart, read_run
from drawbar.storage import embedded
from drawbar.storage.environment import Credentials
from drawbar.storage.stores import open_place
from tests.drawbar_process import drawbar, finish, rank_pids, result_of, start
from tests.fault_proxy import FaultProxy, every
from tests.small_recipe import write_recipe
from tests.small_set import write_set

pytestmark = pytest.mark.run


@pytest.fixture(scope="module")
def store(embedded_store: embedded.EmbeddedStore, tmp_path_factory: pytest.TempPathFactory) -> embedded.EmbeddedStore:
    """Bucket `fault-runs`: 480 small records in 6 shards."""
    embedded.ensure_bucket(embedded_store, "fault-runs")
    folder = tmp_path_factory.mktemp("set")
    write_set(folder, num_shards=6, records_per_shard=80)
    credentials = Credentials(
        access_key_id=embedded_store.access_key_id, secret_access_key=embedded_store.secret_access_key
    )
    place = open_place("s3://fault-runs/train", embedded_store.endpoints[0], credentials, Storage())
    for path in folder.iterdir():
        obstore.put(place.store, f"train/{path.name}", path.read_bytes())
    return embedded_store


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(
        tmp_path,
        "s3://fault-runs/train",
        storage={"request_bytes": 8192, "timeout_s": 5},
        input={"shuffle_buffer": 16},
        train={"warmup_steps": 2, "steps": 60},
    )


def words(endpoints: list[str], *settings: str) -> list[str]:
    listed = ", ".join(f'"{endpoint}"' for endpoint in endpoints)
    return [word for setting in (f"storage.endpoints=[{listed}]", *settings) for word in ("--set", setting)]


def keys(store: embedded.EmbeddedStore) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": store.access_key_id, "AWS_SECRET_ACCESS_KEY": store.secret_access_key}


def reasons(result: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {reason["rule"]: reason for reason in result["validity"]["reasons"]}


def test_an_endpoint_killed_and_brought_back_is_in_the_result(
    store: embedded.EmbeddedStore, recipe: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with FaultProxy(store.endpoints[0]) as first, FaultProxy(store.endpoints[1]) as second:
        endpoints = [first.endpoint, second.endpoint]
        slow_enough = ("faults.slow_rank=0", "faults.slow_step_s=0.1", "train.steps=120")
        process = start("run", recipe, "--out", run_dir, *words(endpoints, *slow_enough), env=keys(store))
        rank_pids(run_dir, 2, after_step=8)
        first.down()
        rank_pids(run_dir, 2, after_step=50)
        first.up()
        finished = finish(process)
        served = first.served_bytes + second.served_bytes
    assert finished.code == 0, finished.stderr
    result = result_of(run_dir)
    home = next(row for row in result["endpoints"] if row["url"] == endpoints[0])
    assert (home["set_aside"], home["returned"]) == (1, 1)
    assert home["errors"] > 0
    assert home["probes"] >= 1
    assert f"{endpoints[0]}: " in finished.stdout
    said = reasons(result)
    assert said["endpoint policy"]["severity"] == "qualified"
    assert "MB came from others" in said["endpoint policy"]["actual"]
    assert "1 time an endpoint was set aside" in said["storage errors"]["actual"]
    assert result["validity"]["grade"] == "qualified"
    # 12 s of steps: a look at the stages each second.
    for rank in read_run(run_dir).ranks:
        assert len(rank.of(InputSample)) >= 6
    assert 'id="figure-queues"' in (run_dir / "report.html").read_text()
    # Rank 1 has never asked the first endpoint, and nothing was counted that the store's side did not send.
    journal = read_run(run_dir)
    assert {request.endpoint for request in journal.ranks[1].of(Request)} == {endpoints[1]}
    assert result["read_bytes"] <= served


def test_one_spoiled_answer_in_fifty_costs_no_step(store: embedded.EmbeddedStore, recipe: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with FaultProxy(store.endpoints[0]) as first, FaultProxy(store.endpoints[1]) as second:
        first.rule, second.rule = every(50, "flip"), every(50, "busy")
        policy = ("storage.policy=round-robin", "train.steps=200")
        finished = drawbar(
            "run", recipe, "--out", run_dir, *words([first.endpoint, second.endpoint], *policy), env=keys(store)
        )
        assert finished.code == 0, finished.stderr
        assert first.faults["flip"] > 0
        assert second.faults["busy"] > 0
        rows = {row["url"]: row for row in result_of(run_dir)["endpoints"]}
        assert rows[second.endpoint]["busy"] == second.faults["busy"]
        assert rows[first.endpoint]["errors"] == 0
        # What was flipped in the read-ahead at the end nobody has looked at.
        assert sum(row["corrupt"] for row in rows.values()) > 0
        assert sum(row["rereads"] for row in rows.values()) <= first.faults["flip"]
    result = result_of(run_dir)
    assert result["validity"]["grade"] == "qualified"
    assert set(reasons(result)) <= {"storage errors", "cold start", "cold epochs", "measured interval", "CPU steal"}


def test_credentials_that_expire_end_the_run_with_one_line(
    store: embedded.EmbeddedStore, recipe: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with FaultProxy(store.endpoints[0]) as proxy:
        process = start(
            "run", recipe, "--out", run_dir, *words([proxy.endpoint], "train.steps=100000"), env=keys(store)
        )
        rank_pids(run_dir, 2, after_step=8)
        proxy.rule = lambda number, path: "expired"
        finished = finish(process)
    assert finished.code == 3
    assert "credentials have expired: train/train-" in finished.error_line
    assert result_of(run_dir)["status"] == "failed"


def test_the_environment_names_endpoint_and_keys_and_no_secret_is_written(
    store: embedded.EmbeddedStore, recipe: Path, tmp_path: Path
) -> None:
    """As a `tf_cnn_benchmarks` user has them: S3_ENDPOINT without a scheme, and a profile."""
    run_dir = tmp_path / "run"
    (tmp_path / "keys").write_text(
        f"[lab]\naws_access_key_id = {store.access_key_id}\naws_secret_access_key = {store.secret_access_key}\n"
    )
    env = {
        **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"), ""),
        "AWS_PROFILE": "lab",
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "keys"),
        "AWS_SESSION_TOKEN": "of other keys",
        "S3_ENDPOINT": store.endpoints[2].removeprefix("http://"),
        "S3_USE_HTTPS": "0",
        "S3_REQUEST_TIMEOUT_MSEC": "7000",
    }
    settings = ("storage.endpoints=environment", "storage.timeout_s=0", "train.steps=10")
    finished = drawbar(
        "run", recipe, "--out", run_dir, *(word for setting in settings for word in ("--set", setting)), env=env
    )
    assert finished.code == 0, finished.stderr
    assert [row["url"] for row in result_of(run_dir)["endpoints"]] == [store.endpoints[2]]
    begun = read_run(run_dir).ranks[0].first(RunStart)
    assert begun is not None
    assert begun.environment["storage"]["timeout_s"] == 7.0
    assert begun.environment["storage"]["endpoints"] == [store.endpoints[2]]
    secret = store.secret_access_key.encode()
    for path in run_dir.rglob("*"):
        assert not path.is_file() or secret not in path.read_bytes(), path
    assert secret.decode() not in finished.stdout + finished.stderr
    assert os.environ.get("AWS_SESSION_TOKEN") != "of other keys"
