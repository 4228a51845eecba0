"""A rank's share of the validation set, read once for each evaluation by the same loader that feeds training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from drawbar.config import Recipe
from drawbar.dataset.index import EVAL_INDEX_VARIABLE
from drawbar.dataset.listing import ShardInfo
from drawbar.input.libjpeg import Pixels
from drawbar.input.loader import EndOfSet, Loader, ReadPlan
from drawbar.input.plan import RecordIndex
from drawbar.journal import Event
from drawbar.launch.feed import make_samples, open_set
from drawbar.storage.reader import CountedReader
from drawbar.train.batch import HostBatch
from drawbar.world import World


@dataclass(kw_only=True)
class ReadCount:
    """What one evaluation took from the feed."""

    images: int = 0
    offsets_sum: int = 0
    """Of the records' byte offsets in their shards: equal to the set's where each came once, and else hardly ever."""
    data_wait_s: float = 0.0


class EvalFeed:
    """Ranks' shares are disjoint and make up the set; they differ by one record, or by whole shards where records are
    not known. The training input keeps what it has ready meanwhile; memory is bounded as the training loader's is."""

    def __init__(
        self, recipe: Recipe, world: World, device: torch.device, decoders: int, record: Callable[[Event], None]
    ) -> None:
        self._recipe, self._world, self._decoders, self._record = recipe, world, decoders, record
        self._pinned = device.type == "cuda"
        self._set = open_set(recipe, recipe.data.eval_url, EVAL_INDEX_VARIABLE, world.rank, record)
        self._samples = make_samples(recipe, self._set.category_map)
        # Each image counts once: none stands in for another. Images are decoded by CPUs.
        self._input = recipe.input.model_copy(update={"on_bad": "fail"})
        self._buffers: list[Pixels] = []
        """Kept from one evaluation to the next: pinned memory takes long to get."""
        self.dataset_sha256 = self._set.listing.sha256
        self.num_records = self._set.listing.num_records
        """None: not known before they were read."""
        self.shards: Sequence[ShardInfo] = self._set.listing.shards
        known = all(shard.record_bytes is not None for shard in self._set.listing.shards)
        self.offsets_sum = int(RecordIndex(self._set.listing.shards).start.sum()) if known else None
        """What all ranks' `ReadCount.offsets_sum` must add up to; None where records are not known."""
        self.read = ReadCount()
        """Of the last evaluation, or the one under way."""

    def batches(self) -> Iterator[HostBatch]:
        """This rank's share once, the last batch as small as it comes out. A batch must be released before the one
        after the next is asked for. Raises what reading and decoding raise."""
        recipe = self._recipe
        self.read = read = ReadCount()
        plan = ReadPlan(
            shards=self._set.listing.shards,
            rank=self._world.rank,
            world_size=self._world.world_size,
            batch_size=recipe.eval.batch_size or recipe.train.batch_size,
            once=True,
        )
        # A loader stops its reader when it closes; the store's connections behind the places are kept.
        reader = CountedReader(
            self._set.places, recipe.storage, self._record, self._record, rank=self._world.rank, kind="eval"
        )
        free = list(self._buffers)
        loader = Loader(
            plan,
            reader,
            num_classes=recipe.data.num_classes,
            input=self._input,
            storage=recipe.storage,
            decode_threads=self._decoders,
            samples=self._samples,
            allocate=lambda shape: free.pop() if free else self._allocate(shape),
        )
        try:
            while True:
                begin_t = time.perf_counter()
                try:
                    batch = loader.next_batch(recipe.launch.stall_timeout_s)
                except EndOfSet:
                    return
                finally:
                    read.data_wait_s += time.perf_counter() - begin_t
                read.images += len(batch.records)
                read.offsets_sum += sum(record.offset for record in batch.records)
                yield HostBatch(
                    pixels=torch.from_numpy(batch.images),
                    labels=torch.from_numpy(batch.labels),
                    epoch=0,
                    truths=[batch.truths[number] for number in range(len(batch.truths))],
                    release=lambda batch=batch: loader.recycle(batch),  # type: ignore[misc]
                )
        finally:
            loader.close()

    def _allocate(self, shape: tuple[int, ...]) -> Pixels:
        pixels: Pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pinned).numpy()
        self._buffers.append(pixels)
        return pixels
