"""What a detection sample is to be found: boxes, classes and masks that lie on its pixels."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from drawbar.input.libjpeg import Pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Of one sample. Crowds are not among its objects: no reference trains them."""

    size: tuple[int, int]
    """Height and width that the image fills of its batch's pixels, from the upper left."""
    boxes: npt.NDArray[np.float32]
    """(objects, 4): xmin, ymin, xmax, ymax in pixels of the sample, each with an area."""
    labels: npt.NDArray[np.int64]
    """(objects,), from 1; 0 is the background."""
    masks: list[Mask] = field(default_factory=list)
    """As many, or none for a model of boxes."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The part of a mask in which the object is: all of them whole would be a hundred times the image."""

    top: int
    left: int
    pixels: Pixels
    """uint8 (height, width), 0 and 1."""

    @classmethod
    def of(cls, whole: Pixels) -> Mask:
        rows, columns = np.flatnonzero(whole.any(1)), np.flatnonzero(whole.any(0))
        if not len(rows):
            return cls(0, 0, np.zeros((0, 0), np.uint8))
        top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
        return cls(int(top), int(left), whole[top:bottom, left:right].copy())

    def whole(self, height: int, width: int) -> Pixels:
        """uint8 (height, width), 0 where the object is not."""
        mask = np.zeros((height, width), np.uint8)
        mask[self.top : self.top + len(self.pixels), self.left : self.left + self.pixels.shape[1]] = self.pixels
        return mask


@dataclass(frozen=True, kw_only=True, slots=True)
class GroundTruth:
    """Of one validation image, in its own pixels: what detections are compared with."""

    image_id: int
    size: tuple[int, int]
    """Height and width that the image fills of its batch's pixels, from the upper left."""
    height: int
    width: int
    boxes: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]
    crowd: npt.NDArray[np.bool_]
    areas: npt.NDArray[np.float64]
    masks: list[Mask] = field(default_factory=list)
    """As many, or none for a model of boxes."""


_MADE_UP_OBJECTS = 8
"""Of an image: about as many as COCO's have, 7.3."""


def made_up_target(rng: np.random.Generator, size: tuple[int, int], num_classes: int, *, masks: bool) -> Target:
    """For a constant batch: objects as if drawn by chance, full boxes as masks."""
    height, width = size
    spans = rng.uniform(0.05, 0.5, (_MADE_UP_OBJECTS, 2)) * [width, height]
    corners = rng.uniform(0, 1, (_MADE_UP_OBJECTS, 2)) * ([width, height] - spans)
    boxes = np.round(np.concatenate([corners, corners + spans], 1))
    shapes = [
        Mask(int(y), int(x), np.ones((int(bottom - y), int(right - x)), np.uint8)) for x, y, right, bottom in boxes
    ]
    return Target(
        size=size,
        boxes=boxes.astype(np.float32),
        labels=rng.integers(1, num_classes + 1, _MADE_UP_OBJECTS, np.int64),
        masks=shapes if masks else [],
    )
