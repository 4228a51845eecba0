"""One run from a recipe: check, make cold, start the ranks, watch them, read the outside counts, judge, report.

This process never imports torch, so that bad input is refused in under a second.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from drawbar.checkpoint.find import Checkpoints
from drawbar.config import Recipe
from drawbar.config import Storage as StorageSettings
from drawbar.dataset.index import (
    EVAL_INDEX_NAME,
    EVAL_INDEX_VARIABLE,
    INDEX_NAME,
    INDEX_VARIABLE,
    ShardIndex,
    find_or_scan,
)
from drawbar.dataset.listing import Listing, split_pattern
from drawbar.dataset.manifest import Manifest
from drawbar.epochs import EvalPlan, run_steps
from drawbar.errors import DrawbarError, EnvironmentUnfit, InputError, Interrupted
from drawbar.input.plan import check_plan
from drawbar.journal import DataSet, Error, JournalWriter, Request, RunEnd, RunStart, Witness
from drawbar.launch.cold import FLUSHED_NODE, make_cold
from drawbar.launch.environment import EMBEDDED_ENDPOINTS, describe
from drawbar.launch.launchers import Launcher, launcher_of
from drawbar.launch.listing import list_place
from drawbar.launch.process import LauncherProcess
from drawbar.launch.watch import Console, RanksFailed, watch
from drawbar.models.names import DETECTORS, MASK_RCNN
from drawbar.storage import embedded, page_cache
from drawbar.storage.environment import Credentials, environment_endpoint
from drawbar.storage.flush_hook import check_command
from drawbar.storage.reader import CountedReader
from drawbar.storage.stores import open_place
from drawbar.storage.urls import parse_url
from drawbar.train.schedule import learning_rate

_FILE_WINDOW_BYTES = 64
"""A header and what a small read brings along: the scan of files steps from header to header."""
_SCAN_REQUEST_BYTES, _SCAN_THREADS = 8 << 20, 4
"""For objects, where the recipe leaves it to a run to find out."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """What stands behind the recipe's data URL."""

    endpoints: list[str]
    """Empty for a folder."""
    credentials: Credentials | None
    store: embedded.EmbeddedStore | None
    listing: Listing | None
    """None with a constant batch; with record sizes from the index where there is one."""
    index: ShardIndex | None = None
    """Of a set without a manifest, where ranks share its shards, or its records must be counted."""
    validation: Listing | None = None
    """What lies under `data.eval_url`."""
    validation_index: ShardIndex | None = None
    checkpoints: Checkpoints | None = None
    """None where none is written or read."""

    @property
    def num_records(self) -> int | None:
        """Of the training set."""
        return self.listing.num_records if self.listing else None


def run(recipe: Recipe, storage: Storage, run_dir: Path, console: Console) -> None:
    """Runs `recipe` from `storage` (see `check_storage`) and leaves its journal in `run_dir` (see `new_run_dir`).

    Raises EnvironmentUnfit, RunFailed or Interrupted; the journal says the same.
    """
    journal = JournalWriter(run_dir / "journal" / "launcher.jsonl")
    try:
        _run(recipe, storage, run_dir, journal, console)
    except BaseException as error:
        _write_end(journal, error)
        raise
    else:
        journal.write(RunEnd(status="ok", unix_s=time.time()))
    finally:
        journal.close()


def _run(recipe: Recipe, storage: Storage, run_dir: Path, journal: JournalWriter, console: Console) -> None:
    journal.write(
        RunStart(
            role="launcher",
            rank=-1,
            world_size=recipe.launch.ranks,
            node=socket.gethostname(),
            pid=os.getpid(),
            unix_s=time.time(),
            recipe_sha256=recipe.sha256(),
            environment=describe(),
        )
    )
    if storage.listing is not None:
        journal.write(_data_set(storage.listing, "training"))
        if storage.validation is not None:
            journal.write(_data_set(storage.validation, "validation"))
        if missing := storage.listing.missing:
            console.line(f"note: shards are missing, by the others' numbers: {len(missing)}, such as {missing[0]}")
    console.status("making the start cold" if recipe.cache.start == "cold" else "starting")
    storage = make_cold(recipe, storage, run_dir, journal)
    if recipe.cache.start == "cold" and storage.checkpoints is not None:
        page_cache.flush(storage.checkpoints.files_to_read())
    write_witnesses(storage.store, "before", journal)
    first_step = storage.checkpoints.first_step if storage.checkpoints else 0
    if first_step:
        console.line(f"resuming from step {first_step}")
    warmup_steps, steps = recipe.train.steps_from(first_step, run_steps(recipe, storage.num_records))
    env = secrets_of_ranks(storage, run_dir) | {FLUSHED_NODE: socket.gethostname()}
    launcher = launcher_of(recipe, run_dir, env)
    if launcher.kind != "local" and (storage.index or storage.validation_index):
        raise EnvironmentUnfit(
            "a set without a manifest cannot be shared by ranks on other hosts: its index is here only",
            hint="pack it with `drawbar data pack`, which writes a manifest, or have as many shards as ranks",
        )
    process = LauncherProcess(launcher.name, launcher.command, launcher.job.env, run_dir)
    nodes: set[str] = set()
    lost: dict[str, str] = {}
    try:
        try:
            watch(process, recipe, run_dir, console, nodes, warmup_steps=warmup_steps, steps=steps)
        finally:
            lost = _bring_home(launcher, nodes, console)
    except RanksFailed:
        if lost and not nodes:
            # The launcher's own words on it fill a screen.
            raise EnvironmentUnfit(
                "no rank started; no answer from " + ", ".join(f"{host} ({why})" for host, why in lost.items()),
                hint="can each host be reached by name from here without a password?",
            ) from None
        raise
    write_witnesses(storage.store, "after", journal)


def _bring_home(launcher: Launcher, nodes: set[str], console: Console) -> dict[str, str]:
    """Fetches journals that are not here, from the recipe's hosts, or from `nodes`, which were heard of.

    Returns the hosts that sent none, and why.
    """
    if launcher.kind == "local":
        return {}
    here = launcher.job.run_dir / "journal"
    if all((here / f"rank-{rank:05d}.jsonl").exists() for rank in range(launcher.job.launch.ranks)):
        return {}
    console.status("fetching the journals of the other hosts")
    lost = launcher.fetch(launcher.hosts or sorted(nodes))
    for host, why in lost.items():
        console.line(f"note: no journal comes home from {host}: {why}")
    return lost


def secrets_of_ranks(storage: Storage, folder: Path) -> dict[str, str]:
    """This environment with keys, addresses and the way to the index, which is written to `folder`: what no command
    line may show or hold."""
    env = dict(os.environ)
    if storage.credentials is not None:
        env = storage.credentials.added_to(env) | {EMBEDDED_ENDPOINTS: ",".join(storage.endpoints)}
    if storage.checkpoints is not None:
        env = storage.checkpoints.added_to(env)
    for index, name, variable in (
        (storage.index, INDEX_NAME, INDEX_VARIABLE),
        (storage.validation_index, EVAL_INDEX_NAME, EVAL_INDEX_VARIABLE),
    ):
        if index is not None:
            path = (folder / name).resolve()
            path.write_text(index.dumps())
            env[variable] = str(path)
    return env


def _data_set(listing: Listing, role: str) -> DataSet:
    return DataSet(
        role=role,
        shards=len(listing.shards),
        size_bytes=listing.size_bytes,
        records=listing.num_records,
        manifest=listing.manifest is not None,
        missing=len(listing.missing),
        first_missing=listing.missing[0] if listing.missing else "",
        ignored=len(listing.ignored),
    )


@contextmanager
def new_run_dir(run_dir: Path) -> Iterator[None]:
    """Makes the folder, or takes an empty one; a folder that was made here and is still empty at the end goes again.

    Raises InputError where it holds something already or cannot be written.
    """
    is_new = not run_dir.exists()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if any(run_dir.iterdir()):
            raise InputError(
                f"output folder is not empty: {run_dir}", hint="a run never overwrites another: choose a new folder"
            )
        if not os.access(run_dir, os.W_OK | os.X_OK):
            raise InputError(f"cannot write output folder {run_dir}: permission denied")
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"output folder is a file: {run_dir}") from None
    except OSError as error:
        raise InputError(f"cannot write output folder {run_dir}: {error.strerror}") from None
    try:
        yield
    finally:
        if is_new and not any(run_dir.iterdir()):
            run_dir.rmdir()


def check_storage(recipe: Recipe, status: Callable[[str], None] = lambda text: None) -> Storage:
    """Finds store, credentials and shards; every endpoint that a rank will use must answer and show the same shards.

    Fewer shards than ranks without a manifest are read through here, and indexed, unless that was done before; so is
    any set without one whose records must be counted.

    Raises InputError or EnvironmentUnfit naming the endpoint, bucket or shard; DataError for a damaged one; RecipeError
    where epochs and evaluations do not fit the sets.
    """
    check_command(recipe.cache.storage_flush_command)
    if recipe.input.source == "constant":
        _check_schedule(recipe, None)
        return Storage(endpoints=[], credentials=None, store=None, listing=None)
    found = _find_storage(recipe)
    assert found.listing is not None  # noqa: S101
    if found.listing.manifest is not None:
        _check_fits(recipe, recipe.data.url, found.listing.manifest)
    counted = recipe.epochs > 0 or bool(recipe.data.eval_url and not recipe.eval.every_steps)
    if found.listing.manifest is None and (counted or len(found.listing.shards) < recipe.launch.ranks):
        status("indexing the shards: they have no manifest, and ranks must share them, or records must be counted")
        index = _index(recipe, recipe.data.url, found, found.listing)
        if index is not None:
            found = replace(found, listing=index.apply(found.listing), index=index)
    assert found.listing is not None  # noqa: S101
    _check_schedule(recipe, found.listing.num_records)
    check_plan(found.listing.shards, world_size=recipe.launch.ranks, batch_size=recipe.train.batch_size)
    EvalPlan.of(recipe, found.listing.num_records)
    return _with_validation(recipe, found, status) if recipe.data.eval_url else found


def _check_schedule(recipe: Recipe, num_records: int | None) -> None:
    """Raises RecipeError before ranks are started, as each of them would."""
    learning_rate(recipe, total_steps=run_steps(recipe, num_records), num_records=num_records)


def _with_validation(recipe: Recipe, storage: Storage, status: Callable[[str], None]) -> Storage:
    url = recipe.data.eval_url
    try:
        listing = _list_everywhere(recipe, url, storage.endpoints, storage.credentials)
        if listing.manifest is not None:
            _check_fits(recipe, url, listing.manifest)
    except DrawbarError as error:
        hint = error.hint.replace("data.url", "data.eval_url") if error.hint else None
        raise type(error)(f"validation set (data.eval_url): {error.message}", hint=hint) from error
    if listing.manifest is not None:
        trained = storage.listing.manifest if storage.listing else None
        if trained is not None and trained.labels != listing.manifest.labels:
            raise InputError(
                f"{recipe.data.url} and {url} do not number the same classes alike, by their manifests",
                hint="pack both from folders with the same classes, or with one list of labels",
            )
        return replace(storage, validation=listing)
    status("indexing the validation shards: they have no manifest, and their images must be counted")
    index = _index(recipe, url, storage, listing)
    return replace(storage, validation=index.apply(listing) if index else listing, validation_index=index)


def _check_fits(recipe: Recipe, url: str, manifest: Manifest) -> None:
    """Says before ranks are started what each record would say in them."""
    is_detector = recipe.model.name in DETECTORS
    if manifest.record_schema == "coco" and not is_detector:
        raise InputError(
            f"{url} holds records for object detection; model {recipe.model.name} needs one label an image",
            hint="a set of `drawbar data pack imagenet` or `folder`, or model.name = " + " or ".join(DETECTORS),
        )
    if manifest.record_schema != "coco" and is_detector:
        raise InputError(
            f"{url} holds images with one label each; model {recipe.model.name} needs objects with boxes",
            hint="a set of `drawbar data pack coco`",
        )
    if recipe.model.name == MASK_RCNN and not manifest.notes.get("masks", True):
        raise InputError(
            f"{url} was packed without masks; model {recipe.model.name} needs them",
            hint="pack the set without --no-masks",
        )
    if manifest.num_classes > recipe.data.num_classes:
        raise InputError(
            f"the set has {manifest.num_classes} classes, data.num_classes is {recipe.data.num_classes}",
            hint=f"--set data.num_classes={manifest.num_classes}",
        )


def _find_storage(recipe: Recipe) -> Storage:
    if not parse_url(recipe.data.url).on_s3:
        listing = _list_everywhere(recipe, recipe.data.url, [], None)
        return Storage(endpoints=[], credentials=None, store=None, listing=listing)
    endpoints, credentials, store = addresses_and_keys(recipe)
    listing = _list_everywhere(recipe, recipe.data.url, endpoints, credentials)
    return Storage(endpoints=endpoints, credentials=credentials, store=store, listing=listing)


def _list_everywhere(recipe: Recipe, url: str, endpoints: list[str], credentials: Credentials | None) -> Listing:
    """What lies under `url`, the same through every endpoint that a rank will use; without endpoints, as it is."""
    settings = recipe.storage
    if not endpoints:
        return list_at(recipe, url, None, None)
    used = endpoints[: recipe.launch.ranks] if settings.policy == "rank" else endpoints
    listings = [list_at(recipe, url, endpoint, credentials) for endpoint in used]
    for endpoint, listing in zip(used, listings, strict=True):
        if listing.sha256 != listings[0].sha256:
            raise EnvironmentUnfit(f"endpoints show different data: {endpoints[0]} and {endpoint} under {url}")
        _check_versions(settings, listings[0], listing, f"{endpoints[0]} and {endpoint}")
    return listings[0]


def addresses_and_keys(recipe: Recipe) -> tuple[list[str], Credentials, embedded.EmbeddedStore | None]:
    """The endpoints that the recipe names, the keys that go with them, and the store where it is ours."""
    named = recipe.storage.endpoints
    if named == "embedded":
        store = embedded.find(embedded_dir(recipe))
        keys = Credentials(access_key_id=store.access_key_id, secret_access_key=store.secret_access_key)
        return list(store.endpoints), keys, store
    endpoints = [environment_endpoint()] if isinstance(named, str) else list(named)
    return endpoints, Credentials.from_environment(), None


def _check_versions(settings: StorageSettings, first: Listing, other: Listing, where: str) -> None:
    for mine, theirs in zip(first.shards, other.shards, strict=True):
        if settings.check_version and mine.e_tag != theirs.e_tag:
            raise EnvironmentUnfit(
                f"endpoints show different versions of {mine.key}: {where}",
                hint="storage.check_version = false, where they are doors to separate copies",
            )


def _index(recipe: Recipe, url: str, storage: Storage, listing: Listing) -> ShardIndex | None:
    """Of the shards of a set without a manifest; None where one is compressed."""
    folder, _ = split_pattern(url)
    endpoint = storage.endpoints[0] if storage.endpoints else None
    place = open_place(folder, endpoint, storage.credentials, recipe.storage)
    reader = CountedReader(place, recipe.storage, _uncounted)
    return find_or_scan(
        url,
        listing,
        reader.get,
        window_bytes=_FILE_WINDOW_BYTES
        if parse_url(folder).is_folder
        else recipe.storage.request_bytes or _SCAN_REQUEST_BYTES,
        threads=recipe.storage.read_ahead or _SCAN_THREADS,
    )


def _uncounted(request: Request) -> None:
    """What is read before the run is told by the journal's `cache` event, as a sum."""


def reserve(storage: Storage) -> AbstractContextManager[None]:
    """Keeps the embedded store, where the run reads from it, for this run alone. Raises EnvironmentUnfit."""
    return embedded.reserved(storage.store.directory) if storage.store else nullcontext()


def list_at(recipe: Recipe, url: str, endpoint: str | None, credentials: Credentials | None) -> Listing:
    folder, pattern = split_pattern(url)
    return list_place(open_place(folder, endpoint, credentials, recipe.storage), folder, pattern=pattern)


def embedded_dir(recipe: Recipe) -> Path:
    return Path(recipe.storage.embedded_dir) if recipe.storage.embedded_dir else embedded.DEFAULT_DIRECTORY


def write_witnesses(store: embedded.EmbeddedStore | None, when: str, journal: JournalWriter) -> None:
    if store is None:
        return
    silent_ok = when == "after"
    starts = store.started_unix_s(silent_ok=silent_ok)
    for endpoint, count in settled_counts(store, silent_ok=silent_ok).items():
        since = starts.get(endpoint, 0.0)
        journal.write(Witness(when=when, source="gateway", target=endpoint, count_bytes=count, since_unix_s=since))
    journal.write(Witness(when=when, source="volume", target="embedded store", count_bytes=store.disk_read_bytes()))


def settled_counts(store: embedded.EmbeddedStore, *, silent_ok: bool, deadline_s: float = 5.0) -> dict[str, int]:
    """The gateways' counts once they stand still: a gateway counts a body a moment after the client has it.

    After a run one that no longer answers is left out (`silent_ok`): its witness is missing, and the result says so.
    """
    end_t = time.monotonic() + deadline_s
    counts = store.sent_bytes(silent_ok=silent_ok)
    while True:
        time.sleep(0.2)
        before, counts = counts, store.sent_bytes(silent_ok=silent_ok)
        if counts == before or time.monotonic() > end_t:
            return counts


def _write_end(journal: JournalWriter, error: BaseException) -> None:
    status = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
    journal.write(
        Error(
            type=type(error).__name__,
            message=str(error) or type(error).__name__,
            hint=(error.hint or "") if isinstance(error, DrawbarError) else "",
            exit_code=error.exit_code if isinstance(error, DrawbarError) else 4,
            phase="launcher",
            # A rank's own word on why it failed comes first; ours only repeats that one did.
            secondary=isinstance(error, RanksFailed),
        )
    )
    journal.write(RunEnd(status=status, unix_s=time.time()))
