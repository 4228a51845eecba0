"""Evaluation: every validation image once whatever the number of ranks and the batch size; sums, not means of means."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from drawbar.config import Recipe
from drawbar.dataset.index import EVAL_INDEX_VARIABLE, ShardIndex
from drawbar.errors import DataError, RecipeError, RunFailed
from drawbar.journal import Evaluation, Event, JournalWriter, Request, read_journal
from drawbar.launch.eval_feed import EvalFeed
from drawbar.models.build import build_model
from drawbar.train.batch import HostBatch
from drawbar.train.evaluate import ImageEvaluation
from drawbar.train.loop import Pause
from drawbar.train.quality import Evaluations
from drawbar.world import World
from tests.small_set import NUM_CLASSES, example, image, write_set

CPU = torch.device("cpu")
NUM_IMAGES = 3 * 7


def recipe_of(folder: Path, batch_size: int = 4, **sections: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "data": {"url": str(folder), "eval_url": str(folder), "num_classes": NUM_CLASSES},
            "storage": {"request_bytes": 8192, "read_ahead": 2},
            "input": {"image_size": 32},
            "eval": {"batch_size": batch_size},
            **sections,
        }
    )


def feed_of(recipe: Recipe, rank: int = 0, world_size: int = 1, events: list[Event] | None = None) -> EvalFeed:
    world = World(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, node="n")
    return EvalFeed(recipe, world, CPU, 2, (events if events is not None else []).append)


def take(feed: EvalFeed) -> list[tuple[torch.Tensor, torch.Tensor]]:
    taken = []
    for batch in feed.batches():
        taken.append((batch.pixels.clone(), batch.labels.clone()))
        batch.release()
    return taken


def scaled(batch: HostBatch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.pixels.permute(0, 3, 1, 2).float() / 255, batch.labels


def evaluation(recipe: Recipe, model: nn.Module, feed: EvalFeed) -> ImageEvaluation:
    return ImageEvaluation(model, feed.batches, scaled, device=CPU, dtype=torch.float32, control=None)


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 25])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_every_image_once_whatever_ranks_and_batch(
    tmp_path: Path, world_size: int, batch_size: int, with_manifest: bool
) -> None:
    """21 images: more ranks than images, or than shards, leave some without any."""
    write_set(tmp_path, num_shards=3, records_per_shard=7, manifest=with_manifest)
    recipe = recipe_of(tmp_path, batch_size)
    seen: Counter[bytes] = Counter()
    shares, offsets_sum = [], 0
    for rank in range(world_size):
        feed = feed_of(recipe, rank, world_size)
        batches = take(feed)
        assert all(len(pixels) == batch_size for pixels, _ in batches[:-1])
        seen.update(row.numpy().tobytes() for pixels, _ in batches for row in pixels)
        assert feed.read.images == sum(len(labels) for _, labels in batches)
        shares.append(feed.read.images)
        offsets_sum += feed.read.offsets_sum
        assert feed.num_records == (NUM_IMAGES if with_manifest else None)
        assert feed.offsets_sum is None or with_manifest
    assert len(seen) == NUM_IMAGES
    assert set(seen.values()) == {1}
    if with_manifest:
        assert max(shares) - min(shares) <= 1
        assert offsets_sum == feed.offsets_sum


def test_the_same_images_in_the_same_order_each_time_and_counted_as_eval(tmp_path: Path) -> None:
    write_set(tmp_path, num_shards=3, records_per_shard=7)
    events: list[Event] = []
    feed = feed_of(recipe_of(tmp_path), events=events)
    first, second = take(feed), take(feed)
    assert len(first) == 6
    for (a, b), (c, d) in zip(first, second, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)
    kinds = Counter(event.kind for event in events if isinstance(event, Request))
    assert set(kinds) == {"metadata", "eval"}
    size = sum(path.stat().st_size for path in tmp_path.glob("train-*"))
    assert sum(event.got_bytes for event in events if isinstance(event, Request) and event.kind == "eval") == 2 * size


def test_an_index_takes_the_place_of_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_set(tmp_path / "set", num_shards=1, records_per_shard=9, manifest=False)
    sizes = tuple(len(part) + 16 for part in payloads(paths[0]))
    (tmp_path / "index").write_text(ShardIndex(record_bytes={paths[0].name: sizes}).dumps())
    monkeypatch.setenv(EVAL_INDEX_VARIABLE, str(tmp_path / "index"))
    feeds = [feed_of(recipe_of(tmp_path / "set"), rank, 2) for rank in range(2)]
    for feed in feeds:
        take(feed)
    assert [feed.read.images for feed in feeds] == [4, 5]
    assert feeds[0].num_records == 9


def payloads(path: Path) -> list[bytes]:
    data, found, position = path.read_bytes(), [], 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 8], "little")
        found.append(data[position + 12 : position + 12 + size])
        position += 16 + size
    return found


def test_metrics_are_those_of_the_whole_set_at_once(tmp_path: Path) -> None:
    """Means of uneven batches would differ: 21 images in batches of 4 are 5 and a quarter."""
    write_set(tmp_path, num_shards=3, records_per_shard=7)
    torch.manual_seed(1)
    model = build_model("trivial", NUM_CLASSES)
    everything = take(feed_of(recipe_of(tmp_path, 64)))[0]
    pixels, labels = scaled(HostBatch(pixels=everything[0], labels=everything[1], epoch=0, release=lambda: None))
    with torch.no_grad():
        logits = model(pixels)
    ranks = (logits >= logits.gather(1, labels[:, None])).sum(1)
    expected = {
        "top1": float((ranks == 1).float().mean()),
        "top5": float((ranks <= 5).float().mean()),
        "loss": float(functional.cross_entropy(logits.double(), labels)),
    }
    for batch_size in (1, 4, 64):
        recipe = recipe_of(tmp_path, batch_size)
        found = evaluation(recipe, model, feed_of(recipe)).run(1)
        assert found == pytest.approx(expected, rel=1e-6)


def test_batch_norm_is_not_changed_and_training_goes_on(tmp_path: Path) -> None:
    write_set(tmp_path, num_shards=1, records_per_shard=6)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, NUM_CLASSES))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recipe = recipe_of(tmp_path)
    evaluation(recipe, model, feed_of(recipe)).run(1)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_damage_and_a_loss_that_is_no_number_end_it(tmp_path: Path) -> None:
    write_set(tmp_path / "bad", num_shards=1, records_per_shard=6, payloads={4: example(4, 1, image(4)[:300])})
    recipe = recipe_of(tmp_path / "bad")
    model = build_model("trivial", NUM_CLASSES)
    with pytest.raises(DataError, match="cannot decode image"):
        evaluation(recipe, model, feed_of(recipe)).run(1)
    assert model.training
    write_set(tmp_path / "good", num_shards=1, records_per_shard=6)
    recipe = recipe_of(tmp_path / "good")
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(RunFailed, match="loss on the validation set is nan"):
        evaluation(recipe, model, feed_of(recipe)).run(1)


# Between steps


class Skipping:
    """A feed that gives one image of the set twice and another not at all, or one less."""

    def __init__(self, feed: EvalFeed, *, images: int, offsets_sum: int) -> None:
        self.num_records = feed.num_records
        self.offsets_sum = feed.offsets_sum
        self.read = feed.read
        self.read.images += images
        self.read.offsets_sum += offsets_sum


class Fixed:
    """An evaluation that only reads."""

    metrics: tuple[str, ...] = ("top1",)

    def __init__(self, feed: EvalFeed) -> None:
        self.feed = feed

    def run(self, epoch: int) -> dict[str, float]:
        take(self.feed)
        return {"top1": epoch / 10}


def between(feed: Any, path: Path, evaluated: EvalFeed, target: dict[str, float]) -> Evaluations:
    return Evaluations(
        Fixed(evaluated),
        feed,
        due={3: 1, 7: 2},
        target=target,
        journal=JournalWriter(path),
        device=CPU,
        control=None,
        on_evaluation=lambda step: None,
    )


def test_it_is_made_when_due_and_ends_the_run_at_the_target(tmp_path: Path) -> None:
    write_set(tmp_path / "set", num_shards=3, records_per_shard=7)
    feed = feed_of(recipe_of(tmp_path / "set"))
    made = between(feed, tmp_path / "j", feed, {"top1": 0.2})
    assert [made.after(step) for step in (0, 2, 4)] == [None, None, None]
    assert made.after(3) == Pause(tag="after_evaluation", stop=False)
    assert made.after(7) == Pause(tag="after_evaluation", stop=True)
    events = read_journal(tmp_path / "j").of(Evaluation)
    assert [(event.step, event.epoch, event.images, event.all_images, event.set_images) for event in events] == [
        (3, 1, NUM_IMAGES, NUM_IMAGES, NUM_IMAGES),
        (7, 2, NUM_IMAGES, NUM_IMAGES, NUM_IMAGES),
    ]
    assert all(event.end_t > event.start_t for event in events)


@pytest.mark.parametrize(
    ("images", "offsets_sum", "words"), [(-1, 0, "saw 20 images"), (0, 5, "not each of them once")]
)
def test_a_wrong_count_is_no_result(tmp_path: Path, images: int, offsets_sum: int, words: str) -> None:
    write_set(tmp_path / "set", num_shards=3, records_per_shard=7)
    feed = feed_of(recipe_of(tmp_path / "set"))
    take(feed)
    wrong = Skipping(feed, images=images, offsets_sum=offsets_sum)
    with pytest.raises(RunFailed, match=words):
        between(wrong, tmp_path / "j", feed_of(recipe_of(tmp_path / "set")), {}).after(3)


def test_a_target_that_no_evaluation_gives_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path / "set", num_shards=1, records_per_shard=7)
    feed = feed_of(recipe_of(tmp_path / "set"))
    with pytest.raises(RecipeError, match="box_ap"):
        between(feed, tmp_path / "j", feed, {"box_ap": 0.3})


def test_release_gives_buffers_back(tmp_path: Path) -> None:
    """More batches than buffers: a batch that is not released would stop the feed."""
    write_set(tmp_path, num_shards=3, records_per_shard=7)
    feed = feed_of(recipe_of(tmp_path, 1))
    held: list[HostBatch] = []
    for batch in feed.batches():
        held.append(batch)
        if len(held) > 1:
            held.pop(0).release()
    assert feed.read.images == NUM_IMAGES
