"""A rank's source of batches as the loop sees it: the loader over the rank's endpoint, or one constant batch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from drawbar.config import Recipe
from drawbar.dataset.index import INDEX_VARIABLE, ShardIndex
from drawbar.dataset.listing import Listing, ShardInfo, split_pattern
from drawbar.input.decode import DecodePool
from drawbar.input.detection import mask_rcnn_size, padded_size
from drawbar.input.detection_sample import DetectionSamples, label_categories
from drawbar.input.gpu_decode import GpuDecodePool, GpuDecoder, open_gpu_decoder
from drawbar.input.image_decoder import ImageDecoder
from drawbar.input.libjpeg import Pixels
from drawbar.input.loader import Loader, ReadPlan
from drawbar.input.memory import MemoryReader
from drawbar.input.plan import PlanState
from drawbar.input.sample import SampleMaker, Samples, cpu_decoder
from drawbar.input.target import Target, made_up_target
from drawbar.journal import Event, InputTotals
from drawbar.launch.environment import EMBEDDED_ENDPOINTS
from drawbar.launch.listing import list_place
from drawbar.models.names import DETECTORS, MASK_RCNN
from drawbar.storage.environment import Connection, Credentials, environment_endpoint
from drawbar.storage.reader import CountedReader, Reader
from drawbar.storage.stores import Place, open_place
from drawbar.storage.urls import parse_url
from drawbar.train.batch import HostBatch
from drawbar.train.loop import STEPS_IN_FLIGHT
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
    shards: Sequence[ShardInfo]

    num_records: int | None
    """Of the data set; None where they are not known, or there is none."""

    def start(self, plan: PlanState | None = None) -> None:
        """Begins reading, where `plan` stands."""

    def plan_state(self) -> PlanState | None:
        """Where the reading plan of all ranks stands after the batches handed out so far; None where that is not
        known."""

    def next_batch(self) -> HostBatch: ...

    def close(self) -> list[Event]:
        """Stops reading; returns what is to be written down of it."""


def open_feed(
    recipe: Recipe, world: World, device: torch.device, decoders: int, record: Callable[[Event], None]
) -> Feed:
    """`record` is told of every GET, of what becomes of endpoints, and of records that give no sample."""
    if recipe.input.source == "constant":
        return ConstantFeed(recipe, device)
    return DataFeed(recipe, world, device, decoders, record)


class ConstantFeed:
    """One made-up batch for ever: what the step itself can do."""

    endpoint = ""
    dataset_sha256 = "constant"
    num_records: int | None = None
    decoding: dict[str, Any] | None = None
    storage: dict[str, Any] = {}  # noqa: RUF012 (an instance never changes it)
    shards: Sequence[ShardInfo] = ()

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        rng = np.random.default_rng(recipe.input.seed)
        height, width = constant_size(recipe)
        batch, classes = recipe.train.batch_size, recipe.data.num_classes
        pixels = torch.from_numpy(rng.integers(0, 256, (batch, height, width, 3), np.uint8))
        self._pixels = pixels.pin_memory() if device.type == "cuda" else pixels
        self._labels = torch.from_numpy(rng.integers(0, classes, batch, np.int64))
        self._targets: list[Target] = []
        if recipe.model.name in DETECTORS:
            masks = recipe.model.name == MASK_RCNN
            self._targets = [made_up_target(rng, (height, width), classes, masks=masks) for _ in range(batch)]
        self._trained = 0

    def start(self, plan: PlanState | None = None) -> None:
        pass

    def plan_state(self) -> PlanState | None:
        return None

    def next_batch(self) -> HostBatch:
        return HostBatch(
            pixels=self._pixels, labels=self._labels, epoch=0, release=self._release, targets=self._targets
        )

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


def constant_size(recipe: Recipe) -> tuple[int, int]:
    """Height and width of a made-up batch: for Mask R-CNN that of images of 4:3."""
    if recipe.model.name != MASK_RCNN:
        return recipe.input.image_size, recipe.input.image_size
    sides = recipe.detection
    return padded_size([mask_rcnn_size(3 * sides.short_side, 4 * sides.short_side, sides.short_side, sides.long_side)])


def make_samples(recipe: Recipe, category_map: Mapping[str, int]) -> Samples:
    """What the recipe's model is given. Raises EnvironmentUnfit where the recipe's decoder is not to be had."""
    input, name, settings = recipe.input, recipe.model.name, recipe.detection
    if name not in DETECTORS:
        return SampleMaker(input, recipe.data.num_classes)
    return DetectionSamples(
        decoder=ImageDecoder(cpu_decoder(input), input.decode),
        labels=label_categories(category_map, recipe.data.num_classes),
        fixed_size=0 if name == MASK_RCNN else input.image_size,
        short_side=settings.short_side,
        long_side=settings.long_side,
        crop=settings.augment == "ssd",
        with_masks=name == MASK_RCNN,
        window_batches=settings.group_batches if name == MASK_RCNN else 1,
        seed=input.seed,
    )


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

    @property
    def category_map(self) -> Mapping[str, int]:
        """Of a detection set, by its manifest."""
        found: Mapping[str, int] = self.listing.manifest.notes.get("category_map", {}) if self.listing.manifest else {}
        return found


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
        self._recipe, self._world, self._decoders, self._record = recipe, world, decoders, record
        self._on_gpu = device.type == "cuda"
        found = open_set(recipe, recipe.data.url, INDEX_VARIABLE, world.rank, record)
        self._reader, self._listing = found.reader, found.listing
        self.samples = make_samples(recipe, found.category_map)
        decoding = self.samples.decoding
        self._gpu: GpuDecoder | None = None
        if recipe.input.decoder == "gpu":
            self._gpu = open_gpu_decoder(device, recipe.input.decode, decoders)
            rest = f"images that are no plain JPEG: {decoding.decoder} decoding by {decoding.library}"
            decoding = dataclasses.replace(self._gpu.decoding, note=rest)
        self.decoding: dict[str, Any] | None = dataclasses.asdict(decoding)
        self._loader: Loader | None = None
        self._handed_out = 0
        pinned_to_home = recipe.storage.policy == "rank" or found.credentials is None
        self.endpoint = self._reader.home.endpoint if pinned_to_home else ""
        self.dataset_sha256 = self._listing.sha256
        self.num_records = self._listing.num_records
        self.shards: Sequence[ShardInfo] = self._listing.shards
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

    @property
    def pool(self) -> Callable[..., DecodePool]:
        """Makes what decodes, with DecodePool's arguments."""
        return DecodePool if self._gpu is None else partial(GpuDecodePool, self._gpu)

    def start(self, plan: PlanState | None = None) -> None:
        recipe, read_plan = self._recipe, dataclasses.replace(self.plan, state=plan)
        reader: Reader = self._reader
        if recipe.input.source == "memory":
            shard = read_plan.shards[read_plan.rank % len(read_plan.shards)]
            reader = MemoryReader(self._reader, shard, recipe.storage.request_bytes or _SAMPLE_BYTES)
            read_plan = dataclasses.replace(read_plan, shards=(reader.sample,), rank=0, world_size=1)
        self._loader = Loader(
            read_plan,
            reader,
            num_classes=recipe.data.num_classes,
            input=recipe.input,
            storage=recipe.storage,
            samples=self.samples,
            decode_threads=self._decoders,
            allocate=self._allocate,
            tell=self._record,
            pool=self.pool,
            unfinished=STEPS_IN_FLIGHT if self._on_gpu else 0,
        )

    def plan_state(self) -> PlanState | None:
        # What is repeated from memory has no place in the set.
        return self._running().state_after(self._handed_out) if self._recipe.input.source == "data" else None

    def next_batch(self) -> HostBatch:
        loader = self._running()
        batch = loader.next_batch(self._recipe.launch.stall_timeout_s)
        self._handed_out += 1
        return HostBatch(
            pixels=torch.from_numpy(batch.images) if batch.on_device is None else batch.on_device,
            labels=torch.from_numpy(batch.labels),
            epoch=batch.epoch,
            release=lambda: loader.recycle(batch),
            targets=[batch.targets[number] for number in range(len(batch.targets))],
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
