"""What a step makes of a batch of detection samples, the models it trains, and their evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.detection.image_list import ImageList

from drawbar.config import Data, Detection, Input, Model, Optimizer, PixelScale, Recipe
from drawbar.dataset.coco_mask import decode_counts, expand_counts
from drawbar.input.target import GroundTruth, Mask, Target, made_up_target
from drawbar.models.build_detector import build_for_counting, pretrained_part
from drawbar.models.figures import figures_of
from drawbar.models.mask_rcnn import MaskRCNN
from drawbar.models.names import DETECTORS, MASK_RCNN, SSD
from drawbar.models.trunk import ResidualTrunk
from drawbar.train.batch import HostBatch
from drawbar.train.build import build_training
from drawbar.train.clock import HostClock
from drawbar.train.detection import DetectionObjective
from drawbar.train.detection_evaluation import DetectionEvaluation, in_image
from drawbar.train.precision import Precision
from drawbar.train.step import Trained
from drawbar.world import World

CPU = torch.device("cpu")


def objective(pixels: PixelScale = "imagenet") -> DetectionObjective:
    return DetectionObjective(device=CPU, dtype=torch.float32, channels_last=True, pixels=pixels)


def host_batch(targets: list[Target], pixels: torch.Tensor, truths: Sequence[GroundTruth] = ()) -> HostBatch:
    labels = torch.zeros(len(pixels), dtype=torch.int64)
    return HostBatch(pixels=pixels, labels=labels, epoch=0, release=lambda: None, targets=targets, truths=truths)


def test_pixels_are_normalised_and_padding_is_the_mean() -> None:
    pixels = torch.full((1, 32, 64, 3), 255, dtype=torch.uint8)
    images = objective().normalise(pixels, [(20, 50)])
    expected = (255 - torch.tensor([123.675, 116.28, 103.53])) / torch.tensor([58.395, 57.12, 57.375])
    assert torch.allclose(images[0, :, 19, 49], expected, atol=1e-4)
    assert not images[0, :, 20:].any()
    assert not images[0, :, :, 50:].any()
    colours = torch.tensor([10, 20, 30], dtype=torch.uint8).expand(1, 32, 64, 3)
    blue_first = objective(pixels="caffe").normalise(colours, [(32, 64)])[0, :, 0, 0]
    assert torch.allclose(blue_first, torch.tensor([30 - 102.9801, 20 - 115.9465, 10 - 122.7717]), atol=1e-4)


def test_masks_come_to_their_place_on_the_device() -> None:
    shape = np.array([[1, 0, 1], [0, 1, 1]], np.uint8)
    target = Target(
        size=(20, 30),
        boxes=np.array([[4, 3, 7, 5], [0, 0, 3, 2]], np.float32),
        labels=np.array([3, 1]),
        masks=[Mask(3, 4, shape), Mask(0, 0, shape[:, :0])],
    )
    batch = objective().to_device(host_batch([target], torch.zeros((1, 32, 32, 3), dtype=torch.uint8)))
    (objects,) = batch.targets
    assert objects["masks"].shape == (2, 32, 32)
    assert np.array_equal(objects["masks"][0, 3:5, 4:7].numpy(), shape)
    assert int(objects["masks"].sum()) == shape.sum()
    assert batch.sizes == [(20, 30)]
    assert objects["labels"].tolist() == [3, 1]


def test_mask_rcnn_has_torchvisions_parameters_and_frozen_statistics() -> None:
    mine, theirs = (
        MaskRCNN(80),
        torchvision.models.detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=81),
    )
    names = {name: value.shape for name, value in theirs.state_dict().items()}
    # torchvision has plain batch norm where it is given no weights; the reference's is frozen, which keeps no count.
    names = {name: shape for name, shape in names.items() if not name.endswith("num_batches_tracked")}
    assert {name: value.shape for name, value in mine.state_dict().items()} == names
    factors = sum(value.numel() for name, value in mine.named_buffers() if name.endswith(("weight", "bias")))
    assert sum(parameter.numel() for parameter in mine.parameters()) + factors == 44_400_693
    assert mine.rpn.anchor_generator.sizes == ((32,), (64,), (128,), (256,), (512,))
    assert (mine.roi_heads.box_roi_pool.output_size, mine.roi_heads.mask_roi_pool.output_size) == ((7, 7), (14, 14))
    assert mine.roi_heads.fg_bg_sampler.batch_size_per_image == 512


def test_the_trunk_is_resnets() -> None:
    mine = ResidualTrunk((3, 4, 6, 3), (1, 2, 2, 2), 64, "batch")
    theirs = torchvision.models.resnet34()
    del theirs.fc
    theirs.load_state_dict(mine.state_dict(), strict=True)
    mine.eval(), theirs.eval()
    images = torch.randn(1, 3, 64, 64)
    whole = theirs.maxpool(theirs.relu(theirs.bn1(theirs.conv1(images))))
    for layer in (theirs.layer1, theirs.layer2, theirs.layer3, theirs.layer4):
        whole = layer(whole)
    assert torch.allclose(mine(images), whole, atol=1e-5)


# Learning


SMALL = {
    SSD: Detection(blocks=[1, 1, 1], channels=16, norm="group", box_sizes=[12, 20, 32, 45, 60, 80, 96]),
    MASK_RCNN: Detection(
        short_side=96,
        long_side=128,
        blocks=[1, 1, 1, 1],
        channels=16,
        norm="group",
        head_channels=32,
        head_features=64,
        box_sizes=[20, 26, 34, 48, 64],
        proposals=40,
        regions=16,
    ),
}


def loss_of(trained: Trained) -> float:
    assert trained.loss is not None
    return float(trained.loss)


def small_recipe(name: str, learning_rate: float = 0.01) -> Recipe:
    return Recipe(
        data=Data(num_classes=2),
        model=Model(name=name, precision="fp32"),
        input=Input(image_size=96),
        detection=SMALL[name],
        optimizer=Optimizer(learning_rate=learning_rate, weight_decay=0.0),
    )


def spots(count: int) -> tuple[torch.Tensor, list[Target], list[GroundTruth]]:
    """Bright squares and dark discs on grey."""
    rng = np.random.default_rng(4)
    pixels, targets, truths = [], [], []
    rows, columns = np.mgrid[:96, :96]
    for image_id in range(1, count + 1):
        image = np.full((96, 96, 3), 128, np.uint8) + rng.integers(0, 10, (96, 96, 3)).astype(np.uint8)
        boxes, masks = [], []
        for number, x in enumerate((int(rng.integers(16, 34)), int(rng.integers(62, 80)))):
            y, reach = int(rng.integers(18, 78)), int(rng.integers(9, 15))
            inside = (abs(rows - y) < reach) & (abs(columns - x) < reach)
            if number:
                inside = (rows - y) ** 2 + (columns - x) ** 2 < reach**2
            image[inside] = 30 if number else 240
            boxes.append([x - reach + 1, y - reach + 1, x + reach, y + reach])
            masks.append(inside.astype(np.uint8))
        labels, corners = np.array([1, 2]), np.array(boxes, np.float64)
        pixels.append(image)
        targets.append(
            Target(
                size=(96, 96), boxes=corners.astype(np.float32), labels=labels, masks=[Mask.of(mask) for mask in masks]
            )
        )
        truths.append(
            GroundTruth(
                image_id=image_id,
                size=(96, 96),
                height=96,
                width=96,
                boxes=corners,
                labels=labels,
                crowd=np.zeros(2, np.bool_),
                areas=np.array([mask.sum() for mask in masks], np.float64),
                masks=[Mask.of(mask) for mask in masks],
            )
        )
    return torch.from_numpy(np.stack(pixels)), targets, truths


def evaluation_of(
    model: torch.nn.Module, pixels: torch.Tensor, truths: list[GroundTruth], *, with_masks: bool
) -> DetectionEvaluation:
    def batches() -> Iterator[HostBatch]:
        for first in range(0, len(truths), 3):  # the last one is smaller
            part = slice(first, first + 3)
            yield host_batch([], pixels[part], truths[part])

    return DetectionEvaluation(model, objective(), batches, num_classes=2, with_masks=with_masks)


@pytest.mark.parametrize(("name", "steps", "rate"), [(SSD, 120, 0.01), (MASK_RCNN, 140, 0.05)])
def test_a_detector_learns_eight_images(name: str, steps: int, rate: float) -> None:
    torch.manual_seed(1)
    pixels, targets, truths = spots(8)
    training = build_training(small_recipe(name, rate), World.detect({}), CPU, Precision("fp32"), HostClock(), None)
    evaluation = evaluation_of(training.model, pixels, truths, with_masks=name == MASK_RCNN)
    before = evaluation.run(0)
    assert before["box_ap"] < 0.1
    losses = [loss_of(training.step.run(host_batch(targets, pixels))) for _ in range(steps)]
    assert losses[-1] < 0.35 * losses[0]
    after = evaluation.run(1)
    assert training.model.training
    assert set(after) == ({"box_ap", "mask_ap"} if name == MASK_RCNN else {"box_ap"})
    assert all(value > 0.5 for value in after.values()), after


@pytest.mark.parametrize("name", DETECTORS)
def test_a_full_size_model_trains_a_made_up_batch(name: str) -> None:
    torch.manual_seed(1)
    recipe = Recipe(model=Model(name=name), data=Data(num_classes=80), input=Input(image_size=300))
    training = build_training(recipe, World.detect({}), CPU, Precision("fp32"), HostClock(), None)
    rng = np.random.default_rng(1)
    size = (300, 300) if name == SSD else (96, 128)
    targets = [made_up_target(rng, size, 80, masks=name == MASK_RCNN)]
    pixels = torch.from_numpy(rng.integers(0, 256, (1, *size, 3), np.uint8))
    trained = training.step.run(host_batch(targets, pixels))
    assert 1 < loss_of(trained) < 1000
    assert trained.marks.computed > trained.marks.copied


def test_boxes_and_masks_come_back_in_the_images_own_pixels() -> None:
    truth = spots(1)[2][0]
    wide = GroundTruth(**{name: getattr(truth, name) for name in truth.__slots__} | {"height": 50, "width": 200})
    found = {
        "boxes": torch.tensor([[24.0, 24.0, 48.0, 96.0]]),
        "scores": torch.tensor([0.5]),
        "labels": torch.tensor([2]),
        "masks": torch.ones(1, 1, 28, 28),
    }
    detections = in_image(found, wide, with_masks=True)  # type: ignore[arg-type]
    assert detections.boxes.tolist() == [[50.0, 12.5, 100.0, 50.0]]
    mask = decode_counts(expand_counts(detections.masks[0]["counts"].decode()), 50, 200)
    assert mask.shape == (50, 200)
    assert mask[14:49, 52:98].all()
    assert not mask[:11].any()
    assert not mask[:, 103:].any()


@pytest.mark.parametrize("empty", [[0], [0, 1]])
def test_mask_rcnn_trains_images_without_objects(empty: list[int]) -> None:
    torch.manual_seed(2)
    pixels, targets, _ = spots(2)
    for number in empty:
        targets[number] = Target(size=(96, 96), boxes=np.zeros((0, 4), np.float32), labels=np.zeros(0, np.int64))
    training = build_training(small_recipe(MASK_RCNN), World.detect({}), CPU, Precision("fp32"), HostClock(), None)
    losses = [loss_of(training.step.run(host_batch(targets, pixels))) for _ in range(3)]
    assert all(0 < loss < 100 for loss in losses)


def test_a_batch_in_parts_has_the_mean_of_their_losses() -> None:
    torch.manual_seed(2)
    pixels, targets, _ = spots(4)
    training = build_training(small_recipe(SSD), World.detect({}), CPU, Precision("fp32"), HostClock(), None)
    whole = objective().to_device(host_batch(targets, pixels))
    parts = objective().split(whole, 2)
    assert [len(part.images) for part in parts] == [len(part.targets) for part in parts] == [2, 2]
    losses = [objective().loss(training.model, part).item() for part in parts]
    assert sum(losses) / 2 == pytest.approx(objective().loss(training.model, whole).item(), rel=1e-5)


def test_boxes_are_worked_out_in_fp32_whatever_the_models_precision() -> None:
    torch.manual_seed(3)
    settings = SMALL[MASK_RCNN]
    model = MaskRCNN(2, blocks=settings.blocks, channels=8, norm="group", head_channels=16, head_features=16).eval()
    images = torch.randn(1, 3, 320, 640)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        features = {name: level.float() for name, level in model.backbone(images).items()}
        assert next(iter(model.backbone(images).values())).dtype == torch.bfloat16
        proposals, _ = model.rpn(ImageList(images, [(320, 640)]), features, None)
        found = model(images, [(320, 640)])
    assert proposals[0].dtype == torch.float32
    far = proposals[0][:, 2][proposals[0][:, 2] > 300]
    assert (far != far.bfloat16().float()).any()
    assert found[0]["boxes"].dtype == found[0]["masks"].dtype == torch.float32


@pytest.mark.parametrize(("name", "parameters"), [(SSD, 19_972_534), (MASK_RCNN, 44_347_573)])
def test_models_are_counted_with_their_heads(name: str, parameters: int) -> None:
    figures = figures_of(name)
    assert (figures.parameters, figures.num_classes) == (parameters, 80)
    # Twice the forward's, but for the first layer, which needs no gradient of the image.
    assert 2.9 < figures.forward_backward_flops / figures.forward_flops < 3.0


def test_mask_rcnns_arithmetic_is_the_sum_of_its_parts() -> None:
    """By hand, in multiplications per image of 800x1088: of the heads alone, which made-up regions stand for."""
    with torch.device("meta"):
        _, run = build_for_counting(MASK_RCNN, 80, 800)
        with FlopCounterMode(display=False) as counter:
            run(torch.empty(1, 3, 800, 1088))
    by_part = {name: sum(counts.values()) / 2 for name, counts in counter.get_flop_counts().items()}
    cells = sum(math.ceil(800 / stride) * math.ceil(1088 / stride) for stride in (4, 8, 16, 32, 64))
    assert by_part["RPNHead"] == cells * 256 * (256 * 9 + 3 + 12)
    assert by_part["TwoMLPHead"] == 512 * (256 * 49 * 1024 + 1024 * 1024)
    assert by_part["MaskRCNNHeads"] == 128 * 4 * 14 * 14 * 256 * 256 * 9


@pytest.mark.parametrize(("name", "network"), [(SSD, "resnet34"), (MASK_RCNN, "resnet50")])
def test_torchvisions_weights_go_into_the_trunk(tmp_path: Path, name: str, network: str) -> None:
    file = tmp_path / "trunk.pth"
    classifier = torchvision.models.get_model(network)
    torch.save(classifier.state_dict(), file)
    recipe = Recipe(model=Model(name=name, weights=str(file)), data=Data(num_classes=3), input=Input(image_size=96))
    training = build_training(recipe, World.detect({}), CPU, Precision("fp32"), HostClock(), None)
    trunk = pretrained_part(training.model)
    assert trunk is not training.model
    mine, theirs = trunk.state_dict(), classifier.state_dict()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert "layer3.1.conv2.weight" in mine
    assert training.weights is not None
    assert "fc.weight" in training.weights.unexpected
    assert (training.weights.missing, training.weights.head) == ([], [])
