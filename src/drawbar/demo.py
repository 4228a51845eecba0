"""`drawbar demo`: the main job on this machine with nothing to configure, step by step as a person would type it."""

from __future__ import annotations

import shlex
from importlib import resources
from pathlib import Path

from drawbar.analyze.schema import Result
from drawbar.config import load_recipe
from drawbar.data_commands import PackOptions, make, pack_folder
from drawbar.errors import InputError
from drawbar.launch.command import default_run_dir, run_and_report
from drawbar.storage import embedded
from drawbar.terminal import Terminal

NUM_ENDPOINTS = 5
NUM_SHARDS = 16


def run_demo(directory: Path, num_images: int, json_out: bool) -> Result:
    """Store, data, cold run, report below `directory`; afterwards no process is left. A second demo reuses the data.

    Raises InputError for a directory that cannot be written, and what its steps raise.
    """
    terminal = Terminal(quiet_stdout=json_out)
    store_dir, images_dir = directory / "s3", directory / "images"
    try:
        store_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {directory}: {error.strerror}") from None
    with resources.as_file(resources.files("drawbar") / "recipes" / "quickstart.toml") as path:
        recipe = load_recipe(path, [f"storage.embedded_dir={str(store_dir.absolute())!r}"])
    at = shlex.quote(str(store_dir))
    terminal.line(f"$ drawbar s3 up --endpoints {NUM_ENDPOINTS} --dir {at}")
    store = embedded.up(store_dir, num_endpoints=NUM_ENDPOINTS, progress=terminal.status)
    try:
        terminal.line(f"$ drawbar data make imagenet-like {shlex.quote(str(images_dir))} --images {num_images}")
        make(images_dir, images=num_images, classes=recipe.data.num_classes, seed=1, workers=0, quiet=json_out)
        terminal.line(
            f"$ drawbar data pack folder {shlex.quote(str(images_dir))} {recipe.data.url} --shards {NUM_SHARDS}"
        )
        options = PackOptions(shards=NUM_SHARDS, endpoint=store.endpoints[0], store_dir=store_dir, quiet=json_out)
        pack_folder(images_dir, recipe.data.url, None, options)
        run_dir = default_run_dir(recipe, directory / "runs")
        terminal.line(
            f"$ drawbar run recipes/quickstart.toml --set storage.embedded_dir={at} --out {shlex.quote(str(run_dir))}"
        )
        terminal.close()
        return run_and_report(recipe, run_dir, json_out)
    finally:
        terminal.close()
        embedded.down(store_dir)
        terminal.line(f"$ drawbar s3 down --dir {at}")
