"""Average precision over many ranks is pycocotools' own over all images at once."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest

from drawbar.errors import DataError
from drawbar.input.target import GroundTruth, Mask
from drawbar.train.coco_ap import CocoMatcher, Detections, Matches, average_precision, encode_mask

CLASSES = 4
HEIGHT, WIDTH = 80, 120


def box_mask(box: np.ndarray) -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    xmin, ymin, xmax, ymax = np.round(box).astype(int)
    mask[ymin:ymax, xmin:xmax] = 1
    # A corner is missing, so that masks and boxes score differently.
    mask[ymin : (ymin + ymax) // 2, xmin : (xmin + xmax) // 2] = 0
    return mask


def scene(image_id: int, *, masks: bool = True) -> tuple[GroundTruth, Detections]:
    """Some objects, among them crowds, and detections: near them, of the wrong class, doubled, or of nothing."""
    rng = np.random.default_rng(image_id)
    count = int(rng.integers(0, 6))
    corners = rng.uniform(0, 0.6, (count, 2)) * [WIDTH, HEIGHT]
    boxes = np.concatenate([corners, corners + rng.uniform(8, 40, (count, 2))], 1).clip(0, [WIDTH, HEIGHT] * 2)
    labels = rng.integers(1, CLASSES, count)  # the last class is nowhere
    truth = GroundTruth(
        image_id=image_id,
        size=(HEIGHT, WIDTH),
        height=HEIGHT,
        width=WIDTH,
        boxes=boxes,
        labels=labels,
        crowd=rng.random(count) < 0.15,
        areas=(boxes[:, 2:] - boxes[:, :2]).prod(1) * 0.75,
        masks=[Mask.of(box_mask(box)) for box in boxes] if masks else [],
    )
    near = np.repeat(boxes, 2, 0) + rng.normal(0, 2.0, (2 * count, 4))
    far = rng.uniform(0, 0.5, (3, 2)) * [WIDTH, HEIGHT]
    seen = np.concatenate([near, np.concatenate([far, far + 20], 1)])
    of_class = np.concatenate([np.repeat(labels, 2), rng.integers(1, CLASSES + 1, 3)])
    wrong = rng.random(len(of_class)) < 0.2
    return truth, Detections(
        boxes=seen,
        scores=np.round(rng.random(len(seen)), 2),  # some are equal
        labels=np.where(wrong, rng.integers(1, CLASSES + 1, len(seen)), of_class),
        masks=[encode_mask(box_mask(box)) for box in seen.clip(0, [WIDTH, HEIGHT] * 2)] if masks else [],
    )


def matched(image_ids: Any) -> Matches:
    matcher = CocoMatcher(CLASSES, ("bbox", "segm"))
    for image_id in image_ids:
        matcher.add(*scene(image_id))
    return matcher.matches


def reference(image_ids: range, metric: str) -> float:
    """COCO's own way: one set, one list of results, the first line of the summary."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truths: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for image_id in image_ids:
        truth, found = scene(image_id)
        for number, (xmin, ymin, xmax, ymax) in enumerate(truth.boxes):
            truths.append(
                {
                    "id": len(truths) + 1,
                    "image_id": image_id,
                    "category_id": int(truth.labels[number]),
                    "bbox": [xmin, ymin, xmax - xmin, ymax - ymin],
                    "area": truth.areas[number],
                    "iscrowd": int(truth.crowd[number]),
                    "segmentation": encode_mask(truth.masks[number].whole(HEIGHT, WIDTH)),
                }
            )
        for number, (xmin, ymin, xmax, ymax) in enumerate(found.boxes):
            result = {
                "image_id": image_id,
                "category_id": int(found.labels[number]),
                "score": found.scores[number],
            }
            what = {"bbox": [xmin, ymin, xmax - xmin, ymax - ymin]}
            results.append(result | (what if metric == "bbox" else {"segmentation": found.masks[number]}))
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "images": [{"id": image_id, "height": HEIGHT, "width": WIDTH} for image_id in image_ids],
            "annotations": truths,
            "categories": [{"id": label} for label in range(1, CLASSES + 1)],
        }
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(results), metric)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0])


@pytest.mark.parametrize("metric", ["bbox", "segm"])
def test_it_is_cocos_own_whatever_the_number_of_ranks(metric: str) -> None:
    images = range(100, 160)
    expected = reference(images, metric)
    assert 0.1 < expected < 0.9
    for ranks in (1, 2, 3, 7):
        parts = [matched(images[rank::ranks]) for rank in range(ranks)]
        assert average_precision(parts, CLASSES, metric) == pytest.approx(expected, abs=1e-12)
    backwards = [matched(reversed(images))]
    assert average_precision(backwards, CLASSES, metric) == pytest.approx(expected, abs=1e-12)


def test_perfect_detections_score_1_and_none_score_0() -> None:
    matcher, blind = CocoMatcher(CLASSES, ("bbox",)), CocoMatcher(CLASSES, ("bbox",))
    nothing = Detections(boxes=np.zeros((0, 4)), scores=np.zeros(0), labels=np.zeros(0, np.int64), masks=[])
    for image_id in range(20):
        truth, _ = scene(image_id, masks=False)
        exact = Detections(boxes=truth.boxes, scores=np.ones(len(truth.boxes)), labels=truth.labels, masks=[])
        matcher.add(truth, exact)
        blind.add(truth, nothing)
    assert average_precision([matcher.matches], CLASSES, "bbox") == 1.0
    assert average_precision([blind.matches], CLASSES, "bbox") == 0.0


def test_what_is_kept_of_an_image_is_small() -> None:
    import pickle

    truth, _ = scene(104)
    rng = np.random.default_rng(1)
    corners = rng.uniform(0, 60, (100, 2))
    found = Detections(
        boxes=np.concatenate([corners, corners + 15], 1),
        scores=rng.random(100),
        labels=rng.integers(1, CLASSES + 1, 100),
        masks=[],
    )
    matcher = CocoMatcher(CLASSES, ("bbox",))
    matcher.add(truth, found)
    assert len(pickle.dumps(matcher.matches)) < 6000


def test_an_image_that_comes_twice_is_refused() -> None:
    matcher = CocoMatcher(CLASSES, ("bbox", "segm"))
    matcher.add(*scene(1))
    with pytest.raises(DataError, match="image 1 is in two validation records"):
        matcher.add(*scene(1))
    with pytest.raises(DataError, match="image 3 is in two validation records"):
        average_precision([matched([1, 3]), matched([2, 3])], CLASSES, "bbox")


def test_a_set_without_objects_has_no_precision() -> None:
    matcher = CocoMatcher(CLASSES, ("bbox",))
    empty = GroundTruth(
        image_id=1,
        size=(10, 10),
        height=10,
        width=10,
        boxes=np.zeros((0, 4)),
        labels=np.zeros(0, np.int64),
        crowd=np.zeros(0, np.bool_),
        areas=np.zeros(0),
        masks=[],
    )
    matcher.add(empty, Detections(boxes=np.zeros((0, 4)), scores=np.zeros(0), labels=np.zeros(0, np.int64), masks=[]))
    with pytest.raises(DataError, match="no objects"):
        average_precision([matcher.matches], CLASSES, "bbox")
