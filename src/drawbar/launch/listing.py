"""The shard list of a run, with a store's hiccups retried and its errors in one line."""

from __future__ import annotations

import time
from collections.abc import Callable

from drawbar.dataset.listing import Listing, list_shards
from drawbar.errors import DrawbarError, RunFailed
from drawbar.storage.failures import explain
from drawbar.storage.stores import Place

_TRIES = 4
_PAUSE_S = 0.3


def list_place(place: Place, url: str, read: Callable[[str, int], bytes] | None = None, pattern: str = "") -> Listing:
    """Raises InputError, EnvironmentUnfit, DataError, or RunFailed after the last try."""
    for attempt in range(1, _TRIES + 1):
        try:
            return list_shards(place.store, place.prefix, read, pattern, shown=url)
        except DrawbarError:
            raise
        except Exception as error:
            explained = explain(error, f"{url} at {place.endpoint}" if place.endpoint != "file" else url)
            # Only what may pass by itself is asked again: not a refusal, not a missing bucket.
            if attempt == _TRIES or not isinstance(explained, RunFailed):
                raise explained from error
            time.sleep(_PAUSE_S * 2**attempt)
    raise AssertionError("unreachable")
