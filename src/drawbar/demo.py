"""`drawbar demo`: the main job on this machine with nothing to configure, step by step as a person would type it."""

from __future__ import annotations

import shlex
from importlib import resources
from pathlib import Path

from drawbar.analyze.schema import Result
from drawbar.config import load_recipe
from drawbar.errors import InputError
from drawbar.launch.command import default_run_dir, run_and_report
from drawbar.pack_commands import PackOptions, make, pack_folder
from drawbar.storage import embedded
from drawbar.storage.hold import hold
from drawbar.terminal import Terminal

NUM_ENDPOINTS = 5
NUM_SHARDS = 16


def run_demo(directory: Path, num_images: int, json_out: bool) -> Result:
    """Store, data, cold run, report below `directory`; afterwards no process is left. A second demo reuses the data.

    Raises InputError for a directory that cannot be written, EnvironmentUnfit where another demo works in it, and what
    its steps raise.
    """
    store_dir = directory / "s3"
    try:
        store_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {directory}: {error.strerror}") from None
    with hold(
        directory / "demo.lock", f"another demo is at work in {directory}", "wait for it, or choose another --dir"
    ):
        return _demo(directory, store_dir, num_images, json_out)


def _demo(directory: Path, store_dir: Path, num_images: int, json_out: bool) -> Result:
    terminal = Terminal(quiet_stdout=json_out)
    images_dir = directory / "images"
    with resources.as_file(resources.files("drawbar") / "recipes" / "quickstart.toml") as path:
        recipe = load_recipe(path, [f"storage.embedded_dir={str(store_dir.absolute())!r}"])
    store_at, images_at = shlex.quote(str(store_dir)), shlex.quote(str(images_dir))
    terminal.line(f"$ drawbar s3 up --endpoints {NUM_ENDPOINTS} --dir {store_at}")
    was_running = embedded.status(store_dir).running
    store = embedded.up(store_dir, num_endpoints=NUM_ENDPOINTS, progress=terminal.status)
    try:
        terminal.line(f"$ drawbar data make imagenet-like {images_at} --images {num_images}")
        make(images_dir, images=num_images, classes=recipe.data.num_classes, seed=1, workers=0, quiet=json_out)
        shards = f"--shards {NUM_SHARDS} --store-dir {store_at}"
        terminal.line(f"$ drawbar data pack folder {images_at} {recipe.data.url} {shards}")
        options = PackOptions(shards=NUM_SHARDS, endpoint=store.endpoints[0], store_dir=store_dir, quiet=json_out)
        pack_folder(images_dir, recipe.data.url, None, options)
        run_dir = default_run_dir(recipe, directory / "runs")
        settings = f"--set storage.embedded_dir={store_at} --out {shlex.quote(str(run_dir))}"
        terminal.line(f"$ drawbar run recipes/quickstart.toml {settings}")
        terminal.close()
        return run_and_report(recipe, run_dir, json_out)
    finally:
        terminal.close()
        if not was_running:
            terminal.line(f"$ drawbar s3 down --dir {store_at}")
            embedded.down(store_dir)
