"""What the loader's stages hand on: a record, and a batch whose pixels are being decoded."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from drawbar.dataset.tfrecord import FRAME_BYTES
from drawbar.input.libjpeg import Pixels

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

    @property
    def framed_bytes(self) -> int:
        return FRAME_BYTES + len(self.payload)


@dataclass(kw_only=True)
class Batch:
    """Decoded samples. Give it back with `Loader.recycle` once its pixels are copied."""

    images: Pixels
    """uint8, (batch, size, size, 3), RGB."""
    labels: npt.NDArray[np.int64]
    """(batch,), from 0."""
    records: list[Record]
    epoch: int
    """Epoch of its last record."""
    on_device: torch.Tensor | None = None
    """The same as `images`, which then holds none, where a GPU decodes; complete once the batch is `decoded`."""
    _tasks_left: int = 0
    _done: threading.Event = field(default_factory=threading.Event)
    _error: BaseException | None = None

    @property
    def framed_bytes(self) -> int:
        return sum(record.framed_bytes for record in self.records)

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

    def finish_task(self, error: BaseException | None) -> None:
        """A task of it has ended. One caller at a time."""
        self._error = self._error or error
        self._tasks_left -= 1
        if self._tasks_left == 0:
            self._done.set()
