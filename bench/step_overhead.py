"""What measuring and journalling cost of a step: the loop with a step that does nothing, against the step's bare call.

    python bench/step_overhead.py [--steps 20000]

Both are the same process and the same batches; the difference is marks, spans, tags and one journal line a step. The
last line is one JSON object; `share_of_100_ms` must stay below 0.005.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from drawbar.config import Recipe
from drawbar.journal import JournalWriter
from drawbar.launch.feed import ConstantFeed
from drawbar.train.batch import HostBatch
from drawbar.train.clock import HostClock
from drawbar.train.loop import LoopSettings, train
from drawbar.train.step import Marks, Trained


class NoStep:
    """Takes the marks that a step takes, and does nothing between them."""

    def __init__(self, clock: HostClock) -> None:
        self._clock, self._loss, self.number = clock, torch.zeros(()), 0

    def run(self, batch: HostBatch) -> Trained:
        marks = [self._clock.mark() for _ in range(5)]
        start, copied, computed, exchanged, updated = marks
        return Trained(
            loss=self._loss,
            learning_rate=0.1,
            marks=Marks(start=start, copied=copied, computed=computed, exchanged=exchanged, updated=updated),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20000)
    steps: int = parser.parse_args().steps
    feed, clock = ConstantFeed(Recipe(), torch.device("cpu")), HostClock()
    with tempfile.TemporaryDirectory(prefix="drawbar-bench-") as folder:
        journal = JournalWriter(Path(folder) / "rank-00000.jsonl")
        settings = LoopSettings(warmup_steps=0, steps=steps, rank=0)
        begin_t = time.perf_counter()
        train(feed.next_batch, NoStep(clock), clock, journal, settings, lambda number: None)
        overhead_s = (time.perf_counter() - begin_t) / steps
    print(f"{overhead_s * 1e6:.1f} us a step, {overhead_s / 0.1:.2%} of one of 100 ms")
    print(json.dumps({"overhead_us": round(overhead_s * 1e6, 1), "share_of_100_ms": round(overhead_s / 0.1, 5)}))


if __name__ == "__main__":
    main()
