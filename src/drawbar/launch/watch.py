"""Watches the ranks while they run: progress for the person, and an end for what would hang for ever."""

from __future__ import annotations

import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Protocol

import psutil

from drawbar.config import Recipe
from drawbar.errors import EnvironmentUnfit, RunFailed
from drawbar.journal import Clock, Error, Evaluation, Host, RunEnd, RunStart, Step
from drawbar.launch.process import LauncherProcess
from drawbar.launch.tail import JournalTail
from drawbar.report.terminal import StepPrinter

_POLL_S = 0.5
_FULL_DISK_BYTES = 64 * 1024
_SILENT_HOST_S = 20.0
"""Each host says something every second."""


class Console(Protocol):
    """Where a run shows what it does."""

    def line(self, text: str) -> None:
        """A finished line of output (stdout)."""

    def status(self, text: str) -> None:
        """What is going on now; replaces the last one where it can (stderr)."""


def watch(
    process: LauncherProcess,
    recipe: Recipe,
    run_dir: Path,
    console: Console,
    nodes: set[str],
    *,
    warmup_steps: int,
    steps: int,
) -> None:
    """Shows progress until the ranks are done; `nodes` gets the names of the hosts that were heard of.

    Raises RunFailed or Interrupted once all ranks on this host are gone.
    """
    printer = StepPrinter(
        world_size=recipe.launch.ranks,
        warmup_steps=warmup_steps,
        steps=steps,
        display_every=recipe.train.display_every,
    )
    tail = JournalTail(run_dir)
    stall = StallWatch(recipe.launch.ranks, recipe.launch.stall_timeout_s)
    console.status(f"starting {recipe.launch.ranks} ranks")
    try:
        running = True
        while running:
            time.sleep(_POLL_S)
            running = process.running()
            if stall.waiting_for_ranks():
                # Reads all of /proc: not while ranks are measuring.
                process.remember_children()
            events = tail.new_events()
            for rank, event in process.echoes():
                if isinstance(event, Host):
                    stall.heard_of(event.node)
                    nodes.add(event.node)
                elif not tail.sees(rank):
                    events.append((rank, event))
            for rank, event in events:
                stall.note(rank, event)
                for line in printer.feed(rank, event):
                    console.line(line)
                if isinstance(event, Clock | Step | Evaluation):
                    console.status(printer.progress())
            stall.check()
    except BaseException:
        # Ctrl-C and our own verdicts alike: the ranks write that they were stopped, then everything is gone.
        process.stop(signal.SIGINT)
        raise
    process.reap(grace_s=5.0)
    if process.returncode != 0:
        if shutil.disk_usage(run_dir).free < _FULL_DISK_BYTES:
            # Ranks that could not write their last word look killed.
            raise EnvironmentUnfit(f"the disk of the run directory is full: {run_dir}")
        if process.returncode is not None and process.returncode < 0:
            name = signal.Signals(-process.returncode).name
            raise RunFailed(f"{process.name} (pid {process.pid}) was killed by {name}; no rank had failed")
        raise RanksFailed(f"a rank failed; {process.name} ended with {process.returncode}: {process.last_words()}")


class RanksFailed(RunFailed):
    """Only says that the ranks' journals hold the cause."""


class StallWatch:
    """Ends a run in which no rank finishes a step for too long: a hang must not last for ever."""

    def __init__(self, ranks: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last_t = time.monotonic()
        self._steps_done = dict.fromkeys(range(ranks), 0)
        self._pids: dict[int, int] = {}
        self._some_rank_failed = False
        self._heard_t: dict[str, float] = {}

    def waiting_for_ranks(self) -> bool:
        """Whether some rank has yet to finish its first step."""
        return min(self._steps_done.values()) == 0

    def heard_of(self, node: str) -> None:
        self._heard_t[node] = time.monotonic()

    def note(self, rank: int, event: object) -> None:
        self._last_t = time.monotonic()
        if isinstance(event, RunStart) and event.node == socket.gethostname():
            self._pids[rank] = event.pid
        if isinstance(event, RunEnd):
            # Its host goes silent now, and rightly.
            self._heard_t.clear()
        if isinstance(event, Step):
            self._steps_done[rank] = event.step + 1
        if isinstance(event, Error):
            self._some_rank_failed = True

    def check(self) -> None:
        """Raises RunFailed naming who is stopped, silent or behind."""
        self._check_ranks()
        # After the ranks here, of which more can be said.
        for node, heard_t in self._heard_t.items():
            silent_s = time.monotonic() - heard_t
            if silent_s > _SILENT_HOST_S:
                raise RunFailed(
                    f"host {node} has not been heard of for {silent_s:.0f} s",
                    hint="is it up, and its link? Or is its first rank stopped?",
                )

    def _check_ranks(self) -> None:
        # Ranks end themselves after the time-out, with a better reason; this is for those that cannot.
        silent_s = time.monotonic() - self._last_t
        overdue = silent_s > self._timeout_s + 10
        if not overdue and not self._some_rank_failed:
            return
        # A stopped rank makes the others fail first. It must be seen before torchrun kills it, 30 s after that.
        stopped = [f"rank {rank} (pid {pid})" for rank, pid in self._pids.items() if _is_stopped(pid)]
        if stopped:
            raise RunFailed(
                f"the ranks wait in vain: {', '.join(stopped)} is stopped",
                hint="somebody sent it SIGSTOP, or a debugger holds it",
            )
        if not overdue:
            return
        fewest = min(self._steps_done.values())
        behind = [str(rank) for rank, done in self._steps_done.items() if done == fewest]
        raise RunFailed(
            f"no rank has written anything for {silent_s:.0f} s; furthest behind, with {fewest} steps done: rank "
            + ", ".join(behind),
            hint="launch.stall_timeout_s is how long that may take",
        )


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
