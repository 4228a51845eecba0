"""How a run ended and, when not well, its first cause: one event, or the rank that fell silent."""

from __future__ import annotations

from typing import cast

from drawbar.analyze.schema import Failure, Status
from drawbar.analyze.timeline import RankTimeline, Run
from drawbar.errors import EnvironmentUnfit, Interrupted, RunFailed
from drawbar.journal import Error, RankJournal, Request, RunEnd, RunStart, Step


def status_of(run: Run) -> Status:
    """ok: all ranks of the world ended ok and the launcher, if it wrote an end, saw that too."""
    launcher_end = run.launcher.first(RunEnd) if run.launcher else None
    statuses = [rank.status for rank in run.ranks] + ([launcher_end.status] if launcher_end else [])
    if launcher_end is not None and launcher_end.status == "interrupted":
        return "interrupted"
    if run.ranks and all(status == "ok" for status in statuses):
        return "ok"
    # Without the launcher's word, ranks that were all told to stop by the user say so themselves.
    if launcher_end is None and "interrupted" in statuses and not ({"failed", "killed"} & set(statuses)):
        return "interrupted"
    return "failed"


def first_cause(run: Run) -> Failure | None:
    """None for a run that ended ok.

    In this order: for an interrupted run, the interruption; the earliest error of a rank that did not merely notice
    another's end; an error of the launcher's own (a stall it ended, so that ranks it had to kill are no cause); a rank
    without a run_end (it was killed, so it could say nothing); what the launcher noticed; an error that is only a
    consequence.
    """
    status = status_of(run)
    if status == "ok":
        return None
    launcher, is_own = _launcher_failure(run)
    if status == "interrupted":
        return launcher or _interruption(run)
    own = launcher if is_own else None
    return _earliest_error(run, secondary=False) or own or _killed(run, launcher) or launcher or _fallback(run)


def _earliest_error(run: Run, *, secondary: bool) -> Failure | None:
    errors = [
        (rank.clock.at(error.t), rank.rank, error, rank)
        for rank in run.ranks
        for error in cast(list[Error], rank.journal.of(Error))
        if error.secondary == secondary
    ]
    if not errors:
        return None
    _, _, error, rank = min(errors, key=lambda item: item[:2])
    return _failure(error, rank.rank, rank.node)


def _failure(error: Error, rank: int | None, node: str) -> Failure:
    return Failure(
        type=error.type,
        message=error.message,
        hint=error.hint,
        rank=rank,
        node=node,
        phase=error.phase,
        exit_code=error.exit_code,
    )


def _killed(run: Run, launcher: Failure | None) -> Failure | None:
    """The rank without a run_end that fell silent first."""
    silent = [rank for rank in run.ranks if rank.end is None]
    if not silent:
        return None
    rank = min(silent, key=lambda rank: (_last_t(rank), rank.rank))
    pid = f" (pid {rank.start.pid})" if rank.start else ""
    others = sorted(other.rank for other in silent if other is not rank)
    message = f"rank {rank.rank} on {rank.node or 'an unknown node'}{pid} was killed; {_last_deed(rank)}"
    if others:
        message += f"; later also silent: rank {', '.join(map(str, others))}"
    if launcher is not None:
        message += f". The launcher saw: {launcher['message']}"
    return Failure(
        type="RankKilled",
        message=message,
        hint="no error was written: look for the out-of-memory killer in the kernel log, or a kill by hand",
        rank=rank.rank,
        node=rank.node,
        phase=_last_phase(rank),
        exit_code=RunFailed.exit_code,
    )


def _last_t(rank: RankTimeline) -> float:
    return rank.clock.at(rank.journal.events[-1].t) if rank.journal.events else float("-inf")


def _last_step(rank: RankTimeline) -> Step | None:
    steps: list[Step] = rank.journal.of(Step)
    return steps[-1] if steps else None


def _last_deed(rank: RankTimeline) -> str:
    step = _last_step(rank)
    if step is not None:
        return f"last finished step {step.step}"
    if not rank.journal.events:
        return "it wrote nothing"
    if any(isinstance(event, Request) for event in rank.journal.events):
        return "it had read from the store and finished no step"
    return "it had started and finished no step"


def _last_phase(rank: RankTimeline) -> str:
    step = _last_step(rank)
    return "start" if step is None else f"step {step.step + 1}"


def _launcher_failure(run: Run) -> tuple[Failure | None, bool]:
    """(its first error, whether that is more than having noticed a rank's end)."""
    if run.launcher is None:
        return None, False
    errors = sorted(cast(list[Error], run.launcher.of(Error)), key=lambda error: (error.secondary, error.t))
    if not errors:
        return None, False
    return _failure(errors[0], None, _node_of(run.launcher)), not errors[0].secondary


def _node_of(launcher: RankJournal) -> str:
    start: RunStart | None = launcher.first(RunStart)
    return start.node if start else ""


def _interruption(run: Run) -> Failure:
    node = _node_of(run.launcher) if run.launcher else ""
    return Failure(
        type=Interrupted.__name__,
        message="the run was interrupted",
        hint="",
        rank=None,
        node=node,
        phase="",
        exit_code=Interrupted.exit_code,
    )


def _fallback(run: Run) -> Failure:
    """Consequences only, or ranks that never came to write a journal."""
    consequence = _earliest_error(run, secondary=True)
    if consequence is not None:
        return consequence
    message = "no rank wrote a journal" if not run.ranks else "the run did not end ok and nobody wrote down why"
    unfit = not run.ranks
    return Failure(
        type=EnvironmentUnfit.__name__ if unfit else RunFailed.__name__,
        message=message,
        hint="the launcher's output says more",
        rank=None,
        node="",
        phase="start",
        exit_code=EnvironmentUnfit.exit_code if unfit else RunFailed.exit_code,
    )
