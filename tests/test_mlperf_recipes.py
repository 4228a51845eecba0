"""The full-size recipes, checked for form: each command line in them, against the settings of the V100 study."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path

import pytest

from drawbar.config import Recipe, load_recipe
from drawbar.epochs import EvalPlan
from drawbar.train.schedule import global_batch, learning_rate

RECIPES = Path(__file__).parent.parent / "recipes" / "mlperf"
IMAGENET, COCO = 1_281_167, 117_266
GLOBAL_BATCHES = {
    "resnet50": [832, 1664, 3328, 6656],
    "ssd": [480, 960, 896, 1024],
    "maskrcnn": [24, 48, 96, 192],
}
RATES = {
    "resnet50": [5.0, 5.0, 10.0, 20.0],
    "ssd": [2.92e-3 * 480 / 32, 2.92e-3 * 960 / 32, 3.2e-3 * 896 / 32, 3.2e-3 * 1024 / 32],
    "maskrcnn": [0.03, 0.06, 0.12, 0.16],
}
EVALUATIONS = {
    "resnet50": list(range(4, 73, 4)),
    "ssd": [33, 44, 50, 55, 61, 66],
    "maskrcnn": list(range(1, 21)),
}


def of_nodes(name: str) -> list[Recipe]:
    """As the command lines in its comments make it."""
    path = RECIPES / f"{name}.toml"
    lines = [line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("# drawbar run ")]
    commands = [shlex.split(line) for line in lines]
    assert all(
        command[2] == f"recipes/mlperf/{name}.toml" and command[3:5] == ["--repeats", "5"] for command in commands
    )
    return [
        load_recipe(path, [word for before, word in itertools.pairwise(command) if before == "--set"])
        for command in commands
    ]


@pytest.mark.parametrize("name", list(GLOBAL_BATCHES))
def test_the_command_lines_are_the_settings_of_the_study(name: str) -> None:
    recipes = of_nodes(name)
    records = IMAGENET if name == "resnet50" else COCO
    assert [recipe.launch.ranks for recipe in recipes] == [4, 8, 16, 32]
    assert [global_batch(recipe) for recipe in recipes] == GLOBAL_BATCHES[name]
    for recipe, full in zip(recipes, RATES[name], strict=True):
        plan = EvalPlan.of(recipe, records)
        rate = learning_rate(recipe, total_steps=plan.total_steps, num_records=records)
        assert rate.full == pytest.approx(full)
        assert max(rate(step) for step in range(0, plan.total_steps, 25)) == pytest.approx(full, rel=0.02)
        assert rate(plan.total_steps) < full / 50
        assert list(plan.due.values()) == EVALUATIONS[name]
        if name != "resnet50":
            assert rate.warmup == pytest.approx({"ssd": 650, "maskrcnn": 625}[name], abs=0.5)


def test_the_recipes_stand_for_the_largest_size() -> None:
    for name in GLOBAL_BATCHES:
        assert load_recipe(RECIPES / f"{name}.toml") == of_nodes(name)[-1]
