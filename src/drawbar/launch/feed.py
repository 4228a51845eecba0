"""A rank's source of batches as the loop sees it: the loader over the rank's endpoint, or one constant batch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from drawbar.config import Recipe
from drawbar.dataset.index import INDEX_VARIABLE, ShardIndex
from drawbar.dataset.listing import split_pattern
from drawbar.input.decode import DecodePool
from drawbar.input.gpu_decode import GpuDecodePool, GpuDecoder, open_gpu_decoder
from drawbar.input.libjpeg import Pixels
from drawbar.input.loader import Loader, ReadPlan
from drawbar.input.memory import MemoryReader
from drawbar.input.sample import SampleMaker
from drawbar.journal import Event, InputTotals
from drawbar.launch.environment import EMBEDDED_ENDPOINTS
from drawbar.launch.listing import list_place
from drawbar.storage.environment import Connection, Credentials, environment_endpoint
from drawbar.storage.reader import CountedReader, Reader
from drawbar.storage.stores import open_place
from drawbar.storage.urls import parse_url
from drawbar.train.loop import STEPS_IN_FLIGHT, HostBatch
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
    keys: list[str]
    """Of the shards."""

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
        return ConstantFeed(recipe, device)
    return DataFeed(recipe, world, device, decoders, record)


class ConstantFeed:
    """One made-up batch for ever: what the step itself can do."""

    endpoint = ""
    dataset_sha256 = "constant"
    decoding: dict[str, Any] | None = None
    storage: dict[str, Any] = {}  # noqa: RUF012 (an instance never changes it)
    keys: list[str] = []  # noqa: RUF012

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        rng = np.random.default_rng(recipe.input.seed)
        size, batch = recipe.input.image_size, recipe.train.batch_size
        pixels = torch.from_numpy(rng.integers(0, 256, (batch, size, size, 3), np.uint8))
        self._pixels = pixels.pin_memory() if device.type == "cuda" else pixels
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


class DataFeed:
    """Real records from this rank's endpoint."""

    def __init__(
        self, recipe: Recipe, world: World, device: torch.device, decoders: int, record: Callable[[Event], None]
    ) -> None:
        self._recipe, self._world, self._decoders = recipe, world, decoders
        self._on_gpu = device.type == "cuda"
        on_s3 = parse_url(recipe.data.url).on_s3
        url, pattern = split_pattern(recipe.data.url)
        credentials = Credentials.from_environment() if on_s3 else None
        places = [
            open_place(url, address, credentials, recipe.storage)
            for address in (addresses(recipe) if on_s3 else [None])
        ]
        self._reader = CountedReader(places, recipe.storage, record, record, rank=world.rank)
        self._listing = list_place(
            self._reader.home, url, lambda key, size: self._reader.get(key, 0, size, kind="metadata"), pattern
        )
        index = os.environ.get(INDEX_VARIABLE)
        if index:
            self._listing = ShardIndex.load(Path(index)).apply(self._listing)
        self._samples = SampleMaker(recipe.input)
        decoding = self._samples.decoding
        self._gpu: GpuDecoder | None = None
        if recipe.input.decoder == "gpu":
            self._gpu = open_gpu_decoder(device, recipe.input.decode, decoders)
            rest = f"images that are no plain JPEG: {decoding.decoder} decoding by {decoding.library}"
            decoding = dataclasses.replace(self._gpu.decoding, note=rest)
        self.decoding: dict[str, Any] | None = dataclasses.asdict(decoding)
        self._loader: Loader | None = None
        self.endpoint = self._reader.home.endpoint if recipe.storage.policy == "rank" or not on_s3 else ""
        self.dataset_sha256 = self._listing.sha256
        self.keys = [shard.key for shard in self._listing.shards]
        self.storage = {
            "policy": recipe.storage.policy,
            "endpoints": [place.endpoint for place in places],
            "region": credentials.region if credentials else "",
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

    @property
    def pool(self) -> Callable[..., DecodePool]:
        """Makes what decodes, with DecodePool's arguments."""
        return DecodePool if self._gpu is None else partial(GpuDecodePool, self._gpu)

    @property
    def samples(self) -> SampleMaker:
        return self._samples

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
            pool=self.pool,
            unfinished=STEPS_IN_FLIGHT if self._on_gpu else 0,
        )

    def next_batch(self) -> HostBatch:
        loader = self._running()
        batch = loader.next_batch(self._recipe.launch.stall_timeout_s)
        return HostBatch(
            pixels=torch.from_numpy(batch.images) if batch.on_device is None else batch.on_device,
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
        # Where the GPU decodes, only what it leaves to the CPU is ever written here.
        pinned = self._on_gpu and self._gpu is None
        pixels: Pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned).numpy()
        return pixels
