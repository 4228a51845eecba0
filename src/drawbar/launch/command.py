"""`drawbar run` and `drawbar report` as functions: a run, then its judgement from the journal, whatever happened."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

from drawbar.analyze.result import write_result
from drawbar.analyze.schema import Result
from drawbar.config import Recipe
from drawbar.errors import DrawbarError, EnvironmentUnfit, InputError
from drawbar.launch import command_lines
from drawbar.launch import run as launcher
from drawbar.launch.checkpoints import check_checkpoints
from drawbar.launch.launchers import launcher_of
from drawbar.launch.train_dir import check_train_dir, with_start_time
from drawbar.report.page import write_page
from drawbar.report.terminal import summary_text
from drawbar.terminal import Terminal
from drawbar.world import World

_SECRET = ("SECRET", "TOKEN", "PASSWORD", "CREDENTIAL")
_TORCHRUN_PORT = 29500
"""torchrun's own default."""


def default_run_dir(recipe: Recipe, base: Path = Path("runs")) -> Path:
    return base / f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def refuse_to_be_a_rank() -> None:
    """Raises EnvironmentUnfit where a launcher has started this process as one of several."""
    world = World.detect()
    if world.world_size > 1:
        raise EnvironmentUnfit(
            f"this process is rank {world.rank} of {world.world_size} of {world.launcher}; Drawbar starts its ranks "
            "itself: under another launcher it is not supported yet",
            hint="start it once, without the launcher; launch.ranks and launch.hosts say where ranks run",
        )


def dry_run_text(recipe: Recipe, out: Path | None) -> str:
    """The launcher's command line, and what its environment has beside this one; secrets are masked.

    What a run finds out from storage (the embedded store's addresses and keys) is not in it.
    """
    found = launcher_of(recipe, out or default_run_dir(recipe), os.environ)
    env = found.job.env
    secret = {name for name in env if any(word in name for word in _SECRET)}
    shown = {name for name in env if os.environ.get(name) != env[name]} | secret
    lines = [f"export {name}={'***' if name in secret else shlex.quote(env[name])}" for name in sorted(shown)]
    return "\n".join([*lines, command_lines.shown(found.command)])


def torchrun_text(recipe: Recipe, out: Path | None) -> str:
    """For each host its name and the command to type there.

    Raises InputError where hosts are missing or have unequal numbers of ranks.
    """
    if not (recipe.launch.hosts or recipe.launch.host_file):
        raise InputError("torchrun's lines are for hosts: launch.hosts is empty", hint='launch.hosts = ["node1:4", …]')
    run_dir = (out or default_run_dir(recipe)).resolve()
    lines = command_lines.torchrun_lines(
        command_lines.Job(launch=recipe.launch, run_dir=run_dir, env=os.environ), _TORCHRUN_PORT
    )
    first = f"# on every host first: the recipe as {run_dir / 'recipe.toml'}"
    return "\n".join([first, *(f"# {host}\n{command_lines.shown(line)}" for host, line in lines.items())])


def run_and_report(recipe: Recipe, out: Path | None, json_out: bool) -> Result:
    """Runs, judges, writes result.json and report.html. A failed run is judged too: its result carries the cause.

    Raises InputError or EnvironmentUnfit where the run directory or the storage cannot be used; nothing is written.
    """
    refuse_to_be_a_rank()
    run_dir = out or default_run_dir(recipe)
    recipe = with_start_time(recipe)
    terminal = Terminal(quiet_stdout=json_out)
    with launcher.new_run_dir(run_dir):
        try:
            terminal.status("checking the recipe against storage")
            check_train_dir(recipe)
            storage = check_checkpoints(recipe, launcher.check_storage(recipe, terminal.status))
            with launcher.reserve(storage):
                (run_dir / "recipe.toml").write_text(recipe.to_toml())
                try:
                    launcher.run(recipe, storage, run_dir, terminal)
                except DrawbarError:
                    # The journal holds the cause; the result names the first one.
                    pass
        finally:
            terminal.close()
        return report(run_dir, json_out)


def report(run_dir: Path, json_out: bool) -> Result:
    """Makes result.json and report.html from the journal, and prints the tables."""
    result = write_result(run_dir)
    page = write_page(run_dir)
    terminal = Terminal(quiet_stdout=json_out)
    if not json_out:
        terminal.line(summary_text(result))
    terminal.line(f"report: {page}")
    return result
