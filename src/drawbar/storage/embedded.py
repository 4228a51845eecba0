"""The embedded S3 store: SeaweedFS on loopback, one gateway per endpoint, so that a run needs no foreign store.

Owns a store's folder: `store.json` (what runs, 0600), `s3.json` (the credentials, 0600), `data/` (volumes and names),
one log per process. One server process holds master, volumes and filer; each endpoint is a gateway process of its own.
They are detached and outlive the command that started them. SeaweedFS itself is `seaweed`'s matter, and how objects
are read that of `stores`.

Everything listens on 127.0.0.1 only. The endpoints ask for credentials; the server's own ports (master, volumes, filer)
do not: any user of this machine can reach them, so keep nothing secret in an embedded store. Nothing is looked up or
reported outside the machine. With less than 256 MiB of free disk a store turns read-only, and an empty one does not
start below twice that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import obstore
from obstore.store import S3Store

from drawbar.errors import EnvironmentUnfit, InputError
from drawbar.plural import plural
from drawbar.storage import page_cache, seaweed
from drawbar.storage.hold import hold

_STATE_HOME = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))
DEFAULT_DIRECTORY = _STATE_HOME / "drawbar" / "s3"

Progress = Callable[[str], None]

_GRACE_S = 5.0
_LOCK_DEADLINE_S = 90.0
_COLD_FRACTION = 0.01
"""Above this share of resident pages a restart is not called cold."""
_STARTED = re.compile(r"^process_start_time_seconds ([0-9.e+]+)$", re.MULTILINE)
_SENT = re.compile(r"^SeaweedFS_s3_bucket_traffic_sent_bytes_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class EmbeddedStore:
    """A running store."""

    directory: Path
    endpoints: list[str]
    """`http://127.0.0.1:PORT`, one per gateway, in a fixed order."""
    metrics_urls: list[str]
    """Prometheus metrics of the gateways, in the same order."""
    access_key_id: str
    secret_access_key: str = field(repr=False)
    server_pid: int
    gateway_pids: list[int]
    version: str

    def sent_bytes(self, *, silent_ok: bool = False) -> dict[str, int]:
        """Bytes of GET bodies that each endpoint has sent since it was started, all buckets summed.

        Exact, but a body is counted up to some milliseconds after the client has its last byte: after the last GET
        ask again until the count stands still.

        Raises EnvironmentUnfit where a gateway does not answer; with `silent_ok` that one is left out.
        """
        pages = self._metrics(silent_ok=silent_ok)
        return {endpoint: sum(int(float(value)) for value in _SENT.findall(page)) for endpoint, page in pages.items()}

    def started_unix_s(self, *, silent_ok: bool = False) -> dict[str, float]:
        """When each endpoint's process was started: its count began then. Raises what `sent_bytes` raises."""
        pages = self._metrics(silent_ok=silent_ok)
        return {endpoint: float(_STARTED.findall(page)[0]) for endpoint, page in pages.items() if _STARTED.search(page)}

    def _metrics(self, *, silent_ok: bool) -> dict[str, str]:
        pages: dict[str, str] = {}
        for endpoint, url in zip(self.endpoints, self.metrics_urls, strict=True):
            answer = seaweed.ask("GET", url)
            if answer is None or answer[0] != 200:
                if silent_ok:
                    continue
                raise EnvironmentUnfit(f"no metrics from {url}", hint="drawbar s3 status")
            pages[endpoint] = answer[1].decode()
        return pages

    def disk_read_bytes(self) -> int:
        """Bytes that the server process has had the disk read since it was started.

        Whatever came out of the page cache is not among them. Raises EnvironmentUnfit where the kernel does not say.
        """
        path = Path(f"/proc/{self.server_pid}/io")
        try:
            return int(path.read_text().split("\nread_bytes: ")[1].split("\n")[0])
        except (OSError, IndexError) as error:
            raise EnvironmentUnfit(f"cannot read the server's disk counter, {path}: {error}") from None

    def volume_files(self) -> list[Path]:
        """The files that hold the objects' bytes (.dat) and where in them each lies (.idx)."""
        return _volume_files(self.directory)


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    role: str
    """`server` or `gateway`."""
    endpoint: str
    """Empty for the server."""
    pid: int
    """0: stopped by `down`."""
    port: int
    """S3 port of a gateway, master port of the server."""
    alive: bool
    answering: bool


@dataclass(frozen=True, kw_only=True)
class StoreStatus:
    directory: str
    running: bool
    """All processes are alive and answer."""
    version: str
    stored_bytes: int
    """On disk, deleted objects not yet vacuumed among them."""
    processes: list[ProcessStatus]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class ColdStart:
    method: str
    """In words: what was restarted and flushed."""
    resident_fraction: float | None
    """Share of the volume files in the page cache after the flush; None: not measurable."""
    note: str
    """Why the start may not have been cold; empty where it was."""


@dataclass(kw_only=True)
class _State:
    """What store.json holds."""

    folder: Path
    version: str
    processes: list[seaweed.Process]
    """The server, then the gateways in order."""

    @property
    def server(self) -> seaweed.Process:
        return self.processes[0]

    @property
    def gateways(self) -> list[seaweed.Process]:
        return self.processes[1:]

    def any_alive(self) -> bool:
        return any(process.alive() for process in self.processes)

    def dead(self) -> list[seaweed.Process]:
        return [process for process in self.processes if not process.alive()]

    def save(self) -> None:
        rows = [dataclasses.asdict(process) for process in self.processes]
        text = json.dumps({"schema": 1, "version": self.version, "processes": rows}, indent=1)
        _write_private(self.folder / "store.json", text)


def up(
    directory: Path,
    *,
    num_endpoints: int = 5,
    ports: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> EmbeddedStore:
    """Starts the store in `directory`, or finds it running, or starts what of it has died. Data and keys are kept.

    `ports` are the endpoints' S3 ports; without them those of the last time are used where they are free, else new
    ones. Whatever fails or interrupts it, the processes that this call started are stopped before it raises:
    InputError for settings that cannot be had (a folder not writable, another number of endpoints running),
    EnvironmentUnfit for `weed` missing, a port taken, a disk full, or a process that died during start.
    """
    say = progress or (lambda _line: None)
    _check_wanted(num_endpoints, ports)
    with _locked(_prepare(directory.absolute())) as folder:
        state = _load(folder)
        if state is None or not state.any_alive():
            state = _plan(folder, state, num_endpoints, ports)
        else:
            _check_same(state, num_endpoints, ports)
            if dead := state.dead():
                say(f"the store in {folder} has lost {seaweed.describe(dead)}; repairing it")
            if not state.server.alive():
                # Gateways do not find back to a new server by themselves.
                _stop(state, state.processes)
        missing = state.dead()
        if missing:
            say(f"starting SeaweedFS {state.version}: {', '.join(process.name for process in missing)}")
        _start(state, missing)
        return _running(state)


def find(directory: Path) -> EmbeddedStore:
    """The store that runs in `directory`. Raises EnvironmentUnfit where none does, or not all of one."""
    state = _load(directory.absolute())
    if state is None or not state.any_alive():
        raise _not_running(directory)
    if dead := state.dead():
        raise EnvironmentUnfit(f"the embedded store has lost {seaweed.describe(dead)}", hint=command("up", directory))
    return _running(state)


def status(directory: Path) -> StoreStatus:
    """What runs in `directory`, process by process; nothing, where no store ever was."""
    directory = directory.absolute()
    state = _load(directory)
    processes = [_process_status(process) for process in state.processes] if state else []
    return StoreStatus(
        directory=str(directory),
        running=bool(processes) and all(process.answering for process in processes),
        version=state.version if state else "",
        stored_bytes=sum(path.stat().st_size for path in _volume_files(directory)),
        processes=processes,
    )


def down(directory: Path, *, grace_s: float = _GRACE_S, force: bool = False) -> bool:
    """Stops what of the store is alive and keeps its data; True where something was.

    SIGTERM, then SIGKILL once the volumes are closed, at the latest after `grace_s` seconds. Raises EnvironmentUnfit
    for a process that even so does not go, and where a run reads from the store, unless `force` is set.
    """
    directory = directory.absolute()
    if not (directory / "store.json").exists():
        return False
    with contextlib.nullcontext() if force else reserved(directory), _locked(directory):
        state = _load(directory)
        return state is not None and _stop(state, state.processes, grace_s)


def restart_cold(directory: Path) -> tuple[EmbeddedStore, ColdStart]:
    """Stops the store, puts its volume files out of the page cache, starts it on the same ports.

    The counts of `sent_bytes` and `disk_read_bytes` start anew. Raises EnvironmentUnfit where no store is running, or
    it cannot be started again.
    """
    directory = directory.absolute()
    if not (directory / "store.json").exists():
        raise _not_running(directory)
    with _locked(directory):
        state = _load(directory)
        if state is None or not state.any_alive():
            raise _not_running(directory)
        _stop(state, state.processes)
        files = _volume_files(directory)
        method = f"store restarted; {page_cache.flush(files)}"
        # Before the start: the server reads the .idx files in.
        fraction = page_cache.resident_fraction(files)
        seaweed.require_free(port for process in state.processes for port in process.ports.values())
        _start(state, state.processes)
        return _running(state), ColdStart(method=method, resident_fraction=fraction, note=_warm_note(files, fraction))


def reserved(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Keeps the store for one run: another one would restart it cold under its ranks, or be counted with it.

    Raises EnvironmentUnfit where another run holds it.
    """
    return hold(
        directory / "run.lock",
        f"the embedded store in {directory} is in use by another run",
        "wait for it, or use a store of your own (drawbar s3 up --dir); drawbar s3 down --force stops it",
    )


def ensure_bucket(store: EmbeddedStore, bucket: str) -> None:
    """Creates the bucket where it is missing. Raises InputError for a name that S3 does not allow."""
    client = S3Store(
        bucket,
        endpoint=store.endpoints[0],
        access_key_id=store.access_key_id,
        secret_access_key=store.secret_access_key,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    # obstore has no call for it, but signs any request.
    answer = seaweed.ask("PUT", obstore.sign(client, "PUT", "", timedelta(minutes=5)), timeout_s=30)
    if answer is None:
        raise EnvironmentUnfit(f"{store.endpoints[0]} does not answer", hint="drawbar s3 status")
    code, body = answer
    if code == 200 or b"BucketAlreadyOwnedByYou" in body:
        return
    reason = re.search(rb"<Message>(.*?)</Message>", body)
    text = reason[1].decode() if reason else f"HTTP status {code}"
    raise InputError(f"cannot create bucket {bucket!r}: {text}", hint="3 to 63 of a-z, 0-9, '.' and '-'")


def _check_wanted(num_endpoints: int, ports: Sequence[int] | None) -> None:
    if num_endpoints < 1:
        raise InputError(f"number of endpoints is {num_endpoints}: expected at least 1")
    if ports is None:
        return
    if len(ports) != num_endpoints or len(set(ports)) != len(ports):
        raise InputError(f"ports are {list(ports)}: expected {num_endpoints} different ones, one per endpoint")
    for port in ports:
        if not 1 <= port <= 65535:
            raise InputError(f"port {port} is none: expected 1 to 65535")


def _check_same(state: _State, num_endpoints: int, ports: Sequence[int] | None) -> None:
    running = [process.main_port for process in state.gateways]
    if len(running) != num_endpoints:
        raise InputError(
            f"the store in {state.folder} has {plural(len(running), 'endpoint')}, asked for: {num_endpoints}",
            hint="drawbar s3 down, then up with the other number; its data is kept",
        )
    if ports is not None and list(ports) != running:
        raise InputError(
            f"the store in {state.folder} has the ports {running}, asked for: {list(ports)}",
            hint="drawbar s3 down, then up with the other ports; its data is kept",
        )


def _plan(folder: Path, previous: _State | None, num_endpoints: int, wanted: Sequence[int] | None) -> _State:
    """Gives every process its ports, the last ones where they are free."""
    version = seaweed.version()
    needed = 2 * seaweed.MIN_FREE_BYTES
    if not _volume_files(folder) and (free := shutil.disk_usage(folder).free) < needed:
        raise EnvironmentUnfit(f"{folder} has {free / 1e6:.0f} MB free: expected at least {needed / 1e6:.0f}")
    if wanted is not None:
        seaweed.require_free(wanted)
    if previous is not None and len(previous.gateways) == num_endpoints:
        same = wanted is None or list(wanted) == [process.main_port for process in previous.gateways]
        if same and all(seaweed.is_free(port) for process in previous.processes for port in process.ports.values()):
            previous.version = version
            return previous
    size = len(seaweed.SERVER_PORTS) + num_endpoints * len(seaweed.GATEWAY_PORTS)
    block = iter(seaweed.free_block(size, avoid=wanted or ()))
    processes = [seaweed.Process(name="server", ports={name: next(block) for name in seaweed.SERVER_PORTS})]
    for number in range(num_endpoints):
        ports = {name: next(block) for name in seaweed.GATEWAY_PORTS}
        if wanted is not None:
            ports["port"] = wanted[number]
        processes.append(seaweed.Process(name=f"gateway-{number}", ports=ports))
    return _State(folder=folder, version=version, processes=processes)


def _start(state: _State, processes: list[seaweed.Process]) -> None:
    """Starts `processes` and waits until the whole store answers; stops them again if anything comes between."""
    try:
        for name, text in seaweed.CONFIG_FILES.items():
            _write_private(state.folder / name, text)
        _credentials(state.folder)
        for process in processes:
            with _interrupts_held():
                seaweed.spawn(process, state.server, state.folder)
                # Now, not when all run: if this process is killed, `down` still knows what to stop.
                state.save()
        seaweed.wait_ready(state.processes, state.folder)
    except BaseException:
        _stop(state, processes)
        raise


def _stop(state: _State, processes: list[seaweed.Process], grace_s: float = _GRACE_S) -> bool:
    stopped = seaweed.stop(processes, state.folder, grace_s)
    state.save()
    return stopped


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Puts off Ctrl-C and SIGTERM: between a process's start and its entry in store.json they would orphan it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        held.append(number)

    before = {number: signal.signal(number, hold) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for held_signal, handler in before.items():
            # None: one that was not set from Python and cannot be set from it.
            signal.signal(held_signal, signal.SIG_DFL if handler is None else handler)
        for number in held:
            signal.raise_signal(number)


def _running(state: _State) -> EmbeddedStore:
    key_id, secret = _credentials(state.folder)
    return EmbeddedStore(
        directory=state.folder,
        endpoints=[process.endpoint for process in state.gateways],
        metrics_urls=[process.metrics_url for process in state.gateways],
        access_key_id=key_id,
        secret_access_key=secret,
        server_pid=state.server.pid,
        gateway_pids=[process.pid for process in state.gateways],
        version=state.version,
    )


def _process_status(process: seaweed.Process) -> ProcessStatus:
    alive = process.alive()
    return ProcessStatus(
        role="server" if process.is_server else "gateway",
        endpoint=process.endpoint,
        pid=process.pid,
        port=process.main_port,
        alive=alive,
        answering=alive and process.answers(),
    )


def command(name: str, directory: Path) -> str:
    """What to type to get at the store in `directory`."""
    return f"drawbar s3 {name}" + (f" --dir {shlex.quote(str(directory))}" if directory != DEFAULT_DIRECTORY else "")


def _not_running(directory: Path) -> EnvironmentUnfit:
    return EnvironmentUnfit(f"no embedded store is running in {directory}", hint=command("up", directory))


def _warm_note(files: list[Path], fraction: float | None) -> str:
    if not files:
        return "the store is empty"
    if fraction is None:
        return "the kernel does not tell this user what is in the page cache"
    if fraction > _COLD_FRACTION:
        return f"{fraction:.0%} of the volume files stayed in memory: on tmpfs, or held by another process"
    return ""


def _prepare(directory: Path) -> Path:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / "data").mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {directory}: {error.strerror}", hint="give a folder you may write") from None
    return directory


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[Path]:
    """Holds the folder against another `up`, `down` or `restart_cold`."""
    deadline = time.monotonic() + _LOCK_DEADLINE_S
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context((directory / "lock").open("a"))
        except OSError as error:
            raise InputError(f"cannot write to {directory}: {error.strerror}") from None
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EnvironmentUnfit(f"another drawbar s3 command is at work in {directory}") from None
                time.sleep(0.05)
        yield directory


def _load(directory: Path) -> _State | None:
    path = directory / "store.json"
    try:
        tree = json.loads(path.read_text())
        return _State(
            folder=directory,
            version=str(tree["version"]),
            processes=[seaweed.Process(**row) for row in tree["processes"]],
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise EnvironmentUnfit(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise EnvironmentUnfit(f"{path} is damaged", hint="end its weed processes, then delete that file") from None


def _credentials(directory: Path) -> tuple[str, str]:
    """Key id and secret, made at the first `up` and kept in the file that the gateways read."""
    path = directory / seaweed.CREDENTIALS_FILE
    if not path.exists():
        keys = {"accessKey": f"DRAWBAR{secrets.token_hex(6).upper()}", "secretKey": secrets.token_urlsafe(30)}
        user = {"name": "drawbar", "credentials": [keys], "actions": ["Admin", "Read", "List", "Tagging", "Write"]}
        _write_private(path, json.dumps({"identities": [user]}))
    try:
        keys = json.loads(path.read_text())["identities"][0]["credentials"][0]
        return keys["accessKey"], keys["secretKey"]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        raise EnvironmentUnfit(f"{path} is damaged", hint="delete it; `drawbar s3 up` then makes new keys") from None


def _volume_files(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / "data").glob("*") if path.suffix in (".dat", ".idx"))


def _write_private(path: Path, text: str) -> None:
    """Replaces a file as a whole; from the first moment only its owner can read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)
