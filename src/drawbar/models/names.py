"""The names a recipe may give, and the size of their input, without importing torch: checking a recipe must not take
seconds.

The names are tf_cnn_benchmarks' where it has the network. What is built for them is the nearest network of a library
that is kept; where it differs from tf_cnn_benchmarks', the note says so, and `drawbar models` shows it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

DEFAULT_IMAGE_SIZE = 224
"""Of networks by a library's own name, too: which size they were made for is known only to their library."""

_LIBRARY_NAME = re.compile(r"(torchvision|timm):([A-Za-z0-9][A-Za-z0-9_.]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedModel:
    library: Literal["torchvision", "timm", "drawbar"]
    network: str
    """Its name there."""
    image_size: int = DEFAULT_IMAGE_SIZE
    """Pixels of the square input, as tf_cnn_benchmarks has it."""
    image_width: int = 0
    """Of a usual input that is no square; 0: it is one."""
    stride_in_first_convolution: bool = False
    """Of a bottleneck that halves the image: the stride is moved from its 3x3 to its first 1x1."""
    note: str = ""

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width."""
        return self.image_size, self.image_width or self.image_size


def _torchvision(network: str, note: str = "", *, image_size: int = DEFAULT_IMAGE_SIZE) -> NamedModel:
    return NamedModel(library="torchvision", network=network, image_size=image_size, note=note)


def _resnet_v1(network: str) -> NamedModel:
    return NamedModel(
        library="torchvision",
        network=network,
        stride_in_first_convolution=True,
        note="v1.0: stride in the first 1x1",
    )


def _resnet_v2(network: str) -> NamedModel:
    return NamedModel(
        library="timm",
        network=network,
        stride_in_first_convolution=True,
        note="pre-activation, stride in the first 1x1",
    )


_DETECTION = "detection: a set with the COCO keys"
_V1_5 = "stride in the 3x3"
_DENSENET = "tf_cnn_benchmarks has only those for CIFAR"

SSD, MASK_RCNN = "ssd_resnet34", "maskrcnn_resnet50_fpn"
DETECTORS = (SSD, MASK_RCNN)
"""Find objects; they need a set with the COCO keys, all others one label an image."""

MODELS: dict[str, NamedModel] = {
    "resnet18": _torchvision("resnet18"),
    "resnet34": _torchvision("resnet34"),
    "resnet50": _resnet_v1("resnet50"),
    "resnet101": _resnet_v1("resnet101"),
    "resnet152": _resnet_v1("resnet152"),
    "resnet50_v1.5": _torchvision("resnet50", _V1_5),
    "resnet101_v1.5": _torchvision("resnet101", _V1_5),
    "resnet152_v1.5": _torchvision("resnet152", _V1_5),
    "resnet50_v2": _resnet_v2("resnetv2_50"),
    "resnet101_v2": _resnet_v2("resnetv2_101"),
    "resnet152_v2": _resnet_v2("resnetv2_152"),
    "vgg11": _torchvision("vgg11"),
    "vgg16": _torchvision("vgg16"),
    "vgg19": _torchvision("vgg19"),
    "googlenet": _torchvision(
        "googlenet", "with batch norm and dropout, unlike tf_cnn_benchmarks'; no auxiliary heads"
    ),
    "inception3": _torchvision("inception_v3", "no auxiliary head", image_size=299),
    "inception4": NamedModel(library="timm", network="inception_v4", image_size=299, note="dropout 0.2"),
    "alexnet": _torchvision("alexnet", "conv4 has 256 channels, tf_cnn_benchmarks' 384", image_size=227),
    "mobilenet": _torchvision("mobilenet_v2", "v2, as in tf_cnn_benchmarks"),
    "densenet": _torchvision("densenet121", _DENSENET),
    "densenet121": _torchvision("densenet121", _DENSENET),
    "densenet161": _torchvision("densenet161", _DENSENET),
    "densenet169": _torchvision("densenet169", _DENSENET),
    "densenet201": _torchvision("densenet201", _DENSENET),
    SSD: NamedModel(library="drawbar", network=SSD, image_size=300, note=_DETECTION),
    MASK_RCNN: NamedModel(
        library="drawbar",
        network=MASK_RCNN,
        image_size=800,
        image_width=1088,
        note=f"{_DETECTION}; torchvision's parts",
    ),
    "trivial": NamedModel(library="drawbar", network="trivial", note="one linear layer on the mean colour"),
}

MODEL_NAMES = tuple(MODELS)


def find_model(name: str) -> NamedModel:
    """One of `MODELS`, or what `torchvision:NAME` and `timm:NAME` say; whether the library has that network is seen
    when it is built (`models/build.py`).

    Raises ValueError naming the nearest known one.
    """
    if name in MODELS:
        return MODELS[name]
    matched = _LIBRARY_NAME.fullmatch(name)
    if matched:
        library: Literal["torchvision", "timm"] = "torchvision" if matched[1] == "torchvision" else "timm"
        return NamedModel(library=library, network=matched[2])
    near = difflib.get_close_matches(name, MODEL_NAMES, 1, 0.4)
    raise ValueError(
        f"unknown model {name!r}"
        + (f"; did you mean {near[0]!r}?" if near else "")
        + f" (known: {', '.join(MODEL_NAMES)}, torchvision:NAME, timm:NAME)"
    )
