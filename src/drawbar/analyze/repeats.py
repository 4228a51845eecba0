"""Several runs to one target with different seeds, as one result: MLPerf's olympic mean. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from drawbar.analyze.result import finite, write_whole
from drawbar.analyze.schema import Grade, Result

QUALITY_NAME = "quality.json"
QUALITY_SCHEMA = 1
MIN_DROPPED = 3
"""Fewer runs than this leave nothing to drop."""
RULES_RUNS = 5
"""Of MLPerf Training v0.6, for all three models."""


@dataclass(frozen=True, kw_only=True)
class Olympic:
    """Numbers of runs are places in what was given."""

    mean_s: float | None
    """Null where more than one run did not converge, or one that cannot be dropped."""
    fastest: int | None
    """Dropped."""
    slowest: int | None
    """Dropped; a run that did not converge counts as slowest."""
    kept: tuple[int, ...]
    failed: tuple[int, ...]
    """Did not converge."""


def olympic_mean(times_s: Sequence[float | None]) -> Olympic:
    """The fastest and the slowest of at least 3 dropped, the mean of the rest; None stands for a run that did not meet
    its target. Of equal times the first counts as faster."""
    failed = tuple(i for i, time_s in enumerate(times_s) if time_s is None)
    order = sorted(range(len(times_s)), key=lambda i: (_or_infinite(times_s[i]), i))
    fastest = slowest = None
    if len(order) >= MIN_DROPPED:
        fastest, *order, slowest = order
    kept = [time_s for i in order if (time_s := times_s[i]) is not None]
    # What is left of a run that did not converge, beside the one that is dropped as slowest, invalidates the whole.
    whole = bool(kept) and len(kept) == len(order)
    return Olympic(
        mean_s=sum(kept) / len(kept) if whole else None,
        fastest=fastest,
        slowest=slowest,
        kept=tuple(sorted(order)),
        failed=failed,
    )


def _or_infinite(time_s: float | None) -> float:
    return float("inf") if time_s is None else time_s


class RepeatResult(TypedDict):
    run: str
    """Name of its run directory."""
    seed: int
    reached: bool
    time_to_quality_s: float | None
    time_s: float
    epochs: float | None
    train_images_per_s: float | None
    evaluation_share: float
    grade: Grade
    counted: str
    """`kept`, `fastest` or `slowest`: the last two are dropped."""


class SeriesResult(TypedDict):
    """quality.json."""

    schema: int
    name: str
    target: dict[str, float]
    runs: list[RepeatResult]
    time_to_quality_s: float | None
    """Mean without the fastest and the slowest run."""
    epochs: float | None
    """Mean of the same runs."""
    valid: bool
    reasons: list[str]
    """Why it is not valid, or what must be said beside it."""


def summarize(name: str, runs: Sequence[tuple[str, Result]]) -> SeriesResult:
    """`runs`: name of the run directory and result of each, ended ok and with a target."""
    qualities = [result["quality"] for _, result in runs]
    known = [quality for quality in qualities if quality is not None]
    assert known, "runs to quality have a quality"  # noqa: S101
    olympic = olympic_mean([quality["time_to_quality_s"] if quality else None for quality in qualities])
    words = {olympic.fastest: "fastest", olympic.slowest: "slowest"}
    rows = [
        RepeatResult(
            run=run,
            seed=quality["seed"],
            reached=quality["reached"] is True,
            time_to_quality_s=quality["time_to_quality_s"],
            time_s=quality["time_s"],
            epochs=quality["epochs"],
            train_images_per_s=quality["train_images_per_s"],
            evaluation_share=quality["evaluation_share"],
            grade=result["validity"]["grade"],
            counted=words.get(i, "kept"),
        )
        for i, ((run, result), quality) in enumerate(zip(runs, known, strict=True))
    ]
    invalid = [row["run"] for row in rows if row["grade"] == "invalid"]
    epochs = [epochs for i in olympic.kept if (epochs := rows[i]["epochs"]) is not None]
    return SeriesResult(
        schema=QUALITY_SCHEMA,
        name=name,
        target=known[0]["target"],
        runs=rows,
        time_to_quality_s=olympic.mean_s,
        epochs=sum(epochs) / len(epochs) if epochs and len(epochs) == len(olympic.kept) else None,
        valid=olympic.mean_s is not None and not invalid,
        reasons=[
            *_reasons(olympic, rows),
            *([f"invalid by their own checks: {', '.join(invalid)}"] if invalid else []),
        ],
    )


def _reasons(olympic: Olympic, rows: Sequence[RepeatResult]) -> list[str]:
    reasons = []
    failed = ", ".join(rows[i]["run"] for i in olympic.failed)
    if failed and olympic.mean_s is None:
        reasons.append(f"the target was not met by {failed}; at most one of 3 or more runs may miss it")
    elif failed:
        reasons.append(f"the target was not met by {failed}, which counts as slowest")
    if len(rows) != RULES_RUNS:
        dropped = "; none is dropped" if len(rows) < MIN_DROPPED else ""
        reasons.append(f"{len(rows)} runs{dropped}; MLPerf's rules want {RULES_RUNS}")
    return reasons


def write_series(folder: Path, series: SeriesResult) -> None:
    write_whole(folder / QUALITY_NAME, json.dumps(finite(series), indent=2, allow_nan=False) + "\n")
