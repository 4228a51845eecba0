"""What a rank tells the launching process by its output, where its journal is out of that process's sight.

A few short lines: beginnings and ends, now and then a step. The journals come home afterwards (`launch/home.py`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

from drawbar.journal import Clock, Error, Evaluation, Event, Host, JournalWriter, RunEnd, RunStart, Step
from drawbar.launch.process import ECHO

ECHO_VARIABLE = "DRAWBAR_ECHO"
_STEP_PAUSE_S = 1.0


class EchoingJournal(JournalWriter):
    """A journal whose most telling events also go to `fd`. `rank`: whose they are."""

    def __init__(self, path: Path, rank: int, fd: int) -> None:
        super().__init__(path)
        self._rank, self._echo_fd = rank, fd
        self._step_due_t = 0.0

    def write(self, event: Event) -> None:
        super().write(event)
        if isinstance(event, Step):
            now_t = time.monotonic()
            if now_t < self._step_due_t:
                return
            self._step_due_t = now_t + _STEP_PAUSE_S
        elif not isinstance(event, RunStart | Clock | Error | Evaluation | RunEnd | Host):
            return
        row = {"rank": self._rank, "event": {"event": event.name, **dataclasses.asdict(event)}}
        line = ECHO.encode() + json.dumps(row, separators=(",", ":")).encode() + b"\n"
        try:
            os.write(self._echo_fd, line)
        except OSError:
            # Nobody listens any more: the journal has it.
            pass
