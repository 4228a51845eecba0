"""Whole runs of detection models, and pairs of model and set that do not fit."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from drawbar.journal import InputTotals, Step, read_run
from tests.detection_ranks import evaluate
from tests.detection_set import NUM_CLASSES, pack_scenes
from tests.drawbar_process import Finished, drawbar
from tests.small_set import write_set

SMALL = {
    "ssd_resnet34": """
        image_size = 96
        [detection]
        blocks = [1, 1, 1]
        channels = 16
        """,
    "maskrcnn_resnet50_fpn": """
        [detection]
        short_side = 96
        long_side = 128
        group_batches = 2
        blocks = [1, 1, 1, 1]
        channels = 16
        norm = "group"
        head_channels = 16
        head_features = 32
        box_sizes = [12, 20, 32, 48, 64]
        proposals = 50
        regions = 16
        """,
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_scenes(tmp_path_factory.mktemp("scenes") / "set", 40)


def write_recipe(folder: Path, scenes: Path, name: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(
        f"""
        [data]
        url = "{scenes}"
        num_classes = {NUM_CLASSES}
        [model]
        name = "{name}"
        precision = "fp32"
        [train]
        batch_size = 4
        warmup_steps = 1
        steps = 6
        [launch]
        ranks = 2
        stall_timeout_s = 100
        [cache]
        start = "any"
        [input]
        shuffle_buffer = 16
        """
        + SMALL[name]
    )
    return path


def run(recipe: Path, *settings: str) -> Finished:
    words = [word for setting in settings for word in ("--set", setting)]
    return drawbar("run", recipe, "--out", recipe.parent / "run", *words, cwd=recipe.parent)


@pytest.mark.run
@pytest.mark.parametrize("name", list(SMALL))
@pytest.mark.parametrize("source", ["data", "constant"])
def test_two_ranks_train_a_detector(tmp_path: Path, scenes: Path, name: str, source: str) -> None:
    finished = run(write_recipe(tmp_path, scenes, name), f"input.source={source}")
    assert finished.code == 0, finished.stderr
    events = [event for rank in read_run(tmp_path / "run").ranks for event in rank.events]
    steps = [event for event in events if isinstance(event, Step)]
    assert len(steps) == 14
    assert all(step.loss is not None and 0.5 < step.loss < math.inf and step.samples == 4 for step in steps)
    totals = [event for event in events if isinstance(event, InputTotals)]
    assert [total.trained_images for total in totals] == [28, 28]
    if source == "data":
        for total in totals:
            assert total.received_bytes == total.trained_bytes + total.discarded_bytes


@pytest.mark.run
@pytest.mark.parametrize("stage", ["decode", "copy"])
def test_a_stage_of_a_detectors_input_runs_alone(tmp_path: Path, scenes: Path, stage: str) -> None:
    recipe = write_recipe(tmp_path, scenes, "maskrcnn_resnet50_fpn")
    finished = drawbar("probe", recipe, "--only", stage, "--seconds", "0.5", "--json", "--set", "launch.ranks=1")
    assert finished.code == 0, finished.stderr
    (found,) = json.loads(finished.stdout)["stages"]
    (rank,) = found["ranks"]
    assert rank["images"] > 0
    if stage == "copy":
        assert rank["bytes"] / rank["images"] == 96 * 128 * 3  # as padded


@pytest.mark.run
def test_three_ranks_agree_with_one_on_average_precision(tmp_path: Path) -> None:
    commands = [
        [sys.executable, "-m", "tests.detection_ranks", str(rank), "3", str(tmp_path / "store")] for rank in range(3)
    ]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    answers = [json.loads(rank.communicate(timeout=100)[0].splitlines()[-1]) for rank in ranks]
    alone = evaluate(0, 1, None)
    assert answers == [alone] * 3
    assert set(alone) == {"box_ap", "mask_ap"}
    assert all(0.3 < value < 1 for value in alone.values())


@pytest.mark.parametrize(
    ("model", "what", "words"),
    [
        ("resnet18", "scenes", "holds records for object detection; model resnet18 needs one label an image"),
        ("ssd_resnet34", "labelled", "holds images with one label each; model ssd_resnet34 needs objects with boxes"),
        ("maskrcnn_resnet50_fpn", "maskless", "was packed without masks; model maskrcnn_resnet50_fpn needs them"),
    ],
)
def test_a_model_and_a_set_that_do_not_fit_are_refused(
    tmp_path: Path, scenes: Path, model: str, what: str, words: str
) -> None:
    recipe = write_recipe(tmp_path, scenes, "ssd_resnet34")
    if what == "labelled":
        write_set(tmp_path / what)
    elif what == "maskless":
        pack_scenes(tmp_path / what, 4, masks=False)
    url = scenes if what == "scenes" else tmp_path / what
    settings = ["detection.blocks=[]"] if model == "maskrcnn_resnet50_fpn" else []
    finished = run(recipe, f"model.name={model}", f"data.url={url}", *settings)
    assert finished.code == 2
    assert words in finished.error_line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.num_classes=5", "the set has 10 classes, data.num_classes is 5"),
        ("detection.blocks=[1, 1, 1, 1]", "detection.blocks is [1, 1, 1, 1]: ssd_resnet34 has 3 stages"),
        ("detection.box_sizes=[1, 2, 3, 4, 5]", "ssd_resnet34 needs 7 sides"),
        ("detection.box_sizes=[2, 1, 3, 4, 5, 6, 7]", "expected 7 (SSD) or 5 (Mask R-CNN) ascending sides"),
        ("detection.short_side=2000", "long_side is 1333, less than short_side, which is 2000"),
        ("input.distortions=true", "input.distortions is set, which has no effect on ssd_resnet34"),
        ("train.label_smoothing=0.1", "train.label_smoothing is set, which has no effect on ssd_resnet34"),
        ("detection.norm=layer", "detection.norm is 'layer'"),
    ],
)
def test_a_wrong_setting_is_refused(tmp_path: Path, scenes: Path, setting: str, words: str) -> None:
    finished = run(write_recipe(tmp_path, scenes, "ssd_resnet34"), setting)
    assert finished.code == 2
    assert words in finished.error_line


def test_checkpoints_of_mask_rcnn_fall_between_groups_of_batches(tmp_path: Path, scenes: Path) -> None:
    recipe = write_recipe(tmp_path, scenes, "maskrcnn_resnet50_fpn")
    finished = run(recipe, f"checkpoint.url={tmp_path / 'saved'}", "checkpoint.every_steps=5")
    assert finished.code == 2
    assert "checkpoint.every_steps is 5, detection.group_batches 2: expected a multiple" in finished.error_line
