"""Everything that is known about one run, derived once: what the rules judge and the reports show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drawbar.analyze.cold import cache_result
from drawbar.analyze.failure import status_of
from drawbar.analyze.hosts import host_result
from drawbar.analyze.quality import quality_result
from drawbar.analyze.schema import (
    CacheResult,
    DataSetResult,
    EndpointResult,
    HostResult,
    InputResult,
    QualityResult,
    Status,
)
from drawbar.analyze.throughput import GlobalSteps, Interval, common_interval, global_steps
from drawbar.analyze.timeline import Run, load_run
from drawbar.analyze.traffic import data_set_result, endpoint_results, input_result


@dataclass(frozen=True, kw_only=True)
class Facts:
    run: Run
    status: Status
    interval: Interval | None
    steps: GlobalSteps | None
    endpoints: list[EndpointResult]
    input: InputResult
    data_set: DataSetResult | None
    cache: CacheResult
    hosts: list[HostResult]
    quality: QualityResult | None


def facts_of(run: Run) -> Facts:
    interval = common_interval(run.ranks)
    return Facts(
        run=run,
        status=status_of(run),
        interval=interval,
        steps=global_steps([rank.measured for rank in run.ranks], interval.start_t if interval else None),
        endpoints=endpoint_results(run),
        input=input_result(run),
        data_set=data_set_result(run),
        cache=cache_result(run),
        hosts=[host_result(host, interval) for host in run.hosts],
        quality=quality_result(run),
    )


def load_facts(run_dir: Path) -> Facts:
    """Raises InputError where there is no journal or no recipe, RecipeError where the recipe cannot be read."""
    return facts_of(load_run(run_dir))
