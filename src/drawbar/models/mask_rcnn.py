"""Mask R-CNN from torchvision's parts: trained on batches that the input path has resized and padded already.

torchvision's own model takes a list of images and resizes, normalises and pads them on the device. Here the decode
threads resize, and the step normalises, so that the model is backbone, proposals and heads alone. Defaults are those
of the MLPerf reference (facts: anchors 32 to 512, 2,000 proposals, 512 regions an image, a quarter of them positive).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchvision.models import resnet
from torchvision.models.detection import MaskRCNN as TorchvisionMaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

from drawbar.models.detector import Found, Objects, Size
from drawbar.models.trunk import Norm, ResidualTrunk, norm_layer

REFERENCE_ANCHORS = (32, 64, 128, 256, 512)
"""Pixels: root of an anchor's area on each level of the pyramid."""
REFERENCE_PROPOSALS, REFERENCE_REGIONS, REFERENCE_DETECTIONS = 2000, 512, 100
_RATIOS = (0.5, 1.0, 2.0)
_STAGES = ("layer1", "layer2", "layer3", "layer4")
_BOX_PIXELS = 7
_MASK_LAYERS = 4


class MaskRCNN(nn.Module):
    """`num_classes` without the background."""

    def __init__(
        self,
        num_classes: int,
        *,
        blocks: Sequence[int] = (),
        channels: int = 64,
        norm: Norm = "frozen",
        head_channels: int = 256,
        head_features: int = 1024,
        anchors: Sequence[int] = (),
        proposals: int = REFERENCE_PROPOSALS,
        regions: int = REFERENCE_REGIONS,
        detections: int = REFERENCE_DETECTIONS,
    ) -> None:
        """`blocks`: of a narrow trunk of basic blocks with `channels` in its first stage; empty: ResNet-50.

        `head_channels` of pyramid, proposal and mask layers, `head_features` of the box layers. `proposals` are kept an
        image, and as many of each level before suppression; half as many in evaluation.
        """
        super().__init__()
        self._regions = regions
        levels = [(side,) for side in tuple(anchors) or REFERENCE_ANCHORS]
        classes = num_classes + 1
        make_norm = norm_layer("group") if norm == "group" else None
        parts = TorchvisionMaskRCNN(
            _backbone(blocks, channels, norm, head_channels),
            rpn_anchor_generator=AnchorGenerator(tuple(levels), (_RATIOS,) * len(levels)),
            rpn_pre_nms_top_n_train=proposals,
            rpn_post_nms_top_n_train=proposals,
            rpn_pre_nms_top_n_test=max(1, proposals // 2),
            rpn_post_nms_top_n_test=max(1, proposals // 2),
            box_head=TwoMLPHead(head_channels * _BOX_PIXELS**2, head_features),
            box_predictor=FastRCNNPredictor(head_features, classes),
            box_batch_size_per_image=regions,
            box_detections_per_img=detections,
            mask_head=MaskRCNNHeads(head_channels, (head_channels,) * _MASK_LAYERS, 1, make_norm),
            mask_predictor=MaskRCNNPredictor(head_channels, head_channels, classes),
        )
        self.backbone, self.rpn, self.roi_heads = parts.backbone, parts.rpn, parts.roi_heads
        # Boxes are worked out in their type, and bf16 has no coordinates beyond 256 but every second one.
        for layers in (self.rpn.head, self.roi_heads.box_predictor, self.roi_heads.mask_predictor):
            layers.register_forward_hook(lambda layers, inputs, output: _as_float32(output))

    def forward(
        self, images: Tensor, sizes: Sequence[Size], targets: Sequence[Objects] | None = None
    ) -> dict[str, Tensor] | list[Found]:
        """See `Detector`; the losses have torchvision's names."""
        batch = ImageList(images, list(sizes))
        # Anchors take their type from these.
        features = {name: level.float() for name, level in self.backbone(images).items()}
        proposals, of_proposals = self.rpn(batch, features, targets)
        found, of_heads = self.roi_heads(features, proposals, batch.image_sizes, targets)
        if targets is not None:
            return {**of_proposals, **of_heads}
        return cast(list[Found], found)

    def layers_alone(self, images: Tensor) -> Tensor:
        """For counting arithmetic: what all layers give, in one tensor, with as many regions as in training and a
        quarter of them positive."""
        features = self.backbone(images)
        of_boxes, of_masks = (
            images.new_empty((len(images) * regions, self.backbone.out_channels, *pool.output_size), requires_grad=True)
            for regions, pool in (
                (self._regions, self.roi_heads.box_roi_pool),
                (self._regions // 4, self.roi_heads.mask_roi_pool),
            )
        )
        logits, deltas = self.rpn.head(list(features.values()))
        classes, corners = self.roi_heads.box_predictor(self.roi_heads.box_head(of_boxes))
        masks = self.roi_heads.mask_predictor(self.roi_heads.mask_head(of_masks))
        return torch.cat([output.flatten() for output in (*logits, *deltas, classes, corners, masks)])


def _as_float32(output: Any) -> Any:
    """Of a tensor, or a nest of lists and tuples of tensors."""
    return output.float() if isinstance(output, Tensor) else type(output)(map(_as_float32, output))


def _backbone(blocks: Sequence[int], channels: int, norm: Norm, head_channels: int) -> BackboneWithFPN:
    if blocks:
        trunk = ResidualTrunk(blocks, (1, 2, 2, 2), channels, norm)
        widths = trunk.out_channels
    else:
        trunk = resnet.resnet50(norm_layer=norm_layer(norm))
        widths = [256, 512, 1024, 2048]
    return BackboneWithFPN(
        trunk,
        {stage: str(level) for level, stage in enumerate(_STAGES)},
        widths,
        head_channels,
        norm_layer=norm_layer("group") if norm == "group" else None,
    )
