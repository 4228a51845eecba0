"""A made-up run directory whose figures are known beforehand. Healthy by default; tests then break one thing.

All times are on one true clock and moved to each rank's own by its offset. Also run as a script to look at a page:
`python tests/synthetic_run.py FOLDER [RANKS] [STEPS]`.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from drawbar.config import Recipe
from drawbar.journal import (
    Cache,
    Clock,
    DataSet,
    Event,
    Host,
    InputReport,
    InputSample,
    InputStage,
    InputTotals,
    JournalWriter,
    ModelBuilt,
    Request,
    RunEnd,
    RunStart,
    Step,
    Witness,
)

SAMPLE_BYTES = 115_000
REQUEST_BYTES = 8 * 2**20
START_T = 1000.0
"""True time of step 0."""
ENVIRONMENT: dict[str, Any] = {
    "drawbar": "0.1.0",
    "python": "3.12.4",
    "packages": {"torch": "2.9.0", "obstore": "0.8.2"},
    "kernel": "6.1.0",
    "cpu": "AMD EPYC 9654 96-Core Processor",
    "num_cpus": 16,
    "memory_bytes": 64 * 2**30,
    "device": "cpu",
    "precision": "fp32",
    "compute_threads": 4,
    "decode_threads": 2,
}

E = TypeVar("E", bound=Event)


@dataclass(kw_only=True)
class SyntheticRun:
    recipe: Recipe
    ranks: dict[int, list[Event]]
    hosts: dict[str, list[Event]] = field(default_factory=dict)
    launcher: list[Event] | None = None

    def change(self, rank: int, kind: type[E], changed: Callable[[E], Event | None]) -> None:
        """Replaces each event of `kind` in one rank's journal; None drops it."""
        self.ranks[rank] = _changed(self.ranks[rank], kind, changed)

    def change_launcher(self, kind: type[E], changed: Callable[[E], Event | None]) -> None:
        self.launcher = _changed(self.launcher or [], kind, changed)

    def drop(self, rank: int, *kinds: type[Event]) -> None:
        self.ranks[rank] = [event for event in self.ranks[rank] if not isinstance(event, kinds)]

    def kill(self, rank: int, *, after_step: int) -> None:
        """Cuts a rank's journal behind a step, as SIGKILL does."""
        end = next(
            i for i, event in enumerate(self.ranks[rank]) if isinstance(event, Step) and event.step == after_step
        )
        self.ranks[rank] = self.ranks[rank][: end + 1]

    def write(self, run_dir: Path) -> Path:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "recipe.toml").write_text(self.recipe.to_toml())
        folder = run_dir / "journal"
        folder.mkdir(exist_ok=True)
        for rank, events in self.ranks.items():
            _write(folder / f"rank-{rank:05d}.jsonl", events)
        for node, events in self.hosts.items():
            _write(folder / f"host-{node}.jsonl", events)
        if self.launcher is not None:
            _write(folder / "launcher.jsonl", self.launcher)
        return run_dir


def _changed(events: Sequence[Event], kind: type[E], changed: Callable[[E], Event | None]) -> list[Event]:
    rows = [changed(event) if isinstance(event, kind) else event for event in events]
    return [row for row in rows if row is not None]


def _write(path: Path, events: Sequence[Event]) -> None:
    writer = JournalWriter(path)
    for event in events:
        writer.write(event)
    writer.close()


def synthetic_run(
    *,
    ranks: int = 2,
    steps: int = 24,
    warmup_steps: int = 3,
    batch_size: int = 8,
    step_s: float = 0.5,
    data_wait: float = 0.2,
    noise: float = 0.0,
    skew_s: Sequence[float] = (),
    offset_s: Sequence[float] = (),
    ranks_per_node: int = 2,
    endpoints: int = 2,
    overrides: dict[str, Any] | None = None,
) -> SyntheticRun:
    """Steps of `step_s` on every rank, `data_wait` of it waiting. Rank r is `skew_s[r]` late, its clock `offset_s[r]`
    behind rank 0's. `noise`: relative spread of the steps, common to all ranks. `overrides`: recipe sections."""
    urls = [f"http://10.0.0.{i + 1}:8333" for i in range(endpoints)]
    recipe = Recipe.model_validate(
        {
            "name": "synthetic",
            "storage": {"endpoints": urls},
            "train": {
                "batch_size": batch_size,
                "warmup_steps": warmup_steps,
                "steps": steps,
                "display_every": 10,
            },
            "launch": {"ranks": ranks},
            **(overrides or {}),
        }
    )
    rng = random.Random(7)
    length_s = [step_s * (3.0 if k == 0 else max(0.2, rng.gauss(1, noise))) for k in range(warmup_steps + steps)]
    run = SyntheticRun(recipe=recipe, ranks={})
    for rank in range(ranks):
        late_s = skew_s[rank] if rank < len(skew_s) else 0.0
        behind_s = offset_s[rank] if rank < len(offset_s) else 0.0
        wait = min(0.9, data_wait * (1 + 0.1 * rank)) if noise else data_wait
        run.ranks[rank] = _rank_events(
            recipe, rank, f"n{rank // ranks_per_node + 1}", urls[rank % endpoints], length_s, late_s, behind_s, wait
        )
    end_t = START_T + sum(length_s)
    for node in dict.fromkeys(f"n{rank // ranks_per_node + 1}" for rank in range(ranks)):
        run.hosts[node] = _host_events(node, end_t, rng)
    run.launcher = _launcher_events(run, urls, end_t)
    return run


def _rank_events(
    recipe: Recipe,
    rank: int,
    node: str,
    url: str,
    length_s: Sequence[float],
    late_s: float,
    behind_s: float,
    wait: float,
) -> list[Event]:
    train, rng = recipe.train, random.Random(rank)
    own_t = START_T + late_s - behind_s
    start = RunStart(
        t=own_t - 5,
        role="rank",
        rank=rank,
        local_rank=rank % 2,
        world_size=recipe.launch.ranks,
        node=node,
        pid=4000 + rank,
        unix_s=1.7e9,
        recipe_sha256=recipe.sha256(),
        dataset_sha256="d" * 64,
        endpoint=url,
        environment=ENVIRONMENT,
    )
    events: list[Event] = [start, Clock(t=own_t - 4, when="start", offset_s=behind_s, uncertainty_s=5e-5)]
    gradient_bytes = 4 * 25_557_032 if recipe.launch.ranks > 1 else 0
    events.append(
        ModelBuilt(t=own_t - 3, model=recipe.model.name, parameters=25_557_032, gradient_bytes=gradient_bytes)
    )
    step_bytes = train.batch_size * SAMPLE_BYTES
    due_bytes, offset = 0, 0
    for number, seconds in enumerate(length_s):
        due_bytes += step_bytes
        while due_bytes >= REQUEST_BYTES or (number == len(length_s) - 1 and due_bytes > 0):
            size = min(REQUEST_BYTES, due_bytes)
            first_s = rng.lognormvariate(-5.5, 0.4)
            events.append(
                Request(
                    t=own_t,
                    endpoint=url,
                    key=f"train/train-{rank:05d}-of-01024",
                    kind="data",
                    offset=offset,
                    wanted_bytes=size,
                    got_bytes=size,
                    first_byte_s=first_s,
                    total_s=first_s * rng.uniform(2, 4),
                    attempt=0,
                )
            )
            due_bytes, offset = due_bytes - size, offset + size
        # What a rank waits for data more, it waits less for the others in the exchange.
        data_wait_s = seconds * (wait if wait == 0.2 else min(0.9, wait * rng.lognormvariate(0, 0.3)))
        copy_s, exchange_s, optimizer_s = 0.02 * seconds, 0.03 * seconds, 0.05 * seconds
        events.append(
            Step(
                t=own_t + seconds,
                step=number,
                warmup=number < train.warmup_steps,
                start_t=own_t,
                end_t=own_t + seconds,
                data_wait_s=data_wait_s,
                copy_s=copy_s,
                compute_s=seconds - data_wait_s - copy_s - exchange_s - optimizer_s,
                exchange_s=exchange_s,
                optimizer_s=optimizer_s,
                samples=train.batch_size,
                loss=7.0 - 0.01 * number,
                learning_rate=0.01,
            )
        )
        own_t += seconds
    total = step_bytes * len(length_s)
    images = train.batch_size * len(length_s)
    return [
        *events,
        InputTotals(
            t=own_t + 0.1,
            planned_bytes=total,
            received_bytes=total,
            trained_bytes=total,
            discarded_bytes=0,
            decoded_images=images,
            trained_images=images,
            bad_images=0,
            epochs=0.5,
        ),
        InputReport(
            t=own_t + 0.1, lanes=8, request_bytes=REQUEST_BYTES, read_ahead=4, tuned=["read_ahead"], first_batch_s=0.4
        ),
        *_samples(own_t - sum(length_s), sum(length_s)),
        *_stages(own_t + 0.1, sum(length_s), images, total),
        Clock(t=own_t + 0.2, when="end", offset_s=behind_s, uncertainty_s=5e-5),
        RunEnd(t=own_t + 0.3, status="ok", unix_s=1.7e9 + 60),
    ]


STAGE_SHARES = {
    "fetch": (4, 0.25, 0.0, 0.75, 4),
    "split": (1, 0.05, 0.15, 0.6, 0),
    "shuffle": (1, 0.05, 0.15, 0.6, 512),
    "decode": (2, 0.5, 0.1, 0.4, 0),
    "batch": (1, 0.02, 0.15, 0.6, 2),
}
"""Threads; busy, blocked on input, blocked on output of their time; capacity of the queue, which is half full."""


def _samples(begin_t: float, run_s: float) -> list[Event]:
    return [
        InputSample(
            t=begin_t + second,
            busy_s={name: share[1] * share[0] * second for name, share in STAGE_SHARES.items()},
            wait_in_s={name: share[2] * share[0] * second for name, share in STAGE_SHARES.items()},
            wait_out_s={name: share[3] * share[0] * second for name, share in STAGE_SHARES.items()},
            queued={name: share[4] // 2 for name, share in STAGE_SHARES.items() if share[4]},
            queue_capacity={name: share[4] for name, share in STAGE_SHARES.items() if share[4]},
        )
        for second in range(1, int(run_s) + 1)
    ]


def _stages(t: float, run_s: float, images: int, total_bytes: int) -> list[Event]:
    """Four fetches wait for room three quarters of the time; two decode threads are busy for half of it."""
    return [
        InputStage(
            t=t,
            stage=stage,
            threads=threads,
            busy_s=busy * threads * run_s,
            wait_in_s=wait_in * threads * run_s,
            wait_out_s=wait_out * threads * run_s,
            items=images,
            bytes=total_bytes,
            queue_capacity=capacity,
            queue_mean=capacity / 2,
        )
        for stage, (threads, busy, wait_in, wait_out, capacity) in STAGE_SHARES.items()
    ]


def _host_events(node: str, end_t: float, rng: random.Random) -> list[Event]:
    """Of 16 cores half are busy, an eighth of that in the kernel; 100 MB/s come in, 80 MB/s are read from disk."""
    events: list[Event] = []
    busy_s = 0.0
    for second in range(int(end_t - START_T) + 8):
        busy_s += 8.0 * rng.uniform(0.9, 1.1) if second else 0.0
        events.append(
            Host(
                t=START_T - 3 + second,
                node=node,
                cpu_user_s=busy_s * 0.875,
                cpu_system_s=busy_s * 0.125,
                cpu_idle_s=second * 16.0 - busy_s,
                cpu_iowait_s=0.0,
                cpu_steal_s=0.0,
                num_cpus=16,
                memory_used_bytes=10**10,
                memory_available_bytes=5 * 10**10,
                page_cache_bytes=10**9,
                disk_read_bytes=second * 80_000_000,
                disk_write_bytes=second * 1_000_000,
                nic_received_bytes={"lo": 0, "eth0": second * 100_000_000},
                nic_sent_bytes={"lo": 0, "eth0": second * 5_000_000},
                rank_rss_bytes={"0": 2 * 10**9, "1": 2 * 10**9 + second},
            )
        )
    return events


def _launcher_events(run: SyntheticRun, urls: Sequence[str], end_t: float) -> list[Event]:
    recipe = run.recipe
    start = RunStart(
        t=START_T - 9,
        role="launcher",
        rank=-1,
        world_size=recipe.launch.ranks,
        node="n1",
        pid=3999,
        unix_s=1.7e9 - 4,
        recipe_sha256=recipe.sha256(),
        environment={},
    )
    requests = [event for events in run.ranks.values() for event in events if isinstance(event, Request)]
    sent = {url: sum(event.got_bytes for event in requests if event.endpoint == url) for url in urls}
    events: list[Event] = [
        start,
        DataSet(t=START_T - 8, shards=16, size_bytes=225_000_000, records=2048, manifest=True),
        Cache(t=START_T - 8, wanted="cold", method="volume server restarted, caches dropped", resident_fraction=0.0),
    ]
    for when, share in (("before", 0), ("after", 1)):
        t = START_T - 7 if when == "before" else end_t + 1
        events += [
            Witness(t=t, when=when, source="gateway", target=url, count_bytes=10**6 + sent[url] * share) for url in urls
        ]
        read_bytes = 10**7 + round(1.02 * sum(sent.values())) * share
        events.append(Witness(t=t, when=when, source="volume", target="volume-1", count_bytes=read_bytes))
    return [*events, RunEnd(t=end_t + 2, status="ok", unix_s=1.7e9 + 62)]


def with_changes(event: E, **values: Any) -> E:
    return dataclasses.replace(event, **values)


if __name__ == "__main__":
    folder, num_ranks, num_steps = Path(sys.argv[1]), *(int(value) for value in (*sys.argv[2:4], "4", "120")[:2])
    synthetic_run(ranks=num_ranks, steps=num_steps, noise=0.08, skew_s=[0.002 * r for r in range(num_ranks)]).write(
        folder
    )
