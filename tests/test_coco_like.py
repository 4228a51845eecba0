"""The coco-like set: annotations that are true of the pictures, stated distributions, categories that can be learnt."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray

from drawbar.dataset import coco_scene
from drawbar.dataset.coco import find_layout, open_coco
from drawbar.dataset.coco_like import (
    CocoLikeSet,
    SyntheticCocoSource,
    annotate,
    image_name,
    make_coco_like,
)
from drawbar.dataset.coco_mask import bounding_box, encode_counts, rasterise
from drawbar.dataset.coco_outline import polygons
from drawbar.dataset.coco_scene import CATEGORIES, COUNTS, SIZES
from drawbar.dataset.destination import FolderDestination
from drawbar.dataset.items import Source
from drawbar.dataset.jpeg import parse_header
from drawbar.dataset.pack import pack
from drawbar.dataset.shard_writer import PackSettings
from drawbar.errors import EnvironmentUnfit, InputError

pytest.importorskip("pycocotools")

NUM_IMAGES = 48
Annotations = list[dict[str, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coco-like") / "set"
    stats = make_coco_like(folder, num_images=NUM_IMAGES, seed=3, workers=2)
    assert (stats.num_images, stats.made) == (NUM_IMAGES, NUM_IMAGES)
    assert stats.total_bytes == sum(path.stat().st_size for path in (folder / "train").iterdir())
    assert stats.annotations == folder / "annotations" / "instances_train.json"
    return folder


@pytest.fixture(scope="module")
def tree(made: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((made / "annotations" / "instances_train.json").read_text())
    return found


@pytest.fixture(scope="module")
def many() -> list[Annotations]:
    """Annotations alone, of more scenes than are drawn."""
    wanted = CocoLikeSet(400, seed=5)
    return [annotate(index, wanted.layout(index)) for index in range(wanted.num_images)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Annotations


def test_the_file_is_whole_and_of_these_pictures(made: Path, tree: dict[str, Any]) -> None:
    assert [entry["file_name"] for entry in tree["images"]] == [image_name(index) for index in range(NUM_IMAGES)]
    assert len({each["id"] for each in tree["annotations"]}) == len(tree["annotations"])
    assert {each["image_id"] for each in tree["annotations"]} == {entry["id"] for entry in tree["images"]}
    ids = [category["id"] for category in tree["categories"]]
    assert len(ids) in range(8, 13)
    assert max(ids) > len(ids)
    for entry in tree["images"]:
        header = parse_header((made / "train" / entry["file_name"]).read_bytes())
        assert (header.width, header.height) == (entry["width"], entry["height"])
        assert header.sampling == ((2, 2), (1, 1), (1, 1))


def test_boxes_are_tight_and_areas_right(many: list[Annotations]) -> None:
    wanted = CocoLikeSet(400, seed=5)
    for index in range(0, 400, 10):
        layout = wanted.layout(index)
        for each in many[index]:
            mask = rasterise(each["segmentation"], layout.height, layout.width)
            assert each["area"] == mask.sum() > 0
            assert tuple(each["bbox"]) == bounding_box(mask)
            x, y, width, height = each["bbox"]
            assert x >= 0 <= y
            assert x + width <= layout.width
            assert y + height <= layout.height


def test_masks_are_of_the_visible_part() -> None:
    """Against the map of what is drawn at each pixel: polygons are good to a pixel at the edge, crowds exact."""
    overlaps: list[float] = []
    hidden = 0
    for index in range(60):
        layout = coco_scene.make_layout((7, index))
        found = annotate(index, layout)
        assert len(found) == len(layout.objects)
        for number, (placed, each) in enumerate(zip(layout.objects, found, strict=True), start=1):
            seen = layout.ids == number
            mask = rasterise(each["segmentation"], layout.height, layout.width).astype(bool)
            if placed.crowd:
                assert each["iscrowd"] == 1
                assert each["segmentation"]["counts"] == encode_counts(seen.view(np.uint8))
                continue
            overlaps.append(np.count_nonzero(seen & mask) / np.count_nonzero(seen | mask))
            drawn, _, _ = coco_scene._mask(placed, layout.height, layout.width)
            share = np.count_nonzero(seen) / np.count_nonzero(drawn)
            assert share > 0.44
            hidden += int(share < 0.95)
    assert np.mean(overlaps) > 0.95
    assert min(overlaps) > 0.8
    assert hidden > len(overlaps) / 20


def test_a_hole_is_cut_out_of_its_polygon() -> None:
    mask = np.zeros((60, 80), np.uint8)
    mask[10:50, 10:60] = 1
    mask[20:40, 20:35] = 0
    mask[55:58, 70:76] = 1  # a second piece
    found = polygons(mask, 0, 0)
    assert len(found) == 2
    assert (rasterise(found, 60, 80) == mask).all()
    shifted = polygons(mask[10:], 0, 10)
    assert (rasterise(shifted, 60, 80) == mask).all()


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # pycocotools' decode, with numpy 2
def test_pycocotools_reads_it(made: Path, tree: dict[str, Any]) -> None:
    from pycocotools.coco import COCO

    coco = COCO(str(made / "annotations" / "instances_train.json"))
    assert len(coco.getImgIds()) == NUM_IMAGES
    found = coco.loadAnns(coco.getAnnIds())
    assert len(found) == len(tree["annotations"])
    for each in found[::5]:
        mask = coco.annToMask(each)
        assert mask.sum() == each["area"]
        assert bounding_box(mask) == tuple(each["bbox"])


# Distributions


def test_counts_sizes_and_categories_as_stated(many: list[Annotations]) -> None:
    objects = [[each for each in scene if not each["iscrowd"]] for scene in many]
    counts = Counter(map(len, objects))
    assert set(counts) <= set(range(1, 13))
    mean = sum(number * share for number, share in enumerate(COUNTS, start=1)) / sum(COUNTS)
    assert np.mean([len(scene) for scene in objects]) == pytest.approx(mean, abs=0.5)
    sides = np.sqrt([each["area"] for scene in objects for each in scene])
    for share, low, high in SIZES:
        least = 0 if low < 32 else low
        assert np.mean((sides >= least) & (sides < (high if high < 200 else 640))) == pytest.approx(share, abs=0.05)
    categories = Counter(each["category_id"] for scene in objects for each in scene)
    for category in CATEGORIES:
        assert categories[category.category_id] / len(sides) == pytest.approx(category.share, abs=0.035)
    crowds = sum(len(scene) for scene in many) - len(sides)
    assert 0.02 * len(many) < crowds < 0.11 * len(many)


def test_pictures_like_coco(made: Path, tree: dict[str, Any]) -> None:
    wide = [entry["width"] > entry["height"] for entry in tree["images"]]
    assert 0.5 < np.mean(wide) < 0.95
    assert {max(entry["width"], entry["height"]) for entry in tree["images"]} == {640}
    assert 400 < np.median([min(entry["width"], entry["height"]) for entry in tree["images"]]) < 500
    sizes = [path.stat().st_size for path in (made / "train").iterdir()]
    assert 130_000 < np.mean(sizes) < 190_000
    assert max(sizes) > 2 * min(sizes)


@pytest.mark.parametrize("size", [96, 160])
def test_small_scenes(size: int) -> None:
    wanted = CocoLikeSet(20, seed=1, image_size=size)
    for index in range(20):
        layout = wanted.layout(index)
        assert max(layout.height, layout.width) == size
        header = parse_header(wanted.draw(index, layout))
        assert (header.height, header.width) == (layout.height, layout.width)
        assert all(each["area"] > 60 for each in annotate(index, layout))


# The set on disk, and without one


def test_same_bytes_for_any_number_of_workers(tmp_path: Path) -> None:
    for workers in (1, 2):
        make_coco_like(tmp_path / str(workers), num_images=70, seed=2, image_size=128, workers=workers)
    first = contents(tmp_path / "1")
    assert first == contents(tmp_path / "2")
    pictures = [data for name, data in first.items() if name.endswith(".jpg")]
    assert len(set(pictures)) == 70
    make_coco_like(tmp_path / "1", num_images=4, seed=2, split="val", image_size=128, workers=1)
    both = contents(tmp_path / "1")
    assert both.items() >= first.items()
    assert not {both[f"val/{image_name(index)}"] for index in range(4)} & set(pictures)


def test_resuming_makes_only_what_is_missing(tmp_path: Path) -> None:
    def make() -> int:
        return make_coco_like(tmp_path, num_images=5, seed=2, image_size=128, workers=1).made

    assert make() == 5
    before = contents(tmp_path)
    (tmp_path / "train" / image_name(3)).unlink()
    assert make() == 1
    assert contents(tmp_path) == before
    (tmp_path / "annotations" / "instances_train.json").unlink()
    (tmp_path / "train" / image_name(0)).unlink()
    assert make() == 1
    assert contents(tmp_path) == before
    assert make() == 0


def test_what_is_refused(tmp_path: Path) -> None:
    make_coco_like(tmp_path / "set", num_images=1, image_size=96, workers=1)
    with pytest.raises(InputError, match="another synthetic set: seed 1 instead of 2"):
        make_coco_like(tmp_path / "set", num_images=1, seed=2, image_size=96)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty and no synthetic set"):
        make_coco_like(tmp_path, num_images=1)
    with pytest.raises(EnvironmentUnfit, match="cannot write to"):
        make_coco_like(tmp_path / "mine.txt" / "below", num_images=1)
    for settings, reason in (
        ({"num_images": 0}, "number of images is 0; expected at least 1"),
        ({"image_size": 10}, "image size is 10; expected 96 to 4096 pixels"),
        ({"split": "../x"}, "split is '../x'"),
        ({"workers": -1}, "number of workers is -1"),
    ):
        with pytest.raises(InputError, match=reason):
            make_coco_like(tmp_path / "new", **{"num_images": 1} | settings)
    assert not (tmp_path / "new").exists()


def test_records_are_the_same_without_a_folder(tmp_path: Path) -> None:
    make_coco_like(tmp_path / "set", num_images=24, seed=4, image_size=160, workers=1)
    wanted = CocoLikeSet(24, seed=4, image_size=160)
    shards = []
    sources: list[Source] = [open_coco(find_layout(tmp_path / "set")), SyntheticCocoSource(wanted)]
    for number, source in enumerate(sources):
        place = tmp_path / f"packed{number}"
        settings = PackSettings(num_shards=3, schema="coco")
        manifest = pack(source, FolderDestination(place), settings, workers=number + 1)
        assert (manifest.num_records, manifest.bad) == (24, ())
        shards.append(([(place / shard.name).read_bytes() for shard in manifest.shards], manifest.class_counts))
    assert shards[0] == shards[1]


# Can it be learnt?


def features(pixels: NDArray[np.uint8], box: list[float]) -> NDArray[np.float64]:
    """Histograms of oriented gradients of an object's box, in 8 x 8 cells; no colour."""
    x, y, width, height = (round(value) for value in box)
    crop = cv2.cvtColor(np.ascontiguousarray(pixels[y : y + height, x : x + width]), cv2.COLOR_RGB2GRAY)
    grey = cv2.resize(crop, (64, 64), interpolation=cv2.INTER_AREA).astype(np.float32)
    across, down = cv2.Sobel(grey, cv2.CV_32F, 1, 0), cv2.Sobel(grey, cv2.CV_32F, 0, 1)
    bins = (np.asarray(cv2.phase(across, down)) * (9 / np.pi)).astype(int) % 9
    strength = np.hypot(across, down)
    planes = [np.where(bins == number, strength, 0).reshape(8, 8, 8, 8).sum((1, 3)) for number in range(9)]
    cells = np.stack(planes, 2).astype(np.float64)
    around = cv2.blur(np.square(cells).sum(2), (3, 3))
    return np.asarray((cells / np.sqrt(around + 1.0)[:, :, None]).ravel(), np.float64)


@pytest.mark.run
@pytest.mark.timeout(600)
def test_categories_are_in_shape_and_texture_and_not_in_colour() -> None:
    """A support vector machine on boxes of scenes that it has not seen; hidden parts and all."""
    svm = pytest.importorskip("sklearn.svm")
    wanted = CocoLikeSet(800, seed=9, image_size=320)
    shapes, colours, labels, scenes = [], [], [], []
    for index in range(wanted.num_images):
        layout = wanted.layout(index)
        chosen = [each for each in annotate(index, layout) if not each["iscrowd"] and each["area"] > 24**2]
        if not chosen:
            continue
        pixels = np.asarray(simplejpeg.decode_jpeg(wanted.draw(index, layout), colorspace="RGB"), np.uint8)
        for each in chosen:
            mask = rasterise(each["segmentation"], layout.height, layout.width).astype(bool)
            shapes.append(features(pixels, each["bbox"]))
            colours.append(np.concatenate([pixels[mask].mean(0), pixels[mask].std(0)]))
            labels.append(each["category_id"])
            scenes.append(index)
    held_out = np.array(scenes) >= 600
    accuracies = []
    for columns in (shapes, colours):
        data, names = np.array(columns), np.array(labels)
        data = (data - data.mean(0)) / (data.std(0) + 1e-9)
        model = svm.SVC(C=10).fit(data[~held_out], names[~held_out])
        accuracies.append(model.score(data[held_out], names[held_out]))
    most_common = max(Counter(np.array(labels)[held_out].tolist()).values()) / held_out.sum()
    assert accuracies[0] > 0.9
    assert accuracies[1] < most_common + 0.12
