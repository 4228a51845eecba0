"""From an encoded record to pixels: decode, random resized crop, flip.

Everything random follows from (seed, epoch, record id) alone: the same pixels whatever the number of threads or ranks.
"""

from __future__ import annotations

import math

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg

Pixels = npt.NDArray[np.uint8]

# One decode thread works on one image: OpenCV's own pool would only fight with ours.
cv2.setNumThreads(1)

_MIN_AREA, _MAX_AREA = 0.1, 1.0
_MIN_ASPECT, _MAX_ASPECT = 0.75, 4.0 / 3.0
_MAX_TRIES = 100


def record_rng(seed: int, epoch: int, shard: int, offset: int) -> np.random.Generator:
    """Counter-based, so that making one per record is cheap and no state is shared between threads."""
    return np.random.Generator(np.random.Philox(key=[(seed << 32) | (epoch & 0xFFFFFFFF), (shard << 44) | offset]))


def random_crop(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Top, left, height, width of a crop window, all in pixels.

    TensorFlow's distorted-bounding-box rule with the whole image as the box, as tf_cnn_benchmarks has it: aspect
    3/4 to 4/3, at least 10 % of the image covered (the 5 % area floor of the rule is below that), up to 100 tries, else
    the whole image.
    """
    for _ in range(_MAX_TRIES):
        aspect = rng.uniform(_MIN_ASPECT, _MAX_ASPECT)
        low = round(math.sqrt(_MIN_AREA * height * width / aspect))
        high = min(round(math.sqrt(_MAX_AREA * height * width / aspect)), height, int((width + 0.5) / aspect))
        if low > high:
            continue
        crop_height = int(rng.integers(low, high + 1))
        crop_width = min(round(crop_height * aspect), width)
        if crop_height * crop_width < _MIN_AREA * height * width or crop_height < 1 or crop_width < 1:
            continue
        top = int(rng.integers(0, height - crop_height + 1))
        left = int(rng.integers(0, width - crop_width + 1))
        return top, left, crop_height, crop_width
    return 0, 0, height, width


def train_image(encoded: bytes | memoryview, rng: np.random.Generator, out: Pixels) -> None:
    """Decodes, crops, resizes (bilinear) and flips one JPEG into `out`, uint8 of shape (size, size, 3), RGB.

    Fast integer DCT and fast chroma upsampling, as tf_cnn_benchmarks decodes. Raises ValueError for what is no JPEG or
    is damaged.
    """
    image: Pixels = simplejpeg.decode_jpeg(encoded, "RGB", fastdct=True, fastupsample=True)
    top, left, height, width = random_crop(image.shape[0], image.shape[1], rng)
    window = image[top : top + height, left : left + width]
    size = (out.shape[1], out.shape[0])
    if rng.random() < 0.5:
        cv2.flip(cv2.resize(window, size, interpolation=cv2.INTER_LINEAR), 1, dst=out)
    else:
        cv2.resize(window, size, dst=out, interpolation=cv2.INTER_LINEAR)
