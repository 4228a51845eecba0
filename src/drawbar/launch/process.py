"""A launcher's process: started, watched, listened to, and ended with everything below it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from drawbar.journal import Event, parse_line
from drawbar.launch.last_words import LAUNCHER_PID

ECHO = "drawbar-echo "
"""Begins a line that a rank sends home through its launcher: `drawbar-echo {"rank": 3, "event": {…}}`."""


class LauncherProcess:
    """It sits in a session of its own: a Ctrl-C in the terminal reaches only Drawbar, which passes it on, so that each
    rank hears it once."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], run_dir: Path) -> None:
        self.name = name
        # torch leaves folders in TMPDIR; this one goes with the run.
        self._temporary = tempfile.TemporaryDirectory(prefix="drawbar-", ignore_cleanup_errors=True)
        self._log = log = run_dir / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._file = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "drawbar.launch.tied", *command],
            env={**env, LAUNCHER_PID: str(os.getpid()), "TMPDIR": self._temporary.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._file,
            start_new_session=True,
        )
        self._seen: dict[int, psutil.Process] = {}
        self._echoes: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        assert self._process.stdout is not None  # noqa: S101
        self._listener = threading.Thread(
            target=self._listen, args=(self._process.stdout,), name="launcher output", daemon=True
        )
        self._listener.start()

    def _listen(self, output: IO[bytes]) -> None:
        """What is an echo goes to the queue, the rest to the log."""
        for line in output:
            start = line.find(ECHO.encode())
            if start < 0:
                self._file.write(line)
                self._file.flush()
                continue
            try:
                tree = json.loads(line[start + len(ECHO) :])
                self._echoes.put((int(tree["rank"]), parse_line(json.dumps(tree["event"]).encode())))
            except (ValueError, KeyError, TypeError):
                # Two ranks' lines may run into each other; the journals have all of it.
                continue

    def echoes(self) -> list[tuple[int, Event]]:
        """What ranks have sent home since the last call."""
        found = []
        while not self._echoes.empty():
            found.append(self._echoes.get())
        return found

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
        """Sends `number` to the launcher, which passes it to the ranks; what is left after `grace_s` is killed."""
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
        """Makes sure that no rank on this host outlives the launcher."""
        # psutil compares creation times: a process that reuses an old number is not touched.
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=grace_s)
        for process in alive:
            try:
                process.kill()
            except psutil.Error:
                pass
        psutil.wait_procs(alive, timeout=5)
        self._listener.join(timeout=5)
        self._file.close()
        self._temporary.cleanup()
