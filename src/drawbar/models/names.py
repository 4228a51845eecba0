"""The names a recipe may give, without importing torch: checking a recipe must not take seconds."""

from __future__ import annotations

SSD, MASK_RCNN = "ssd_resnet34", "maskrcnn_resnet50_fpn"
DETECTORS = (SSD, MASK_RCNN)
"""Find objects; they need a set with the COCO keys, all others one label an image."""

MODEL_NAMES = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet50_v1.5",
    "resnet101",
    "resnet101_v1.5",
    "resnet152",
    "resnet152_v1.5",
    "trivial",
    *DETECTORS,
)
"""`resnetN` is v1.0 (stride in a bottleneck's first 1x1 convolution, as tf_cnn_benchmarks has it); `_v1.5` has the
stride in the 3x3. `trivial` is one linear layer on the mean colour: the input path's own limit."""
