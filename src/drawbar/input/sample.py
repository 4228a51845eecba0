"""One encoded image to one training or evaluation sample, as the recipe says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from drawbar.config import Input
from drawbar.dataset.example import Box
from drawbar.input.augment import EvalRule, RecordRandom, eval_placement, train_placement
from drawbar.input.distort import distort_colours
from drawbar.input.image_decoder import Encoded, ImageDecoder, Placement
from drawbar.input.libjpeg import Pixels


class SampleMaker:
    """For all decode threads of a rank. Raises EnvironmentUnfit where the recipe's decoder is not to be had."""

    def __init__(self, input: Input) -> None:
        self._input = input
        # Beside a GPU: for what that does not decode.
        self._decoder = ImageDecoder("auto" if input.decoder == "gpu" else input.decoder, input.decode)
        self.decoding = self._decoder.decoding

    @property
    def wants_boxes(self) -> bool:
        return self._input.crop_boxes == "objects"

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
