"""Crops stay inside the rule; pixels follow from the seed alone."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st

from drawbar.input.augment import random_crop, record_rng, train_image


@given(height=st.integers(1, 2000), width=st.integers(1, 2000), seed=st.integers(0, 10_000))
def test_a_crop_lies_inside_the_image_and_covers_enough(height: int, width: int, seed: int) -> None:
    top, left, crop_height, crop_width = random_crop(height, width, np.random.default_rng(seed))
    assert 0 <= top <= top + crop_height <= height
    assert 0 <= left <= left + crop_width <= width
    assert crop_height * crop_width >= 0.1 * height * width
    if (crop_height, crop_width) != (height, width) and min(crop_height, crop_width) > 50:
        assert 0.73 < crop_width / crop_height < 1.36


def test_crops_reach_both_small_and_large_windows() -> None:
    areas = []
    for seed in range(500):
        _, _, height, width = random_crop(375, 500, np.random.default_rng(seed))
        areas.append(height * width / (375 * 500))
    assert min(areas) < 0.15
    assert max(areas) > 0.85


def photo(height: int = 300, width: int = 400) -> np.ndarray:
    """A smooth picture, so that JPEG itself changes little."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return np.stack([x * 255 // width, y * 255 // height, (x + y) * 255 // (width + height)], axis=2).astype(np.uint8)


def decoded(encoded: bytes, seed: int, size: int = 64) -> np.ndarray:
    out = np.zeros((size, size, 3), np.uint8)
    train_image(encoded, record_rng(seed, 0, 3, 4096), out)
    return out


def test_same_seed_same_pixels_other_seed_others() -> None:
    encoded = simplejpeg.encode_jpeg(photo(), quality=95)
    assert np.array_equal(decoded(encoded, 1), decoded(encoded, 1))
    assert not np.array_equal(decoded(encoded, 1), decoded(encoded, 2))


def test_the_record_decides_not_the_order_of_calls() -> None:
    first = [record_rng(1, 0, shard, offset).random() for shard, offset in [(0, 0), (0, 100), (1, 0)]]
    again = [record_rng(1, 0, shard, offset).random() for shard, offset in [(1, 0), (0, 100), (0, 0)]][::-1]
    assert first == again
    assert len({*first, record_rng(1, 1, 0, 0).random(), record_rng(2, 0, 0, 0).random()}) == 5


def test_pixels_are_those_of_the_crop_window_resized_and_flipped() -> None:
    encoded = simplejpeg.encode_jpeg(photo(), quality=100, colorsubsampling="444")
    full = simplejpeg.decode_jpeg(encoded, "RGB")
    flips = set()
    for seed in range(12):
        rng = record_rng(seed, 0, 3, 4096)
        top, left, height, width = random_crop(300, 400, rng)
        expected = cv2.resize(full[top : top + height, left : left + width], (64, 64), interpolation=cv2.INTER_LINEAR)
        flipped = rng.random() < 0.5
        flips.add(flipped)
        expected = expected[:, ::-1] if flipped else expected
        assert np.abs(decoded(encoded, seed).astype(int) - expected.astype(int)).mean() < 2.0
    assert flips == {True, False}


def test_batch_slots_are_filled_in_place() -> None:
    batch = np.zeros((2, 32, 32, 3), np.uint8)
    encoded = simplejpeg.encode_jpeg(photo(), quality=95)
    train_image(encoded, record_rng(0, 0, 0, 0), batch[1])
    assert batch[0].max() == 0
    assert batch[1].max() > 0


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"not an image",
        cv2.imencode(".png", photo())[1].tobytes(),
        simplejpeg.encode_jpeg(photo(), quality=95)[:2000],
    ],
    ids=["empty", "text", "png", "truncated"],
)
def test_what_is_no_whole_jpeg_raises_value_error(bad: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decoded(bad, 1)


def test_grey_jpegs_become_rgb() -> None:
    grey = simplejpeg.encode_jpeg(photo()[:, :, :1].copy(), quality=95, colorspace="GRAY", colorsubsampling="Gray")
    out = decoded(grey, 1)
    assert np.array_equal(out[:, :, 0], out[:, :, 2])
