"""The small detection recipes as they are shipped: a few of their steps, on sets made as they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from drawbar.journal import Step, read_run
from tests.detection_set import pack_scenes
from tests.drawbar_process import drawbar, result_of

RECIPES = Path(__file__).parent.parent / "recipes" / "quality"

pytestmark = pytest.mark.run


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["ssd-small", "maskrcnn-small"])
def test_a_small_detection_recipe_lowers_its_loss(tmp_path: Path, name: str) -> None:
    """On sixteen images, which forty steps are enough to begin with; they are evaluated, once each, at the end."""
    pack_scenes(tmp_path / "scenes", 16)
    settings = [
        f"data.url={tmp_path / 'scenes'}",
        f"data.eval_url={tmp_path / 'scenes'}",
        "quality.target={}",
        "quality.limit_epochs=0",
        "train.steps=30",
        "eval.every_epochs=0",
        "eval.every_steps=40",
        "schedule.warmup=10",
        "input.shuffle_buffer=16",
        "cache.start=any",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    finished = drawbar("run", RECIPES / f"{name}.toml", "--out", tmp_path / "run", *words)
    assert finished.code == 0, finished.stderr
    losses = [
        event.loss
        for rank in read_run(tmp_path / "run").ranks
        for event in rank.events
        if isinstance(event, Step) and event.loss is not None
    ]
    assert len(losses) == 40
    assert sum(losses[-8:]) < 0.75 * sum(losses[:8])
    quality = result_of(tmp_path / "run")["quality"]
    assert [item["images"] for item in quality["evaluations"]] == [16]
    found = {"box_ap", "mask_ap"} if name == "maskrcnn-small" else {"box_ap"}
    assert set(quality["evaluations"][0]["metrics"]) == found
