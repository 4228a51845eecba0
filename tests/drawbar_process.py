"""Starts the real `drawbar` program, waits for it with a deadline, and looks at what it left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from drawbar.journal import RunStart, parse_line

DEADLINE_S = 110.0


@dataclass(frozen=True)
class Finished:
    code: int
    stdout: str
    stderr: str

    @property
    def error_line(self) -> str:
        """The one line that says what was wrong."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.stderr
        assert "Traceback" not in self.stderr
        return lines[0]


def drawbar(*arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> Finished:
    process = start(*arguments, env=env, cwd=cwd)
    return finish(process)


def start(*arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "drawbar", *map(str, arguments)],
        env={**os.environ, **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], deadline_s: float = DEADLINE_S) -> Finished:
    try:
        stdout, stderr = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        raise
    return Finished(process.returncode, stdout, stderr)


def rank_pids(run_dir: Path, ranks: int, *, after_step: int, deadline_s: float = 60.0) -> list[int]:
    """Process ids of all ranks, once each has finished step `after_step`."""
    end_t = time.monotonic() + deadline_s
    while time.monotonic() < end_t:
        time.sleep(0.1)
        texts = [path.read_bytes() for path in sorted((run_dir / "journal").glob("rank-*.jsonl"))]
        wanted = f'"step":{after_step},'.encode()
        if len(texts) == ranks and all(wanted in text for text in texts):
            starts = [
                next(event for line in text.splitlines() if isinstance(event := parse_line(line), RunStart))
                for text in texts
            ]
            return [event.pid for event in starts]
    raise AssertionError(f"no step {after_step} within {deadline_s} s")


def processes_of(run_dir: Path) -> list[str]:
    """Command lines of living processes that name this run directory, the caller's own apart."""
    found = []
    for process in psutil.process_iter(["cmdline", "status", "pid"]):
        words = process.info["cmdline"] or []
        if str(run_dir) in words and process.info["pid"] != os.getpid() and process.info["status"] != "zombie":
            found.append(" ".join(words))
    return found


def result_of(run_dir: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return loaded
