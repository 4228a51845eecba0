"""Geometry of detection samples: crops and sizes of SSD and Mask R-CNN, and boxes and masks that follow the picture.

Pure functions. Boxes are float arrays (objects, 4) of xmin, ymin, xmax, ymax in pixels, masks uint8 arrays (objects,
height, width) of 0 and 1. None changes what it is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drawbar.input.augment import RecordRandom
from drawbar.input.libjpeg import Window

Boxes = npt.NDArray[np.float64]
Masks = npt.NDArray[np.uint8]
Kept = npt.NDArray[np.bool_]

SSD_SIZE = 300
_SSD_FLOORS = (None, 0.1, 0.3, 0.5, 0.7, 0.9, 0.0)
"""Choices of the SSD crop: none, the smallest IoU with every kept object's box, or (0.0) a free one."""
_SSD_TRIES = 50
_SSD_LEAST = 0.3
_SSD_ASPECT = 2.0

SHORT_SIDE, LONG_SIDE = 800, 1333
PADDED_TO = 32


# What follows the picture


def crop_boxes(boxes: Boxes, window: Window) -> Boxes:
    """In the window's pixels, cut at its edges; a box outside becomes one without area."""
    moved = boxes - np.array([window.left, window.top, window.left, window.top])
    cut: Boxes = np.clip(moved, 0, [window.width, window.height, window.width, window.height])
    return cut


def flip_boxes(boxes: Boxes, width: float) -> Boxes:
    """Left to right, in an image of this width."""
    xmin, ymin, xmax, ymax = boxes.T
    return np.stack([width - xmax, ymin, width - xmin, ymax], axis=1)


def resize_boxes(boxes: Boxes, from_size: tuple[float, float], to_size: tuple[float, float]) -> Boxes:
    """Sizes are (height, width)."""
    down, right = to_size[0] / from_size[0], to_size[1] / from_size[1]
    resized: Boxes = boxes * np.array([right, down, right, down])
    return resized


def crop_masks(masks: Masks, window: Window) -> Masks:
    return masks[:, window.top : window.top + window.height, window.left : window.left + window.width].copy()


def flip_masks(masks: Masks) -> Masks:
    return masks[:, :, ::-1].copy()


def resize_masks(masks: Masks, size: tuple[int, int]) -> Masks:
    """To (height, width), each pixel that of the one it falls into: masks stay 0 and 1."""
    rows = np.arange(size[0]) * masks.shape[1] // size[0]
    columns = np.arange(size[1]) * masks.shape[2] // size[1]
    return masks[:, rows[:, None], columns]


# SSD


@dataclass(frozen=True)
class ObjectCrop:
    window: Window
    kept: Kept
    """(objects,): those whose centre lies in the window."""


def ssd_crop(height: int, width: int, boxes: Boxes, random: RecordRandom) -> ObjectCrop:
    """The SSD reference's crop (facts 1.4): tried anew until one is right, each time with another choice of floor.

    Sides are 0.3 to 1 of the image's, their ratio below 2; of a floor above 0, every kept object's box overlaps the
    window by that IoU. An image without objects stays whole.
    """
    everything = ObjectCrop(Window(0, 0, height, width), np.ones(len(boxes), np.bool_))
    if not len(boxes):
        return everything
    while True:
        floor = _SSD_FLOORS[random.integer(0, len(_SSD_FLOORS) - 1)]
        if floor is None:
            return everything
        for _ in range(_SSD_TRIES):
            share_wide, share_tall = random.uniform(_SSD_LEAST, 1), random.uniform(_SSD_LEAST, 1)
            # As in the reference, whose sides are shares of the image: their ratio is of the shares.
            if not 1 / _SSD_ASPECT <= share_wide / share_tall <= _SSD_ASPECT:
                continue
            window = _window(height, width, share_tall, share_wide, random)
            kept = _centred(boxes, window)
            if kept.any() and (overlaps(boxes, window)[kept] > floor).all():
                return ObjectCrop(window, kept)


def _window(height: int, width: int, share_tall: float, share_wide: float, random: RecordRandom) -> Window:
    left, top = random.uniform(0, 1 - share_wide), random.uniform(0, 1 - share_tall)
    first_row, first_column = int(top * height), int(left * width)
    last_row, last_column = int((top + share_tall) * height), int((left + share_wide) * width)
    return Window(first_row, first_column, max(1, last_row - first_row), max(1, last_column - first_column))


def _centred(boxes: Boxes, window: Window) -> Kept:
    x, y = (boxes[:, 0] + boxes[:, 2]) / 2, (boxes[:, 1] + boxes[:, 3]) / 2
    inside: Kept = (x > window.left) & (x < window.left + window.width)
    return inside & (y > window.top) & (y < window.top + window.height)


def overlaps(boxes: Boxes, window: Window) -> npt.NDArray[np.float64]:
    """(objects,): intersection over union of each box with the window."""
    inside = crop_boxes(boxes, window)
    common = (inside[:, 2] - inside[:, 0]) * (inside[:, 3] - inside[:, 1])
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    shares: npt.NDArray[np.float64] = common / (areas + window.height * window.width - common)
    return shares


# Mask R-CNN


def mask_rcnn_size(height: int, width: int, short: int = SHORT_SIDE, long: int = LONG_SIDE) -> tuple[int, int]:
    """(height, width) with the short side at `short`, or less where the long one would be above `long`.

    As maskrcnn-benchmark has it, but that its rounding lets the long side of very long images pass `long`.
    """
    low, high = min(height, width), max(height, width)
    target = short if high / low * short <= long else round(long * low / high)
    if low == target and high <= long:
        return height, width
    other = min(int(target * high / low), long)
    return (target, other) if height <= width else (other, target)


def aspect_group(height: int, width: int) -> int:
    """0 for upright and square images, 1 for wide ones: a batch of one group pads little."""
    return int(width > height)


def padded_size(sizes: list[tuple[int, int]], multiple: int = PADDED_TO) -> tuple[int, int]:
    """(height, width) that holds all of them, both a multiple of `multiple`."""
    height, width = (max(sides) for sides in zip(*sizes, strict=True))
    return math.ceil(height / multiple) * multiple, math.ceil(width / multiple) * multiple
