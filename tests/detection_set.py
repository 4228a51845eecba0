"""Small detection sets: scenes that Drawbar draws, and plain pictures in which one colour is the object."""

from __future__ import annotations

from array import array
from pathlib import Path

import cv2
import numpy as np
import simplejpeg

from drawbar.dataset import coco_mask
from drawbar.dataset.coco_like import CocoLikeSet, SyntheticCocoSource
from drawbar.dataset.destination import FolderDestination
from drawbar.dataset.example import encode_example
from drawbar.dataset.pack import pack
from drawbar.dataset.shard_writer import PackSettings
from drawbar.input.batch import Record

NUM_CLASSES = 10


def pack_scenes(folder: Path, num_images: int, *, split: str = "train", masks: bool = True, size: int = 96) -> Path:
    wanted = CocoLikeSet(num_images, seed=1, split=split, image_size=size)
    pack(
        SyntheticCocoSource(wanted, masks=masks),
        FolderDestination(folder),
        PackSettings(num_shards=2, seed=1, split=split, schema="coco"),
        workers=1,
    )
    return folder


def spot_record(number: int, *, height: int = 90, width: int = 140, image_id: int = 0, crowd: bool = False) -> Record:
    """A red ellipse on blue: the picture itself says where box and mask must be. And a crowd on demand, unseen."""
    rng = np.random.default_rng(number)
    pixels = np.full((height, width, 3), (30, 40, 200), np.uint8)
    mask = np.zeros((height, width), np.uint8)
    reach = rng.integers(9, 20, 2)
    centre = (int(rng.integers(25, width - 25)), int(rng.integers(25, height - 25)))
    cv2.ellipse(mask, centre, (int(reach[0]), int(reach[1])), 0, 0, 360, 1, -1)
    pixels[mask > 0] = (220, 40, 30)
    found = coco_mask.bounding_box(mask)
    assert found is not None
    left, top, wide, tall = found
    boxes, masks = [(left, top, wide, tall)], [mask]
    if crowd:
        boxes, masks = [(0, 0, width, height), *boxes], [np.ones_like(mask), mask]
    payload = encode_example(
        {
            "image/height": height,
            "image/width": width,
            "image/source_id": str(image_id or number + 1),
            "image/encoded": simplejpeg.encode_jpeg(pixels, quality=95, colorsubsampling="444"),
            "image/object/bbox/xmin": array("f", [x / width for x, _, _, _ in boxes]),
            "image/object/bbox/xmax": array("f", [(x + w) / width for x, _, w, _ in boxes]),
            "image/object/bbox/ymin": array("f", [y / height for _, y, _, _ in boxes]),
            "image/object/bbox/ymax": array("f", [(y + h) / height for _, y, _, h in boxes]),
            "image/object/class/label": array("q", [90] * len(boxes)),
            "image/object/is_crowd": array("q", [1] * (len(boxes) - 1) + [0]),
            "image/object/area": array("f", [float(one.sum()) for one in masks]),
            "image/object/mask": [coco_mask.encode_png(one) for one in masks],
        }
    )
    return Record(shard=0, key="spots", offset=number, epoch=0, payload=payload)
