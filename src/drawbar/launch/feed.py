"""A rank's source of batches as the loop sees it: the loader over the rank's endpoint, or one constant batch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from drawbar.config import Recipe
from drawbar.dataset.index import INDEX_VARIABLE, ShardIndex
from drawbar.dataset.listing import Listing, split_pattern
from drawbar.input.libjpeg import Pixels
from drawbar.input.loader import Loader, ReadPlan
from drawbar.input.memory import MemoryReader
from drawbar.input.sample import SampleMaker
from drawbar.journal import Event, InputTotals
from drawbar.launch.environment import EMBEDDED_ENDPOINTS
from drawbar.launch.listing import list_place
from drawbar.storage.environment import Connection, Credentials, environment_endpoint
from drawbar.storage.reader import CountedReader, Reader
from drawbar.storage.stores import Place, open_place
from drawbar.storage.urls import parse_url
from drawbar.train.batch import HostBatch
from drawbar.world import World

_SAMPLE_BYTES = 8 << 20
"""Of real records that `input.source = "memory"` repeats, where the recipe names no request size."""


class Feed(Protocol):
    endpoint: str
    dataset_sha256: str
    decoding: dict[str, Any] | None
    """How images are decoded, `input.image_decoder.Decoding`; None where nothing is."""
    storage: dict[str, Any]
    """What the store is talked to with, environment and defaults included; no secret."""
    num_records: int | None
    """Of the data set; None where they are not known, or there is none."""

    def start(self) -> None:
        """Begins reading."""

    def next_batch(self) -> HostBatch: ...

    def close(self) -> list[Event]:
        """Stops reading; returns what is to be written down of it."""


def open_feed(
    recipe: Recipe, world: World, device: torch.device, decoders: int, record: Callable[[Event], None]
) -> Feed:
    """`record` is told of every GET, and of what becomes of endpoints."""
    if recipe.input.source == "constant":
        return ConstantFeed(recipe)
    return DataFeed(recipe, world, device, decoders, record)


class ConstantFeed:
    """One made-up batch for ever: what the step itself can do."""

    endpoint = ""
    dataset_sha256 = "constant"
    num_records: int | None = None
    decoding: dict[str, Any] | None = None
    storage: dict[str, Any] = {}  # noqa: RUF012 (an instance never changes it)

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

    def close(self) -> list[Event]:
        totals = InputTotals(
            planned_bytes=0,
            received_bytes=0,
            trained_bytes=0,
            discarded_bytes=0,
            decoded_images=0,
            trained_images=self._trained,
            bad_images=0,
            epochs=0.0,
        )
        return [totals]

    def _release(self) -> None:
        self._trained += len(self._labels)


def addresses(recipe: Recipe) -> list[str]:
    """The endpoints; the launcher passes those of the embedded store by environment, as it does credentials."""
    if recipe.storage.endpoints == "embedded":
        return os.environ[EMBEDDED_ENDPOINTS].split(",")
    if recipe.storage.endpoints == "environment":
        return [environment_endpoint()]
    return list(recipe.storage.endpoints)


@dataclass(frozen=True, kw_only=True)
class OpenSet:
    """A set of shards as one rank reaches and sees it."""

    places: list[Place]
    """One through each endpoint, in the recipe's order; one for a folder."""
    reader: CountedReader
    listing: Listing
    """With record sizes from the launcher's index where there is one."""
    credentials: Credentials | None


def open_set(recipe: Recipe, url: str, index_variable: str, rank: int, record: Callable[[Event], None]) -> OpenSet:
    """Lists the shards under `url` through this rank's endpoint. `index_variable` names the file of their index."""
    on_s3 = parse_url(url).on_s3
    url, pattern = split_pattern(url)
    credentials = Credentials.from_environment() if on_s3 else None
    endpoints = addresses(recipe) if on_s3 else [None]
    places = [open_place(url, address, credentials, recipe.storage) for address in endpoints]
    reader = CountedReader(places, recipe.storage, record, record, rank=rank)
    listing = list_place(reader.home, url, lambda key, size: reader.get(key, 0, size, kind="metadata"), pattern)
    index = os.environ.get(index_variable)
    if index:
        listing = ShardIndex.load(Path(index)).apply(listing)
    return OpenSet(places=places, reader=reader, listing=listing, credentials=credentials)


class DataFeed:
    """Real records from this rank's endpoint."""

    def __init__(
        self, recipe: Recipe, world: World, device: torch.device, decoders: int, record: Callable[[Event], None]
    ) -> None:
        self._recipe, self._world, self._decoders = recipe, world, decoders
        self._pinned = device.type == "cuda"
        found = open_set(recipe, recipe.data.url, INDEX_VARIABLE, world.rank, record)
        self._reader, self._listing = found.reader, found.listing
        self._samples = SampleMaker(recipe.input)
        self.decoding: dict[str, Any] | None = dataclasses.asdict(self._samples.decoding)
        self._loader: Loader | None = None
        pinned_to_home = recipe.storage.policy == "rank" or found.credentials is None
        self.endpoint = self._reader.home.endpoint if pinned_to_home else ""
        self.dataset_sha256 = self._listing.sha256
        self.num_records = self._listing.num_records
        self.storage = {
            "policy": recipe.storage.policy,
            "endpoints": [place.endpoint for place in found.places],
            "region": found.credentials.region if found.credentials else "",
            **dataclasses.asdict(Connection.of(recipe.storage)),
        }

    @property
    def reader(self) -> CountedReader:
        return self._reader

    @property
    def plan(self) -> ReadPlan:
        return ReadPlan(
            shards=self._listing.shards,
            rank=self._world.rank,
            world_size=self._world.world_size,
            batch_size=self._recipe.train.batch_size,
        )

    def start(self) -> None:
        recipe, plan = self._recipe, self.plan
        reader: Reader = self._reader
        if recipe.input.source == "memory":
            shard = plan.shards[plan.rank % len(plan.shards)]
            reader = MemoryReader(self._reader, shard, recipe.storage.request_bytes or _SAMPLE_BYTES)
            plan = dataclasses.replace(plan, shards=(reader.sample,), rank=0, world_size=1)
        self._loader = Loader(
            plan,
            reader,
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

    def close(self) -> list[Event]:
        loader = self._running()
        return [loader.close(), loader.report(), *loader.stages()]

    @property
    def trained_bytes(self) -> int:
        """Of framed records, so far."""
        return self._running().trained_bytes

    def _running(self) -> Loader:
        assert self._loader is not None, "start() comes first"  # noqa: S101
        return self._loader

    def _allocate(self, shape: tuple[int, ...]) -> Pixels:
        pixels: Pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pinned).numpy()
        return pixels
