"""torchrun's command line, and its process: started, watched, and ended with everything below it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from drawbar.launch.last_words import LAUNCHER_PID


def command(run_dir: Path, ranks: int) -> list[str]:
    """One host, `ranks` processes, a rendezvous on loopback at a port that torchrun finds free."""
    return [
        sys.executable,
        "-m",
        "drawbar.launch.torchrun_child",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--local-addr",
        "127.0.0.1",
        "--nnodes",
        "1",
        "--nproc-per-node",
        str(ranks),
        "--max-restarts",
        "0",
        # How often torchrun looks at its ranks; its default of ten times a second costs a measurable share of a core.
        "--monitor-interval",
        "1",
        "-m",
        "drawbar.launch.rank",
        str(run_dir),
    ]


class Torchrun:
    """The launcher process. It sits in a session of its own: a Ctrl-C in the terminal reaches only Drawbar, which
    passes it on, so that each rank hears it once."""

    def __init__(self, run_dir: Path, ranks: int, env: Mapping[str, str]) -> None:
        # torch leaves folders in TMPDIR; this one goes with the run.
        self._temporary = tempfile.TemporaryDirectory(prefix="drawbar-", ignore_cleanup_errors=True)
        self._log = log = run_dir / "logs" / "torchrun.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command(run_dir, ranks),
                env={**env, LAUNCHER_PID: str(os.getpid()), "TMPDIR": self._temporary.name},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._seen: dict[int, psutil.Process] = {}

    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    @property
    def pid(self) -> int:
        return self._process.pid

    def last_words(self) -> str:
        """The last line of its log: where a rank could not even start, the reason stands only there."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines()]
        return next((line[:300] for line in reversed(lines) if line.strip("=- ")), "its log is empty")

    def remember_children(self) -> None:
        """Ranks lead sessions of their own; known while their parent lives, they can be ended after it."""
        try:
            for child in psutil.Process(self._process.pid).children(recursive=True):
                self._seen.setdefault(child.pid, child)
        except psutil.Error:
            pass

    def stop(self, number: signal.Signals, grace_s: float = 10.0) -> None:
        """Sends `number` to torchrun, which passes it to the ranks; what is left after `grace_s` is killed."""
        self.remember_children()
        if self.running():
            self._process.send_signal(number)
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.reap(0.0)

    def reap(self, grace_s: float) -> None:
        """Makes sure that no rank outlives torchrun."""
        # psutil compares creation times: a process that reuses an old number is not touched.
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=grace_s)
        for process in alive:
            try:
                process.kill()
            except psutil.Error:
                pass
        psutil.wait_procs(alive, timeout=5)
        self._temporary.cleanup()
