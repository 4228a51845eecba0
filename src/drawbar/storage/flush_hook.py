"""The user's own command that empties the caches on the storage side, where Drawbar cannot reach.

Run without a shell and with nothing on its stdin, so that it cannot wait for a password; what it prints goes to a log.
What it claims to have done cannot be seen from here, and is never taken for proof.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from drawbar.errors import InputError

_KEY = "cache.storage_flush_command"
_GRACE_S = 2.0
"""From SIGTERM to SIGKILL."""


@dataclass(frozen=True, kw_only=True)
class HookOutcome:
    exit_code: int | None
    """Negative: the number of the signal that ended it. None: it did not end in time, and was stopped."""
    duration_s: float
    last_line: str
    """Of what it printed."""

    @property
    def failure(self) -> str:
        """In words; empty where it ended well."""
        if self.exit_code == 0:
            return ""
        said = f": {self.last_line}" if self.last_line else ", and printed nothing"
        if self.exit_code is None:
            return f"{_KEY} did not end within {self.duration_s:.0f} s and was stopped{said}"
        if self.exit_code < 0:
            return f"{_KEY} was ended by {signal.Signals(-self.exit_code).name}{said}"
        return f"{_KEY} ended with {self.exit_code}{said}"


def check_command(command: Sequence[str]) -> None:
    """Raises InputError where its program cannot be started."""
    if command and shutil.which(command[0]) is None:
        raise InputError(
            f"{_KEY}: no program {command[0]!r} that can be run",
            hint="a list of words, such as ['ssh', 'storage-1', 'flush-caches']; no shell reads it",
        )


def run_command(command: Sequence[str], *, timeout_s: float, log: Path) -> HookOutcome:
    """Runs it to its end, or stops it and all that it started. Raises InputError where it cannot be started."""
    log.parent.mkdir(parents=True, exist_ok=True)
    begin_t = time.monotonic()
    with log.open("ab") as file:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                # No terminal either, on which ssh and sudo would ask past stdin.
                start_new_session=True,
            )
        except OSError as error:
            raise InputError(f"{_KEY}: cannot run {command[0]!r}: {error.strerror}") from None
    exit_code: int | None = None
    try:
        exit_code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if exit_code is None:
            _stop(process)
    return HookOutcome(exit_code=exit_code, duration_s=time.monotonic() - begin_t, last_line=_last_line(log))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL: to its session, and to children that left it."""
    try:
        # psutil compares creation times: a process that reuses an old number is not touched.
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        family = []
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass
        for child in family:
            try:
                child.send_signal(number)
            except psutil.Error:
                pass
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        _, family = psutil.wait_procs(family, timeout=_GRACE_S)


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next((line[:300] for line in reversed(lines) if line), "")
