"""The life of one rank, from its launcher's variables to its last journal line.

Started as `python -m drawbar.launch.rank RUN_DIR` by torchrun, mpirun or srun. Takes the recipe from its environment or
from `RUN_DIR/recipe.toml`, then its endpoint, meets the others, trains, drains its input, and says how it ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import psutil

from drawbar.config import Recipe, load_recipe
from drawbar.errors import DrawbarError, EnvironmentUnfit
from drawbar.journal import Clock, Error, JournalWriter, ModelBuilt, RunEnd, RunStart, TrainingStart
from drawbar.launch import last_words
from drawbar.launch.cold import files_of, flush_unflushed
from drawbar.launch.echo import ECHO_VARIABLE, EchoingJournal
from drawbar.launch.environment import RECIPE_VARIABLE, decode_threads, describe, threads_per_rank
from drawbar.launch.rendezvous import rendezvous
from drawbar.launch.train_dir import train_dir
from drawbar.world import World

if TYPE_CHECKING:
    # torch is imported late: a rank writes down that it could not even do that.
    import torch
    from torch.distributed import ProcessGroup

    from drawbar.train.build import Training
    from drawbar.train.summaries import Summaries


class Phase:
    """What this rank is doing, for its last words."""

    def __init__(self) -> None:
        self.now = "start"


def main(run_dir: Path) -> NoReturn:
    last_words.block_signals()
    last_words.die_with_parent(last_words.TORCHRUN_PID)
    world = World.detect()
    launchers_output = os.dup(1)
    _log_to(run_dir / "logs" / f"rank-{world.rank:05d}.log")

    def open_journal(name: str) -> JournalWriter:
        path = run_dir / "journal" / name
        if ECHO_VARIABLE in os.environ:
            return EchoingJournal(path, world.rank, launchers_output)
        return JournalWriter(path)

    journal = open_journal(f"rank-{world.rank:05d}.jsonl")
    last_words.watch_signals(journal, lambda: None)
    phase = Phase()
    code = 1
    try:
        recipe = recipe_of_run(run_dir)
        _run(run_dir, recipe, world, journal, open_journal, phase)
        journal.write(RunEnd(status="ok", unix_s=time.time()))
        code = 0
    except BaseException as error:
        traceback.print_exc()
        code = _write_error(journal, error, phase.now)
    finally:
        # Neither the process group's destructor nor a thread inside a GET may hold up the end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(
    run_dir: Path,
    recipe: Recipe,
    world: World,
    journal: JournalWriter,
    open_journal: Callable[[str], JournalWriter],
    phase: Phase,
) -> None:
    phase.now = "import torch"
    import torch

    from drawbar.checkpoint.find import store_of_rank
    from drawbar.checkpoint.reader import resume
    from drawbar.checkpoint.writer import About, CheckpointWriter
    from drawbar.epochs import EvalPlan
    from drawbar.input.device import device_of_rank
    from drawbar.launch.eval_feed import EvalFeed
    from drawbar.launch.feed import open_feed
    from drawbar.train.build import build_training, make_evaluation
    from drawbar.train.clock import CudaClock, HostClock
    from drawbar.train.loop import Between, LoopSettings, train
    from drawbar.train.precision import choose_precision
    from drawbar.train.quality import Evaluations

    device = device_of_rank(recipe.launch.device, world)
    precision = choose_precision(recipe.model.precision, device)
    threads = threads_per_rank(recipe.launch, world.local_world_size)
    decoders = decode_threads(recipe, world.local_world_size, device.type)
    torch.set_num_threads(threads)
    torch.manual_seed(recipe.input.seed)

    phase.now = "open data"
    feed = open_feed(recipe, world, device, decoders, journal.write)
    eval_feed = EvalFeed(recipe, world, device, decoders, journal.write) if recipe.data.eval_url else None
    plan = EvalPlan.of(recipe, feed.num_records)
    journal.write(
        RunStart(
            role="rank",
            rank=world.rank,
            local_rank=world.local_rank,
            world_size=world.world_size,
            node=world.node,
            pid=os.getpid(),
            unix_s=time.time(),
            recipe_sha256=recipe.sha256(),
            dataset_sha256=feed.dataset_sha256,
            endpoint=feed.endpoint,
            environment=describe(str(device), precision.name, 0 if recipe.emulate.step_s else threads, decoders)
            | {"decoding": feed.decoding, "storage": feed.storage},
        )
    )

    phase.now = "meet the other ranks"
    with _process_group(recipe, world, device) as control:
        agree(control, recipe, world, feed.dataset_sha256, eval_feed.dataset_sha256 if eval_feed else "")
        _write_clock(journal, control, world, "start")
        phase.now = "build model"
        # An emulated step passes on the host, whatever the device.
        on_gpu = device.type == "cuda" and not recipe.emulate.step_s
        clock = CudaClock() if on_gpu else HostClock()
        training = build_training(recipe, world, device, precision, clock, feed.num_records)
        journal.write(
            ModelBuilt(
                model=recipe.model.name,
                parameters=sum(p.numel() for p in training.model.parameters() if p.requires_grad),
                gradient_bytes=training.gradient_bytes,
                emulated_step_s=recipe.emulate.step_s,
            )
        )
        if training.weights is not None:
            journal.write(training.weights)
        phase.now = "resume"
        rounding = {
            "device": device.type,
            "precision": precision.name,
            "compute threads": str(threads),
            "torch": torch.__version__,
        }
        about = About(
            recipe=recipe,
            world=world,
            dataset_sha256=feed.dataset_sha256,
            num_records=feed.num_records,
            rounding=rounding,
        )
        resumed = resume(training, about, journal.write)
        checkpoints = None
        if recipe.checkpoint.url:
            checkpoints = CheckpointWriter(
                store_of_rank(recipe.checkpoint.url, recipe),
                about,
                training,
                control,
                journal,
                plan_state=feed.plan_state,
                first_step=resumed.step,
                first_epoch=resumed.epoch,
            )
        warmup_steps, steps = recipe.train.steps_from(resumed.step, plan.total_steps)
        settings = LoopSettings(
            first_step=resumed.step,
            warmup_steps=warmup_steps,
            steps=steps,
            rank=world.rank,
            slow_step_s=recipe.faults.slow_step_s if world.rank == recipe.faults.slow_rank else 0.0,
        )

        def on_step(number: int) -> None:
            phase.now = f"step {number}"

        def on_evaluation(step: int) -> None:
            phase.now = f"evaluation after step {step}"

        evaluations: Between | None = None
        if eval_feed is not None:
            evaluations = Evaluations(
                make_evaluation(
                    recipe, training, eval_feed.batches, device=device, dtype=precision.dtype, control=control
                ),
                eval_feed,
                due=plan.due,
                target=recipe.quality.targets,
                journal=journal,
                device=device,
                control=control,
                on_evaluation=on_evaluation,
            )

        with _host_counters(open_journal, control, world):
            files = files_of(recipe.data.url, feed.shards)
            if eval_feed is not None:
                files += files_of(recipe.data.eval_url, eval_feed.shards)
            flush_unflushed(recipe, world, files, journal)
            torch.distributed.barrier(control)
            # From here on data are read.
            journal.write(TrainingStart(init_s=time.time() - psutil.Process().create_time()))
            feed.start(resumed.plan)
            with _summaries(recipe, run_dir, world, training, journal) as summaries:
                # A checkpoint comes after the evaluation of its step: who resumes from it has not skipped one.
                between = [each for each in (summaries, evaluations, checkpoints) if each]
                train(feed.next_batch, training.step, clock, summaries or journal, settings, on_step, between)
            if checkpoints:
                phase.now = "write the last checkpoint"
                checkpoints.finish()
            phase.now = "drain input"
            for event in feed.close():
                journal.write(event)
            phase.now = "last barrier"
            torch.distributed.barrier(control)
        _write_clock(journal, control, world, "end")


def recipe_of_run(run_dir: Path) -> Recipe:
    """The launcher's own, where it passed it on; hosts need not share its file system."""
    if RECIPE_VARIABLE in os.environ:
        return Recipe.model_validate_json(os.environ[RECIPE_VARIABLE])
    return load_recipe(run_dir / "recipe.toml")


@contextlib.contextmanager
def _summaries(
    recipe: Recipe, run_dir: Path, world: World, training: Training, journal: JournalWriter
) -> Iterator[Summaries | None]:
    """None where none are wanted, and on all ranks but 0."""
    if world.rank != 0 or not recipe.summaries.wanted:
        yield None
        return
    from drawbar.train.summaries import Summaries

    folder = train_dir(recipe, run_dir)
    summaries = Summaries(folder, recipe.summaries, training.model, training.optimizer, journal)
    try:
        yield summaries
    finally:
        summaries.close()


@contextlib.contextmanager
def _process_group(recipe: Recipe, world: World, device: torch.device) -> Iterator[ProcessGroup]:
    """Joins the ranks; yields a Gloo group for control messages beside the gradients' group."""
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=recipe.launch.stall_timeout_s)
    on_gpu = device.type == "cuda"
    if world.launcher == "":
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"})
    elif world.launcher != "torchrun":
        address, port = rendezvous(world)
        os.environ.update({"MASTER_ADDR": address, "MASTER_PORT": str(port)})
        os.environ.update({"RANK": str(world.rank), "WORLD_SIZE": str(world.world_size)})
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
    except dist.DistError as error:
        at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise EnvironmentUnfit(
            f"rank {world.rank} on {world.node} does not meet the others at {at}: {str(error).splitlines()[0]}",
            hint="is that address rank 0's host, seen from here, and the port free there?",
        ) from None
    if on_gpu:
        torch.cuda.set_device(device)
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)  # noqa: S101 (not a member is an int; every rank is one)
    yield control
    dist.destroy_process_group()


def agree(
    control: ProcessGroup, recipe: Recipe, world: World, dataset_sha256: str, validation_sha256: str = ""
) -> None:
    """Raises EnvironmentUnfit unless as many ranks met as the recipe asks for, all with one recipe and one data set."""
    import torch.distributed as dist

    if world.world_size != recipe.launch.ranks:
        raise EnvironmentUnfit(f"the recipe asks for {recipe.launch.ranks} ranks, {world.world_size} were started")
    mine = {
        "recipe": recipe.sha256(),
        "data set": dataset_sha256,
        "validation set": validation_sha256,
        "Drawbar": describe()["drawbar"],
    }
    theirs: list[dict[str, str]] = [{} for _ in range(world.world_size)]
    dist.all_gather_object(theirs, mine, group=control)
    for rank, other in enumerate(theirs):
        for what, value in mine.items():
            if other[what] != value:
                raise EnvironmentUnfit(f"ranks see different {what}s: rank {world.rank} and rank {rank} disagree")


@contextlib.contextmanager
def _host_counters(open_journal: Callable[[str], JournalWriter], control: ProcessGroup, world: World) -> Iterator[None]:
    """Local rank 0 of each host samples for the host."""
    import torch.distributed as dist

    from drawbar.launch.host_counters import HostSampler

    everyone: list[tuple[str, int, int]] = [("", 0, 0)] * world.world_size
    dist.all_gather_object(everyone, (world.node, world.local_rank, os.getpid()), group=control)
    if world.local_rank != 0:
        yield
        return
    journal = open_journal(f"host-{world.node}.jsonl")
    sampler = HostSampler(journal, world.node, {local: pid for node, local, pid in everyone if node == world.node})
    try:
        yield
    finally:
        sampler.stop()
        journal.close()


def _write_clock(journal: JournalWriter, control: ProcessGroup, world: World, when: str) -> None:
    from drawbar.launch.clocks import offset_to_rank_0

    offset_s, uncertainty_s = offset_to_rank_0(control, world.rank, world.world_size)
    journal.write(Clock(when=when, offset_s=offset_s, uncertainty_s=uncertainty_s))


def _write_error(journal: JournalWriter, error: BaseException, phase: str) -> int:
    known = isinstance(error, DrawbarError)
    code = error.exit_code if isinstance(error, DrawbarError) else 4
    journal.write(
        Error(
            type=type(error).__name__,
            message=str(error) or type(error).__name__,
            hint=(error.hint or "") if isinstance(error, DrawbarError) else "",
            exit_code=code,
            phase=phase,
            secondary=_is_lost_peer(error),
            traceback="" if known else traceback.format_exc(),
        )
    )
    journal.write(RunEnd(status="failed", unix_s=time.time()))
    return code


def _is_lost_peer(error: BaseException) -> bool:
    """A collective that broke: somebody else is gone, and that one is the cause."""
    if isinstance(error, DrawbarError) or not isinstance(error, RuntimeError):
        return False
    torch = sys.modules.get("torch")
    dist_error = getattr(getattr(torch, "distributed", None), "DistError", ())
    text = str(error).lower()
    return isinstance(error, dist_error) or any(word in text for word in ("gloo", "nccl", "connection closed", "peer"))


def _log_to(path: Path) -> None:
    """Whatever libraries print goes to this rank's log, C++ included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
