"""How long a run is, in steps and in epochs, and after which steps it evaluates. Pure functions of the recipe and the
number of records; used by the launcher, by ranks and by whoever judges a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from drawbar.config import Recipe
from drawbar.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """Passes over a set of `num_records`, in steps of `global_batch`."""

    num_records: int
    global_batch: int
    last_batch: str
    """As `input.last_batch`."""

    @classmethod
    def of(cls, recipe: Recipe, num_records: int) -> Epochs:
        return cls(
            num_records=num_records,
            global_batch=recipe.train.batch_size * recipe.launch.ranks,
            last_batch=recipe.input.last_batch,
        )

    def steps(self, epochs: float) -> int:
        """The fewest steps that hold `epochs`. A step that an epoch shares with the next one (`carry`) belongs to it:
        what is due after the epoch is due after that step."""
        # The tiny amount: 1.1 epochs of 10 records are 11 records, not 11.000000000000002.
        return max(1, math.ceil(epochs * self._steps_per_epoch - 1e-9))

    def after(self, steps: int) -> float:
        """Epochs that `steps` steps are."""
        return steps / self._steps_per_epoch

    @property
    def _steps_per_epoch(self) -> float:
        exact = self.num_records / self.global_batch
        return {"drop": float(math.floor(exact)), "pad": float(math.ceil(exact))}.get(self.last_batch, exact)


def run_steps(recipe: Recipe, num_records: int | None) -> int:
    """Steps of a run that nothing ends early, warm-up included.

    Raises RecipeError for a length in epochs where the set's records are not known, or that the warm-up uses up.
    """
    warmup_steps = recipe.train.warmup_steps
    if not recipe.epochs:
        return warmup_steps + recipe.train.steps
    steps = Epochs.of(recipe, _known(recipe, num_records, "a run of so many epochs")).steps(recipe.epochs)
    if steps <= warmup_steps:
        raise RecipeError(
            f"train.warmup_steps is {warmup_steps}, the whole run of {recipe.epochs:g} epochs has {steps} steps",
            hint=f"--set train.warmup_steps={max(0, steps // 10)}",
        )
    return steps


def _known(recipe: Recipe, num_records: int | None, what: str) -> int:
    if num_records is None:
        raise RecipeError(
            f"{what} needs the number of records, which is not known of {recipe.data.url}: its shards are compressed "
            "and have no manifest",
            hint="train.steps and eval.every_steps, or pack the set with `drawbar data pack`",
        )
    return num_records


@dataclass(frozen=True, kw_only=True)
class EvalPlan:
    """After which steps of a run the model is evaluated."""

    recipe: Recipe
    num_records: int | None
    """Of the training set."""
    total_steps: int

    @classmethod
    def of(cls, recipe: Recipe, num_records: int | None) -> EvalPlan:
        """Raises RecipeError where epochs cannot be counted, and where no evaluation would be made at all."""
        plan = cls(recipe=recipe, num_records=num_records, total_steps=run_steps(recipe, num_records))
        if recipe.data.eval_url and not recipe.eval.every_steps:
            _known(recipe, num_records, "evaluating by epochs")
        if recipe.data.eval_url and not plan.due:
            raise RecipeError(
                f"no evaluation would be made: the run has {plan.total_steps} steps, the first would be due later",
                hint="a longer run, or evaluations sooner (section [eval])",
            )
        return plan

    @property
    def due(self) -> dict[int, int]:
        """Number of the step (from 0) after which an evaluation comes -> epochs finished by then, rounded up where
        evaluations are counted in steps."""
        recipe, settings = self.recipe, self.recipe.eval
        if not recipe.data.eval_url:
            return {}
        if settings.every_steps:
            steps = range(settings.every_steps, self.total_steps + 1, settings.every_steps)
            return {count - 1: self._epochs_up_to(count) for count in steps}
        assert self.num_records is not None, "checked by `of`"  # noqa: S101
        epochs = Epochs.of(recipe, self.num_records)
        every = settings.every_epochs or 1
        first = settings.offset_epochs + 1 if settings.offset_epochs >= 0 else every
        wanted = settings.at_epochs or range(first, math.floor(epochs.after(self.total_steps) + 1e-9) + 1, every)
        return {step - 1: epoch for epoch in wanted if (step := epochs.steps(epoch)) <= self.total_steps}

    def _epochs_up_to(self, steps: int) -> int:
        if self.num_records is None:
            return 0
        return math.ceil(Epochs.of(self.recipe, self.num_records).after(steps) - 1e-9)


def is_met(target: dict[str, float], metrics: dict[str, float]) -> bool:
    """Whether one evaluation met all of a target. A loss is met from above."""
    return bool(target) and all(
        name in metrics and (metrics[name] <= value if name == "loss" else metrics[name] >= value)
        for name, value in target.items()
    )
