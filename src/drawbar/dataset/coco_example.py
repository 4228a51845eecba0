"""An image of a detection set as a `tf.train.Example` with the keys of TensorFlow's `create_coco_tf_record.py`."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drawbar.dataset import coco_mask, jpeg
from drawbar.dataset.coco_fields import object_fields
from drawbar.dataset.example import encode_example
from drawbar.dataset.items import CheckedImage
from drawbar.errors import DataError


@dataclass(frozen=True)
class CocoObject:
    """One annotation as it goes into a record."""

    category_id: int
    """COCO's own, with gaps; kept."""
    name: str
    box: Sequence[float]
    """x, y, width, height in pixels."""
    crowd: int
    area: float
    """Pixels squared."""
    mask: bytes | None
    """PNG of the whole image's size, 0 and 1; None in a set without masks."""


@dataclass(frozen=True)
class CocoImage:
    """All of a record but the pixels."""

    name: str
    image_id: int
    width: int
    height: int
    objects: Sequence[CocoObject]
    captions: Sequence[str] = ()


def read_object(annotation: dict[str, Any], name: str, height: int, width: int, *, masks: bool) -> CocoObject:
    """From COCO's JSON. Raises DataError naming the annotation where its segmentation does not fit the image."""
    box, crowd, area = object_fields(annotation)
    mask = None
    if masks:
        try:
            mask = coco_mask.encode_png(coco_mask.rasterise(annotation["segmentation"], height, width))
        except DataError as error:
            raise DataError(f"annotation {annotation['id']}: {error.message}") from None
    return CocoObject(annotation["category_id"], name, box, crowd, area, mask)


def check_size(annotated_width: int, annotated_height: int, width: int, height: int) -> None:
    """Raises DataError where the file is absurdly large, or not of the size that the annotations were made on."""
    jpeg.check_size(width, height, jpeg.MAX_PIXELS)
    if (width, height) != (annotated_width, annotated_height):
        raise DataError(f"{width}x{height} pixels; the annotations say {annotated_width}x{annotated_height}")


def encode(record: CocoImage, image: CheckedImage) -> bytes:
    """The serialised Example. Raises DataError where image and annotations differ in size."""
    header = image.header
    check_size(record.width, record.height, header.width, header.height)
    objects = record.objects
    boxes = [item.box for item in objects]
    return encode_example(
        {
            "image/height": header.height,
            "image/width": header.width,
            "image/filename": record.name,
            "image/source_id": str(record.image_id),
            "image/key/sha256": hashlib.sha256(image.data).hexdigest(),
            "image/encoded": image.data,
            "image/format": b"jpeg",
            "image/caption": list(record.captions),
            "image/object/bbox/xmin": array("f", [x / header.width for x, _, _, _ in boxes]),
            "image/object/bbox/xmax": array("f", [(x + width) / header.width for x, _, width, _ in boxes]),
            "image/object/bbox/ymin": array("f", [y / header.height for _, y, _, _ in boxes]),
            "image/object/bbox/ymax": array("f", [(y + height) / header.height for _, y, _, height in boxes]),
            "image/object/class/text": [item.name for item in objects],
            "image/object/class/label": array("q", [item.category_id for item in objects]),
            "image/object/is_crowd": array("q", [item.crowd for item in objects]),
            "image/object/area": array("f", [item.area for item in objects]),
            "image/object/mask": [item.mask for item in objects if item.mask is not None],
        }
    )
