"""One rank of an evaluation: `python -m tests.detection_ranks RANK RANKS STORE_FILE` prints its metrics as JSON.

The model needs no training: it takes what is bright for one class and what is dark for the other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drawbar.models.detector import Found, Size
from drawbar.train.batch import HostBatch
from drawbar.train.detection_evaluation import DetectionEvaluation
from tests.test_detection_training import host_batch, objective, spots

IMAGES = 13


class Threshold(nn.Module):
    """Ranks have buffers of their own, as batch norm's statistics are: rank 0's are to be used."""

    right: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("right", torch.tensor(2 + 5 * rank))

    def forward(self, images: Tensor, sizes: Sequence[Size]) -> list[Found]:
        return [self._look(image.mean(0)) for image in images]

    def _look(self, image: Tensor) -> Found:
        boxes, masks = [], []
        for inside in (image > 1, image < -1):
            rows, columns = inside.nonzero(as_tuple=True)
            # A pixel too wide, so that not every threshold of overlap is met.
            boxes.append([columns.min() - 1, rows.min(), columns.max() + self.right, rows.max() + 1])
            masks.append(torch.ones(1, 28, 28))
        return Found(
            boxes=torch.tensor(boxes, dtype=torch.float32),
            scores=torch.tensor([0.9, 0.8]),
            labels=torch.tensor([1, 2]),
            masks=torch.stack(masks),
        )


def evaluate(rank: int, ranks: int, control: dist.ProcessGroup | None) -> dict[str, float]:
    pixels, _, truths = spots(IMAGES)

    def batches() -> Iterator[HostBatch]:
        for number in range(rank, IMAGES, ranks):
            yield host_batch([], pixels[number : number + 1], truths[number : number + 1])

    evaluation = DetectionEvaluation(
        Threshold(rank), objective(), batches, num_classes=2, with_masks=True, control=control
    )
    return evaluation.run(1)


def main(rank: int, ranks: int, store: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    print(json.dumps(evaluate(rank, ranks, group)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
