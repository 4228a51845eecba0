"""The bench that measures the loader's resident size says what it should, over a set ten times another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.timeout(180)
def test_resident_size_does_not_grow_with_the_set() -> None:
    bench = Path(__file__).parent.parent / "bench" / "loader_memory.py"
    done = subprocess.run(
        [sys.executable, bench, "--records", "2000", "20000", "--images", "20000"],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["rss_ratio"] <= 1.1
    assert set(row["peak_rss_mb"]) == {"2000", "20000"}
