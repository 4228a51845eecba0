"""Whole runs: the embedded store, torchrun, real ranks; then what their journals say against outside counts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from drawbar.config import Storage, load_recipe
from drawbar.dataset.destination import StoreDestination
from drawbar.dataset.folder import scan_folder
from drawbar.dataset.pack import pack
from drawbar.dataset.shard_writer import PackSettings
from drawbar.dataset.synthetic import make_imagenet_like
from drawbar.input import libjpeg
from drawbar.journal import (
    Cache,
    Clock,
    Host,
    InputTotals,
    Request,
    RunEnd,
    RunJournal,
    RunStart,
    Step,
    Witness,
    read_run,
)
from drawbar.storage import embedded
from drawbar.storage.environment import Credentials
from drawbar.storage.stores import open_place
from tests.drawbar_process import Finished, drawbar, finish, processes_of, rank_pids, result_of, start

pytestmark = pytest.mark.run

NUM_CLASSES = 16


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "images"
    make_imagenet_like(folder, num_images=192, num_classes=NUM_CLASSES, seed=5, workers=2)
    return folder


@pytest.fixture(scope="module")
def packed_store(embedded_store: embedded.EmbeddedStore, images: Path) -> embedded.EmbeddedStore:
    """The store with bucket `run-tests`, prefix `train`: 192 images of ImageNet's size in 6 shards."""
    embedded.ensure_bucket(embedded_store, "run-tests")
    credentials = Credentials(
        access_key_id=embedded_store.access_key_id, secret_access_key=embedded_store.secret_access_key
    )
    place = open_place("s3://run-tests/train", embedded_store.endpoints[0], credentials, Storage())
    pack(scan_folder(images), StoreDestination(place.store, place.prefix), PackSettings(num_shards=6, seed=1))
    return embedded_store


@pytest.fixture
def recipe(tmp_path: Path, packed_store: embedded.EmbeddedStore) -> Path:
    return write_recipe(tmp_path, packed_store)


def write_recipe(folder: Path, packed_store: embedded.EmbeddedStore) -> Path:
    path = folder / "recipe.toml"
    path.write_text(
        f"""
        name = "small"
        [data]
        url = "s3://run-tests/train"
        num_classes = {NUM_CLASSES}
        [storage]
        embedded_dir = "{packed_store.directory}"
        request_bytes = 524288
        [input]
        image_size = 64
        shuffle_buffer = 16
        [model]
        name = "trivial"
        [train]
        batch_size = 4
        warmup_steps = 2
        steps = 12
        display_every = 5
        [launch]
        ranks = 3
        stall_timeout_s = 60
        """
    )
    return path


# One sound run, looked at from all sides


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, packed_store: embedded.EmbeddedStore) -> tuple[Path, Finished]:
    folder = tmp_path_factory.mktemp("sound")
    run_dir = folder / "run"
    return run_dir, drawbar("run", write_recipe(folder, packed_store), "--out", run_dir)


@pytest.fixture(scope="module")
def journal(sound: tuple[Path, Finished]) -> RunJournal:
    return read_run(sound[0])


@pytest.fixture(scope="module")
def result(sound: tuple[Path, Finished]) -> dict[str, Any]:
    return result_of(sound[0])


def test_it_ends_well_and_prints_what_tf_cnn_benchmarks_prints(sound: tuple[Path, Finished]) -> None:
    run_dir, finished = sound
    assert finished.code == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert "Step\tImg/sec\ttotal_loss" in lines
    assert [line.split("\t")[0] for line in lines if "\timages/sec: " in line and "+/-" in line] == ["1", "5", "10"]
    assert any(line.startswith("total images/sec: ") for line in lines)
    assert str(run_dir / "report.html") in finished.stdout
    assert (run_dir / "report.html").stat().st_size > 1000


def test_the_run_directory_holds_a_recipe_that_loads_to_an_equal_one(sound: tuple[Path, Finished]) -> None:
    run_dir, _ = sound
    dumped = (run_dir / "recipe.toml").read_text()
    loaded = load_recipe(run_dir / "recipe.toml")
    assert loaded.to_toml() == dumped
    starts = [event for rank in read_run(run_dir).ranks for event in rank.of(RunStart)]
    assert {event.recipe_sha256 for event in starts} == {loaded.sha256()}


def test_no_secret_is_written_anywhere(sound: tuple[Path, Finished], packed_store: embedded.EmbeddedStore) -> None:
    secret = packed_store.secret_access_key.encode()
    assert len(secret) > 10
    for path in sound[0].rglob("*"):
        assert not path.is_file() or secret not in path.read_bytes(), path


def test_client_bytes_gateway_bytes_and_expected_bytes_agree(journal: RunJournal) -> None:
    received = sum(request.got_bytes for rank in journal.ranks for request in rank.of(Request))
    assert journal.launcher is not None
    witnesses = [event for event in journal.launcher.of(Witness) if event.source == "gateway"]
    served = sum(event.count_bytes if event.when == "after" else -event.count_bytes for event in witnesses)
    expected = sum(totals.planned_bytes for rank in journal.ranks for totals in rank.of(InputTotals))
    expected += sum(
        request.wanted_bytes for rank in journal.ranks for request in rank.of(Request) if request.kind == "metadata"
    )
    assert received > 3_000_000
    assert served == pytest.approx(received, rel=0.01)
    assert expected == pytest.approx(received, rel=0.01)


def test_each_endpoint_served_what_its_ranks_received(journal: RunJournal, result: dict[str, Any]) -> None:
    assert journal.launcher is not None
    served: dict[str, int] = {}
    for event in journal.launcher.of(Witness):
        if event.source == "gateway":
            sign = 1 if event.when == "after" else -1
            served[event.target] = served.get(event.target, 0) + sign * event.count_bytes
    received = {row["url"]: row["bytes"] for row in result["endpoints"]}
    assert sum(count > 0 for count in served.values()) == 3
    for endpoint, count in served.items():
        assert received.get(endpoint, 0) == pytest.approx(count, rel=0.01)


def test_ranks_take_their_endpoint_by_rank_number(journal: RunJournal, packed_store: embedded.EmbeddedStore) -> None:
    for number, rank in enumerate(journal.ranks):
        assert rank.first(RunStart).endpoint == packed_store.endpoints[number % 5]  # type: ignore[union-attr]
        assert {request.endpoint for request in rank.of(Request)} == {packed_store.endpoints[number % 5]}


def test_ranks_read_disjoint_ranges_within_an_epoch(journal: RunJournal) -> None:
    """192 records, 64 a rank; 14 batches of 4 and the read-ahead stay within about two epochs of the small set."""
    first_epoch: set[tuple[str, int]] = set()
    for rank in journal.ranks:
        budget = 64 * 110_000
        for request in rank.of(Request):
            if request.kind == "data" and budget > 1_200_000:
                assert (request.key, request.offset) not in first_epoch
                first_epoch.add((request.key, request.offset))
                budget -= request.wanted_bytes
    assert first_epoch


def test_total_images_per_s_follows_from_the_journal_alone(journal: RunJournal, result: dict[str, Any]) -> None:
    """Recomputed here from scratch: samples trained in the interval in which all ranks measured, over its length."""
    spans = []
    for rank in journal.ranks:
        clocks = {clock.when: clock for clock in rank.of(Clock)}
        offset_s = clocks["start"].offset_s
        assert abs(clocks["end"].offset_s - offset_s) < 0.01
        spans.append([(s.start_t + offset_s, s.end_t + offset_s, s.samples) for s in rank.of(Step) if not s.warmup])
    begin_t, end_t = max(span[0][0] for span in spans), min(span[-1][1] for span in spans)
    samples = 0.0
    for span in spans:
        for start_t, stop_t, count in span:
            inside_s = max(0.0, min(stop_t, end_t) - max(start_t, begin_t))
            samples += count * inside_s / (stop_t - start_t)
    assert result["images_per_s"]["total"] == pytest.approx(samples / (end_t - begin_t), rel=0.005)
    assert result["images_per_s"]["total"] == pytest.approx(sum(result["images_per_s"]["per_rank"]), rel=1e-6)


def test_steps_are_equal_on_all_ranks_and_warm_up_is_marked_not_dropped(journal: RunJournal) -> None:
    for rank in journal.ranks:
        steps = rank.of(Step)
        assert [step.step for step in steps] == list(range(14))
        assert [step.warmup for step in steps] == [True] * 2 + [False] * 12
        assert all(step.samples == 4 for step in steps)
        for step in steps:
            parts = step.data_wait_s + step.copy_s + step.compute_s + step.optimizer_s
            assert parts <= (step.end_t - step.start_t) * 1.001


def test_images_are_counted_as_decoded_and_trained(journal: RunJournal) -> None:
    for rank in journal.ranks:
        totals = rank.first(InputTotals)
        assert totals is not None
        assert totals.trained_images == 14 * 4
        assert totals.decoded_images >= totals.trained_images
        assert totals.received_bytes == totals.trained_bytes + totals.discarded_bytes


def test_the_start_is_shown_cold_by_what_the_volume_server_read_from_disk(
    journal: RunJournal, result: dict[str, Any]
) -> None:
    assert journal.launcher is not None
    cache = journal.launcher.first(Cache)
    assert cache is not None
    assert cache.resident_fraction is not None
    assert cache.resident_fraction < 0.01
    disk = [event for event in journal.launcher.of(Witness) if event.source == "volume"]
    read_bytes = sum(event.count_bytes if event.when == "after" else -event.count_bytes for event in disk)
    set_bytes = 192 * 110_000
    # Later epochs of so small a set come from the page cache: at most the set is read from disk.
    assert read_bytes > 3_000_000
    assert read_bytes < set_bytes * 1.5
    assert result["cache"]


def test_host_counters_are_there_once_a_second(journal: RunJournal) -> None:
    assert len(journal.hosts) == 1
    rows = journal.hosts[0].of(Host)
    assert rows
    assert all(later.t - earlier.t < 3 for earlier, later in pairwise(rows))
    assert set(rows[-1].rank_rss_bytes) == {"0", "1", "2"}
    assert all(rss > 50_000_000 for rss in rows[-1].rank_rss_bytes.values())
    assert rows[-1].nic_received_bytes["lo"] > 0
    assert rows[-1].cpu_user_s > 0


def test_the_environment_says_which_allocator_settings_a_rank_had(journal: RunJournal) -> None:
    for rank in journal.ranks:
        environment = rank.first(RunStart).environment  # type: ignore[union-attr]
        assert environment["allocator"]["MALLOC_MMAP_MAX_"] == "0"
        assert environment["precision"] in ("fp32", "bf16")
        assert environment["compute_threads"] >= 1


def test_the_environment_says_how_images_were_decoded(journal: RunJournal) -> None:
    for rank in journal.ranks:
        decoding = rank.first(RunStart).environment["decoding"]  # type: ignore[union-attr]
        assert decoding["decoder"] == ("region" if libjpeg.LIBRARY.exists() else "full")
        assert "libjpeg-turbo" in decoding["library"]
        assert decoding["fast_dct"] is True
        assert bool(decoding["note"]) == (decoding["decoder"] == "full")


def test_making_the_result_again_from_the_journal_changes_nothing(sound: tuple[Path, Finished]) -> None:
    run_dir, _ = sound
    before = (run_dir / "result.json").read_bytes()
    assert drawbar("report", run_dir).code == 0
    assert (run_dir / "result.json").read_bytes() == before


# Runs that are different


def run(recipe: Path, out: Path, *settings: str) -> Finished:
    return drawbar("run", recipe, "--out", out, *(word for setting in settings for word in ("--set", setting)))


def test_with_a_slow_rank_the_total_follows_it(recipe: Path, tmp_path: Path) -> None:
    finished = run(
        recipe, tmp_path / "slow", "launch.ranks=2", "faults.slow_rank=1", "faults.slow_step_s=0.5", "train.steps=6"
    )
    assert finished.code == 0, finished.stderr
    result = result_of(tmp_path / "slow")
    # Two ranks of 4 images cannot pass a step in less than the slow one's pause.
    assert 8 / 0.5 * 0.5 < result["images_per_s"]["total"] <= 8 / 0.5
    assert "faults" in json.dumps(result["validity"]) or "slow" in json.dumps(result["validity"])
    assert result["validity"]["grade"] == "qualified"


def test_a_constant_batch_reads_nothing_and_the_result_says_so(recipe: Path, tmp_path: Path) -> None:
    finished = run(recipe, tmp_path / "constant", "input.source=constant", "launch.ranks=1", "train.steps=5")
    assert finished.code == 0, finished.stderr
    result = result_of(tmp_path / "constant")
    assert result["read_bytes"] == 0
    assert result["validity"]["grade"] == "qualified"
    assert "constant" in json.dumps(result["validity"])


def test_memory_reads_once_and_repeats_real_records(recipe: Path, tmp_path: Path) -> None:
    finished = run(recipe, tmp_path / "memory", "input.source=memory", "launch.ranks=2", "train.steps=20")
    assert finished.code == 0, finished.stderr
    journal = read_run(tmp_path / "memory")
    for rank in journal.ranks:
        data = [request for request in rank.of(Request) if request.kind == "data"]
        assert [(request.offset, request.wanted_bytes) for request in data] == [(0, 524288)]
        totals = rank.first(InputTotals)
        assert totals is not None
        assert totals.trained_images == 22 * 4
        assert totals.decoded_images >= totals.trained_images
        assert totals.received_bytes > 10 * data[0].got_bytes
    first_keys = [rank.of(Request)[-1].key for rank in journal.ranks]
    assert len(set(first_keys)) == 2
    result = result_of(tmp_path / "memory")
    assert result["read_bytes"] < 2_000_000
    reasons = {reason["rule"]: reason for reason in result["validity"]["reasons"]}
    assert "repeated from memory" in reasons["input"]["actual"]
    assert result["validity"]["grade"] == "qualified"
    assert "MB taken from memory" in finished.stdout


def test_resnet50_trains_from_the_store(recipe: Path, tmp_path: Path) -> None:
    finished = run(
        recipe,
        tmp_path / "resnet",
        "model.name=resnet50",
        "launch.ranks=2",
        "train.steps=3",
        "train.warmup_steps=1",
        "train.batch_size=2",
    )
    assert finished.code == 0, finished.stderr
    assert result_of(tmp_path / "resnet")["samples"] == 2 * 2 * 3


def test_more_ranks_than_shards_share_them_by_records(recipe: Path, tmp_path: Path, images: Path) -> None:
    assert drawbar("data", "pack", "folder", images, tmp_path / "two", "--shards", "2").code == 0
    finished = run(recipe, tmp_path / "many", f"data.url={tmp_path / 'two'}", "train.steps=3")
    assert finished.code == 0, finished.stderr
    ranges = [
        (request.key, request.offset)
        for rank in read_run(tmp_path / "many").ranks
        for request in rank.of(Request)[:2]
        if request.kind == "data"
    ]
    assert len(set(ranges)) == len(ranges)


def test_a_loss_that_is_no_number_ends_the_run_and_names_step_and_rank(recipe: Path, tmp_path: Path) -> None:
    finished = run(recipe, tmp_path / "nan", "optimizer.learning_rate=1e38", "train.steps=50", "launch.ranks=2")
    assert finished.code == 4
    assert "loss is" in finished.error_line
    assert "at step" in finished.error_line
    assert "on rank" in finished.error_line


def test_ctrl_c_ends_everything_and_the_journal_says_interrupted(recipe: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "interrupted"
    process = start("run", recipe, "--out", run_dir, "--set", "train.steps=1000000")
    pids = rank_pids(run_dir, 3, after_step=3)
    began_t = time.monotonic()
    process.send_signal(signal.SIGINT)
    finished = finish(process)
    assert time.monotonic() - began_t < 30
    assert finished.code == 130
    assert "interrupted" in finished.error_line
    assert processes_of(run_dir) == []
    journal = read_run(run_dir)
    assert len(pids) == 3
    for one in [*journal.ranks, journal.launcher]:
        assert one is not None
        assert one.first(RunEnd).status == "interrupted"  # type: ignore[union-attr]
    assert result_of(run_dir)["status"] == "interrupted"
    assert not list(tmp_path.glob("tmp*"))


def test_a_rank_killed_ends_the_run_soon_with_that_rank_named(recipe: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    process = start("run", recipe, "--out", run_dir, "--set", "train.steps=1000000")
    pids = rank_pids(run_dir, 3, after_step=3)
    os.kill(pids[1], signal.SIGKILL)
    began_t = time.monotonic()
    finished = finish(process)
    assert time.monotonic() - began_t < 30
    assert finished.code == 4
    assert "rank 1" in finished.error_line
    assert "killed" in finished.error_line
    assert processes_of(run_dir) == []
    result = result_of(run_dir)
    assert (result["status"], result["error"]["rank"]) == ("failed", 1)


def test_ranks_do_not_outlive_a_launcher_that_is_killed(recipe: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "orphans"
    process = start("run", recipe, "--out", run_dir, "--set", "train.steps=1000000")
    rank_pids(run_dir, 3, after_step=3)
    process.kill()
    process.communicate()
    end_t = time.monotonic() + 30
    while processes_of(run_dir) and time.monotonic() < end_t:
        time.sleep(0.2)
    assert processes_of(run_dir) == []


def test_a_second_run_from_the_same_embedded_store_is_refused_and_the_first_goes_on(
    recipe: Path, tmp_path: Path
) -> None:
    first = start("run", recipe, "--out", tmp_path / "first", "--set", "train.steps=1000000")
    pids = rank_pids(tmp_path / "first", 3, after_step=3)
    second = drawbar("run", recipe, "--out", tmp_path / "second")
    assert second.code == 3
    assert f"is in use by another run (pid {first.pid})" in second.error_line
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    first.send_signal(signal.SIGTERM)
    finished = finish(first)
    assert finished.code == 130
    assert "interrupted by SIGTERM" in finished.error_line
    assert processes_of(tmp_path / "first") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a small file system")
def test_a_full_disk_ends_the_run_with_one_clear_line(recipe: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], check=True)
    try:
        finished = drawbar("run", recipe, "--out", small / "run", "--set", "train.steps=1000000")
        assert finished.code == 3
        assert "No space left on device" in finished.error_line or "is full" in finished.error_line
        assert processes_of(small / "run") == []
    finally:
        subprocess.run(["umount", small], check=True)


def start_on_own_store(store: embedded.EmbeddedStore, recipe: Path, out: Path, images: Path, *settings: str) -> Any:
    assert drawbar("data", "pack", "folder", images, "s3://mid/train", "--store-dir", store.directory).code == 0
    words = (f"storage.embedded_dir={store.directory}", "data.url=s3://mid/train", *settings)
    process = start("run", recipe, "--out", out, *(word for setting in words for word in ("--set", setting)))
    rank_pids(out, 3, after_step=3)
    return process


def test_the_only_endpoint_lost_in_the_middle_ends_the_run_with_its_name(
    recipe: Path, tmp_path: Path, images: Path
) -> None:
    store = embedded.up(tmp_path / "s3", num_endpoints=1)
    settings = ("train.steps=1000000", "storage.retries=2")
    try:
        process = start_on_own_store(store, recipe, tmp_path / "run", images, *settings)
        os.kill(store_now(store).gateway_pids[0], signal.SIGKILL)
        finished = finish(process)
    finally:
        embedded.down(store.directory)
    assert finished.code == 3
    assert "endpoint does not answer" in finished.error_line
    assert store.endpoints[0] in finished.error_line
    attempts = {request.attempt for rank in read_run(tmp_path / "run").ranks for request in rank.of(Request)}
    assert attempts == {0, 1, 2}
    assert processes_of(tmp_path / "run") == []


def test_a_gateway_killed_and_brought_back_moves_its_ranks_for_a_while(
    recipe: Path, tmp_path: Path, images: Path
) -> None:
    store = embedded.up(tmp_path / "s3", num_endpoints=2)
    settings = ("train.steps=150", "faults.slow_rank=0", "faults.slow_step_s=0.1")
    try:
        process = start_on_own_store(store, recipe, tmp_path / "run", images, *settings)
        os.kill(store_now(store).gateway_pids[1], signal.SIGKILL)
        rank_pids(tmp_path / "run", 3, after_step=40)
        embedded.up(store.directory, num_endpoints=2)
        finished = finish(process)
    finally:
        embedded.down(store.directory)
    assert finished.code == 0, finished.stderr
    result = result_of(tmp_path / "run")
    lost = next(row for row in result["endpoints"] if row["url"] == store.endpoints[1])
    assert lost["set_aside"] == 1
    # Its new process has counted from 0: no figure rather than a wrong one.
    assert lost["gateway_bytes"] is None
    reasons = {reason["rule"]: reason for reason in result["validity"]["reasons"]}
    assert reasons["received = served"]["actual"] == "bytes not witnessed on 1 of 2 endpoints"
    assert reasons["endpoint policy"]["severity"] == "qualified"
    assert result["validity"]["grade"] == "qualified"


def store_now(store: embedded.EmbeddedStore) -> embedded.EmbeddedStore:
    """With the processes that a run's cold start has made."""
    return embedded.find(store.directory)
