"""The learning rate of each step against torch's own schedulers, and what a recipe makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from drawbar.config import Recipe, load_recipe
from drawbar.errors import RecipeError
from drawbar.launch.run import check_storage
from drawbar.train.schedule import LearningRate, learning_rate, steps_per_epoch

STEPS = 60


def rates_of(make: Any, full: float) -> list[float]:
    """What a scheduler of torch gives for each step; `make` is told the optimizer."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=full)
    scheduler = make(optimizer)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


full_rates = st.floats(1e-4, 32.0)
warmups = st.integers(1, 20)
factors = st.floats(0.01, 1.0)


@settings(deadline=None, max_examples=30)
@given(full=full_rates, warmup=warmups, factor=factors)
def test_a_warm_up_is_torchs_linear_one(full: float, warmup: int, factor: float) -> None:
    ours = LearningRate(full=full, warmup=warmup, warmup_factor=factor)
    theirs = rates_of(lambda o: lr_scheduler.LinearLR(o, start_factor=factor, total_iters=warmup), full)
    assert [ours(step) for step in range(STEPS)] == pytest.approx(theirs)


@settings(deadline=None, max_examples=30)
@given(full=full_rates, warmup=warmups, factor=factors, boundaries=st.sets(st.integers(1, STEPS), min_size=1))
def test_step_decay_is_torchs_multi_step_from_the_start_of_training(
    full: float, warmup: int, factor: float, boundaries: set[int]
) -> None:
    places = sorted(boundaries)
    ours = LearningRate(
        full=full,
        kind="step",
        warmup=warmup,
        warmup_factor=factor,
        boundaries=tuple(places),
        factors=(0.5,) * len(places),
    )

    def both(optimizer: torch.optim.Optimizer) -> lr_scheduler.ChainedScheduler:
        return lr_scheduler.ChainedScheduler(
            [
                lr_scheduler.LinearLR(optimizer, start_factor=factor, total_iters=warmup),
                lr_scheduler.MultiStepLR(optimizer, places, gamma=0.5),
            ]
        )

    assert [ours(step) for step in range(STEPS)] == pytest.approx(rates_of(both, full), rel=1e-6)


@settings(deadline=None, max_examples=30)
@given(
    full=full_rates, warmup=warmups, factor=factors, length=st.integers(25, STEPS), power=st.sampled_from([1.0, 2.0])
)
def test_polynomial_decay_is_torchs_from_the_end_of_the_warm_up(
    full: float, warmup: int, factor: float, length: int, power: float
) -> None:
    ours = LearningRate(full=full, kind="polynomial", warmup=warmup, warmup_factor=factor, length=length, power=power)

    def one_after_the_other(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
        return lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, start_factor=factor, total_iters=warmup),
                lr_scheduler.PolynomialLR(optimizer, total_iters=length - warmup, power=power),
            ],
            [warmup],
        )

    assert [ours(step) for step in range(STEPS)] == pytest.approx(
        rates_of(one_after_the_other, full), rel=1e-6, abs=1e-9 * full
    )


@settings(deadline=None, max_examples=30)
@given(full=full_rates, length=st.integers(2, STEPS), share=st.floats(0, 1))
def test_cosine_decay_is_torchs_and_stays_at_its_end(full: float, length: int, share: float) -> None:
    ours = LearningRate(full=full, kind="cosine", length=length, end=share * full)
    theirs = rates_of(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=length, eta_min=share * full), full)
    for step in range(STEPS):
        assert ours(step) == pytest.approx(theirs[min(step, length)] if length < STEPS else theirs[step], rel=1e-6)


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate(sections)


def test_mlperfs_resnet_with_sgd_from_one_recipe_at_any_global_batch() -> None:
    """0.128 per 256, 5 epochs of warm-up from 0, a tenth at epochs 30, 60, 80 and 90; 1,281,167 images."""
    sections = {
        "train": {"batch_size": 128, "steps": 1000},
        "launch": {"ranks": 8},
        "optimizer": {"learning_rate": 0.128},
        "schedule": {
            "name": "step",
            "unit": "epochs",
            "warmup": 5.0,
            "boundaries": [30.0, 60.0, 80.0, 90.0],
            "reference_batch": 256,
        },
    }
    rate = learning_rate(recipe(**sections), total_steps=1000, num_records=1_281_167)
    epoch = 1_281_167 / 1024
    assert rate(0) == 0
    assert rate(round(2.5 * epoch)) == pytest.approx(0.512 / 2, rel=1e-3)
    for first, share in ((5, 1), (30, 0.1), (60, 0.01), (80, 0.001), (90, 1e-4)):
        assert rate(int(first * epoch) + 1) == pytest.approx(0.512 * share)
    assert rate(int(30 * epoch)) == pytest.approx(0.512)


def test_mlperfs_ssd_warms_up_from_a_share_and_has_its_own_factor_at_each_boundary() -> None:
    """Rate rises by base / (wb * 2^k) per batch: it begins at 1 - 2^-k."""
    sections = {
        "optimizer": {"learning_rate": 2.5e-3},
        "schedule": {
            "name": "step",
            "warmup": 300.0,
            "warmup_factor": 0.5,
            "boundaries": [400.0, 500.0],
            "factor": [0.1, 0.5],
        },
    }
    rate = learning_rate(recipe(**sections), total_steps=10, num_records=None)
    assert [rate(step) for step in (0, 150, 300, 400, 500)] == pytest.approx(
        [1.25e-3, 1.875e-3, 2.5e-3, 2.5e-4, 1.25e-4]
    )
    assert rate(1) - rate(0) == pytest.approx(2.5e-3 / (300 * 2))


def test_mlperfs_lars_falls_with_the_square_from_the_end_of_the_warm_up() -> None:
    sections = {
        "optimizer": {"name": "lars", "learning_rate": 10.0},
        "schedule": {"name": "polynomial", "warmup": 100.0, "end_learning_rate": 1e-4},
    }
    rate = learning_rate(recipe(**sections), total_steps=1100, num_records=None)
    assert rate(50) == pytest.approx(5.0)
    assert rate(100) == pytest.approx(10.0)
    assert rate(600) == pytest.approx((10.0 - 1e-4) * 0.25 + 1e-4)
    assert rate(1100) == rate(5000) == pytest.approx(1e-4)


@pytest.mark.parametrize(("last_batch", "steps"), [("drop", 3.0), ("pad", 4.0), ("carry", 3.125)])
def test_an_epoch_has_as_many_steps_as_the_last_batch_makes_it(last_batch: str, steps: float) -> None:
    sections = {"train": {"batch_size": 16}, "launch": {"ranks": 2}, "input": {"last_batch": last_batch}}
    assert steps_per_epoch(recipe(**sections), 100) == steps


def test_a_schedule_in_epochs_without_known_records_is_refused_before_anything_starts() -> None:
    sections = {"input": {"source": "constant"}, "schedule": {"unit": "epochs", "warmup": 5.0}}
    with pytest.raises(RecipeError, match="how many records an epoch has is not known"):
        check_storage(recipe(**sections))


def test_a_warm_up_that_leaves_nothing_of_the_run_is_refused() -> None:
    sections = {
        "input": {"source": "constant"},
        "train": {"steps": 20, "warmup_steps": 5},
        "schedule": {"name": "cosine", "warmup": 25.0},
    }
    with pytest.raises(RecipeError, match=r"schedule\.warmup takes 25 of the run's 25 steps"):
        check_storage(recipe(**sections))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.learning_rate=0.1"], "unknown recipe key train.learning_rate; did you mean optimizer.learning_rate?"),
        (["train.momentum=0.1"], "unknown recipe key train.momentum; did you mean optimizer.momentum?"),
        (["schedule.name=step"], "boundaries are [], name is 'step'"),
        (["schedule.boundaries=[1.0]"], "boundaries are [1.0], name is 'constant'"),
        (["schedule.name=step", "schedule.boundaries=[3.0, 2.0]"], "each larger than the last"),
        (["schedule.name=step", "schedule.boundaries=[3.0]", "schedule.factor=[0.1, 0.1]"], "2 factors for 1 bound"),
        (["schedule.name=cosine", "schedule.length=5.0", "schedule.warmup=5.0"], "of which the warm-up takes 5"),
        (["optimizer.name=adam"], "optimizer.name is 'adam'"),
        (["optimizer.nesterov=true", "optimizer.momentum=0.0"], "nesterov goes with name sgd and a momentum"),
    ],
)
def test_settings_that_do_not_go_together_are_named(tmp_path: Any, overrides: list[str], words: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert words in caught.value.message
