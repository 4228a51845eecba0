"""A hold on a folder for one process: whoever comes second is told who has it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from drawbar.errors import EnvironmentUnfit


@contextlib.contextmanager
def hold(lock: Path, taken: str, hint: str) -> Iterator[None]:
    """Keeps the file `lock` locked. It ends with the process, however that ends.

    Raises EnvironmentUnfit, `taken` with the holder's process id, where another process has it.
    """
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise EnvironmentUnfit(f"{taken} (pid {file.read().strip()})", hint=hint) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
