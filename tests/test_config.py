"""Recipes: what loads, what is refused and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from drawbar.config import Recipe, load_recipe
from drawbar.errors import RecipeError

RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text("")
    return path


@pytest.mark.parametrize("path", sorted(RECIPES.glob("**/*.toml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_and_its_dump_gives_an_equal_object(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    dump = tmp_path / "dump.toml"
    dump.write_text(recipe.to_toml())
    assert load_recipe(dump) == recipe
    assert load_recipe(dump).sha256() == recipe.sha256()


def test_every_key_has_a_default_and_stands_in_the_dump() -> None:
    dumped = Recipe().to_toml()
    for name, section in Recipe.model_fields.items():
        for key in getattr(section.annotation, "model_fields", {name: None}):
            assert f"{key} = " in dumped or f"[{name}.{key}]" in dumped


def test_overrides_change_one_key(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["train.batch_size=4", "model.name=resnet18", 'storage.endpoints=["http://a:1"]'])
    assert (recipe.train.batch_size, recipe.model.name, recipe.storage.endpoints) == (4, "resnet18", ["http://a:1"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.bacth_size=4", "unknown recipe key train.bacth_size; did you mean batch_size?"),
        ("trian.steps=4", "unknown recipe key trian; did you mean train?"),
        ("train.steps=-1", "train.steps is -1: input should be greater than or equal to 1"),
        ("train.batch_size=0", "train.batch_size is 0"),
        ("train.warmup_steps=-5", "train.warmup_steps is -5"),
        ("launch.ranks=-2", "launch.ranks is -2"),
        ("launch.ranks=two", "launch.ranks is 'two'"),
        ("model.name=resnet5", "unknown model 'resnet5'; did you mean 'resnet50'?"),
        ("model.precision=fp8", "model.precision is 'fp8'"),
        ("storage.endpoints=nowhere", "'nowhere' is no list of addresses"),
        ('storage.endpoints=["storage-1:9020"]', "'storage-1:9020' is no address: expected http://host:port"),
        ('storage.endpoints=["http://key:secret@a:1"]', "credentials belong in AWS_ACCESS_KEY_ID"),
        ("storage.endpoints=[]", "[] is no list of addresses"),
        ("data.url=ftp://bucket/prefix", "expected s3://bucket/prefix or a folder"),
        ("faults.slow_rank=7", "faults.slow_rank is 7, but there are 1 ranks"),
        ("steps", "expected section.key=value"),
        ("name.x=1", "name is {'x': 1}"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_right(
    recipe_file: Path, override: str, words: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file, [override])
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_two_wrong_settings_are_both_named(recipe_file: Path) -> None:
    recipe_file.write_text("[train]\nsteps = 0\nbatch_size = 0\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file)
    assert "train.steps" in caught.value.message
    assert "train.batch_size" in caught.value.message


def test_what_is_no_toml_or_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no recipe"):
        load_recipe(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[train\n")
    with pytest.raises(RecipeError, match="is no TOML"):
        load_recipe(bad)
    with pytest.raises(RecipeError, match="cannot read recipe"):
        load_recipe(tmp_path)


@pytest.mark.parametrize("key", ["train.epochs", "quality.limit_epochs"])
def test_epochs_that_are_no_number_of_steps_are_refused(key: str, recipe_file: Path) -> None:
    with pytest.raises(RecipeError, match=f"{key} is 1e.308"):
        load_recipe(recipe_file, [f"{key}=1e308"])
