"""What the loader's stages hand on: a record, and a batch whose pixels are being decoded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from drawbar.dataset.tfrecord import FRAME_BYTES
from drawbar.errors import DataError
from drawbar.input.libjpeg import Pixels
from drawbar.input.target import GroundTruth, Target

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True, slots=True)
class Record:
    """One framed entry, CRC-checked, not yet decoded."""

    shard: int
    key: str
    offset: int
    epoch: int
    payload: bytes
    padding: bool = False
    """Trained a second time in its epoch, to fill the last batch."""
    stands_in: bool = False
    """Trained a second time in its batch, in the place of a record that gave no sample."""

    @property
    def framed_bytes(self) -> int:
        return FRAME_BYTES + len(self.payload)

    @property
    def place(self) -> str:
        """Where it lies, for messages."""
        return f"{self.key} at byte {self.offset}"


class NoSample(DataError):
    """A record that makes no sample: its image cannot be decoded, or it lacks what is needed."""

    def __init__(self, record: Record, reason: str, hint: str | None = None) -> None:
        skip = 'input.on_bad = "skip" trains another record of the batch in its place, and counts it'
        super().__init__(f"{record.place}: {reason}", hint=hint or skip)
        self.record, self.reason = record, reason


@dataclass(kw_only=True)
class Batch:
    """Decoded samples. Give it back with `Loader.recycle` once its pixels are copied."""

    images: Pixels
    """uint8, (batch, height, width, 3), RGB."""
    labels: npt.NDArray[np.int64]
    """(batch,), from 0; of a detection set they are not filled."""
    records: list[Record]
    """What is trained; where one gave no sample, the one that stands in for it."""
    buffer: Pixels | None = None
    """Of which `images` are a part, where batches differ in size."""
    targets: dict[int, Target] = field(default_factory=dict)
    """Of a detection set in training, by the sample's number."""
    truths: dict[int, GroundTruth] = field(default_factory=dict)
    """Of a detection set in evaluation, by the sample's number."""
    epoch: int
    """Epoch of its last record."""
    gaps: list[int] = field(default_factory=list)
    """Places of `records` that gave no sample."""
    on_device: torch.Tensor | None = None
    """The same as `images`, which then holds none, where a GPU decodes; complete once the batch is `decoded`."""
    _tasks_left: int = 0
    _done: threading.Event = field(default_factory=threading.Event)
    _error: BaseException | None = None

    @property
    def framed_bytes(self) -> int:
        """Of its own records; of those that gave no sample only until others stand in for them."""
        return sum(record.framed_bytes for record in self.records if not record.stands_in)

    @property
    def decoded(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> None:
        """Until all its samples are there. Raises the first error of decoding, and TimeoutError."""
        if not self._done.wait(timeout_s):
            raise TimeoutError
        if self._error is not None:
            raise self._error

    def expect(self, num_tasks: int) -> None:
        self._tasks_left = num_tasks

    def finish_task(self, error: BaseException | None, gaps: Sequence[int]) -> bool:
        """A task of it has ended, leaving `gaps` without a sample; True: it was the last, and `finish` is to be called.
        One caller at a time."""
        self._error = self._error or error
        self.gaps += gaps
        self._tasks_left -= 1
        return self._tasks_left == 0

    def finish(self, error: BaseException | None = None) -> None:
        """It is as it will be."""
        self._error = self._error or error
        self._done.set()
