"""Colour distortions against their definitions: torchvision's for SSD, HSV by the standard library for TensorFlow's."""

from __future__ import annotations

import colorsys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as reference

from drawbar.dataset.picture import make_picture
from drawbar.input import distort
from drawbar.input.augment import RecordRandom
from drawbar.input.distort import Floats
from drawbar.input.image_decoder import ImageDecoder
from drawbar.input.libjpeg import Pixels


def picture() -> Pixels:
    return ImageDecoder("full", "exact").image(make_picture(3, 1, 2, size=100))


def unit() -> Floats:
    return (picture() / 255).astype(np.float32)


GREY = np.array([0.2989, 0.587, 0.114], np.float32)


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.5])
def test_the_ssd_jitters_parts_are_torchvisions(factor: float) -> None:
    image = unit()
    tensor = torch.from_numpy(image).permute(2, 0, 1)
    parts: list[tuple[Floats, torch.Tensor]] = [
        (distort.blend(image, np.float32(0), factor), reference.adjust_brightness(tensor, factor)),
        (distort.blend(image, (image @ GREY).mean(), factor), reference.adjust_contrast(tensor, factor)),
        (distort.blend(image, (image @ GREY)[..., None], factor), reference.adjust_saturation(tensor, factor)),
        (distort.turn_hue(image, (factor - 1) / 10), reference.adjust_hue(tensor, (factor - 1) / 10)),
    ]
    for ours, theirs in parts:
        assert np.abs(ours - theirs.permute(1, 2, 0).numpy()).max() < 2e-3


def by_colorsys(image: Floats, change: Callable[[float, float, float], tuple[float, float, float]]) -> Floats:
    pixels = [colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*pixel))) for pixel in image.reshape(-1, 3).tolist()]
    return np.array(pixels, np.float32).reshape(image.shape)


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_saturation_hue_and_contrast_are_tensorflows(factor: float) -> None:
    image = unit()[:40, :40]
    saturated = by_colorsys(image, lambda h, s, v: (h, min(1.0, s * factor), v))
    assert np.abs(distort.scale_saturation(image, factor) - saturated).max() < 1e-3
    turned = by_colorsys(image, lambda h, s, v: ((h + factor / 5) % 1, s, v))
    assert np.abs(distort.turn_hue(image, factor / 5) - turned).max() < 1e-3
    contrast = distort.adjust_contrast(image, factor)
    assert np.allclose(contrast.mean(axis=(0, 1)), image.mean(axis=(0, 1)), atol=1e-4)
    assert np.allclose(contrast.std(axis=(0, 1)), factor * image.std(axis=(0, 1)), atol=1e-4)


@pytest.mark.parametrize("change", [distort.distort_colours, distort.jitter_colours])
def test_colours_follow_from_the_record_and_change_only_colours(
    change: Callable[[Pixels, RecordRandom], None],
) -> None:
    original = picture()
    made = []
    for number in (0, 0, 1, 2, 3):
        pixels = original.copy()
        change(pixels, RecordRandom(1, 0, 0, number))
        made.append(pixels)
    assert np.array_equal(made[0], made[1])
    assert len({pixels.tobytes() for pixels in made}) == 4
    differences = [np.abs(pixels.astype(int) - original).mean() for pixels in made]
    assert all(0.5 < difference < 90 for difference in differences)
    # The picture is the same one: light and dark stay where they were.
    for pixels in made:
        assert np.corrcoef(pixels.mean(axis=2).ravel(), original.mean(axis=2).ravel())[0, 1] > 0.8
