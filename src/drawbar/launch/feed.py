"""A rank's source of batches as the loop sees it: the loader over the rank's endpoint, or one constant batch."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from drawbar.config import Recipe
from drawbar.dataset.index import INDEX_VARIABLE, ShardIndex
from drawbar.dataset.listing import split_pattern
from drawbar.input.libjpeg import Pixels
from drawbar.input.loader import Loader, ReadPlan
from drawbar.input.sample import SampleMaker
from drawbar.journal import InputTotals, JournalWriter
from drawbar.launch.environment import EMBEDDED_ENDPOINTS
from drawbar.launch.listing import list_place
from drawbar.storage.stores import CountedReader, Credentials, endpoint_of_rank, open_place
from drawbar.storage.urls import parse_url
from drawbar.train.loop import HostBatch
from drawbar.world import World


class Feed(Protocol):
    endpoint: str
    dataset_sha256: str
    decoding: dict[str, Any] | None
    """How images are decoded, `input.image_decoder.Decoding`; None where nothing is."""

    def start(self) -> None:
        """Begins reading."""

    def next_batch(self) -> HostBatch: ...

    def close(self) -> InputTotals: ...


def open_feed(recipe: Recipe, world: World, device: torch.device, decoders: int, journal: JournalWriter) -> Feed:
    if recipe.input.source == "constant":
        return ConstantFeed(recipe)
    return DataFeed(recipe, world, device, decoders, journal)


class ConstantFeed:
    """One made-up batch for ever: what the step itself can do."""

    endpoint = ""
    dataset_sha256 = "constant"
    decoding: dict[str, Any] | None = None

    def __init__(self, recipe: Recipe) -> None:
        rng = np.random.default_rng(recipe.input.seed)
        size, batch = recipe.input.image_size, recipe.train.batch_size
        self._pixels = torch.from_numpy(rng.integers(0, 256, (batch, size, size, 3), np.uint8))
        self._labels = torch.from_numpy(rng.integers(0, recipe.data.num_classes, batch, np.int64))
        self._trained = 0

    def start(self) -> None:
        pass

    def next_batch(self) -> HostBatch:
        return HostBatch(pixels=self._pixels, labels=self._labels, epoch=0, release=self._release)

    def close(self) -> InputTotals:
        return InputTotals(
            planned_bytes=0,
            received_bytes=0,
            trained_bytes=0,
            discarded_bytes=0,
            decoded_images=0,
            trained_images=self._trained,
            bad_images=0,
            epochs=0.0,
        )

    def _release(self) -> None:
        self._trained += len(self._labels)


def addresses(recipe: Recipe) -> list[str]:
    """The endpoints; the launcher passes those of the embedded store by environment, as it does credentials."""
    if recipe.storage.endpoints == "embedded":
        return os.environ[EMBEDDED_ENDPOINTS].split(",")
    return list(recipe.storage.endpoints)


class DataFeed:
    """Real records from this rank's endpoint."""

    def __init__(
        self, recipe: Recipe, world: World, device: torch.device, decoders: int, journal: JournalWriter
    ) -> None:
        self._recipe, self._world, self._decoders = recipe, world, decoders
        self._pinned = device.type == "cuda"
        on_s3 = parse_url(recipe.data.url).on_s3
        address = endpoint_of_rank(addresses(recipe), world.rank) if on_s3 else None
        url, pattern = split_pattern(recipe.data.url)
        place = open_place(url, address, Credentials.from_environment() if on_s3 else None, recipe.storage)
        self._reader = CountedReader(place, recipe.storage, journal.write)
        self._listing = list_place(
            place, url, lambda key, size: self._reader.get(key, 0, size, kind="metadata"), pattern
        )
        index = os.environ.get(INDEX_VARIABLE)
        if index:
            self._listing = ShardIndex.load(Path(index)).apply(self._listing)
        self._loader: Loader | None = None
        self._samples = SampleMaker(recipe.input)
        self.decoding: dict[str, Any] | None = asdict(self._samples.decoding)
        self.endpoint = place.endpoint
        self.dataset_sha256 = self._listing.sha256

    def start(self) -> None:
        recipe = self._recipe
        plan = ReadPlan(
            shards=self._listing.shards,
            rank=self._world.rank,
            world_size=self._world.world_size,
            seed=recipe.input.seed,
        )
        self._loader = Loader(
            plan,
            self._reader,
            batch_size=recipe.train.batch_size,
            num_classes=recipe.data.num_classes,
            input=recipe.input,
            storage=recipe.storage,
            samples=self._samples,
            decode_threads=self._decoders,
            allocate=self._allocate,
        )

    def next_batch(self) -> HostBatch:
        loader = self._running()
        batch = loader.next_batch(self._recipe.launch.stall_timeout_s)
        return HostBatch(
            pixels=torch.from_numpy(batch.images),
            labels=torch.from_numpy(batch.labels),
            epoch=batch.epoch,
            release=lambda: loader.recycle(batch),
        )

    def close(self) -> InputTotals:
        return self._running().close()

    def _running(self) -> Loader:
        assert self._loader is not None, "start() comes first"  # noqa: S101
        return self._loader

    def _allocate(self, shape: tuple[int, ...]) -> Pixels:
        pixels: Pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pinned).numpy()
        return pixels
