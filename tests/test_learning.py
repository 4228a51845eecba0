"""Networks that really learn, by the shipped recipes, from random weights: minutes each, in the long tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drawbar_process import drawbar, finish, result_of, start

pytestmark = [pytest.mark.long, pytest.mark.run, pytest.mark.timeout(5400)]

RECIPES = Path(__file__).parents[1] / "recipes" / "quality"


def reach(recipe: str, folder: Path, deadline_s: float) -> dict[str, float]:
    """Runs it in the folder that holds its sets; the metrics of the evaluation that met its target."""
    process = start("run", RECIPES / recipe, "--out", folder / "run", cwd=folder)
    finished = finish(process, deadline_s)
    assert finished.code == 0, finished.stderr
    quality = result_of(folder / "run")["quality"]
    assert quality["reached"]
    metrics: dict[str, float] = quality["evaluations"][-1]["metrics"]
    return metrics


def make(folder: Path, *arguments: str) -> None:
    made = drawbar("data", "make", *arguments, cwd=folder)
    assert made.code == 0, made.stderr


def test_resnet18_learns_pictures_of_64_pixels(tmp_path: Path) -> None:
    like = ("--classes", "10", "--size", "64")
    make(tmp_path, "imagenet-like", "small/train", "--images", "4384", *like, "--shards", "8")
    validation = ("--seed", "2", "--split", "validation", "--shards", "2")
    make(tmp_path, "imagenet-like", "small/validation", "--images", "600", *like, *validation)
    assert reach("imagenet-like-64.toml", tmp_path, 1800)["top1"] >= 0.90


@pytest.mark.parametrize(("recipe", "least"), [("ssd-small", 0.5), ("maskrcnn-small", 0.15)])
def test_a_detector_learns_scenes(tmp_path: Path, recipe: str, least: float) -> None:
    make(tmp_path, "coco-like", "scenes/train", "--images", "1500", "--size", "96", "--shards", "8")
    make(tmp_path, "coco-like", "scenes/val", "--images", "200", "--size", "96", "--split", "val", "--shards", "2")
    assert min(reach(f"{recipe}.toml", tmp_path, 5000).values()) >= least
