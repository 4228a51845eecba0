"""Where TensorBoard's event files go, settled before ranks start."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

from drawbar.config import Recipe
from drawbar.errors import EnvironmentUnfit, InputError

EVENT_FILES = "events.out.tfevents.*"


def train_dir(recipe: Recipe, run_dir: Path) -> Path:
    return Path(recipe.summaries.dir) if recipe.summaries.dir else run_dir / "train"


def with_start_time(recipe: Recipe) -> Recipe:
    """`{time}` in the train directory's name becomes now, as the ECS study's shell wrote it: the same for everybody who
    reads the run's recipe."""
    stamped = recipe.summaries.dir.replace("{time}", time.strftime("%Y-%m-%d-%H-%M-%S"))
    if stamped == recipe.summaries.dir:
        return recipe
    return recipe.model_copy(update={"summaries": recipe.summaries.model_copy(update={"dir": stamped})})


def check_train_dir(recipe: Recipe) -> None:
    """Makes the folder where summaries are wanted and go outside of the run directory.

    Raises EnvironmentUnfit without TensorBoard; InputError for a folder that cannot be written, or that holds another
    run's event files: TensorBoard would show both as one.
    """
    if not recipe.summaries.wanted:
        return
    if importlib.util.find_spec("tensorboard") is None:
        raise EnvironmentUnfit(
            "summaries.verbosity needs TensorBoard, which is not installed", hint="pip install 'drawbar[tensorboard]'"
        )
    if not recipe.summaries.dir:
        return
    folder = Path(recipe.summaries.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = next(folder.glob(EVENT_FILES), None)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"summaries.dir is a file: {folder}") from None
    except OSError as error:
        raise InputError(f"cannot write summaries.dir {folder}: {error.strerror}") from None
    if there is not None:
        raise InputError(
            f"summaries.dir {folder} holds another run's event files: {there.name}",
            hint="a name with {time} in it is new each time",
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"cannot write summaries.dir {folder}: permission denied")
