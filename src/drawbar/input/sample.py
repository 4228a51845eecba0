"""One encoded image to one training or evaluation sample, as the recipe says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, Protocol

from drawbar.config import Input
from drawbar.dataset.example import Box, ImageExample, parse_image_example
from drawbar.errors import DataError
from drawbar.input.augment import EvalRule, RecordRandom, eval_placement, train_placement
from drawbar.input.batch import Batch, NoSample, Record
from drawbar.input.distort import distort_colours
from drawbar.input.image_decoder import BadImage, Decoding, Encoded, ImageDecoder, Placement
from drawbar.input.libjpeg import Pixels


def cpu_decoder(input: Input) -> Literal["auto", "region", "full"]:
    """Beside a GPU: for what that does not decode."""
    return "auto" if input.decoder == "gpu" else input.decoder


def cannot_decode(record: Record, error: BadImage) -> NoSample:
    return NoSample(record, f"cannot decode image: {error}")


class Samples(Protocol):
    """What a loader's records become, for all decode threads of a rank."""

    @property
    def decoding(self) -> Decoding: ...

    @property
    def window_batches(self) -> int:
        """So many batches' records are arranged together."""

    def arrange(self, records: list[Record], batch_size: int) -> list[list[Record]]:
        """The records of a window as batches, one of which is smaller where they do not divide."""

    def buffer_shape(self, batch_size: int) -> tuple[int, ...]:
        """Of a buffer of bytes that holds the pixels of any batch."""

    def pixels(self, buffer: Pixels, records: Sequence[Record]) -> Pixels:
        """The part of `buffer` that a batch of these records fills, (batch, height, width, 3)."""

    def fill(self, batch: Batch, number: int, record: Record, random: RecordRandom | None) -> None:
        """One sample of a batch and what belongs to it, from `record`: for training, or without `random` for
        evaluation. Raises NoSample, and DataError for a label that the set should not have."""


class SampleMaker:
    """Implements `Samples` for images with a label. Raises EnvironmentUnfit where the recipe's decoder is not to be
    had."""

    window_batches = 1

    def __init__(self, input: Input, num_classes: int = 1000) -> None:
        self._input, self._num_classes = input, num_classes
        self._decoder = ImageDecoder(cpu_decoder(input), input.decode)
        self.decoding = self._decoder.decoding

    @property
    def wants_boxes(self) -> bool:
        return self._input.crop_boxes == "objects"

    def arrange(self, records: list[Record], batch_size: int) -> list[list[Record]]:
        return [records]

    def buffer_shape(self, batch_size: int) -> tuple[int, ...]:
        return batch_size, self._input.image_size, self._input.image_size, 3

    def pixels(self, buffer: Pixels, records: Sequence[Record]) -> Pixels:
        return buffer[: len(records)]

    def parse(self, record: Record) -> tuple[ImageExample, Sequence[Box]]:
        """The record, and its boxes where samples want them. Raises NoSample; DataError for a label out of range."""
        try:
            example = parse_image_example(record.payload)
            boxes = example.boxes if self.wants_boxes else ()
        except DataError as error:
            raise NoSample(record, error.message) from None
        if not 1 <= example.label <= self._num_classes:
            raise DataError(
                f"{record.place}: label {example.label} is out of range 1..{self._num_classes}",
                hint="set data.num_classes to the number of classes of this set",
            )
        return example, boxes

    def fill(self, batch: Batch, number: int, record: Record, random: RecordRandom | None) -> None:
        example, boxes = self.parse(record)
        try:
            if random is None or self._input.augment == "none":
                self.evaluate(example.encoded, batch.images[number])
            else:
                self.train(example.encoded, random, batch.images[number], boxes)
        except BadImage as error:
            raise cannot_decode(record, error) from None
        batch.labels[number] = example.label - 1

    def train(self, encoded: Encoded, random: RecordRandom, out: Pixels, boxes: Sequence[Box] = ()) -> None:
        """Fills `out`, uint8 (height, width, 3) RGB: random crop, resize, flip, colours. Raises BadImage."""
        self._decoder.sample(encoded, partial(train_placement, random=random, boxes=boxes), out)
        if self._input.distortions:
            distort_colours(out, random)

    def place(self, encoded: Encoded, placement: Placement, out: Pixels) -> None:
        """Fills `out` with what was placed already, and as it is. Raises BadImage."""
        self._decoder.sample(encoded, lambda height, width: placement, out)

    def evaluate(self, encoded: Encoded, out: Pixels, rule: EvalRule = "mlperf") -> None:
        """Fills `out` with the central crop. Raises BadImage."""
        self._decoder.sample(encoded, partial(eval_placement, size=out.shape[0], rule=rule), out)
