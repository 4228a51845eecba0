"""One rank of a probe: opens the set, says that it is ready, and measures when it is told to.

Started by `probe.run` as `python -m drawbar.probe.rank RECIPE STAGE`, with torchrun's variables. One JSON object a line
on stdout: `{"ready": true}`, then what passed, or an `error` at either place. A line on stdin, the seconds to measure,
starts it; the end of stdin ends it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from drawbar.config import load_recipe
from drawbar.errors import DrawbarError
from drawbar.world import World


def main(recipe_path: Path, stage: str) -> None:
    # Libraries may print: what they write goes to stderr, and the answers to the stdout that was.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(tree: dict[str, Any]) -> None:
        print(json.dumps(tree), file=answers, flush=True)

    try:
        from drawbar.probe.alone import STAGES, Rank

        measure = STAGES[stage](Rank(load_recipe(recipe_path), World.detect()))
        answer({"ready": True})
        line = sys.stdin.readline()
        if line.strip():
            answer(dataclasses.asdict(measure(float(line))))
    except DrawbarError as error:
        answer({"error": error.message, "hint": error.hint, "exit_code": error.exit_code})
    except BaseException as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}", "hint": None, "exit_code": 4})
    # A thread inside a GET must not hold up the end.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
