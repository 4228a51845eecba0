"""`drawbar run --repeats`: one recipe, several seeds, one result. What has ended is kept when the command is given
again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from drawbar.analyze.repeats import SeriesResult, summarize, write_series
from drawbar.analyze.result import RESULT_NAME
from drawbar.analyze.schema import Result
from drawbar.config import Recipe, load_recipe
from drawbar.errors import InputError
from drawbar.launch.command import default_run_dir, run_and_report
from drawbar.report.terminal import series_text
from drawbar.terminal import Terminal


def recipes_of(recipe: Recipe) -> list[Recipe]:
    """One for each repeat: the seed grows by one, so that order, augmentation and weights differ."""
    return [
        recipe.model_copy(
            update={
                "input": recipe.input.model_copy(update={"seed": (recipe.input.seed + i) % 2**32}),
                "quality": recipe.quality.model_copy(update={"repeats": 1}),
            }
        )
        for i in range(recipe.quality.repeats)
    ]


def run_series(recipe: Recipe, out: Path | None, json_out: bool) -> tuple[SeriesResult | None, Result]:
    """Runs what has not ended yet, below `out`: `run-0`, `run-1`, … Returns the series, None where a run failed, and
    the last run's result.

    Raises InputError where `out` holds runs of another recipe, and what a single run raises.
    """
    folder = out or default_run_dir(recipe)
    terminal = Terminal(quiet_stdout=json_out)
    done: list[tuple[str, Result]] = []
    for i, single in enumerate(recipes_of(recipe)):
        run_dir = folder / f"run-{i}"
        result = _finished(run_dir, single)
        if result is None:
            _set_aside(run_dir)
            terminal.line(f"run {i + 1} of {recipe.quality.repeats}, seed {single.input.seed}: {run_dir}")
            result = run_and_report(single, run_dir, json_out)
        else:
            terminal.line(f"run {i + 1} of {recipe.quality.repeats}: kept, it ended before: {run_dir}")
        if result["status"] != "ok":
            return None, result
        done.append((run_dir.name, result))
    series = summarize(recipe.name, done)
    write_series(folder, series)
    if not json_out:
        terminal.line(series_text(series))
    return series, done[-1][1]


def _finished(run_dir: Path, recipe: Recipe) -> Result | None:
    """The result of a run that ended ok. Raises InputError for one of another recipe."""
    if not (run_dir / "recipe.toml").exists():
        return None
    if load_recipe(run_dir / "recipe.toml").sha256() != recipe.sha256():
        raise InputError(
            f"{run_dir} is a run of another recipe", hint="a series is one recipe: choose a new folder with --out"
        )
    try:
        result: Any = json.loads((run_dir / RESULT_NAME).read_text())
    except (OSError, ValueError):
        return None
    return cast(Result, result) if isinstance(result, dict) and result.get("status") == "ok" else None


def _set_aside(run_dir: Path) -> None:
    """A run that was begun and did not end ok keeps its journal under another name."""
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return
    number = 1
    while (other := run_dir.with_name(f"{run_dir.name}-unfinished-{number}")).exists():
        number += 1
    run_dir.rename(other)
