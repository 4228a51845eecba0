"""Clock offsets between ranks, measured over the process group itself."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

_ROUNDS = 20


def offset_to_rank_0(group: dist.ProcessGroup, rank: int, world_size: int) -> tuple[float, float]:
    """(offset_s, uncertainty_s): rank-0 time = this rank's `perf_counter` + offset_s.

    Cristian's algorithm: rank 0 answers each rank in turn with its time; of 20 round trips the shortest counts, and
    half of it bounds the error. Collective: every rank must call it.
    """
    box = torch.zeros(1, dtype=torch.float64)
    best_s, offset_s = float("inf"), 0.0
    for other in range(1, world_size):
        for _ in range(_ROUNDS):
            if rank == 0:
                dist.recv(box, other, group)
                box[0] = time.perf_counter()
                dist.send(box, other, group)
            elif rank == other:
                sent_t = time.perf_counter()
                dist.send(box, 0, group)
                dist.recv(box, 0, group)
                back_t = time.perf_counter()
                if back_t - sent_t < best_s:
                    best_s = back_t - sent_t
                    offset_s = float(box[0]) - (sent_t + back_t) / 2
    return (0.0, 0.0) if rank == 0 else (offset_s, best_s / 2)
