"""SSD on ResNet-34, as MLPerf's reference has it: default boxes, network, matching, loss, and what is found.

The reference is 300 pixels on a side with 8,732 default boxes; other sizes keep the layers, and boxes in proportion.
Sources: Liu et al. 2015; mlcommons/training single_stage_detector/ssd, `ssd300.py`, `base_model.py`, `utils.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import batched_nms, box_convert, box_iou

from drawbar.models.detector import Found, Objects, Size
from drawbar.models.trunk import Norm, ResidualTrunk, norm_layer

REFERENCE_SIZE = 300
REFERENCE_SCALES = (21, 45, 99, 153, 207, 261, 315)
"""Pixels, in an image of the reference's size: side of the square default box of each map, and one more."""
_ASPECTS: tuple[tuple[int, ...], ...] = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))
"""Of each map, besides 1; each also the other way round."""
_TRUNK_BLOCKS, _TRUNK_STRIDES = (3, 4, 6), (1, 2, 1)
_EXTRA_CHANNELS = ((256, 512), (256, 512), (128, 256), (128, 256), (128, 256))
"""Of the layers that make each further map: between, and of the map."""
_UNPADDED = (False, False, False, True, True)
_CENTRE_VARIANCE, _SIZE_VARIANCE = 0.1, 0.2
_MATCH_IOU = 0.5
_NEGATIVES_PER_POSITIVE = 3
_LEAST_SCORE = 0.05
_NMS_IOU = 0.5
_CANDIDATES = 200
"""Of each class, before suppression."""
REFERENCE_DETECTIONS = 200


# Default boxes


@dataclass(frozen=True)
class Geometry:
    """Where each map's default boxes lie."""

    size: int
    maps: tuple[int, ...]
    """Cells on a side."""
    steps: tuple[float, ...]
    """Pixels between the centres of cells."""
    scales: tuple[float, ...]

    @classmethod
    def of(cls, size: int, scales: Sequence[float] = ()) -> Geometry:
        """`scales`, pixels; empty: the reference's, in proportion."""
        cells = _halved(_halved(_halved(size)))
        maps, steps, step = [cells], [8.0], 8.0
        for unpadded in _UNPADDED:
            if unpadded and cells >= 3:
                cells -= 2
                step = size / cells
            elif cells > 1:
                cells = _halved(cells)
                step = 2 * step
            maps.append(cells)
            steps.append(min(step, float(size)))
        return cls(
            size,
            tuple(maps),
            tuple(steps),
            tuple(scales) or tuple(scale * size / REFERENCE_SIZE for scale in REFERENCE_SCALES),
        )

    def boxes_per_cell(self) -> tuple[int, ...]:
        return tuple(2 + 2 * len(aspects) for aspects in _ASPECTS)


def _halved(cells: int) -> int:
    """After a 3x3 convolution or pooling of stride 2 with padding 1."""
    return (cells + 1) // 2


def default_boxes(geometry: Geometry) -> Tensor:
    """float32 (boxes, 4): centre x, centre y, width, height as shares of the image, cut to 0..1 as in the reference.

    By map, row, column, then shape: the square, the one between this map's scale and the next, the others.
    """
    found: list[tuple[float, float, float, float]] = []
    scale_pairs = pairwise(geometry.scales)
    for cells, step, (scale, above), aspects in zip(geometry.maps, geometry.steps, scale_pairs, _ASPECTS, strict=True):
        side = scale / geometry.size
        between = math.sqrt(side * above / geometry.size)
        shapes = [(side, side), (between, between)]
        for aspect in aspects:
            long, short = side * math.sqrt(aspect), side / math.sqrt(aspect)
            shapes += [(long, short), (short, long)]
        centres = [(number + 0.5) * step / geometry.size for number in range(cells)]
        found += [(x, y, width, height) for y in centres for x in centres for width, height in shapes]
    return torch.tensor(found, dtype=torch.float32).clamp_(0, 1)


def match(objects: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Which object each default box is for, and whether it is for any: (boxes,) int64 and bool.

    An IoU above 0.5; and for every object the default box that overlaps it most, whatever the IoU. Both are corners,
    `objects` (n, 4) with n > 0.
    """
    overlaps = box_iou(objects, boxes)
    best, which = overlaps.max(0)
    nearest = overlaps.argmax(1)
    best[nearest] = 2.0
    which[nearest] = torch.arange(len(objects), device=which.device)
    return which, best > _MATCH_IOU


def encode(corners: Tensor, defaults: Tensor) -> Tensor:
    """What the network is to say for these boxes: offsets from their default boxes, in units of the variances."""
    wanted = box_convert(corners, "xyxy", "cxcywh")
    centre = (wanted[..., :2] - defaults[..., :2]) / defaults[..., 2:] / _CENTRE_VARIANCE
    size = (wanted[..., 2:] / defaults[..., 2:]).log() / _SIZE_VARIANCE
    return torch.cat([centre, size], -1)


def decode(offsets: Tensor, defaults: Tensor) -> Tensor:
    """Corners; what `encode` was given."""
    centre = offsets[..., :2] * _CENTRE_VARIANCE * defaults[..., 2:] + defaults[..., :2]
    size = (offsets[..., 2:] * _SIZE_VARIANCE).exp() * defaults[..., 2:]
    return torch.cat([centre - size / 2, centre + size / 2], -1)


# Loss


def multibox_loss(offsets: Tensor, logits: Tensor, wanted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Of boxes and of classes: each image's sum divided by its positives, and the mean over images.

    Shapes (batch, boxes, 4), (batch, boxes, classes), as the first, and (batch, boxes) with 0 for the background.
    Classes count for the positives and for three times as many negatives, those of the highest loss.
    """
    positive = labels > 0
    num_positive = positive.sum(1)
    of_boxes = functional.smooth_l1_loss(offsets, wanted, reduction="none").sum(2)
    of_boxes = (of_boxes * positive).sum(1)
    of_classes = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    order = of_classes.detach().masked_fill(positive, 0).argsort(1, descending=True)
    rank = order.argsort(1)
    hard = rank < (_NEGATIVES_PER_POSITIVE * num_positive).unsqueeze(1)
    of_classes = (of_classes * (positive | hard)).sum(1)
    # An image without objects has no positives and by that no negatives: it adds nothing, as in the reference.
    divisor = num_positive.clamp(min=1)
    return (of_boxes / divisor).mean(), (of_classes / divisor).mean()


# Network


class SSD(nn.Module):
    """`num_classes` without the background. Images are square, of the geometry's size."""

    defaults: Tensor
    corners: Tensor

    def __init__(
        self,
        num_classes: int,
        *,
        size: int = REFERENCE_SIZE,
        blocks: Sequence[int] = (),
        channels: int = 64,
        norm: Norm | None = None,
        scales: Sequence[float] = (),
        detections: int = REFERENCE_DETECTIONS,
    ) -> None:
        """`norm` of the trunk and of the further maps' layers; None: batch norm in the trunk alone, as the reference
        has it, which begins with a trained trunk."""
        super().__init__()
        self._classes, self._detections = num_classes + 1, detections
        self.geometry = Geometry.of(size, scales)
        self.trunk = ResidualTrunk(tuple(blocks) or _TRUNK_BLOCKS, _TRUNK_STRIDES, channels, norm or "batch")
        map_channels = [self.trunk.out_channels[-1]]
        self.extra = nn.ModuleList()
        for pair, unpadded, cells in zip(_EXTRA_CHANNELS, _UNPADDED, self.geometry.maps, strict=False):
            between, after = (width * channels // 64 for width in pair)
            stride, padding = (1, 0) if unpadded and cells >= 3 else (2, 1)
            narrowing = nn.Conv2d(map_channels[-1], between, kernel_size=1)
            reducing = nn.Conv2d(between, after, kernel_size=3, stride=stride, padding=padding)
            self.extra.append(nn.Sequential(*_activated(narrowing, norm), *_activated(reducing, norm)))
            map_channels.append(after)
        counts = self.geometry.boxes_per_cell()
        heads = list(zip(map_channels, counts, strict=True))
        self.box_heads = nn.ModuleList(nn.Conv2d(width, 4 * count, 3, padding=1) for width, count in heads)
        self.class_heads = nn.ModuleList(
            nn.Conv2d(width, self._classes * count, 3, padding=1) for width, count in heads
        )
        for part in (self.extra, self.box_heads, self.class_heads):
            for parameter in part.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)
        defaults = default_boxes(self.geometry)
        self.register_buffer("defaults", defaults, persistent=False)
        self.register_buffer("corners", box_convert(defaults, "cxcywh", "xyxy"), persistent=False)

    def forward(
        self, images: Tensor, sizes: Sequence[Size], targets: Sequence[Objects] | None = None
    ) -> dict[str, Tensor] | list[Found]:
        """See `Detector`; the losses are `box` and `class`."""
        offsets, logits = self.answer(images)
        return self._found(offsets, logits) if targets is None else self._losses(offsets, logits, targets)

    def answer(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Offsets (batch, boxes, 4) and logits (batch, boxes, classes with the background), as float32."""
        features = self.trunk(images)
        maps = [features]
        for layer in self.extra:
            maps.append(layer(maps[-1]))
        offsets = [_by_box(head(cells), 4) for head, cells in zip(self.box_heads, maps, strict=True)]
        logits = [_by_box(head(cells), self._classes) for head, cells in zip(self.class_heads, maps, strict=True)]
        return torch.cat(offsets, 1).float(), torch.cat(logits, 1).float()

    def layers_alone(self, images: Tensor) -> Tensor:
        """For counting arithmetic: everything that `answer` gives, in one tensor."""
        return torch.cat(self.answer(images), 2)

    def _losses(self, offsets: Tensor, logits: Tensor, targets: Sequence[Objects]) -> dict[str, Tensor]:
        wanted = torch.zeros_like(offsets)
        labels = torch.zeros(offsets.shape[:2], dtype=torch.int64, device=offsets.device)
        for number, target in enumerate(targets):
            if not len(target["labels"]):
                continue
            shares = target["boxes"] / self.geometry.size
            which, positive = match(shares, self.corners)
            labels[number] = target["labels"][which] * positive
            wanted[number] = encode(shares[which], self.defaults) * positive.unsqueeze(1)
        of_boxes, of_classes = multibox_loss(offsets, logits, wanted, labels)
        return {"box": of_boxes, "class": of_classes}

    def _found(self, offsets: Tensor, logits: Tensor) -> list[Found]:
        corners = decode(offsets, self.defaults).clamp(0, 1) * self.geometry.size
        scores = logits.softmax(2)[..., 1:]
        return [self._best(*of_image) for of_image in zip(corners, scores, strict=True)]

    def _best(self, corners: Tensor, scores: Tensor) -> Found:
        """Of one image: suppressed within each class at an IoU of 0.5; then the best of all classes."""
        best, which = scores.topk(min(_CANDIDATES, len(scores)), dim=0)
        candidates, classes = (best > _LEAST_SCORE).nonzero(as_tuple=True)
        boxes, score = corners[which[candidates, classes]], best[candidates, classes]
        kept = batched_nms(boxes, score, classes, _NMS_IOU)[: self._detections]
        return Found(
            boxes=boxes[kept], scores=score[kept], labels=classes[kept] + 1, masks=score.new_zeros((0, 1, 28, 28))
        )


def _activated(convolution: nn.Conv2d, norm: Norm | None) -> list[nn.Module]:
    between = [norm_layer(norm)(convolution.out_channels)] if norm else []
    return [convolution, *between, nn.ReLU(inplace=True)]


def _by_box(cells: Tensor, values: int) -> Tensor:
    """(batch, count * values, height, width) to (batch, height * width * count, values)."""
    return cells.permute(0, 2, 3, 1).reshape(len(cells), -1, values)
