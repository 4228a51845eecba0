"""Compiles Drawbar's region decoder when the package is built or installed; without a C compiler it is left out.

`python hatch_build.py` does the same in a working tree. Needs `cc` (or $CC) and libjpeg-turbo's header (`libjpeg-dev`,
`libjpeg-turbo-devel`), no library. A Drawbar without the result decodes whole images, slower, and says so in its
results; that is why a failure here is a message and no error.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "src" / "drawbar" / "input"
SOURCES = [FOLDER / "region_decode.c", FOLDER / "huffman.c"]
LIBRARY = FOLDER / "_region_decode.so"


def compile_library() -> str:
    """Makes the library; returns why there is none, or nothing."""
    flags = ["-O3", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden"]
    compiler = shlex.split(os.environ.get("CC", "cc"))
    partial = LIBRARY.with_name(f"{LIBRARY.name}.{os.getpid()}")
    more = shlex.split(os.environ.get("CFLAGS", ""))
    command = [*compiler, *flags, *more, "-o", str(partial), *map(str, SOURCES), "-ldl", "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{shlex.join(compiler)}: {error}"
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no reason given"]
        return lines[0]
    partial.replace(LIBRARY)
    return ""


def main() -> str:
    why = "" if sys.platform == "linux" else f"not made for {sys.platform}"
    why = why or compile_library()
    if why:
        LIBRARY.unlink(missing_ok=True)
        hint = "needs a C compiler and libjpeg-turbo's header (Debian: libjpeg-dev; Fedora: libjpeg-turbo-devel)"
        print(f"drawbar: no region decoder, whole images will be decoded: {why}\nhint: {hint}", file=sys.stderr)
    return why


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # as a script, in a working tree
    pass
else:

    class RegionDecoderHook(BuildHookInterface):  # type: ignore[misc, type-arg, unused-ignore]
        """A wheel with the library belongs to one kind of machine; one without, to all."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if self.target_name != "wheel" or main():
                return
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-linux_{platform.machine()}"
            build_data["artifacts"].append(str(LIBRARY.relative_to(Path(self.root))))


if __name__ == "__main__":
    sys.exit(bool(main()))
