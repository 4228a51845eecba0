"""SSD against MLPerf's reference figures, against independent formulas, and as a thing that learns."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from drawbar.models.detector import Objects
from drawbar.models.ssd import SSD, Geometry, decode, default_boxes, encode, match, multibox_loss


def test_it_has_the_references_parameters_and_default_boxes() -> None:
    model = SSD(num_classes=80)
    assert sum(parameter.numel() for parameter in model.parameters()) == 19_972_534
    assert model.defaults.shape == (8732, 4)
    assert model.geometry.maps == (38, 19, 10, 5, 3, 1)
    assert list(model.geometry.steps) == [8, 16, 32, 64, 100, 300]
    assert list(model.geometry.scales) == [21, 45, 99, 153, 207, 261, 315]
    layers = dict(model.trunk.named_modules())
    strides = [layers[f"layer{stage}.0.conv1"].stride for stage in (1, 2, 3)]
    assert strides == [(1, 1), (2, 2), (1, 1)]


def test_every_map_has_the_cells_that_its_default_boxes_are_for() -> None:
    for size in (64, 96, 128, 200, 300, 320):
        model = SSD(num_classes=3, size=size, blocks=(1, 1, 1), channels=8).eval()
        with torch.no_grad():
            offsets, logits = model.answer(torch.zeros(1, 3, size, size))
        assert offsets.shape[1] == logits.shape[1] == len(model.defaults)


def reference_boxes() -> list[list[float]]:
    """`dboxes300_coco` and `DefaultBoxes` of mlcommons/training, ssd/utils.py, with its order."""
    size, maps, steps = 300, [38, 19, 10, 5, 3, 1], [8, 16, 32, 64, 100, 300]
    scales, aspects = [21, 45, 99, 153, 207, 261, 315], [[2], [2, 3], [2, 3], [2, 3], [2], [2]]
    found = []
    for index, cells in enumerate(maps):
        first, second = scales[index] / size, scales[index + 1] / size
        shapes = [(first, first), (math.sqrt(first * second),) * 2]
        for alpha in aspects[index]:
            wide, tall = first * math.sqrt(alpha), first / math.sqrt(alpha)
            shapes += [(wide, tall), (tall, wide)]
        for width, height in shapes:
            for row, column in itertools.product(range(cells), repeat=2):
                x, y = (column + 0.5) / (size / steps[index]), (row + 0.5) / (size / steps[index])
                found.append([min(max(value, 0.0), 1.0) for value in (x, y, width, height)])
    return found


def test_default_boxes_are_the_references() -> None:
    """In whatever order: the network learns which is which."""
    mine = np.round(default_boxes(Geometry.of(300)).numpy().astype(float), 5)
    theirs = np.round(np.array(reference_boxes()), 5)
    assert np.allclose(mine[np.lexsort(mine.T)], theirs[np.lexsort(theirs.T)], atol=2e-5)


def test_offsets_lead_back_to_the_box() -> None:
    defaults = default_boxes(Geometry.of(96))
    corners = torch.rand(len(defaults), 2, 2).sort(1).values.flatten(1)
    corners[:, 2:] += 0.01
    assert torch.allclose(decode(encode(corners, defaults), defaults), corners, atol=1e-4)
    centre = torch.tensor([[0.5, 0.5, 0.2, 0.4]])
    wanted = encode(torch.tensor([[0.42, 0.3, 0.62, 0.7]]), centre)
    assert torch.allclose(wanted, torch.tensor([[0.02 / 0.2 / 0.1, 0, 0, 0]]), atol=1e-5)


def test_each_object_has_a_default_box_however_small_it_is() -> None:
    model = SSD(num_classes=3)
    objects = torch.tensor([[0.1, 0.1, 0.104, 0.104], [0.2, 0.2, 0.6, 0.6]])
    which, positive = match(objects, model.corners)
    assert set(which[positive].tolist()) == {0, 1}
    assert (which[positive] == 0).sum() == 1
    assert (which[positive] == 1).sum() > 1


def plain_loss(offsets: Tensor, logits: Tensor, wanted: Tensor, labels: Tensor) -> float:
    """Box by box, with sorted lists."""
    total = 0.0
    for number in range(len(labels)):
        positive = [i for i, label in enumerate(labels[number].tolist()) if label]
        if not positive:
            continue
        of_class = [
            -functional.log_softmax(logits[number, i], 0)[labels[number, i]].item() for i in range(labels.shape[1])
        ]
        hard = sorted((of_class[i] for i in range(labels.shape[1]) if i not in positive), reverse=True)
        of_box = 0.0
        for i in positive:
            for difference in (offsets[number, i] - wanted[number, i]).abs().tolist():
                of_box += 0.5 * difference**2 if difference < 1 else difference - 0.5
        classes = sum(of_class[i] for i in positive) + sum(hard[: 3 * len(positive)])
        total += (of_box + classes) / len(positive)
    return total / len(labels)


def test_the_loss_is_the_references() -> None:
    generator = torch.Generator().manual_seed(3)
    offsets, wanted = (2 * torch.randn(3, 60, 4, generator=generator) for _ in range(2))
    logits = torch.randn(3, 60, 5, generator=generator)
    labels = torch.zeros(3, 60, dtype=torch.int64)
    labels[0, [3, 20, 41]] = torch.tensor([1, 4, 2])
    labels[1, 7] = 3  # the third image has no object, and adds nothing
    of_boxes, of_classes = multibox_loss(offsets, logits, wanted, labels)
    assert float(of_boxes + of_classes) == pytest.approx(plain_loss(offsets, logits, wanted, labels), rel=1e-4)


def test_a_wrong_box_and_a_wrong_class_cost_more() -> None:
    labels = torch.tensor([[1, 0, 0, 0, 0, 0]])
    wanted = torch.zeros(1, 6, 4)
    sure = torch.zeros(1, 6, 2)
    sure[0, 0, 1], sure[0, 1:, 0] = 5.0, 5.0
    good = multibox_loss(wanted, sure, wanted, labels)
    assert float(good[0]) == 0
    assert float(multibox_loss(wanted + 1, sure, wanted, labels)[0]) == pytest.approx(4 * 0.5)
    assert float(multibox_loss(wanted, -sure, wanted, labels)[1]) > 10 * float(good[1])


def test_what_is_found_is_suppressed_within_a_class_only() -> None:
    model = SSD(num_classes=2, size=96, blocks=(1, 1, 1), channels=8).eval()
    offsets = torch.zeros(1, len(model.defaults), 4)
    logits = torch.zeros(1, len(model.defaults), 3)
    logits[..., 0] = 9.0
    overlapping = encode(torch.tensor([0.3, 0.3, 0.6, 0.6]).expand(3, 4), model.defaults[100:103])
    offsets[0, 100:103] = overlapping
    logits[0, 100, 1], logits[0, 101, 1], logits[0, 102, 2] = 14.0, 12.0, 13.0
    (found,) = model._found(offsets, logits)
    assert found["labels"].tolist() == [1, 2]
    assert torch.allclose(found["boxes"], torch.tensor([0.3, 0.3, 0.6, 0.6]) * 96, atol=0.01)
    assert found["scores"].tolist() == sorted(found["scores"].tolist(), reverse=True)


def test_images_without_objects_are_trained_with_others() -> None:
    torch.manual_seed(0)
    model = SSD(num_classes=2, size=64, blocks=(1, 1, 1), channels=8)
    empty = Objects(
        boxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.int64), masks=torch.zeros(0, 64, 64).byte()
    )
    full = Objects(boxes=torch.tensor([[4.0, 4, 40, 40]]), labels=torch.tensor([2]), masks=empty["masks"])
    images = torch.randn(2, 3, 64, 64)
    losses = model(images, [(64, 64)] * 2, [empty, full])
    assert set(losses) == {"box", "class"}
    losses["class"].backward()
    assert all(torch.isfinite(loss) and loss > 0 for loss in losses.values())
    nothing = model(images, [(64, 64)] * 2, [empty, empty])
    assert (nothing["box"] + nothing["class"]).item() == 0
