"""Whole runs that save and go on: real ranks under torchrun, and the losses of each step beside those of a run that
nobody interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drawbar.checkpoint.manifest import MANIFEST, MODEL, TRAINING
from drawbar.journal import CheckpointRead, CheckpointWrite, Request, Step, read_run
from drawbar.storage import embedded
from tests.drawbar_process import Finished, drawbar, finish, rank_pids, result_of, start
from tests.small_set import NUM_CLASSES, write_set
from tests.tcp_proxy import Proxy

pytestmark = pytest.mark.run

STEPS, LEFT_AT = 14, 7
"""48 records and a global batch of 8: six steps an epoch, so that step 7 lies in the middle of the second."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume") / "set"
    write_set(folder, num_shards=4, records_per_shard=12)
    return folder


def write_recipe(folder: Path, data: Path, *, model: str = "resnet18") -> Path:
    path = folder / "recipe.toml"
    path.write_text(
        f"""
        [data]
        url = "{data}"
        num_classes = {NUM_CLASSES}
        [input]
        image_size = 32
        shuffle_buffer = 8
        last_batch = "drop"
        [model]
        name = "{model}"
        precision = "fp32"
        [train]
        batch_size = 4
        warmup_steps = 2
        steps = {STEPS - 2}
        [launch]
        ranks = 2
        threads_per_rank = 1
        stall_timeout_s = 60
        [cache]
        start = "any"
        """
    )
    return path


@pytest.fixture
def recipe(tmp_path: Path, data: Path) -> Path:
    return write_recipe(tmp_path, data)


@pytest.fixture
def light(tmp_path: Path, data: Path) -> Path:
    """One linear layer: no batch statistics."""
    return write_recipe(tmp_path, data, model="trivial")


def run(recipe: Path, out: str, *settings: str, env: dict[str, str] | None = None) -> Finished:
    words = [word for setting in settings for word in ("--set", setting)]
    return drawbar("run", recipe, "--out", recipe.parent / out, *words, env=env, cwd=recipe.parent)


def losses(run_dir: Path) -> list[dict[int, float | None]]:
    """Of each rank, by step."""
    return [{step.step: step.loss for step in rank.of(Step)} for rank in read_run(run_dir).ranks]


def mean_losses(run_dir: Path) -> dict[int, float]:
    ranks = losses(run_dir)
    return {step: sum(rank[step] or 0.0 for rank in ranks) / len(ranks) for step in ranks[0]}


def rules(run_dir: Path) -> dict[str, str]:
    return {reason["rule"]: reason["actual"] for reason in result_of(run_dir)["validity"]["reasons"]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_has_the_losses_of_one_that_was_not_interrupted(recipe: Path, ranks: int) -> None:
    shape = (f"launch.ranks={ranks}", f"train.batch_size={8 // ranks}")
    folder = recipe.parent
    whole = run(recipe, "whole", *shape, "checkpoint.url=whole-checkpoints", f"checkpoint.every_steps={LEFT_AT}")
    assert whole.code == 0, whole.stderr
    resumed = run(recipe, "rest", *shape, f"checkpoint.resume=whole-checkpoints/step-{LEFT_AT:08d}")
    assert resumed.code == 0, resumed.stderr
    expected, got = losses(folder / "whole"), losses(folder / "rest")
    for before, after in zip(expected, got, strict=True):
        assert list(after) == list(range(LEFT_AT, STEPS))
        assert after == {step: loss for step, loss in before.items() if step >= LEFT_AT}
        assert len(set(before.values())) == STEPS

    result = result_of(folder / "rest")
    assert result["resumed"]["step"] == LEFT_AT
    assert result["resumed"]["differences"] == []
    assert result["resumed"]["ranks"] == ranks
    assert (result["warmup_steps"], result["steps"]) == (2, STEPS - LEFT_AT - 2)
    assert result["samples"] == (STEPS - LEFT_AT - 2) * 8
    assert "resumed training" not in rules(folder / "rest")
    assert result["validity"]["grade"] == "qualified", "as short as it is, it is no worse than the other"
    assert f"resumed from step {LEFT_AT}, the earlier part is not counted" in " ".join(resumed.stdout.split())


def test_what_is_written_is_reported_and_pauses_are_no_part_of_steps(recipe: Path) -> None:
    finished = run(recipe, "run", "checkpoint.url=ck", "checkpoint.every_steps=5", "checkpoint.every_epochs=1")
    assert finished.code == 0, finished.stderr
    ranks = read_run(recipe.parent / "run").ranks
    writes = ranks[0].of(CheckpointWrite)
    # Six steps an epoch; the last step is always saved; the two newest are kept.
    assert [write.step for write in writes] == [5, 6, 10, 12, 14]
    assert ranks[1].of(CheckpointWrite) == []
    assert sorted(path.name for path in (recipe.parent / "ck").iterdir()) == ["step-00000012", "step-00000014"]
    last = recipe.parent / "ck" / "step-00000014"
    assert writes[-1].size_bytes == sum(path.stat().st_size for path in last.iterdir())
    for rank in ranks:
        tagged = [step.step for step in rank.of(Step) if "after_checkpoint" in step.tags]
        assert tagged == [5, 6, 10, 12]
    result = result_of(recipe.parent / "run")
    assert "step times" not in rules(recipe.parent / "run")
    assert result["checkpoints"]["written"] == 5
    assert result["checkpoints"]["bytes"] == sum(write.size_bytes for write in writes)
    assert result["checkpoints"]["mb_per_s"] == pytest.approx(
        sum(write.size_bytes for write in writes) / 1e6 / sum(write.write_s for write in writes)
    )
    assert result["checkpoints"]["pause_s"]["max"] == max(write.pause_s for write in writes)
    assert "5 checkpoints of" in finished.stdout
    assert "5 checkpoints of" in (recipe.parent / "run" / "report.html").read_text()
    # The model's file is of use by itself.
    model = load_file(last / "model.safetensors")
    assert model["fc.weight"].shape == (NUM_CLASSES, 512)


def test_another_number_of_ranks_goes_on_alike_and_says_what_is_not_the_same(light: Path) -> None:
    """The same global batches of a model without batch statistics: equal but for rounding."""
    folder = light.parent
    every = f"checkpoint.every_steps={LEFT_AT}"
    assert run(light, "whole", "checkpoint.url=ck", every).code == 0
    shape = ("launch.ranks=1", "train.batch_size=8")
    finished = run(light, "rest", *shape, f"checkpoint.resume=ck/step-{LEFT_AT:08d}")
    assert finished.code == 0, finished.stderr
    expected, got = mean_losses(folder / "whole"), mean_losses(folder / "rest")
    assert list(got) == list(range(LEFT_AT, STEPS))
    for step, loss in got.items():
        assert loss == pytest.approx(expected[step], rel=1e-5)
    assert result_of(folder / "rest")["resumed"]["differences"] == [
        "there were 2 ranks, now 1: sums are rounded otherwise"
    ]
    assert rules(folder / "rest")["resumed training"] == "there were 2 ranks, now 1: sums are rounded otherwise"


def test_batch_norm_at_another_number_of_ranks_qualifies_the_result(recipe: Path) -> None:
    every = ("checkpoint.url=ck", f"checkpoint.every_steps={LEFT_AT}", f"train.steps={LEFT_AT - 2}")
    assert run(recipe, "first", *every).code == 0
    shape = ("launch.ranks=1", "train.batch_size=8", f"train.steps={LEFT_AT}")
    finished = run(recipe, "rest", *shape, "checkpoint.url=ck", "checkpoint.resume=auto")
    assert finished.code == 0, finished.stderr
    actual = rules(recipe.parent / "rest")["resumed training"]
    assert "there were 2 ranks, now 1: batch norm takes its statistics over the batch of a rank" in actual


def test_auto_goes_on_after_a_rank_was_killed(light: Path) -> None:
    """And again with the same command: a job that a scheduler puts back."""
    settings = ("checkpoint.url=ck", "checkpoint.every_steps=4", "checkpoint.resume=auto", "train.steps=40")
    slow = ("faults.slow_rank=0", "faults.slow_step_s=0.05")
    words = [word for setting in (*settings, *slow) for word in ("--set", setting)]
    process = start("run", light, "--out", light.parent / "first", *words, cwd=light.parent)
    pids = rank_pids(light.parent / "first", 2, after_step=9)
    os.kill(pids[0], signal.SIGKILL)
    assert finish(process).code == 4
    assert result_of(light.parent / "first")["resumed"] is None
    finished = run(light, "second", *settings)
    assert finished.code == 0, finished.stderr
    resumed = result_of(light.parent / "second")["resumed"]
    assert resumed["step"] in range(4, 42, 4)
    assert "resuming from step" in finished.stdout
    assert [path.name for path in (light.parent / "ck").iterdir() if path.name.startswith(".")] == []
    third = run(light, "third", *settings)
    assert third.code == 2
    assert "nothing is left to train: the checkpoint is of step 42, the recipe ends at step 42" in third.error_line


def test_a_flipped_byte_is_found_by_its_digest(light: Path) -> None:
    assert run(light, "first", "checkpoint.url=ck", "train.steps=4").code == 0
    path = light.parent / "ck" / "step-00000006" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    finished = run(light, "second", "checkpoint.url=ck", "checkpoint.resume=auto")
    assert finished.code == 4
    assert "model.safetensors has another CRC32C than was written" in finished.error_line
    assert "checkpoint.resume names an older one" in finished.stderr


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (["model.name=resnet18"], 2, "checkpoint is of another model: trivial, the recipe's is resnet18"),
        (["input.seed=5"], 2, "cannot resume with another input.seed: it was 1, now it is 5"),
        (["checkpoint.resume=recipe.toml"], 2, "recipe.toml"),
        (["checkpoint.url=recipe.toml/below", "checkpoint.resume=never"], 2, "cannot write to recipe.toml/below"),
        (["checkpoint.resume=never"], 2, "checkpoint.url holds checkpoints already, the last of step 6"),
        (
            ["checkpoint.every_steps=5", "checkpoint.url="],
            2,
            "url is empty: checkpoints that are asked for need a place",
        ),
        (["checkpoint.url=gs://bucket/x"], 2, "expected s3://bucket/prefix or a folder"),
        (["model.weights=none.pth"], 2, "no such file: model.weights is none.pth"),
    ],
)
def test_refused_before_anything_starts(
    tmp_path_factory: pytest.TempPathFactory, saved: Path, settings: list[str], code: int, words: str
) -> None:
    out = tmp_path_factory.mktemp("refused") / "run"
    finished = run(saved, str(out), "checkpoint.url=ck", "checkpoint.resume=auto", *settings)
    assert finished.code == code
    assert words in finished.error_line
    assert not out.exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A recipe of the trivial model beside which `ck` holds its checkpoint of step 6."""
    recipe = write_recipe(tmp_path_factory.mktemp("saved"), data, model="trivial")
    assert run(recipe, "first", "checkpoint.url=ck", "train.steps=4").code == 0
    return recipe


def test_a_disk_that_is_full_stops_the_run_with_one_line(recipe: Path) -> None:
    """resnet18 needs 90 MB: the first checkpoint fits, the second beside it does not."""
    folder = recipe.parent / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=120m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs root: a small file system to fill")
    try:
        finished = run(recipe, "run", f"checkpoint.url={folder}", "checkpoint.every_steps=6", "launch.ranks=1")
        assert finished.code == 3
        assert f"checkpoint {folder}/step-00000012: No space left on device" in finished.error_line
        assert "hint: the checkpoints before it are whole" in finished.stderr
        assert [path.name for path in folder.iterdir()] == ["step-00000006"]
        assert len(load_file(folder / "step-00000006" / "model.safetensors")) > 60
    finally:
        subprocess.run(["umount", folder], check=True)


def test_an_object_store_holds_checkpoints_and_each_byte_read_back_is_counted(
    light: Path, embedded_store: embedded.EmbeddedStore
) -> None:
    embedded.ensure_bucket(embedded_store, "resume")
    store = (f"storage.embedded_dir={embedded_store.directory}", "checkpoint.url=s3://resume/training")
    first = run(light, "first", *store, "checkpoint.every_steps=3", "train.steps=5")
    assert first.code == 0, first.stderr
    again = run(light, "again", *store, "checkpoint.resume=auto")
    assert again.code == 0, again.stderr
    for rank in read_run(light.parent / "again").ranks:
        read = rank.first(CheckpointRead)
        assert read is not None
        assert read.step == 7
        asked = [request for request in rank.of(Request) if request.kind == "checkpoint"]
        assert {request.key.rpartition("/")[2] for request in asked} == {MANIFEST, MODEL, TRAINING}
        assert sum(request.got_bytes for request in asked) == read.size_bytes
    assert result_of(light.parent / "again")["resumed"]["differences"] == []


def test_an_endpoint_that_is_lost_ends_the_run_with_one_line(
    light: Path, embedded_store: embedded.EmbeddedStore
) -> None:
    embedded.ensure_bucket(embedded_store, "resume")
    with Proxy(embedded_store.endpoints[0]) as proxy:
        settings = (
            f"storage.embedded_dir={embedded_store.directory}",
            "checkpoint.url=s3://resume/lost",
            f"checkpoint.endpoint={proxy.endpoint}",
            "checkpoint.every_steps=10",
            "train.steps=300",
            "faults.slow_rank=0",
            "faults.slow_step_s=0.05",
        )
        words = [word for setting in settings for word in ("--set", setting)]
        process = start("run", light, "--out", light.parent / "run", *words, cwd=light.parent)
        end_t = time.monotonic() + 60
        while "checkpoint_write" not in _text(light.parent / "run") and time.monotonic() < end_t:
            time.sleep(0.1)
        proxy.cut()
        finished = finish(process)
    assert finished.code == 3
    assert "endpoint does not answer: checkpoint s3://resume/lost/step-" in finished.error_line
    assert proxy.endpoint in finished.error_line


def _text(run_dir: Path) -> str:
    path = run_dir / "journal" / "rank-00000.jsonl"
    return path.read_text() if path.exists() else ""


def test_weights_of_a_file_are_where_training_begins(recipe: Path, tmp_path: Path) -> None:
    from drawbar.models.build import build_model

    torch.manual_seed(9)
    model: Any = build_model("resnet18", 77)
    save_file(model.state_dict(), tmp_path / "pretrained.safetensors")
    short = ("launch.ranks=1", "train.steps=1", "train.warmup_steps=0", "optimizer.learning_rate=0.0")
    finished = run(recipe, "run", *short, "model.weights=pretrained.safetensors", "checkpoint.url=ck")
    assert finished.code == 0, finished.stderr
    found = result_of(recipe.parent / "run")["weights"]
    assert found["head"] == ["fc.weight", "fc.bias"]
    assert (found["missing"], found["unexpected"]) == ([], [])
    assert "left random, as the classes differ: fc.weight, fc.bias" in " ".join(finished.stdout.split())
    saved_model = load_file(recipe.parent / "ck" / "step-00000001" / "model.safetensors")
    assert torch.equal(saved_model["layer1.0.conv1.weight"], model.state_dict()["layer1.0.conv1.weight"])
    assert saved_model["fc.weight"].shape == (NUM_CLASSES, 512)
