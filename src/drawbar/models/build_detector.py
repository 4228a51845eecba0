"""Builds a detection model by name, from the recipe's `[detection]`. Weights are random: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from drawbar.config import Detection
from drawbar.models import mask_rcnn, ssd
from drawbar.models.mask_rcnn import MaskRCNN
from drawbar.models.names import SSD as SSD_NAME
from drawbar.models.ssd import SSD


def build_detector(name: str, num_classes: int, image_size: int, settings: Detection) -> nn.Module:
    """A `detector.Detector` of `names.DETECTORS`. `num_classes` is without the background."""
    if name == SSD_NAME:
        return SSD(
            num_classes,
            size=image_size,
            blocks=settings.blocks,
            channels=settings.channels,
            norm=None if settings.norm == "model" else settings.norm,
            scales=settings.box_sizes,
            detections=settings.detections or ssd.REFERENCE_DETECTIONS,
        )
    return MaskRCNN(
        num_classes,
        blocks=settings.blocks,
        channels=settings.channels,
        norm="frozen" if settings.norm == "model" else settings.norm,
        head_channels=settings.head_channels,
        head_features=settings.head_features,
        anchors=settings.box_sizes,
        proposals=settings.proposals,
        regions=settings.regions,
        detections=settings.detections or mask_rcnn.REFERENCE_DETECTIONS,
    )


def pretrained_part(model: nn.Module) -> nn.Module:
    """What a file of `model.weights` is for: a detector's trunk, with torchvision's names; else the whole model."""
    if isinstance(model, SSD):
        return model.trunk
    return model.backbone.body if isinstance(model, MaskRCNN) else model


def build_for_counting(name: str, num_classes: int, image_size: int) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The reference's model, and a function from images to a tensor that all its layers had a part in, as in training.
    No box is worked out, so that shapes alone will do."""
    model = build_detector(name, num_classes, image_size, Detection())
    return model, model.layers_alone if isinstance(model, SSD | MaskRCNN) else model
