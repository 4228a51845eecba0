"""Commands and exit codes. No logic: each command checks what it was given, calls one function and prints."""

from __future__ import annotations

import errno
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from drawbar import __version__
from drawbar.data_cli import JsonFlag, data_app
from drawbar.errors import DrawbarError, EnvironmentUnfit, Interrupted, QualityMissed, ResultInvalid
from drawbar.model_commands import complete_name
from drawbar.probe.names import STAGE_NAMES, StageName
from drawbar.terminal import open_missing_streams, write_line

app = typer.Typer(
    name="drawbar",
    help="Measures distributed deep-learning training end to end: JPEG images in an object store to trained images/s.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Start here: drawbar demo",
)
s3_app = typer.Typer(help="The embedded object store.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")
app.add_typer(s3_app, name="s3")

StoreDir = Annotated[
    Path | None, typer.Option("--dir", help="The store's folder.  [default: ~/.local/state/drawbar/s3]")
]


def main() -> None:
    """The `drawbar` program: runs a command and turns every error a user can cause into one line and an exit code."""
    open_missing_streams()
    _raise_on_signals()
    try:
        code = app(standalone_mode=False)
    except DrawbarError as error:
        fail(error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        fail(EnvironmentUnfit(f"cannot use {error.filename or 'output'}: {error.strerror}"))
    except Exception as error:
        # typer's own usage errors know how to show themselves.
        show = getattr(error, "show", None)
        if show is None:
            raise
        show()
        sys.exit(2)
    # Without its standalone mode, typer returns the code of a `typer.Exit`.
    sys.exit(code if isinstance(code, int) else 0)


def _raise_on_signals() -> None:
    """Ctrl-C, SIGTERM and SIGHUP end a command alike, by one exception; further ones are ignored while it cleans up."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(f"interrupted by {signal.Signals(number).name}")

    for number in numbers:
        # nohup means it. SIGINT is ignored in whatever a script starts in the background, without anybody meaning it.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def fail(error: DrawbarError) -> None:
    show_error(error.message, error.hint)
    sys.exit(error.exit_code)


def show_error(message: str, hint: str | None) -> None:
    """One line each, whatever a path or a server's answer holds."""
    write_line("error: " + " ".join(message.split()), sys.stderr)
    if hint:
        write_line("hint: " + " ".join(hint.split()), sys.stderr)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"drawbar {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(
    short_help="The main job on this machine, nothing to configure.",
    epilog="Example: drawbar demo --dir /scratch/drawbar-demo",
)
def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where data, store and results go.")] = Path("drawbar-demo"),
    images: Annotated[int, typer.Option(min=64, help="Images to make.")] = 2048,
    json_out: JsonFlag = False,
) -> None:
    """The main job on this machine: an S3 store with five endpoints, real JPEGs, a cold ResNet-50 run, a report."""
    from drawbar.demo import run_demo

    _finish_run(run_demo(directory, images, json_out), json_out)


@app.command(
    short_help="One measurement: train, judge, report.",
    epilog="Example: drawbar run recipes/quickstart.toml --set train.batch_size=16 --out runs/batch16",
)
def run(
    recipe: Annotated[Path, typer.Argument(help="A TOML file; see recipes/.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one key; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The run directory, new or empty.  [default: runs/NAME-TIME]")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, max=100, help="Runs to quality with different seeds, below --out.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print how the ranks would be started; secrets are masked.")
    ] = False,
    print_torchrun: Annotated[
        bool, typer.Option("--print-torchrun", help="Only print a torchrun command for each of launch.hosts.")
    ] = False,
    json_out: JsonFlag = False,
) -> None:
    """One measurement, or one run to quality: start the ranks, train, judge, report."""
    from drawbar.config import load_recipe
    from drawbar.launch.command import dry_run_text, run_and_report, torchrun_text

    overrides = [*(settings or []), *([f"quality.repeats={repeats}"] if repeats else [])]
    loaded = load_recipe(recipe, overrides)
    if dry_run or print_torchrun:
        print(torchrun_text(loaded, out) if print_torchrun else dry_run_text(loaded, out))
    elif loaded.quality.repeats == 1:
        _finish_run(run_and_report(loaded, out, json_out), json_out)
    else:
        _finish_series(loaded, out, json_out)


@app.command(
    "tf-cnn",
    short_help="A command line of tf_cnn_benchmarks, as it stands.",
    epilog="Example: drawbar tf-cnn --dry-run -- --model=resnet50 --batch_size=64 --nodistortions --use_fp16=True",
)
def tf_cnn(
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="-- FLAGS", help="Those of tf_cnn_benchmarks, and --ecs_node.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the recipe, and where each key is from.")
    ] = False,
    ignore_unknown: Annotated[
        bool, typer.Option("--ignore-unknown", help="Go on without the flags that have no counterpart.")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one key; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The run directory, new or empty.  [default: runs/NAME-TIME]")
    ] = None,
    json_out: JsonFlag = False,
) -> None:
    """Runs what a command line of tf_cnn_benchmarks means: its flags become a recipe, and that is run."""
    from drawbar.tf_cnn import command

    if dry_run:
        command.dry_run(flags or [], settings or [], ignore_unknown=ignore_unknown, json_out=json_out)
        return
    arguments = {"ignore_unknown": ignore_unknown, "json_out": json_out}
    _finish_run(command.run(flags or [], settings or [], out, **arguments), json_out)


@app.command(
    short_help="What each stage of the input can do alone.",
    epilog="Example: drawbar probe recipes/quickstart.toml --only read --set launch.ranks=4",
)
def probe(
    recipe: Annotated[Path, typer.Argument(help="A TOML file; see recipes/.")],
    only: Annotated[
        StageName | None, typer.Option(help="One stage: read (GETs), crc (and framing), decode, batch (all), copy.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one key; may be repeated.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="To measure each stage.")] = 5.0,
    json_out: JsonFlag = False,
) -> None:
    """What each stage of the input can do alone, all ranks at once: images/s and MB/s."""
    from drawbar.config import load_recipe
    from drawbar.probe import run as prober

    loaded = load_recipe(recipe, settings or [])
    rates = prober.probe(loaded, [only] if only else STAGE_NAMES, seconds)
    print(prober.to_json(loaded, rates) if json_out else prober.to_text(loaded, rates))


@app.command(
    short_help="The models: input size, parameters, arithmetic, gradient bytes.",
    epilog="Example: drawbar models resnet50 inception4 timm:convnext_tiny",
)
def models(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            autocompletion=complete_name,
            help="Also torchvision:NAME and timm:NAME.  [default: all but those]",
        ),
    ] = None,
    json_out: JsonFlag = False,
) -> None:
    """The models that a recipe can name, and what each costs: input size, parameters, arithmetic, gradient bytes."""
    from drawbar.model_commands import show

    show(names or [], json_out)


@app.command(
    short_help="Judge a run again from its journal.", epilog="Example: drawbar report runs/quickstart-20260101-120000"
)
def report(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.")],
    json_out: JsonFlag = False,
) -> None:
    """Make result.json and report.html again from a run's journal, and print its tables."""
    from drawbar.launch.command import report as make_report

    _finish_run(make_report(run_dir, json_out), json_out)


def _finish_run(result: Any, json_out: bool) -> None:
    """Prints the JSON, and ends with the code that the result asks for."""
    if json_out:
        from drawbar.analyze.result import to_json

        print(to_json(result), end="")
    error = result["error"]
    if error is not None:
        from_rank = error["rank"] is not None and f"rank {error['rank']}" not in error["message"]
        host = f" on {error['node']}" if error["node"] else ""
        where = f"rank {error['rank']}{host}, {error['phase']}: " if from_rank else ""
        show_error(where + error["message"], error["hint"])
        raise typer.Exit(error["exit_code"])
    if result["validity"]["grade"] == "invalid":
        raise typer.Exit(ResultInvalid.exit_code)
    quality = result["quality"]
    if quality is not None and quality["reached"] is False:
        from drawbar.report.words import quality_sentence

        show_error(quality_sentence(quality), None)
        raise typer.Exit(QualityMissed.exit_code)


def _finish_series(recipe: Any, out: Path | None, json_out: bool) -> None:
    """As `_finish_run`, of several runs."""
    import json

    from drawbar.launch.repeats import run_series
    from drawbar.report.words import series_sentence

    series, last = run_series(recipe, out, json_out)
    if series is None:
        return _finish_run(last, json_out)
    if json_out:
        print(json.dumps(series, indent=2))
    if any(run["grade"] == "invalid" for run in series["runs"]):
        raise typer.Exit(ResultInvalid.exit_code)
    if series["time_to_quality_s"] is None:
        show_error(series_sentence(series), None)
        raise typer.Exit(QualityMissed.exit_code)


@s3_app.command(
    short_help="Start the embedded object store on 127.0.0.1.", epilog="Example: drawbar s3 up --endpoints 5 --json"
)
def up(
    endpoints: Annotated[int, typer.Option(help="Number of S3 addresses.")] = 5,
    directory: StoreDir = None,
    port: Annotated[
        list[int] | None,
        typer.Option("--port", help="Port of an endpoint; give one per endpoint.  [default: free ones]"),
    ] = None,
    json_out: JsonFlag = False,
) -> None:
    """Start the embedded object store: one SeaweedFS server, and a gateway per endpoint, on 127.0.0.1."""
    from drawbar.s3_commands import up as start

    start(directory, endpoints, port or None, json_out)


@s3_app.command("status", short_help="Show the store's processes.", epilog="Example: drawbar s3 status --json")
def store_status(directory: StoreDir = None, json_out: JsonFlag = False) -> None:
    """Show the embedded store's processes; exit code 3 unless all of them answer."""
    from drawbar.s3_commands import status

    status(directory, json_out)


@s3_app.command(short_help="Stop the embedded store; its data stay.", epilog="Example: drawbar s3 down")
def down(
    directory: StoreDir = None,
    force: Annotated[bool, typer.Option(help="Even while a run reads from it.")] = False,
    json_out: JsonFlag = False,
) -> None:
    """Stop the embedded store; its data stay. Refused while a run reads from it."""
    from drawbar.s3_commands import down as stop

    stop(directory, force, json_out)
