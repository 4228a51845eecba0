"""Journals come home: what ranks left on hosts that do not share the run directory's file system is fetched.

By the launcher's own means: one process on that host packs its part of the run directory and prints it.

    python -m drawbar.launch.home RUN_DIR
"""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

BEGIN, END = "drawbar-home-begin", "drawbar-home-end"
_NAME = re.compile(r"(journal/(rank-\d{5,}|host-[A-Za-z0-9._-]+)\.jsonl|logs/rank-\d{5,}\.log)")
_LINE = 1000
"""Bytes a printed line: a launcher passes whole short ones on unharmed."""


def pack(run_dir: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in sorted([*run_dir.glob("journal/*.jsonl"), *run_dir.glob("logs/rank-*.log")]):
            archive.add(path, str(path.relative_to(run_dir)), recursive=False)
    return packed.getvalue()


def unpack(packed: bytes, run_dir: Path) -> list[str]:
    """Writes what is not there yet; returns the names. What is no journal or log of a rank is left out."""
    written = []
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        for member in archive:
            target = run_dir / member.name
            if not member.isfile() or not _NAME.fullmatch(member.name) or target.exists():
                continue
            file = archive.extractfile(member)
            assert file is not None  # noqa: S101 (it is a file)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read())
            written.append(member.name)
    return written


def fetch(command: Sequence[str], env: Mapping[str, str], run_dir: Path, timeout_s: float) -> str:
    """Runs `command`, which ends in this module on another host. Returns why nothing came; empty where all did."""
    try:
        done = subprocess.run(
            command, env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:.0f} s"
    body, end, _ = done.stdout.partition(BEGIN)[2].partition(END)
    if not end:
        lines = [line for line in done.stderr.splitlines() if line.strip("=- ")]
        return lines[-1][:300] if lines else f"exit code {done.returncode}"
    try:
        unpack(base64.b64decode("".join(body.split())), run_dir)
    except (ValueError, tarfile.TarError, OSError) as error:
        return f"what came is damaged: {error}"
    return ""


if __name__ == "__main__":
    text = base64.b64encode(pack(Path(sys.argv[1]))).decode()
    print(BEGIN, *(text[i : i + _LINE] for i in range(0, len(text), _LINE)), END, sep="\n", flush=True)
