"""What of checkpoints is checked before a run directory exists."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from drawbar.checkpoint.find import find_checkpoints
from drawbar.config import Recipe
from drawbar.errors import InputError
from drawbar.launch.run import Storage, addresses_and_keys
from drawbar.storage.urls import parse_url


def check_checkpoints(recipe: Recipe, storage: Storage) -> Storage:
    """`storage` with the place of checkpoints and the one to go on from, as `find_checkpoints` finds them.

    Raises what it raises, and InputError for `model.weights` that are not there.
    """
    if recipe.model.weights and not Path(recipe.model.weights).is_file():
        raise InputError(f"no such file: model.weights is {recipe.model.weights}")
    settings = recipe.checkpoint
    endpoint, credentials = settings.endpoint, storage.credentials
    if any(parse_url(url).on_s3 for url in (settings.url, settings.resume) if url):
        addresses = storage.endpoints
        if not addresses:
            # The data lie elsewhere.
            addresses, credentials, _ = addresses_and_keys(recipe)
        endpoint = endpoint or addresses[0]
    # One constant batch has no epochs; neither have records repeated from memory.
    num_records = storage.listing.num_records if storage.listing and recipe.input.source == "data" else None
    return replace(storage, checkpoints=find_checkpoints(recipe, endpoint, credentials, num_records))
