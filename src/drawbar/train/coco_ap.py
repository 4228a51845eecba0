"""Average precision as COCO defines it, by COCO's own code (pycocotools), over images that many ranks looked at.

Each rank matches the detections of its images with what is there, and keeps what the curve needs of each match: a score
and two bits an IoU threshold, at most about 6 kB an image. These are gathered on one rank in the order of image ids, so
the figure is the same whatever the number of ranks, and no mask and no picture ever crosses the network.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from drawbar.errors import DataError, EnvironmentUnfit
from drawbar.input.target import GroundTruth

MOST_DETECTIONS = 100
"""Of a class in an image that count: COCO's own limit."""
METRICS = {"bbox": "box_ap", "segm": "mask_ap"}
"""By pycocotools' names."""
_KEPT = ("dtScores", "dtMatches", "dtIgnore", "gtIgnore")

Runs = dict[str, Any]
"""pycocotools' run lengths: `size` and `counts`."""
Matches = dict[int, dict[str, dict[int, dict[str, Any]]]]
"""By image id, pycocotools' name of the metric, and class: what was matched. Classes without anything are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detections:
    """Of one image, in its own pixels."""

    boxes: npt.NDArray[np.float64]
    """(found, 4): xmin, ymin, xmax, ymax."""
    scores: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]
    masks: list[Runs]
    """As many, or none for a model of boxes."""


def require_pycocotools() -> None:
    """Raises EnvironmentUnfit."""
    try:
        import pycocotools.cocoeval  # noqa: F401
    except ImportError:
        raise EnvironmentUnfit(
            "COCO's average precision needs pycocotools, which is not installed", hint="pip install pycocotools"
        ) from None


def encode_mask(mask: npt.NDArray[np.uint8]) -> Runs:
    from pycocotools import mask as coco

    runs: Runs = coco.encode(np.asfortranarray(mask))
    return runs


class CocoMatcher:
    """Takes images one by one. `metrics` are of `METRICS`."""

    def __init__(self, num_classes: int, metrics: Sequence[str]) -> None:
        """Raises EnvironmentUnfit without pycocotools."""
        require_pycocotools()
        self._metrics = tuple(metrics)
        self._classes = list(range(1, num_classes + 1))
        self.matches: Matches = {}

    def add(self, truth: GroundTruth, found: Detections) -> None:
        """Raises DataError for an image that was there before."""
        if truth.image_id in self.matches:
            raise DataError(f"image {truth.image_id} is in two validation records")
        self.matches[truth.image_id] = {metric: self._match(truth, found, metric) for metric in self._metrics}

    def _match(self, truth: GroundTruth, found: Detections, metric: str) -> dict[int, dict[str, Any]]:
        with_masks = metric == "segm"
        there = _coco(truth, self._classes, _true_objects(truth, with_masks))
        seen = _coco(truth, self._classes, _found_objects(found, with_masks))
        evaluation = _evaluation(metric, there, seen)
        evaluation.params.imgIds, evaluation.params.catIds = [truth.image_id], self._classes
        _quietly(evaluation.evaluate)
        return {
            label: {key: _packed(key, match[key]) for key in _KEPT}
            for label, match in zip(self._classes, evaluation.evalImgs, strict=True)
            if match is not None
        }


def average_precision(parts: Iterable[Matches], num_classes: int, metric: str) -> float:
    """Mean over classes and IoU thresholds of 0.5 to 0.95. Raises DataError where two parts hold the same image, and
    where nothing is to be found in any."""
    images: Matches = {}
    for part in parts:
        if both := images.keys() & part.keys():
            raise DataError(f"image {min(both)} is in two validation records")
        images |= part
    evaluation = _evaluation(metric)
    evaluation.params.imgIds = sorted(images)
    evaluation.params.catIds = list(range(1, num_classes + 1))
    evaluation._paramsEval = evaluation.params
    evaluation.evalImgs = [
        images[image][metric].get(label) for label in evaluation.params.catIds for image in evaluation.params.imgIds
    ]
    _quietly(evaluation.accumulate)
    # Thresholds, recalls, classes, one range of areas, one number of detections; -1 for a class that is nowhere.
    precision = evaluation.eval["precision"]
    known = precision[precision > -1]
    if not known.size:
        raise DataError(f"the validation set has no objects: {len(images)} images")
    return float(known.mean())


def _evaluation(metric: str, there: Any = None, seen: Any = None) -> Any:
    from pycocotools.cocoeval import COCOeval

    evaluation = COCOeval(there, seen, metric)
    # Objects of every size; COCO's tables by size are not asked for.
    evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
    evaluation.params.maxDets = [MOST_DETECTIONS]
    return evaluation


def _coco(truth: GroundTruth, classes: Sequence[int], objects: list[dict[str, Any]]) -> Any:
    from pycocotools.coco import COCO

    index = COCO()
    # Ids from 1: pycocotools takes a match with 0 for none.
    numbered = [{"id": number, "image_id": truth.image_id, **one} for number, one in enumerate(objects, start=1)]
    index.dataset = {
        "images": [{"id": truth.image_id, "height": truth.height, "width": truth.width}],
        "annotations": numbered,
        "categories": [{"id": label} for label in classes],
    }
    _quietly(index.createIndex)
    return index


def _true_objects(truth: GroundTruth, with_masks: bool) -> list[dict[str, Any]]:
    return [
        {
            "category_id": int(truth.labels[number]),
            "bbox": _corner_and_size(box),
            "area": float(truth.areas[number]),
            "iscrowd": int(truth.crowd[number]),
            **(
                {"segmentation": encode_mask(truth.masks[number].whole(truth.height, truth.width))}
                if with_masks
                else {}
            ),
        }
        for number, box in enumerate(truth.boxes)
    ]


def _found_objects(found: Detections, with_masks: bool) -> list[dict[str, Any]]:
    return [
        {
            "category_id": int(found.labels[number]),
            "bbox": _corner_and_size(box),
            "area": float((box[2] - box[0]) * (box[3] - box[1])),
            "iscrowd": 0,
            "score": float(found.scores[number]),
            **({"segmentation": found.masks[number]} if with_masks else {}),
        }
        for number, box in enumerate(found.boxes)
    ]


def _corner_and_size(box: npt.NDArray[np.float64]) -> list[float]:
    xmin, ymin, xmax, ymax = map(float, box)
    return [xmin, ymin, xmax - xmin, ymax - ymin]


def _packed(key: str, values: Any) -> npt.NDArray[Any]:
    """Of `dtMatches` only whether there is a match matters, not which."""
    array = np.asarray(values)
    return array if key == "dtScores" else array.astype(np.bool_)


def _quietly(call: Callable[[], object]) -> None:
    """pycocotools tells its progress on stdout, which belongs to results."""
    with contextlib.redirect_stdout(io.StringIO()):
        call()
