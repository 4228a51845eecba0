"""Colour distortions: pure functions on RGB pixels, in place of 8 bits.

`distort_colours` follows tf_cnn_benchmarks (`distort_color`), `jitter_colours` the SSD reference (torchvision's
ColorJitter): their saturation and contrast differ in definition, not only in range.
"""

from __future__ import annotations

from collections.abc import Callable

import cv2
import numpy as np
import numpy.typing as npt

from drawbar.input.augment import RecordRandom
from drawbar.input.libjpeg import Pixels

Floats = npt.NDArray[np.float32]
"""(height, width, 3), RGB; in 0..1 at first and at last, outside of it in between."""

_GREY = np.array([0.2989, 0.587, 0.114], np.float32)


def distort_colours(pixels: Pixels, random: RecordRandom) -> None:
    """Brightness by up to 32/255, saturation and contrast by 0.5 to 1.5, hue by up to a fifth of the circle.

    In one of the two orders that tf_cnn_benchmarks alternates between by position in the batch; here it is drawn.
    """
    brightness, saturation = random.uniform(-32 / 255, 32 / 255), random.uniform(0.5, 1.5)
    hue, contrast = random.uniform(-0.2, 0.2), random.uniform(0.5, 1.5)
    image = _unit(pixels)
    image += np.float32(brightness)
    if random.random() < 0.5:
        image = adjust_contrast(turn_hue(scale_saturation(image, saturation), hue), contrast)
    else:
        image = turn_hue(scale_saturation(adjust_contrast(image, contrast), saturation), hue)
    _store(image, pixels)


def scale_saturation(image: Floats, factor: float) -> Floats:
    """Saturation of HSV times `factor`, at most 1: TensorFlow's `adjust_saturation`."""
    return _in_hsv(image, lambda hsv: np.minimum(hsv[..., 1] * factor, 1, out=hsv[..., 1]))


def turn_hue(image: Floats, delta: float) -> Floats:
    """Hue of HSV moved by `delta` of the circle: TensorFlow's `adjust_hue`."""
    return _in_hsv(image, lambda hsv: np.remainder(hsv[..., 0] + delta * 360, 360, out=hsv[..., 0]))


def adjust_contrast(image: Floats, factor: float) -> Floats:
    """Distance from each channel's mean times `factor`: TensorFlow's `adjust_contrast`."""
    mean = image.mean(axis=(0, 1), dtype=np.float64).astype(np.float32)
    changed: Floats = (image - mean) * np.float32(factor) + mean
    return changed


def _in_hsv(image: Floats, change: Callable[[Floats], object]) -> Floats:
    hsv = np.empty_like(image)
    cv2.cvtColor(image, cv2.COLOR_RGB2HSV, dst=hsv)
    change(hsv)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, dst=hsv).astype(np.float32, copy=False)


def jitter_colours(pixels: Pixels, random: RecordRandom) -> None:
    """Brightness by 0.125, contrast and saturation by 0.5, hue by 0.05: the SSD reference's, in random order."""
    brightness, contrast = random.uniform(0.875, 1.125), random.uniform(0.5, 1.5)
    saturation, hue = random.uniform(0.5, 1.5), random.uniform(-0.05, 0.05)
    steps: list[Callable[[Floats], Floats]] = [
        lambda image: blend(image, np.float32(0), brightness),
        lambda image: blend(image, (image @ _GREY).mean(dtype=np.float64).astype(np.float32), contrast),
        lambda image: blend(image, (image @ _GREY)[..., None], saturation),
        lambda image: turn_hue(image, hue),
    ]
    image = _unit(pixels)
    while steps:
        image = steps.pop(random.integer(0, len(steps) - 1))(image)
    _store(image, pixels)


def blend(image: Floats, other: Floats | np.float32, factor: float) -> Floats:
    """`image` in a share of `factor`, `other` for the rest, within 0..1: as torchvision adjusts colours."""
    mixed = image * np.float32(factor) + other * np.float32(1 - factor)
    return np.clip(mixed, 0, 1, out=mixed)


def _unit(pixels: Pixels) -> Floats:
    image = pixels.astype(np.float32)
    image /= 255
    return image


def _store(image: Floats, pixels: Pixels) -> None:
    np.clip(image, 0, 1, out=image)
    np.rint(image * 255, out=image)
    pixels[:] = image
