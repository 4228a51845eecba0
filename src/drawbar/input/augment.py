"""What is random in a training sample: crop window, flip, colours; and where an evaluation looks.

Everything random follows from (seed, epoch, record id) alone: the same pixels whatever the number of threads or ranks.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Literal

from drawbar.dataset.example import Box
from drawbar.input.image_decoder import Placement
from drawbar.input.libjpeg import View, Window

MIN_COVERED = 0.1
"""Of some object's box, or of the image."""
_MIN_AREA, _MAX_AREA = 0.05, 1.0
_MIN_ASPECT, _MAX_ASPECT = 0.75, 4.0 / 3.0
_MAX_TRIES = 100

_DRAWS = struct.Struct("<8Q")
_KEY = struct.Struct("<5Q")
_TO_UNIT = 2.0**-53


class RecordRandom:
    """Random numbers of one record. Made in a microsecond, from a hash, so that no library's version decides them."""

    __slots__ = ("_block", "_drawn", "_key")

    def __init__(self, seed: int, epoch: int, shard: int, offset: int) -> None:
        self._key = (seed, epoch, shard, offset)
        self._block = 0
        self._drawn: list[int] = []

    def random(self) -> float:
        """In [0, 1)."""
        if not self._drawn:
            key = _KEY.pack(*self._key, self._block)
            self._drawn = list(_DRAWS.unpack(hashlib.blake2b(key, digest_size=64).digest()))
            self._block += 1
        return (self._drawn.pop() >> 11) * _TO_UNIT

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.random()

    def integer(self, low: int, high: int) -> int:
        """In [low, high], both included."""
        return low + int(self.random() * (high - low + 1))


def random_crop(height: int, width: int, random: RecordRandom, boxes: Sequence[Box] = ()) -> Window:
    """TensorFlow's distorted-bounding-box rule, as tf_cnn_benchmarks has it.

    Aspect 3/4 to 4/3, 5 to 100 % of the area, at least 10 % of some box covered (of the image, without boxes), up to
    100 tries, else the whole image.
    """
    # Without boxes the image is the box: its cover is the stricter floor on the area.
    area = height * width * (_MIN_AREA if boxes else MIN_COVERED)
    for _ in range(_MAX_TRIES):
        aspect = random.uniform(_MIN_ASPECT, _MAX_ASPECT)
        low = round(math.sqrt(area / aspect))
        high = min(round(math.sqrt(_MAX_AREA * height * width / aspect)), height, int((width + 0.5) / aspect))
        if low > high:
            continue
        crop_height = random.integer(low, high)
        crop_width = min(round(crop_height * aspect), width)
        if crop_height * crop_width < area or crop_height < 1 or crop_width < 1:
            continue
        top, left = random.integer(0, height - crop_height), random.integer(0, width - crop_width)
        window = Window(top, left, crop_height, crop_width)
        if not boxes or any(_covered(window, box, height, width) >= MIN_COVERED for box in boxes):
            return window
    return Window(0, 0, height, width)


def _covered(window: Window, box: Box, height: int, width: int) -> float:
    """Share of the box's area that lies in the window; 0 for a box without area."""
    top, left, bottom, right = box.ymin * height, box.xmin * width, box.ymax * height, box.xmax * width
    tall = min(bottom, window.top + window.height) - max(top, window.top)
    wide = min(right, window.left + window.width) - max(left, window.left)
    whole = (bottom - top) * (right - left)
    return tall * wide / whole if whole > 0 and tall > 0 and wide > 0 else 0.0


def train_placement(height: int, width: int, random: RecordRandom, boxes: Sequence[Box] = ()) -> Placement:
    """A random crop, flipped half of the time."""
    window = random_crop(height, width, random, boxes)
    return Placement(window, window, random.random() < 0.5)


EvalRule = Literal["mlperf", "tf_cnn"]


def eval_placement(height: int, width: int, size: int, rule: EvalRule = "mlperf") -> Placement:
    """The image resized with its aspect kept, and the central square of `size` pixels of that.

    `mlperf`: the short side becomes 256 where `size` is 224, and in proportion for others; `tf_cnn`: both sides become
    at least 1.145 times `size`. Both cut the resized sides to whole pixels. What would be cut away is never resized.
    """
    wanted = round(size * 256 / 224) if rule == "mlperf" else size * 1.145
    factor = wanted / min(height, width)
    tall, wide = int(height * factor + 1e-6), int(width * factor + 1e-6)
    down, right = height / tall, width / wide
    shown = View((tall - size) // 2 * down, (wide - size) // 2 * right, size * down, size * right)
    # Resizing the whole image would look at the neighbours of the square's edge too.
    top, left = max(0, math.floor(shown.top) - 1), max(0, math.floor(shown.left) - 1)
    bottom = min(height, math.ceil(shown.top + shown.height) + 1)
    end = min(width, math.ceil(shown.left + shown.width) + 1)
    return Placement(Window(top, left, bottom - top, end - left), shown)
