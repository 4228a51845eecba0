"""Where a run's bytes come from: one place (an S3 address and bucket, or a folder) and counted reads from it.

Retries are ours: obstore's own are set to 0, because those cannot be counted. Every GET ends up in the journal with
its bytes, its time to the first byte and its error.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import LocalStore, ObjectStore, S3Store

from drawbar.config import Storage
from drawbar.errors import DataError, DrawbarError, EnvironmentUnfit, InputError, RunFailed
from drawbar.journal import Request
from drawbar.storage.urls import parse_url

_STATUS = re.compile(r"status code: (\d{3})")
"""obstore gives the HTTP status of an error only in its words."""
_PERMANENT = (FileNotFoundError, PermissionDeniedError, PreconditionError, UnauthenticatedError)
_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Credentials:
    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)
    region: str = "us-east-1"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Credentials:
        """AWS's variables, as every S3 tool has them. Raises EnvironmentUnfit where the keys are missing."""
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            if not environ.get(name):
                raise EnvironmentUnfit(
                    f"no S3 credentials: {name} is not set", hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                )
        return cls(
            access_key_id=environ["AWS_ACCESS_KEY_ID"],
            secret_access_key=environ["AWS_SECRET_ACCESS_KEY"],
            session_token=environ.get("AWS_SESSION_TOKEN", ""),
            region=environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1",
        )

    def to_environment(self) -> dict[str, str]:
        """How they reach the ranks: by environment, never on a command line."""
        values = {
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_REGION": self.region,
        }
        return values | ({"AWS_SESSION_TOKEN": self.session_token} if self.session_token else {})


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the shards lie, seen through one endpoint."""

    store: ObjectStore
    prefix: str
    """Key prefix within the store, no slash at its end; empty for a folder."""
    endpoint: str
    """`http://host:port`, or `file` for a folder; the name under which its requests are counted."""

    def describe(self, key: str) -> str:
        return f"{key} from {self.endpoint}"


def open_place(
    url: str, endpoint: str | None, credentials: Credentials | None, settings: Storage, *, create: bool = False
) -> Place:
    """`url` is `s3://bucket/prefix` (then `endpoint` and `credentials` are needed) or a folder.

    Raises InputError for a folder that is not there.
    """
    where = parse_url(url)
    if not where.on_s3:
        folder = where.folder
        if not create and not folder.is_dir():
            raise InputError(f"no such folder: {folder}", hint="data.url is s3://bucket/prefix or a folder of shards")
        return Place(store=LocalStore(folder, mkdir=create), prefix="", endpoint="file")
    if endpoint is None or credentials is None:
        raise InputError(f"{url} needs an endpoint and credentials")
    store = S3Store(
        where.bucket,
        endpoint=endpoint,
        access_key_id=credentials.access_key_id,
        secret_access_key=credentials.secret_access_key,
        region=credentials.region,
        virtual_hosted_style_request=False,
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
            "timeout": timedelta(seconds=settings.timeout_s),
        },
        retry_config={"max_retries": 0},
        **({"session_token": credentials.session_token} if credentials.session_token else {}),  # type: ignore[arg-type]
    )
    return Place(store=store, prefix=where.path, endpoint=endpoint)


def explain(error: Exception, where: str) -> DrawbarError:
    """A store's exception in one line, told apart as far as obstore lets us: by type, then by its message."""
    text = str(error).strip() or type(error).__name__
    status = _STATUS.search(text)
    code = int(status.group(1)) if status else 0
    if isinstance(error, FileNotFoundError) or code == 404:
        what = "bucket" if "NoSuchBucket" in text else "object or bucket"
        return InputError(f"no such {what}: {where}")
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or code in (401, 403):
        return EnvironmentUnfit(
            f"access refused: {where}", hint="check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the bucket's policy"
        )
    if isinstance(error, PreconditionError) or code == 412:
        return DataError(f"object was replaced during the run: {where}")
    if "kind: Connect" in text or "error trying to connect" in text:
        return EnvironmentUnfit(
            f"endpoint does not answer: {where}", hint="is the store up (`drawbar s3 status`), the address right?"
        )
    if "kind: Timeout" in text or "operation timed out" in text:
        return EnvironmentUnfit(f"endpoint accepted but did not answer in time: {where}")
    return RunFailed(f"read failed: {where}: {text.splitlines()[0][:300]}")


class ShortBody(Exception):
    """The server closed the body early, or sent another range than asked, without an HTTP error."""


class CountedReader:
    """Ranged GETs through one endpoint, retried within a stated count, each recorded. Thread-safe."""

    def __init__(self, place: Place, settings: Storage, record: Callable[[Request], None]) -> None:
        self.place = place
        self._retries = settings.retries
        self._record = record
        self._lock = threading.Lock()
        self.planned_bytes = 0
        """Sum of the ranges of shards asked for, each once."""
        self.received_bytes = 0
        """Bodies of ranges of shards, failed tries included."""
        self.failed_bytes = 0
        """Of those, the ones of tries that failed (a short body)."""

    def get(self, key: str, start: int, end: int, *, kind: str = "data", e_tag: str | None = None) -> bytes:
        """Bytes [start, end) of an object, which must still be the version with this ETag where one is given.

        Raises InputError (not there), DataError (replaced), EnvironmentUnfit (refused, no answer) or RunFailed after
        the last try.
        """
        if kind == "data":
            with self._lock:
                self.planned_bytes += end - start
        attempt = 0
        while True:
            try:
                return self._try(key, start, end, kind, attempt, e_tag)
            except (BaseError, ShortBody, OSError) as error:
                if isinstance(error, _PERMANENT) or attempt >= self._retries:
                    if kind == "data":
                        # Will not arrive: it must not count as missing in the byte balance.
                        with self._lock:
                            self.planned_bytes -= end - start
                    raise explain(error, self.place.describe(key)) from error
            attempt += 1
            # Full jitter, so that ranks that failed together do not come back together.
            time.sleep(random.uniform(0.5, 1.0) * min(_LAST_BACKOFF_S, _FIRST_BACKOFF_S * 2**attempt))

    def _try(self, key: str, start: int, end: int, kind: str, attempt: int, e_tag: str | None) -> bytes:
        begin_t = time.perf_counter()
        first_byte_s, got, error = 0.0, 0, ""
        try:
            options: obstore.GetOptions = {"range": (start, end)}
            if e_tag is not None:
                options["if_match"] = e_tag
            response = obstore.get(self.place.store, key, options=options)
            first_byte_s = time.perf_counter() - begin_t
            body = response.bytes().to_bytes()
            got = len(body)
            if got != end - start:
                raise ShortBody(f"asked for {end - start} bytes, got {got}")
            return body
        except BaseException as caught:
            error = f"{type(caught).__name__}: {str(caught).strip()[:300]}"
            raise
        finally:
            if kind == "data":
                with self._lock:
                    self.received_bytes += got
                    self.failed_bytes += got if error else 0
            self._record(
                Request(
                    endpoint=self.place.endpoint,
                    key=key,
                    kind=kind,
                    offset=start,
                    wanted_bytes=end - start,
                    got_bytes=got,
                    first_byte_s=first_byte_s,
                    total_s=time.perf_counter() - begin_t,
                    attempt=attempt,
                    error=error,
                )
            )


def endpoint_of_rank(endpoints: list[str], rank: int) -> str:
    """The ECS study's rule: rank modulo the number of endpoints."""
    return endpoints[rank % len(endpoints)]
