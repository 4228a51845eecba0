"""`drawbar tf-cnn`: shows what a command line of tf_cnn_benchmarks means, or runs it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drawbar.report.terminal import visible
from drawbar.terminal import write_line
from drawbar.tf_cnn.translate import Line, Translation, translate


def dry_run(arguments: Sequence[str], settings: Sequence[str], *, ignore_unknown: bool, json_out: bool) -> None:
    """Prints the table of flags and the recipe, which together are a recipe file."""
    translation = translate(arguments, os.environ, ignore_unknown=ignore_unknown, overrides=settings)
    write_line(to_json(translation) if json_out else to_toml(translation), sys.stdout)


def run(
    arguments: Sequence[str], settings: Sequence[str], out: Path | None, *, ignore_unknown: bool, json_out: bool
) -> Any:
    """Translates, runs and reports as `drawbar run` does; returns its result. The run directory gets the table too."""
    from drawbar.launch.command import default_run_dir, refuse_to_be_a_rank, run_and_report

    refuse_to_be_a_rank()
    translation = translate(arguments, os.environ, ignore_unknown=ignore_unknown, overrides=settings)
    for spelled in translation.ignored:
        write_line(f"ignored, as it has no counterpart: {spelled}", sys.stderr)
    run_dir = out or default_run_dir(translation.recipe)
    result = run_and_report(translation.recipe, run_dir, json_out)
    (run_dir / "tf-cnn.toml").write_text(to_toml(translation) + "\n")
    return result


def to_toml(translation: Translation) -> str:
    """A recipe file whose head says where each key is from."""
    rows = [(line.flag or "(not given)", _meaning(line)) for line in translation.lines]
    rows += [(spelled, "ignored: it has no counterpart") for spelled in translation.ignored]
    width = min(48, max(len(flag) for flag, _ in rows))
    # A comment ends with its line, whatever a value holds.
    head = [visible(f"# {flag:{width}}  {meaning}").replace("\t", " ") for flag, meaning in rows]
    return "\n".join([*head, "", translation.recipe.to_toml()]).rstrip()


def to_json(translation: Translation) -> str:
    rows = [{"flag": line.flag, "key": line.key, "value": line.value, "note": line.words} for line in translation.lines]
    tree = {"flags": rows, "ignored": translation.ignored, "recipe": translation.recipe.model_dump()}
    return json.dumps(tree, indent=2)


def _meaning(line: Line) -> str:
    if not line.key:
        return f"always so: {line.words}"
    return f"{line.key} = {json.dumps(line.value)}" + (f" ({line.words})" if line.words else "")
