"""Where a run's bytes come from: one place, which is a bucket seen through one endpoint, or a folder.

obstore does the talking, for every kind of store alike. Its own retries are set to 0, because those cannot be counted:
`reader` has ours.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, ObjectStore, S3Store

from drawbar.config import Storage
from drawbar.errors import EnvironmentUnfit, InputError
from drawbar.storage.environment import Connection, Credentials
from drawbar.storage.urls import Location, parse_url

_NO_RETRIES: Any = {"max_retries": 0}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the shards lie, seen through one endpoint."""

    store: ObjectStore
    prefix: str
    """Key prefix within the store, no slash at its end; empty for a folder."""
    endpoint: str
    """`http://host:port`; `gs` or `az` for those clouds, `file` for a folder. Its requests are counted under it."""

    def describe(self, key: str) -> str:
        return f"{key} from {self.endpoint}"


def open_place(
    url: str, endpoint: str | None, credentials: Credentials | None, settings: Storage, *, create: bool = False
) -> Place:
    """`url` is `s3://bucket/prefix` (then `endpoint` and `credentials` are needed), `gs://…`, `az://…` or a folder.

    Nothing is asked of the store yet. Raises InputError for a folder that is not there, EnvironmentUnfit for an
    environment that no store can be opened with.
    """
    where = parse_url(url)
    if where.is_folder:
        folder = where.folder
        if not create and not folder.is_dir():
            raise InputError(f"no such folder: {folder}", hint="data.url is s3://bucket/prefix or a folder of shards")
        return Place(store=LocalStore(folder, mkdir=create), prefix="", endpoint="file")
    if not where.on_s3:
        return Place(store=_other_cloud(where, settings), prefix=where.path, endpoint=where.scheme)
    if endpoint is None or credentials is None:
        raise InputError(f"{url} needs an endpoint and credentials")
    return Place(
        store=_s3_store(where.bucket, endpoint, credentials, settings), prefix=where.path, endpoint=endpoint.rstrip("/")
    )


def _s3_store(bucket: str, endpoint: str, credentials: Credentials, settings: Storage) -> S3Store:
    virtual = settings.addressing == "virtual"
    # obstore fills what it is not given from the environment: a token of other keys must not get in.
    token = credentials.session_token or ("" if os.environ.get("AWS_SESSION_TOKEN") else None)
    more: dict[str, Any] = {} if token is None else {"session_token": token}
    return S3Store(
        bucket,
        endpoint=_with_bucket(endpoint, bucket) if virtual else endpoint,
        access_key_id=credentials.access_key_id,
        secret_access_key=credentials.secret_access_key,
        region=credentials.region,
        virtual_hosted_style_request=virtual,
        client_options=_client_options(settings, allow_http=endpoint.startswith("http://")),
        retry_config=_NO_RETRIES,
        **more,
    )


def _with_bucket(endpoint: str, bucket: str) -> str:
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{bucket}.{parts.netloc}"


def _other_cloud(where: Location, settings: Storage) -> ObjectStore:
    """Keys and addresses come from the environment, by the names of those clouds' own tools."""
    options = _client_options(settings, allow_http=True)
    try:
        if where.scheme == "gs":
            return GCSStore(where.bucket, client_options=options, retry_config=_NO_RETRIES)
        return AzureStore(where.bucket, client_options=options, retry_config=_NO_RETRIES)
    except (BaseError, ValueError) as error:
        names = "GOOGLE_APPLICATION_CREDENTIALS" if where.scheme == "gs" else "AZURE_STORAGE_ACCOUNT_NAME and its key"
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EnvironmentUnfit(
            f"cannot open {where.scheme}://{where.bucket}: {first_line[:300]}", hint=f"{names} must be set"
        ) from None


def _client_options(settings: Storage, *, allow_http: bool) -> Any:
    connection = Connection.of(settings)
    options: dict[str, Any] = {
        "allow_http": allow_http,
        "connect_timeout": timedelta(seconds=connection.connect_timeout_s),
        "read_timeout": timedelta(seconds=connection.timeout_s),
        "timeout": timedelta(seconds=settings.whole_timeout_s),
    }
    if not connection.verify_tls:
        options["allow_invalid_certificates"] = True
    if connection.ca_files:
        options["root_certificate"] = connection.ca_pem()
    return options
