"""Records of a detection set to samples and their targets: SSD's crop at one size, Mask R-CNN's whole images at many.

Everything random follows from the record alone (`augment.RecordRandom`): the same pixels and boxes whatever the
number of threads or ranks.

Mask R-CNN's batches differ in height and width: each is the largest of its images, both sides rounded up to a
multiple of 32. Buffers are made once, for the largest batch that can be, and each batch takes the first bytes of
one; so memory is bounded and, on a GPU host, pinned once. To pad little, the records of some batches (a window) are
sorted by aspect ratio and cut into batches anew, whose order is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drawbar.dataset.coco_record import CocoRecord, image_size, parse_coco_record
from drawbar.errors import DataError
from drawbar.input import detection
from drawbar.input.augment import RecordRandom
from drawbar.input.batch import Batch, NoSample, Record
from drawbar.input.distort import jitter_colours
from drawbar.input.image_decoder import BadImage, Decoding, ImageDecoder, Placement
from drawbar.input.libjpeg import Pixels, Window
from drawbar.input.target import GroundTruth, Mask, Target

Labels = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]


def label_categories(category_map: Mapping[str, int], num_classes: int) -> Labels:
    """From COCO's category ids to labels 1 to `num_classes`, by the set's map; without one ids are labels.

    The function raises DataError for a category that has none.
    """
    known = {int(category): label for category, label in category_map.items()} or {
        label: label for label in range(1, num_classes + 1)
    }

    def labels(categories: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        found = [known.get(int(category), 0) for category in categories]
        for category, label in zip(categories, found, strict=True):
            if not 1 <= label <= num_classes:
                raise DataError(
                    f"category {category} has no label in 1..{num_classes}",
                    hint="set data.num_classes to the number of categories of this set",
                )
        return np.array(found, np.int64)

    return labels


@dataclass(frozen=True, kw_only=True)
class DetectionSamples:
    """Makes samples of one kind in any number of threads. `fixed_size`: SSD's square; 0: Mask R-CNN's sides."""

    decoder: ImageDecoder
    labels: Labels
    fixed_size: int = 0
    short_side: int = detection.SHORT_SIDE
    long_side: int = detection.LONG_SIDE
    crop: bool = True
    """SSD's random crop and colour jitter, or the whole image."""
    with_masks: bool = False
    window_batches: int = 1
    seed: int = 0

    @property
    def decoding(self) -> Decoding:
        return self.decoder.decoding

    # --- as `sample.Samples`

    def arrange(self, records: list[Record], batch_size: int) -> list[list[Record]]:
        """By aspect ratio where there is a window: upright images first, then cut, then in an order that is drawn."""
        if self.window_batches == 1 or not records:
            return [records]
        first = records[0]
        ordered = sorted(records, key=_aspect)
        batches = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
        random = RecordRandom(self.seed, first.epoch, first.shard, first.offset)
        return [batches.pop(random.integer(0, len(batches) - 1)) for _ in range(len(batches))]

    def buffer_shape(self, batch_size: int) -> tuple[int, ...]:
        if self.fixed_size:
            return batch_size, self.fixed_size, self.fixed_size, 3
        height, width = detection.padded_size([(self.long_side, self.long_side)])
        return (batch_size * height * width * 3,)

    def pixels(self, buffer: Pixels, records: Sequence[Record]) -> Pixels:
        if self.fixed_size:
            return buffer[: len(records)]
        height, width = detection.padded_size([self.size_of(*_image_size(record)) for record in records])
        return buffer[: len(records) * height * width * 3].reshape(len(records), height, width, 3)

    def fill(self, batch: Batch, number: int, record: Record, random: RecordRandom | None) -> None:
        try:
            coco = parse_coco_record(record.payload)
        except DataError as error:
            raise NoSample(record, error.message) from None
        labels = self._labels_of(coco, record)
        height, width = self.size_of(coco.height, coco.width)
        room = batch.images[number]
        out = room if room.shape[:2] == (height, width) else np.empty((height, width, 3), np.uint8)
        try:
            if random is None:
                batch.truths[number] = self.evaluate(coco, labels, out)
            else:
                batch.targets[number] = self.train(coco, labels, random, out)
        except BadImage as error:
            raise NoSample(record, f"cannot decode image: {error.message}") from None
        except DataError as error:
            raise NoSample(record, error.message) from None
        if out is not room:
            room[:height, :width] = out
            room[height:] = 0
            room[:height, width:] = 0

    def _labels_of(self, coco: CocoRecord, record: Record) -> npt.NDArray[np.int64]:
        """Raises DataError for what is wrong with the set rather than with the record."""
        if self.with_masks and len(coco.boxes) and not coco.masks:
            raise DataError(f"{record.place}: the record has no masks", hint="pack the set without --no-masks")
        try:
            return self.labels(coco.categories)
        except DataError as error:
            raise DataError(f"{record.place}: {error.message}", hint=error.hint) from None

    # --- one sample

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the sample of an image."""
        if self.fixed_size:
            return self.fixed_size, self.fixed_size
        return detection.mask_rcnn_size(height, width, self.short_side, self.long_side)

    def train(self, record: CocoRecord, labels: npt.NDArray[np.int64], random: RecordRandom, out: Pixels) -> Target:
        """Fills `out`, which is of `size_of`'s size with tight rows. `labels` of all objects. Raises BadImage, and
        DataError for a damaged mask."""
        whole = Window(0, 0, record.height, record.width)
        of_interest = ~record.crowd
        boxes, window = record.boxes[of_interest], whole
        kept = np.ones(len(boxes), np.bool_)
        if self.fixed_size and self.crop:
            crop = detection.ssd_crop(record.height, record.width, boxes, random)
            window, kept = crop.window, crop.kept
        flip = random.random() < 0.5
        self._decode(record, Placement(window, window, flip), out)
        if self.fixed_size and self.crop:
            jitter_colours(out, random)
        numbers = np.flatnonzero(of_interest)[kept]
        moved = self._moved(boxes[kept], window, flip, out)
        # What is thinner than a hundredth of a pixel is no box that a model could be asked for.
        seen = ((moved[:, 2:] - moved[:, :2]) > 0.01).all(1)
        masks = []
        if self.with_masks:
            masks = [self._mask(record, int(number), flip, out) for number in numbers[seen]]
        return Target(
            size=out.shape[:2], boxes=moved[seen].astype(np.float32), labels=labels[numbers[seen]], masks=masks
        )

    def evaluate(self, record: CocoRecord, labels: npt.NDArray[np.int64], out: Pixels) -> GroundTruth:
        """Fills `out` with the whole image, as it is. Raises BadImage and DataError."""
        whole = Window(0, 0, record.height, record.width)
        self._decode(record, Placement(whole, whole), out)
        return GroundTruth(
            image_id=record.image_id,
            size=out.shape[:2],
            height=record.height,
            width=record.width,
            boxes=record.boxes,
            labels=labels,
            crowd=record.crowd,
            areas=record.areas,
            masks=[Mask.of(record.mask(number)) for number in range(len(record.boxes))] if self.with_masks else [],
        )

    def _moved(self, boxes: npt.NDArray[np.float64], window: Window, flip: bool, out: Pixels) -> detection.Boxes:
        moved = detection.crop_boxes(boxes, window)
        if flip:
            moved = detection.flip_boxes(moved, window.width)
        return detection.resize_boxes(moved, (window.height, window.width), out.shape[:2])

    def _mask(self, record: CocoRecord, number: int, flip: bool, out: Pixels) -> Mask:
        masks = record.mask(number)[None]
        if flip:
            masks = detection.flip_masks(masks)
        return Mask.of(detection.resize_masks(masks, out.shape[:2])[0])

    def _decode(self, record: CocoRecord, placement: Placement, out: Pixels) -> None:
        def place(height: int, width: int) -> Placement:
            if (height, width) != (record.height, record.width):
                raise BadImage(f"{width}x{height} pixels; the record says {record.width}x{record.height}")
            return placement

        self.decoder.sample(record.encoded, place, out)


def _image_size(record: Record) -> tuple[int, int]:
    """As the record says; where it does not, `fill` will tell."""
    try:
        return image_size(record.payload)
    except DataError:
        return 1, 1


def _aspect(record: Record) -> float:
    height, width = _image_size(record)
    return width / height
