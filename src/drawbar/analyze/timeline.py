"""A run directory as arrays on one clock: every time in here is rank 0's, in seconds. Judges nothing.

Rank r's clock is moved by the offset its `clock` events give: linear between the one at the start and the one at the
end, the nearer one outside them, 0 where there is none. A host's counters are on the clock its ranks use
(`time.perf_counter` is one clock per kernel), so they move with the lowest rank of that node.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drawbar.config import Recipe, load_recipe
from drawbar.errors import InputError
from drawbar.journal import Clock, Event, Host, RankJournal, Request, RunEnd, RunStart, Step, read_run

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_RANK_FILE = re.compile(r"rank-(\d{5})\.jsonl")


@dataclass(frozen=True, kw_only=True)
class ClockMap:
    """From one writer's clock to rank 0's."""

    at_t: tuple[float, ...]
    offset_s: tuple[float, ...]
    uncertainty_s: float | None
    """The larger of those recorded; None: no clock event."""

    def __call__(self, times: Floats) -> Floats:
        if not self.at_t:
            return times
        return times + np.interp(times, self.at_t, self.offset_s)

    def at(self, time_t: float) -> float:
        return float(self(np.array([time_t]))[0])


def clock_map(clocks: Sequence[Clock]) -> ClockMap:
    ordered = sorted(clocks, key=lambda clock: clock.t)
    return ClockMap(
        at_t=tuple(clock.t for clock in ordered),
        offset_s=tuple(clock.offset_s for clock in ordered),
        uncertainty_s=max((clock.uncertainty_s for clock in ordered), default=None),
    )


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Step events of one rank as columns, in step order. Row i of each is one step."""

    step: Ints
    start_t: Floats
    end_t: Floats
    data_wait_s: Floats
    copy_s: Floats
    compute_s: Floats
    exchange_s: Floats
    optimizer_s: Floats
    samples: Ints
    loss: Floats
    """NaN where the loss was not a number or not fetched; `fetched` tells the two apart."""
    fetched: Bools
    learning_rate: Floats
    """NaN where there is none."""
    after_pause: Bools
    """Something else was done before the step, such as an evaluation."""

    def __len__(self) -> int:
        return len(self.step)

    @property
    def step_s(self) -> Floats:
        return self.end_t - self.start_t

    @property
    def spans_s(self) -> dict[str, Floats]:
        """The parts of each step in their order, by their names in `StepShares`."""
        return {
            "data_wait": self.data_wait_s,
            "copy": self.copy_s,
            "compute": self.compute_s,
            "exchange": self.exchange_s,
            "optimizer": self.optimizer_s,
        }


def steps_of(events: Sequence[Step], clock: ClockMap) -> Steps:
    ordered = sorted(events, key=lambda event: event.step)

    def column(name: str) -> Floats:
        return np.array([getattr(event, name) for event in ordered], dtype=np.float64)

    return Steps(
        step=np.array([event.step for event in ordered], dtype=np.int64),
        start_t=clock(column("start_t")),
        end_t=clock(column("end_t")),
        data_wait_s=column("data_wait_s"),
        copy_s=column("copy_s"),
        compute_s=column("compute_s"),
        exchange_s=column("exchange_s"),
        optimizer_s=column("optimizer_s"),
        samples=np.array([event.samples for event in ordered], dtype=np.int64),
        loss=np.array([math.nan if event.loss is None else event.loss for event in ordered], dtype=np.float64),
        fetched=np.array([event.loss is not None for event in ordered], dtype=np.bool_),
        learning_rate=np.array([event.learning_rate for event in ordered], dtype=np.float64),
        after_pause=np.array([event.after_pause for event in ordered], dtype=np.bool_),
    )


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    rank: int
    journal: RankJournal
    start: RunStart | None
    end: RunEnd | None
    clock: ClockMap
    warmup: Steps
    measured: Steps
    all_steps: Steps
    """Both."""
    requests: list[Request]

    @property
    def node(self) -> str:
        return self.start.node if self.start else ""

    @property
    def status(self) -> str:
        return self.end.status if self.end else "killed"


def foreign_reason(journal: RankJournal, world_size: int) -> str:
    """Why a file is no journal of a rank of this run; empty where it is one. Its name and its run_start must agree."""
    named = _RANK_FILE.fullmatch(journal.path.name)
    start: RunStart | None = journal.first(RunStart)
    if named is None or int(named.group(1)) >= world_size:
        return f"{journal.path.name} belongs to no rank of this run"
    if start is not None and start.rank != int(named.group(1)):
        return f"{journal.path.name} was written by rank {start.rank}"
    return ""


def rank_timeline(journal: RankJournal, rank: int) -> RankTimeline:
    start = journal.first(RunStart)
    clock = clock_map(journal.of(Clock))
    steps: list[Step] = journal.of(Step)
    return RankTimeline(
        rank=rank,
        journal=journal,
        start=start,
        end=journal.first(RunEnd),
        clock=clock,
        warmup=steps_of([step for step in steps if step.warmup], clock),
        measured=steps_of([step for step in steps if not step.warmup], clock),
        all_steps=steps_of(steps, clock),
        requests=journal.of(Request),
    )


@dataclass(frozen=True, kw_only=True)
class HostTimeline:
    node: str
    times: Floats
    """Of `samples`, on rank 0's clock."""
    samples: list[Host]


def host_timelines(journals: Sequence[RankJournal], ranks: Sequence[RankTimeline]) -> list[HostTimeline]:
    timelines = []
    for journal in journals:
        samples = sorted(journal.of(Host), key=lambda sample: sample.t)
        if not samples:
            continue
        clocks = journal.of(Clock)
        clock = clock_map(clocks) if clocks else clock_of_node(samples[0].node, ranks)
        times = clock(np.array([sample.t for sample in samples], dtype=np.float64))
        timelines.append(HostTimeline(node=samples[0].node, times=times, samples=samples))
    return sorted(timelines, key=lambda timeline: timeline.node)


def clock_of_node(node: str, ranks: Sequence[RankTimeline]) -> ClockMap:
    """That of the node's lowest rank that has one; the identity where none has."""
    return next((rank.clock for rank in ranks if rank.node == node and rank.clock.at_t), clock_map([]))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything a run directory holds, ready for figures."""

    path: Path
    recipe: Recipe
    ranks: list[RankTimeline]
    """By number, each once; of this run alone."""
    foreign: list[str]
    """Rank journals that are not of this run and are part of no figure, each with the reason."""
    launcher: RankJournal | None
    hosts: list[HostTimeline]
    problems: list[str]

    def events(self, kind: type[Event]) -> list[Event]:
        """Of all ranks and the launcher, in file order."""
        journals = [rank.journal for rank in self.ranks] + ([self.launcher] if self.launcher else [])
        return [event for journal in journals for event in journal.of(kind)]


def load_run(run_dir: Path) -> Run:
    """Raises InputError where there is no journal or no recipe, RecipeError where the recipe cannot be read."""
    journals = read_run(run_dir)
    path = run_dir / "recipe.toml"
    if not path.exists():
        raise InputError(
            f"no complete run directory: {run_dir} has no recipe.toml", hint="give the folder that `drawbar run` wrote"
        )
    recipe = load_recipe(path)
    ranks, foreign = [], []
    # Sorted by name, and so by number: names have five digits.
    for journal in journals.ranks:
        reason = foreign_reason(journal, recipe.launch.ranks)
        if reason:
            foreign.append(reason)
        else:
            ranks.append(rank_timeline(journal, int(journal.path.name[5:10])))
    return Run(
        path=run_dir,
        recipe=recipe,
        ranks=ranks,
        foreign=foreign,
        launcher=journals.launcher,
        hosts=host_timelines(journals.hosts, ranks),
        problems=journals.problems(),
    )
