"""Boxes and masks follow the picture as torchvision's do; crops and sizes keep the references' rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision import tv_tensors
from torchvision.ops import box_iou
from torchvision.transforms.v2 import functional as reference

from drawbar.input import detection
from drawbar.input.augment import RecordRandom
from drawbar.input.libjpeg import Window

HEIGHT, WIDTH = 120, 200


def objects(seed: int, count: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    corners = np.sort(rng.uniform(0, 1, (count, 2, 2)), axis=1) * [WIDTH, HEIGHT]
    masks = (rng.uniform(0, 1, (count, HEIGHT, WIDTH)) < 0.5).astype(np.uint8)
    return corners.reshape(count, 4), masks


def tv_boxes(boxes: np.ndarray) -> Any:
    return tv_tensors.BoundingBoxes(torch.from_numpy(boxes), format="XYXY", canvas_size=(HEIGHT, WIDTH))


@pytest.mark.parametrize("seed", range(5))
def test_boxes_and_masks_follow_as_torchvisions_do(seed: int) -> None:
    boxes, masks = objects(seed)
    tv_masks = tv_tensors.Mask(torch.from_numpy(masks))
    window = Window(10 + seed, 20, 80, 120)
    cropped = reference.crop(tv_boxes(boxes), *window)
    assert np.allclose(detection.crop_boxes(boxes, window), cropped.numpy())
    assert np.array_equal(detection.crop_masks(masks, window), reference.crop(tv_masks, *window).numpy())
    flipped = reference.horizontal_flip(tv_boxes(boxes))
    assert np.allclose(detection.flip_boxes(boxes, WIDTH), flipped.numpy())
    assert np.array_equal(detection.flip_masks(masks), reference.horizontal_flip(tv_masks).numpy())
    size = (300 - seed, 97)
    resized = reference.resize(tv_boxes(boxes), list(size))
    assert np.allclose(detection.resize_boxes(boxes, (HEIGHT, WIDTH), size), resized.numpy())
    differ = detection.resize_masks(masks, size) != reference.resize(tv_masks, list(size)).numpy()
    # torch works out the source row in 32-bit floats: where it falls on a border, it may be the other one.
    assert differ.any(axis=(0, 2)).sum() <= 2
    assert differ.mean() < 0.01


def test_overlaps_are_torchvisions() -> None:
    boxes, _ = objects(3)
    window = Window(15, 30, 60, 100)
    corners = torch.tensor([[30.0, 15.0, 130.0, 75.0]], dtype=torch.float64)
    expected = box_iou(torch.from_numpy(boxes), corners)[:, 0].numpy()
    assert np.allclose(detection.overlaps(boxes, window), expected)


@given(seed=st.integers(0, 5000), count=st.integers(1, 8))
def test_an_ssd_crop_keeps_what_is_centred_in_it(seed: int, count: int) -> None:
    boxes, _ = objects(seed, count)
    crop = detection.ssd_crop(HEIGHT, WIDTH, boxes, RecordRandom(seed, 0, 0, 0))
    top, left, height, width = crop.window
    assert 0 <= top < top + height <= HEIGHT
    assert 0 <= left < left + width <= WIDTH
    assert crop.kept.any()
    if (height, width) != (HEIGHT, WIDTH):
        assert height >= 0.3 * HEIGHT - 1
        assert width >= 0.3 * WIDTH - 1
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2
        inside = ((centres > [left, top]) & (centres < [left + width, top + height])).all(axis=1)
        assert np.array_equal(crop.kept, inside)
        assert (detection.overlaps(boxes, crop.window)[crop.kept] > 0).all()


def test_all_choices_of_the_ssd_crop_occur_and_its_floor_holds() -> None:
    boxes = np.array([[60.0, 30.0, 140.0, 90.0]])
    crops = [detection.ssd_crop(HEIGHT, WIDTH, boxes, RecordRandom(1, 0, 0, number)) for number in range(700)]
    whole = sum(crop.window == Window(0, 0, HEIGHT, WIDTH) for crop in crops)
    # One in seven, and again for each floor that 50 tries do not meet.
    assert 70 < whole < 250
    shares = np.array([detection.overlaps(boxes, crop.window)[0] for crop in crops])
    assert (shares > 0.7).sum() > 15
    assert (shares < 0.3).sum() > 50


def test_an_image_without_objects_stays_whole() -> None:
    crop = detection.ssd_crop(HEIGHT, WIDTH, np.empty((0, 4)), RecordRandom(1, 0, 0, 0))
    assert crop.window == Window(0, 0, HEIGHT, WIDTH)
    assert len(crop.kept) == 0


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((480, 640), (800, 1066)),
        ((640, 480), (1066, 800)),
        ((427, 640), (800, 1199)),
        ((300, 640), (625, 1333)),
        ((800, 1000), (800, 1000)),
        ((500, 500), (800, 800)),
        ((50, 1338), (50, 1333)),
    ],
)
def test_mask_rcnn_sizes_are_the_references(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert detection.mask_rcnn_size(*size) == expected


@given(height=st.integers(50, 2000), width=st.integers(50, 2000))
def test_mask_rcnn_sizes_keep_aspect_and_bounds(height: int, width: int) -> None:
    tall, wide = detection.mask_rcnn_size(height, width)
    assert min(tall, wide) <= 800
    assert max(tall, wide) <= 1333
    assert min(tall, wide) == 800 or max(tall, wide) >= 1300
    assert abs(tall / wide - height / width) <= 0.02 * height / width + 1 / min(tall, wide)


def test_batches_of_one_aspect_pad_to_multiples() -> None:
    assert detection.padded_size([(800, 1066), (750, 1333)]) == (800, 1344)
    assert [detection.aspect_group(*size) for size in [(480, 640), (640, 480), (5, 5)]] == [1, 0, 0]
