"""`drawbar probe`: each asked stage alone, on as many rank processes as the recipe has, all measuring at once."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, TypedDict

from drawbar.config import Recipe
from drawbar.errors import DrawbarError, EnvironmentUnfit, InputError, RunFailed
from drawbar.launch.environment import rank_environment
from drawbar.launch.run import check_storage, reserve, secrets_of_ranks
from drawbar.plural import plural
from drawbar.probe.names import StageName

_START_S = 120.0
"""For importing torch and opening the set, on a busy machine."""


class RankRate(TypedDict):
    rank: int
    images_per_s: float | None
    mb_per_s: float
    images: int | None
    bytes: int
    seconds: float
    cpu_s: float


class StageRate(TypedDict):
    """One stage alone. Rates are sums over the ranks, which all measured in the same seconds."""

    stage: StageName
    images_per_s: float | None
    """Null where records are not counted before they are split (a set without a manifest, `read` only)."""
    mb_per_s: float
    """MB of bodies (`read`), of records (`crc`, `decode`, `batch`), of pixels (`copy`)."""
    cpu_s_per_gb: float | None
    """CPU seconds of the ranks per 10^9 of those bytes; the store's are not in it."""
    threads_per_rank: int
    request_bytes: list[int]
    """Largest GET of each rank at the end; empty for stages that do not tell."""
    read_ahead: list[int]
    ranks: list[RankRate]


def probe(recipe: Recipe, stages: Sequence[StageName], seconds: float) -> list[StageRate]:
    """Raises what a run raises for a recipe or a storage that cannot be used, and RunFailed for a rank that ends."""
    if recipe.input.source == "constant" and set(stages) != {"copy"}:
        raise InputError(
            'input.source is "constant": there is nothing to read', hint="probe --only copy, or input.source = data"
        )
    storage = check_storage(recipe)
    with ExitStack() as stack:
        stack.enter_context(reserve(storage))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drawbar-probe-")))
        (folder / "recipe.toml").write_text(recipe.to_toml())
        env = rank_environment(recipe, secrets_of_ranks(storage, folder), recipe.launch.ranks)
        return [_probe_stage(recipe, stage, seconds, folder, env) for stage in stages]


def _probe_stage(recipe: Recipe, stage: StageName, seconds: float, folder: Path, env: dict[str, str]) -> StageRate:
    with ExitStack() as stack:
        log = stack.enter_context((folder / f"{stage}.log").open("w+b"))
        ranks = [
            stack.enter_context(_RankProcess(rank, recipe, stage, folder, env, log))
            for rank in range(recipe.launch.ranks)
        ]
        for rank in ranks:
            rank.answer(_START_S)
        for rank in ranks:
            rank.go(seconds)
        return _rate(stage, [rank.answer(seconds + recipe.launch.stall_timeout_s) for rank in ranks])


def _rate(stage: StageName, passed: list[dict[str, Any]]) -> StageRate:
    ranks = [
        RankRate(
            rank=rank,
            images_per_s=None if row["images"] is None else row["images"] / row["seconds"],
            mb_per_s=row["bytes"] / 1e6 / row["seconds"],
            images=row["images"],
            bytes=row["bytes"],
            seconds=row["seconds"],
            cpu_s=row["cpu_s"],
        )
        for rank, row in enumerate(passed)
    ]
    rates = [rank["images_per_s"] for rank in ranks]
    known = [rate for rate in rates if rate is not None]
    total_bytes = sum(rank["bytes"] for rank in ranks)
    tells = stage in ("read", "crc")
    return StageRate(
        stage=stage,
        images_per_s=sum(known) if len(known) == len(rates) else None,
        mb_per_s=sum(rank["mb_per_s"] for rank in ranks),
        cpu_s_per_gb=sum(rank["cpu_s"] for rank in ranks) / (total_bytes / 1e9) if total_bytes else None,
        threads_per_rank=max(row["threads"] for row in passed),
        request_bytes=[row["request_bytes"] for row in passed] if tells else [],
        read_ahead=[row["read_ahead"] for row in passed] if tells else [],
        ranks=ranks,
    )


class _RankProcess:
    """One rank as a child process; ended with the `with` block, whatever happens."""

    def __init__(
        self, rank: int, recipe: Recipe, stage: str, folder: Path, env: dict[str, str], log: IO[bytes]
    ) -> None:
        world = str(recipe.launch.ranks)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        self._rank, self._log = rank, log
        self._process = subprocess.Popen(
            [sys.executable, "-m", "drawbar.probe.rank", str(folder / "recipe.toml"), stage],
            env={**env, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            # A Ctrl-C reaches this process only, which ends the ranks.
            start_new_session=True,
        )
        self._buffer = b""

    def __enter__(self) -> _RankProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass

    def go(self, seconds: float) -> None:
        assert self._process.stdin is not None  # noqa: S101
        try:
            self._process.stdin.write(f"{seconds}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its missing answer tells

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The next line it writes. Raises what it says went wrong; RunFailed where it is gone or silent."""
        stdout = self._process.stdout
        assert stdout is not None  # noqa: S101
        end_t = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, end_t - time.monotonic())):
                    raise RunFailed(f"probe: rank {self._rank} was silent for {timeout_s:g} s")
                piece = os.read(stdout.fileno(), 65536)
                if not piece:
                    raise RunFailed(f"probe: rank {self._rank} ended before it was done: {self._last_words()}")
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        tree: dict[str, Any] = json.loads(line)
        if "error" in tree:
            raise _error(self._rank, tree)
        return tree

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"exit code {self._process.poll()}"


def _error(rank: int, tree: dict[str, Any]) -> DrawbarError:
    kinds: dict[int, type[DrawbarError]] = {2: InputError, 3: EnvironmentUnfit}
    kind = kinds.get(tree["exit_code"], RunFailed)
    return kind(f"rank {rank}: {tree['error']}", hint=tree["hint"])


def to_json(recipe: Recipe, rates: list[StageRate]) -> str:
    return json.dumps({"recipe": recipe.name, "ranks": recipe.launch.ranks, "stages": rates}, indent=2)


def to_text(recipe: Recipe, rates: list[StageRate]) -> str:
    """A table of the stages, and each rank's rate where there are several."""
    from drawbar.report import words
    from drawbar.report.terminal import table

    header = ["stage", "images/s", "MB/s", "CPU s/GB", "threads", "rank by rank (images/s or MB/s)"]
    rows = [
        [
            rate["stage"],
            words.number(rate["images_per_s"], 0),
            words.number(rate["mb_per_s"], 0),
            words.number(rate["cpu_s_per_gb"], 2),
            str(rate["threads_per_rank"]),
            " ".join(
                words.number(rank["mb_per_s"] if rank["images_per_s"] is None else rank["images_per_s"], 0)
                for rank in rate["ranks"][:8]
            ),
        ]
        for rate in rates
    ]
    title = f"Each stage alone on {plural(recipe.launch.ranks, 'rank')}; the page cache was left as it was"
    return "\n".join([title, *table(header, rows, (0, 5))])
