"""The journal: typed events, an append-only writer, a tolerant reader. Only here running and judging meet.

A run directory holds `journal/rank-00000.jsonl` (one per rank), `journal/host-<node>.jsonl` (counters, once a second)
and `journal/launcher.jsonl` (what the starting process saw). Each line is one JSON object: `event` names the type, the
other keys are that type's fields. Raw samples only: nothing here is averaged, dropped or judged.

Times named `*_t` or `t` are seconds on the writer's own monotonic clock (`time.perf_counter`); a `clock` event carries
that clock's offset to rank 0. Durations are named `*_s`, byte counts `*_bytes`.

Schema history: 1 = first.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from drawbar.errors import EnvironmentUnfit, InputError

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Event:
    name: ClassVar[str]
    t: float = field(default_factory=time.perf_counter)
    """Seconds on the writer's monotonic clock."""


@dataclass(frozen=True, kw_only=True)
class RunStart(Event):
    """First line of every rank's and the launcher's journal: who writes, with what."""

    name: ClassVar[str] = "run_start"
    schema: int = SCHEMA
    role: str
    """`rank` or `launcher`."""
    rank: int
    """-1 for the launcher."""
    local_rank: int = -1
    world_size: int
    node: str
    pid: int
    unix_s: float
    recipe_sha256: str
    dataset_sha256: str = ""
    """Of the shard list and index this rank sees; equal on all ranks or the run ends."""
    endpoint: str = ""
    """The endpoint that policy `rank` gave this rank; empty where a request may go to any."""
    environment: dict[str, Any]
    """Versions, device, CPU model, threads, allocator settings: see `launch/environment.py`."""


@dataclass(frozen=True, kw_only=True)
class Clock(Event):
    """This rank's clock against rank 0's: rank-0 time = this rank's time + offset_s."""

    name: ClassVar[str] = "clock"
    when: str
    """`start` or `end`."""
    offset_s: float
    uncertainty_s: float
    """Half the smallest round trip seen."""


@dataclass(frozen=True, kw_only=True)
class DataSet(Event):
    """What the launcher found under `data.url`, and of `data.eval_url`. Which ranks see the same is told by
    `RunStart.dataset_sha256`."""

    name: ClassVar[str] = "data_set"
    role: str = "training"
    """Or `validation`."""
    shards: int
    size_bytes: int
    records: int | None = None
    """None: not known without reading, as there is neither a manifest nor an index."""
    manifest: bool
    missing: int = 0
    """Shards that the others' numbers say there should be."""
    first_missing: str = ""
    ignored: int = 0
    """Objects that look like shards and are not in the manifest."""


@dataclass(frozen=True, kw_only=True)
class Cache(Event):
    """What was done on one host to make the start cold, and what can be shown for it. By the launcher, and by the
    first rank of each host that it did not flush."""

    name: ClassVar[str] = "cache"
    node: str = ""
    """Host on which it was done; empty: the writer's."""
    wanted: str
    """`cold` or `any`."""
    method: str
    """In words: what was restarted or flushed."""
    resident_fraction: float | None = None
    """Share of the set's files, or of the store's volume files, in the page cache after the flush (mincore); None: not
    measurable."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class StorageFlush(Event):
    """The user's own command for the storage side has ended, or was stopped. What it did cannot be seen from here."""

    name: ClassVar[str] = "storage_flush"
    command: list[str]
    exit_code: int | None
    """Negative: the signal that ended it; None: it took too long and was stopped."""
    duration_s: float
    log: str
    """What it printed, below the run directory."""


@dataclass(frozen=True, kw_only=True)
class Witness(Event):
    """An outside count, read before the first and after the last rank: what the other side says was served."""

    name: ClassVar[str] = "witness"
    when: str
    """`before` or `after`."""
    source: str
    """`gateway` (sent bytes by its Prometheus metric) or `volume` (bytes its process really read from disk)."""
    target: str
    """Endpoint URL, or the volume server's name."""
    count_bytes: int
    since_unix_s: float = 0.0
    """When the counting process was started; 0: not known."""


@dataclass(frozen=True, kw_only=True)
class Request(Event):
    """One GET that ended, well or not. `t` is its end."""

    name: ClassVar[str] = "request"
    endpoint: str
    key: str
    kind: str
    """`metadata` (manifest), `data` (a range of a training shard), `eval` (of a validation shard), `probe` (one byte,
    to see whether an endpoint set aside is well again), `checkpoint` (a file of one)."""
    offset: int
    wanted_bytes: int
    got_bytes: int
    first_byte_s: float
    """From the request to the response headers."""
    total_s: float
    attempt: int
    """0 = first try."""
    error: str = ""
    status: int = 0
    """HTTP status of a request that was refused; 0 where it was not, or got no answer."""
    reread: bool = False
    """Bytes asked for once more, as those that had come were damaged."""


@dataclass(frozen=True, kw_only=True)
class EndpointChange(Event):
    """What this rank made of an endpoint."""

    name: ClassVar[str] = "endpoint_change"
    endpoint: str
    change: str
    """`set_aside` (asked no more until it is well), `returned` (well again), `corrupt` (it sent bytes of a
    record that is damaged)."""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelBuilt(Event):
    """What this rank trains, or makes as if it did."""

    name: ClassVar[str] = "model_built"
    model: str
    parameters: int
    """Those that are trained."""
    gradient_bytes: int
    """That the rank hands to the exchange in each step; 0: nothing is exchanged."""
    emulated_step_s: float = 0.0
    """How long each step is made to take; 0: the model is really trained."""


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """One optimizer update on this rank. Spans are consecutive and make up the step."""

    name: ClassVar[str] = "step"
    step: int
    """From 0, warm-up included."""
    warmup: bool
    start_t: float
    end_t: float
    data_wait_s: float
    """Waiting for the next batch."""
    copy_s: float
    """Handing the batch to the device and normalising it."""
    compute_s: float
    """Forward and backward, until the last gradient of this rank is ready; what is exchanged meanwhile costs no time of
    its own."""
    exchange_s: float = 0.0
    """From then until the gradients of all ranks are averaged: waiting for slower ranks is in it."""
    optimizer_s: float
    samples: int
    """Samples this rank trained in this step."""
    loss: float | None
    """This rank's; None where it was not fetched from the device."""
    learning_rate: float | None = None
    """Of weights, in this update."""
    tags: list[str] = field(default_factory=list)
    """Odd steps: `gc`, `epoch_start`, `update_skipped` (fp16's gradients overflowed), `compiled`, and
    `after_checkpoint`, `after_evaluation` or `after_summary`: there was a pause before it, which is no step's time."""

    @property
    def after_pause(self) -> bool:
        return any(tag.startswith("after_") for tag in self.tags)


@dataclass(frozen=True, kw_only=True)
class CheckpointWrite(Event):
    """A checkpoint that became whole; by rank 0, which writes for all. `t` is its end."""

    name: ClassVar[str] = "checkpoint_write"
    step: int
    """Steps done when its state was taken."""
    target: str
    """Its place."""
    size_bytes: int
    pause_s: float
    """All ranks stood still: waiting for the write before, meeting, and the copy."""
    waited_s: float
    """Of the pause: until the write before was done."""
    copy_s: float
    """Of the pause: the copy of the state to host memory."""
    write_s: float
    """From the end of the copy until it was whole, while training went on; its digests among it."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRead(Event):
    """This rank goes on from a checkpoint."""

    name: ClassVar[str] = "checkpoint_read"
    step: int
    """Steps done before, which is the number of this run's first step."""
    source: str
    size_bytes: int
    read_s: float
    """All files, and their digests."""
    load_s: float
    """Into model, optimizer and the rest."""
    differences: list[str]
    """Why the losses may not be those of an uninterrupted run, each in words."""


@dataclass(frozen=True, kw_only=True)
class WeightsRead(Event):
    """Weights from `model.weights`, on this rank."""

    name: ClassVar[str] = "weights_read"
    source: str
    size_bytes: int
    read_s: float
    loaded: int
    """Tensors taken."""
    head: list[str]
    """Of the classifier, left random as the file has it for another number of classes, or not at all."""
    missing: list[str]
    """Buffers that the file does not have."""
    unexpected: list[str]
    """In the file, not in the model."""


@dataclass(frozen=True, kw_only=True)
class BadRecord(Event):
    """A record that gave no sample. Each is told once, and at most a hundred by a rank; `InputTotals.bad_images` counts
    all of them, each time."""

    name: ClassVar[str] = "bad_record"
    key: str
    """Of its shard."""
    offset: int
    epoch: int
    reason: str
    policy: str
    """`input.on_bad`: what became of it."""


@dataclass(frozen=True, kw_only=True)
class Summary(Event):
    """Rank 0 wrote to TensorBoard's event file after a step; the next step began when it had."""

    name: ClassVar[str] = "summary"
    step: int
    write_s: float


@dataclass(frozen=True, kw_only=True)
class TrainingStart(Event):
    """This rank begins to read the training set: every rank is there, its model is built. Time to quality counts from
    `t`."""

    name: ClassVar[str] = "training_start"
    init_s: float
    """Since the rank's process was started: libraries, the process group, the model."""


@dataclass(frozen=True, kw_only=True)
class Evaluation(Event):
    """All ranks together evaluated the model on the whole validation set, between two steps."""

    name: ClassVar[str] = "evaluation"
    step: int
    """The last one before it."""
    epoch: int
    """Passes over the training set finished, rounded up."""
    start_t: float
    end_t: float
    """Of this rank; at the end it knows the metrics of all."""
    images: int
    """Evaluated by this rank."""
    all_images: int
    """By all of them."""
    set_images: int | None
    """In the validation set; None: its records are not known."""
    data_wait_s: float
    """Of this rank, waiting for batches."""
    metrics: dict[str, float]
    """Over all images, the same on every rank: `top1`, `top5`, `loss`, `box_ap`, `mask_ap`."""


@dataclass(frozen=True, kw_only=True)
class InputTotals(Event):
    """What the loader of this rank did from start to drain; written once, after the last step."""

    name: ClassVar[str] = "input_totals"
    planned_bytes: int
    """Sum of the byte ranges that the plan asked for and that were requested."""
    received_bytes: int
    """Bodies received for them, retries included."""
    trained_bytes: int
    """Framed records whose samples were trained."""
    discarded_bytes: int
    """Received and never trained: read-ahead, decoded but unused, failed tries."""
    decoded_images: int
    trained_images: int
    bad_images: int
    """Records met that gave no sample, those decoded ahead and never trained included."""
    epochs: float
    """Passes over the training set that the requests amount to."""
    replaced_images: int = 0
    """Among `trained_images`: others of their batch trained a second time, in the place of records without a sample."""
    padded_images: int = 0
    """Trained a second time in their epoch, to fill its last batch; among `trained_images`."""
    inflated_bytes: int = 0
    """Bytes that decompressing added (compressed shards only; below 0 where compressing had made them more):
    received + inflated = trained + discarded."""


@dataclass(frozen=True, kw_only=True)
class InputReport(Event):
    """How the loader of this rank read; written once, after the last step."""

    name: ClassVar[str] = "input_report"
    lanes: int
    """Of this rank; 1 where records were not known."""
    request_bytes: int
    """Largest GET, at the end."""
    read_ahead: int
    """At the end."""
    tuned: list[str]
    """Which of the two were found out during the run, and not given by the recipe."""
    first_batch_s: float
    """From making the loader to the first decoded batch; 0: there was none."""
    fallback_images: int = 0
    """Decoded on the CPU though the recipe says GPU, which did not take them."""


@dataclass(frozen=True, kw_only=True)
class InputStage(Event):
    """One stage of a rank's input over the whole run. Seconds are summed over its threads."""

    name: ClassVar[str] = "input_stage"
    stage: str
    """`fetch` (GETs), `split` (framing and CRCs), `shuffle`, `decode` (and crop), `batch` (assembly)."""
    threads: int
    """Of the stage, at the end. Split, shuffle and batch share one, and what blocks it is told of all three."""
    busy_s: float
    wait_in_s: float
    """Blocked because nothing came in."""
    wait_out_s: float
    """Blocked because what it had made, or would make, was not taken."""
    items: int
    """GETs; records; records; images; images."""
    bytes: int
    queue_capacity: int
    """Of the queue behind it: bodies, -, records held, -, batches; 0: none."""
    queue_mean: float
    """Finished items in it, on average, when somebody came to take one."""


@dataclass(frozen=True, kw_only=True)
class InputSample(Event):
    """Where a rank's input stands: about once a second, as its loop asks for a batch or waits for one, so once a step
    where steps last longer. By stage; its `InputStage` has the same counters at the end."""

    name: ClassVar[str] = "input_sample"
    busy_s: dict[str, float]
    """Since the loader began, summed over the stage's threads, GETs and waits under way included."""
    wait_in_s: dict[str, float]
    wait_out_s: dict[str, float]
    queued: dict[str, int]
    """Finished items in the queue behind the stage, now: bodies, records, batches."""
    queue_capacity: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Host(Event):
    """Counters of one host, once a second. Byte and time counters are cumulative since boot."""

    name: ClassVar[str] = "host"
    node: str
    cpu_user_s: float
    cpu_system_s: float
    cpu_idle_s: float
    cpu_iowait_s: float
    cpu_steal_s: float
    num_cpus: int
    memory_used_bytes: int
    memory_available_bytes: int
    page_cache_bytes: int
    disk_read_bytes: int
    disk_write_bytes: int
    nic_received_bytes: dict[str, int]
    nic_sent_bytes: dict[str, int]
    rank_rss_bytes: dict[str, int]
    """Resident size of each rank process on this host, keyed by local rank."""
    gpus: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Error(Event):
    """Why this writer stopped. Errors end a run; there is no error that is only logged."""

    name: ClassVar[str] = "error"
    type: str
    message: str
    hint: str = ""
    exit_code: int
    phase: str
    """What the rank was doing: `start`, `plan`, `model`, `step 17`, …"""
    secondary: bool = False
    """True when this rank only noticed that another one is gone."""
    traceback: str = ""


@dataclass(frozen=True, kw_only=True)
class RunEnd(Event):
    """Last line. A rank's journal without one belongs to a process that was killed."""

    name: ClassVar[str] = "run_end"
    status: str
    """`ok`, `failed`, `interrupted`, `terminated` (another rank's failure made the launcher stop this one)."""
    unix_s: float


EVENTS: dict[str, type[Event]] = {
    cls.name: cls
    for cls in (
        RunStart,
        Clock,
        DataSet,
        Cache,
        StorageFlush,
        Witness,
        Request,
        EndpointChange,
        ModelBuilt,
        Step,
        BadRecord,
        Summary,
        CheckpointWrite,
        CheckpointRead,
        WeightsRead,
        TrainingStart,
        Evaluation,
        InputTotals,
        InputReport,
        InputStage,
        InputSample,
        Host,
        Error,
        RunEnd,
    )
}

# What a field may hold, by its annotation. Made once, not per line: a long run's journal has hundreds of thousands.
_INT = (-(2**63), 2**63 - 1)
_FLOAT = (-1e15, 1e15)
"""Far beyond any time, and small enough that no sum of them overflows; NaN lies in no range."""
_MAX_DEPTH = 16
"""Of nested values: what is read here is later walked by recursive functions."""


def _check_strings(values: Any) -> None:
    if not all(type(value) is str for value in values):
        raise ValueError("expected strings")


def _check_numbers(values: dict[str, Any], types: tuple[type, ...], low: float, high: float) -> None:
    for key, value in values.items():
        if type(value) not in types or not low <= value <= high:
            raise ValueError(f"[{key!r}] is {_short(value)}: expected a number in range")


def _check_rows(rows: list[Any]) -> None:
    for row in rows:
        if type(row) is not dict:
            raise ValueError("expected objects")
        _check_numbers(row, (int, float), *_FLOAT)


def _check_loss(value: float | None) -> None:
    """Anything an fp32 can be."""
    if value is not None and 1e39 < abs(value) != math.inf:
        raise ValueError(f"{_short(value)} is out of range")


def _check_depth(tree: Any, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deep")
    if isinstance(tree, dict | list):
        for item in tree.values() if isinstance(tree, dict) else tree:
            _check_depth(item, depth + 1)


_Check = tuple[tuple[type, ...], tuple[float, float] | None, Callable[[Any], None] | None]
"""(types, range of a number, what else must hold)"""
_CHECKS: dict[str, _Check] = {
    "str": ((str,), None, None),
    "bool": ((bool,), None, None),
    "int": ((int,), _INT, None),
    "int | None": ((int, type(None)), _INT, None),
    "float": ((float, int), _FLOAT, None),
    "float | None": ((float, int, type(None)), _FLOAT, None),
    "list[str]": ((list,), None, _check_strings),
    "dict[str, Any]": ((dict,), None, _check_depth),
    "dict[str, int]": ((dict,), None, lambda values: _check_numbers(values, (int,), *_INT)),
    "dict[str, float]": ((dict,), None, lambda values: _check_numbers(values, (int, float), *_FLOAT)),
    "list[dict[str, float]]": ((list,), None, _check_rows),
}


def _checks_of(cls: type[Event]) -> dict[str, _Check]:
    checks = {f.name: _CHECKS[str(f.type)] for f in dataclasses.fields(cls)}
    if cls is Step:
        # A rank writes a loss that is not a number, and then ends; a rule of its own speaks of it.
        checks["loss"] = (checks["loss"][0], None, _check_loss)
    return checks


_FIELDS: dict[type[Event], dict[str, _Check]] = {cls: _checks_of(cls) for cls in EVENTS.values()}


class JournalWriter:
    """Appends events to one file, one `write` each, so that a killed process loses at most a torn last line.

    Thread-safe. `write` raises EnvironmentUnfit where it cannot (disk full). After `close` further events are dropped:
    a daemon thread may outlive the journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()

    def write(self, event: Event) -> None:
        row = {"event": event.name, **dataclasses.asdict(event)}
        line = json.dumps(row, separators=(",", ":"), allow_nan=True).encode() + b"\n"
        with self._lock:
            if self._fd is None:
                return
            try:
                # A nearly full disk can take half a line: go on until it is whole or the error is raised.
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError as error:
                raise EnvironmentUnfit(f"cannot write journal {self.path}: {error.strerror}") from None

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


@dataclass(kw_only=True)
class RankJournal:
    """All events of one file, in order, and what could not be read."""

    path: Path
    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Torn or unreadable lines and unknown events, each in words; empty for a sound file."""

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def first(self, kind: type[Any]) -> Any | None:
        return next((event for event in self.events if isinstance(event, kind)), None)


def parse_line(line: bytes) -> Event:
    """One journal line to its event: known, whole, and every field of its type and finite. Raises ValueError with the
    reason."""
    try:
        row = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(row, dict) or "event" not in row:
        raise ValueError("no event name")
    name = row.pop("event")
    cls = EVENTS.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError("unknown event")
    known = _FIELDS[cls]
    if not row.keys() <= known.keys():
        row = {key: row[key] for key in row.keys() & known.keys()}
    for key, value in row.items():
        types, limits, check = known[key]
        if type(value) not in types:
            raise ValueError(f"{key} is {_short(value)}: expected {_words(types)}")
        if limits is not None and value is not None and not limits[0] <= value <= limits[1]:
            raise ValueError(f"{key} is {_short(value)}: out of range")
        if check is not None:
            try:
                check(value)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
    if "t" not in row:
        # Its default is the clock of whoever reads.
        raise ValueError("missing field: t")
    try:
        return cls(**row)
    except TypeError as error:
        raise ValueError(f"missing field: {error}") from None


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _words(types: tuple[type, ...]) -> str:
    if types[0] in (int, float):
        return "a number"
    return {str: "text", bool: "true or false", list: "a list", dict: "an object"}[types[0]]


def read_journal(path: Path) -> RankJournal:
    """Reads one file. What cannot be read, and a torn last line, the trace of a killed writer, is reported and not
    fatal."""
    journal = RankJournal(path=path)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    journal.problems.append(f"{path.name}:{number}: torn last line")
                    continue
                try:
                    journal.events.append(parse_line(line))
                except ValueError as error:
                    journal.problems.append(f"{path.name}:{number}: {error}")
    except OSError as error:
        journal.problems.append(f"{path.name}: cannot be read: {error.strerror}")
    start = journal.first(RunStart)
    if start is not None and start.schema != SCHEMA:
        journal.problems.append(f"{path.name}: journal schema {start.schema}, this Drawbar reads {SCHEMA}")
    return journal


@dataclass(frozen=True, kw_only=True)
class RunJournal:
    """All journals of one run directory."""

    ranks: list[RankJournal]
    launcher: RankJournal | None
    hosts: list[RankJournal]

    def problems(self) -> list[str]:
        return [problem for journal in self.all() for problem in journal.problems]

    def all(self) -> Iterator[RankJournal]:
        yield from self.ranks
        yield from self.hosts
        if self.launcher is not None:
            yield self.launcher


def read_run(run_dir: Path) -> RunJournal:
    """Reads every journal below `run_dir`. Raises InputError where there is none."""
    folder = run_dir / "journal"
    if not folder.is_dir():
        raise InputError(f"no run directory: {run_dir}", hint="give the folder that `drawbar run` wrote")

    def read(paths: Iterable[Path]) -> list[RankJournal]:
        return [read_journal(path) for path in sorted(paths)]

    launcher = folder / "launcher.jsonl"
    return RunJournal(
        ranks=read(folder.glob("rank-*.jsonl")),
        launcher=read_journal(launcher) if launcher.exists() else None,
        hosts=read(folder.glob("host-*.jsonl")),
    )
