"""Box and mask average precision of a model on a validation set: every image once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import paste_masks_in_image

from drawbar.input.target import GroundTruth
from drawbar.models.detector import Found, Size
from drawbar.train.batch import HostBatch
from drawbar.train.coco_ap import (
    METRICS,
    CocoMatcher,
    Detections,
    Matches,
    Runs,
    average_precision,
    encode_mask,
)
from drawbar.train.detection import DetectionObjective
from drawbar.train.evaluate import share_buffers

_PASTED_AT_ONCE = 10
"""Masks: each is a float for every pixel of its image for a moment."""
_INSIDE = 0.5


class DetectionEvaluation:
    """Evaluates on all ranks at once; each has its own part of the images."""

    def __init__(
        self,
        model: nn.Module,
        objective: DetectionObjective,
        batches: Callable[[], Iterable[HostBatch]],
        *,
        num_classes: int,
        with_masks: bool,
        control: dist.ProcessGroup | None = None,
    ) -> None:
        """`batches` gives this rank's part of the set, each time anew, with `truths`. `control`: a CPU group of all
        ranks; None: there is one rank alone. Raises EnvironmentUnfit without pycocotools."""
        self._model, self._objective, self._batches = model, objective, batches
        self._num_classes, self._control = num_classes, control
        self._kinds = tuple(METRICS) if with_masks else ("bbox",)
        self.metrics = tuple(METRICS[kind] for kind in self._kinds)
        self._matcher()

    def run(self, epoch: int) -> dict[str, float]:
        """`box_ap`, and `mask_ap` of a model with masks, 0 to 1; equal on all ranks. Raises DataError and whatever
        the input raises."""
        share_buffers(self._model, self._control)
        matcher = self._matcher()
        was_training = self._model.training
        self._model.eval()
        try:
            for batch in self._batches():
                for truth, found in zip(batch.truths, self._detect(batch), strict=True):
                    matcher.add(truth, in_image(found, truth, with_masks="segm" in self._kinds))
                batch.release()
        finally:
            self._model.train(was_training)
        return self._agreed(matcher.matches)

    def _matcher(self) -> CocoMatcher:
        return CocoMatcher(self._num_classes, self._kinds)

    def _detect(self, batch: HostBatch) -> list[Found]:
        sizes = [truth.size for truth in batch.truths]
        with torch.inference_mode(), self._objective.autocast():
            images = self._objective.normalise(batch.pixels, sizes)
            return cast(list[Found], self._model(images, sizes))

    def _agreed(self, matches: Matches) -> dict[str, float]:
        """Worked out by rank 0 from all ranks' matches."""
        if self._control is None:
            return self._figures([matches])
        rank = dist.get_rank(self._control)
        parts: list[Matches] | None = [{} for _ in range(dist.get_world_size(self._control))] if rank == 0 else None
        dist.gather_object(matches, parts, dst=0, group=self._control)
        answer: list[dict[str, float] | Exception | None] = [None]
        if parts is not None:
            try:
                answer = [self._figures(parts)]
            except Exception as error:  # the others wait for the answer: they end with the same error
                answer = [error]
        dist.broadcast_object_list(answer, src=0, group=self._control)
        if isinstance(answer[0], Exception):
            raise answer[0]
        return cast(dict[str, float], answer[0])

    def _figures(self, parts: list[Matches]) -> dict[str, float]:
        return {METRICS[kind]: average_precision(parts, self._num_classes, kind) for kind in self._kinds}


def in_image(found: Found, truth: GroundTruth, *, with_masks: bool) -> Detections:
    """From pixels of the sample to pixels of the image."""
    height, width = truth.size
    scale = found["boxes"].new_tensor([truth.width / width, truth.height / height]).repeat(2)
    boxes = (found["boxes"] * scale).float().cpu()
    masks = _whole_masks(found["masks"].float().cpu(), boxes, (truth.height, truth.width)) if with_masks else []
    return Detections(
        boxes=boxes.numpy().astype(np.float64),
        scores=found["scores"].float().cpu().numpy().astype(np.float64),
        labels=found["labels"].cpu().numpy(),
        masks=masks,
    )


def _whole_masks(masks: Tensor, boxes: Tensor, size: Size) -> list[Runs]:
    runs: list[Runs] = []
    for first in range(0, len(masks), _PASTED_AT_ONCE):
        part = slice(first, first + _PASTED_AT_ONCE)
        pasted = paste_masks_in_image(masks[part], boxes[part], size)[:, 0] > _INSIDE
        runs += [encode_mask(mask) for mask in pasted.numpy().astype(np.uint8)]
    return runs
