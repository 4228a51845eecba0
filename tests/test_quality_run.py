"""Runs to quality through `drawbar run`: evaluations exact over ranks, ended by the target or the limit, repeated."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

from drawbar.dataset.manifest import MANIFEST_NAME, Manifest
from drawbar.journal import Evaluation, Step, read_run
from tests.drawbar_process import Finished, drawbar, finish, result_of, start
from tests.small_set import NUM_CLASSES, example, write_set

pytestmark = pytest.mark.run

REPOSITORY = Path(__file__).parents[1]
COLOURS = ((220, 30, 30), (30, 220, 30), (30, 30, 220))
NUM_TRAIN, NUM_VALIDATION = 96, 21


def coloured(number: int) -> bytes:
    """An image whose class is its colour, which the trivial model can learn."""
    pixels = np.full((24, 32, 3), COLOURS[number % 3], np.uint8)
    encoded: bytes = simplejpeg.encode_jpeg(pixels, quality=90)
    return example(number, 1 + number % 3, encoded)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    write_set(folder / "train", payloads={number: coloured(number) for number in range(NUM_TRAIN)})
    write_set(
        folder / "validation",
        num_shards=3,
        records_per_shard=7,
        payloads={number: coloured(number) for number in range(NUM_VALIDATION)},
    )
    return folder


@pytest.fixture
def recipe(sets: Path, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(
        f"""
        name = "colours"
        [data]
        url = "{sets}/train"
        eval_url = "{sets}/validation"
        num_classes = {NUM_CLASSES}
        [input]
        image_size = 16
        [model]
        name = "trivial"
        precision = "fp32"
        [train]
        batch_size = 8
        warmup_steps = 2
        [optimizer]
        learning_rate = 0.1
        [eval]
        batch_size = 4
        [launch]
        ranks = 2
        stall_timeout_s = 60
        """
    )
    return path


def run(recipe: Path, run_dir: Path, *settings: str, more: tuple[str, ...] = ()) -> Finished:
    return drawbar("run", recipe, "--out", run_dir, *(word for text in settings for word in ("--set", text)), *more)


def test_it_ends_at_the_evaluation_that_meets_the_target(recipe: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    finished = run(recipe, run_dir, "quality.target.top1=1.0", "quality.limit_epochs=40")
    assert finished.code == 0, finished.stderr
    result = result_of(run_dir)
    quality = result["quality"]
    assert quality["reached"] is True
    last = quality["evaluations"][-1]
    assert last["metrics"]["top1"] == 1.0
    assert [item["met"] for item in quality["evaluations"]] == [*([False] * (len(quality["evaluations"]) - 1)), True]
    # Six steps of 16 to an epoch of 96; not one more than it took.
    assert [item["step"] for item in quality["evaluations"]] == list(range(6, last["step"] + 1, 6))
    assert quality["steps"] == last["step"] == result["steps"] + result["warmup_steps"]
    assert quality["epochs"] == last["epoch"]
    assert all(item["images"] == NUM_VALIDATION for item in quality["evaluations"])
    # The parts make up the time, which ends when the target is known.
    parts_s = quality["train_s"] + quality["evaluation_s"] + quality["other_s"]
    assert quality["time_to_quality_s"] == pytest.approx(parts_s)
    assert quality["time_to_quality_s"] == last["known_s"]
    assert quality["other_s"] >= 0
    assert quality["samples"] == 16 * quality["steps"]
    assert not [reason for reason in result["validity"]["reasons"] if reason["severity"] == "invalid"]
    assert f"evaluation after step {last['step']} (epoch {last['epoch']}): top1 1.0000" in finished.stdout
    assert "Time to quality (top1 >= 1)" in finished.stdout
    page = (run_dir / "report.html").read_text()
    assert "Time to quality (top1 &gt;= 1)" in page
    assert 'id="figure-accuracy"' in page
    journal = read_run(run_dir)
    for rank in journal.ranks:
        events: list[Evaluation] = rank.of(Evaluation)
        assert [event.images for event in events] == [10 if rank is journal.ranks[0] else 11] * len(events)
        paused = [step.step for step in rank.of(Step) if "after_evaluation" in step.tags]
        assert paused == [event.step + 1 for event in events[:-1]]


def test_metrics_do_not_depend_on_ranks_and_batch_size(recipe: Path, tmp_path: Path) -> None:
    """Untrained, so that the model is the same: its weights follow from the seed."""
    found = []
    for ranks, batch_size in ((1, 8), (3, 2)):
        run_dir = tmp_path / f"ranks-{ranks}"
        finished = run(
            recipe,
            run_dir,
            f"launch.ranks={ranks}",
            f"eval.batch_size={batch_size}",
            "eval.every_steps=5",
            "optimizer.learning_rate=0.0",
            "train.steps=8",
        )
        assert finished.code == 0, finished.stderr
        (first, second) = result_of(run_dir)["quality"]["evaluations"]
        assert first["metrics"] == second["metrics"]
        found.append(first["metrics"])
    assert found[0]["top1"] == found[1]["top1"]
    assert found[0]["top5"] == found[1]["top5"]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)


def test_a_target_never_met_ends_at_the_limit_with_6(recipe: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    finished = run(
        recipe,
        run_dir,
        "quality.target.top1=1.0",
        "quality.limit_epochs=2",
        "optimizer.learning_rate=0.0",
        "eval.on_clock=false",
    )
    assert finished.code == 6
    assert "The target (top1 >= 1) was not met" in finished.error_line
    assert "12 steps and 2.00 epochs; the best were top1" in finished.error_line
    result = result_of(run_dir)
    quality = result["quality"]
    assert (quality["reached"], quality["time_to_quality_s"], quality["steps"]) == (False, None, 12)
    assert quality["time_s"] == pytest.approx(quality["train_s"] + quality["other_s"])
    off = [reason for reason in result["validity"]["reasons"] if reason["rule"] == "evaluation on the clock"]
    assert [reason["severity"] for reason in off] == ["qualified"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ('data.eval_url="{sets}/none"', "validation set (data.eval_url): no such folder: "),
        ("eval.at_epochs=[9]", "no evaluation would be made"),
        ("quality.target.box_ap=0.3", "box_ap"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    recipe: Path, sets: Path, tmp_path: Path, setting: str, words: str
) -> None:
    run_dir = tmp_path / "run"
    finished = run(recipe, run_dir, setting.replace("{sets}", str(sets)), "train.epochs=2")
    assert finished.code == 2
    assert words in finished.error_line
    assert "box_ap" in words or not run_dir.exists()


def test_sets_that_number_classes_differently_are_refused(recipe: Path, tmp_path: Path) -> None:
    write_set(tmp_path / "other", num_shards=1, records_per_shard=6)
    path = tmp_path / "other" / MANIFEST_NAME
    manifest = Manifest.loads(path.read_text(), path.name)
    path.write_text(dataclasses.replace(manifest, labels=manifest.labels[::-1]).dumps())
    finished = run(recipe, tmp_path / "run", f'data.eval_url="{tmp_path}/other"', "train.epochs=2")
    assert finished.code == 2
    assert "do not number the same classes alike" in finished.error_line


def test_repeats_are_one_result_and_what_ended_is_kept(recipe: Path, tmp_path: Path) -> None:
    """Met at the first evaluation, whatever the model."""
    folder = tmp_path / "series"
    settings = ("quality.target.top1=0.0", "quality.limit_epochs=3", "launch.ranks=1")
    finished = run(recipe, folder, *settings, more=("--repeats", "3"))
    assert finished.code == 0, finished.stderr
    series = json.loads((folder / "quality.json").read_text())
    assert [row["run"] for row in series["runs"]] == ["run-0", "run-1", "run-2"]
    assert [row["seed"] for row in series["runs"]] == [1, 2, 3]
    assert all(row["epochs"] == 1 and row["reached"] for row in series["runs"])
    assert sorted(row["counted"] for row in series["runs"]) == ["fastest", "kept", "slowest"]
    assert series["time_to_quality_s"] == sorted(row["time_to_quality_s"] for row in series["runs"])[1]
    assert series["valid"]
    assert "time to quality: " in finished.stdout
    before = {i: (folder / f"run-{i}" / "journal" / "launcher.jsonl").read_bytes() for i in range(3)}
    (folder / "run-1" / "result.json").unlink()
    again = run(recipe, folder, *settings, more=("--repeats", "3"))
    assert again.code == 0, again.stderr
    after = {i: (folder / f"run-{i}" / "journal" / "launcher.jsonl").read_bytes() for i in range(3)}
    assert [before[i] == after[i] for i in range(3)] == [True, False, True]
    assert (folder / "run-1-unfinished-1" / "journal" / "launcher.jsonl").read_bytes() == before[1]
    other = run(recipe, folder, *settings, "optimizer.learning_rate=0.2", more=("--repeats", "3"))
    assert other.code == 2
    assert "is a run of another recipe" in other.error_line


def test_digits_are_learned_to_95_percent(tmp_path: Path) -> None:
    """Real labelled data by the shipped recipe: over two ranks, from random weights, in about 40 seconds."""
    subprocess.run([sys.executable, "scripts/digits", tmp_path / "digits"], check=True, cwd=REPOSITORY, timeout=60)
    for split, shards in (("train", 4), ("validation", 2)):
        source, dest = tmp_path / "digits" / split, tmp_path / "digits" / "packed" / split
        packed = drawbar("data", "pack", "folder", source, dest, "--shards", str(shards), "--split", split)
        assert packed.code == 0, packed.stderr
    recipe = REPOSITORY / "recipes" / "quality" / "digits.toml"
    settings = ("--set", "cache.drop_caches=false")
    process = start("run", recipe, "--out", tmp_path / "run", *settings, cwd=tmp_path)
    finished = finish(process, deadline_s=240)
    assert finished.code == 0, finished.stderr
    quality = result_of(tmp_path / "run")["quality"]
    assert quality["reached"]
    assert quality["evaluations"][-1]["metrics"]["top1"] >= 0.95
    assert quality["evaluations"][-1]["images"] == 360
