"""The recipe of a run that takes seconds: two ranks of a trivial model over a set of `small_set`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w


def write_recipe(folder: Path, url: str | Path, **sections: dict[str, Any]) -> Path:
    """Writes `recipe.toml` into the folder; `sections` add to what is given here, or replace it."""
    recipe: dict[str, dict[str, Any]] = {
        "data": {"url": str(url), "num_classes": 10},
        "input": {"image_size": 32},
        "model": {"name": "trivial"},
        "train": {"batch_size": 4, "warmup_steps": 1, "steps": 20},
        "launch": {"ranks": 2, "stall_timeout_s": 60},
        # Other tests run on this host, and files of theirs are none of ours.
        "cache": {"drop_caches": False},
    }
    for name, settings in sections.items():
        recipe[name] = recipe.get(name, {}) | settings
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps(recipe))
    return path
