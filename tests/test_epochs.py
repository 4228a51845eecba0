"""How long a run is and when it evaluates."""

from __future__ import annotations

from typing import Any

import pytest

from drawbar.config import Recipe, load_recipe
from drawbar.epochs import Epochs, EvalPlan, is_met, run_steps
from drawbar.errors import RecipeError


def recipe(**sections: Any) -> Recipe:
    data = {"url": "/train", "eval_url": "/val"}
    return Recipe.model_validate({"data": data, "launch": {"ranks": 2}, **sections})


def due(records: int | None, **sections: Any) -> dict[int, int]:
    return EvalPlan.of(recipe(**sections), records).due


@pytest.mark.parametrize(
    ("last_batch", "steps", "after_one_step"),
    [("carry", [7, 13, 19], 16 / 100), ("drop", [6, 12, 18], 1 / 6), ("pad", [7, 14, 21], 1 / 7)],
)
def test_epochs_in_steps(last_batch: str, steps: list[int], after_one_step: float) -> None:
    """100 records in steps of 16: 6.25 to an epoch, or 6, or 7; a step that two epochs share belongs to the first."""
    epochs = Epochs(num_records=100, global_batch=16, last_batch=last_batch)
    assert [epochs.steps(count) for count in (1, 2, 3)] == steps
    assert epochs.after(1) == pytest.approx(after_one_step)


def test_a_run_in_epochs_holds_its_warm_up() -> None:
    train = {"batch_size": 8, "warmup_steps": 3, "epochs": 2}
    assert run_steps(recipe(train=train), 96) == 12
    assert run_steps(recipe(train={"batch_size": 8, "warmup_steps": 3, "steps": 12}), None) == 15
    with pytest.raises(RecipeError, match=r"warmup_steps is 12, the whole run of 2 epochs has 12 steps"):
        run_steps(recipe(train={**train, "warmup_steps": 12}), 96)
    with pytest.raises(RecipeError, match="number of records"):
        run_steps(recipe(train=train), None)


def test_the_cadence_of_the_rules() -> None:
    """Every 4 epochs, epochs counted from 0: offset 3 evaluates after the 4th, offset 0 after the 1st."""
    train = {"batch_size": 8, "warmup_steps": 1, "epochs": 12}
    four = {"every_epochs": 4}
    assert list(due(96, train=train, eval=four).values()) == [4, 8, 12]
    assert list(due(96, train=train, eval={**four, "offset_epochs": 3}).values()) == [4, 8, 12]
    assert list(due(96, train=train, eval={**four, "offset_epochs": 0}).values()) == [1, 5, 9]
    assert due(96, train=train, eval={"at_epochs": [2, 5, 40]}) == {11: 2, 29: 5}
    assert list(due(96, train=train).values()) == list(range(1, 13))
    # Steps of 16 of 100 records: the step that an epoch shares with the next one comes before its evaluation.
    assert due(100, train={**train, "epochs": 3}, eval={"every_epochs": 1}) == {6: 1, 12: 2, 18: 3}


def test_evaluations_by_steps_need_no_count() -> None:
    train = {"batch_size": 8, "warmup_steps": 2, "steps": 20}
    assert list(due(None, train=train, eval={"every_steps": 7})) == [6, 13, 20]
    assert due(96, train=train, eval={"every_steps": 7}) == {6: 2, 13: 3, 20: 4}
    with pytest.raises(RecipeError, match="evaluating by epochs needs the number of records"):
        due(None, train=train)


def test_a_run_without_any_evaluation_is_refused() -> None:
    with pytest.raises(RecipeError, match="no evaluation would be made"):
        due(96, train={"batch_size": 8, "epochs": 3, "warmup_steps": 1}, eval={"every_epochs": 4})


def test_a_target_of_several_metrics_is_met_by_all_at_once() -> None:
    assert not is_met({}, {"top1": 1.0})
    assert is_met({"top1": 0.75}, {"top1": 0.75, "loss": 9.0})
    assert is_met({"loss": 0.5}, {"loss": 0.4})
    assert not is_met({"loss": 0.5}, {"loss": 0.6})
    both = {"box_ap": 0.377, "mask_ap": 0.339}
    assert not is_met(both, {"box_ap": 0.4, "mask_ap": 0.3})
    assert not is_met(both, {"box_ap": 0.4})
    assert is_met(both, {"box_ap": 0.4, "mask_ap": 0.34})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"url": "/t"}, "quality": {"target": {"top1": 0.5}}}, "quality.target needs a validation set"),
        ({"data": {"url": "/t"}, "eval": {"every_epochs": 2}}, r"\[eval\] needs a validation set"),
        ({"data": {"url": "s3://b/t", "eval_url": "/v"}}, "same kind of place"),
        ({"train": {"epochs": 3, "steps": 10}}, "train.steps and train.epochs all say how long"),
        ({"train": {"epochs": 3}, "quality": {"target": {"top1": 0.5}, "limit_epochs": 4}}, "quality.limit_epochs all"),
        ({"eval": {"every_epochs": 2, "every_steps": 5}}, "expected one of them"),
        ({"eval": {"every_epochs": 4, "offset_epochs": 4}}, "less than every_epochs"),
        ({"eval": {"at_epochs": [5, 3]}}, "each larger than the last"),
        ({"quality": {"target": {"top1": 75.9}}}, "share from 0 to 1"),
        ({"quality": {"repeats": 5}}, "needs a target"),
        ({"input": {"source": "constant"}}, "needs input.source"),
        ({"quality": {"target": {"top9": 0.5}}}, "top9"),
    ],
)
def test_what_contradicts_itself_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        recipe(**sections)


def test_a_recipe_in_epochs_loads_again_as_it_was_dumped(tmp_path: Any) -> None:
    made = recipe(train={"epochs": 2.5, "batch_size": 4}, quality={"target": {"top1": 0.5, "loss": 1.0}})
    path = tmp_path / "recipe.toml"
    path.write_text(made.to_toml())
    loaded = load_recipe(path)
    assert loaded == made
    assert loaded.sha256() == made.sha256()
    assert load_recipe(path, ["quality.target.top1=0.25"]).quality.targets == {"top1": 0.25, "loss": 1.0}
