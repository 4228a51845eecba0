"""Targets through the real loader: boxes and masks lie on the object, however it is cropped, flipped and padded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drawbar.config import Detection, Input, Model, Recipe, Storage, Train
from drawbar.dataset.coco_record import parse_coco_record
from drawbar.dataset.example import decode_example, encode_example
from drawbar.dataset.listing import list_shards
from drawbar.errors import DataError
from drawbar.input.augment import RecordRandom
from drawbar.input.batch import Batch, Record
from drawbar.input.detection_sample import DetectionSamples
from drawbar.input.loader import Loader, ReadPlan
from drawbar.input.target import Target
from drawbar.launch.feed import make_samples
from drawbar.models.names import MASK_RCNN, SSD
from drawbar.storage.reader import CountedReader
from drawbar.storage.stores import open_place
from tests.detection_set import NUM_CLASSES, pack_scenes, spot_record

CATEGORIES = {"7": 1, "90": 2}


def samples_of(name: str, category_map: dict[str, int] = CATEGORIES, **settings: Any) -> DetectionSamples:
    recipe = Recipe(
        model=Model(name=name),
        input=Input(image_size=96, decode="exact"),
        detection=Detection(short_side=96, long_side=160, **settings),
    )
    made = make_samples(recipe, category_map)
    assert isinstance(made, DetectionSamples)
    return made


def sample(samples: DetectionSamples, record: Record) -> tuple[np.ndarray, Target]:
    coco = parse_coco_record(record.payload)
    out = np.empty((*samples.size_of(coco.height, coco.width), 3), np.uint8)
    return out, samples.train(coco, samples.labels(coco.categories), RecordRandom(1, 0, 0, record.offset), out)


def seen_at(pixels: np.ndarray) -> np.ndarray:
    """Where the picture is more red than blue; colour jitter leaves that alone."""
    found: np.ndarray = pixels[..., 0].astype(int) > pixels[..., 2]
    return found


@pytest.mark.parametrize("number", range(30))
def test_ssds_boxes_lie_on_the_object(number: int) -> None:
    pixels, target = sample(samples_of(SSD), spot_record(number, crowd=number % 2 == 0))
    assert target.size == pixels.shape[:2] == (96, 96)
    rows, columns = np.nonzero(seen_at(pixels))
    (box,) = target.boxes
    edges = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    assert np.abs(box - edges).max() < 4  # a crop of 0.3 of the image shows a pixel as 2.3, and JPEG blurs it
    assert target.labels.tolist() == [2]
    assert target.masks == []


@pytest.mark.parametrize("number", range(12))
def test_mask_rcnns_boxes_and_masks_lie_on_the_object(number: int) -> None:
    upright = number % 2 == 0
    record = spot_record(number, height=150 if upright else 90, width=100 if upright else 140)
    pixels, target = sample(samples_of(MASK_RCNN), record)
    assert target.size == pixels.shape[:2] == ((144, 96) if upright else (96, 149))
    seen, mask = seen_at(pixels), target.masks[0].whole(*target.size)
    assert (seen & (mask > 0)).sum() / (
        seen | (mask > 0)
    ).sum() > 0.88  # objects of 500 pixels, and the mask is a nearest pixel
    rows, columns = np.nonzero(seen)
    edges = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    assert np.abs(target.boxes[0] - edges).max() < 2.5


def test_half_of_the_samples_are_flipped() -> None:
    samples = samples_of(MASK_RCNN)
    middles = [sample(samples, replace(spot_record(3), offset=offset))[1].boxes[0, ::2].mean() for offset in range(200)]
    assert 70 < Counter(np.round(middles)).most_common()[0][1] < 130


def test_a_mask_is_kept_as_large_as_its_object_only() -> None:
    _, target = sample(samples_of(MASK_RCNN), spot_record(1))
    xmin, ymin, xmax, ymax = target.boxes[0]
    assert target.masks[0].pixels.size <= (xmax - xmin + 2) * (ymax - ymin + 2)


@pytest.mark.parametrize("name", [SSD, MASK_RCNN])
def test_evaluation_sees_the_whole_image_and_its_own_pixels(name: str) -> None:
    samples, record = samples_of(name), spot_record(5, crowd=True, image_id=77)
    coco = parse_coco_record(record.payload)
    height, width = samples.size_of(coco.height, coco.width)
    batch = Batch(
        images=np.empty((1, 96, 160 if name == MASK_RCNN else 96, 3), np.uint8),
        labels=np.empty(1, np.int64),
        records=[record],
        epoch=0,
    )
    samples.fill(batch, 0, record, None)
    truth = batch.truths[0]
    assert (truth.image_id, truth.height, truth.width, truth.size) == (77, 90, 140, (height, width))
    assert np.array_equal(truth.boxes, coco.boxes)
    assert truth.labels.tolist() == [2, 2]
    assert truth.crowd.tolist() == [True, False]
    assert len(truth.masks) == (2 if name == MASK_RCNN else 0)
    rows, columns = np.nonzero(seen_at(batch.images[0, :height, :width]))
    edges = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    assert np.abs(truth.boxes[1] * np.tile([width / 140, height / 90], 2) - edges).max() < 2


# Through the loader


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_scenes(tmp_path_factory.mktemp("scenes") / "set", 48)


@contextmanager
def loader_over(folder: Path, name: str, threads: int = 2, seed: int = 1, **detection: Any) -> Iterator[Loader]:
    storage = Storage(request_bytes=65536, read_ahead=2)
    place = open_place(str(folder), None, None, storage)
    listing = list_shards(place.store, place.prefix, place_reader(place, storage))
    recipe = Recipe(
        model=Model(name=name),
        input=Input(image_size=96, seed=seed, shuffle_buffer=16),
        train=Train(batch_size=4),
        detection=Detection(short_side=96, long_side=128, **detection),
    )
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"num_classes": NUM_CLASSES})})
    assert listing.manifest is not None
    loader = Loader(
        ReadPlan(shards=listing.shards, rank=0, world_size=1, batch_size=4),
        CountedReader(place, storage, lambda request: None),
        num_classes=NUM_CLASSES,
        input=recipe.input,
        storage=storage,
        decode_threads=threads,
        samples=make_samples(recipe, listing.manifest.notes["category_map"]),
    )
    try:
        yield loader
    finally:
        loader.close()


def place_reader(place: Any, storage: Storage) -> Any:
    reader = CountedReader(place, storage, lambda request: None)
    return lambda key, size: reader.get(key, 0, size, kind="metadata")


def take(loader: Loader, count: int) -> list[tuple[np.ndarray, list[Target], list[int]]]:
    taken = []
    for _ in range(count):
        batch: Batch = loader.next_batch(timeout_s=30)
        targets = [batch.targets[number] for number in range(len(batch.records))]
        taken.append((batch.images.copy(), targets, [record.offset + record.shard for record in batch.records]))
        loader.recycle(batch)
    return taken


@pytest.mark.parametrize("name", [SSD, MASK_RCNN])
def test_same_seed_gives_the_same_pixels_and_targets_whatever_the_threads(scenes: Path, name: str) -> None:
    runs = []
    for threads in (1, 4):
        with loader_over(scenes, name, threads, group_batches=4) as loader:
            runs.append(take(loader, 16))
    for (images, targets, ids), (others, other_targets, other_ids) in zip(*runs, strict=True):
        assert ids == other_ids
        assert np.array_equal(images, others)
        for one, other in zip(targets, other_targets, strict=True):
            assert np.array_equal(one.boxes, other.boxes)
            assert np.array_equal(one.labels, other.labels)
            assert [mask.pixels.tobytes() for mask in one.masks] == [mask.pixels.tobytes() for mask in other.masks]
    with loader_over(scenes, name, seed=2, group_batches=4) as loader:
        assert [ids for *_, ids in take(loader, 16)] != [ids for *_, ids in runs[0]]


def test_windows_sorted_by_aspect_pad_less_and_lose_nothing(scenes: Path) -> None:
    padding, records = {}, {}
    for group in (1, 12):
        with loader_over(scenes, MASK_RCNN, group_batches=group) as loader:
            batches = take(loader, 12)
            assert loader.state is not None
        records[group] = Counter(one for *_, ids in batches for one in ids)
        shown = sum(height * width for _, targets, _ in batches for height, width in (each.size for each in targets))
        padding[group] = 1 - shown / sum(images[..., 0].size for images, *_ in batches)
    assert set(records[12].values()) == {1}
    assert len(records[12]) == 48
    assert padding[12] < 0.6 * padding[1]


def test_mask_rcnns_batches_are_padded_with_black_to_multiples_of_32(scenes: Path) -> None:
    with loader_over(scenes, MASK_RCNN, group_batches=2) as loader:
        for images, targets, _ in take(loader, 12):
            height, width = images.shape[1:3]
            assert height % 32 == width % 32 == 0
            assert height - 32 < max(target.size[0] for target in targets) <= height
            assert width - 32 < max(target.size[1] for target in targets) <= width
            for image, target in zip(images, targets, strict=True):
                assert not image[target.size[0] :].any()
                assert not image[:, target.size[1] :].any()
                assert image[: target.size[0], : target.size[1]].any()
                assert len(target.masks) == len(target.boxes) == len(target.labels)
                assert (target.boxes[:, 2:] <= np.array(target.size)[::-1] + 1e-3).all()


def test_in_the_middle_of_a_window_there_is_no_state_to_go_on_from(scenes: Path) -> None:
    with loader_over(scenes, MASK_RCNN, group_batches=3) as loader:
        there = []
        for _ in range(6):
            take(loader, 1)
            there.append(loader.state is not None)
    assert there == [False, False, True] * 2


# What is wrong with a record


def failing(change: dict[str, Any], name: str = MASK_RCNN, category_map: dict[str, int] = CATEGORIES) -> str:
    samples = samples_of(name, category_map)
    good = spot_record(1)
    features = {key: value for key, value in decode_example(good.payload).items() if key not in change}
    features |= {key: value for key, value in change.items() if value is not None}
    record = replace(good, payload=encode_example(features))
    batch = Batch(images=np.empty((1, 96, 160, 3), np.uint8), labels=np.empty(1, np.int64), records=[record], epoch=0)
    with pytest.raises(DataError) as caught:
        samples.fill(batch, 0, record, RecordRandom(1, 0, 0, 0))
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith("spots at byte 1: ")
    return caught.value.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image/height": None}, "the record has no image/height"),
        ({"image/height": [91]}, "140x90 pixels; the record says 140x91"),
        ({"image/encoded": [b"no image"]}, "cannot decode image"),
        ({"image/source_id": [b"a name"]}, "image/source_id is b'a name'; expected a number"),
        ({"image/object/class/label": [7, 90]}, "lists of objects of lengths [2, 1, 1, 1, 1, 1, 1]"),
        ({"image/object/class/label": [8]}, "category 8 has no label in 1..1000"),
        ({"image/object/bbox/xmax": [0.0]}, "a box without area"),
        ({"image/object/bbox/xmin": [float("nan")]}, "a box without area, or one that is no number"),
        ({"image/object/mask": None}, "the record has no masks"),
        ({"image/object/mask": [b"no mask"]}, "mask 0 is no PNG; the image has 140x90"),
    ],
)
def test_a_wrong_record_is_named_with_what_is_wrong(change: dict[str, Any], words: str) -> None:
    assert words in failing(change)


def test_without_a_map_category_ids_are_labels() -> None:
    _, target = sample(samples_of(SSD, {}), spot_record(2))
    assert target.labels.tolist() == [90]
