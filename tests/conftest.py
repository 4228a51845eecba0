from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from drawbar.storage import embedded, seaweed
from tests.slurm import Slurm, missing_programs, running_slurm

# A script that runs the tests in the background makes them, and all that they start, deaf to Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

SKIPPED: list[tuple[str, str]] = []
"""Test and reason of every skip so far; judged by the last test of all."""


@pytest.fixture(scope="session")
def embedded_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[embedded.EmbeddedStore]:
    """A running store with five endpoints and whatever buckets earlier tests made: take a bucket of your own."""
    directory = tmp_path_factory.mktemp("s3")
    yield embedded.up(directory, num_endpoints=5)
    embedded.down(directory)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Two idle nodes of four CPUs each; run `srun` with its `env`."""
    missing = missing_programs()
    if missing:
        # As root, scripts/test has installed them.
        reason = f"no {', '.join(missing)}: Debian's slurm-wlm and munge"
        (pytest.fail if os.geteuid() == 0 else pytest.skip)(reason)
    with running_slurm(num_nodes=2) as cluster:
        yield cluster


# No test asserts a time: on a busy machine any example may take long.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("unhurried"), derandomize=True, database=None)
settings.load_profile("unhurried")


def pytest_configure(config: pytest.Config) -> None:
    """Properties are tried on the same examples each time, so that a failure is the change's; on new ones in the long
    tier."""
    if "not long" in config.getoption("-m"):
        settings.load_profile("repeatable")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        SKIPPED.append((report.nodeid, str(report.longrepr[2])))


def pytest_sessionfinish() -> None:
    """Stores that another process stopped: their processes were ours, and are reaped."""
    for child in seaweed._children.values():
        child.poll()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The test that counts the skips comes last, whatever the order of the others."""
    items.sort(key=lambda item: item.name == "test_only_gpu_tests_are_skipped")
