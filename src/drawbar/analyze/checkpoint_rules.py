"""Rules on resumed runs; the table is in `validity.py`."""

from __future__ import annotations

from drawbar.analyze.checkpoints import resumed_result
from drawbar.analyze.facts import Facts
from drawbar.analyze.schema import Reason
from drawbar.journal import CheckpointRead


def resumed_alike(facts: Facts) -> Reason | None:
    """A resumed training that goes another way says nothing about the one that was interrupted."""
    found = resumed_result(facts.run)
    if found is None or not found["differences"]:
        return None
    return Reason(
        rule="resumed training",
        expected="as without an interruption",
        actual="; ".join(found["differences"]),
        severity="qualified",
    )


def resumed_together(facts: Facts) -> Reason | None:
    steps = {rank.rank: {read.step for read in rank.journal.of(CheckpointRead)} for rank in facts.run.ranks}
    if len(set(map(frozenset, steps.values()))) <= 1:
        return None
    seen = ", ".join(f"rank {rank}: {sorted(found) or 'none'}" for rank, found in list(steps.items())[:4])
    return Reason(rule="resumed together", expected="the same checkpoint on all ranks", actual=seen, severity="invalid")
