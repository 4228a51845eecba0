"""How a rank ends: whatever happens to it short of SIGKILL, its journal says so.

A rank spends its time inside C++ (backward, collectives), where Python's signal handlers do not run. So the signals are
blocked in every thread and one thread waits for them; it writes the last line and ends the process at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

from drawbar.journal import JournalWriter, RunEnd

_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_PR_SET_PDEATHSIG = 1

LAUNCHER_PID = "DRAWBAR_LAUNCHER_PID"
TORCHRUN_PID = "DRAWBAR_TORCHRUN_PID"


def block_signals() -> None:
    """Before any thread is started: threads inherit the mask."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def die_with_parent(parent_variable: str) -> None:
    """SIGTERM when the parent process is gone, so that nothing outlives a killed launcher.

    `parent_variable` names the environment variable in which the parent left its process id: one that died before this
    call sends no signal any more.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    expected = os.environ.get(parent_variable)
    if expected is not None and os.getppid() != int(expected):
        os._exit(128 + signal.SIGTERM)


def watch_signals(journal: JournalWriter, before_exit: Callable[[], None]) -> None:
    def wait() -> None:
        number = signal.sigwait(_SIGNALS)
        status = "terminated" if number == signal.SIGTERM else "interrupted"
        try:
            journal.write(RunEnd(status=status, unix_s=time.time()))
            before_exit()
        finally:
            os._exit(128 + number)

    threading.Thread(target=wait, name="signals", daemon=True).start()
