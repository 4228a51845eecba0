"""Which S3 address a command on data sets uses, and with which keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drawbar.errors import EnvironmentUnfit
from drawbar.storage import embedded
from drawbar.storage.environment import Credentials, named_endpoint


@dataclass(frozen=True, kw_only=True)
class Address:
    endpoint: str | None
    """`http://host:port`; None: not known, which whoever opens the place reports."""
    credentials: Credentials
    store: embedded.EmbeddedStore | None
    """Where it is one of ours."""


def find_address(endpoint: str | None, store_dir: Path | None) -> Address:
    """`endpoint`, where one is given; else the embedded store's first, where one is running; else AWS_ENDPOINT_URL
    or S3_ENDPOINT.

    `store_dir` is the folder of the embedded store, None: the default one; naming it asks for that store. The store's
    own keys go with its addresses, AWS's variables with all others. Raises EnvironmentUnfit where keys are missing, or
    the store asked for does not run.
    """
    foreign = endpoint or (None if store_dir else named_endpoint() or None)
    try:
        store = embedded.find(store_dir or embedded.DEFAULT_DIRECTORY)
    except EnvironmentUnfit:
        if foreign is None:
            raise
        store = None
    if store is not None and (foreign is None or foreign in store.endpoints):
        keys = Credentials(access_key_id=store.access_key_id, secret_access_key=store.secret_access_key)
        return Address(endpoint=foreign or store.endpoints[0], credentials=keys, store=store)
    return Address(endpoint=foreign, credentials=Credentials.from_environment(), store=None)
