"""Where commands write: results to stdout, what is going on to stderr, one line that is redrawn on a terminal."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

from rich.console import Console as RichConsole
from rich.status import Status

_PIPED_INTERVAL_S = 10.0


def write_line(text: str, out: TextIO) -> None:
    """A reader that has seen enough (`| head -1`) must not end a measurement: what follows goes nowhere."""
    try:
        print(text, file=out, flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, out.fileno())
        os.close(nowhere)


def open_missing_streams() -> None:
    """Standard streams that the caller closed lead nowhere: else a later file would get their number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


class Terminal:
    """A live status line where stderr is a terminal; else a plain line now and then. Never colour in a pipe."""

    def __init__(self, *, quiet_stdout: bool = False) -> None:
        """`quiet_stdout`: finished lines go to stderr, because stdout carries JSON."""
        self._stderr = RichConsole(stderr=True, highlight=False)
        self._out = sys.stderr if quiet_stdout else sys.stdout
        self._live: Status | None = None
        self._last_text, self._last_t = "", 0.0

    def line(self, text: str) -> None:
        if self._live is not None:
            self._live.stop()
        write_line(text, self._out)
        if self._live is not None:
            self._live.start()

    def status(self, text: str) -> None:
        if self._stderr.is_terminal:
            if self._live is None:
                self._live = self._stderr.status(text)
                self._live.start()
            else:
                self._live.update(text)
            return
        now_t = time.monotonic()
        # Words of a new kind at once, moving figures only now and then: a log is read later.
        same_kind = text.split(" ", 1)[0] == self._last_text.split(" ", 1)[0]
        if text != self._last_text and (not same_kind or now_t - self._last_t >= _PIPED_INTERVAL_S):
            write_line(text, sys.stderr)
            self._last_text, self._last_t = text, now_t

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
